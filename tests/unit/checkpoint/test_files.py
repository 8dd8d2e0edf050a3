"""Checkpoint files: detection of damage, the newest valid checkpoint, pruning."""

import errno
import fcntl
import json
import os
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save

from launcher.checkpoint import files, reader, staging, state, writer
from launcher.checkpoint.files import (
    DamagedCheckpointError,
    NoneLeftError,
    list_checkpoints,
    newest_valid,
    prune,
    verify,
    why_not_resumed,
)
from launcher.checkpoint.resume import choose_resume
from launcher.errors import RecipeError
from launcher.files import ALIGNMENT, write_chunks, write_file
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema
from launcher.recipe.load import load_recipe
from launcher.reliability.run_directory import RunFolder
from tests.killed_writer import killed

RANK_0 = files.rank_file(0)


def write(folder, step):
    scratch, data = files.scratch_folder(folder, step), b"0123456789" * 100
    names = RANK_0, files.INDEX, files.STATE
    stored = {name: write_file(scratch / name, data) for name in names}
    return files.commit(scratch, step=step, ranks=1, files=stored)


def steps(folder):
    return [files.step_of(path) for path in list_checkpoints(folder)]


def flip_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_marker(change):
    def edit(path):
        marker = json.loads((path / "commit.json").read_text())
        change(marker)
        (path / "commit.json").write_text(json.dumps(marker))

    return edit


def remove(name):
    return lambda path: (path / name).unlink()


def resize(name, size):
    return lambda path: os.truncate(path / name, size)


