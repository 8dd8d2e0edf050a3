"""A rank's environment variables; only this module reads torchrun's. Standard library only."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pwd
import stat
import sys
import tempfile
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, replace
from pathlib import Path

from launcher.errors import RecipeError

REPORT_SECONDS = 120
"""Seconds by which NCCL's timeouts are longer than those of the launcher: NCCL ends the process, so
the launcher must have reported the failure before."""
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """This process's rank, as torchrun gives it; a process without torchrun is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    torchrun: bool = False
    """Whether torchrun has started this process. Its agent hosts the store, and restarts the
    workers after any exit status but 0."""
    restart_count: int = 0
    """How often torchrun's agent has restarted the workers."""
    restarts_left: int = 0
    error_file: str | None = None
    """Where torchrun's agent looks for the reason of a failure."""
    parent: int = 0
    """Process id of the parent: under torchrun, its agent."""
    run_id: str | None = None
    """torchrun's --rdzv-id; `none` if it was not given."""
    meeting_point: str | None = None
    """HOST:PORT of the ranks' store."""
    job: str | None = None
    """Slurm's job id. In a job of `launcher submit`: of the first job of its chain."""
    job_restart_count: int = 0
    """How often the job was requeued by Slurm or continued by a successor."""
    refusal_file: str | None = None
    """Where the job's script looks for a refusal; it then does not try again."""

    @property
    def restarted(self) -> bool:
        """Whether torchrun's agent or Slurm started the same job again."""
        return self.restart_count > 0 or self.job_restart_count > 0

    @property
    def several_nodes(self) -> bool:
        """Whether the ranks are on several nodes."""
        return self.local_world_size < self.world_size

    @property
    def main(self) -> bool:
        """Whether this is the rank that prints and writes for all."""
        return self.rank == 0

    def tell_agent(self, reason: str) -> None:
        """Makes torchrun's agent print the reason of a failure at its end."""
        message = {"message": reason, "extraInfo": {"timestamp": str(int(time.time()))}}
        _write(self.error_file, json.dumps({"message": message}))

    def tell_job(self, refusal: str) -> None:
        """Makes the job's script end: torchrun's exit status does not show a refusal."""
        _write(self.refusal_file, refusal + "\n")


def _write(file: str | None, text: str) -> None:
    if file is not None:
        with contextlib.suppress(OSError):
            Path(file).write_text(text)


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """The rank of this process.

    Raises RecipeError if torchrun's variables are incomplete or not integers, or if srun started
    several tasks without torchrun: each would train its own model into the same folder.
    """
    restarts = variables.get("LAUNCHER_START") or variables.get("SLURM_RESTART_COUNT", "0")
    single = Environment(
        parent=os.getppid(),
        job=variables.get("LAUNCHER_JOB") or variables.get("SLURM_JOB_ID") or None,
        job_restart_count=int(restarts) if restarts.isdigit() else 0,
        refusal_file=variables.get("LAUNCHER_REFUSED") or None,
    )
    given = [name for name in _RENDEZVOUS if variables.get(name)]
    if "RANK" not in given and "WORLD_SIZE" not in given:
        tasks = variables.get("SLURM_STEP_NUM_TASKS", "1")
        if tasks.isdigit() and int(tasks) > 1:
            raise RecipeError(
                f"srun started {tasks} tasks, but not through torchrun: each would train alone. "
                "Start one torchrun a node: srun --ntasks-per-node=1 torchrun --nproc-per-node "
                "GPUS launcher/train.py"
            )
        return single
    if missing := ", ".join(name for name in _RENDEZVOUS if name not in given):
        hint = "start through torchrun, or unset them"
        raise RecipeError(f"{', '.join(given)} set, but not {missing}: {hint}")

    def integer(name: str, default: int = 0) -> int:
        text = variables.get(name) or str(default)
        try:
            return int(text)
        except ValueError:
            problem = f"{name}={text}: must be an integer; start through torchrun, or unset it"
            raise RecipeError(problem) from None

    world_size, restart_count = integer("WORLD_SIZE"), integer("TORCHELASTIC_RESTART_COUNT")
    return replace(
        single,
        rank=integer("RANK"),
        world_size=world_size,
        local_rank=integer("LOCAL_RANK"),
        local_world_size=integer("LOCAL_WORLD_SIZE", world_size),
        torchrun="TORCHELASTIC_RUN_ID" in variables,
        error_file=variables.get("TORCHELASTIC_ERROR_FILE"),
        restart_count=restart_count,
        restarts_left=max(0, integer("TORCHELASTIC_MAX_RESTARTS") - restart_count),
        run_id=variables.get("TORCHELASTIC_RUN_ID"),
        meeting_point=f"{variables['MASTER_ADDR']}:{variables['MASTER_PORT']}",
    )


