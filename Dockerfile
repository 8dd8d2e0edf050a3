# An image for GPUs with the launcher and the package versions of constraints.txt:
#   docker build -t launcher .
#   docker build -t launcher --build-arg EXTRAS=all,s3 .      # also reads and writes s3://
#   docker run --gpus all --shm-size 8g -v "$PWD:/work" launcher doctor
# torch's wheels contain the CUDA libraries and NCCL, so a base image without them is enough.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# torch.compile needs g++ and Python's headers. Versions of Ubuntu packages are not pinned, because
# old versions are removed from Ubuntu's archive and the image would no longer build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/launcher/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /opt/source
ARG EXTRAS=all
# Install the dependencies first, so that this layer is rebuilt only if they change
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY launcher/__init__.py launcher/__init__.py
COPY recipes recipes
COPY slurm slurm
RUN python3 -m venv /opt/launcher \
    && pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]" \
    && pip uninstall --yes launcher
COPY launcher launcher
RUN pip install --no-cache-dir --no-deps .

# UID 1000 is the user `ubuntu` of the base image. Mount your folder with data and runs on /work
USER 1000
WORKDIR /work
ENTRYPOINT ["launcher"]
CMD ["--help"]
