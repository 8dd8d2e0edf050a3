"""Files in object stores and on web servers, through fsspec: what is there, ranges of bytes, writing.

A process asks a store once for each listing of its data. It reads an object only as long as the object is the one
that was listed.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import functools
import io
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from launcher.errors import closest
from launcher.sources.store_names import WEB, is_pattern, require_store, rest_of, scheme_of
from launcher.sources.store_requests import (
    ShortError,
    StoreError,
    ask,
    changed,
    filesystem,
    key_of,
)

_VERSIONS = (
    *("generation", "ETag", "etag", "blob_id"),
    *("Last-Modified", "LastModified", "last_modified", "updated"),
)
"""What stores say of an object that changes with its content, the most exact first."""

_MOST_OF_REQUEST = 16 << 20
"""Bytes of a request: what is read again if a connection breaks."""
AHEAD = 4 << 20
"""Bytes that a reader of a whole file asks for at once."""
_SMALL = 256 << 10
"""Bytes of an object that is read by one request."""
_NEAR = 1000
"""Names that are compared with a mistyped one: those of one request."""


class Known(NamedTuple):
    """What a store says of an object."""

    size: int
    """Bytes."""
    version: str
    """Changes with the content; empty: a web server does not say."""
    ranges: bool = True
    """Whether a range of bytes can be asked for."""


class Entry(NamedTuple):
    """An object of a store, or a folder: names with slashes that begin alike."""

    name: str
    known: Known | None
    """None: a folder."""


def _known(info: dict[str, Any]) -> Known:
    version = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Known(int(info.get("size") or 0), version)


def _entry(scheme: str, info: dict[str, Any]) -> Entry:
    name = f"{scheme}://{info['name'].removeprefix(f'{scheme}://').rstrip('/')}"
    return Entry(name, None if info["type"] == "directory" else _known(info))


# What is there


@functools.lru_cache(maxsize=1 << 14)
def look(name: str) -> Entry | None:
    """The object or folder of this name; None: there is none. Raises StoreError."""
    fs = filesystem(name)
    try:
        info = ask(name, lambda: fs.info(key_of(name)))
    except FileNotFoundError:
        return None
    except StoreError as error:
        raise _of_listing(fs, name) or error from None
    if scheme_of(name) in WEB:
        return Entry(name, _of_web(fs, name, info))
    return _entry(str(scheme_of(name)), {**info, "name": key_of(name)})


def _of_listing(fs: Any, name: str) -> StoreError | None:
    """The error of a listing beside an object: an answer about one object says only 400 or 403."""
    if scheme_of(name) != "s3":
        return None
    bucket, _, key = key_of(name).partition("/")
    first = {"Bucket": bucket, "Prefix": key, "MaxKeys": 1}
    try:
        ask(name, lambda: fs.call_s3("list_objects_v2", **first))
    except (StoreError, FileNotFoundError) as error:
        return error if isinstance(error, StoreError) else None
    return None


def _of_web(fs: Any, name: str, info: dict[str, Any]) -> Known:
    if info.get("size") is None:
        what = "the server does not say how large it is; download the file, and name its path"
        raise StoreError(errno.EINVAL, what, name)
    known = _known(info)
    if known.size < 2:
        return known

    def second_byte() -> bool:
        try:
            with fs.open(name, size=known.size, cache_type="none") as file:
                file.seek(1)
                return len(file.read(1)) == 1
        except ValueError:  # the server sent the whole file
            return False

    return known._replace(ranges=bool(info.get("partial", True)) and ask(name, second_byte))


@functools.lru_cache(maxsize=1 << 10)
def inside(folder: str) -> tuple[Entry, ...]:
    """The objects and folders in a folder, sorted by name. Raises StoreError."""
    fs, scheme = filesystem(folder), str(scheme_of(folder))
    try:
        infos = ask(folder, lambda: fs.ls(key_of(folder), detail=True))
    except FileNotFoundError:
        return ()
    return _listed(scheme, folder, infos)


def below_now(folder: str) -> tuple[Entry, ...]:
    """The objects below a folder at any depth, sorted by name. Raises StoreError."""
    fs, scheme = filesystem(folder), str(scheme_of(folder))
    try:
        infos = ask(folder, lambda: fs.find(key_of(folder), detail=True)).values()
    except FileNotFoundError:
        return ()
    return tuple(entry for entry in _listed(scheme, folder, infos) if entry.known is not None)


below = functools.lru_cache(maxsize=1 << 10)(below_now)
"""The same, asked once."""


def _listed(scheme: str, folder: str, infos: Iterable[dict[str, Any]]) -> tuple[Entry, ...]:
    """Without the empty objects that some programs make for folders."""
    real = (each for each in infos if each["type"] == "directory" or each["name"][-1:] != "/")
    entries = {entry.name: entry for entry in (_entry(scheme, info) for info in real)}
    start = f"{folder.rstrip('/')}/"
    return tuple(entries[name] for name in sorted(entries) if name.startswith(start))


def forget() -> None:
    """Lets the next listings be asked of the stores again."""
    for each in (look, inside, below):
        each.cache_clear()


def matching(pattern: str) -> list[Entry]:
    """The objects and folders that a pattern names, sorted by name, as `glob.glob` would for files: `*`,
    `?` and `[` match in a name, `**` stands for any number of folders, and none of them for a name that
    begins with a dot. Raises StoreError, and RecipeError if the name is wrong."""
    require_store(pattern)
    scheme, pattern = str(scheme_of(pattern)), pattern.rstrip("/")
    if scheme in WEB or not is_pattern(rest_of(pattern)):
        found = look(pattern)
        return [] if found is None else [found]
    bucket, *parts = rest_of(pattern).split("/")
    matches = sorted(_matching(f"{scheme}://{bucket}", parts), key=lambda entry: entry.name)
    if parts and parts[-1] == "**":  # in the order of a folder, which glob names first
        matches.sort(key=lambda entry: entry.name.split("/"))
    if not matches and (literal := look(pattern)) is not None:
        return [literal]
    return matches


def _matching(base: str, parts: list[str]) -> Iterator[Entry]:
    literal = list(itertools.takewhile(lambda part: not is_pattern(part), parts))
    base, parts = "/".join([base, *literal]), parts[len(literal) :]
    if not parts:
        if (found := look(base)) is not None:
            yield found
        return
    if "**" in parts:
        expression, entries = re.compile("".join(_expression(parts))), below(base)
        # What is in the folders is matched by a last ** itself
        for entry in entries if parts[-1] == "**" else _with_folders(base, entries):
            if expression.fullmatch(entry.name[len(base) + 1 :]):
                yield entry
        return
    mask, *rest = parts
    for entry in inside(base):
        last = entry.name.rpartition("/")[2]
        if not fnmatch.fnmatchcase(last, mask) or (last[0] == "." and mask[0] != "."):
            continue
        if not rest:
            yield entry
        elif entry.known is None:
            yield from _matching(entry.name, rest)


def _expression(parts: list[str]) -> Iterator[str]:
    """Regular expressions of names below a folder."""
    for at, part in enumerate(parts, start=1):
        if part == "**":
            yield r"(?:[^/.][^/]*/)*" if at < len(parts) else r"(?:[^/.][^/]*/)*[^/.][^/]*"
            continue
        yield "" if part[0] == "." else r"(?!\.)"
        yield (
            fnmatch.translate(part).removeprefix("(?s:").removesuffix(")\\Z").replace(".*", "[^/]*")
        )
        yield "/" if at < len(parts) else ""


def _with_folders(base: str, entries: Iterable[Entry]) -> Iterator[Entry]:
    folders = set[str]()
    for entry in entries:
        yield entry
        above = entry.name.rpartition("/")[0]
        while len(above) > len(base) and above not in folders:
            folders.add(above)
            yield Entry(above, None)
            above = above.rpartition("/")[0]


def nearest(name: str) -> str | None:
    """The object that `name`, which does not exist, is probably a misspelling of; None: none is known."""
    if scheme_of(name) != "s3" or is_pattern(name):
        return None
    bucket, _, key = key_of(name).partition("/")
    folder, slash, last = key.rpartition("/")
    request = {"Bucket": bucket, "Prefix": folder + slash, "Delimiter": "/", "MaxKeys": _NEAR}
    try:
        found = ask(name, lambda: filesystem(name).call_s3("list_objects_v2", **request))
    except OSError:
        return None
    keys = [each["Key"] for each in found.get("Contents", ())]
    keys += [each["Prefix"].rstrip("/") for each in found.get("CommonPrefixes", ())]
    near = closest(last, [end for each in keys if (end := each.rpartition("/")[2]) != last])
    return None if near is None else f"s3://{bucket}/{folder}{slash}{near}"


# Reading


class _Reader(io.RawIOBase):
    """The bytes of an object, a request for each read; all bytes come from the same version. Raises
    StoreError."""

    def __init__(self, name: str, known: Known) -> None:
        self._name, self._known = name, known
        self._at = 0
        self._file: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._known.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        wanted = max(0, min(len(view), self._known.size - self._at))
        done = 0
        while done < wanted:
            end = self._at + min(_MOST_OF_REQUEST, wanted - done)
            data = ask(self._name, functools.partial(self._fetch, self._at, end))
            view[done : done + len(data)] = data
            done += len(data)
            self._at += len(data)
        return done

    def readall(self) -> bytes:
        return self.read(max(0, self._known.size - self._at)) or b""

    def _fetch(self, start: int, end: int) -> bytes:
        if self._file is None:
            self._file = self._opened()
        try:
            self._file.seek(start)
            data = bytes(self._file.read(end - start))
            if len(data) != end - start:
                raise ShortError(f"{len(data):,} of {end - start:,} bytes came")
            return data
        except BaseException:
            self._file = None  # a new connection for the next attempt
            raise

    def _opened(self) -> Any:
        fs, (size, version, _) = filesystem(self._name), self._known
        key, scheme = key_of(self._name), scheme_of(self._name)
        if scheme in WEB:
            # The parameter has a strong version only; a weak one never matches
            strong = version.startswith('"')
            headers = {"headers": {"If-Match": version}} if strong else {}
            return fs.open(self._name, size=size, cache_type="none", **headers)
        if scheme == "s3":  # without a request for what is known
            file = fs.open(key, size=size, cache_type="none")
            file.details = {"name": key, "size": size, "ETag": version, "type": "file"}
            file.read_kw = {"IfMatch": version}
            return file
        file = fs.open(key, cache_type="none")
        if _known(file.details) != self._known:
            raise changed(self._name)
        return file


def open_object(name: str, known: Known | None, *, ahead: int) -> BinaryIO:
    """The bytes of an object, from the beginning; `seek` reads a range. known: as it was listed; None: as
    it is. ahead: bytes that are asked for at once; 0: those of each read. Raises StoreError or
    FileNotFoundError."""
    if known is None:
        found = look(name)
        if found is None or found.known is None:
            raise FileNotFoundError(errno.ENOENT, "it is not there", name)
        known = found.known
    if known.ranges and known.size <= _SMALL:
        return io.BytesIO(_content(name, known))
    reader = _Reader(name, known) if known.ranges else _CopyReader(name, known)
    return cast(BinaryIO, io.BufferedReader(reader, ahead) if ahead else reader)


@functools.lru_cache(maxsize=4)
def _content(name: str, known: Known) -> bytes:
    """A small object, whose beginning is looked at before it is read."""
    return _Reader(name, known).readall()


class _CopyReader(_Reader):
    """The bytes of a file whose server sends whole files only, which is read from a copy."""

    def _fetch(self, start: int, end: int) -> bytes:
        return os.pread(_copy(self._name, self._known).fileno(), end - start, start)


@functools.lru_cache(maxsize=1)
def _copy(name: str, known: Known) -> Any:
    """A copy that has no name. The file is looked at before it is read."""
    fs, copy = filesystem(name), tempfile.TemporaryFile()  # noqa: SIM115 (closed with the cache)

    def download() -> None:
        copy.seek(0)
        copy.truncate()
        fs.get_file(name, copy)
        copy.flush()
        if copy.tell() != known.size:
            raise ShortError(f"{copy.tell():,} of {known.size:,} bytes came")

    ask(name, download)
    return copy


# Writing

_PART = 32 << 20
"""Bytes of a request that writes."""
_MOST_PARTS = 9_000
"""Of an object; stores take 10,000."""


def write_object(name: str, content: Callable[[], Iterable[bytes]], size: int) -> None:
    """Writes an object, which readers see whole or not at all.

    content: begins the bytes anew for each attempt. size: how many they are. Raises StoreError, and
    what `content` raises.
    """
    fs, part = filesystem(name), max(_PART, -(-size // _MOST_PARTS))

    def attempt() -> None:
        file = fs.open(key_of(name), "wb", block_size=part)
        try:
            for piece in content():
                file.write(piece)
        except BaseException:  # `close` would write what there is
            with contextlib.suppress(Exception):
                file.discard()
            file.closed = True
            raise
        file.close()

    ask(name, attempt, writes=True)


def read_object(name: str) -> bytes:
    """The content of a small object as it is now, whatever was listed. Raises StoreError and
    FileNotFoundError."""
    return ask(name, lambda: bytes(filesystem(name).cat_file(key_of(name))))


def remove_object(name: str) -> None:
    """Removes an object, if it is there. Raises StoreError."""
    with contextlib.suppress(FileNotFoundError):
        ask(name, lambda: filesystem(name).rm_file(key_of(name)), writes=True)
