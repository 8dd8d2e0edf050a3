"""The copy of a run folder in another place (checkpoint.copy_to): what is there, and how a start on
another machine continues from it. Imports no torch.

    COPY_TO/run.json       which run it is, and which start of the run may write here
    COPY_TO/checkpoints/   as in the run folder; the marker of a checkpoint is written last
    COPY_TO/metrics.jsonl  and the other small files of the run folder, as they were at the last copy
    COPY_TO/hf/            the export of a finished run

`copier.py` writes it. An object store has no locks: each start writes its own name into run.json, and
an earlier start that still runs elsewhere finds another name there, and stops.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ValidationError

from launcher.checkpoint import files
from launcher.checkpoint.files import INDEX, MARKER, STATE, Marker
from launcher.console import bytes_as_text
from launcher.errors import RecipeError
from launcher.files import StoredFile, replace_text, write_file
from launcher.recipe import schema
from launcher.reliability.run_directory import RunFolder
from launcher.sources.location import Location

RECORD = "run.json"
_OWN = "copy.json"
"""In the run folder: the record as this start has written it."""
RECIPE = "recipe.yaml"
SMALL_FILES = (
    *(RECIPE, "metrics.jsonl", "samples.jsonl", "skipped_rows.jsonl", "experts.json"),
    *("events.jsonl", "status.json"),
)
"""Files of the run folder that are copied with each checkpoint."""
ROUNDS = "rounds"
"""The folder with the answers of rounds of distillation, which a resumed run reads, too."""


class CopyRecord(BaseModel):
    """Content of run.json."""

    run: str
    """Differs between runs; the same for all starts of one."""
    name: str
    """run.name"""
    start: str
    """Differs between starts: the last one that began may write."""
    host: str
    time: float

    def describe(self) -> str:
        """The start, for messages."""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        return f"another start of this run, on {self.host} since {since},"


class SupersededError(Exception):
    """Another start of the run writes to the copy."""


@dataclass(frozen=True)
class CopiedCheckpoint:
    """A whole checkpoint of a copy."""

    step: int
    marker: Marker
    content: bytes
    """Of the marker."""
    files: Mapping[str, Location]

    @property
    def folder(self) -> Location:
        """Where it is."""
        return self.files[MARKER].parent

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.bytes for file in self.marker.files.values())

    def fetch(self, name: str, folder: Path) -> str | None:
        """Copies a file of the checkpoint into a folder. Returns what is wrong with the copy, or None.
        Raises OSError."""
        stored = self.files[name].download(folder / name)
        expected = self.marker.files[name]
        return None if stored == expected else f"{self.files[name].name} is damaged"


class RunCopy:
    """The copy of a run in a folder. Methods raise OSError (`StoreError` of stores)."""

    def __init__(self, folder: str) -> None:
        self.folder = Location(folder.rstrip("/"))

    def read_record(self) -> CopyRecord | None:
        """run.json as it is now; None if there is none. Raises RecipeError if it is no record."""
        file = self.folder.inside(RECORD)
        try:
            return CopyRecord.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            what = f"checkpoint.copy_to: {file.name} is not the record of a run's copy"
            raise RecipeError(f"{what}; give a folder of the run's own") from None

    def write_record(self, record: CopyRecord) -> None:
        """Writes run.json."""
        self.folder.inside(RECORD).write_bytes(record.model_dump_json(indent=1).encode())

    def check(self, start: str) -> None:
        """Raises SupersededError if another start of the run has written its name since."""
        record = self.read_record()
        if record is not None and record.start != start:
            raise SupersededError(f"{record.describe()} writes to {self.folder.name}")

    def listed(self) -> dict[int, dict[str, Location]]:
        """The files of each checkpoint that is there now, whole or not, by step."""
        folder = self.folder.inside("checkpoints")
        found: dict[int, dict[str, Location]] = {}
        for file in folder.files(now=True):
            parts = file.parts[len(folder.parts) :]
            if len(parts) == 2 and (step := files.step_in(parts[0])) is not None:
                found.setdefault(step, {})[parts[1]] = file
        return found

    def whole(self, step: int, found: Mapping[str, Location]) -> CopiedCheckpoint | None:
        """The checkpoint of these files, unless one is missing or has another size than it had."""
        if MARKER not in found:
            return None
        content = found[MARKER].read_bytes()
        try:
            marker = Marker.model_validate_json(content)
        except ValidationError:
            return None
        sizes = {name: file.size() for name, file in found.items()}
        stored = marker.files.items()
        if marker.step != step or any(sizes.get(name) != file.bytes for name, file in stored):
            return None
        return CopiedCheckpoint(step, marker, content, found)

    def checkpoints(self) -> Iterator[CopiedCheckpoint]:
        """The whole checkpoints, newest first."""
        for step, found in sorted(self.listed().items(), reverse=True):
            if (checkpoint := self.whole(step, found)) is not None:
                yield checkpoint

    def find(self, step: int) -> CopiedCheckpoint | None:
        """The checkpoint of a step, if it is there and whole."""
        found = self.listed().get(step)
        return None if found is None else self.whole(step, found)

    def remove(self, found: Mapping[str, Location]) -> None:
        """Removes a checkpoint, the marker first: what is left of it is not whole."""
        for name in sorted(found, key=lambda name: name != MARKER):
            found[name].remove()
        for folder in {file.parent for file in found.values() if not file.in_store}:
            with contextlib.suppress(OSError):  # it holds other files
                folder.path.rmdir()


# At the start of a run


def own_record(run: RunFolder) -> CopyRecord | None:
    """The record as this run folder knows it: as its last start has written or found it, or that of a
    folder that was downloaded from a store."""
    for name in (_OWN, RECORD):
        with contextlib.suppress(OSError, ValidationError):
            return CopyRecord.model_validate_json((run.path / name).read_bytes())
    return None


def fetch_newest(
    settings: schema.Checkpoint,
    run: RunFolder,
    *,
    name: str,
    restarted: bool = False,
    altered: Callable[[bytes], list[str]] = lambda _: [],
) -> list[str]:
    """If the newest checkpoint of the run is in the copy, and not in the run folder, fetches what
    decides about a resume: the ranks fetch the tensors later (`fetch_missing`). For rank 0, which has
    the lock of the run folder.

    name: run.name. restarted: whether this job has started the run before. altered: returns the changes
    between a recipe, in bytes of YAML, and this one that alter the training. Returns lines about what
    was found. Raises RecipeError if the copy is of another run, or cannot be read.
    """
    assert settings.copy_to is not None
    copy, lines = RunCopy(settings.copy_to), list[str]()
    try:
        record, newest = copy.read_record(), _newest_step(run)
        checkpoints = copy.checkpoints()
        copied = next(checkpoints, None)
        if record is None and copied is not None:
            what = f"it has checkpoints, but no {RECORD}; give another folder, or restore that file"
            raise _refusal(copy, what)
        if record is None:
            return []
        own = own_record(run)
        continued = (own is not None and own.run == record.run) or _has_checkpoint(copied, run)
        if record.name != name:
            what = (
                f"it holds the run {record.name}, and this one is {name}; give another folder, or "
            )
            raise _refusal(copy, f"{what}continue that one with run.name={record.name}")
        if continued and restarted and own is not None and own.start != record.start:
            raise _refusal(copy, f"{record.describe()} writes there; this one ends")
        if not continued:
            _refuse_other(copy, copied, newest, settings, run, altered)
        while copied is not None and (newest is None or copied.step > newest):
            if (damage := _fetch(copy, copied, run)) is None:
                size = bytes_as_text(copied.size)
                lines.append(
                    f"the newest checkpoint, of step {copied.step} ({size}), is that in "
                    f"{copied.folder.name}"
                )
                break
            lines.append(f"{damage}, an older checkpoint is looked for")
            copied = next(checkpoints, None)
        _write_own_record(record, run)
    except OSError as error:
        where = error.filename or copy.folder.name
        raise RecipeError(f"checkpoint.copy_to: {where}: {error.strerror or error}") from None
    return lines


def take_over(settings: schema.Checkpoint, run: RunFolder, *, name: str) -> None:
    """Lets this start write to the copy, and no other one. Raises RecipeError if it cannot write."""
    assert settings.copy_to is not None
    copy, own = RunCopy(settings.copy_to), own_record(run)
    record = CopyRecord(
        run=os.urandom(8).hex() if own is None else own.run,
        name=name,
        start=os.urandom(8).hex(),
        host=socket.gethostname(),
        time=time.time(),
    )
    try:
        copy.write_record(record)
        _write_own_record(record, run)
        # Until the first checkpoint is copied, the recipe says which run it is
        copy.folder.inside(RECIPE).write_bytes((run.path / RECIPE).read_bytes())
    except OSError as error:
        where = error.filename or copy.folder.name
        raise RecipeError(f"checkpoint.copy_to: {where}: {error.strerror or error}") from None


def _write_own_record(record: CopyRecord, run: RunFolder) -> None:
    run.path.mkdir(parents=True, exist_ok=True)
    replace_text(run.path / _OWN, record.model_dump_json(indent=1) + "\n")


def _refusal(copy: RunCopy, what: str) -> RecipeError:
    return RecipeError(f"checkpoint.copy_to: {copy.folder.name}: {what}")


def _newest_step(run: RunFolder) -> int | None:
    """The step of the newest checkpoint of the run folder whose files are all there."""
    for path in reversed(files.list_checkpoints(run.path / "checkpoints")):
        if files.verify(path, deep=False) is None:
            return files.step_of(path)
    return None


def _has_checkpoint(copied: CopiedCheckpoint | None, run: RunFolder) -> bool:
    """Whether the run folder has the same checkpoint."""
    if copied is None:
        return False
    marker = run.path / "checkpoints" / files.checkpoint_name(copied.step) / MARKER
    return marker.is_file() and marker.read_bytes() == copied.content


def _refuse_other(
    copy: RunCopy,
    copied: CopiedCheckpoint | None,
    newest: int | None,
    settings: schema.Checkpoint,
    run: RunFolder,
    altered: Callable[[bytes], list[str]],
) -> None:
    """Raises RecipeError if this start, whose run folder does not know the copy, must not continue it.
    newest: the step of the newest checkpoint of the run folder."""
    if settings.resume == "never":
        what = "it holds a run, and checkpoint.resume is never"
        raise _refusal(copy, f"{what}; give another folder and another run.dir")
    if newest is not None:
        what = f"it holds another run than {run.path}; give another folder"
        raise _refusal(copy, f"{what}, or another run.dir to continue the run that was copied")
    if copied is None:  # else the checkpoint's own recipe is compared
        with contextlib.suppress(FileNotFoundError):
            if changes := altered(copy.folder.inside(RECIPE).read_bytes()):
                what = f"it holds a run with another recipe ({'; '.join(changes)})"
                raise _refusal(copy, f"{what}; give another folder, or undo the changes")


def _fetch(copy: RunCopy, copied: CopiedCheckpoint, run: RunFolder) -> str | None:
    """Fetches the small files of the run and of a checkpoint. Returns what is wrong with the
    checkpoint, or None."""
    path = run.path / "checkpoints" / files.checkpoint_name(copied.step)
    path.mkdir(parents=True, exist_ok=True)
    if (problem := fetch_small(copied, path)) is not None:
        return problem
    for file in small_files(copy.folder):
        with contextlib.suppress(FileNotFoundError):
            content = file.read_bytes()
            local = run.path.joinpath(*file.parts[len(copy.folder.parts) :])
            local.parent.mkdir(parents=True, exist_ok=True)
            write_file(local, content)
    return None


def small_files(folder: Location) -> list[Location]:
    """The small files of a run folder or of its copy, of which some may be missing."""
    rounds = folder.inside(ROUNDS)
    # A store may have objects with any names, such as ../x: none may lead out of the run folder
    named = [file for file in rounds.files(now=True) if rounds.inside(file.last) == file.bare]
    return [
        *(folder.inside(name) for name in SMALL_FILES),
        *(file for file in named if re.fullmatch(r"\w[\w.-]*", file.last)),
    ]


def fetch_small(copied: CopiedCheckpoint, path: Path) -> str | None:
    """Fetches all of a checkpoint but the tensors, the marker last. Returns what is wrong with the copy,
    or None. Raises OSError."""
    for name in (STATE, INDEX):
        if (problem := copied.fetch(name, path)) is not None:
            return problem
    write_file(path / MARKER, copied.content)
    return None


def fetch_missing(
    copied: CopiedCheckpoint, path: Path, *, rank: int, ranks: int
) -> tuple[int, str | None]:
    """Fetches this rank's share of the files of a checkpoint that are missing in `path`, or are not as
    they were written. Returns the bytes, and what is wrong, or None; `Unreadable` if a copy may be
    whole."""
    stored, fetched = copied.marker.files, 0
    for name in sorted(stored, key=lambda name: -stored[name].bytes)[rank::ranks]:
        try:
            if _is_whole(path / name, stored[name]):
                continue
            if problem := copied.fetch(name, path):
                return fetched, problem
        except OSError as error:
            why = f"{error.filename or name}: {error.strerror or error}"
            return fetched, files.Unreadable(f"its copy cannot be fetched: {why}")
        fetched += stored[name].bytes
    return fetched, None


def _is_whole(file: Path, stored: StoredFile) -> bool:
    if not file.is_file() or file.stat().st_size != stored.bytes:
        return False
    return files.checksum_of_file(file).hexdigest() == stored.checksum


def outdated(
    steps: Collection[int], settings: schema.Checkpoint, best: Collection[int]
) -> Iterator[int]:
    """The steps, of those of whole checkpoints, that `files.prune` would delete. best: those that are
    kept for the results of their evaluations."""
    every = settings.keep_every
    for step in sorted(steps, reverse=True)[settings.keep_last :]:
        if step not in best and not (every and step % every == 0):
            yield step
