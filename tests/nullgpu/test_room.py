"""With the room of the plan, PyTorch's caching allocator repeats no allocation; with less it does."""

import json
import sys
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import main
from launcher.planner.machine import known_machine
from launcher.planner.plan import make_plan
from launcher.recipe.load import load_recipe
from launcher.run.reporting import WARM_UP_STEPS
from tests.distributed.launching import run
from tests.run_files import read_lines, write_lines

RECIPE = {
    "run": {"name": "room", "max_steps": 12, "max_skipped_steps": 100},
    "model": {
        "config": {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "tie_word_embeddings": False,
        }
    },
    "data": {"tokenizer": "bytes", "sequence_length": 2048, "workers": 0, "train": ["text.jsonl"]},
    "batch": {"global_batch_size": 2, "micro_batch_size": 2},
    "strategy": {"kind": "fsdp", "mixed_precision": {"param_dtype": "bfloat16"}},
    "logging": {"every_steps": 1},
    "checkpoint": {"every_steps": None},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    write_lines(tmp_path / "text.jsonl", [{"text": "null devices compute nothing " * 20}] * 200)
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.long
def test_retries_are_counted_and_room_prevents_them(null_gpus, folder):
    recipe = load_recipe(["recipe=recipe.yaml"], ranks=1).recipe
    plan = make_plan(recipe, known_machine("h100", nodes=1, gpus_per_node=1))
    sizes = {"tight": 1.06 * plan.tensors, "roomy": plan.tensors + plan.margin + plan.room}
    trainings = {
        name: ["recipe=recipe.yaml", f"run.dir={folder}/{name}", f"NULLGPU_GIB={size / 2**30}"]
        for name, size in sizes.items()
    }
    gpus = null_gpus(count=1, capability=90)
    script = Path(__file__).parent / "trainings.py"
    command = [sys.executable, script, json.dumps(trainings)]
    output = run(command, timeout=240, cwd=folder, **gpus.variables).check().output
    retries = {
        name: [line["allocation_retries"] for line in read_lines(folder / name / "metrics.jsonl")]
        for name in sizes
    }
    later = {name: counts[WARM_UP_STEPS:] for name, counts in retries.items()}
    assert all(later["tight"]), retries
    assert not any(later["roomy"]), retries
    assert output.count("little memory: after step 5, up to step 6, PyTorch repeated") == 1
    assert output.count("little memory") == 1
    assert "names an override that needs less memory. This warning is not repeated" in output
    assert main(["report", str(folder / "tight")]) == 0
    assert "try batch.micro_batch_size=1" in (folder / "tight/report.html").read_text()
    for name, counts in later.items():
        status = json.loads((folder / name / "status.json").read_text())
        assert status["allocation_retries"] == sum(counts)
