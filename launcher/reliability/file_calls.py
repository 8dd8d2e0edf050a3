"""Calls of a file system that may not answer, such as a network file system whose server is gone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

FILE_SECONDS = 10.0
"""Time for a file system to answer while a failure is reported."""
_T = TypeVar("_T")


def bounded(call: Callable[[], _T], default: _T) -> _T:
    """The result of a call, or `default` if it takes longer than FILE_SECONDS: its thread is then
    left behind. Raises what the call raises."""
    results: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="files", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no thread can be started where memory ran out
        return call()
    thread.join(FILE_SECONDS)
    if errors:
        raise errors[0]
    return results[0] if results else default
