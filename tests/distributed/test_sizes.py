"""The recipe `sft` on sixty rows: sizes are chosen on all ranks alike, and a resumed run keeps them."""

import json

import pytest
import yaml

from launcher.planner.auto import NAMES
from tests import REPOSITORY
from tests.distributed.launching import torchrun
from tests.run_files import read_lines

TRAIN = REPOSITORY / "launcher/train.py"

MODEL = [
    "model.path=null",
    "model.compile=false",
    "model.config={model_type: llama, vocab_size: 260, hidden_size: 32, intermediate_size: 64, "
    "num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2}",
    "data.tokenizer=bytes",
    "data.workers=0",
    "run.device=cpu",
    "strategy={kind: ddp, mixed_precision: null}",
    "batch.micro_batch_size=1",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sizes")
    rows = [{"prompt": f"What is E{n}? ", "completion": f"Sensor {n}."} for n in range(60)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def start(folder, ranks, *words):
    words = ["recipe=sft", *MODEL, "data.train=rows.jsonl", "data.cache=cache", *words]
    return torchrun(TRAIN, *words, ranks=ranks, timeout=200, cwd=folder)


def test_sizes_are_chosen_and_a_resume_on_other_ranks_keeps_them(folder):
    printed = start(folder, 2).check().output
    assert "auto: for 60 rows of " in printed
    assert printed.count("batch.global_batch_size=4 ") == 1, "only rank 0 must say it"
    assert " by plan for " in printed
    recipe = yaml.safe_load((folder / "runs/sft/recipe.yaml").read_text())
    sizes = recipe["batch"]["global_batch_size"], recipe["run"]["epochs"]
    assert (*sizes, recipe["data"]["packing"]) == (4, 5, False)
    steps = read_lines(folder / "runs/sft/metrics.jsonl")[-1]["step"]
    printed = start(folder, 3, "run.epochs=6").check().output
    assert "auto: for 60 rows" not in printed
    text = (folder / "runs/sft/recipe.yaml").read_text()
    autos = {line.strip() for line in text.splitlines() if line.endswith(": auto")}
    assert autos <= {f"{key.rpartition('.')[2]}: auto" for key in NAMES}
    resumed = yaml.safe_load(text)
    assert resumed["batch"]["global_batch_size"] == 4, "3 ranks alone would have had 3 or 6"
    assert resumed["data"] | {"date": None} == recipe["data"] | {"date": None}
    assert read_lines(folder / "runs/sft/metrics.jsonl")[-1]["step"] > steps


def test_a_step_that_sees_a_row_twice_ends_the_start(folder):
    larger = ("batch.global_batch_size=64", "data.packing=false")
    result = start(folder, 2, *larger, "run.name=twice")
    assert result.status != 0
    assert "64 rows are more than the 5" in result.output
    assert "data.repeat_in_step=true allows it" in result.output
    allowed = ("data.repeat_in_step=true", "run.epochs=null", "run.max_steps=2", "run.name=allowed")
    start(folder, 2, *larger, *allowed).check()
