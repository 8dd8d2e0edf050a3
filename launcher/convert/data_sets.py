"""Data sets of other tools as `data.train`: one list of files, or a mixture of sources."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from launcher.convert.conversion import Conversion, shown


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


KINDS = {"preference": "preference", "reward": "preference", "kto": "unpaired"}
"""data.kind, where what is trained says it."""


def data_set(c: Conversion, entry: Conversion, name: str) -> list[DataSet]:
    """The data sets of an entry of a list whose rows have been applied. name: the key of the list.

    What the entry records is recorded in the config's conversion."""
    label = entry.given.get("label")
    for key, what in entry.lost.items():
        c.lose(f"{name}.{key}" if label is None else f"{name}: {label}".rstrip(": "), what)
    c.shows_images = c.shows_images or (entry.shows_images and f"{name}: {label}")
    values = {key.removeprefix("data."): value for key, value in entry.values.items()}
    files, kind, loss_on = (values.pop(key, None) for key in ("train", "kind", "loss_on"))
    origin = entry.origin("data.kind")
    origin = name if label is not None or not origin else shown(f"{name}.{origin}")
    if (system := values.pop("system", None)) is not None:
        c.set("data.system", system, f"{name}.{entry.origin('data.system')}")
    notes = [*entry.differs.values()]
    files = [files] if isinstance(files, str) else files or []
    return [DataSet(file, origin, kind, dict(values), notes, loss_on) for file in files]


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
