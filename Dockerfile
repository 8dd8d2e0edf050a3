# An image with the launcher and the versions of constraints.txt, on GPUs:
#   docker build -t launcher .
#   docker run --gpus all --shm-size 8g -v "$PWD:/work" launcher doctor
# torch's wheels bring CUDA's libraries and NCCL, so the base image without them is enough.
FROM nvidia/cuda:13.0.2-base-ubuntu24.04

# g++ and Python's headers: torch.compile. Versions of Ubuntu's packages are not pinned: old ones are removed
# from its archive, and the image would no longer build.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/launcher/bin:$PATH \
    PYTHONUNBUFFERED=1
WORKDIR /opt/source
# The dependencies first: this layer is built again only if they change
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY launcher/__init__.py launcher/__init__.py
COPY recipes recipes
COPY slurm slurm
RUN python3 -m venv /opt/launcher \
    && pip install --no-cache-dir --constraint constraints.txt . \
    && pip uninstall --yes launcher
COPY launcher launcher
RUN pip install --no-cache-dir --no-deps .

# ubuntu, a user of the base image. /work is the folder for data and runs: mount yours there
USER 1000
WORKDIR /work
ENTRYPOINT ["launcher"]
CMD ["--help"]
