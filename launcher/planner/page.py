"""The HTML page of `launcher plan out=FILE`. Does not import torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher import __version__
from launcher.console import bytes_as_text
from launcher.metrics.page import Charts, Section, Table, Text, bars, curve_figure, write_page
from launcher.planner.formatting import NAMES, as_text, configuration_cells
from launcher.reliability.json_files import Json


def _amounts(plan: Json, moment: Json) -> dict[str, int]:
    """Names and bytes of a moment's components, with the context and the margin."""
    amounts = moment["components"] | {"context": plan["context"], "margin": plan["margin"]}
    return {NAMES[name]: amount for name, amount in amounts.items() if amount}


def _configurations(plan: Json) -> Table:
    """A row for each configuration, with a button that copies its overrides."""
    pasted = [shlex.join(row["overrides"]) for row in plan["search"]["configurations"]]
    columns, *cells = configuration_cells(plan)
    rows = [[*row, words] for row, words in zip(cells, pasted, strict=True)]
    note = "Speed is predicted. A button copies the overrides that select the configuration."
    return Table("Configurations", [*columns, "overrides"], rows, note, pasted)


def write_plan(plan: Json, file: Path) -> None:
    """Writes a plan, as `as_json` returns it, as a page. Raises RecipeError."""
    peaks = [(phase, _amounts(plan, peak)) for phase, peak in plan["phases"].items()]
    moments = plan["timeline"]
    labels = [f"{moment['phase']} {moment['where']}" for moment in moments]
    sizes = [moment["total"] for moment in moments]
    memory = plan["machine"]["memory"]
    line = None if memory is None else (plan["machine"]["name"], memory)
    sections: list[Section] = [
        bars("Memory at the peak of each phase", peaks, bytes_as_text, line=line),
        Charts([curve_figure("Tensors during a step", labels, sizes)]),
    ]
    if plan["search"] is not None:
        sections.append(_configurations(plan))
    sections.append(Text("The whole plan", "\n".join(as_text(plan)), open=True))
    write_page(file, f"Plan of {plan['recipe']}", sections, footer=f"launcher {__version__}")
