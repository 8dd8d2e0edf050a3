"""The tutorial of images: a small model learns to name colours in pictures; killed, it resumes."""

import json
import re
import shutil
import sys

import pytest

from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.run_files import read_lines

pytestmark = pytest.mark.long


def python(*words, cwd):
    return run([sys.executable, *words], cwd=cwd, timeout=240).check().output


def test_the_tutorial(tmp_path):
    script = str(REPOSITORY / "recipes/pictures.py")
    python(script, "make", "runs/pictures_data", cwd=tmp_path)
    recipe = [str(REPOSITORY / "launcher/train.py"), "recipe=pictures"]
    torchrun(*recipe, ranks=2, cwd=tmp_path, timeout=600, OMP_NUM_THREADS="1").check()
    shares = [
        float(
            re.search(
                r"\((\d+)%\)", python(script, "score", model, "runs/pictures_data", cwd=tmp_path)
            )[1]
        )
        for model in ("runs/pictures_data/model", "runs/pictures/hf")
    ]
    assert shares[0] < 5
    assert shares[1] > 90
    # Half of the run, and the rest from its checkpoint: the same losses
    words = [
        *recipe,
        "run.max_steps=8",
        "run.epochs=null",
        "checkpoint.every_steps=4",
        "run.name=whole",
    ]
    torchrun(*words, ranks=2, cwd=tmp_path, timeout=300, OMP_NUM_THREADS="1").check()
    shutil.copytree(tmp_path / "runs/whole", tmp_path / "runs/half")
    half = tmp_path / "runs/half"
    shutil.rmtree(half / "checkpoints/step_00000008")
    status = json.loads((half / "status.json").read_text())
    (half / "status.json").write_text(json.dumps(status | {"state": "failed"}))
    words = [word.replace("whole", "half") for word in words]
    torchrun(*words, ranks=2, cwd=tmp_path, timeout=300, OMP_NUM_THREADS="1").check()
    losses = [
        {
            line["step"]: line["loss"]
            for line in read_lines(tmp_path / f"runs/{name}/metrics.jsonl")
            if "loss" in line
        }
        for name in ("whole", "half")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 8
