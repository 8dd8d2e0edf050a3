"""Where files are: one type for all that finds, lists, opens and copies files that may be in a store."""

from __future__ import annotations

import contextlib
import errno
import glob
import itertools
import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from launcher.errors import closest
from launcher.files import StoredFile, blocks, checksum_of_file, flush, replace_file
from launcher.sources import stores
from launcher.sources.store_names import scheme_of
from launcher.sources.stores import AHEAD, Known

TOGETHER = 8
"""Requests at a time, of a process that copies files."""
_RANGE = 16 << 20
"""Bytes that are copied at once."""


@dataclass(frozen=True)
class Location:
    """A file or folder by its name, which may be absent. A name is a path of this machine's file
    system, or an address in a store (`stores.py`). Methods that read raise OSError."""

    name: str
    known: Known | None = None
    """What a listing of a store has said of it."""

    @property
    def in_store(self) -> bool:
        """Whether it is in a store, not on this machine."""
        return scheme_of(self.name) is not None

    @property
    def path(self) -> Path:
        """For libraries that open files of this machine by themselves."""
        assert not self.in_store
        return Path(self.name)

    @property
    def parts(self) -> list[str]:
        """The names of the folders above it and its own, by which files are sorted."""
        return self.name.split("/")

    @property
    def last(self) -> str:
        """Its name in its folder."""
        return self.parts[-1]

    @property
    def bare(self) -> Location:
        """The same name, without what a listing has said of it."""
        return Location(self.name)

    @property
    def parent(self) -> Location:
        """The folder that holds it."""
        if self.in_store:
            return Location(self.name.rpartition("/")[0])
        return Location(str(self.path.parent))

    def inside(self, name: str) -> Location:
        """The file or folder of this name in this folder."""
        return Location(f"{self.name}/{name}" if self.in_store else str(self.path / name))

    def exists(self) -> bool:
        """Whether there is a file or folder."""
        return self._seen is not None if self.in_store else self.path.exists()

    def is_file(self) -> bool:
        """Whether it is a file; a named pipe, which can be read once, is none."""
        return self._object is not None if self.in_store else self.path.is_file()

    def is_special(self) -> bool:
        """Whether it is a named pipe, a socket or a device, which cannot be read twice."""
        if self.in_store:
            return False
        try:
            mode = self.path.stat().st_mode
        except OSError:
            return False
        return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))

    def is_folder(self) -> bool:
        """Whether it is a folder."""
        if self.in_store:
            return self.exists() and not self.is_file()
        return self.path.is_dir()

    def missing_target(self) -> str | None:
        """What a link points to that is not there; None: it is no such link."""
        broken = not self.in_store and self.path.is_symlink() and not self.path.exists()
        return os.readlink(self.name) if broken else None

    def size(self) -> int:
        """Bytes of the file."""
        return self._here.size if self.in_store else self.path.stat().st_size

    def state(self) -> list[object]:
        """What changes with the content of the file: name, size, times and inode. A program may write
        other content of the same size and set the time back, but not that of the change (ctime). In
        a store: name, size and what the store calls its version, such as an ETag."""
        if self.in_store:
            return [self.name, self._here.size, self._here.version]
        state, whole = self.path.stat(), str(self.path.resolve())
        return [whole, state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino]

    def listed(self) -> Known | None:
        """What a store says of the file; None: it is on this machine."""
        return self._here if self.in_store else None

    @property
    def has_ranges(self) -> bool:
        """Whether reading from the middle costs no more than what is read."""
        return not self.in_store or self._here.ranges

    def open(self, *, ahead: int = AHEAD) -> BinaryIO:
        """The bytes of the file, from the beginning; `seek` reads a range. ahead: bytes that are asked of a
        store at once; 0: those of each read."""
        if self.in_store:
            return stores.open_object(self.name, self.known, ahead=ahead)
        return self.path.open("rb")

    def files(self, *, now: bool = False) -> list[Location]:
        """All that is no folder below the folder, at any depth, sorted by path: files, links whose
        target is missing, named pipes. now: asks a store again, which a run asks once for its data."""
        if self.in_store:
            below = stores.below_now if now else stores.below
            found = map(_of_entry, below(self.name))
            return sorted(found, key=lambda file: file.parts)
        return [Location(str(path)) for path in sorted(self.path.rglob("*")) if not path.is_dir()]

    # Writing

    def write(self, content: Callable[[], Iterable[bytes]], *, size: int) -> None:
        """Writes the file, which readers see whole or not at all, with the folders above it.

        content: begins the bytes anew for each attempt. size: how many they are.
        """
        if self.in_store:
            stores.write_object(self.name, content, size)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with replace_file(self.path, only_writer=True) as scratch, scratch.open("wb") as stream:
            stream.writelines(content())
            flush(stream)

    def write_bytes(self, content: bytes) -> None:
        """Writes a small file."""
        self.write(lambda: [content], size=len(content))

    def read_bytes(self) -> bytes:
        """The content of a small file, as it is now. Raises FileNotFoundError if there is none."""
        if self.in_store:
            return stores.read_object(self.name)
        return self.path.read_bytes()

    def remove(self) -> None:
        """Removes the file, if it is there."""
        if self.in_store:
            stores.remove_object(self.name)
        else:
            self.path.unlink(missing_ok=True)

    def download(
        self, file: Path, *, advance: Callable[[float], None] = lambda _: None
    ) -> StoredFile:
        """Copies the file to a path of this machine, several ranges at once, and flushes it to the disk.
        advance: is given the bytes of each range."""
        size = self.size()
        with replace_file(file, only_writer=True) as scratch, scratch.open("wb") as stream:
            stream.truncate(size)

            def fetch(start: int) -> None:
                with self.open(ahead=0) as source:
                    source.seek(start)
                    piece = source.read(min(_RANGE, size - start))
                _write_at(stream.fileno(), piece, start)
                advance(len(piece))

            with ThreadPoolExecutor(TOGETHER) as pool:
                for _ in pool.map(fetch, range(0, size, _RANGE)):
                    pass
            flush(stream)
        return StoredFile(bytes=size, checksum=checksum_of_file(file).hexdigest())

    def upload(self, folder: Path, *, advance: Callable[[float], None] = lambda _: None) -> None:
        """Copies the files of a folder of this machine into this one, several at a time; config.json
        last, by which readers find a model. advance: is given the bytes that are sent."""
        every = sorted(path for path in folder.rglob("*") if path.is_file())
        last = [path for path in every if path.name == "config.json"]

        def send(path: Path) -> None:
            target = self.inside(path.relative_to(folder).as_posix())
            target.write(lambda: blocks(path, sent=advance), size=path.stat().st_size)

        for files in ([path for path in every if path not in last], last):
            with ThreadPoolExecutor(TOGETHER) as pool:
                for _ in pool.map(send, files):
                    pass

    def is_hidden_in(self, folder: Location) -> bool:
        """Whether the name of the file, or of a folder between it and `folder`, begins with a dot, or is
        that of a cache of Python."""
        parts = self.parts[len(folder.parts) :] if self.in_store else None
        parts = list(self.path.relative_to(folder.path).parts) if parts is None else parts
        return any(part.startswith(".") or part == "__pycache__" for part in parts)

    @property
    def _seen(self) -> stores.Entry | None:
        return stores.look(self.name) if self.known is None else stores.Entry(self.name, self.known)

    @property
    def _object(self) -> Known | None:
        seen = self._seen
        return None if seen is None else seen.known

    @property
    def _here(self) -> Known:
        """What the store says of the object. Raises FileNotFoundError."""
        if (found := self._object) is None:
            raise FileNotFoundError(errno.ENOENT, "it is not there", self.name)
        return found


