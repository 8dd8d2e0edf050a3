"""Errors that the user can fix, and the exit statuses of every command."""

from __future__ import annotations

import difflib
import os
import traceback
from collections.abc import Iterable, Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
"""The recipe or the arguments are wrong; printed once, without a traceback."""
EXIT_NO = 3
"""Checked, and the answer is no: losses differ, does not fit, unhealthy."""
EXIT_STOPPED = 75
"""Stopped on request (EX_TEMPFAIL of sysexits.h): not finished, not failed."""


class RecipeError(ValueError):
    """The user's recipe or arguments cannot be run. Holds all problems, a line each.

    rules: for each problem of a recipe the key and the name of the rule, such as
    `data.labels/needs-data.kind`, which stay when the words change.
    """

    def __init__(self, problems: str | Sequence[str], *, rules: Sequence[str] = ()) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        self.rules = list(rules)
        super().__init__("\n".join(self.problems))


class RowError(ValueError):
    """A problem of a row. The message does not say which row."""


class TrainingError(RuntimeError):
    """The run cannot continue, for example after too many skipped steps. `reason` is a word for
    status.json."""

    def __init__(self, message: str, *, reason: str = "error") -> None:
        self.reason = reason
        super().__init__(message)


class DivergedError(TrainingError):
    """Training diverged at `first_step`, which was detected after `last_step`; a run may be rewound
    to a step before it."""

    def __init__(self, message: str, *, reason: str, first_step: int, last_step: int) -> None:
        self.first_step, self.last_step = first_step, last_step
        super().__init__(message, reason=reason)


def message_of(error: BaseException) -> str:
    """The message of an exception; empty if the exception's own code fails to make it."""
    try:
        return str(error)
    except Exception:
        return ""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; the name of its type where it has none."""
    return next(iter(message_of(error).strip().splitlines()), type(error).__name__)


def line_of(error: BaseException) -> str:
    """The line of code that raised an exception, as `file:line`; empty if it was never raised."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{os.path.relpath(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""


def closest(word: str, known: Iterable[str], *, similar: float = 0.6) -> str | None:
    """The known word that `word` is probably a misspelling of. similar: from 0 to 1, how much it must
    be."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=similar)), None)


def suggestion(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?`, or an empty string where no known word is similar."""
    near = closest(word, known)
    return f"; did you mean {near}?" if near else ""
