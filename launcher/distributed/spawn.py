"""Starts ranks under torchrun, and ends processes. Standard library only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from launcher.console import prepare_streams
from launcher.distributed.environment import read_environment
from launcher.errors import message_of

_QUIET_TORCHRUN = """import logging, sys
logging.disable(logging.WARNING)
from torch.distributed.elastic.multiprocessing.api import SignalException
from launcher.distributed.torchrun import main
try:
    main()
except SignalException as error:
    sys.exit(128 + error.sigval)
"""
"""torchrun without its warnings and traceback for SIGTERM."""
TORCHRUN = (sys.executable, "-c", _QUIET_TORCHRUN, "--standalone")
_SHUTDOWN_SECONDS = 45
"""torchrun gives its ranks 30 seconds to end."""
_prctl = getattr(ctypes.CDLL(None), "prctl", None)  # here: a forked process should load nothing
# A forked process must not collect its parent's garbage. A process group in a reference cycle would
# join its threads, which a fork does not copy (gloo in torch 2.13: a segmentation fault)
os.register_at_fork(after_in_child=gc.freeze)
kernel_exit = os._exit
"""`os._exit`. A rank replaces it, to notice when other code calls it: `reliability/failures.py`."""


@dataclass(frozen=True)
class RanksEnded:
    """How the ranks of `run_ranks` ended."""

    result: Any
    """What rank 0 returned; None if it failed or was not done in time."""
    error: str | None
    """The first exception of a rank, with its traceback."""
    status: int | None
    """torchrun's exit status; None: out of time."""
    printed: str
    """What the ranks printed; where they had the console, only to standard error."""


def run_ranks(
    module: str,
    setting: Mapping[str, object],
    *,
    ranks: int,
    seconds: float | None = None,
    variables: Mapping[str, str] = os.environ,
    console: bool = False,
) -> RanksEnded:
    """Runs `python -m MODULE SETTING` in `ranks` processes of this machine, under torchrun, for at
    most `seconds`. The module calls `rank_main`; the setting is passed as JSON. With `console` the
    standard output of the ranks is the console, but not their standard error, which has warnings."""
    environment = {"LOGLEVEL": "ERROR", **variables}  # without torchrun's warnings
    with tempfile.TemporaryDirectory(prefix="launcher-ranks-") as folder:
        file, log = Path(folder, "result"), Path(folder, "log")
        argument = json.dumps({**setting, "result": str(file)})
        command = [*TORCHRUN, f"--nproc-per-node={ranks}", "-m", module, argument]
        with log.open("w") as output:
            stdout = None if console else output
            # In a process group of its own: Ctrl-C reaches only this process, which ends torchrun
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=stdout,
                stderr=output,
                process_group=0,
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:  # torchrun ends its ranks: each is in a session of its own
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SHUTDOWN_SECONDS)
                process.kill()
                process.wait()
        result = json.loads(file.read_text()) if file.exists() else None
        errors = sorted(Path(folder).glob("error_*"), key=lambda error: error.stat().st_mtime_ns)
        error = errors[0].read_text() if errors else None
        return RanksEnded(result, error, status, log.read_text(errors="replace"))


def rank_main(run: Callable[[Any], object]) -> None:
    """The main program of a module for `run_ranks`, which returns what `run` returns on rank 0."""
    prepare_streams()
    environment = read_environment()
    if environment.torchrun:
        end_with_parent(environment.parent)
    setting = json.loads(sys.argv[1])
    file = Path(setting["result"])
    try:
        result = run(setting)
    except Exception as error:  # whatever it is, the process that started the ranks reports it
        text = f"{type(error).__name__}: {message_of(error)}\n{traceback.format_exc()}"
        file.with_name(f"error_{os.getpid()}").write_text(text)
        raise
    if environment.main:
        file.write_text(json.dumps(result))


def end_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Makes the kernel send this process a signal when its parent, a process id, ends (prctl(2),
    PR_SET_PDEATHSIG; a program that this process executes keeps the setting). Ends at once if the
    parent has ended already. For the kernel, the thread that starts a process is its parent."""
    if _prctl is not None:  # on Linux
        _prctl(1, number)
    if os.getppid() != parent:
        kernel_exit(1)


def end_process(status: int) -> NoReturn:
    """Ends at once, with the loader processes; no clean-up that may wait for lost ranks."""
    # torch's handler raises an error in this thread for each loader process that is killed
    with contextlib.suppress(ValueError):  # in another thread than the first there is none
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for child in multiprocessing.active_children():
        child.kill()  # they ignore SIGTERM
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # nothing may keep the process from ending
            stream.flush()
    kernel_exit(status)