def _of_entry(entry: stores.Entry) -> Location:
    return Location(entry.name, entry.known)


def _write_at(descriptor: int, piece: bytes, at: int) -> None:
    view = memoryview(piece)
    while len(view):
        written = os.pwrite(descriptor, view, at)
        view, at = view[written:], at + written


def is_in_store(name: str) -> bool:
    """Whether a name or pattern is an address in a store."""
    return Location(name).in_store


def matching(pattern: str) -> list[Location]:
    """The files and folders that a pattern names, sorted. A path that exists is that file, also if it
    holds `[`, `*` or `?`. As in Megatron, a name without `.idx` and `.bin` names these two files. Raises
    RecipeError if it names a store that is not known, and StoreError."""
    if is_in_store(pattern):
        return [*map(_of_entry, stores.matching(pattern))]
    found = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
    if not found and pattern:
        found = sorted(glob.glob(f"{pattern}.idx") + glob.glob(f"{pattern}.bin"))
    return [Location(str(Path(name))) for name in found]


def is_of_system(pattern: str) -> bool:
    """Whether a pattern names files of the system, which are endless or change."""
    return not is_in_store(pattern) and os.path.abspath(pattern).split("/")[1] in ("proc", "sys")


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
    if is_in_store(name):
        near = stores.nearest(name)
        return f"no such {kind}: {name}{f'; did you mean {near}?' if near else nor}"
    if name.startswith("~"):
        whole = os.path.expanduser(name)
        return f"no such {kind}: {name}; only a shell replaces ~: write {whole}"
    text = f"no such {kind}: {name} (looked for in {Path.cwd()}){nor}"
    near = None if os.path.exists(name) else nearest_path(name)
    return text if near is None else f"{text}; did you mean {near}?"