DAMAGE = {
    "flipped bit": (
        lambda path: flip_bit(path / RANK_0),
        f"{RANK_0} has changed since it was written",
    ),
    "truncated": (resize("index.json", 10), "index.json has 10 bytes instead of 1,000"),
    "longer": (resize("index.json", 2000), "index.json has 2,000 bytes instead of 1,000"),
    "missing file": (remove("state.json"), "state.json cannot be read: No such file"),
    "no marker": (remove("commit.json"), "there is no commit.json: it was not written to its end"),
    "marker truncated": (resize("commit.json", 40), "commit.json cannot be read"),
    "marker a list": (
        lambda path: (path / "commit.json").write_text("[]"),
        "commit.json cannot be read",
    ),
    "other format": (
        edit_marker(lambda m: m.update(format=4, shards={})),
        "step_00000020 cannot be used: another version of launcher wrote it: it has format 4, and "
        "this version reads format 3",
    ),
    "other step": (edit_marker(lambda m: m.update(step=7)), "commit.json is that of step 7"),
    "file outside": (
        edit_marker(lambda m: m["files"].update({"../x": m["files"]["index.json"]})),
        "commit.json cannot be read: files.../x",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_checkpoint_is_reported_and_skipped(tmp_path, damage, messages):
    older, newest = write(tmp_path, 10), write(tmp_path, 20)
    assert verify(newest) is None
    damage_checkpoint, expected = DAMAGE[damage]
    damage_checkpoint(newest)
    assert verify(newest) in expected or expected in verify(newest)
    assert newest_valid(list_checkpoints(tmp_path)) == older
    (message,) = messages()
    assert str(newest) in message
    assert expected in message


def test_a_path_to_resume_from_that_is_no_checkpoint_is_named(tmp_path):
    write(tmp_path / "run" / "checkpoints", 20)
    (tmp_path / "run" / "checkpoints" / "step_00000030").mkdir()
    (tmp_path / "data").mkdir()
    for name, why in {
        "run/checkpoints/step_00000020": "cannot be resumed from: x",
        "run/checkpoints/step_00000040": "does not exist",
        "run": "is not a checkpoint; one is .*/step_00000030",
        "run/checkpoints": "is not a checkpoint; one is .*/step_00000030",
        "data": "is not a checkpoint",
    }.items():
        assert re.fullmatch(why, why_not_resumed(tmp_path / name, "x")), name


def test_no_valid_checkpoint_raises(tmp_path):
    assert newest_valid(list_checkpoints(tmp_path)) is None
    assert newest_valid(list_checkpoints(tmp_path / "absent")) is None
    for step in (1, 2):
        (write(tmp_path, step) / "index.json").unlink()
    lines = r"none of the 2 checkpoints.*\n.*step_00000002.*\n.*step_00000001.*index.json cannot be"
    with pytest.raises(NoneLeftError, match=lines):
        newest_valid(list_checkpoints(tmp_path))


def test_each_file_is_checked_by_one_rank(tmp_path):
    path = write(tmp_path, 1)
    flip_bit(path / "index.json")
    resize("state.json", 999)(path)
    assert [verify(path, rank=rank, ranks=3) for rank in range(3)] == [
        None,
        "index.json has changed since it was written",
        "state.json has 999 bytes instead of 1,000",
    ]
    assert "state.json" in verify(path, deep=False)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_save_leaves_no_damaged_checkpoint(tmp_path):
    older, newer, statuses = write(tmp_path, 4), tmp_path / "step_00000005", []
    while 0 not in statuses:
        statuses.append(killed(lambda: write(tmp_path, 5), tmp_path, len(statuses)))
        assert newest_valid(list_checkpoints(tmp_path)) == (newer if newer.exists() else older)
        if newer.exists():  # killed after the rename
            files.discard(newer)
    assert statuses == [9] * (len(statuses) - 1) + [0]
    assert len(statuses) >= 7
    prune(tmp_path, keep_last=5)
    assert os.listdir(tmp_path) == ["step_00000004"], "scratch folders must be removed"


def test_prune_keeps_last_milestones_and_best(tmp_path):
    for step in range(10, 110, 10):
        write(tmp_path, step)
    prune(tmp_path, keep_last=2, keep_every=40, best_step=30, earlier_best=[20])
    assert steps(tmp_path) == [20, 30, 40, 80, 90, 100]
    files.discard_newer(tmp_path, 80)
    assert steps(tmp_path) == [20, 30, 40, 80], "newer checkpoints must be removed"
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [80]


def test_prune_verifies_what_it_counts_or_deletes(tmp_path, monkeypatch):
    """It looked at each file of all checkpoints that a run had ever kept, at every save."""
    for step in range(10, 110, 10):
        write(tmp_path, step)
    verified = []
    monkeypatch.setattr(files, "verify", lambda path, deep: verified.append(files.step_of(path)))
    prune(tmp_path, keep_last=2, keep_every=20, best_step=30)
    assert steps(tmp_path) == [20, 30, 40, 60, 80, 90, 100]
    assert verified == [100, 90, 70, 50, 10]
    verified.clear()
    prune(tmp_path, keep_last=2, keep_every=20, best_step=30)
    assert verified == [100, 90]


def test_prune_keeps_the_newest_valid_checkpoint(tmp_path):
    for step in range(1, 6):
        write(tmp_path, step)
    for step in (3, 4, 5):
        (tmp_path / files.checkpoint_name(step) / "commit.json").unlink()
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [2, 3, 4, 5], "newer damaged checkpoints must be kept"
    write(tmp_path, 6)
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [3, 4, 5, 6], "what cannot be verified must not be deleted"
    (tmp_path / files.checkpoint_name(6) / "commit.json").unlink()
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [3, 4, 5, 6]


def test_prune_deletes_the_others_if_one_cannot_be_deleted(tmp_path, monkeypatch):
    """A link among the checkpoints stopped all deletions for good, and so does any error."""
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    for step in range(1, 7):
        write(folder, step)
    elsewhere.mkdir()
    for step in (1, 6):
        path = folder / files.checkpoint_name(step)
        path.rename(elsewhere / path.name)
        path.symlink_to(elsewhere / path.name)
    (folder / "step_00000009.deleting-12ab").symlink_to(elsewhere)
    (folder / "step_00000009.writing-12ab").write_text("")
    rmtree = files.shutil.rmtree

    def refuse_step_2(path):
        if "step_00000002" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "commit.json")
        rmtree(path)

    monkeypatch.setattr(files.shutil, "rmtree", refuse_step_2)
    assert prune(folder, keep_last=2) == {"step_00000002": "Permission denied"}
    assert steps(folder) == [5, 6]
    (left,) = prune(folder, keep_last=2)
    assert left.startswith("step_00000002.deleting-")
    files.discard_newer(folder, 5)
    assert steps(folder) == [5]
    assert sorted(path.name for path in folder.iterdir()) == [left, "step_00000005"]
    kept = [path.name for path in elsewhere.iterdir() if verify(path) is None]
    assert sorted(kept) == ["step_00000001", "step_00000006"], "only the links are deleted"


def test_discard_newer_goes_on_if_one_cannot_be_deleted(tmp_path, monkeypatch, messages):
    for step in (1, 2, 3):
        write(tmp_path, step)

    def refuse(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(files.shutil, "rmtree", refuse)
    files.discard_newer(tmp_path, 1)
    assert steps(tmp_path) == [1], "a resume would continue from a later one"
    assert sum("cannot be deleted: Permission denied" in text for text in messages()) == 2


def test_prune_keeps_a_checkpoint_that_is_read(tmp_path):
    for step in (1, 2, 3):
        write(tmp_path, step)
    first, second, _ = list_checkpoints(tmp_path)
    with files.reading(first), files.reading(first), files.reading(second):
        prune(tmp_path, keep_last=1)
        assert steps(tmp_path) == [1, 2, 3]
    with files.reading(second), files.reading(tmp_path / "none"):
        prune(tmp_path, keep_last=1)
        assert steps(tmp_path) == [2, 3]
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [3]


@pytest.mark.parametrize("damage", DAMAGE)
def test_invalid_checkpoint_is_set_aside_and_never_deleted(tmp_path, damage, messages):
    write(tmp_path, 10)
    newest = write(tmp_path, 20)
    DAMAGE[damage][0](newest)
    content = {file.name: file.read_bytes() for file in newest.iterdir()}
    files.discard_newer(tmp_path, 10, refused=20)
    assert steps(tmp_path) == [10]
    (aside,) = tmp_path.glob("step_00000020.invalid-*")
    assert (
        f"step_00000020 is not valid, and was renamed to {aside}; delete it yourself" in messages()
    )
    write(tmp_path, 20)  # its name is free again
    write(tmp_path, 30)
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [30]
    assert {file.name: file.read_bytes() for file in aside.iterdir()} == content


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_checkpoint_that_cannot_be_read_is_tried_again(tmp_path, monkeypatch, messages, number):
    """A transient error costs nothing; a lasting one fails the start, and changes no file."""
    write(tmp_path, 10)
    newest, slept, failures = write(tmp_path, 20), [], [1]
    read_bytes = Path.read_bytes

    def failing(path):
        if path.name == "commit.json" and failures[0]:
            failures[0] -= 1
            raise OSError(number, os.strerror(number))
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", failing)
    monkeypatch.setattr(files.time, "sleep", slept.append)
    assert newest_valid(list_checkpoints(tmp_path)) == newest
    assert slept == [2.0]
    assert "trying again in 2 s" in messages()[0]
    failures[0] = 100
    with pytest.raises(files.UnreadableError, match=os.strerror(number)) as raised:
        newest_valid(list_checkpoints(tmp_path))
    assert raised.value.reason == "unreadable_checkpoint"
    prune(tmp_path, keep_last=1)
    assert steps(tmp_path) == [10, 20], "a checkpoint that cannot be read must not be pruned"


def test_folder_that_cannot_be_listed_is_not_taken_for_empty(tmp_path, monkeypatch):
    def stale(folder):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    recipe = load_recipe(["recipe=fsdp"], ranks=None).recipe
    monkeypatch.setattr(os, "scandir", stale)
    with pytest.raises(OSError, match="Stale file handle"):
        list_checkpoints(tmp_path)
    run = RunFolder(tmp_path)
    with pytest.raises(RecipeError, match="checkpoints cannot be read: Stale file handle"):
        choose_resume(recipe, run, restarted=True)


def test_insufficient_disk_space_is_refused(tmp_path):
    files.check_space(tmp_path / "checkpoints", 1000)
    text = r"one checkpoint takes 1048576.0 GiB, and .* has [\d.]+ [KMG]iB free"
    with pytest.raises(RecipeError, match=text):
        files.check_space(tmp_path, 2**50)
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="cannot be written to: Not a directory"):
        files.check_space(tmp_path / "file" / "checkpoints", 1)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EFAULT])
