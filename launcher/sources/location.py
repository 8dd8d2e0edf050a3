"""Where files are."""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from launcher.errors import closest

_MOST_ENTRIES = 10_000
"""Names in a folder that are compared with a mistyped one."""


def nearest_path(name: str) -> str | None:
    """The existing path that `name`, which does not exist, is probably a misspelling of."""
    path = Path(name)
    with contextlib.suppress(OSError):  # a folder that cannot be read, or a name that is too long
        for parent in path.parents:
            if parent.is_dir():
                missing, *rest = path.relative_to(parent).parts
                with os.scandir(parent) as entries:
                    known = [entry.name for entry in itertools.islice(entries, _MOST_ENTRIES)]
                near = closest(missing, known)
                found = None if near is None else Path(parent, near, *rest)
                return str(found) if found is not None and found.exists() else None
    return None


def no_such(kind: str, name: str, *, nor: str = "") -> str:
    """The message about a file or folder that does not exist, with the nearest one that does.

    kind: what was looked for, such as `file or folder`. nor: what else it is not, and why.
    """
    if name.startswith("~"):
        whole = os.path.expanduser(name)
        return f"no such {kind}: {name}; only a shell replaces ~: write {whole}"
    text = f"no such {kind}: {name} (looked for in {Path.cwd()}){nor}"
    near = None if os.path.exists(name) else nearest_path(name)
    return text if near is None else f"{text}; did you mean {near}?"
