"""Writes docs/reference/cards.md: what was measured of each model type.

    python -m docs.cards_page

CPU cards are benchmarks/cards.json (`python benchmarks/cards.py`), figures of GPUs are
benchmarks/gpu_measured.json. The last column has what the lists in the tests name, so that page and tests
cannot differ: tests/unit/test_cards_page.py compares them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _pytest.mark import ParameterSet

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))

from gpu_rows import GROUPS

from docs.gpu_page import measured_figures, table
from tests.distributed import nf4_worker, test_architectures
from tests.unit.models import test_dequantized, test_expert_adapters
from tests.unit.objectives import test_masked_lm

ROOT = Path(__file__).resolve().parent.parent
CARDS, PAGE = ROOT / "benchmarks/cards.json", ROOT / "docs/reference/cards.md"
HEAD = """\
# Cards of model types

What was measured of each model type. A number is the largest relative difference from transformers, **=** means that all bits are
equal, **-** that the type does not have it or that the launcher refuses it with a reason, and **FAIL** that the difference is too
large. Each type has a small model with random weights, trained by `launcher/train.py` with FSDP on two ranks of a CPU, in float32.
A card for another type, or on your machine:

```bash
make cards TYPES="qwen3_moe"
```

- **weights**: loaded, divided, gathered and exported, every tensor has its bits.
- **forward**: the loss before the first step is that of transformers.
- **20 losses**: the difference from transformers' model in a plain loop with AdamW. One of more than 1e-5 is rounding: transformers'
  own loop is as far from itself in float64, or with the rows of a batch in another order.