def test_file_is_written_without_direct_io(tmp_path, monkeypatch, number):
    """Direct I/O fails when it is enabled or at the first write, and writes are short.

    The file is the same.
    """
    data = bytes(range(256)) * 100  # not a multiple of 4,096
    padded = torch.zeros(28672 + 4096, dtype=torch.uint8)
    padded = padded[-padded.data_ptr() % 4096 :][:28672]
    padded[: len(data)] = torch.tensor(list(data), dtype=torch.uint8)
    expected = write_file(tmp_path / "plain", data)
    pwrite, control = os.pwrite, fcntl.fcntl

    def pwrite_without_direct(descriptor, chunk, at):
        if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(number, "no")
        return pwrite(descriptor, chunk[:1000], at)

    def fcntl_without_direct(descriptor, command, flags=0):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return control(descriptor, command, flags)

    def check_write(name):
        chunks, sizes = (chunk.numpy().data for chunk in padded.split(8192)), []
        stored = write_chunks(tmp_path / name, chunks, size=len(data), advance=sizes.append)
        assert stored == expected
        assert sum(sizes) == len(padded)
        assert (tmp_path / name).read_bytes() == data

    check_write("direct")
    monkeypatch.setattr(os, "pwrite", pwrite_without_direct)
    check_write("refused")
    monkeypatch.setattr(fcntl, "fcntl", fcntl_without_direct)
    check_write("refused at once")


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def module_and_optimizer(second=3):
    module = torch.nn.Sequential(torch.nn.Linear(4, second), torch.nn.BatchNorm1d(second))
    return module, make_optimizer(module, schema.Optimizer())


