"""Data that is tokenized while the run trains, for data larger than the disk.

The files are divided into pieces: line ranges of a .jsonl, row groups of a .parquet, files of a hub
data set, other files whole. The pieces are assigned to shards of about data.shard_size, with shuffle
at random, so that a shard is a sample of the data. A shard is a token store like that of all data
without streaming (`token_store.py`), and its samples come in the order of such a store. A pass over
the data goes through all shards, with shuffle each time in another order.

While the run trains on a shard, a process of each node tokenizes the next one. A shard that no rank
needs any more is removed. A checkpoint holds a position in the order. A resume tokenizes the shard at
that position again if it is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import heapq
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

from launcher.data.batching import NO_SAMPLE, Blend, Index, Order, blend_of
from launcher.data.collation import Sample
from launcher.data.dataset import (
    MixtureDataset,
    SampleMaker,
    SequenceDataset,
    joined_row,
)
from launcher.data.encoder import Encoder, PromptForm, make_encoder, prompt_form
from launcher.data.held_out import CHOSEN
from launcher.data.opening import make_dataset, make_order
from launcher.data.packing import NothingToTrainError
from launcher.data.token_store import (
    ModelTraits,
    digest_of,
    store_content,
    store_in,
)
from launcher.data.tokenizer import prepare_worker_process
from launcher.distributed.environment import cache_folder
from launcher.errors import RecipeError, first_line
from launcher.models.philox import derived_seed
from launcher.recipe import schema
from launcher.sources.finding import Found, found, shared_result
from launcher.sources.hub import load_data_set
from launcher.sources.ranges import first_rows, split
from launcher.sources.rows import SourcePart

logger = logging.getLogger(__name__)

VERSION = 7
"""Version of the order of samples, and of its digest."""
_PIECES_OF_SHARD = 64
"""A shard has about as many pieces, if the files can be divided."""
_PIECES = 1 << 14
"""Most pieces. Finding where each piece starts is one read of the file, on every rank."""
_INDEX_BITS = 40
"""An index is the turn of a shard, and in its last bits that of a sample in the shard."""
_KEPT_BY_LOADER = 4
"""Shards that a loader process keeps open."""
_HOW_TO_RESUME = (
    "data: correct the rows, or set data.on_error=skip, and start the run again with "
    "checkpoint.allow_changes=true; it resumes from its last checkpoint"
)
"""What to do after an error in the rows of a shard, while the run trains."""

Pieces = dict[str, list[SourcePart]]
"""Parts of files, by the names of their sources; without a mixture the name is empty."""


def assign_shards(
    pieces: Pieces, *, shard_bytes: int, seed: int, shuffle: bool, weighted: bool = False
) -> list[Pieces]:
    """The pieces of each shard. Shards have about `shard_bytes`, or a larger piece.

    A shard may lack a source, unless the sources are weighted: then a source with fewer pieces than
    there are shards has each of its pieces in several of them.
    """
    items = [(name, part) for name, parts in pieces.items() for part in parts]
    total = sum(_bytes(part, shard_bytes) for _, part in items)
    number = max(1, min(len(items), -(-total // shard_bytes)))
    groups = [[*group] for _, group in itertools.groupby(items, lambda item: item[0])]
    shards: list[Pieces] = [{name: [] for name in pieces} for _ in range(number)]
    for group in groups if weighted else [items]:
        sizes = [_bytes(part, shard_bytes) for _, part in group]
        assigned = _at_random(sizes, number, seed=seed) if shuffle else _in_order(sizes, number)
        for shard, mine in enumerate(assigned):
            if weighted and not mine:
                mine = [shard * len(group) // number]
            for at in sorted(mine):
                name, part = group[at]
                shards[shard][name].append(part)
    return [shard for shard in shards if any(shard.values())] or shards


def _bytes(piece: SourcePart, shard_bytes: int) -> int:
    """Bytes of a piece. Those of a file of a hub data set are not known, and it is a shard."""
    return max(1, shard_bytes if piece.form == "hub_stream" else piece.size)


def _at_random(sizes: list[int], number: int, *, seed: int) -> list[list[int]]:
    """Pieces at random, in `number` shards of about the same size."""
    order = list(range(len(sizes)))
    random.Random(f"pieces {seed}").shuffle(order)
    assigned: list[list[int]] = [[] for _ in range(number)]
    smallest = [(0, shard) for shard in range(number)]
    for piece in order:
        size, shard = smallest[0]
        assigned[shard].append(piece)
        heapq.heapreplace(smallest, (size + sizes[piece], shard))
    return assigned


def _in_order(sizes: list[int], number: int) -> list[list[int]]:
    """Consecutive pieces, in up to `number` shards of about the same size."""
    assigned: list[list[int]] = [[] for _ in range(number)]
    starts = itertools.accumulate(sizes, initial=0)
    for piece, start in zip(range(len(sizes)), starts, strict=False):
        assigned[start * number // sum(sizes)].append(piece)
    return assigned


def _divide(file: SourcePart, size: int) -> list[SourcePart]:
    if file.form != "hub" or file.size:  # of a folder of save_to_disk, the size is known
        return split(file, size) if file.size > size else [file]
    return [replace(_streamed(file), start=index) for index in range(_streamed(file).end or 0)]


def _pieces_of(files: Found, size: int, limit: int | None) -> list[SourcePart]:
    """The pieces of about `size` bytes with the first `limit` rows, in a run with files in a store as one
    rank has found them."""

    def divide() -> list[SourcePart]:
        parts = (file for file in files.parts if file.size or file.form != "text")
        pieces = [piece for file in parts for piece in _divide(file, size)]
        return pieces if limit is None else [*first_rows(pieces, limit)]

    if not any(file.file.in_store for file in files.parts):
        return divide()
    return shared_result(repr((files.states, size, limit)), divide)


def _streamed(file: SourcePart) -> SourcePart:
    """A hub data set whose rows are fetched as they are read; other files as they are."""
    if file.form != "hub" or file.size:
        return file
    data_set = load_data_set(file.name, validation=file.validation, streaming=True)
    return replace(file, form="hub_stream", end=data_set.num_shards)


@dataclass(frozen=True)
class _Source:
    """A source of a mixture, or the only one."""

    number: int
    data: schema.Data
    encoder: Encoder
    files: list[SourcePart]
    pieces: list[SourcePart]
    sample: str
    """See `content_sample`."""
    content: str
    """Digest of all that the documents depend on."""
    notes: list[str]

    @property
    def fingerprint(self) -> dict[str, Any]:
        """To detect changed data, as that of a `TokenStore`, whose counts are not known here."""
        files = {file.name: file.size for file in self.files}
        held_out = {} if self.data.validation_split is None else {"held_out": CHOSEN}
        return {"files": files, "sample": self.sample, **self.encoder.fingerprint(), **held_out}


class Shard(NamedTuple):
    """An open shard."""

    dataset: SequenceDataset | MixtureDataset
    order: Order
    lengths: Sequence[int]
    """Tokens of each sample."""


class StreamingDataset:
    """Samples of shards, with the members of `SequenceDataset`.

    A run reads one shard after another, pass after pass. The turn of a shard is its number in this
    sequence, from 0. Which shard has a turn is a function of the seed.
    """

    def __init__(
        self,
        data: schema.Data,
        *,
        objective: SampleMaker,
        tokenizer: str | None,
        model: ModelTraits,
        seed: int,
        build: bool,
        run_dir: Path | None = None,
        lists_skipped: bool = False,
    ) -> None:
        """No shard is tokenized yet. Raises RecipeError if a file cannot be used.

        build: tokenize shards, and remove those that are not needed (one process per node). run_dir:
        shards on the disk belong to this run. lists_skipped: its skipped_rows.jsonl is written here.
        """
        self.data, self._objective, self._model = data, objective, model
        self._tokenizer, self._seed, self._build = tokenizer, seed, build
        self._skipped_rows = run_dir / "skipped_rows.jsonl" if run_dir and lists_skipped else None
        self._sources = self._open_sources()
        self._blend: Blend | None = None
        if isinstance(data.train, dict):
            self._blend = blend_of(data)
        self._shards = assign_shards(
            {name: source.pieces for name, source in self._sources.items()},
            shard_bytes=data.shard_bytes,
            seed=seed,
            shuffle=data.shuffle,
            weighted=self._blend is not None,
        )
        self._empty = {
            name: objective.empty(source.data, model) for name, source in self._sources.items()
        }
        """For each source, a data set without documents."""
        empty = self._joined(self._empty)
        self._without_samples = empty
        self.packed = empty.packed
        self.joined = empty.joined
        self.width = empty.width
        self.unit = empty.unit
        self.collate = empty.collate
        self.objective = empty.objective
        self.nothing = NothingToTrainError("data: no document with text")
        """Why the last empty shard is empty."""
        self.sources = (
            self._without_samples.sources
            if isinstance(self._without_samples, MixtureDataset)
            else ()
        )
        self.lengths: Sequence[int] = _Lengths(self)
        self.skipped: list[dict[str, str]] = []
        forms = (prompt_form(of.encoder, of.pieces) for of in self._sources.values())
        self.prompt_forms: set[PromptForm] = {form for form in forms if form is not None}
        self.order = f"{VERSION}-{self._order_digest()}"
        """Digest of all that the order of samples depends on, after its version."""
        owner = self.order if run_dir is None else str(run_dir.resolve())
        self._root = cache_folder(data.cache) / "streams" / digest_of([owner])
        self._opened: dict[int, Shard] = {}
        self._logged: set[str] = set()
        self._released = -1
        self._ahead: ForkProcess | None = None
        """The process that tokenizes the next shard."""
        self._trains = False

    def _open_sources(self) -> dict[str, _Source]:
        of_sources: dict[str, Found] = {}
        for name, data in self.data.sources().items():
            assert isinstance(data.train, tuple)
            most = data.max_document_bytes
            files = of_sources[name] = found(data.train, kind=data.kind, max_document=most)
            if files.parts and files.parts[0].form == "tokens":
                what = "holds token ids, which are mapped as they are; set data.streaming=false"
                raise RecipeError(f"{files.parts[0].name}: {what}")
        total = sum(file.size for files in of_sources.values() for file in files.parts)
        size = max(1, self.data.shard_bytes // _PIECES_OF_SHARD, total // _PIECES)
        sources: dict[str, _Source] = {}
        for number, (name, data) in enumerate(self.data.sources().items()):
            files = of_sources[name]
            modalities = self._model.attachments.modalities
            encoder = make_encoder(
                data.kind, data, tokenizer=self._tokenizer, modalities=modalities
            )
            pieces = _pieces_of(files, size, data.limit)
            sources[name] = _Source(
                number,
                replace(data, limit=None),  # the pieces have these rows only
                encoder,
                [*map(_streamed, files.parts)],
                pieces,
                files.sample,
                digest_of(store_content(files, encoder, data)),
                files.notes,
            )
        return sources

    def _order_digest(self) -> str:
        """Files by number, not by path: in another folder they have the same order."""
        data = self.data
        order: list[object] = [self._seed, data.shuffle, data.similar_lengths, data.packing]
        order += [data.sequence_length, data.validation_split, self._blend and self._blend.weights]
        for name, source in self._sources.items():
            numbers = {file.name: at for at, file in enumerate(source.files) if file.size}
            shards = [
                [
                    (numbers.get(part.name, part.name), part.start, part.size, part.most)
                    for part in shard[name]
                ]
                for shard in self._shards
            ]
            settings: list[object] = [source.data.on_error, source.data.drops_overlong]
            if source.data.on_error == "skip":
                settings.append(source.data.max_document)  # larger documents are skipped
            order += [shards, settings, *source.encoder.identity()]
        return digest_of(order)

    def _joined(self, parts: dict[str, SequenceDataset]) -> SequenceDataset | MixtureDataset:
        if isinstance(self.data.train, dict):
            return MixtureDataset(parts, self._blend)
        return parts[""]

    # Samples

    def __getitem__(self, index: Index) -> Sample:
        """The sample of an index. Of several indices: one row of their samples."""
        if isinstance(index, tuple):
            inputs = next(iter(self._empty.values())).inputs
            return joined_row([self[each] for each in index or (NO_SAMPLE,)], inputs)
        if index == NO_SAMPLE:
            return self._without_samples[NO_SAMPLE]
        shard, sample = self.located(index)
        return shard.dataset[sample]

    def located(self, index: int) -> tuple[Shard, int]:
        """The shard of a sample, and its index there."""
        return self.shard(index >> _INDEX_BITS), index & ((1 << _INDEX_BITS) - 1)

    @property
    def shards(self) -> int:
        """Their number."""
        return len(self._shards)

    def size(self, turn: int) -> int:
        """Samples of the shard at a turn."""
        return len(self.shard(turn).dataset)

    def index(self, turn: int, position: int) -> int:
        """The sample at a position of the shard at a turn."""
        shard = self.shard(turn)
        before = turn // len(self._shards) * len(shard.dataset)  # of earlier passes
        return turn << _INDEX_BITS | shard.order.sample(before + position)

    def turn(self, finished: int, place: int) -> int:
        """The turn of the shard at a place of the pass after `finished` ones."""
        return finished * len(self._shards) + min(place, len(self._shards) - 1)

    def place(self, turn: int) -> tuple[int, int]:
        """The passes before a turn, and the place of its shard in the pass."""
        return divmod(turn, len(self._shards))

    # Shards

    def _number(self, turn: int) -> int:
        """Which shard is read at a turn."""
        finished, place = self.place(turn)
        numbers = list(range(len(self._shards)))
        if self.data.shuffle:
            random.Random(f"pass {finished} {self._seed}").shuffle(numbers)
        return numbers[place]

    def _folder(self, number: int) -> Path:
        parts = [
            [self._sources[name].content, [(p.name, p.start, p.end, p.most) for p in pieces]]
            for name, pieces in self._shards[number].items()
        ]
        return self._root / f"{number:05}-{digest_of([*parts])}"

    def shard(self, turn: int) -> Shard:
        """The shard at a turn. In the process that builds, it is tokenized now if it is not there;
        other ranks wait for it. Raises RecipeError."""
        if turn in self._opened:
            return self._opened[turn]
        number, in_loader = self._number(turn), get_worker_info() is not None
        if in_loader and not self._folder(number).is_dir():
            raise RecipeError(
                f"data.cache: {self._folder(number)} was removed while the run needs it; start the "
                "run again"
            )
        known = next((each for each in self._opened if self._number(each) == number), None)
        if known is not None:
            shard = self._opened[known]
        else:
            try:
                shard = self._open(number, build=self._build and not in_loader)
            except RecipeError as error:
                if not self._trains or isinstance(error, NothingToTrainError):
                    raise
                raise RecipeError([*error.problems, _HOW_TO_RESUME]) from None
        self._opened[turn] = shard
        if in_loader:
            for old in sorted(self._opened)[:-_KEPT_BY_LOADER]:
                del self._opened[old]
            return shard
        if known is None:
            self._announce(turn, shard.dataset)
        if self._trains:
            self._tokenize_ahead(turn + 1)
        return shard

    def _open(self, number: int, *, build: bool) -> Shard:
        seed = self._seed if number == 0 else derived_seed(self._seed, f"shard {number}")
        objective = self._objective.with_seed(seed)
        dataset = self._dataset(number, objective, build=build)
        order = make_order(
            dataset,
            seed=seed,
            shuffle=self.data.shuffle,
            epochs=None,
            similar_lengths=self.data.similar_lengths and len(dataset) > 0,
        )
        lengths = dataset.lengths
        assert lengths is not None
        return Shard(dataset, order, lengths)

    def _dataset(
        self, number: int, objective: SampleMaker, *, build: bool, held_out: bool = False
    ) -> SequenceDataset | MixtureDataset:
        several = len(self._shards) > 1
        parts: dict[str, SequenceDataset] = {}
        for name, source in self._sources.items():
            pieces, store = self._shards[number][name], self._empty[name].store
            try:
                if pieces:
                    store = store_in(
                        self._folder(number) / str(source.number),
                        pieces,
                        source.encoder,
                        source.data,
                        model=self._model,
                        build=build,
                        files=source.files,
                        may_be_empty=several,
                    )
                    store = replace(store, file_notes=source.notes)
                parts[name] = make_dataset(
                    store,
                    source.data,
                    objective=objective,
                    tokenizer=self._tokenizer,
                    model=self._model,
                    held_out=held_out,
                    of_shard=several,
                )
            except NothingToTrainError as error:
                if not several or self._blend is not None:
                    raise
                self.nothing = error
                parts[name] = replace(self._empty[name], store=store)
        return self._joined(parts)

    def held_out(self, objective: SampleMaker) -> SequenceDataset | MixtureDataset:
        """The documents that are held out (data.validation_split) of the shard that is read first.
        Those of the other shards are not trained on either."""
        dataset = self._dataset(self._number(0), objective, build=self._build, held_out=True)
        parts = dataset.parts if isinstance(dataset, MixtureDataset) else {"": dataset}
        for name, part in parts.items():
            if not len(part):
                if name and not self._shards[self._number(0)][name]:
                    raise RecipeError(
                        "data.validation_split: the first shard, whose rows are held out, has none of "
                        f"source {name}; give data.validation, or a larger data.shard_size"
                    )
                where = f"source {name} of the first shard" if name else "the first shard"
                raise RecipeError(
                    f"data.validation_split: no document of {where} with a token with loss is held "
                    "out; raise it, or data.shard_size, or give data.validation"
                )
        return dataset

    def _announce(self, turn: int, dataset: SequenceDataset | MixtureDataset) -> None:
        """Logs what is in a shard, and lists its rows that cannot be used."""
        finished, place = self.place(turn)
        title = f"shard {place + 1} of {len(self._shards)}, pass {finished + 1}"
        size, *others = dataset.describe()
        new = [line for line in others if line not in self._logged]
        self._logged |= {*others}
        logger.info("\n".join([f"{title}: {size}", *new]))
        if self._skipped_rows is None or not (skipped := dataset.skipped):
            return
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in skipped)
        with (
            contextlib.suppress(OSError),  # such as a full disk: the rows are skipped anyway
            self._skipped_rows.open("a+", encoding="utf-8") as file,
        ):
            file.seek(0)
            listed = {*file}  # a resume opens a shard again
            file.writelines(line for line in lines if line not in listed)

    # Ahead of the run

    @contextlib.contextmanager
    def training(self, turn: int) -> Iterator[None]:
        """While the run trains from the shard at `turn` on, the next shards are tokenized ahead."""
        self._released = -1
        self.release(turn)
        self._trains = self._build
        try:
            yield
        finally:
            self._trains = False
            self._stop_ahead()

    def _tokenize_ahead(self, turn: int) -> None:
        number = self._number(turn)
        if any(self._number(opened) == number for opened in self._opened):
            return
        self._stop_ahead()
        fork = multiprocessing.get_context("fork")
        self._ahead = fork.Process(target=self._run_ahead, args=(number,), name=f"shard {number}")
        self._ahead.start()
        # The interpreter waits at its end for processes that may have some of their own
        atexit.register(self._ahead.kill)

    def _run_ahead(self, number: int) -> None:
        """Tokenizes a shard in a process of its own. If it fails, the run tries it again when it needs
        the shard, and reports the error."""
        prepare_worker_process(0)
        os.nice(5)
        logging.disable(logging.INFO)
        try:
            self._dataset(number, self._objective, build=True)
        except Exception as error:
            logger.warning(f"the next shard cannot be tokenized: {first_line(error)}")

    def _stop_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.kill()
            self._ahead.join()
            atexit.unregister(self._ahead.kill)
            self._ahead = None

    def release(self, turn: int) -> None:
        """Forgets the shards before a turn, which no rank needs any more, and removes them from the
        disk."""
        if turn == self._released:
            return
        self._released = turn
        self._opened = {at: shard for at, shard in self._opened.items() if at >= turn}
        if not self._build:
            return
        needed = {turn, *self._opened}
        needed |= {max(needed) + 1} | ({0} if self.data.validation_split is not None else set())
        names = {self._folder(self._number(each)).name for each in needed}
        with contextlib.suppress(FileNotFoundError):
            for name in os.listdir(self._root):
                if name not in names:
                    shutil.rmtree(self._root / name, ignore_errors=True)

    # For the log and checkpoints

    @property
    def fingerprint(self) -> dict[str, Any]:
        """See `TokenStore`; of a mixture, those of the sources by name."""
        found = {name: source.fingerprint for name, source in self._sources.items()}
        return {"parts": found} if isinstance(self.data.train, dict) else found[""]

    def describe(self) -> list[str]:
        """Lines for the log."""
        files = [file for source in self._sources.values() for file in source.files]
        size, shards = sum(file.size for file in files) / 2**20, len(self._shards)
        of = "in 1 shard" if shards == 1 else f"in {shards:,} shards"
        return [
            f"streaming {len(files):,} files ({size:,.1f} MiB) {of} of about "
            f"{self.data.shard_size} (data.shard_size), {self._without_samples.unit} in sequences of up to "
            f"{self.data.sequence_length} tokens"
        ]


class _Lengths(Sequence[int]):
    """Tokens of the samples of a stream, by their indices."""

    def __init__(self, stream: StreamingDataset) -> None:
        self._stream = stream

    def __len__(self) -> int:
        return sys.maxsize  # an index is less, so that `index % len` is the index

    def __getitem__(self, index: Any) -> Any:
        shard, sample = self._stream.located(index)
        return shard.lengths[sample % len(shard.lengths)]


class StreamOrder:
    """The order of a stream: the samples of its shards, one shard after another."""

    samples = 0
    """Not known."""
    epochs = None

    def __init__(self, stream: StreamingDataset, *, turn: int = 0, first: int = 0) -> None:
        """first: the global position of the first sample of the shard at `turn`."""
        self._stream = stream
        self._firsts = {turn: first}
        """The global position of the first sample of shards, by their turns in order."""

    @property
    def digest(self) -> str:
        """Of all that the order depends on, after its version."""
        return self._stream.order

    @property
    def first_turn(self) -> int:
        """The turn of the first shard that may be needed."""
        return next(iter(self._firsts))

    def sample(self, position: int) -> int:
        """Index of the sample at a global position."""
        turn = self._turn(position)
        return self._stream.index(turn, position - self._firsts[turn])

    def _turn(self, position: int, *, release: bool = False) -> int:
        empty = 0
        while True:
            newest, first = next(reversed(self._firsts.items()))
            size = self._stream.size(newest)
            if position < first + size:
                break
            empty = 0 if size else empty + 1
            if empty == self._stream.shards:
                raise self._stream.nothing
            self._firsts[newest + 1] = first + size
            if release:
                self.release(first + size)
        return max(turn for turn, first in self._firsts.items() if first <= position)

    def skip_to(self, position: int) -> None:
        """Goes through the shards before a global position, and removes each of them from the disk
        then: for a process that has the stream for itself."""
        self._turn(position, release=True)

    def _place(self, position: int) -> tuple[int, int]:
        """The turn of the shard with the sample at a global position, and the place of the sample
        there. Opens only shards that have a sample before the position. Another rank may have been
        given that sample, so this rank may not have opened the shard yet."""
        known = [turn for turn, first in self._firsts.items() if first < position]
        turn = max(known, default=self.first_turn)
        while position - self._firsts[turn] >= (size := self._stream.size(turn)):
            self._firsts.setdefault(turn + 1, self._firsts[turn] + size)
            turn += 1
            if self._firsts[turn] == position:
                break
        return turn, position - self._firsts[turn]

    def release(self, position: int) -> None:
        """All ranks have the samples before a global position."""
        turn, _ = self._place(position)
        self._firsts = {at: first for at, first in self._firsts.items() if at >= turn}
        self._stream.release(turn)

    def state(self, position: int) -> dict[str, Any]:
        """What `starting` needs to continue after the first `position` samples of the run."""
        turn, sample = self._place(position)
        finished, place = self._stream.place(turn)
        at = {"pass": finished, "shard": place, "sample": sample}
        return {"order": self._stream.order, "samples": position, **at}

    def starting(self, saved: Mapping[str, Any] | None, position: int) -> StreamOrder:
        """The order from a global position on. saved: `state` at it or at an earlier one; of another
        order, the position is taken for the same pass, shard and sample of this one. None, or of an
        earlier version: the order starts at the position."""
        if saved is None or "sample" not in saved:
            return StreamOrder(self._stream, first=position)
        turn = self._stream.turn(saved["pass"], saved["shard"])
        return StreamOrder(self._stream, turn=turn, first=saved["samples"] - saved["sample"])

    def epochs_seen(self, positions: int) -> list[float]:
        """Nothing is known of the length of a stream."""
        return []
