"""torchrun of `run_ranks`."""

import gc
import os
import signal
import subprocess
import sys
import time

import pytest

from launcher.distributed.processes import process_start
from launcher.distributed.spawn import TORCHRUN
from tests import REPOSITORY


class _OfParent:
    def __init__(self, file):
        self.file, self.itself = file, self

    def __del__(self):
        self.file.write_text(str(os.getpid()))


def test_a_forked_process_does_not_collect_the_garbage_of_its_parent(tmp_path):
    """A process group of gloo in a reference cycle joined threads that were not copied: a loader
    process ended with a segmentation fault."""
    file, enabled = tmp_path / "process", gc.isenabled()
    gc.disable()
    try:
        _OfParent(file)
        child = os.fork()
        if child == 0:
            gc.collect()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert not file.exists()
        gc.collect()
        assert file.read_text() == str(os.getpid())
    finally:
        if enabled:
            gc.enable()


@pytest.mark.slow
def test_torchrun_is_ended_without_a_traceback(tmp_path):
    """`launcher selftest` ends it after Ctrl-C."""
    rank = tmp_path / "rank.py"
    # torchrun leaves a rank behind if it gets the signal while it starts this rank
    rank.write_text("import time\ntime.sleep(2)\nprint('ready', flush=True)\ntime.sleep(1000)")
    process = subprocess.Popen(
        [*TORCHRUN, "--nproc-per-node=1", rank],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n", sys.executable
        process.terminate()
        assert process.communicate(timeout=100) == ("", "")
        assert process.returncode == 143
    finally:
        process.kill()


RANK = """
import os, sys, time
from launcher.distributed.spawn import rank_main
def run(setting):
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(1000)
rank_main(run)
"""
GUARDED = """
import os, sys, time
from launcher.distributed.environment import read_environment
from launcher.reliability.signals import StartGuard, StopRequest
with StopRequest() as stop:
    StartGuard(stop, read_environment())
    print(os.getppid(), os.getpid(), flush=True)
    time.sleep(1000)
"""
STARTS = {
    "ranks": "run_ranks('ranks', {}, ranks=1, console=True)",
    "sweep": "LocalSweep._start(sweep, Path('run'), 1, []).wait()",
    "guard": "os.execvp(TORCHRUN[0], [*TORCHRUN, '--nproc-per-node=1', 'guard.py'])",
}


@pytest.mark.parametrize(
    ("start", "killed"),
    [
        ("ranks", 0),
        ("sweep", 0),
        pytest.param("ranks", 1, marks=pytest.mark.long),
        pytest.param("guard", 0, marks=pytest.mark.long),
    ],
)
def test_processes_end_with_the_one_that_started_them(start, killed, tmp_path):
    """SIGKILL of a self-test or a sweep left ranks computing: of the process that starts them, or of
    the torchrun in between. So did that of an agent whose ranks had no watchdog yet."""
    (tmp_path / "ranks.py").write_text(RANK)
    (tmp_path / "guard.py").write_text(GUARDED)
    code = (
        "import os, sys, types\nfrom pathlib import Path\n"
        "from launcher.cli.sweep import LocalSweep\n"
        "from launcher.distributed.spawn import TORCHRUN, run_ranks\n"
        "shown = 'import os, time; print(os.getppid(), os.getpid(), flush=True); time.sleep(1000)'\n"
        "sweep = types.SimpleNamespace(runs={Path('run'): [sys.executable, '-c', shown]})\n"
        + STARTS[start]
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    started = []
    try:
        while len(words := process.stdout.readline().split()) != 2 or not words[0].isdecimal():
            assert process.poll() is None
        started = [int(word) for word in words]
        os.kill([process.pid, started[0]][killed], signal.SIGKILL)
        deadline = time.monotonic() + 120
        while any(map(process_start, started)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(process_start, started))
    finally:
        for each in (process.pid, *started):
            if process_start(each) is not None:
                os.kill(each, signal.SIGKILL)
        process.wait()


WITH_LOADERS = """
import multiprocessing, signal, time
from launcher.distributed.spawn import end_process

def failed(*_):
    raise RuntimeError("DataLoader worker is killed by signal")

if __name__ == "__main__":
    for _ in range(8):
        multiprocessing.Process(target=time.sleep, args=(60,)).start()
    signal.signal(signal.SIGCHLD, failed)  # as torch's loader does
    end_process(3)
"""


def test_loader_processes_that_are_killed_at_the_end_raise_no_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(WITH_LOADERS)
    ended = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, timeout=60, cwd=REPOSITORY
    )
    assert (ended.returncode, ended.stderr) == (3, "")


NOISY = """
import os, sys, warnings
from launcher.distributed.spawn import rank_main
def run(setting):
    print("progress", flush=True)
    os.write(2, b"a warning of C++\\n")
    warnings.warn("a warning")
    return 5
rank_main(run)
"""


@pytest.mark.slow
def test_warnings_of_ranks_are_not_on_the_console(tmp_path):
    """One of DDP about strides came between the dots of the self-test."""
    (tmp_path / "noisy.py").write_text(NOISY)
    code = (
        "from launcher.distributed.spawn import run_ranks\n"
        "ended = run_ranks('noisy', {}, ranks=1, console=True)\n"
        "print(ended.result, 'a warning of C++' in ended.printed, 'UserWarning' in ended.printed)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{REPOSITORY}:{tmp_path}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout == "progress\n5 True True\n"
