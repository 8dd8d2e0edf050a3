"""Files of checkpoints: damage of every kind, the newest valid one, pruning."""

import errno
import fcntl
import json
import os
import pickle
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from launcher.checkpoint import files, writer
from launcher.checkpoint.files import (
    DamagedCheckpointError,
    NoneLeftError,
    list_checkpoints,
    newest_valid,
    prune,
    verify,
)
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.training.optimizer import make_optimizer
from tests import REPOSITORY


def write(folder, step, data=b"0123456789" * 100):
    scratch = files.scratch_folder(folder, step)
    stored = {
        name: files.write_file(scratch / name, data)
        for name in (files.rank_file(0), files.INDEX, files.STATE)
    }
    return files.commit(scratch, step=step, ranks=1, files=stored)


def steps(folder):
    return [files.step_of(path) for path in list_checkpoints(folder)]


def test_a_complete_checkpoint_is_valid(tmp_path):
    path = write(tmp_path, 500)
    assert path == tmp_path / "step_00000500"
    assert verify(path) is None
    assert sorted(os.listdir(tmp_path)) == ["step_00000500"]
    marker = files.read_marker(path)
    assert (marker.step, marker.ranks) == (500, 1)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_marker(change):
    def edit(path):
        marker = json.loads((path / "commit.json").read_text())
        change(marker)
        (path / "commit.json").write_text(json.dumps(marker))

    return edit


