"""What becomes of each key of another tool's config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launcher.recipe.other_names import (
    ABSENT_BY_NAME,
    KEYS_BY_NAME,
    NEEDLESS_BEGINNINGS,
    NEEDLESS_BY_NAME,
)


def is_off(value: object) -> bool:
    """Whether a value of another tool's key means that the key has no effect."""
    return not value or (isinstance(value, str) and value.lower() in ("none", "no", "off"))


def shown(name: str) -> str:
    """A key as it is shown: a component of torchtune is the value of its section."""
    return name.removesuffix("._component_")


def _has(section: object, key: str) -> bool:
    return isinstance(section, dict) and not is_off(section.get(key))


@dataclass
class Conversion:
    """The recipe that is being made, and what became of each of the tool's keys.

    A row of a tool's data file takes the keys that it names (`get`) and sets keys of the recipe
    (`set`). A name with points is that of a key in a section: `optimizer.lr`.
    """

    tool: str
    given: dict[str, Any]
    """The config. Keys without a value are not in it."""
    folder: Path
    """Folder of the config, for the files that it names."""
    ranks: int
    command_method: str | None = None
    """How the command says that it trains, where the config does not: dpo, kto; None: not said."""
    method: str = ""
    """What the config trains, by the data file: sft, pretrain, preference, kto, reward or rl."""
    comments: str = ""
    """The comment lines of the config."""
    values: dict[str, Any] = field(default_factory=dict)
    """Values of the recipe by dotted keys."""
    origins: dict[str, str] = field(default_factory=dict)
    """For each key of the recipe, the tool's keys that it comes from."""
    notes: dict[str, list[str]] = field(default_factory=dict)
    """For each key of the recipe, what it means in another way here."""
    differs: dict[str, str] = field(default_factory=dict)
    """The tool's keys, or `its default`, that are kept and train a bit differently, and how."""
    lost: dict[str, str] = field(default_factory=dict)
    """The tool's keys that change the training and have no equal here, and what differs."""
    needless: dict[str, str] = field(default_factory=dict)
    """The tool's keys without which the training is the same, and why."""
    shows_images: str = ""
    """The tool's key that shows that rows have images; empty: none does."""
    taken: set[str] = field(default_factory=set)
    """The tool's keys that a row has looked at, without those in sections."""

    def at(self, *names: str) -> Any:
        """The value of the first of these keys that is given; None: of none. A key in a list of sections
        has the value of the first section in which it is on."""
        for name in names:
            found: Any = self.given
            for part in [name] if name in self.given else name.split("."):
                if isinstance(found, list):
                    found = next((each for each in found if _has(each, part)), None)
                found = found.get(part) if isinstance(found, dict) else None
            if found is not None:
                return found
        return None

    def get(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these keys that is given. All of them count as known."""
        self.taken |= {name.partition(".")[0] for name in names}
        found = self.at(*names)
        return default if found is None else found

    def names(self, *names: str) -> str:
        """Those of these keys that are given, for an origin."""
        return ", ".join(shown(name) for name in names if self.at(name) is not None)

    def file(self, name: str) -> Path | None:
        """A file that the config names, in the current folder or one above the config; None: not here."""
        folders = (Path(), self.folder, *self.folder.parents)
        return next((each / name for each in folders if (each / name).exists()), None)

    def set(self, key: str, value: Any, origin: str = "", note: str = "") -> None:
        """Sets a key of the recipe. origin: the tool's keys; empty: the tool's default."""
        self.values[key] = value
        self.origins[key] = f"{self.tool}: {origin}" if origin else f"{self.tool}'s default"
        if note:
            self.note(key, note)

    def note(self, key: str, text: str) -> None:
        """Adds a sentence above a key of the recipe."""
        texts = self.notes.setdefault(key, [])
        if text not in texts:
            texts.append(text)

    def origin(self, key: str) -> str:
        """The tool's keys that a key of the recipe comes from; empty: its default, or another's."""
        return self.origins.get(key, "").partition(": ")[2]

    def differ(self, key: str, text: str, names: str = "") -> None:
        """Records that a key of the recipe trains a bit differently, and adds it above the key. names:
        the tool's keys by which it does, if they are not those that the key comes from."""
        self.note(key, f"{names}: {text}" if names else text)
        names = names or self.origin(key) or key
        known = self.differs.get(names)
        self.differs[names] = text if known in (None, text) else f"{known}; {text}"

    def lose(self, name: str, what: str) -> None:
        """Records what changes the training and is lost."""
        self.taken.add(name)
        self.lost.setdefault(shown(name), what)

    def skip(self, why: str, *names: str) -> None:
        """Records given keys without which the training is the same."""
        for name in names:
            if self.get(name) is not None:
                self.needless.setdefault(name, why)

    @property
    def evaluates(self) -> bool:
        """Whether there are data for evaluations."""
        return "data.validation" in self.values or "data.validation_split" in self.values

    def rest(self) -> Iterator[str]:
        """Names of keys that no row has looked at."""
        return (name for name in self.given if name not in self.taken)


def finish(conversion: Conversion, same: Mapping[str, str]) -> None:
    """Decides about the keys that no row of the tool has looked at, by their names alone.

    same: the keys of the recipe by their last name, where that is of one key only.
    """
    for name in list(conversion.rest()):
        value, key = conversion.given[name], KEYS_BY_NAME.get(name) or same.get(name)
        conversion.taken.add(name)
        begins = [why for start, why in NEEDLESS_BEGINNINGS.items() if name.startswith(start)]
        if name in NEEDLESS_BY_NAME:
            conversion.needless[name] = NEEDLESS_BY_NAME[name]
        elif is_off(value):
            conversion.needless[name] = "it is off"
        elif name in ABSENT_BY_NAME:
            conversion.lose(name, ABSENT_BY_NAME[name])
        elif key is not None and not isinstance(value, dict):
            if key not in conversion.values:
                conversion.set(key, value, name)
        elif begins:
            conversion.needless[name] = begins[0]
        else:
            conversion.lose(name, "not known here")
