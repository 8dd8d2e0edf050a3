"""The words of messages: tests name cases, and messages.txt of their folder has the words.

`make golden` writes these files anew.
"""

import contextlib
import functools
import os
import re
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from tests.unit.small_recipe import says

WRITE = os.environ.get("GOLDEN") == "write"


@functools.cache
class Messages:
    """The messages.txt of a folder: a message on each line, after its case. A `...` in it stands for
    words of a library, which other versions say otherwise."""

    def __init__(self, folder):
        self._file = folder / "messages.txt"
        self._lines = {*self._file.read_text().splitlines()} if self._file.exists() else set()
        self._before = {}

    def of(self, case):
        """The lines of a case."""
        return [line for line in self._lines if line.startswith(case)]

    def has(self, message, case=""):
        """Whether the file has this message for the case. `GOLDEN=write` replaces those of the case."""
        line = case + message.replace("\n", "\\n")
        if WRITE:
            if case not in self._before:
                self._before[case] = self.of(case)
                self._lines -= {*self._before[case]}
            kept = (known for known in self._before[case] if says(known, line))
            self._lines.add(next(kept, line))
            self._file.write_text("".join(f"{line}\n" for line in sorted(self._lines)))
        return line in self._lines or any(says(known, line) for known in self.of(case))


class Words:
    """The words of the messages of a test. Temporary and current folders have the same names always."""

    def __init__(self, test, temporary):
        self._messages, self._module = Messages(test.parent), test.stem.removeprefix("test_")
        self._temporary = re.compile(rf"(/private)?{re.escape(str(temporary))}/\w+")

    def has(self, message, case=""):
        """Whether messages.txt has the message."""
        message = self._temporary.sub("TMP", message).replace(str(Path.cwd()), "CWD")
        return self._messages.has(message, case)

    def check(self, case, message):
        """Fails unless the message is that of the case, which has a name of its own in the module."""
        case = f"{self._module}: {case}: "
        if not self.has(message, case):
            pytest.fail("\n".join([f"{case}{message}", "messages.txt:", *self._messages.of(case)]))

    @contextlib.contextmanager
    def refused(self, case, error=RecipeError):
        """Fails unless such an error is raised with the message of the case. Yields what pytest.raises
        does."""
        with pytest.raises(error) as raised:
            yield raised
        self.check(case, str(raised.value))