DAMAGE = {
    "flipped bit": (
        lambda path: flip(path / "rank_00000.safetensors"),
        "rank_00000.safetensors has changed since it was written",
    ),
    "truncated": (
        lambda path: os.truncate(path / "index.json", 10),
        "index.json has 10 bytes instead of 1,000",
    ),
    "longer": (
        lambda path: os.truncate(path / "index.json", 2000),
        "index.json has 2,000 bytes instead of 1,000",
    ),
    "missing file": (
        lambda path: (path / "state.json").unlink(),
        "state.json cannot be read: No such file",
    ),
    "no marker": (
        lambda path: (path / "commit.json").unlink(),
        "there is no commit.json: it was not written to its end",
    ),
    "empty folder": (
        lambda path: [file.unlink() for file in path.iterdir()],
        "there is no commit.json",
    ),
    "marker not JSON": (
        lambda path: (path / "commit.json").write_bytes(b"\x80\x04"),
        "commit.json cannot be read",
    ),
    "marker truncated": (
        lambda path: os.truncate(path / "commit.json", 40),
        "commit.json cannot be read",
    ),
    "marker a list": (
        lambda path: (path / "commit.json").write_text("[]"),
        "commit.json cannot be read",
    ),
    "other format": (
        edit_marker(lambda m: m.update(format=1)),
        "commit.json cannot be read: format: Input should be 2",
    ),
    "other step": (edit_marker(lambda m: m.update(step=7)), "commit.json is that of step 7"),
    "file outside": (
        edit_marker(lambda m: m["files"].update({"../x": m["files"]["index.json"]})),
        "commit.json cannot be read: files.../x",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_reported_and_skipped(tmp_path, damage, messages):
    older, newest = write(tmp_path, 10), write(tmp_path, 20)
    do, words = DAMAGE[damage]
    do(newest)
    assert words in verify(newest)
    assert newest_valid(list_checkpoints(tmp_path)) == older
    (message,) = messages()
    assert str(newest) in message
    assert words in message


def test_only_damaged_checkpoints_are_an_error(tmp_path):
    assert newest_valid(list_checkpoints(tmp_path)) is None
    assert newest_valid(list_checkpoints(tmp_path / "absent")) is None
    for step in (1, 2):
        (write(tmp_path, step) / "index.json").unlink()
    with pytest.raises(
        NoneLeftError,
        match=r"none of the 2 checkpoints.*\n.*step_00000002.*\n.*step_00000001.*index.json cannot be read",
    ):
        newest_valid(list_checkpoints(tmp_path))


def test_each_file_is_checked_by_one_rank(tmp_path):
    path = write(tmp_path, 1)
    flip(path / "index.json")
    found = [verify(path, rank=rank, ranks=3) for rank in range(3)]
    assert sorted(problem is None for problem in found) == [False, True, True]
    assert verify(path, deep=False) is None
    assert "index.json" in verify(path)


def test_a_save_killed_at_any_moment_leaves_no_valid_checkpoint(tmp_path):
    """The process dies before each call that changes the folder, one after the other."""
    code = (
        "import os, sys; from pathlib import Path; from launcher.checkpoint import files\n"
        "folder, left = Path(sys.argv[1]), [int(sys.argv[2])]\n"
        "def hook(event, args):\n"
        "    if event in ('open', 'os.rename', 'os.mkdir') and str(folder) in str(args[0]):\n"
        "        left[0] -= 1\n"
        "        if left[0] < 0: os._exit(9)\n"
        "scratch = files.scratch_folder(folder, 5)\n"
        "sys.addaudithook(hook)\n"
        "stored = {n: files.write_file(scratch / n, b'x' * 50) for n in (files.rank_file(0), files.INDEX, files.STATE)}\n"
        "files.commit(scratch, step=5, ranks=1, files=stored)\n"
    )
    older, statuses = write(tmp_path, 4), []
    for moment in range(20):
        status = subprocess.run(
            [sys.executable, "-c", code, tmp_path, str(moment)], cwd=REPOSITORY, timeout=60
        ).returncode
        statuses.append(status)
        if status == 0:
            break
        found = newest_valid(list_checkpoints(tmp_path))
        assert found == older or (found == tmp_path / "step_00000005" and moment >= 6), (
            f"moment {moment}"
        )
    assert statuses == [9] * (len(statuses) - 1) + [0]
    assert len(statuses) >= 7
    assert verify(tmp_path / "step_00000005") is None
    prune(tmp_path, keep_last=5)
    assert sorted(os.listdir(tmp_path)) == ["step_00000004", "step_00000005"], (
        "scratch folders are left"
    )


def test_same_step_is_replaced(tmp_path):
    write(tmp_path, 3, data=b"old" * 100)
    path = write(tmp_path, 3, data=b"new" * 100)
    assert (path / "index.json").read_bytes() == b"new" * 100
    assert os.listdir(tmp_path) == ["step_00000003"]


def test_prune_keeps_last_milestones_and_best(tmp_path):
    for step in range(10, 110, 10):
        write(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=40, best_step=30)
    assert steps(tmp_path) == [30, 40, 80, 90, 100]
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [100]


def test_prune_never_touches_the_newest_valid_one(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    for step in (3, 4, 5):
        (tmp_path / files.checkpoint_name(step) / "commit.json").unlink()
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [2, 3, 4, 5], "damaged ones go when they are older than what is kept"
    write(tmp_path, 6)
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [6]
    (tmp_path / files.checkpoint_name(6) / "commit.json").unlink()
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [6], "nothing is deleted where nothing is valid"


def test_newer_checkpoints_are_discarded_after_going_back(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    files.discard_newer(tmp_path, 1)
    assert os.listdir(tmp_path) == ["step_00000001"]


def test_space_is_checked(tmp_path):
    files.check_space(tmp_path / "checkpoints", 1000)
    with pytest.raises(
        RecipeError, match=r"one checkpoint takes 1,048,576.00 GiB, and .* has [\d,.]+ GiB free"
    ):
        files.check_space(tmp_path, 2**50)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written to: Not a directory"):
        files.check_space(tmp_path / "file" / "checkpoints", 1)


def test_files_need_no_torch():
    code = "import sys, launcher.checkpoint.files; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY, timeout=60)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_a_file_system_without_direct_writing(tmp_path, monkeypatch, number):
    """Direct I/O fails at once or at the first write, or writes are short: the file is the same."""
    data = bytes(range(256)) * 100  # not a multiple of 4,096
    padded = torch.zeros(28672 + 4096, dtype=torch.uint8)
    padded = padded[-padded.data_ptr() % 4096 :][:28672]
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    expected = files.write_file(tmp_path / "plain", data)
    pwrite, control = os.pwrite, fcntl.fcntl

    def refused(descriptor, chunk, at):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, "no")
        return pwrite(descriptor, chunk[:1000], at)

    def refused_at_once(descriptor, command, flags=0):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return control(descriptor, command, flags)

    def written(name):
        chunks = (
            memoryview(padded.numpy())[start : start + 8192] for start in range(0, 28672, 8192)
        )
        assert files.write_chunks(tmp_path / name, chunks, size=len(data)) == expected
        assert (tmp_path / name).read_bytes() == data

    written("direct")
    monkeypatch.setattr(os, "pwrite", refused)
    written("refused")
    monkeypatch.setattr(fcntl, "fcntl", refused_at_once)
    written("refused at once")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


class Bomb:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def saved(folder, group, *, step=1, asynchronous=False):
    from launcher.checkpoint import state

    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    optimizer = make_optimizer(module, schema.Optimizer())
    module(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    checkpointer = writer.Checkpointer(
        folder,
        schema.Checkpoint(asynchronous=asynchronous),
        group=group,
        device=torch.device("cpu"),
        optimizer=optimizer,
    )
    tensors, local = (
        state.model_and_optimizer(module, optimizer),
        state.rank_state(module, torch.device("cpu")),
    )
    checkpointer.save(step, tensors, state={"step": step, "recipe": "run: {}\n"}, local=local)
    (outcome,) = checkpointer.finish()
    assert outcome.error is None
    return outcome.path, module, optimizer


def test_one_process_saves_and_loads(tmp_path, group):
    from launcher.checkpoint import reader, state

    path, module, optimizer = saved(tmp_path, group)
    assert verify(path) is None
    assert reader.find_checkpoint(tmp_path, group=group) == path
    assert reader.find_checkpoint(tmp_path, group=group, at_most=0) is None
    assert reader.read_state(path) == {"step": 1, "recipe": "run: {}\n"}
    other = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))
    fresh = make_optimizer(other, schema.Optimizer())
    tensors = state.model_and_optimizer(other, fresh)
    reader.load(path, tensors, group=group)
    expected = state.model_and_optimizer(module, optimizer)
    assert (
        tensors.keys()
        == expected.keys()
        >= {"model.0.weight", "optimizer.0.weight.exp_avg_sq", "buffer.1.running_mean"}
    )
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert tensors["optimizer.0.bias.step"] == 1


def test_random_generators_continue(tmp_path, group):
    from launcher.checkpoint import reader, state

    random.gauss(0, 1)  # keeps the second of a pair
    path, module, _ = saved(tmp_path, group)

    def draw():
        return (
            torch.rand(3).tolist(),
            random.random(),
            random.gauss(0, 1),
            np.random.rand(),
            np.random.randn(),
        )

    expected, buffer = draw(), module[1].running_mean.clone()
    draw()
    module[1].running_mean += 1
    state.restore_rank_state(reader.read_local(path, 0), module, torch.device("cpu"))
    assert draw() == expected
    assert torch.equal(module[1].running_mean, buffer)


def test_a_checkpoint_of_another_model_is_refused(tmp_path, group):
    from launcher.checkpoint import reader, state

    path, _, _ = saved(tmp_path, group)
    module = torch.nn.Sequential(
        torch.nn.Linear(4, 2), torch.nn.Identity(), torch.nn.Linear(2, 2, bias=False)
    )
    tensors = state.model_and_optimizer(module, make_optimizer(module, schema.Optimizer()))
    with pytest.raises(
        RecipeError,
        match=r"is of another model or optimizer: .*holds buffer.1.running_mean, which the model does not have.*more",
    ):
        reader.load(path, tensors, group=group)


@pytest.mark.parametrize("made_valid", [False, True])
@pytest.mark.parametrize(
    "name", ["rank_00000.safetensors", "index.json", "state.json", "commit.json", ".metadata"]
)
def test_a_pickle_instead_of_a_file_is_not_executed(tmp_path, group, name, made_valid):
    from launcher.checkpoint import reader, state

    folder = tmp_path / "checkpoints"
    path, module, optimizer = saved(folder, group)
    bomb = pickle.dumps(Bomb(tmp_path / "executed"))
    if name == "rank_00000.safetensors":  # of the same size
        bomb += b"\0" * ((path / name).stat().st_size - len(bomb))
    (path / name).write_bytes(bomb)
    if made_valid and name not in ("commit.json", ".metadata"):
        marker = json.loads((path / "commit.json").read_text())
        marker["files"][name] = files.write_file(path / name, bomb).model_dump()
        (path / "commit.json").write_text(json.dumps(marker))
        assert verify(path) is None
    elif name != ".metadata":
        with pytest.raises(NoneLeftError, match=name):
            reader.find_checkpoint(folder, group=group)
    problems = []
    for read in (
        lambda: reader.load(path, state.model_and_optimizer(module, optimizer), group=group),
        lambda: reader.read_state(path),
        lambda: reader.read_local(path, 0),
    ):
        try:
            read()
        except DamagedCheckpointError as error:
            problems.append(str(error))
    assert not (tmp_path / "executed").exists()
    assert all(str(path) in problem and name in problem for problem in problems)
    assert bool(problems) == (name not in (".metadata", "commit.json"))
    pickle.loads(bomb)
    assert (tmp_path / "executed").exists(), "the bomb is one"
