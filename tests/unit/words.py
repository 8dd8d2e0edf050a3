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

WRITE = os.environ.get("GOLDEN") == "write"


@functools.cache
class Messages:
    """The messages.txt of a folder: a message on each line, after its case."""

    def __init__(self, folder):
        self.file = folder / "messages.txt"
        self.lines = {*self.file.read_text().splitlines()} if self.file.exists() else set()
        self._written = set()

    def has(self, message, case=""):
        """Whether the file has this message for the case. `GOLDEN=write` replaces those of the case."""
        line = case + message.replace("\n", "\\n")
        if WRITE and {case, line} - self._written:
            if case not in self._written:
                self.lines = {line for line in self.lines if not line.startswith(case)}
            self._written |= {case, line}
            self.lines.add(line)
            self.file.write_text("".join(f"{line}\n" for line in sorted(self.lines)))
        return line in self.lines


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
            known = [line for line in self._messages.lines if line.startswith(case)]
            pytest.fail(f"{case}{message}\nmessages.txt: " + "\n".join(known))

    @contextlib.contextmanager
    def refused(self, case, error=RecipeError):
        """Fails unless such an error is raised with the message of the case. Yields what pytest.raises
        does."""
        with pytest.raises(error) as raised:
            yield raised
        self.check(case, str(raised.value))
