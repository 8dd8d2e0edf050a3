"""Tests of optimizer state in a file."""

import os

import pytest
import torch

from launcher.errors import RecipeError, TrainingError
from launcher.optimizers.offload import StateFile


def test_state_file_is_unnamed_and_backs_its_tensor(tmp_path, monkeypatch):
    file = StateFile(tmp_path / "new", 3 * 4096)
    assert list((tmp_path / "new").iterdir()) == [], "no file remains if the process is killed"
    assert not file.tensor.any()
    buffer = torch.arange(8192, dtype=torch.int64).to(torch.uint8)
    preadv, reads = os.preadv, []

    def read_half(descriptor, buffers, at):
        """Read half of the requested bytes, as may happen after a signal."""
        reads.append(at)
        return preadv(descriptor, [buffers[0][: 1 + len(buffers[0]) // 2]], at)

    file.write(buffer, 4096)  # the buffer is not aligned for direct I/O
    assert torch.equal(file.tensor[4096:], buffer), "a checkpoint reads what a step wrote"
    file.tensor[:4096] = 7
    monkeypatch.setattr(os, "preadv", read_half)
    read = torch.zeros(8192, dtype=torch.uint8)
    file.read(read, 0)
    assert len(reads) > 2
    assert torch.equal(read, file.tensor[:8192]), "a step reads what a checkpoint loaded"
    assert read[0] == 7


def test_full_disk_error_names_folder_and_size(tmp_path):
    with pytest.raises(TrainingError) as caught:
        StateFile(tmp_path, 2**60)
    for part in (str(tmp_path), "optimizer_path", "GiB are free", "needs 1073741824.0 GiB"):
        assert part in str(caught.value), caught.value
    assert list(tmp_path.iterdir()) == []


def test_folder_creation_failure_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match=r"optimizer_path.*file/state.*Not a directory"):
        StateFile(tmp_path / "file" / "state", 4096)
