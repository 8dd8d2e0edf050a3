"""Compiles the fake CUDA libraries against the headers of PyTorch's CUDA build."""

import fcntl
import hashlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

SOURCES = sorted(Path(__file__).parent.glob("*.[ch]"))
SITE = Path(importlib.util.find_spec("torch").origin).parents[1]
LIBRARY = re.compile(
    r"(__cuda|cuda[A-Z]|cu[A-Z]|cublas|cudnn|cufft|cupti|cusolver|cusparse|nccl|nvml)\w*"
)


def build(folder: Path) -> Path:
    """Compiles the library for LD_PRELOAD; its folder is for LD_LIBRARY_PATH.

    It is compiled once per PyTorch version and state of the sources. Its soname is libcuda.so.1, so
    that programs which open the driver's library get it, too.
    """
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    for source in [Path(__file__), *SOURCES]:
        digest.update(source.read_bytes())
    target = folder / f"nullgpu-{digest.hexdigest()[:16]}"
    library = target / "libcuda.so.1"
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as lock:  # of test processes that start at the same time
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _build(target, library)
    return library


def _build(target: Path, library: Path) -> None:
    (target / "nv").mkdir(exist_ok=True)
    (target / "nv/target").touch()  # cuda_fp16.h includes it, but only C++ uses it
    options = [
        "-O1",
        "-fPIC",
        "-Wall",
        "-Werror",
        *(f"-I{path}" for path in [*_include_folders(), target]),
    ]
    objects = [_compile(source, target, options) for source in SOURCES if source.suffix == ".c"]
    stubs = target / "stubs.c"
    stubs.write_text(
        _stubs(needed=_needed_functions(), defined=_symbols("--defined-only", *objects))
    )
    objects.append(_compile(stubs, target, ["-O1", "-fPIC", "-fno-builtin"]))
    part = f"{library}.part"
    shared = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", part, *objects]
    _run(*shared)
    # Triton links its launchers with -lcuda; PyTorch opens NVML by its name
    for name in ("libcuda.so", "libnvidia-ml.so.1"):
        (target / name).unlink(missing_ok=True)
        (target / name).symlink_to("libcuda.so.1")
    Path(part).rename(library)


def _include_folders() -> list[Path]:
    headers = ("cuda_runtime_api.h", "nccl.h", "cudnn.h", "cublasLt.h")
    found = {path.parent for name in headers for path in SITE.glob(f"nvidia/**/include/{name}")}
    # Triton includes the runtime's headers, which some of PyTorch's packages lack
    return [*sorted(found), SITE / "triton/backends/nvidia/include"]


def _needed_functions() -> set[str]:
    """CUDA functions that PyTorch imports or opens by name, and all driver functions for Triton."""
    imported = _symbols("--undefined-only", *SITE.glob("torch/lib/*.so"))
    allocator = (SITE / "torch/lib/libc10_cuda.so").read_bytes()
    management = {name.decode() for name in re.findall(rb"\0(nvml[A-Z]\w+)(?=\0)", allocator)}
    header = (SITE / "triton/backends/nvidia/include/cuda.h").read_text()
    driver = set(re.findall(r"CUDAAPI (cu[A-Z]\w*)\(", header))
    return {name for name in imported | driver | management if LIBRARY.fullmatch(name)}


def _symbols(which: str, *files: Path) -> set[str]:
    dynamic = ["-D"] if files[0].suffix == ".so" else []
    lines = _run("nm", *dynamic, which, *files).splitlines()
    return {
        line.split()[-1].partition("@")[0]
        for line in lines
        if line.split() and not line.endswith(":")
    }


def _stubs(*, needed: set[str], defined: set[str]) -> str:
    """C code of functions that do nothing, log their first call and return success."""
    declaration = "void log_event(const char *format, ...);\n"
    body = '{ static int seen; if (!seen++) log_event("stub %s"); return 0; }'
    return declaration + "".join(
        f"long {name}(void) {body % name}\n" for name in sorted(needed - defined)
    )


def _compile(source: Path, target: Path, options: list[str]) -> Path:
    compiled = target / f"{source.stem}.o"
    _run("gcc", *options, "-c", source, "-o", compiled)
    return compiled


def _run(*command: str | Path) -> str:
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=400
    )
    if done.returncode:
        raise RuntimeError(f"{command[0]} failed:\n{done.stderr[-4000:]}")
    return done.stdout


if __name__ == "__main__":
    print(build(Path(sys.argv[1])))
