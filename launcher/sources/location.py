"""Where files are: one type for all that finds, lists and opens the files of data."""

from __future__ import annotations

import contextlib
import glob
import itertools
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launcher.errors import closest


@dataclass(frozen=True)
class Location:
    """A file or folder by its name, which may be absent. A name is a path of this machine's file
    system; another place of files would be another kind of name, understood here alone. Methods that
    read raise OSError."""

    name: str

    @property
    def path(self) -> Path:
        """For libraries that open files by themselves."""
        return Path(self.name)

    @property
    def parent(self) -> Location:
        """The folder that holds it."""
        return Location(str(self.path.parent))

    def inside(self, name: str) -> Location:
        """The file or folder of this name in this folder."""
        return Location(str(self.path / name))

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return self.path.exists()

    def is_file(self) -> bool:
        """Whether it is a file; a named pipe, which can be read once, is none."""
        return self.path.is_file()

    def is_special(self) -> bool:
        """Whether it is a named pipe, a socket or a device, which cannot be read twice."""
        try:
            mode = self.path.stat().st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        return self.path.is_dir()

    def missing_target(self) -> str | None:
        """What a link points to that is not there; None: it is no such link."""
        broken = self.path.is_symlink() and not self.path.exists()
        return os.readlink(self.name) if broken else None

    def size(self) -> int:
        """Bytes of the file."""
        return self.path.stat().st_size

    def state(self) -> list[object]:
        """What changes with the content of the file: name, size, times and inode. A program may write
        other content of the same size and set the time back, but not that of the change (ctime)."""
        state, whole = self.path.stat(), str(self.path.resolve())
        return [whole, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]

    def open(self) -> BinaryIO:
        """The bytes of the file, from the beginning; `seek` reads a range."""
        return self.path.open("rb")

    def files(self) -> list[Location]:
        """All that is no folder below the folder, at any depth, sorted by path: files, links whose
        target is missing, named pipes."""
        return [Location(str(path)) for path in sorted(self.path.rglob("*")) if not path.is_dir()]

    def is_hidden_in(self, folder: Location) -> bool:
        """Whether the name of the file, or of a folder between it and `folder`, begins with a dot, or is
        that of a cache of Python."""
        parts = self.path.relative_to(folder.path).parts
        return any(part.startswith(".") or part == "__pycache__" for part in parts)


def matching(pattern: str) -> list[Location]:
    """The files and folders that a pattern names, sorted. A path that exists is that file, also if it
    holds `[`, `*` or `?`. As in Megatron, a name without `.idx` and `.bin` names these two files."""
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not found and pattern:
        found = sorted(glob.glob(f"{pattern}.idx") + glob.glob(f"{pattern}.bin"))
    return [Location(str(Path(name))) for name in found]


def is_of_system(pattern: str) -> bool:
    """Whether a pattern names files of the system, which are endless or change."""
    return os.path.abspath(pattern).split("/")[1] in ("proc", "sys")


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
