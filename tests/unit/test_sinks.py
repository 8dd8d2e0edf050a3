"""Records in wandb, read back from its files."""

import sys

from tests.distributed.launching import run
from tests.wandb_files import history, read_records

WRITE = """
import sys
from pathlib import Path
from launcher.metrics.sinks import Wandb
from launcher.recipe import schema

sink = Wandb(schema.Wandb(project="test", mode="offline"), name="name", folder=Path(sys.argv[1]), config={})
for step in map(int, sys.argv[2:]):
    sink.write({"step": step, "loss": 1.0, "time": 0.0})
sink.write({"step": step, "eval_loss": 0.5, "time": 0.0})
sink.close("finished")
"""


def test_wandb_keeps_repeated_steps(tmp_path):
    """After a rewind in the same process, and after a resume in the next one, which is the same run."""
    for steps in ((1, 2, 3, 2, 3, 4), (3, 4, 5)):
        run([sys.executable, "-c", WRITE, tmp_path, *steps], timeout=60).check()
    rows = list(history(tmp_path / "wandb"))
    assert [row["step"] for row in rows if "training/loss" in row] == [1, 2, 3, 2, 3, 4, 3, 4, 5]
    assert [row["step"] for row in rows if "evaluation/eval_loss" in row] == [4, 5]
    records = list(read_records(tmp_path / "wandb"))
    assert len({message.run_id for kind, message in records if kind == "run"}) == 1
    axes = {message.glob_name: message.step_metric for kind, message in records if kind == "metric"}
    assert axes["training/*"] == axes["evaluation/*"] == "step"
