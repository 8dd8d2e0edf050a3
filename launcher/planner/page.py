"""The HTML page of `launcher plan out=FILE`. Does not import torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from launcher import __version__
from launcher.console import bytes_as_text
from launcher.metrics.page import (
    Card,
    Cards,
    Charts,
    Section,
    Table,
    Text,
    bars,
    curve_figure,
    write_page,
)
from launcher.planner.formatting import NAMES, as_text, configuration_cells, device_noun
from launcher.reliability.json_files import Json


def _amounts(plan: Json, moment: Json) -> dict[str, int]:
    """Names and bytes of a moment's components, with the context and the margin."""
    amounts = moment["components"] | {"context": plan["context"], "margin": plan["margin"]}
    return {NAMES[name]: amount for name, amount in amounts.items() if amount}


def _verdict(plan: Json) -> Cards:
    """Whether it fits, and what of."""
    spare, memory = plan["spare"], plan["machine"]["memory"]
    host, host_memory = plan["host"]["spare"], plan["machine"]["host_memory"]
    cards = []
    if spare is not None and memory is not None:
        cards.append(_fits(f"memory of a {device_noun(plan)}", spare, memory, room=plan["room"]))
    else:
        size = bytes_as_text(plan["needed"])
        cards.append(Card(f"memory of a {device_noun(plan)}", size, "of an unknown size"))
    if host is not None and host_memory is not None:
        cards.append(_fits("host memory of a node", host, host_memory))
    else:
        cards.append(Card("host memory of a node", bytes_as_text(plan["host"]["total"]), "needed"))
    cards += [Card("strategy", plan["strategy"]), Card("batch", plan["batch"])]
    return Cards(cards)


def _fits(name: str, spare: int, memory: int, *, room: int = 0) -> Card:
    needed = f"{bytes_as_text(memory - spare)} of {bytes_as_text(memory)} are needed"
    if spare < 0:
        return Card(name, f"does not fit, needs {bytes_as_text(-spare)} more", needed, "bad")
    if spare < room:
        needed += f"; will be slow with less than {bytes_as_text(room)} to spare"
    return Card(name, f"fits, {bytes_as_text(spare)} to spare", needed, "good")


def _configurations(plan: Json) -> Table:
    """A row for each configuration, with a button that copies its overrides."""
    pasted = [shlex.join(row["overrides"]) for row in plan["search"]["configurations"]]
    columns, *cells = configuration_cells(plan)
    rows = [[*row, words] for row, words in zip(cells, pasted, strict=True)]
    note = "Speed is predicted. A button copies the overrides that select the configuration."
    columns = [*columns, "overrides"]
    return Table("Configurations", columns, rows, note, pasted, words=("overrides",))


def write_plan(plan: Json, file: Path) -> None:
    """Writes a plan, as `as_json` returns it, as a page. Raises RecipeError."""
    peaks = [(phase, _amounts(plan, peak)) for phase, peak in plan["phases"].items()]
    moments = plan["timeline"]
    labels = [f"{moment['phase']} {moment['where']}" for moment in moments]
    sizes = [moment["total"] for moment in moments]
    memory = plan["machine"]["memory"]
    line = None if memory is None else (plan["machine"]["name"], memory)
    sections: list[Section] = [
        _verdict(plan),
        bars("Memory at the peak of each phase", peaks, bytes_as_text, line=line),
        Charts([curve_figure("Tensors during a step", labels, sizes)]),
    ]
    if plan["search"] is not None:
        sections.append(_configurations(plan))
    sections.append(Text("The whole plan", "\n".join(as_text(plan))))
    write_page(file, f"Plan of {plan['recipe']}", sections, footer=f"launcher {__version__}")
