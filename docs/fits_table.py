"""Writes docs/fits.md: which models fit, with which method, on which GPUs.

    python docs/fits_table.py

Each cell is the search of `launcher new`. A run keeps what earlier, interrupted ones have found in
build/fits.json; remove it when the plan has changed.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from launcher.cli.new import Wanted, load_text, plannable
from launcher.planner.formatting import strategy_text
from launcher.planner.machine import known_machine
from launcher.planner.search import search_configurations

ROOT = Path(__file__).resolve().parent.parent
FOUND, PAGE = ROOT / "build/fits.json", ROOT / "docs/fits.md"
MODELS = (
    "meta-llama/Llama-3.2-1B",
    "meta-llama/Llama-3.1-8B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
)
METHODS = ("full", "lora", "qlora")
MACHINES = {"1 x 24 GB": ("rtx-4090", 1), "1 x 80 GB": ("h100", 1), "8 x 80 GB": ("h100", 8)}
HEAD = """\
# What fits

Does a model fit, and in how much memory of a GPU? The columns are one RTX 4090, one H100 and eight H100; sequences have
4,096 tokens. A click on an answer shows the fastest configuration that fits. **slowly**: only with CPU offload, which also needs
host memory. These are figures of the plan, not measured on GPUs. `python docs/fits_table.py` wrote this page.

`launcher new model=... data=... method=... gpu=h100 gpus=8` writes the recipe of a cell, with what else fits and less
memory, and the host memory. [Choosing a strategy](choosing.md) explains the words; the micro-batch is in sequences.
"""


def cell(model: str, method: str, machine_name: str) -> tuple[float | None, str]:
    """GiB of a GPU and the configuration in words; None: nothing fits."""
    gpu, gpus = MACHINES[machine_name]
    machine = known_machine(gpu, nodes=1, gpus_per_node=gpus)
    wanted = Wanted(model, str(ROOT / "README.md"), "text", method, 4096)
    recipe, _ = plannable(load_text(wanted.text(machine), machine))
    best = search_configurations(recipe, machine, traced=0).best
    if best is None:
        return None, "does not fit"
    words = (
        strategy_text(best.recipe, machine.ranks)
        .replace(", bf16", "")
        .replace("LoRA 16 on nf4", "")
    )
    words = ", ".join(word for word in words.split(", ") if word not in ("", "LoRA 16"))
    compiled = ", compiled" if best.recipe.model.compile else ""
    return (
        best.plan.needed / 2**30,
        f"{words}{compiled}, micro-batch {best.recipe.batch.micro_batch_size}",
    )


def answer(memory: float | None, words: str) -> str:
    """Yes or no with the memory, and the configuration on demand."""
    if memory is None:
        return "no"
    fits = "slowly" if re.search("CPU offload(,|$)", words) else "yes"
    return f"<details><summary><b>{fits}</b>, {memory:.1f} GiB</summary>{words}</details>"


def main() -> None:
    FOUND.parent.mkdir(exist_ok=True)
    found = json.loads(FOUND.read_text()) if FOUND.is_file() else {}
    lines = [HEAD]
    for model in MODELS:
        lines += [f"## {model}\n", f"| method | {' | '.join(MACHINES)} |", "|---|---|---|---|"]
        for method in METHODS:
            row = []
            for machine in MACHINES:
                key = f"{model} {method} {machine}"
                if key not in found:
                    found[key] = cell(model, method, machine)
                    FOUND.write_text(json.dumps(found, indent=1))
                    print(key, found[key], flush=True)
                row.append(answer(*found[key]))
            lines.append(f"| {method} | {' | '.join(row)} |")
        lines.append("")
    PAGE.write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
