"""Atomic writes: a process that is killed at any moment leaves the old content or the new one."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from launcher.files import (
    checksum_of,
    checksum_of_file,
    mode_of_umask,
    replace_file,
    replace_folder,
    replace_text,
    write_file,
)
from launcher.metrics.sinks import Wandb
from launcher.models.safetensors_files import write_tensors
from launcher.objectives.kept_files import ReferenceFile
from launcher.recipe import schema
from tests.killed_writer import killed


def text_is_replaced(folder, content):
    replace_text(folder / "status.json", content)


def arrays_are_replaced(folder, content):
    with replace_file(folder / "arrays", only_writer=True) as scratch:
        save_file({content: np.zeros(3)}, scratch)


def folder_is_replaced(folder, content):
    with replace_folder(folder / "hf", written=("model",)) as scratch:
        (scratch / "model").write_text(content)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize(
    ("action", "read"),
    [
        (text_is_replaced, lambda folder: (folder / "status.json").read_text()),
        (arrays_are_replaced, lambda folder: next(iter(load_file(folder / "arrays")))),
    ],
)
def test_killed_writer_leaves_the_old_file_or_the_new_one(tmp_path, action, read):
    action(tmp_path, "old")
    statuses = []
    while 0 not in statuses:
        statuses.append(killed(lambda: action(tmp_path, "new"), tmp_path, len(statuses)))
        assert read(tmp_path) == ("new" if statuses[-1] == 0 else "old")
    assert statuses[:-1] == [9] * (len(statuses) - 1) != []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_killed_writer_leaves_the_old_folder_or_the_new_one(tmp_path):
    """The next writer, which removes what is left, finds it."""
    statuses = []
    while 0 not in statuses:
        folder_is_replaced(tmp_path, "old")
        statuses.append(
            killed(lambda: folder_is_replaced(tmp_path, "new"), tmp_path, len(statuses))
        )
        found = [file.read_text() for file in sorted(tmp_path.glob("hf*/model"))]
        assert {"old", "new"} & {*found}
    assert found == ["new"]
    folder_is_replaced(tmp_path, "last")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_a_folder_is_on_the_disk_before_it_replaces_the_old_one(tmp_path, monkeypatch):
    """Else a crash of the machine after the rename leaves empty files in the place of the old ones."""
    flushed, unflushed, sync = set(), [], os.fsync

    def fsync(descriptor):
        flushed.add(os.fstat(descriptor).st_ino)
        sync(descriptor)

    def rename(path, target):
        (scratch,) = tmp_path.glob("hf.writing-*")
        items = [path for path in scratch.rglob("*") if path.is_file() or path.is_dir()]
        unflushed.append([item.name for item in items if item.stat().st_ino not in flushed])
        os.rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    (tmp_path / "hf/card").mkdir(parents=True)
    (tmp_path / "hf/card/README.md").write_text("by the user")
    (tmp_path / "hf/link").symlink_to("nowhere")
    os.mkfifo(tmp_path / "hf/pipe")
    with replace_folder(tmp_path / "hf", written=("model",)) as scratch:
        (scratch / "model").write_text("new")
        (scratch / "templates").mkdir()
        (scratch / "templates/tool.jinja").write_text("{{ messages }}")
    assert unflushed == [[], []]  # as the old folder makes room, and as the new one takes its place
    assert {tmp_path.stat().st_ino, (tmp_path / "hf").stat().st_ino} <= flushed
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == ["card", "link", "model", "pipe", "templates"]


def test_a_durable_text_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """Such as recipe.yaml, which nothing could replace."""
    order, sync, replace = [], os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda file: (order.append("fsync"), sync(file)))
    monkeypatch.setattr(Path, "replace", lambda *of: (order.append("rename"), replace(*of)))
    replace_text(tmp_path / "a", "text", durable=True)
    assert order == ["fsync", "rename"]
    assert (tmp_path / "a").read_text() == "text"


def test_safetensors_files_have_the_mode_of_other_new_files(tmp_path):
    mask = os.umask(0o027)
    try:
        with replace_file(tmp_path / "arrays") as scratch, mode_of_umask(scratch):
            save_file({"x": np.zeros(3)}, scratch)
        ReferenceFile(tmp_path / "reference.safetensors", "weights").write({"x": np.zeros(3)})
        (tmp_path / "hf").mkdir()
        write_tensors(tmp_path / "hf", [("x", torch.zeros(3), torch.float32)])
    finally:
        os.umask(mask)
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert [file.stat().st_mode & 0o777 for file in files] == [0o640] * 3


def test_failed_writer_leaves_no_scratch_file(tmp_path):
    def fail():
        with replace_file(tmp_path / "file") as scratch:
            scratch.write_text("half")
            raise KeyboardInterrupt

    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


def test_interrupted_start_leaves_no_empty_id_of_wandb(tmp_path, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("pathlib.Path.replace", interrupted)
    settings = schema.Wandb(project="test", mode="offline")
    with pytest.raises(KeyboardInterrupt):
        Wandb(settings, name="name", folder=tmp_path, config={}, metrics=tmp_path / "metrics.jsonl")
    assert not (tmp_path / "wandb_id").exists()


def test_checksums_and_new_files(tmp_path):
    data = bytes(range(256)) * 40_000  # more than is read at once
    stored = write_file(tmp_path / "file", data, new=True, mode=0o600)
    assert stored.bytes == len(data)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    moved = []
    assert checksum_of_file(tmp_path / "file", advance=moved.append).hexdigest() == stored.checksum
    assert sum(moved) == len(data)
    assert checksum_of([data[:7], memoryview(data)[7:]]) == stored.checksum
    beginning = checksum_of_file(tmp_path / "file", size=5_000_000)
    assert beginning.hexdigest() == checksum_of([data[:5_000_000]])
    beginning.update(data[5_000_000:])
    assert beginning.hexdigest() == stored.checksum
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", b"", new=True)
    assert (tmp_path / "file").read_bytes() == data
