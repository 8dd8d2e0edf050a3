"""Rank and world size from environment variables, the process group, and CUDA settings.

The tests pass the variables as an argument and do not change the environment.
"""

import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from launcher.distributed import environment, process_group
from launcher.distributed.environment import (
    Environment,
    cache_folder,
    prepare_cuda,
    prepare_nccl,
    prepare_openmp,
    provide_caches,
    read_environment,
)
from launcher.distributed.open_files import allow_open_files, too_few_open_files
from launcher.errors import EXIT_USAGE, RecipeError

RENDEZVOUS = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
    **RENDEZVOUS,
}


RANK_5 = Environment(
    rank=5,
    world_size=8,
    local_rank=1,
    local_world_size=4,
    torchrun=True,
    restart_count=2,
    run_id="none",
    meeting_point="node1:29500",
)
OTHER_LAUNCHER = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", **RENDEZVOUS}
RANK_1 = dataclasses.replace(
    Environment(),
    rank=1,
    world_size=2,
    local_rank=1,
    local_world_size=2,
    meeting_point="node1:29500",
)


@pytest.mark.parametrize(
    ("variables", "environment"),
    [
        (TORCHRUN, RANK_5),
        (TORCHRUN | {"SLURM_STEP_NUM_TASKS": "2"}, RANK_5),
        (OTHER_LAUNCHER, RANK_1),  # another launcher with torchrun's variables
        (
            {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "3"},
            Environment(job="7", job_restart_count=3),
        ),
        (  # a successor job uses the id of the first job
            {"SLURM_JOB_ID": "9", "LAUNCHER_JOB": "7", "LAUNCHER_START": "2"},
            Environment(job="7", job_restart_count=2),
        ),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "16"}, Environment(job="7")),
        ({"SLURM_STEP_NUM_TASKS": ""}, Environment()),
        ({"SLURM_STEP_NUM_TASKS": "1"}, Environment()),
    ],
)
def test_read_environment_of_each_launcher(variables, environment):
    read = read_environment(variables)
    assert read == dataclasses.replace(environment, parent=os.getppid())
    assert read.main == (environment.rank == 0)
    assert read.restarted == (environment.restart_count + environment.job_restart_count > 0)


def test_python_objects_are_exchanged_over_gloo(monkeypatch):
    """Without a GPU, sending an object to the device would raise."""
    assert process_group.BACKENDS["cuda"] == "cpu:gloo,cuda:nccl"
    single_process = Environment()

    def exchange(backends):
        monkeypatch.setitem(process_group.BACKENDS, "cpu", backends)
        with process_group.process_group(single_process, device="cpu", init_timeout=30) as (
            ranks,
            _,
        ):
            gathered, received, shared = [None], [None], [{"a": 1}]
            dist.all_gather_object(gathered, "mine", group=ranks.group)
            dist.broadcast_object_list(shared, group=ranks.group, group_src=0)
            dist.scatter_object_list(received, gathered, group=ranks.group, group_src=0)
            dist.gather_object("yours", gathered, group=ranks.group, group_dst=0)
            return gathered + received + shared

    assert exchange(process_group.BACKENDS["cuda"].replace("nccl", "gloo")) == [
        "yours",
        "mine",
        {"a": 1},
    ]
    if not torch.cuda.is_available():
        with pytest.raises((AssertionError, RuntimeError)):
            exchange("cuda:gloo")
        dist.destroy_process_group()


INTEGER = "must be an integer; start through torchrun, or unset it"


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"RANK": "0"},
            "RANK set, but not WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT: "
            "start through torchrun, or unset them",
        ),
        (
            {"WORLD_SIZE": "2", **RENDEZVOUS},
            "WORLD_SIZE, MASTER_ADDR, MASTER_PORT set, but not RANK, LOCAL_RANK: start through",
        ),
        (TORCHRUN | {"MASTER_ADDR": ""}, "RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT set, but not"),
        (TORCHRUN | {"RANK": "one"}, f"RANK=one: {INTEGER}"),
        (TORCHRUN | {"WORLD_SIZE": "8.0"}, f"WORLD_SIZE=8.0: {INTEGER}"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "x"}, f"LOCAL_WORLD_SIZE=x: {INTEGER}"),
        (
            {"SLURM_STEP_NUM_TASKS": "8"},
            "srun started 8 tasks, but not through torchrun: each would train alone. Start one",
        ),
    ],
)
def test_incomplete_and_invalid_variables_are_refused(variables, message):
    with pytest.raises(RecipeError, match=f"^{message}"):
        read_environment(variables)


