"""The data of a run: what is trained on and evaluated, which sample stands where, and how many steps that makes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.data.batching import Order, Position, RankSlots, Slots, total_steps
from launcher.data.custom import CustomDataset, build_custom_data
from launcher.data.dataset import Isolation, MapData, make_order, open_dataset
from launcher.data.encoder import make_encoder
from launcher.data.loader import GlobalBatch, make_slots
from launcher.data.sources import find_parts
from launcher.data.streaming import StreamingDataset, StreamOrder
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError
from launcher.recipe import schema


@dataclass(frozen=True)
class RunData:
    """A run's samples and their order."""

    training: MapData | StreamingDataset
    validation: dict[str, MapData]
    """By name."""
    order: Order
    slots: Slots
    """This rank's micro-batches."""
    steps: int
    batch: schema.Batch
    fingerprint: dict[str, Any]
    """What a checkpoint keeps of the training data, to notice a change."""

    def starting(
        self, position: Position, ranks: DataParallel
    ) -> tuple[MapData | StreamingDataset, Slots]:
        """The data and this rank's micro-batches from a position of the run on."""
        skipped = position.skipped_batches
        slots = make_slots(
            self.batch,
            order=self.order,
            lengths=self.training.lengths,
            steps=self.steps + skipped,
            ranks=ranks,
            first_step=position.step + skipped,
        )
        if isinstance(self.training, StreamingDataset):
            assert isinstance(slots, RankSlots)
            return self.training.starting(slots, position.stream), slots
        return self.training, slots

    @property
    def samples(self) -> int | None:
        """Samples of the whole run; None if only its steps are limited."""
        order = self.order
        return order.epochs * order.samples if order.epochs is not None else None

    @property
    def stream_order(self) -> str | None:
        """Digest of the order of a stream's samples; None without data.streaming."""
        return self.training.order if isinstance(self.training, StreamingDataset) else None

    def stream_state(
        self, batch: GlobalBatch, skipped_batches: int, ranks: DataParallel
    ) -> dict[str, Any] | None:
        """Where the stream stands after a batch, for a checkpoint; None without data.streaming. Every rank must call it."""
        if not isinstance(self.training, StreamingDataset):
            return None
        samples = (batch.step + skipped_batches) * self.batch.global_batch_size
        return self.training.state(batch.stream_places, samples=samples, ranks=ranks)


def open_run_data(
    recipe: schema.Recipe,
    *,
    vocabulary: int | None,
    classes: int | None,
    padding: int,
    isolation: Isolation,
    ranks: DataParallel,
    build: bool,
    skipped_rows: Path | None,
) -> RunData:
    """Opens the data that the recipe names.

    vocabulary, classes, padding: the model's number of token ids, number of classes and padding id. isolation: how it
    keeps packed documents apart. build: whether this process tokenizes what is not cached (one process of a node).
    skipped_rows: file for the rows of a stream that cannot be used.
    """
    data, batch, run = recipe.data, recipe.batch, recipe.run
    seed, max_steps, epochs = run.seed, run.max_steps, run.epochs
    tokenizer = data.tokenizer if data.tokenizer is not None else recipe.model.path
    training: MapData
    if data.builder is not None:
        custom = build_custom_data(data.builder, data.arguments)
        sets = (
            custom.validation
            if isinstance(custom.validation, dict)
            else {"validation": custom.validation}
        )
        training = CustomDataset(custom.train, custom, data.builder)
        validation: dict[str, MapData] = {
            name: CustomDataset(samples, custom, data.builder)
            for name, samples in sets.items()
            if samples is not None
        }
    else:
        open_one = partial(
            open_dataset,
            data,
            tokenizer=tokenizer,
            vocabulary=vocabulary,
            classes=classes,
            padding=padding,
            isolation=isolation,
            build=build,
        )
        sources = (
            data.validation
            if isinstance(data.validation, dict)
            else {"validation": data.validation}
        )
        validation = {
            name: open_one(files, validation=True)
            for name, files in sources.items()
            if files is not None
        }
        if data.streaming:
            assert isinstance(data.train, tuple)
            assert max_steps is not None
            slots = make_slots(
                batch, order=StreamOrder(), lengths=None, steps=max_steps, ranks=ranks
            )
            assert isinstance(slots, RankSlots)
            parts, encoder = (
                find_parts(data.train, kind=data.kind),
                make_encoder(data.kind, data, tokenizer=tokenizer),
            )
            fingerprint = {
                "files": {part.name: part.size for part in parts},
                **encoder.fingerprint(),
            }
            stream = StreamingDataset(
                parts,
                encoder,
                slots=slots,
                seed=seed,
                shuffle=data.shuffle,
                shuffle_buffer=data.shuffle_buffer,
                length=data.sequence_length,
                packing=data.packing,
                isolation=isolation,
                vocabulary=vocabulary,
                skip_bad_rows=data.on_error == "skip",
                skipped_rows=skipped_rows,
            )
            return RunData(stream, validation, slots.order, slots, max_steps, batch, fingerprint)
        assert data.train is not None
        training = open_one(data.train)
    order = make_order(training, seed=seed, shuffle=data.shuffle, epochs=epochs)
    steps = total_steps(
        max_steps=max_steps,
        epochs=epochs,
        samples=order.samples,
        global_batch_size=batch.global_batch_size,
    )
    slots = make_slots(batch, order=order, lengths=training.lengths, steps=steps, ranks=ranks)
    return RunData(training, validation, order, slots, steps, batch, training.fingerprint)


def tokenizer_to_keep(data: schema.Data, *, model_path: str | None) -> Any:
    """The tokenizer (of transformers) that an exported model is to have: that of the data, with its chat template, or the
    model's own; None where there is none."""
    name = data.tokenizer if data.tokenizer is not None else model_path
    if name is None:
        return None
    try:
        tokenizer = hugging_face_tokenizer(name)
    except RecipeError:
        if data.tokenizer is not None:
            raise
        return None  # data of ids, and a model without a tokenizer
    if data.chat_template is not None:
        tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
    return tokenizer
