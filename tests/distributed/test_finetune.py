"""`make train` and `make finetune`, as a user types them."""

import json
import os
import re
import subprocess

import pytest

from tests.distributed.launching import REPOSITORY, run


@pytest.mark.long
def test_make_finetune_learns_to_add(tmp_path):
    """From nothing: trains the quickstart, exports it, fine-tunes the export on chats, and asks it what it was not told."""
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, copy], check=True)
    (
        copy / ".venv"
    ).mkdir()  # as if just installed: the environment of this checkout is not to be changed
    for part in (REPOSITORY / ".venv").iterdir():
        if part.name != ".installed":
            os.symlink(part, copy / ".venv" / part.name)
    (copy / ".venv/.installed").touch()
    output = run(["make", "finetune"], cwd=copy, timeout=900, PYTHONPATH=str(copy)).check().output
    steps = [
        json.loads(line)
        for line in (copy / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in steps if "loss" in line]
    assert 5.3 < losses[0] < 5.8
    assert sum(losses[-10:]) / 10 < 2.0
    before, after = (
        float(share)
        for share in re.findall(r"accuracy of runs/\S+: ([\d.]+)% of 81 questions", output)
    )
    assert before < 5
    assert after > 80
    assert (copy / "runs/finetune/hf/tokenizer.json").exists()