def alone(variables: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment without the variables of ranks and GPUs, for a process that only plans."""
    kept = {
        name: value
        for name, value in variables.items()
        if name not in (*_RENDEZVOUS, "LOCAL_WORLD_SIZE")
        and not name.startswith(("GROUP_", "ROLE_", "TORCHELASTIC_"))
    }
    return kept | {"CUDA_VISIBLE_DEVICES": ""}


def user_sets_threads(environment: Environment) -> bool:
    """Whether the user has set OMP_NUM_THREADS. torchrun sets it to 1 for several ranks of a node
    if it is not in its own environment, which the kernel shows as it was at its start."""
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads in (None, "1") and environment.torchrun:
        try:
            started_with = Path(f"/proc/{environment.parent}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return b"OMP_NUM_THREADS=1" in started_with
    return threads is not None


def prepare_cuda(variables: MutableMapping[str, str] = os.environ, *, deterministic: bool) -> None:
    """Settings that CUDA reads once at its start. Must be called before torch is imported.

    Growing segments lose less memory to fragmentation; a user's own allocator setting stays.
    """
    if "PYTORCH_ALLOC_CONF" not in variables and "PYTORCH_CUDA_ALLOC_CONF" not in variables:
        variables["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if deterministic:
        variables.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # Compiled kernels are not chosen by timing them
        variables.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


def segments_grow(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the allocator's segments of GPU memory can grow, as `prepare_cuda` sets it."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:True" in variables.get(name, "") for name in names)


def prepare_nccl(
    log: Path, variables: MutableMapping[str, str] = os.environ, *, hang_timeout: int
) -> None:
    """Settings of NCCL's watchdog, which the user's own replace. Must be called before the process
    group exists.

    The watchdog ends a process in which it has been stuck for 480 s by default (torch 2.11 to
    2.13): only after the report of the hang. It writes the last collectives to files in `log`.
    """
    seconds = max(480, hang_timeout + REPORT_SECONDS)
    variables.setdefault("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", str(seconds))
    if "TORCH_NCCL_DEBUG_INFO_TEMP_FILE" not in variables:  # the older name; torch reads both
        variables.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(log.absolute() / "flight_recorder_"))


def prepare_openmp(variables: MutableMapping[str, str] = os.environ) -> None:
    """Lets threads of OpenMP sleep soon when they wait for each other, unless the user has said how
    they wait. Must be called before torch is imported.

    By default a thread of GNU's library spins 300,000 times. If another process has the core of the
    thread that it waits for, each operator then takes milliseconds.
    """
    if "OMP_WAIT_POLICY" not in variables:
        variables.setdefault("GOMP_SPINCOUNT", "1000")


def provide_caches(variables: MutableMapping[str, str] = os.environ) -> None:
    """If the user's folder for caches cannot be written to, as for another user in a container,
    gives this process, its libraries and its children a folder in the temporary directory.

    Must be called before torch and transformers are imported. What the user has set stays. Raises
    RecipeError if the folder cannot be used.
    """
    home = variables.get("HOME") or _home_of_user()
    exists = home is not None and os.path.isdir(home)
    own = variables.get("XDG_CACHE_HOME") or (f"{home}/.cache" if exists else None)
    if own is not None and (_can_write(own) or variables.get("XDG_CACHE_HOME")):
        return
    folder = _private_folder()
    hub = f"{home}/.cache/huggingface"
    if os.path.isdir(hub):  # what was downloaded earlier can be read
        variables.setdefault("HF_HOME", hub)
    variables["XDG_CACHE_HOME"] = str(folder)
    variables.setdefault("TRITON_HOME", str(folder))
    if not exists:
        variables["HOME"] = str(folder)
    if _home_of_user() is None:  # the user has no name, and torch asks for one
        variables.setdefault("USER", str(os.getuid()))


def _home_of_user() -> str | None:
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(os.getuid()).pw_dir
    return None


def _can_write(folder: str) -> bool:
    """Whether a folder can be written to, or created."""
    path = Path(folder)
    existing = next((each for each in (path, *path.parents) if each.exists()), path)
    return existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)


def _temporary_folder() -> Path:
    return Path(tempfile.gettempdir(), f"launcher-{os.getuid()}")


def _private_folder() -> Path:
    """A folder of this user in the temporary directory. Compiled code is loaded from it, so nobody
    else may write there. Raises RecipeError."""
    folder = _temporary_folder()
    what = "HOME cannot be written to, and neither can"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        state = folder.lstat()
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
            if not state.st_mode & 0o022:
                return folder
        what = "HOME cannot be written to, and others may write to"
    except OSError:
        pass
    raise RecipeError(f"{what} {folder}: set XDG_CACHE_HOME to a folder of yours for caches")


@functools.cache
def _note_temporary_cache(folder: Path) -> None:
    print(
        f"note: HOME cannot be written to, so caches are in {folder}; XDG_CACHE_HOME names a folder "
        "that stays",
        file=sys.stderr,
        flush=True,
    )


def cache_folder(cache: str | None, variables: Mapping[str, str] = os.environ) -> Path:
    """The folder of tokenized data, measured configurations and compiled graphs: `data.cache`."""
    if cache is not None:
        return Path(cache)
    folder = Path(variables.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    if folder == _temporary_folder() and variables.get("RANK", "0") == "0":
        _note_temporary_cache(folder)
    return folder / "launcher"


def set_compile_cache(
    cache: Path, environment: Environment, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Sets the folder of torch.compile's cache, unless the user has or this one cannot be written to:
    torch's own is in /tmp, and torch makes it when it is imported.

    Must be called before torch is imported. Its files are replaced atomically, so ranks and jobs on one
    machine may share them. On several nodes the folder is on each node: on a shared file system,
    hundreds of ranks that replace thousands of small files fail with stale file handles.
    """
    folder = cache.absolute() / "inductor"
    if environment.several_nodes:
        with contextlib.suppress(RecipeError):  # torch then uses its own folder, in /tmp too
            variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(_private_folder() / "inductor"))
        return
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if there.is_dir() and os.access(there, os.W_OK):
        variables.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
