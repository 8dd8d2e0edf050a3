"""The data of a run: training and validation data, the order of samples, the number of steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from launcher.data.batching import (
    BatchSampler,
    Order,
    Position,
    RankBatchSampler,
    StreamOrder,
    total_steps,
)
from launcher.data.custom import CustomDataset, build_custom_data
from launcher.data.dataset import Collated, MapData, make_order, open_dataset
from launcher.data.encoder import make_encoder
from launcher.data.loader import (
    GlobalBatch,
    Mover,
    StepStatistics,
    TrainingData,
    make_batch_sampler,
    make_loader,
)
from launcher.data.sources import find_parts
from launcher.data.streaming import StreamingDataset
from launcher.data.token_store import ModelInputs
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.distributed.process_group import DataParallel
from launcher.errors import RecipeError
from launcher.recipe import schema


@dataclass(frozen=True)
class RunData:
    """A run's samples and their order."""

    training: TrainingData
    validation: dict[str, MapData]
    """By name."""
    order: Order
    sampler: BatchSampler
    """This rank's micro-batches."""
    steps: int
    data: schema.Data
    batch: schema.Batch
    fingerprint: dict[str, Any]
    """For checkpoints, to detect changed training data."""

    def batches(
        self,
        position: Position,
        *,
        ranks: DataParallel,
        stop_requested: Callable[[], bool],
        save_requested: Callable[[], bool],
    ) -> Iterator[GlobalBatch]:
        """This rank's part of the global batches, from a position of the run on.

        Copies to the device and statistics start without waiting.
        """
        skipped = position.skipped_batches
        sampler = make_batch_sampler(
            self.batch,
            order=self.order,
            lengths=self.training.lengths,
            steps=self.steps + skipped,
            ranks=ranks,
            first_step=position.step + skipped,
        )
        dataset = self.training
        if isinstance(dataset, StreamingDataset):
            assert isinstance(sampler, RankBatchSampler)
            dataset = dataset.starting(sampler, position.stream)
        loader = make_loader(
            dataset, sampler, self.data, persistent_workers=False, device=ranks.device
        )
        mover, loaded = Mover(ranks.device), iter(loader)
        for step in range(position.step, self.steps):
            started = time.perf_counter()
            count = sampler.micro_batches(step + skipped)
            collated = [raise_error(next(loaded)) for _ in range(count)]
            waited = time.perf_counter() - started
            seen = (step + 1) * self.batch.global_batch_size
            tokens = [sum(one[name] for one in collated) for name in ("loss_tokens", "tokens")]
            values = [*tokens, int(stop_requested()), int(save_requested())]
            yield GlobalBatch(
                step=step + 1,
                micro_batches=[mover.move(one["tensors"]) for one in collated],
                statistics=StepStatistics(values, ranks, mover.stream),
                samples_seen=seen if self.samples is None else min(seen, self.samples),
                seconds_waited=waited,
                stream_positions=dict(
                    item for one in collated for item in one.get("positions", {}).items()
                ),
            )

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
        """The stream's position after a batch, for a checkpoint; None without data.streaming.

        Every rank must call it.
        """
        if not isinstance(self.training, StreamingDataset):
            return None
        samples = (batch.step + skipped_batches) * self.batch.global_batch_size
        return self.training.state(batch.stream_positions, samples=samples, ranks=ranks)


def raise_error(collated: Collated) -> Collated:
    """The micro-batch. Raises RecipeError if a stream yields a problem instead."""
    if "error" in collated:
        raise RecipeError(collated["error"])
    return collated


def open_run_data(
    recipe: schema.Recipe,
    *,
    model: ModelInputs,
    ranks: DataParallel,
    build: bool,
    skipped_rows: Path | None,
) -> RunData:
    """Opens the data of the recipe.

    build: tokenize what is not cached (one process per node).
    skipped_rows: file that lists the rows of a stream that cannot be used.
    """
    data, batch, run = recipe.data, recipe.batch, recipe.run
    if data.builder is not None:
        custom = build_custom_data(data.builder, data.arguments)
        sets = custom.validation
        if not isinstance(sets, dict):
            sets = {"validation": sets}
        training: MapData = CustomDataset(custom.train, custom, data.builder)
        validation: dict[str, MapData] = {
            name: CustomDataset(samples, custom, data.builder)
            for name, samples in sets.items()
            if samples is not None
        }
    else:
        tokenizer = data.tokenizer if data.tokenizer is not None else recipe.model.path
        open_one = partial(open_dataset, data, tokenizer=tokenizer, model=model, build=build)
        sources = data.validation if data.validation is not None else {}
        if not isinstance(sources, dict):
            sources = {"validation": sources}
        validation = {name: open_one(files, validation=True) for name, files in sources.items()}
        if data.streaming:
            return _open_stream(recipe, tokenizer, model, validation, ranks, skipped_rows)
        assert data.train is not None
        training = open_one(data.train)
    order = make_order(training, seed=run.seed, shuffle=data.shuffle, epochs=run.epochs)
    steps = total_steps(
        max_steps=run.max_steps,
        epochs=run.epochs,
        samples=order.samples,
        global_batch_size=batch.global_batch_size,
    )
    sampler = make_batch_sampler(
        batch, order=order, lengths=training.lengths, steps=steps, ranks=ranks
    )
    return RunData(training, validation, order, sampler, steps, data, batch, training.fingerprint)


def _open_stream(
    recipe: schema.Recipe,
    tokenizer: str | None,
    model: ModelInputs,
    validation: dict[str, MapData],
    ranks: DataParallel,
    skipped_rows: Path | None,
) -> RunData:
    data, batch, steps = recipe.data, recipe.batch, recipe.run.max_steps
    assert isinstance(data.train, tuple)
    assert steps is not None
    sampler = make_batch_sampler(batch, order=StreamOrder(), lengths=None, steps=steps, ranks=ranks)
    parts = find_parts(data.train, kind=data.kind)
    encoder = make_encoder(data.kind, data, tokenizer=tokenizer)
    fingerprint = {"files": {part.name: part.size for part in parts}, **encoder.fingerprint()}
    assert isinstance(sampler, RankBatchSampler)
    stream = StreamingDataset(
        parts,
        encoder,
        sampler=sampler,
        data=data,
        seed=recipe.run.seed,
        model=model,
        skipped_rows=skipped_rows,
    )
    return RunData(stream, validation, StreamOrder(), sampler, steps, data, batch, fingerprint)


def tokenizer_to_keep(data: schema.Data, *, model_path: str | None) -> Any:
    """The transformers tokenizer for an exported model: that of the data, with its chat template,
    or the model's own; None if there is none."""
    name = data.tokenizer if data.tokenizer is not None else model_path
    if name is None:
        return None
    try:
        tokenizer = hugging_face_tokenizer(name)
    except RecipeError:
        if data.tokenizer is not None:
            raise
        return None  # token rows, and a model without a tokenizer
    if data.chat_template is not None:
        tokenizer.chat_template = Path(data.chat_template).read_text(encoding="utf-8")
    return tokenizer