- **resume**: from step 10 on, losses and exported weights of a resumed run.
- **export**: transformers loads the folder, and finds the loss that the run evaluated.
- **answers**: those of an evaluation in the run are those that transformers generates from the export.
- **packed**: losses of two documents in a sequence are those of the documents alone.
- **long rows**: losses of rows of 512 tokens, where a window or a chunk has 16.
- **LoRA**: peft loads the adapter, and finds the loss that the run evaluated.
- **losses**: the first and the last of the 20.
- **tensor**, **context**, **pipeline**, **expert**: losses of two ranks that [divide the model](../strategies.md#parallelism).
- **also tested**: *classes* (`model.task: sequence_classification`), *masked* (`masked_lm`), *QLoRA*, *on experts*
  (`lora.target_parameters`, as peft), *dequantized* (published weights in FP8 or MXFP4, as transformers).

{made}
"""
COLUMNS = {
    "weights": "weights",
    "forward": "forward",
    "losses": "20 losses",
    "resume": "resume",
    "export": "export",
    "answers": "answers",
    "packed": "packed",
    "long rows": "long rows",
    "LoRA": "LoRA",
    "tensor": "tensor",
    "context": "context",
    "pipeline": "pipeline",
    "expert": "expert",
}
"""By check: the head of its column."""
GPU_HEAD = "model type | row | GPU, date | ms, measured / plan | tokens/s | GiB, peak / plan"


def cards() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(CARDS.read_text())
    return found


def marked(function: Any) -> list[str]:
    """The values that a test is parametrized with, those of long tests too."""
    parametrized = next(mark for mark in function.pytestmark if mark.name == "parametrize")
    values = parametrized.args[1]
    return [str(value.values[0] if isinstance(value, ParameterSet) else value) for value in values]


def also_tested() -> dict[str, list[str]]:
    """By type: what the tests train besides the cards."""
    columns: dict[str, Iterable[str]] = {
        "classes": marked(test_architectures.test_new_classification_head_on_base_model),
        "masked": [config.model_type for config in test_masked_lm.CONFIGS],
        "QLoRA": [name.split()[0] for name in nf4_worker.CASES],
        "on experts": [*test_expert_adapters.KINDS],
        "dequantized": marked(test_dequantized.test_values_are_those_of_transformers),
    }
    found: dict[str, list[str]] = {}
    for column, types in columns.items():
        for name in dict.fromkeys(types):
            found.setdefault(name, []).append(column)
    return found


def cell(check: dict[str, Any] | None) -> str:
    """What the table shows of a check."""
    if check is None or check["result"] == "not run":
        return "-"
    difference = f"{check['difference']:.0e}" if check.get("difference") else "="
    if check["result"] == "FAIL":
        return f"**FAIL** {difference}" if "difference" in check else "**FAIL**"
    return difference


def first_and_last(card: dict[str, Any]) -> str:
    """The first and the last of the 20 losses."""
    losses = card["checks"].get("losses", {}).get("more", "").partition(" (")[0]
    if " to " not in losses:
        return "-"
    first, _, last = losses.partition(" to ")
    return f"{float(first):.3f}&nbsp;to&nbsp;{float(last):.3f}"


def trained(card: dict[str, Any]) -> bool:
    """Whether the launcher trained the type, well or not."""
    return any(check["result"] != "not run" for check in card["checks"].values())


def made(found: dict[str, dict[str, Any]]) -> str:
    """With what the cards were made, in a sentence."""
    texts = []
    for versions in sorted({(card["torch"], card["transformers"]) for card in found.values()}):
        cards = [c for c in found.values() if (c["torch"], c["transformers"]) == versions]
        dates = " and ".join(sorted({card["date"] for card in cards}))
        commits = ", ".join(sorted({f"`{card['commit']}`" for card in cards}))
        texts.append(
            f"{len(cards)} types on {dates} with torch {versions[0]} and transformers {versions[1]}, by "
            f"commits {commits}"
        )
    return f"Made: {'; '.join(texts)}."


def gpu_rows() -> list[list[str]]:
    """The rows of GPUs, by model type."""
    types = {
        (group, row.name): str(row.config.get("model_type", "llama"))
        for group, rows in GROUPS.items()
        for row in rows
        if group in ("goals", "families")
    }
    found = []
    for gpu, parts in measured_figures().items():
        for group, part in parts.items():
            for figures in part["figures"]:
                if (name := types.get((group, figures.get("row", "")))) and figures.get("ms"):
                    cells = [f"`{name}`", figures["row"], f"{gpu}, {part['date'][:10]}"]
                    cells += [f"{figures['ms']} / {figures['ms by plan']}", figures["tokens/s"]]
                    found.append([*cells, f"{figures['GiB']} / {figures['GiB by plan']}"])
    return sorted(found)


def gpu_losses() -> str:
    """The types that a GPU has trained to the losses of transformers, in a sentence."""
    rows = measured_figures()["H200"]["models"]
    in_float32 = [row for row in rows["figures"] if row["variant"] == "float32"]
    names = sorted({f"`{row['model'].split()[0]}`" for row in in_float32 if row["holds"] == "yes"})
    where = f"An H200 ({rows['date'][:10]}) trained these to the losses of transformers"
    return f"{where}, in float32 and in bfloat16: {', '.join(names)}."


def page() -> str:
    """The text of the page."""
    found, tested = cards(), also_tested()
    rows = [
        [
            f"`{name}`",
            *(cell(card["checks"].get(check)) for check in COLUMNS),
            first_and_last(card),
            ", ".join(tested.get(name, [])) or "-",
        ]
        for name, card in found.items()
        if trained(card)
    ]
    rows += [
        [f"`{name}`", *["-"] * len(COLUMNS), "-", ", ".join(columns)]
        for name, columns in tested.items()
        if name not in found or not trained(found[name])
    ]
    text = HEAD.format(made=made(found))
    text += "\n".join(
        table(
            " | ".join(("model type", *COLUMNS.values(), "losses", "also tested")),
            sorted(rows, key=_type),
        )
    )
    text += "\n## Types without a card\n\n"
    text += _others(found)
    text += f"\n\n## On GPUs\n\n{gpu_losses()} All figures are in the [engineering notes](../engineering/gpu.md).\n"
    return text + "\n".join(table(GPU_HEAD, gpu_rows()))


def _type(row: list[str]) -> str:
    return row[0].strip("`")


def _others(found: dict[str, dict[str, Any]]) -> str:
    """The types that were not trained, with the reason."""
    reasons: dict[str, list[str]] = {}
    for name, card in found.items():
        if not trained(card):
            refused = card["why"].startswith("refused")
            why = "refused" if refused else "no small model that transformers can train"
            reasons.setdefault(why, []).append(f"`{name}`")
    texts = [f"- {why}: {', '.join(names)}" for why, names in sorted(reasons.items())]
    end = "\n\nWhy a check was not run is in `benchmarks/cards.json`, and the launcher says so when the key is set."
    return "\n".join(texts) + end


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
