"""Writes the last section of docs/models.md: which types of models the tests train, and with what.

    python -m docs.tested_table

The table has what the lists in the tests name, so that page and tests cannot differ:
tests/unit/test_tested.py compares them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml
from _pytest.mark import ParameterSet

from tests import multimodal
from tests.distributed import (
    architectures_worker,
    gemma_worker,
    layouts,
    nf4_worker,
    recurrent_worker,
    test_architectures,
)
from tests.unit.models import (
    recurrent_families,
    test_dequantized,
    test_expert_adapters,
    test_experts,
    test_lora,
    test_packed_attention,
)
from tests.unit.objectives import test_masked_lm

PAGE = Path(__file__).resolve().parent / "models.md"
START = "\n## Tested types\n"
"""The section begins here and goes to the end of the page."""
HEAD = """
These types are trained in the tests, as small models with random weights on CPUs. `python -m docs.tested_table` wrote
the table from the lists in the tests. With a type that is not in the table, run `launcher selftest` first. Reward
models and preference tuning have no architectures of their own; their tests train `llama`.

- **trained**: loads a checkpoint with the logits of transformers, trains to the same losses with DDP, FSDP and FSDP
  with CPU offload, and exports what transformers loads again.
- **losses**: trains to the losses and gradients of a plain loop with transformers' model, with DDP or FSDP. *trained*
  includes it.
- **packed**: the loss of packed documents is that of the documents alone.
- **classes**: `model.task: sequence_classification`, with a new head.
- **masked**: losses and gradients of `model.task: masked_lm` are those of transformers.
- **LoRA**, **QLoRA**: adapters. peft loads them, or the losses are those of the rounded weights.
- **on experts**: `lora.target_parameters`. Losses, gradients and files are those of peft.
- **dequantized**: published weights in FP8 or MXFP4 are read as transformers dequantizes them.
- **tensor**, **context**, **expert**: ranks that [divide a model](strategies.md#parallelism) train to the losses of one rank.
  *found* means that the experts of this type are found, and not that a test trains it.

"""


def model_type(name: str, config: Any) -> str:
    """Of a case: its name, unless the config (a section or its YAML) has it."""
    fields = yaml.safe_load(config) if isinstance(config, str) else config
    return str(fields.get("model_type", name))


def marked(function: Any) -> list[str]:
    """The values that a test is parametrized with, those of long tests too."""
    parametrized = next(mark for mark in function.pytestmark if mark.name == "parametrize")
    values = parametrized.args[1]
    return [value.values[0] if isinstance(value, ParameterSet) else value for value in values]


def divided(key: str) -> Iterable[str]:
    """The types that a launch of tests/distributed/test_layouts.py trains with an override."""
    for name, variant in (case for cases in layouts.LAUNCHES.values() for case in cases):
        if any(override.startswith(key) for override in layouts.VARIANTS[variant]):
            yield model_type(name, layouts.MODELS[name])


def table() -> dict[str, dict[str, str]]:
    """For each type the columns that hold for it."""
    trained = {n: model_type(n, c) for n, c in architectures_worker.ARCHITECTURES.items()}
    tests = test_architectures
    lora = [case.split()[1] for case in tests.LORA if case.split()[1] in trained]
    round_trips = [trained[n] for n in tests.ROUND_TRIPS if n in trained] + [*multimodal.MODELS]
    gemmas = [name.split(",")[0] for name in gemma_worker.MODELS]
    recurrent = [
        case.split()[0] for case in (*recurrent_worker.CASES, *recurrent_worker.IN_FLOAT32)
    ]
    columns = {
        "trained": round_trips,
        "losses": [*round_trips, *gemmas, *recurrent],
        "packed": [
            *test_packed_attention.MODELS,
            *test_packed_attention.WITHOUT_POSITIONS,
            *recurrent_families.FAMILIES,
            *gemmas,
        ],
        "classes": marked(tests.test_new_classification_head_on_base_model),
        "masked": [config.model_type for config in test_masked_lm.CONFIGS],
        "LoRA": [*lora, *test_lora.MIXTURES],
        "QLoRA": [name.split()[0] for name in nf4_worker.CASES],
        "on experts": [*test_expert_adapters.KINDS],
        "dequantized": marked(test_dequantized.test_values_are_those_of_transformers),
        "tensor": divided(layouts.TP),
        "context": divided(layouts.CP),
        "expert": divided(layouts.EP),
    }
    rows: dict[str, dict[str, str]] = {}
    for column, types in columns.items():
        for name in types:
            rows.setdefault(name, {})[column] = "yes"
    for name, _ in marked(test_experts.test_experts_are_found_by_the_plan):
        rows.setdefault(name, {}).setdefault("expert", "found")
    return {name: {c: rows[name].get(c, "") for c in columns} for name in sorted(rows)}


def words(row: dict[str, str]) -> str:
    """The columns that hold for a type. What `trained` includes is not repeated."""
    held = [name if value == "yes" else f"{name} ({value})" for name, value in row.items() if value]
    return ", ".join(name for name in held if name != "losses" or "trained" not in held)


def page() -> str:
    """The text of docs/models.md, with the section as the tests have it."""
    lines = ["| model type | tested |", "|---|---|"]
    for name, row in table().items():
        text = " (images and text; trained on text)" if name in multimodal.MODELS else ""
        lines.append(f"| `{name}`{text} | {words(row)} |")
    before, start, _ = PAGE.read_text(encoding="utf-8").partition(START)
    return before + start + HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
