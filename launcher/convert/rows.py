"""Data sets of other tools as `data.train`: one list of files, or a mixture of sources."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from launcher.convert.conversion import Conversion


@dataclass
class DataSet:
    """A data set as the recipe names it."""

    file: str
    origin: str
    kind: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    """Keys of `data`, such as messages_column, that a source of a mixture may have too."""
    notes: list[str] = field(default_factory=list)
    """What trains a bit differently."""
    loss_on: str | None = None
    """data.loss_on, which all sources share."""


def set_train(c: Conversion, sets: list[DataSet], origin: str) -> None:
    """Sets data.train, data.kind and what goes with them."""
    if not sets:
        return
    kinds = {each.kind for each in sets}
    first = sets[0]
    kind = first.kind
    alike = len(kinds) == 1 and all(each.settings == first.settings for each in sets)
    if len(sets) > 1 and any(each.settings.get("limit") for each in sets):
        alike = False  # of each of them
    if alike:
        c.set("data.train", [each.file for each in sets], origin)
        for key, value in first.settings.items():
            if value is not None:
                c.set(f"data.{key}", value, first.origin)
    else:
        mixture: dict[str, Any] = {}
        for number, each in enumerate(sets):
            name = re.sub(r"\W+", "_", each.file.rpartition("/")[2].partition(".")[0]).strip("_")
            name = name if re.match(r"[A-Za-z_]", name) else f"set_{name}"
            name = f"{name}_{number}" if name in mixture else name
            own = {key: value for key, value in each.settings.items() if value is not None}
            same_kind = each.kind in (kind, None)
            mixture[name] = {"files": [each.file], **own}
            if not same_kind:
                mixture[name]["kind"] = each.kind
        c.set("data.train", mixture, origin)
    if kind is not None:
        c.set("data.kind", kind, first.origin)
    for each in sets:
        for note in each.notes:
            c.differ("data.kind" if kind is not None else "data.train", note)
    wanted = {each.loss_on for each in sets if each.loss_on is not None}
    if wanted and kind in ("chat", "instruct"):
        c.set("data.loss_on", wanted.pop(), first.origin)
        if wanted:
            c.lose(first.origin, "the sources have loss on other parts; here all have the same")


def sequence_length(c: Conversion, name: str, default: int) -> None:
    """The length of a sequence."""
    length = c.get(name)
    if isinstance(length, int) and length > 1:
        c.set("data.sequence_length", length, name)
    else:
        c.set("data.sequence_length", default, name if name in c.given else "")


def validation(c: Conversion, name: str) -> bool:
    """The held-out part of the training data, as a share. Returns whether there is one."""
    size = c.get(name)
    if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
        return False
    if size < 1:
        c.set("data.validation_split", size, name)
        c.differ("data.validation_split", "other rows than there are held out")
        return True
    c.set("data.validation_split", 0.02, name)
    c.differ("data.validation_split", f"{size} rows there; here a share of the rows")
    return True


def packing(c: Conversion, *, on: bool, origin: str, isolated: bool = True) -> None:
    """Packing; auto, so that models that cannot keep documents apart are trained without it."""
    if on:
        note = "documents of a sequence do not see each other"
        c.set("data.packing", "auto", origin, note if isolated else "")
        if not isolated:
            c.differ("data.packing", f"{note}; there they do")
    else:
        c.set("data.packing", False, origin, "")


def too_long(c: Conversion, origin: str) -> None:
    """What becomes of rows that are too long, which the tool cuts: after data.kind and the length."""
    kind = c.values.get("data.kind")
    if kind in ("chat", "instruct"):
        c.set("data.overlong", "cut", origin, "there, too long rows are cut")
    elif kind in ("preference", "unpaired"):
        unit = "pairs with such an answer" if kind == "preference" else "such answers"
        c.differ(
            "data.sequence_length", f"there, too long answers are cut; here {unit} are dropped"
        )
