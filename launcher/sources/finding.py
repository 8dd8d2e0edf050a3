"""Finds the files of data: those that patterns name, what changed in them, and their first row."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from launcher.errors import RecipeError
from launcher.libraries.extras import require_extra
from launcher.sources.formats import (
    COMPRESSED,
    FORMS,
    OF_BLOCKS,
    READ_ERRORS,
    ROW_FILES,
    RowForm,
    holds_json_lines,
    open_binary,
    row_form,
    suffixes,
)
from launcher.sources.hub import (
    SAVED_DICT,
    SAVED_INFO,
    is_hub_id,
    is_saved_data_set,
    load_data_set,
    saved_rows,
)
from launcher.sources.location import Location, is_in_store, is_of_system, matching, no_such
from launcher.sources.rows import (
    MAX_DOCUMENT,
    Form,
    SourcePart,
    no_list,
    open_parquet,
    read_rows,
)
from launcher.sources.store_names import refusal
from launcher.sources.store_requests import StoreError
from launcher.sources.token_files import SUFFIXES as TOKEN_SUFFIXES
from launcher.sources.token_files import chosen_files, files_of, is_beside, is_token_file

_NOT_TEXT = {
    ".pyc",
    ".so",
    ".png",
    ".jpg",
    ".gif",
    ".zip",
    ".tar",
    ".safetensors",
    *TOKEN_SUFFIXES,
    ".exe",
    ".a",
    ".o",
    *COMPRESSED,
}

"""Suffixes of files in folders that are no documents."""
_SUFFIXES = 5
"""Suffixes that a line about files lists."""


def find_parts(
    patterns: tuple[str, ...],
    *,
    kind: str,
    validation: bool = False,
    max_document: int = MAX_DOCUMENT,
    notes: list[str] | None = None,
) -> list[SourcePart]:
    """Whole files and hub data sets, in the order of the patterns and sorted by path, each once.

    A folder means all files below it, except hidden files, caches and binaries. For kinds
    (data.kind) other than text, it means only files of rows, and for kind tokens those of token ids,
    if it has any. max_document: in bytes. notes: gains what folders hold and is not read, and which
    files are documents by their suffix. Raises RecipeError if a pattern matches nothing, a link whose
    target is missing, a text file where rows are needed, or files of rows beside those of token ids.
    """
    try:
        return _find_parts(patterns, kind, validation, max_document, notes)
    except StoreError as error:
        raise _unread(error, "data: ") from None


def _find_parts(
    patterns: tuple[str, ...],
    kind: str,
    validation: bool,
    max_document: int,
    notes: list[str] | None,
) -> list[SourcePart]:
    parts: dict[str, SourcePart] = {}
    unread: dict[str, list[Location]] = {}
    for pattern in patterns:
        matches = matching(pattern)
        if not matches and is_hub_id(pattern):
            parts.setdefault(pattern, SourcePart(pattern, "hub", validation=validation))
            continue
        if not matches and is_in_store(pattern):
            raise RecipeError(f"data: {no_such('file or folder', pattern)}")
        files: list[Location] = []
        for match in matches or [Location(pattern)]:
            if not match.is_folder():
                files.append(match)
                continue
            inside, others = _inside(match, kind)
            files += inside
            if others:
                unread[match.name] = others
        for file in files:
            if file.is_special():
                what = "is a named pipe, a socket or a device; write its rows to a file"
                raise RecipeError(f"{file.name}: {what}")
            if (target := file.missing_target()) is not None:
                what = f"a link to {target}, which is not there; mend or remove the link"
                raise RecipeError(f"{file.name}: {what}")
        files = [file for file in files if file.is_file() or is_saved_data_set(file)]
        if kind == "tokens":
            files = chosen_files(files)
        if not files:
            raise RecipeError(f"data: {pattern!r} matches no file (in {os.getcwd()})")
        for file in files:
            part = replace(file_part(file), validation=validation and file.is_folder())
            if part.form == "text" and kind != "text":
                what = f"kind {kind} reads {ROW_FILES}; use kind text for text files"
                raise RecipeError(f"{file.name}: {what}")
            if part.form == "tokens" and kind != "tokens":
                what = f"kind {kind} does not read token ids; use kind tokens, which does"
                raise RecipeError(f"{file.name}: {what}")
            parts.setdefault(part.name, part)
    of_rows = next((part for part in parts.values() if part.form != "tokens"), None)
    of_ids = next((part for part in parts.values() if part.form == "tokens"), None)
    if of_rows is not None and of_ids is not None:
        what = "holds token ids, and is no source together with files of rows, such as"
        both = "make them two: data.train.a.files=FILE data.train.b.files=FILE"
        raise RecipeError(f"{of_ids.name}: {what} {of_rows.name}; {both}")
    if notes is not None:
        notes += _file_notes([*parts.values()], unread)
    return [replace(part, max_document=max_document) for part in parts.values()]


def _inside(folder: Location, kind: str) -> tuple[list[Location], list[Location]]:
    """The files below a folder that are read, and the folders of `save_to_disk` instead of their
    files; and the files that are not read, without hidden ones and caches."""
    if is_saved_data_set(folder):
        return [folder], []
    files = folder.files()
    if folder.in_store:
        _refuse_saved(files)
    infos = {file.parent for file in files if file.last in (SAVED_INFO, SAVED_DICT)}
    saved = [parent for parent in infos if is_saved_data_set(parent)]
    below = tuple(f"{parent.name}/" for parent in saved)
    outer = [parent for parent in saved if not parent.name.startswith(below)]
    shown = [
        file for file in files if not file.name.startswith(below) and not file.is_hidden_in(folder)
    ]
    read = [file for file in shown if _is_read(file, kind) and not file.is_special()]
    if kind == "tokens" and any(is_token_file(file.name) for file in read):
        shown = [file for file in shown if not is_beside(file)]
        read = [file for file in read if file in shown and not _is_setting(file)]
    others = set(shown).difference(read)
    unread = [file for file in shown if file in others and file.exists()]
    read += outer
    return sorted(read, key=lambda file: file.parts), unread


def _refuse_saved(files: Sequence[Location]) -> None:
    """Raises RecipeError if `save_to_disk` wrote these files of a store: `datasets` maps them into memory."""
    names = {file.name for file in files}
    for file in files:
        folder = file.parent
        state = f"{folder.name}/state.json" in names
        if file.last == SAVED_DICT or (file.last == SAVED_INFO and state):
            what = "a folder of save_to_disk is read from a disk only; copy it to one"
            raise RecipeError(f"data: {folder.name}: {what}, or write .parquet files")


def _is_setting(file: Location) -> bool:
    """Whether a .json file holds no list, as those that tools write beside token ids."""
    try:
        with open_binary(file) as stream:
            return (
                row_form(file.name) == "json" and stream.read(_SAMPLED_BYTES).lstrip()[:1] != b"["
            )
    except READ_ERRORS:
        return False


def _is_read(file: Location, kind: str) -> bool:
    suffix, compression = suffixes(file.name)
    if compression and suffix in ("", *OF_BLOCKS):
        return False
    if kind == "tokens" and is_token_file(file.name):
        return True
    return suffix not in _NOT_TEXT if kind == "text" else suffix in FORMS


def _file_notes(parts: Sequence[SourcePart], unread: dict[str, list[Location]]) -> Iterator[str]:
    """Lines about files that a user may have thought to be read, or read as rows."""
    documents = [Location(part.name) for part in parts if part.form == "text"]
    if documents:
        what = "is no file of rows, and is one document"
        if len(documents) > 1:
            what = "are no files of rows, and are one document each"
        yield f"note: {_listing(documents)} {what}"
    for folder, files in unread.items():
        yield f"note: of {folder}, {_listing(files)} {'is' if len(files) == 1 else 'are'} not read"


def _listing(files: Sequence[Location]) -> str:
    """The number of files by suffix, and an example."""
    if len(files) == 1:
        return files[0].name
    names = ("".join(suffixes(file.name)) or "without a suffix" for file in files)
    counts = Counter(names).most_common()
    most, others = counts[:_SUFFIXES], sum(count for _, count in counts[_SUFFIXES:])
    by_suffix = ", ".join(f"{count:,} {suffix}" for suffix, count in most)
    by_suffix += f", {others:,} others" if others else ""
    return f"{len(files):,} files ({by_suffix}; such as {files[0].last})"


def file_part(file: Location) -> SourcePart:
    """A whole file. Raises RecipeError if it cannot be read."""
    suffix, compression = suffixes(file.name)
    form: Form = row_form(file.name) or ("tokens" if is_token_file(file.name) else "text")
    if form in ("parquet", "arrow") or compression == ".zst":
        require_extra("pyarrow", file.name)
    if compression and suffix in OF_BLOCKS:
        hint = f"decompress it; {form} compresses its own columns"
        raise RecipeError(f"{file.name}: a compressed {suffix} cannot be read: {hint}")
    try:
        if file.is_folder():
            require_extra("datasets", file.name)
            size = sum(rows.size() for rows in saved_rows(file))
            return SourcePart(file.name, "hub", size=size)
        return SourcePart(file.name, form, size=file.size(), known=file.listed())
    except OSError as error:
        raise RecipeError(f"{file.name}: cannot be read: {error.strerror}") from None


# All that a run needs to know of the files before it reads them


class Found(NamedTuple):
    """The files that patterns name."""

    parts: list[SourcePart]
    """See `find_parts`."""
    states: list[list[object]]
    """See `file_states`."""
    sample: str
    """See `content_sample`."""
    notes: list[str]
    """What to say of the files: see `find_parts`."""


_T = TypeVar("_T")


class Sharing(Protocol):
    """Results that one process computes for others (`launcher/distributed/shared_results.py`)."""

    def result(self, key: str, make: Callable[[], _T], holds: Callable[[_T], bool]) -> _T:
        """The result with this key."""


_sharing: Sharing | None = None


@contextlib.contextmanager
def shared_by(sharing: Sharing) -> Iterator[None]:
    """In the context, `found` looks at files in one process for others."""
    global _sharing
    _sharing = sharing
    try:
        yield
    finally:
        _sharing = None


def found(
    patterns: tuple[str, ...], *, kind: str, validation: bool = False, max_document: int
) -> Found:
    """The files that patterns name, in a run as one rank has found them once. The arguments are those of
    `find_parts`. Raises RecipeError as it does, and if a file cannot be read."""

    def look() -> Found:
        notes: list[str] = []
        parts = find_parts(
            patterns, kind=kind, validation=validation, max_document=max_document, notes=notes
        )
        try:
            return Found(parts, file_states(parts), content_sample(parts), notes)
        except OSError as error:
            what = f"{error.filename} cannot be read: {error.strerror}"
            raise RecipeError(f"data: {what}") from None

    if _sharing is None:
        return look()
    return _sharing.result(repr((patterns, kind, validation, max_document)), look, _are_here)


def shared_result(key: str, make: Callable[[], _T]) -> _T:
    """What `make` finds in stores, in a run as one rank has found it once. key: all that it depends on.
    Raises RecipeError as `make` does."""
    return make() if _sharing is None else _sharing.result(key, make, lambda _: True)


def _are_here(seen: Found) -> bool:
    """Whether this machine has the same files, of a shared file system. The first and the last one
    answer for all: no other file has the same inode and time of change."""
    ends = [*zip(seen.parts, seen.states, strict=True)][:: max(1, len(seen.parts) - 1)]
    try:
        return all(file_states([part]) == [state] for part, state in ends)
    except OSError:
        return False


# Changed files

_SAMPLED_FILES, _SAMPLED_BYTES = 1000, 4096


def file_states(parts: Sequence[SourcePart]) -> list[list[object]]:
    """For each part, what changes with the content of its files (`Location.state`). A hub data set has
    its name: it keeps the version that was read first."""
    return [
        [part.validation, *(file.state() for file in _files(part))]
        if part.form != "hub" or part.file.is_folder()
        else [part.name, part.validation]
        for part in parts
    ]


def content_sample(parts: Sequence[SourcePart]) -> str:
    """A digest of the beginning, the middle and the end of each file; of evenly spaced files if
    these are many. Of files in stores, what these call their versions. Raises OSError."""
    files = [file for part in parts for file in _files(part)]
    digest = hashlib.sha256()
    for file in files[:: -(-len(files) // _SAMPLED_FILES) or 1]:
        if (listed := file.listed()) is not None and listed.version:
            digest.update(repr((listed.size, listed.version)).encode())
            continue
        with file.open(ahead=0) as stream:
            end = stream.seek(0, os.SEEK_END)
            for start in (0, end // 2, max(0, end - _SAMPLED_BYTES)):
                stream.seek(start)
                digest.update(stream.read(_SAMPLED_BYTES))
    return digest.hexdigest()


def _files(part: SourcePart) -> list[Location]:
    """The files of a part; none of a data set of the hub."""
    source = part.file
    if part.form in ("hub", "hub_stream"):
        return saved_rows(source) if source.is_folder() else []
    return files_of(part.name) if part.form == "tokens" else [source]


# The first row

_FIRST_LINE = 1 << 28
"""Most bytes of a line that are read: a small compressed file may hold many gigabytes."""
_FIRST_BYTES = 1 << 24
"""Bytes of a .json file that are searched for the end of its first row."""


def _is_refused(pattern: str) -> bool:
    """Whether a pattern names what the rules of the recipe refuse."""
    return is_of_system(pattern) or (is_in_store(pattern) and refusal(pattern) is not None)


def _matching(pattern: str) -> list[Location]:
    """`matching`, with a RecipeError for a store that does not answer."""
    try:
        return matching(pattern)
    except StoreError as error:
        raise _unread(error) from None


def _unread(error: StoreError, where: str = "") -> RecipeError:
    return RecipeError(f"{where}{error.filename} cannot be read: {error.strerror}")


class _NotRowsError(Exception):
    """A file that holds no rows as it is written."""


def first_row(
    patterns: Iterable[str], *, hub: bool = False
) -> tuple[str, Mapping[str, Any]] | None:
    """The first file that the patterns name, and its first row; None if that is not a file of rows,
    or cannot be read. hub: also fetch a data set of the hub. Raises RecipeError if a .json file
    holds no list, or if the header of a .csv file names no columns."""
    for pattern in patterns:
        if _is_refused(pattern):
            return None
        matches = _matching(pattern)
        if not matches and is_hub_id(pattern):
            return _first_of_hub(pattern) if hub else None
        for match in matches:
            if is_beside(match):
                continue
            try:
                for file in _row_files(match):
                    row = _first_of_file(file)
                    return None if row is None else (file.name, row)
            except _NotRowsError as error:
                raise RecipeError(f"{file.name}: {error}") from None
            except StoreError as error:
                raise _unread(error) from None
            except RecipeError:
                # Of a store, or of damaged files, which are reported when they are read
                if match.in_store:
                    raise
                return None
            except Exception:  # of damaged files: many classes
                return None
    return None


def first_rows(patterns: Iterable[str], most: int) -> tuple[str, list[Mapping[str, Any]]] | None:
    """The first file that the patterns name, and its first rows, at most so many; of a large .json file,
    of a folder of `save_to_disk` and of a hub data set, which is not fetched, at most one. None: they are
    not known here. Raises RecipeError as `first_row`."""
    first = first_row(patterns)
    if first is None:
        return None
    name, row = first
    form, rows = row_form(name), [row]
    if form not in (None, "json"):
        with contextlib.suppress(Exception):  # of damaged rows: reported when they are read
            part = replace(file_part(Location(name)), max_document=_FIRST_LINE, most=most)
            found = (each.values for each in read_rows(part))
            rows = [values for values in found if values is not None]
    return name, rows or [row]


def why_text(patterns: Iterable[str]) -> str | None:
    """Why the data is text: the first file that the patterns name is there, and is no file of rows.
    None: it is one, or there is none."""
    for pattern in patterns:
        if _is_refused(pattern):
            return None
        for match in _matching(pattern):
            if match.is_folder():
                none = f"{match.name} holds no file of rows ({ROW_FILES})"
                return None if _row_files(match) else none
            if row_form(match.name) or is_token_file(match.name):
                return None
            return f"{match.name} is no file of rows ({ROW_FILES})"
    return None


def rows_as_text(patterns: Iterable[str]) -> str | None:
    """A text file among these files whose lines are JSON objects, one of each suffix is looked at:
    it would be trained with its braces. None: there is none."""
    seen: set[str] = set()
    for pattern in patterns:
        if _is_refused(pattern):
            continue
        for match in _matching(pattern):
            for file in _inside(match, "text")[0] if match.is_folder() else [match]:
                suffix = "".join(suffixes(file.name))
                if suffix in seen or row_form(file.name) or not file.is_file():
                    continue
                seen.add(suffix)
                try:
                    if holds_json_lines(file):
                        return file.name
                except StoreError as error:
                    raise _unread(error) from None
    return None


def _row_files(match: Location) -> list[Location]:
    if not match.is_folder():
        return [match]
    read = _inside(match, "tokens")[0]
    return [file for file in read if not is_token_file(file.name)] or read


def _first_of_hub(name: str) -> tuple[str, Mapping[str, Any]]:
    rows = load_data_set(name)
    columns = dict.fromkeys(rows.column_names)
    return name, columns | (dict(rows[0]) if len(rows) else {})


def _first_of_file(file: Location) -> Mapping[str, Any] | None:
    """The first row of a file, or of a folder of `save_to_disk`; its columns alone if it has no row.
    None: it is no file of rows, or its first row cannot be read."""
    if file.is_folder():  # without `datasets`, whose import takes a second
        if file.inside(SAVED_DICT).is_file():
            file = file.inside("train")
        columns = dict.fromkeys(json.loads(file.inside(SAVED_INFO).path.read_text())["features"])
        arrow = saved_rows(file)
        return {**columns, **((_first_of_file(arrow[0]) if arrow else None) or {})}
    form = row_form(file.name)
    if is_token_file(file.name) and file.is_file():
        return {"input_ids": None}
    if form is None or not file.is_file():
        return None
    if form == "json":  # which is else read as a whole
        return _first_of_json(file)
    row = next(read_rows(replace(file_part(file), max_document=_FIRST_LINE, most=1)))
    if row.no_rows:
        raise _NotRowsError(row.problem)
    return row.values if row.values is not None else _columns(file, form)


def _columns(file: Location, form: RowForm) -> dict[str, None] | None:
    """The columns of a file that names them before its rows."""
    if form in ("csv", "tsv"):
        with io.TextIOWrapper(open_binary(file), encoding="utf-8-sig", newline="") as stream:
            return dict.fromkeys(
                next(csv.reader(stream, "excel-tab" if form == "tsv" else "excel"))
            )
    if form == "parquet":
        with open_parquet(file) as opened:
            return dict.fromkeys(opened.schema_arrow.names)
    return None


def _first_of_json(file: Location) -> Mapping[str, Any]:
    with open_binary(file) as stream:
        text = stream.read(_FIRST_BYTES).decode("utf-8-sig", errors="ignore")
    start = text.index("{")
    if text[:start].strip() != "[":
        value, end = json.JSONDecoder().raw_decode(text, start)  # raises if the file is larger
        raise _NotRowsError(no_list(value if not text[end:].strip() else {}))
    row: dict[str, Any] = json.JSONDecoder().raw_decode(text, start)[0]
    return row
