"""Host memory limits and usage, read from simulated files of the kernel."""

import mmap

import pytest

from launcher.distributed import host_memory

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