def test_tell_agent_writes_the_error_file(tmp_path):
    file = tmp_path / "error.json"
    environment = read_environment(TORCHRUN | {"TORCHELASTIC_ERROR_FILE": str(file)})
    environment.tell_agent("the recipe is wrong")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=2, error_file=str(file))
    assert failure.message["message"] == "the recipe is wrong"
    missing_folder = dataclasses.replace(environment, error_file=str(tmp_path / "gone/error.json"))
    missing_folder.tell_agent("the folder does not exist")
    read_environment(TORCHRUN).tell_agent("no error file is requested")
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]


EXPANDABLE_SEGMENTS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
FIXED_KERNELS = {"TORCHINDUCTOR_DETERMINISTIC": "1"}
DEFAULT_WORKSPACE, USER_WORKSPACE = (
    {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
    {"CUBLAS_WORKSPACE_CONFIG": ":16:8"},
)


@pytest.mark.parametrize(
    ("before", "deterministic", "after"),
    [
        ({}, False, EXPANDABLE_SEGMENTS),
        ({}, True, EXPANDABLE_SEGMENTS | DEFAULT_WORKSPACE | FIXED_KERNELS),
        ({"PYTORCH_ALLOC_CONF": "backend:native"}, False, {"PYTORCH_ALLOC_CONF": "backend:native"}),
        (
            {"PYTORCH_CUDA_ALLOC_CONF": "x:1"},
            True,
            {"PYTORCH_CUDA_ALLOC_CONF": "x:1"} | DEFAULT_WORKSPACE | FIXED_KERNELS,
        ),
        (USER_WORKSPACE, True, EXPANDABLE_SEGMENTS | USER_WORKSPACE | FIXED_KERNELS),
    ],
)
def test_user_cuda_settings_are_kept(before, deterministic, after):
    variables = dict(before)
    prepare_cuda(variables, deterministic=deterministic)
    assert variables == after


class Group:
    """A process group with gloo and NCCL or gloo alone, as far as its timeouts go."""

    group_desc = "default_pg"

    def __init__(self, gpu):
        self._names = {"cpu": "gloo", "cuda": gpu}
        self._device_types = [torch.device("cpu"), torch.device("cuda")]
        self.seconds = {}

    def _get_backend(self, device):
        def set_timeout(timeout):
            self.seconds[device.type] = timeout.total_seconds()

        name = self._names[device.type]
        return SimpleNamespace(name=lambda: name, _set_default_timeout=set_timeout)


@pytest.mark.parametrize("timeout", [10, 600, 1800])
@pytest.mark.parametrize("hang_timeout", [1, 60, 480, 7200])
def test_a_hang_is_reported_before_nccl_ends_the_process(
    hang_timeout, timeout, monkeypatch, tmp_path
):
    """NCCL's watchdog ends a process if it is stuck itself, or if a collective takes too long."""
    variables = {}
    prepare_nccl(tmp_path, variables, hang_timeout=hang_timeout)
    heartbeat = int(variables["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"])
    assert heartbeat == {1: 480, 60: 480, 480: 600, 7200: 7320}[hang_timeout]

    def set_all(seconds, group):
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(seconds)

    nccl, gloo = Group("nccl"), Group("gloo")
    world = SimpleNamespace(pg_map={nccl: None, gloo: None})
    monkeypatch.setattr(dist.distributed_c10d, "_world", world)
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", set_all)
    process_group.set_timeout(timeout, hang_timeout=hang_timeout)
    assert nccl.seconds == {"cpu": timeout, "cuda": max(timeout, hang_timeout) + 120}
    assert gloo.seconds == {"cpu": timeout, "cuda": timeout}


def test_user_settings_of_nccl_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = {}
    prepare_nccl(Path("runs/log"), variables, hang_timeout=480)
    assert variables["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/runs/log/flight_recorder_"
    for file in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        user = {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "30", file: "/scratch/trace_"}
        variables = dict(user)
        prepare_nccl(Path("runs/log"), variables, hang_timeout=480)
        assert variables == user


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """Temporary files are in tmp_path, and folders named `read-only` cannot be written to, also by
    root."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    allowed = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: "read-only" not in str(path) and allowed(path, mode)
    )
    return tmp_path / f"launcher-{os.getuid()}"


def test_caches_have_a_place_without_a_home(tmp_path, temporary, monkeypatch, capsys):
    """As in `docker run --user`, and under OpenShift. One line says where."""
    home = tmp_path / "home"
    (tmp_path / "read-only/.cache/huggingface").mkdir(parents=True)
    for given in ({"HOME": str(home)}, {}, {"HOME": str(tmp_path / "read-only")}):
        monkeypatch.setattr(environment.pwd, "getpwuid", {}.__getitem__)  # no such user
        variables = dict(given)
        environment._note_temporary_cache.cache_clear()
        provide_caches(variables)
        before = dict(variables)
        provide_caches(variables)
        assert variables == before
        assert cache_folder(None, variables) == temporary / "launcher"
        assert cache_folder(None, variables) == temporary / "launcher"
        line = f"note: HOME cannot be written to, so caches are in {temporary}; XDG_CACHE_HOME "
        printed = capsys.readouterr()
        assert printed.err == line + "names a folder that stays\n"
        assert cache_folder("own", variables) == Path("own")
        read_only = "read-only" in given.get("HOME", "")
        assert variables["HOME"] == (given["HOME"] if read_only else str(temporary))
        hub = str(tmp_path / "read-only/.cache/huggingface") if read_only else None
        assert variables.get("HF_HOME") == hub  # earlier downloads can be read
        assert variables["USER"] == str(os.getuid())
    assert temporary.stat().st_mode & 0o777 == 0o700
    home.mkdir()
    for writable in ({"HOME": str(home)}, {"XDG_CACHE_HOME": str(tmp_path / "cache")}):
        variables = dict(writable)
        provide_caches(variables)
        assert variables == writable


def test_a_cache_that_others_can_write_to_is_refused(temporary):
    """Compiled code is loaded from it."""
    temporary.mkdir()
    temporary.chmod(0o777)
    with pytest.raises(
        RecipeError, match=r"others may write to .*: set XDG_CACHE_HOME to a folder"
    ):
        provide_caches({"HOME": "/no/such/folder"})
    temporary.rmdir()
    temporary.symlink_to(temporary.parent)
    with pytest.raises(RecipeError, match="set XDG_CACHE_HOME"):
        provide_caches({"HOME": "/no/such/folder"})


@pytest.fixture
def limits(monkeypatch):
    """The limits of open files by process, which `prlimit` changes."""
    found = {0: (1024, 4096), 7: (1024, 1_048_576)}

    def prlimit(process, what, new=None):
        before = found[process]
        found[process] = before if new is None else new
        return before

    monkeypatch.setattr(resource, "prlimit", prlimit)
    monkeypatch.setattr(resource, "getrlimit", lambda what: found[0])
    return found


@pytest.mark.parametrize(
    ("local_rank", "torchrun", "agent"),
    [(0, True, 65536), (1, True, 1024), (0, False, 1024)],
)
def test_the_limit_of_open_files_is_raised_for_a_rank_and_its_agent(
    limits, local_rank, torchrun, agent
):
    allow_open_files(Environment(local_rank=local_rank, torchrun=torchrun, parent=7))
    assert limits == {0: (4096, 4096), 7: (agent, 1_048_576)}


def test_many_ranks_get_a_higher_limit(limits):
    allow_open_files(Environment(world_size=50_000, torchrun=True, parent=7))
    assert limits[7][0] == 4 * 50_000 + 500


def test_a_start_with_too_few_open_files_is_refused(limits):
    assert too_few_open_files(64) is None
    problem = too_few_open_files(1024)
    assert problem.startswith("a process may have 4,096 files open (ulimit -Hn), and 1,024 ranks ")
    limits[0] = (1024, resource.RLIM_INFINITY)
    assert too_few_open_files(1024) is None


def test_rank_0_says_so_before_the_ranks_meet(tmp_path):
    """They would try again for run.init_timeout."""
    rank = {"RANK": "0", "WORLD_SIZE": "1024", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}
    rank |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29501", "HOME": str(tmp_path)}
    limited = ["bash", "-c", 'ulimit -n 1024; exec "$@"', "bash"]
    train = [sys.executable, "-m", "launcher.train", "recipe=fsdp", f"run.dir={tmp_path / 'run'}"]
    ended = subprocess.run(
        [*limited, *train],
        env=os.environ | rank,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == EXIT_USAGE, ended.stderr
    assert "1,024 ranks need 4,596 in the first one" in ended.stderr
    assert not (tmp_path / "run").exists()


def test_openmp_threads_sleep_soon_unless_the_user_says_how_they_wait():
    for given, expected in (
        ({}, {"GOMP_SPINCOUNT": "1000"}),
        ({"GOMP_SPINCOUNT": "7"}, {"GOMP_SPINCOUNT": "7"}),
        ({"OMP_WAIT_POLICY": "ACTIVE"}, {"OMP_WAIT_POLICY": "ACTIVE"}),
    ):
        prepare_openmp(given)
        assert given == expected


def test_openmp_is_prepared_before_torch_is_imported():
    """Its library reads the variables when it is loaded."""
    program = (
        "import sys; from launcher import train; from launcher.distributed import environment; "
        "train.prepare_openmp = lambda: print('torch' in sys.modules); train.main(['recipe=none'])"
    )
    words = [sys.executable, "-c", program]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "False\n"
