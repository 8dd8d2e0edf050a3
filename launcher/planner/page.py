"""The HTML page of `launcher plan --html`. Does not import torch."""

from __future__ import annotations

from pathlib import Path

from launcher import __version__
from launcher.console import bytes_as_text
from launcher.metrics.page import Charts, Section, Text, bars, curve_figure, write_page
from launcher.planner.formatting import NAMES, as_text
from launcher.reliability.json_files import Json


def _amounts(plan: Json, moment: Json) -> dict[str, int]:
    """Names and bytes of a moment's components, with the context and the margin."""
    amounts = moment["components"] | {"context": plan["context"], "margin": plan["margin"]}
    return {NAMES[name]: amount for name, amount in amounts.items() if amount}


def write_plan(plan: Json, file: Path) -> None:
    """Writes a plan, as `as_json` returns it, as a page. Raises RecipeError."""
    peaks = [(phase, _amounts(plan, peak)) for phase, peak in plan["phases"].items()]
    moments = plan["timeline"]
    labels = [f"{moment['phase']} {moment['where']}" for moment in moments]
    sizes = [moment["total"] for moment in moments]
    sections: list[Section] = [
        bars("Memory at the peak of each phase", peaks, bytes_as_text),
        Charts([curve_figure("Tensors during a step", labels, sizes)]),
        Text("The whole plan", "\n".join(as_text(plan)), open=True),
    ]
    write_page(file, f"Plan of {plan['recipe']}", sections, footer=f"launcher {__version__}")
