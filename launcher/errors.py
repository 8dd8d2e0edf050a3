"""What can go wrong in a way that the user can mend, and the exit statuses of every command."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
"""The recipe or the arguments are wrong; printed once, without a traceback."""
EXIT_NO = 3
"""Checked, and the answer is no: losses differ, does not fit, unhealthy."""
EXIT_STOPPED = 75
"""Stopped on request (EX_TEMPFAIL of sysexits.h): not finished, not failed."""


class RecipeError(ValueError):
    """What the user wrote cannot be run. Holds every problem found, one line each."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class TrainingError(RuntimeError):
    """The run itself cannot go on (too many skipped steps, say). The message is all there is to tell.

    reason: one word for status.json.
    """

    def __init__(self, message: str, *, reason: str = "error") -> None:
        self.reason = reason
        super().__init__(message)


class DivergedError(TrainingError):
    """The training went wrong at `first_step` and was noticed after `last_step`; a run may go back before it."""

    def __init__(self, message: str, *, reason: str, first_step: int, last_step: int) -> None:
        self.first_step, self.last_step = first_step, last_step
        super().__init__(message, reason=reason)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message; the name of its type where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
