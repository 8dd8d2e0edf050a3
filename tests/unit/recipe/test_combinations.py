"""The table of docs/strategies.md: which settings go together with which sizes."""

import re

import pytest

from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe
from tests import REPOSITORY
from tests.run_files import write_lines

SIZES = ("pipeline", "context", "tensor", "expert")
SETTINGS = {
    **{name: [f"strategy.{name}_parallel_size=2"] for name in SIZES},
    "`strategy.kind: ddp`": ["strategy.kind=ddp"],
    "`strategy.replicate`": ["strategy.replicate=2"],
    "`strategy.cpu_offload`": ["strategy.cpu_offload={}"],
    "activation checkpointing": ["activation_checkpointing={mode: selective}"],
    "with a budget": ["activation_checkpointing={mode: selective, budget: 0.5}"],
    "`model.compile: true`": ["model.compile=true"],
    "`model.mlp_tile`": ["model.mlp_tile=64"],
    "`model.qat`": ["model.qat=int8"],
    "float8": ["strategy.mixed_precision={param_dtype: bfloat16, float8: rowwise}"],
    "Muon": ["optimizer.name=muon"],
    "Adafactor": ["optimizer.name=adafactor"],
    "states of int8 or bfloat16": ["optimizer.state_dtype=int8"],
    "LoRA": ["lora={rank: 4}"],
    "DoRA": ["lora={rank: 4, dora: true}"],
    "QLoRA": ["lora={rank: 4, quantize: nf4}"],
    "`model.mtp`": ["model.mtp={}"],
    "distillation": ["distillation={teacher: owner/teacher}"],
    "preference tuning": ["data.kind=preference", "data.train=FOLDER/pairs.jsonl", "preference={}"],
    "classification": [
        *("data.kind=classification", "data.train=FOLDER/labels.jsonl"),
        "model.task=sequence_classification",
    ],
    "`batch.micro_batch_tokens`": [
        *("batch.micro_batch_tokens=4096", "batch.micro_batch_size=null", "data.packing=false"),
    ],
    "`data.streaming`": ["data.streaming=true", "run.max_steps=5", "run.epochs=null"],
}
OF_MODEL = {("`model.mlp_tile`", "expert"): "no"}
"""What the model refuses, which these tests do not build."""


def table():
    """The cells of the table by row and column."""
    text = (REPOSITORY / "docs/strategies.md").read_text()
    head, _, *rows = re.search(r"^\| goes with .*\n(?:\|.*\n)+", text, re.M)[0].splitlines()
    columns = [cell.strip() for cell in head.split("|")[2:-1]]
    assert columns == list(SIZES)
    for row in rows:
        name, *cells = [cell.strip() for cell in row.split("|")[1:-1]]
        yield name, dict(zip(columns, cells, strict=True))


def test_all_settings_are_in_the_table():
    assert [name for name, _ in table()] == list(SETTINGS)


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_table_says_is_so(name, tmp_path):
    write_lines(tmp_path / "pairs.jsonl", [{"prompt": "a", "chosen": "b", "rejected": "c"}])
    write_lines(tmp_path / "labels.jsonl", [{"text": "a", "label": "x"}])
    words = ["recipe=fsdp", "data.train=README.md", "data.kind=text", "batch.global_batch_size=64"]
    words += ["model.path=owner/model", "model.config=null"]
    cells = dict(table())[name]
    for size, cell in cells.items():
        own = [word.replace("FOLDER", str(tmp_path)) for word in SETTINGS[name]]
        if size == name:
            assert cell == ""
            continue
        refusal = None
        try:
            load_recipe([*words, *SETTINGS[size], *own], ranks=8, files=False)
            found = OF_MODEL.get((name, size), "yes")
        except RecipeError as error:
            found, refusal = "no", str(error)
        assert cell == found, (name, size)
        assert refusal is None or "parallel_size" in refusal, refusal
