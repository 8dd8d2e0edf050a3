"""Host memory limits and usage, read from simulated files of the kernel."""

import json
import mmap
import statistics
import subprocess
import sys
from types import SimpleNamespace

import pytest

from launcher.distributed import host_memory
from tests import REPOSITORY

GIB = 2**30


@pytest.fixture
def write(tmp_path, monkeypatch):
    """A function that writes simulated files of the kernel."""
    monkeypatch.setattr(host_memory, "_ROOT", tmp_path)

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_available_memory_is_the_smallest_limit(write):
    memory = f"MemTotal: {9 * GIB // 1024} kB\nMemAvailable:   {8 * GIB // 1024} kB\n"
    write({"proc/meminfo": memory, "proc/self/cgroup": "0::/job/step\n"})
    assert (host_memory.available(), host_memory.allowed()) == (8 * GIB, 9 * GIB)
    group = "sys/fs/cgroup/job"
    limits = {"step/memory.max": "max", "memory.max": f"{4 * GIB}", "memory.current": f"{GIB}"}
    write({f"{group}/{name}": f"{text}\n" for name, text in limits.items()})
    assert host_memory.available() == 3 * GIB, "the limit of a parent group applies"
    assert host_memory.allowed() == 4 * GIB


def test_cgroup_version_1_is_read(write):
    group = "sys/fs/cgroup/memory/slurm/job_7/memory"
    files = {
        "proc/self/cgroup": "9:cpu:/a\n4:memory:/slurm/job_7\n",
        f"{group}.limit_in_bytes": "1000\n",
        f"{group}.usage_in_bytes": "400\n",
        f"{group}.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n",
    }
    write(files)
    assert host_memory.available() == 600
    assert set(host_memory.killed().values()) == {2}


def test_out_of_memory_kills_are_detected(write):
    write({"proc/self/cgroup": "0::/job\n", "proc/vmstat": "pgfault 12\noom_kill 5\n"})
    write({"sys/fs/cgroup/job/memory.events": "oom 1\noom_kill 0\n"})
    before = host_memory.killed()
    assert sorted(before.values()) == [0, 5]
    assert not host_memory.killed_since(before)
    write({"sys/fs/cgroup/job/memory.events": "oom 9\noom_kill 1\n"})
    assert host_memory.killed_since(before)


def test_missing_kernel_files_give_no_values(write):
    assert host_memory.available() is None
    assert host_memory.killed() == {}
    assert not host_memory.killed_since({})


def test_take_peak_returns_peak_since_last_call():
    size = 64 * 2**20
    host_memory.take_peak()
    begin = host_memory.resident()
    with mmap.mmap(
        -1, size
    ) as block:  # new pages; Python may reuse freed memory for other allocations
        for page in range(0, size, mmap.PAGESIZE):
            block[page] = 1
    assert host_memory.take_peak() >= begin + size // 2
    try:
        open("/proc/self/clear_refs", "w").close()
    except OSError:
        pytest.skip("the kernel does not allow resetting the peak here")
    assert host_memory.take_peak() < begin + size // 2


FREED = """
import resource
import sys
import torch
from launcher.distributed import host_memory

def step(megabytes):
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(size << 18) for size in (3, 5, 7, 11, 13) * 3]  # float32: 4 to 13 MiB
    more = torch.ones(megabytes << 18)
    del held, more
    freed.step_done()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults

torch.set_num_threads(1)
host_memory.return_freed_memory()
host_memory._MORE = 2.0  # how much the heap of this process fragments does not matter here
freed = host_memory.FreedMemory()
if "short" in sys.argv:
    host_memory.available = lambda: 1 << 20
faults = [step(8) for _ in range(8)]
print(faults, host_memory.resident(), freed._limit, freed._glibc is None)
"""


def freed(*words):
    result = subprocess.run(
        [sys.executable, "-c", FREED, *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    lists, _, rest = result.stdout.strip().rpartition("]")
    resident, limit, returned = rest.split()
    return json.loads(f"{lists}]"), int(resident), float(limit), returned == "True"


@pytest.mark.slow
def test_freed_memory_is_kept_for_the_next_step():
    """A step of an unchanged size has no more than a tenth of the page faults."""
    faults, resident, limit, returned = freed()
    assert not returned
    assert statistics.median(faults[4:]) < min(faults[:2]) / 10, (
        faults
    )  # the heap may grow once more
    assert resident <= limit


@pytest.mark.slow
def test_freed_memory_goes_back_where_memory_is_short():
    faults, *_, returned = freed("short")
    assert returned
    assert min(faults[4:]) > max(faults[:2]) / 2, faults


def test_freed_memory_goes_back_if_it_is_more_than_the_run_needs(monkeypatch):
    gone = []
    keeping = host_memory.FreedMemory()
    keeping._glibc = SimpleNamespace(
        mallopt=lambda *setting: gone.append(setting), malloc_trim=lambda pad: gone.append("trim")
    )
    monkeypatch.setattr(host_memory, "available", lambda: 1 << 50)
    monkeypatch.setattr(host_memory, "largest_peak", lambda: 1000)
    residents = iter([1050, 1051])
    monkeypatch.setattr(host_memory, "resident", lambda: next(residents))
    keeping.step_done()
    assert not gone, "the first step has no state of the optimizer"
    keeping.step_done()
    assert gone == [(-3, 32 << 20), (-1, 1 << 30)]
    keeping.step_done()
    assert len(gone) == 2
    keeping.step_done()
    assert gone[2:] == [(-3, 2 << 20), (-1, 128 << 10), "trim"]
    keeping.step_done()
    assert len(gone) == 5
