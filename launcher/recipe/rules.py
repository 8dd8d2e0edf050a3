"""What a rule between several keys of a recipe is, and the list of all rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from launcher.recipe.schema import Recipe

Found = Iterator[tuple[str, str]]
"""Dotted keys, and what is wrong with each."""
Test = Callable[[Recipe, int | None], Found]
"""Takes the recipe and the number of data-parallel ranks, or None where it is not known yet."""


@dataclass(frozen=True)
class Rule:
    """A test, with the keys that it reads: it is left out where one of them has no sound value."""

    reads: tuple[str, ...]
    test: Test
    of_files: bool


RULES: list[Rule] = []


def rule(*reads: str, of_files: bool = False) -> Callable[[Test], Test]:
    """Adds a rule to `RULES`.

    reads: keys, dotted. of_files: whether it looks for data, which a plan does not need.
    """

    def register(test: Test) -> Test:
        RULES.append(Rule(reads, test, of_files))
        return test

    return register
