"""Tokenized documents on disk, memory-mapped and shared by all processes that see the cache.

A store is a folder: `ids.bin` (int32, all documents one after another), `offsets.npy` (documents +
1), `labels.bin` if labels may differ from the ids, `weights.bin` (float32) with
data.weights_column, `classes.npy` for classification, `attachments.bin` and `attachment_data.bin` for
rows with more than text, `hashes.bin` (uint64, a document each), `meta.json`. Of files of token ids
(`token_files.py`) it has no ids: these files are mapped themselves.
One process builds it in a scratch folder, with a lock like that of a run folder, and renames that;
all others, on any node and of any job, wait. A store with files of another length than `meta.json`
and the offsets say is built again.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader

from launcher.console import advanced, task
from launcher.data.attachment_inputs import MODALITIES, TEXT_ALONE, ModelAttachments
from launcher.data.attachments import ATTACHMENT, Attachment, Attachments, join_attachments
from launcher.data.collation import RowInputs
from launcher.data.columns import Weights
from launcher.data.coordinates import Located, total
from launcher.data.documents import Encoded
from launcher.data.encoder import (
    Encoder,
    PromptForm,
    last_question,
    make_encoder,
    prompt_form,
)
from launcher.data.modality import Modality
from launcher.data.problems import problem_lines
from launcher.data.store_files import (
    COUNTS,
    ORIGIN,
    UNWRITABLE,
    Hashes,
    MappedArray,
    StoreWriter,
    cache_error,
    commit,
    map_array,
    remove_damaged,
    remove_spilled,
    saved_progress,
    spilled,
    store_problem,
    stored_columns,
)
from launcher.data.token_files import Reading, index_files, make_reading, mapped_tokens
from launcher.data.tokenizer import prepare_worker_process
from launcher.distributed.environment import Environment, cache_folder
from launcher.errors import RecipeError, TrainingError
from launcher.files import replace_text
from launcher.models.micro_batch import DocumentMasking
from launcher.models.row_division import WHOLE_ROWS, RowDivision
from launcher.recipe import schema
from launcher.reliability.lock import OwnedError, Ownership, Silence, current_owner
from launcher.sources.finding import Found, found
from launcher.sources.layouts import ATTACHMENTS
from launcher.sources.ranges import first_rows, split
from launcher.sources.rows import Row, SourcePart, in_batches

logger = logging.getLogger(__name__)

_FORMAT = 12
_TASK_BYTES = 4 << 20
"""For less, starting a process takes longer than tokenizing."""
_STORE_ROWS = 4096
"""Rows held in memory with their text, at most."""
_MEMORY_BYTES = 64 << 20
"""Ids of a task that are held in memory."""
_SPILL = "spill-"
"""Beginning of the names of files with the documents of a large task."""
_COUNTED_ROWS = 10_000
"""Rows that are read, after a part with rows that cannot be used, to count these."""
_COUNTED_TOKENS = 1 << 22
"""Tokens that are looked at at a time."""
_POLL_SECONDS = 5.0
"""The longest pause between two checks of the cache: a thousand ranks may wait."""
_LOGGED_SECONDS = 60.0

_Int32s = npt.NDArray[np.int32]


@dataclass(frozen=True)
class ModelTraits:
    """What the data needs to know of the model."""

    tokenizer: str | None = None
    """See `tokenizer_name`; None: data.tokenizer."""
    vocabulary: int | None = None
    """Rows of the embedding. A larger token id is an error."""
    classes: int | None = None
    """Number of classes of a sequence classifier."""
    padding: int = 0
    """Id of the padding token."""
    document_masking: DocumentMasking = "mask"
    recurrent: bool = False
    """Whether it takes the argument `documents` (`launcher/models/recurrent.py`)."""
    division: RowDivision = WHOLE_ROWS
    """The part of each row that this rank computes."""
    width_multiple: int = 1
    """Rows that are padded to the longest one have a multiple of it as their width, or
    data.sequence_length."""
    attachments: ModelAttachments = TEXT_ALONE
    """How it takes what rows have beside text."""

    @property
    def range(self) -> list[int | None]:
        """The numbers of tokens and of classes that it has; None: not known."""
        return [self.vocabulary, self.classes]

    def inputs(self, length: int, *, packed: bool, joined: bool = False) -> RowInputs:
        """How samples of up to `length` tokens become the rows of its micro-batches. packed, joined:
        see `RowInputs`."""
        return RowInputs(
            length=length,
            packed=packed,
            joined=joined,
            document_masking=self.document_masking,
            recurrent=self.recurrent,
            division=self.division,
            padding=self.padding,
            width_multiple=self.width_multiple,
            attachments=self.attachments,
        )


@dataclass(frozen=True)
class TokenStore:
    """Documents, in memory or memory-mapped."""

    ids: _Int32s
    """(tokens,): in files of other tools a `FileTokens`, of which ranges are taken; so are the labels."""
    labels: _Int32s | None
    """(tokens,): see `Document.labels`; None: the ids."""
    offsets: npt.NDArray[np.int64]
    """Start of each document, and the end: (documents + 1,)."""
    classes: _Int32s | None = None
    """kind classification: (documents,)."""
    first_lengths: _Int32s | None = None
    """Pairs of answers: the tokens of the first answer with its prompt, (documents,)."""
    desirable: _Int32s | None = None
    """Answers that are good (1) or not (0), (documents,)."""
    weights: Weights | None = None
    """(tokens,): the weight of each token as a target; None: each counts 1."""
    margins: Weights | None = None
    """Pairs of answers: (documents,); None: each is 0."""
    hashes: Hashes | None = None
    """(documents,): see `document_hashes`; None: not computed."""
    origins: npt.NDArray[Any] | None = None
    """(documents,), of the type ORIGIN; None: not known."""
    attachments: npt.NDArray[Any] | None = None
    """(attachments,), of the type ATTACHMENT, in the order of their tokens; None: there are none."""
    attachment_data: npt.NDArray[np.uint8] | None = None
    """Their files, or the paths of these."""
    skipped: list[dict[str, str]] = field(default_factory=list)
    """`where` and `problem` of the rows that cannot be used (on_error: skip)."""
    empty: int = 0
    """Rows without text."""
    cut_documents: int = 0
    """Texts that the tokenizer cuts, which were longer than data.sequence_length."""
    cut_tokens: int = 0
    further_documents: int = 0
    """Documents of queries beyond data.documents, which are not used."""
    located: Located = field(default_factory=Located)
    """The coordinates in the texts."""
    largest_id: int = -1
    unused: list[str] = field(default_factory=list)
    """Columns with content that are not used."""
    notes: list[str] = field(default_factory=list)
    """What to say at the start of how the rows are read."""
    file_notes: list[str] = field(default_factory=list)
    """What to say of the files: see `find_parts`."""
    prompt_form: PromptForm | None = None
    folder: Path | None = None
    files: list[SourcePart] = field(default_factory=list)
    """The files whose rows the documents are, by the numbers in `origins`."""
    fingerprint: dict[str, Any] = field(default_factory=dict)
    """To detect changed data: `files` (bytes by name), `documents`, `tokens`, and checksums of the
    `content`, `tokenizer` and `chat_template`."""

    @property
    def documents(self) -> int:
        """Number of documents."""
        return len(self.offsets) - 1

    @property
    def labels_or_ids(self) -> _Int32s:
        """(tokens,): see `Document.labels_or_ids`."""
        return self.ids if self.labels is None else self.labels

    def attachments_between(self, start: int, end: int) -> Iterator[Attachment]:
        """The attachments whose first token is in this range."""
        if self.attachments is None:
            return
        assert self.attachment_data is not None
        between = slice(*np.searchsorted(self.attachments["first"], [start, end]))
        for record in self.attachments[between]:
            kind, first, last, begin, size, checksum, is_file, meta = record.tolist()
            data = self.attachment_data[begin : begin + size].tobytes()
            source = _SOURCES[kind](data, is_file)
            yield Attachment(first, last, source, checksum, tuple(meta))


_SOURCES = {[*ATTACHMENTS].index(modality.kind): modality.source for modality in MODALITIES}
"""By the numbers of kinds in a store."""


def one_document(ids: npt.NDArray[Any], attachments: Attachments | None) -> TokenStore:
    """A document in memory, with its attachments."""
    table, data = (None, b"") if attachments is None else attachments
    return TokenStore(
        ids=ids,
        labels=None,
        offsets=np.array([0, len(ids)]),
        attachments=table,
        attachment_data=np.frombuffer(data, dtype=np.uint8),
    )


def open_store(
    patterns: tuple[str, ...],
    data: schema.Data,
    *,
    tokenizer: str | None,
    model: ModelTraits = ModelTraits(),
    validation: bool = False,
    build: bool,
) -> TokenStore:
    """The tokenized documents of `patterns`, from the cache or tokenized now.

    tokenizer: data.tokenizer, or the model's.
    build: tokenize if the store is missing and no other process does (one rank per node). Others
    wait; if the building rank fails, its job ends them.
    Raises RecipeError if a file or row cannot be used, or does not fit the model.
    """
    if validation:
        data = replace(data, limit=None)
    folder, files, encoder, reading = _place(
        patterns, data, tokenizer=tokenizer, model=model, validation=validation
    )
    store = store_in(folder, files.parts, encoder, data, model=model, build=build, reading=reading)
    return replace(store, file_notes=files.notes)


def untokenized_bytes(
    patterns: tuple[str, ...],
    data: schema.Data,
    *,
    tokenizer: str | None,
    model: ModelTraits = ModelTraits(),
) -> int:
    """Bytes, about, of the files of `patterns`, if they are not in the cache; 0: they are. The arguments
    and errors are those of `open_store`."""
    folder, files, *_ = _place(patterns, data, tokenizer=tokenizer, model=model, validation=False)
    return 0 if folder.exists() else sum(part.size for part in files.parts)


def _place(
    patterns: tuple[str, ...],
    data: schema.Data,
    *,
    tokenizer: str | None,
    model: ModelTraits,
    validation: bool,
) -> tuple[Path, Found, Encoder, Reading | None]:
    """The folder of a store in the cache, and what it is made of. `Reading`: of files of token ids."""
    modalities = model.attachments.modalities
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer, modalities=modalities)
    most = data.max_document_bytes
    files = found(patterns, kind=data.kind, validation=validation, max_document=most)
    content = store_content(files, encoder, data)
    reading = make_reading(
        files.parts,
        data,
        columns=[*encoder.columns.values(), *encoder.ignored],
        tokenizer=tokenizer,
        vocabulary=model.vocabulary,
    )
    if reading is not None:
        content += reading.identity(files.parts)
    return cache_folder(data.cache) / digest_of(content), files, encoder, reading


def store_content(files: Found, encoder: Encoder, data: schema.Data) -> list[object]:
    """All that the documents of whole files depend on."""
    content = [_FORMAT, encoder.identity(), data.on_error, files.states, files.sample]
    # Earlier stores have the marks of objects as text, and do not count coordinates
    content += ["objects"] if encoder.modalities else []
    content += [] if data.limit is None else [data.limit]
    # Rows that are larger are not in the store
    return content + ([] if data.on_error == "fail" else [data.max_document_bytes])


def digest_of(content: list[object]) -> str:
    """The name of a store with this content."""
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:24]


def store_in(
    folder: Path,
    parts: list[SourcePart],
    encoder: Encoder,
    data: schema.Data,
    *,
    model: ModelTraits,
    build: bool,
    files: list[SourcePart] | None = None,
    may_be_empty: bool = False,
    reading: Reading | None = None,
) -> TokenStore:
    """The store in `folder`, with the documents of `parts`. See `open_store`.

    files: the whole files that `parts` are of; None: `parts`. may_be_empty: parts without a document
    are no error. reading: of files of token ids; None: `parts` are others.
    """
    refused = folder.with_name(f"{folder.name}.refused.json")
    _refuse_again(refused, model)
    files = parts if files is None else files

    def tokenize(scratch: Path, lock: Ownership) -> None:
        try:
            _build(
                folder,
                scratch,
                parts,
                encoder,
                data,
                files=files,
                model=model,
                lock=lock,
                may_be_empty=may_be_empty,
                reading=reading,
            )
        except OutOfRangeError as error:
            with contextlib.suppress(OSError):
                replace_text(refused, json.dumps([*model.range, str(error)]))
            raise

    build_once(folder, tokenize, "tokenize", build=build)
    store = _load(folder, files, encoder)
    if _out_of_range(store, model) and build:  # its error ends the ranks that do not build
        number = _first_out_of_range(store, model)
        tokens = slice(*store.offsets[number : number + 2])
        largest = max(int(store.ids[tokens].max()), int(store.labels_or_ids[tokens].max()))
        class_number = None if store.classes is None else int(store.classes[number])
        _check_range(origin_of(store, number), largest, class_number, model)
    return store


def build_once(
    folder: Path, make: Callable[[Path, Ownership], None], work: str, *, build: bool
) -> None:
    """Waits until a folder is there and whole (`store_problem`), or with `build` makes it if no other
    process does.

    make: makes the folder, with the name of a scratch folder and the lock of this process. work: what
    it does, for the log. Raises RecipeError.
    """
    lock = _wait(folder, work, build=build)
    if lock is None:
        return
    try:
        scratch = folder.with_name(f".{folder.name}-{lock.name}")
        remove_damaged(folder, scratch.with_name(f"{scratch.name}-damaged"))
        if not folder.is_dir():
            make(scratch, lock)
    finally:
        lock.release()


def origin_of(store: TokenStore, number: int) -> Row:
    """The row of a document of a store, without its values."""
    assert store.origins is not None
    file, of_part, start = store.origins[number].tolist()
    return Row(replace(store.files[file], start=start), of_part, None)


class OutOfRangeError(RecipeError):
    """A row has a token or a class that the model does not have."""


def _refuse_again(refused: Path, model: ModelTraits) -> None:
    """Raises OutOfRangeError if a start has found it in these files for a model of this size."""
    try:
        *limits, problem = json.loads(refused.read_bytes())
    except (OSError, ValueError):
        return
    if limits == model.range:
        raise OutOfRangeError(problem)


def _out_of_range(store: TokenStore, model: ModelTraits) -> bool:
    """Whether a document has a token or a class that the model does not have."""
    classes = 0 if store.classes is None else int(store.classes.max(initial=-1)) + 1
    largest = store.largest_id
    if model.vocabulary is not None and largest >= model.vocabulary:
        return True
    return model.classes is not None and classes > model.classes


def _first_out_of_range(store: TokenStore, model: ModelTraits) -> int:
    """The number of the first such document."""
    first = store.documents
    if model.classes is not None and store.classes is not None:
        first = int(np.argmax(np.append(store.classes >= model.classes, True)))
    tokens = 0 if model.vocabulary is None else int(store.offsets[first])
    for begin in range(0, tokens, _COUNTED_TOKENS):
        ids, labels = (
            array[begin : begin + _COUNTED_TOKENS] for array in (store.ids, store.labels_or_ids)
        )
        beyond = np.flatnonzero(np.maximum(ids, labels) >= model.vocabulary)
        if beyond.size:
            return int(np.searchsorted(store.offsets, begin + beyond[0], side="right")) - 1
    return first


class DocumentRow(NamedTuple):
    """What is shown of a row."""

    where: str
    """`file:line` or `file row number`."""
    question: str | None
    """The last turn of the user, or the prompt."""


def rows_of_documents(
    store: TokenStore,
    data: schema.Data,
    wanted: set[int],
    *,
    tokenizer: str | None,
    modalities: tuple[Modality, ...] = (),
) -> dict[int, DocumentRow]:
    """The rows of documents of a store, by the documents' numbers. Reads these rows again, and of
    their files what comes before them in the same part. Rows of token ids have no question, and are not
    read."""
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer, modalities=modalities)
    if data.kind == "tokens":
        origins = {number: origin_of(store, number) for number in sorted(wanted)}
        return {number: DocumentRow(row.where, None) for number, row in origins.items()}
    return {
        number: DocumentRow(row.where, last_question(encoder, row.values or {}))
        for number, row in _read_again(store, encoder, sorted(wanted))
    }


def values_of_documents(
    store: TokenStore,
    data: schema.Data,
    column: str,
    *,
    tokenizer: str | None,
    modalities: tuple[Modality, ...] = (),
) -> Iterator[tuple[int, Row, Any]]:
    """Of each document of a store: its number, its row, and the value of a column of the row; None: the
    row has no such column. Reads the files again. Raises RecipeError if they are token files."""
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer, modalities=modalities)
    for number, row in _read_again(store, encoder, range(store.documents)):
        yield number, row, (row.values or {}).get(column)


def _read_again(
    store: TokenStore, encoder: Encoder, wanted: Iterable[int]
) -> Iterator[tuple[int, Row]]:
    """Number and row of these documents, whose numbers are sorted."""
    origins = ((number, origin_of(store, number)) for number in wanted)
    for part, of_part in itertools.groupby(origins, lambda item: item[1].part):
        if part.form == "tokens":
            raise RecipeError(f"{part.name}: a file of tokens has no columns")
        numbers: dict[int, list[int]] = {}
        for number, row in of_part:  # a text may have been divided into two documents
            numbers.setdefault(row.number, []).append(number)
        for row in encoder.read([part]):
            for number in numbers.pop(row.number, ()):
                yield number, row
            if not numbers:
                break


def check_range(encoded: Encoded, model: ModelTraits) -> None:
    """Raises OutOfRangeError if the model has no such token or class."""
    largest = max(int(ids.max(initial=-1)) for ids in (encoded.ids, encoded.labels_or_ids))
    _check_range(encoded.row, largest, encoded.class_number, model)


def _check_range(
    row: Row, largest: int, class_number: int | None, model: ModelTraits, hint: str = ""
) -> None:
    if model.vocabulary is not None and largest >= model.vocabulary:
        what = f"is beyond the model's vocabulary of {model.vocabulary} (model.config.vocab_size)"
        raise OutOfRangeError(f"{row.where}: token id {largest} {what}{hint}")
    if model.classes is not None and (class_number or 0) >= model.classes:
        what = f"{model.classes} classes, 0 to {model.classes - 1} (model.num_labels)"
        raise OutOfRangeError(f"{row.where}: label {class_number}, but the model has {what}")


def _wait(folder: Path, work: str, *, build: bool) -> Ownership | None:
    """Waits for the folder, or with `build` for the lock to build it; None: the folder is ready."""
    lock = folder.parent / "locks" / folder.name
    silence = Silence(lock)
    started = logged = time.monotonic()
    seen = 0
    if build and store_problem(folder):
        try:
            lock.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            what = f"{folder.parent} cannot be written to: {error.strerror}"
            raise RecipeError(f"data.cache: {what}") from None
    while store_problem(folder):
        owner = current_owner(lock) if build else None
        silent = silence.ended_lease()
        if build and (owner is None or owner[1] is False or (owner[1] is None and silent)):
            try:
                return Ownership.take(lock, Environment(), silence=silence)
            except OwnedError:
                pass
            except RecipeError as error:  # the folder of the lock cannot be written to
                raise RecipeError(str(error).replace("run.dir", "data.cache", 1)) from None
        now = time.monotonic()
        if (size := _written(folder)) != seen:  # the process that builds gets further
            seen = size
            advanced()
        if now - logged > _LOGGED_SECONDS:
            logged, name = now, owner[0].describe() if owner else "the node's first rank"
            logger.info(f"waiting for {name} to {work} ({now - started:.0f} s)")
        time.sleep(min(_POLL_SECONDS, max(0.05, (now - started) / 4)))
    return None


def _written(folder: Path) -> int:
    """Bytes of a store that any process is building."""
    size = 0
    # Not `Path.glob`, which fails if a folder is renamed at that moment
    for file in glob.glob(f"{glob.escape(str(folder.parent / f'.{folder.name}'))}-*/*"):
        with contextlib.suppress(OSError):  # it was renamed or removed
            size += os.stat(file).st_size
    return size


def _build(
    folder: Path,
    scratch: Path,
    parts: list[SourcePart],
    encoder: Encoder,
    data: schema.Data,
    *,
    files: list[SourcePart],
    model: ModelTraits,
    lock: Ownership,
    may_be_empty: bool,
    reading: Reading | None,
) -> None:
    """Tokenizes into `scratch`, which becomes `folder`. If this process is killed or interrupted,
    what it had noted stays there, and the next one continues after it. Files of token ids are read
    from their beginning then."""
    size = sum(part.size for part in parts) / 2**20
    names = [*dict.fromkeys(part.name for part in parts)]
    what = "1 file" if len(names) == 1 else f"{len(names)} files"
    logger.info(f"{'tokenizing' if reading is None else 'indexing'} {what} ({size:.1f} MiB)")
    started, keep = time.monotonic(), True
    tasks = _tasks(parts, data.limit) if reading is None else []
    try:
        with _continued(folder, scratch, len(tasks), lock) as writer:
            if reading is None:
                numbers = {file.name: number for number, file in enumerate(files)}
                made = _tokenize(
                    tasks,
                    encoder,
                    data,
                    files=numbers,
                    model=model,
                    done=writer.done,
                    spill=scratch,
                )
                for stores in made:
                    for store in stores:
                        writer.add(store)
                        remove_spilled(store)
                    writer.part_done()
                meta = writer.finish()
            else:
                check = partial(_check_range, class_number=None, model=model)
                meta = index_files(
                    scratch,
                    parts,
                    reading,
                    limit=data.limit,
                    vocabulary=model.vocabulary,
                    check=check,
                )
        keep = False
        if not meta["documents"] and not may_be_empty:
            problem, skipped = f"data: no document with text in {len(parts)} files", meta["skipped"]
            if skipped:
                listed = problem_lines(skipped, rows=len(skipped))
                raise RecipeError([f"{problem}; all {len(skipped):,} rows were skipped:", *listed])
            raise RecipeError(problem)
        seconds = max(time.monotonic() - started, 1e-3)
        empty = f"; {meta['empty']:,} rows without text skipped" if meta["empty"] else ""
        logger.info(
            f"{'tokenized' if reading is None else 'indexed'} {meta['documents']:,} documents, "
            f"{meta['tokens']:,} tokens in "
            f"{seconds:.1f} s ({meta['tokens'] / seconds:,.0f} tokens/s){empty}"
        )
        about: dict[str, Any] = {"kind": encoder.kind, "files": names}
        about["prompt_form"] = prompt_form(encoder, parts)
        (scratch / "meta.json").write_text(json.dumps(about | meta), encoding="utf-8")
        commit(scratch, folder)
    except RecipeError:
        keep = False
        raise
    except OSError as error:
        if folder.is_dir():  # a process took over the lock, and was faster
            keep = False
            return
        keep = error.errno not in UNWRITABLE
        raise cache_error(error, folder.parent) from None
    finally:
        if not keep or not saved_progress(scratch, len(tasks)):
            shutil.rmtree(scratch, ignore_errors=True)


def _continued(folder: Path, scratch: Path, tasks: int, lock: Ownership) -> StoreWriter:
    """A writer into `scratch`, which continues what a process that was killed has left."""
    left = sorted(folder.parent.glob(f".{folder.name}-*"))
    used = max(left, key=lambda one: saved_progress(one, tasks).get("done", 0), default=None)
    if used is not None and not saved_progress(used, tasks):
        used = None
    owner = None if used is None else lock.process_of(used.name.split("-", 1)[1])
    if used is not None and owner is not None and owner.alive() is False:
        used.rename(scratch)
        used = None
    else:  # it may still write to its files
        scratch.mkdir()
    writer = StoreWriter(scratch, tasks, used)
    for one in left:
        shutil.rmtree(one, ignore_errors=True)
    for spill in scratch.glob(f"{_SPILL}*"):
        spill.unlink()
    if writer.done:
        what = "an earlier process that was ended"
        logger.info(f"continuing after {writer.done:,} of {tasks:,} parts by {what}")
    return writer


def _load(folder: Path, files: list[SourcePart], encoder: Encoder) -> TokenStore:
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    sizes = {file.name: file.size for file in files}
    counts = {name: meta[name] for name in ("documents", "tokens", "content")}
    offsets = map_array(folder / "offsets.npy")

    def mapped(name: str, dtype: type | np.dtype[Any]) -> Any:
        file = folder / name
        if not meta["documents"]:  # an empty file cannot be mapped
            return np.zeros(0, dtype=dtype)
        return MappedArray(file, dtype=dtype, mode="r") if file.exists() else None

    attachments = folder / "attachments.bin"
    ids: Any
    labels: Any
    if "token_files" in meta:
        ids, labels = mapped_tokens(files, meta)
    else:
        ids, labels = mapped("ids.bin", np.int32), mapped("labels.bin", np.int32)
    # Stores of earlier versions have no such numbers
    located = Located(**{name: meta.get(name, 0) for name in Located()._asdict()})
    notes = encoder.notes
    if attachments.exists():
        notes += [note for modality in encoder.modalities for note in modality.notes(located)]
    return TokenStore(
        ids=ids,
        labels=labels,
        offsets=offsets,
        **stored_columns(folder, encoder.kind, offsets),
        hashes=mapped("hashes.bin", np.uint64),
        origins=mapped("origins.bin", ORIGIN),
        attachments=np.fromfile(attachments, dtype=ATTACHMENT) if attachments.exists() else None,
        attachment_data=mapped("attachment_data.bin", np.uint8),
        folder=folder,
        files=files,
        fingerprint={"files": sizes, **encoder.fingerprint(), **counts},
        notes=notes,
        located=located,
        prompt_form=meta["prompt_form"],
        **{name: meta[name] for name in ("largest_id", "skipped", "unused")},
        # Stores of earlier versions have fewer
        **{name: meta.get(name, 0) for name in COUNTS},
    )


# Tokenization. Tasks are parts of files. This process writes their documents in the order of files
# and lines, so the number of processes does not change the result


def _tokenize(
    tasks: list[list[SourcePart]],
    encoder: Encoder,
    data: schema.Data,
    *,
    files: Mapping[str, int],
    model: ModelTraits,
    done: int,
    spill: Path,
) -> Iterator[list[TokenStore]]:
    """The documents of each task after the first `done` ones. Raises RecipeError for rows that
    cannot be used (data.on_error: fail): of the part with the first of them, and of those after it
    up to _COUNTED_ROWS rows."""
    if done == len(tasks):
        return
    processes = min(data.processes or len(os.sched_getaffinity(0)), len(tasks) - done)
    loader: DataLoader[Any] = DataLoader(
        tasks[done:],  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=partial(_run_task, encoder, model, data.on_error, spill, files),
        num_workers=processes if processes > 1 else 0,
        worker_init_fn=prepare_worker_process,
        multiprocessing_context="fork" if processes > 1 else None,
        # By default its seed is drawn from the default generator, which dropout uses too
        generator=torch.Generator(),
    )
    try:
        with task("tokenizing", len(tasks)) as advance:
            advance(done)
            skipped: list[dict[str, str]] = []
            failed: RecipeError | None = None
            rows, number = 0, done
            for stores, of_task, problem in loader:
                number += 1
                rows += of_task
                failed = failed or problem
                bad = [row for store in stores for row in store.skipped]
                if data.on_error == "fail" and (bad or skipped):
                    skipped += bad
                    if rows >= _COUNTED_ROWS or failed:
                        break
                    continue
                if failed:
                    break
                yield stores
                advance(1)
            if skipped:
                complete = number == len(tasks) and not failed and rows < _COUNTED_ROWS
                raise RecipeError(list(problem_lines(skipped, rows=rows, complete=complete)))
            if failed:
                raise failed
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        by = re.search(r"by signal: ([^.]*)", str(error.__cause__ or error.__context__))
        what = "a tokenization process was killed" + (f" ({by[1]})" if by else "")
        hint = "perhaps for lack of memory; lower data.processes"
        raise TrainingError(f"{what}, {hint}") from None


def _tasks(parts: list[SourcePart], limit: int | None) -> list[list[SourcePart]]:
    """Consecutive parts of about _TASK_BYTES: large files are split, small ones grouped. They have
    the first `limit` rows."""
    pieces = [
        piece
        for part in parts
        for piece in ([part] if part.most is not None else split(part, _TASK_BYTES))
    ]
    if limit is not None:
        pieces = list(first_rows(pieces, limit))
    starts = itertools.accumulate((piece.size for piece in pieces), initial=0)
    groups = itertools.groupby(
        zip(starts, pieces, strict=False), lambda placed: placed[0] // _TASK_BYTES
    )
    return [[piece for _, piece in group] for _, group in groups]


def _run_task(
    encoder: Encoder,
    model: ModelTraits,
    on_error: str,
    spill: Path,
    files: Mapping[str, int],
    parts: list[SourcePart],
) -> tuple[list[TokenStore], int, RecipeError | None]:
    """The documents of a task, the number of its rows, and a problem of a file or the tokenizer, or
    with the model's range: a loader would wrap the error. A compressed file is one task, whatever its size: what exceeds
    _MEMORY_BYTES goes to files in `spill`. With on_error: fail, the documents are of no use after a
    row that cannot be used, and at most _COUNTED_ROWS further rows are read."""
    stores: list[TokenStore] = []
    held = count = 0
    unused: list[str] = []
    rows = encoder.encode_rows(encoder.read(parts), unused=unused)
    try:
        for some in in_batches(rows, most=_STORE_ROWS, size=lambda one: one.row.size):
            count += len(some)
            store = store_rows(some, files)
            if _out_of_range(store, model):  # at once, not after all files are tokenized
                for encoded in some:
                    check_range(encoded, model)
            held += store.ids.nbytes
            held += 0 if store.attachment_data is None else store.attachment_data.nbytes
            if held > _MEMORY_BYTES:
                store = spilled(store, spill / f"{_SPILL}{os.getpid()}-{uuid.uuid4().hex}")
            stores.append(store)
            if on_error == "fail" and count >= _COUNTED_ROWS and any(s.skipped for s in stores):
                break
    except RecipeError as error:
        return stores, count, error
    if stores:
        stores[-1] = replace(stores[-1], unused=unused)
    return stores, count, None


def store_rows(rows: list[Encoded], files: Mapping[str, int] | None = None) -> TokenStore:
    """The documents of these rows, and the rows that cannot be used. files: the numbers of their
    files by name, for the origins of the documents."""
    skipped = [row.skipped for row in rows if row.problem]
    documents = [row for row in rows if row.ids.size]
    labelled = any(row.labels is not None for row in documents)
    labels = [row.labels_or_ids for row in documents]
    weights = [row.weights for row in documents if row.weights is not None]
    offsets = np.cumsum([0, *(row.ids.size for row in documents)], dtype=np.int64)
    origins = None
    if files is not None:
        of_rows = ((files[e.row.part.name], e.row.number, e.row.part.start) for e in documents)
        origins = np.array(list(of_rows), dtype=ORIGIN)
    attachments = join_attachments([row.attachments for row in documents], offsets[:-1].tolist())
    table, data = (None, None) if attachments is None else attachments
    return TokenStore(
        ids=_joined([row.ids for row in documents]),
        labels=_joined(labels) if labelled else None,
        offsets=offsets,
        classes=_column([row.class_number for row in documents], np.int32),
        first_lengths=_column([row.first_length for row in documents], np.int32),
        desirable=_column([row.desirable for row in documents], np.int32),
        weights=np.concatenate(weights) if weights else None,
        margins=_column([row.margin for row in documents], np.float32),
        origins=origins,
        attachments=table,
        attachment_data=None if data is None else np.frombuffer(data, dtype=np.uint8),
        skipped=skipped,
        largest_id=max(
            (int(ids.max(initial=-1)) for ids in (*(row.ids for row in documents), *labels)),
            default=-1,
        ),
        empty=len(rows) - len(skipped) - len(documents),
        cut_documents=sum(row.cut_tokens > 0 for row in documents),
        cut_tokens=sum(row.cut_tokens for row in documents),
        further_documents=sum(row.further_documents for row in documents),
        located=total(row.coordinates for row in documents if row.coordinates is not None),
    )


def _column(values: Sequence[float | None], dtype: type) -> npt.NDArray[Any] | None:
    """None if no document has a value: all of a kind have one, or none."""
    known = [value for value in values if value is not None]
    return np.array(known, dtype=dtype) if known else None


def _joined(arrays: list[_Int32s]) -> _Int32s:
    return np.concatenate([np.zeros(0, dtype=np.int32), *arrays])