def test_checkpoint_that_cannot_be_deleted_is_reported_once(tmp_path, group, monkeypatch, messages):
    module, optimizer = module_and_optimizer()
    settings = schema.Checkpoint(asynchronous=False, keep_last=1)
    options = {"group": group, "device": torch.device("cpu")}
    checkpointer = writer.Checkpointer(tmp_path, settings, **options)
    tensors = state.model_and_optimizer(module, optimizer)
    rmtree = files.shutil.rmtree

    def refuse_step_1(path):
        if "step_00000001" in str(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        rmtree(path)

    monkeypatch.setattr(files.shutil, "rmtree", refuse_step_1)
    for step in range(1, 5):
        checkpointer.save(step, tensors, state={}, local={})
    assert [save.error for save in checkpointer.finish()] == [None] * 4
    assert steps(tmp_path) == [4]
    warned = [text for text in messages() if "could not be deleted" in text]
    assert len(warned) == 1
    assert re.search(r"Permission denied; delete it yourself \(.* free there\)", warned[0])


def test_failed_save_does_not_lose_the_best_checkpoint(tmp_path, group, monkeypatch):
    """Step 2 would be the best, but is not saved: step 1 stays the best and is kept."""
    module, optimizer = module_and_optimizer()
    settings = schema.Checkpoint(asynchronous=False, keep_last=1)
    device = torch.device("cpu")
    options = {"group": group, "device": device}
    checkpointer = writer.Checkpointer(tmp_path, settings, **options)
    tensors = state.model_and_optimizer(module, optimizer)
    write_chunks = writer.write_chunks

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step, best in ((1, True), (2, True), (3, False)):
        monkeypatch.setattr(writer, "write_chunks", full if step == 2 else write_chunks)
        checkpointer.save(step, tensors, state={}, local={}, best=best)
        (outcome,) = checkpointer.finish()
        assert (outcome.error is None) == (step != 2)
        assert checkpointer.best_step == 1
    assert steps(tmp_path) == [1, 3]


def test_copies_into_the_staging_buffer_stay_within_pieces(monkeypatch):
    monkeypatch.setattr(staging, "PIECE", 100)
    buffer = staging.StagingBuffer(350)
    assert buffer.memory.nbytes == 350
    assert buffer.memory.data_ptr() % ALIGNMENT == 0
    source = torch.arange(350).to(torch.uint8)
    for start, end in ((0, 30), (30, 100), (100, 101), (101, 340), (340, 350), (350, 350)):
        for target, part in buffer.copies(start, source[start:end]):
            first = target.data_ptr() - buffer.memory.data_ptr()
            assert first // 100 == (first + len(target) - 1) // 100
            target.copy_(part)
    assert torch.equal(buffer.memory, source)


def test_a_smaller_save_keeps_the_staging_buffer(tmp_path, group):
    module, optimizer = module_and_optimizer()
    checkpointer = writer.Checkpointer(
        tmp_path,
        schema.Checkpoint(keep_last=3),
        group=group,
        device=torch.device("cpu"),
    )
    tensors = state.model_and_optimizer(module, optimizer)
    for step, rows in ((1, 9000), (2, 20), (3, 20_000)):
        local = {"more": torch.full((rows,), step)}
        before = checkpointer._buffer
        checkpointer.save(step, tensors, state={}, local=local)
        (outcome,) = checkpointer.finish()
        assert outcome.error is None
        assert verify(outcome.path) is None
        assert torch.equal(reader.read_local(outcome.path, 0)["more"], local["more"])
        assert (checkpointer._buffer is before) is (step == 2)
    checkpointer.close()
    assert checkpointer._buffer is None


@pytest.fixture
def saved(tmp_path, group):
    """A checkpoint of step 1 in tmp_path/checkpoints, its module and its optimizer."""
    module, optimizer = module_and_optimizer()
    module(torch.randn(5, 4)).square().sum().backward()
    optimizer.step()
    checkpointer = writer.Checkpointer(
        tmp_path / "checkpoints",
        schema.Checkpoint(asynchronous=False),
        group=group,
        device=torch.device("cpu"),
    )
    random.gauss(0, 1)  # the generator stores the second value of a pair
    checkpointer.save(
        1,
        state.model_and_optimizer(module, optimizer),
        state={"step": 1, "recipe": "run: {}\n"},
        local=state.rank_state(module, torch.device("cpu")),
    )
    (outcome,) = checkpointer.finish()
    assert outcome.error is None
    return outcome.path, module, optimizer


def test_one_process_saves_and_loads(saved, group):
    path, module, optimizer = saved

    def draw():
        python, numpy = (random.random(), random.gauss(0, 1)), (np.random.rand(), np.random.randn())
        return torch.rand(3).tolist(), python, numpy

    drawn, buffer = draw(), module[1].running_mean.clone()
    draw()
    module[1].running_mean += 1
    state.restore_rank_state(reader.read_local(path, 0), module, torch.device("cpu"))
    assert draw() == drawn
    assert torch.equal(module[1].running_mean, buffer)
    assert verify(path) is None
    assert reader.find_checkpoint(path.parent, group=group) == path
    assert reader.find_checkpoint(path.parent, group=group, at_most=0) is None
    assert reader.read_state(path) == {"step": 1, "recipe": "run: {}\n"}
    tensors = state.model_and_optimizer(*module_and_optimizer())
    reader.load(path, tensors, group=group)
    expected = state.model_and_optimizer(module, optimizer)
    names = {"model.0.weight", "optimizer.0.weight.exp_avg_sq", "buffer.1.running_mean"}
    assert tensors.keys() == expected.keys() >= names
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert tensors["optimizer.0.bias.step"] == 1


def test_checkpoint_of_another_model_is_refused(saved, group):
    tensors = dict(state.model_and_optimizer(*module_and_optimizer(second=2)))
    del tensors["buffer.1.running_mean"]
    text = "is of another model or optimizer: .*holds buffer.1.running_mean, which the .*more"
    with pytest.raises(RecipeError, match=text):
        reader.load(saved[0], tensors, group=group)


def test_index_may_not_name_files_outside_of_the_checkpoint(saved, tmp_path):
    path, *_ = saved
    for file in ("../../other.safetensors", "/etc/other.safetensors"):
        index = {"a": {"dtype": "F32", "shape": [1], "parts": [[file, 0, 1]]}}
        (path / "index.json").write_text(json.dumps(index))
        with pytest.raises(DamagedCheckpointError, match="outside of the checkpoint"):
            reader.open_tensors(path)


OLD_INDEX = """
{"model.weight":{"dtype":"F32","shape":[4,4],"parts":[["rank_00000.safetensors",0,2],["rank_00001.safetensors",2,2]]},
"model.columns":{"dtype":"BF16","shape":[2,6],"parts":[["rank_00000.safetensors",0,2,0,4],["rank_00001.safetensors",0,2,4,2]]},
"optimizer.weight.step":{"dtype":"F32","shape":[],"parts":[["rank_00001.safetensors",0,1]]}}
"""


def test_checkpoint_of_format_2_is_read(tmp_path, group):
    """Each tensor had a list of its own parts, with names of files."""
    weight, columns = torch.arange(16.0).view(4, 4), torch.arange(12.0).view(2, 6).bfloat16()
    parts = [
        {"model.weight": weight[:2], "model.columns": columns[:, :4].contiguous()},
        {
            "model.weight": weight[2:],
            "model.columns": columns[:, 4:].contiguous(),
            "optimizer.weight.step": torch.tensor(7.0),
        },
    ]
    scratch = files.scratch_folder(tmp_path, 5)
    contents = {files.rank_file(rank): save(part) for rank, part in enumerate(parts)}
    contents |= {files.INDEX: OLD_INDEX.encode(), files.STATE: b"{}"}
    stored = {name: write_file(scratch / name, data) for name, data in contents.items()}
    path = files.commit(scratch, step=5, ranks=2, files=stored)
    edit_marker(lambda marker: marker.update(format=2))(path)
    assert reader.find_checkpoint(tmp_path, group=group) == path
    tensors = {
        "model.weight": torch.zeros(4, 4),
        "model.columns": torch.zeros(2, 6, dtype=torch.bfloat16),
        "optimizer.weight.step": torch.tensor(0.0),
    }
    reader.load(path, tensors, group=group)
    assert torch.equal(tensors["model.weight"], weight)
    assert torch.equal(tensors["model.columns"], columns)
    assert tensors["optimizer.weight.step"] == 7
    read = reader.open_tensors(path)  # as exports read it
    assert torch.equal(read.read("model.columns"), columns)


class FolderCreator:
    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return os.mkdir, (str(self.file),)


def test_pickle_in_a_checkpoint_is_not_executed(tmp_path, saved, group):
    path, *_ = saved
    payload, tensors = (
        pickle.dumps(FolderCreator(tmp_path / "executed")),
        state.model_and_optimizer(*module_and_optimizer()),
    )
    readers = [
        (RANK_0, lambda: reader.read_local(path, 0)),
        (RANK_0, lambda: reader.load(path, tensors, group=group)),
        ("index.json", lambda: reader.load(path, tensors, group=group)),
        ("state.json", lambda: reader.read_state(path)),
        ("commit.json", lambda: reader.find_checkpoint(path.parent, group=group)),
    ]
    (path / ".metadata").write_bytes(payload)
    for name, read in readers:
        content = (path / name).read_bytes()
        (path / name).write_bytes(payload.ljust(len(content), b"\0"))
        with pytest.raises((DamagedCheckpointError, NoneLeftError), match=f"{path}.*{name}"):
            read()
        (path / name).write_bytes(content)
        read()
    assert not (tmp_path / "executed").exists()
    pickle.loads(payload)
    assert (tmp_path / "executed").exists(), "loading the pickle must create the folder"


def test_a_step_that_is_not_finished_leaves_no_trace():
    """Generators and the statistics of BatchNorm are those before the step."""
    module, _ = module_and_optimizer()
    before = state.BeforeStep(module, torch.device("cpu"))
    for finished in range(3):
        expected = state.rank_state(module, torch.device("cpu"))
        module(torch.randn(5, 4))
        torch.rand(1)
        random.gauss(0, 1)
        np.random.randn()
        before.restore()
        restored = state.rank_state(module, torch.device("cpu"))
        assert restored.keys() == expected.keys()
        for name, tensor in restored.items():
            assert torch.equal(tensor.nan_to_num(), expected[name].nan_to_num()), (finished, name)
        module(torch.randn(5, 4))
        random.gauss(0, 1)
        before.take()
