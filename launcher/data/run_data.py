"""The data of a run: training and validation data, the order of samples, the number of steps."""

from __future__ import annotations

import copy
import functools
import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from launcher.data.attachment_inputs import NO_SECTIONS, Sections, attachments_of
from launcher.data.batching import (
    BatchSampler,
    MixtureOrder,
    Order,
    Position,
    make_batch_sampler,
)
from launcher.data.collation import raise_error
from launcher.data.custom import CustomDataset, build_custom_data
from launcher.data.dataset import MapData, MixtureDataset, SampleMaker, SequenceDataset
from launcher.data.encoder import PromptForm, form_of_row, prompt_format
from launcher.data.ends import own_end, stop_token_ids
from launcher.data.loader import (
    GlobalBatch,
    MicroBatches,
    StepStatistics,
    StepTotals,
    TrainingData,
    make_loader,
    to_device,
)
from launcher.data.opening import make_order, open_dataset
from launcher.data.streaming import StreamingDataset, StreamOrder
from launcher.data.template_source import read_template
from launcher.data.token_store import ModelTraits
from launcher.data.tokenizer import (
    ALPACA_TEMPLATE,
    hugging_face_tokenizer,
    load_tokenizer,
    tokenizer_name,
)
from launcher.data.tokenizer_files import KeptTokenizer
from launcher.data.tokenizer_json import read_json
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.hugging_face_files import add_ends
from launcher.models.philox import derived_seed
from launcher.recipe import schema
from launcher.reliability.json_files import Json
from launcher.sources.finding import first_row
from launcher.sources.hub import model_folder
from launcher.sources.layouts import KINDS, match_row, named_columns

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunData:
    """The data of a run, as this rank reads it."""

    training: TrainingData
    validation: Mapping[str, MapData]
    order: Order
    sampler: BatchSampler
    """This rank's micro-batches."""
    steps: int
    data: schema.Data
    seed: int
    start: Position = field(default_factory=Position)
    """Where `batches` begin."""

    def changed(self, change: Callable[[SequenceDataset], SequenceDataset]) -> RunData:
        """The data with each set of documents changed, that for training first."""

        assert not isinstance(self.training, StreamingDataset | CustomDataset)
        training = self.training.changed(change)
        validation: dict[str, MapData] = {}
        for name, evaluated in self.validation.items():
            assert not isinstance(evaluated, CustomDataset)
            validation[name] = evaluated.changed(change)
        return replace(self, training=training, validation=validation)

    @property
    def fingerprint(self) -> dict[str, Any]:
        """For checkpoints, to detect changed training data."""
        return self.training.fingerprint

    @property
    def evaluated(self) -> dict[str, Any]:
        """The fingerprint of each validation set, by name."""
        return {name: dataset.fingerprint for name, dataset in self.validation.items()}

    def starting(self, position: Position) -> RunData:
        """The same data from a position of the run on. With epochs, the number of steps follows
        from the samples that are left."""
        steps, order, sampler = self.steps, self.order, self.sampler
        if self.samples is not None:
            left = max(0, self.samples - position.samples)
            steps = position.step + -(-left // sampler.global_batch_size)
        if isinstance(order, StreamOrder):
            order = order.starting(position.stream, position.samples)
            sampler = replace(sampler, order=order)
        return replace(self, steps=steps, start=position, order=order, sampler=sampler)

    def samples_after(self, step: int) -> int:
        """Samples up to the end of a step, with those of skipped batches."""
        start, size = self.start, self.sampler.global_batch_size
        seen = start.samples + (step - start.step) * size
        return seen if self.samples is None else min(seen, self.samples)

    def due(self, step: int, section: schema.Evaluation | schema.Checkpoint) -> bool:
        """Whether what comes every so many steps or epochs is due after this step (1-based)."""
        if section.every_epochs is None:
            return section.every_steps is not None and step % section.every_steps == 0
        part = section.every_epochs * self.order.samples
        before, after = (
            math.floor(self.samples_after(each) / part + 1e-9) for each in (step - 1, step)
        )
        return after > before

    def batches(
        self,
        *,
        ranks: RankLayout,
        stop_requested: Callable[[], bool],
        save_requested: Callable[[], bool],
    ) -> Iterator[GlobalBatch]:
        """This rank's part of the global batches, from `start` on. Of a stream, shards are tokenized
        ahead meanwhile, and removed when all ranks have passed them."""
        batches = self._batches(
            ranks=ranks, stop_requested=stop_requested, save_requested=save_requested
        )
        order, stream, before = self.sampler.order, self.training, None
        if not isinstance(stream, StreamingDataset) or not isinstance(order, StreamOrder):
            yield from batches
            return
        with stream.training(order.first_turn):
            for batch in batches:
                yield replace(batch, stream=order.state(batch.samples_seen))
                if before is not None:
                    before.statistics.read()  # then all ranks have the samples of its step
                    order.release(before.samples_seen)
                before = batch

    def _batches(
        self,
        *,
        ranks: RankLayout,
        stop_requested: Callable[[], bool],
        save_requested: Callable[[], bool],
    ) -> Iterator[GlobalBatch]:
        start = self.start
        sampler = replace(
            self.sampler, first_step=start.step, first_sample=start.samples, steps=self.steps
        )
        loader = iter(
            make_loader(
                self.training,
                sampler,
                self.data,
                seed=derived_seed(self.seed, f"loader {ranks.data_parallel_rank} {start.samples}"),
                persistent_workers=False,
                device=ranks.device,
            )
        )
        for step in range(start.step, self.steps):
            started = time.perf_counter()
            count = sampler.micro_batches(step)
            collated = [raise_error(next(loader)) for _ in range(count)]
            waited = time.perf_counter() - started
            counted = collated if ranks.counts else []
            totals = StepTotals(
                loss_tokens=sum(part.loss_tokens for part in counted),
                tokens=sum(part.tokens for part in counted),
                stop_requests=int(stop_requested()),
                save_requests=int(save_requested()),
                squared_lengths=sum(part.squared_lengths for part in counted),
                tower_operations=sum(part.tower_operations for part in counted),
                loss_weight=float(sum(part.weight for part in counted)),
            )
            yield GlobalBatch(
                step=step + 1,
                micro_batches=MicroBatches(
                    [part.micro_batch for part in collated],
                    functools.partial(to_device, device=ranks.device),
                ),
                statistics=StepStatistics(totals, ranks),
                samples_seen=self.samples_after(step + 1),
                seconds_waited=waited,
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


def open_run_data(
    data: schema.Data,
    batch: schema.Batch,
    run: schema.Run,
    *,
    objective: SampleMaker,
    model: ModelTraits,
    ranks: RankLayout,
    build: bool,
    run_dir: Path | None = None,
) -> RunData:
    """Opens the data of a run on this rank. Raises RecipeError if it cannot be used.

    build: tokenize what is not cached (one process per node). run_dir: of a stream, whose shards are
    apart from those of other runs.
    """
    tokenizer = model.tokenizer or data.tokenizer
    training: TrainingData
    order: Order
    if data.builder is not None:
        training, validation = _open_custom(data, objective, seed=run.seed)
    else:
        open_files = partial(open_dataset, data, tokenizer=tokenizer, model=model, build=build)
        validation = {
            name: open_files(files, objective=objective.for_validation(), validation=True)
            for name, files in _by_name(data.validation).items()
        }
        assert data.train is not None
        evaluated = objective.for_validation()
        if data.streaming:
            training = StreamingDataset(
                data,
                objective=objective,
                tokenizer=tokenizer,
                model=model,
                seed=run.seed,
                build=build,
                run_dir=run_dir,
                lists_skipped=ranks.rank == 0,
            )
        else:
            # Evaluations draw the same random numbers whatever the seed is
            training = open_files(data.train, objective=objective.with_seed(run.seed))
        if data.validation_split is not None:
            if isinstance(training, StreamingDataset):
                held_out = training.held_out(evaluated)
            else:
                held_out = open_files(data.train, objective=evaluated, held_out=True)
            validation = {"validation": held_out}
            if isinstance(held_out, MixtureDataset):
                validation = dict(held_out.parts)
    if isinstance(training, StreamingDataset):
        order = StreamOrder(training)
    else:
        order = make_order(
            training,
            seed=run.seed,
            shuffle=data.shuffle,
            epochs=run.epochs,
            similar_lengths=data.similar_lengths,
            step_samples=batch.global_batch_size,
        )
    steps = run.max_steps or -(-(run.epochs or 0) * order.samples // batch.global_batch_size)
    _check_sources_last(order, steps * batch.global_batch_size, batch)
    sampler = make_batch_sampler(
        batch,
        order=order,
        lengths=training.lengths,
        width=training.width,
        joined=data.row_length if data.joins_rows else None,
        steps=steps,
        rank=ranks.data_parallel_rank,
        ranks=ranks.data_parallel_size,
    )
    return RunData(training, validation, order, sampler, steps, data, run.seed)


def _check_sources_last(order: Order, samples: int, batch: schema.Batch) -> None:
    """Raises RecipeError if the sources of a mixture are used up before these samples."""
    end = order.end if isinstance(order, MixtureOrder) else None
    if end is not None and end < samples:
        steps = end // batch.global_batch_size
        what = f"all sources are used up (max_epochs) after {end:,} sequences, {steps:,} steps"
        advice = f"raise max_epochs of one of them, or set run.max_steps={steps}"
        raise RecipeError(f"data.train: {what}, and the run needs {samples:,}; {advice}")


def _open_custom(
    data: schema.Data, objective: SampleMaker, *, seed: int
) -> tuple[CustomDataset, Mapping[str, MapData]]:
    assert data.builder is not None
    custom = build_custom_data(data.builder, data.arguments)
    objective = objective.for_custom(custom)
    training = CustomDataset(custom.train, custom, data.builder, objective, seed=seed)
    return training, {
        name: CustomDataset(samples, custom, data.builder, objective)
        for name, samples in _by_name(custom.validation).items()
    }


_Set = TypeVar("_Set")


def _by_name(sets: _Set | dict[str, _Set] | None) -> dict[str, _Set]:
    """Validation sets by name; a set without a name is `validation`."""
    named = sets if isinstance(sets, dict) else {"validation": sets}
    return {name: files for name, files in named.items() if files is not None}


@dataclass(frozen=True)
class TrainedPrompts:
    """How the model of a run is prompted, and where it stops. Checkpoints record it: the data and
    the file of the template may have moved when the model is exported."""

    template: str | None
    """The chat template that renders what the run trained; None: the tokenizer's own, if it has one;
    empty: there is none, because the run trained prompts as they are."""
    ends: tuple[int, ...]
    """The tokens that end answers in the training data."""

    def record(self) -> Json:
        """For a checkpoint."""
        return {"template": self.template, "ends": list(self.ends)}


def trained_prompts(
    data: schema.Data, model: schema.Model, forms: Collection[PromptForm]
) -> TrainedPrompts:
    """forms: of the prompts in the training data."""
    name = tokenizer_name(data, model)
    if name is None:
        return TrainedPrompts(None, ())
    return TrainedPrompts(_template(data, name, forms), (*stop_token_ids(data, tokenizer=name),))


def recorded_prompts(record: Json | None, data: schema.Data, model: schema.Model) -> TrainedPrompts:
    """What a checkpoint recorded. record: None: an earlier version wrote none, and the first rows of
    the training data decide. Raises RecipeError if these are not there any more."""
    if record is not None:
        return TrainedPrompts(record["template"], (*record["ends"],))
    forms = () if _template_without_rows(data) else map(_form_of_files, _with_prompts(data))
    return trained_prompts(data, model, set(forms))


def set_stop_tokens(model: nn.Module, ends: Sequence[int], tokenizer: str | None) -> None:
    """Adds the tokens that end answers in the training data to the model's generation config."""
    if tokenizer is not None and ends:
        add_ends(model, ends, hugging_face_tokenizer(tokenizer).convert_ids_to_tokens)


def tokenizer_to_keep(
    data: schema.Data,
    model: schema.Model,
    attachments: Sections = NO_SECTIONS,
    prompts: TrainedPrompts | None = None,
) -> KeptTokenizer | None:
    """The tokenizer of an exported model: that of the data, with the chat template and the end of
    answers that the run trained, or the model's own; None if there is none. prompts: None: the
    template is the tokenizer's own, and the ends are those of the data."""
    name = tokenizer_name(data, model)
    if name is None:
        return None
    try:
        tokenizer = hugging_face_tokenizer(name)
    except RecipeError as error:
        if data.tokenizer is not None or model.new_tokens:
            raise
        # Token rows, and a model whose folder has none, or one with code of its own
        logger.warning(f"the model is exported without its tokenizer: {error}")
        return None
    template = None if prompts is None else prompts.template
    if template is not None:
        tokenizer = copy.copy(tokenizer)
        tokenizer.chat_template = template or None
    source = None
    if str(name) != "bytes":
        source = model_folder(name, key="data.tokenizer", weights=False)
    ids = stop_token_ids(data, tokenizer=name) if prompts is None else prompts.ends
    end = own_end(ids, tokenizer=name, template=template, known=_ends_of_source(model))
    if end is not None:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.eos_token = end
        logger.info(f"tokenizer_config.json, eos_token: {end}, which training teaches")
    modalities = attachments_of(attachments, model).modalities
    right = model.task in ("embedding", "reranker")
    return KeptTokenizer(name, tokenizer, source, template, end, modalities, pads_right=right)


def _ends_of_source(section: schema.Model) -> set[int]:
    """The ids at which the model of the checkpoint stops."""
    if section.path is None:
        return set()
    try:
        folder = model_folder(section.path, key="model.path", weights=False)
    except RecipeError:  # it is gone since the run began
        return set()
    config = read_json(folder / "config.json")
    read = [read_json(folder / "generation_config.json"), config, config.get("text_config")]
    ends = [each.get("eos_token_id") for each in read if isinstance(each, dict)]
    ids = [id for end in ends for id in (end if isinstance(end, list) else [end])]
    return {id for id in ids if isinstance(id, int)}


def _with_prompts(data: schema.Data) -> list[schema.Data]:
    """The sources whose rows have a prompt and answers."""
    return [source for source in data.sources().values() if KINDS[source.kind].answers]


def _template_without_rows(data: schema.Data) -> bool:
    """Whether the recipe alone says which chat template is trained."""
    conversations = any(KINDS[source.kind].conversation for source in data.sources().values())
    return data.chat_template is not None or conversations or not _with_prompts(data)


def _template(data: schema.Data, tokenizer: str, forms: Collection[PromptForm]) -> str | None:
    """See `TrainedPrompts.template`."""
    if data.chat_template is not None:
        return read_template(data.chat_template)
    if _template_without_rows(data):
        return None
    if any(prompt_format(source, tokenizer) == "chat" for source in _with_prompts(data)):
        return None
    if "messages" in forms:
        return None
    if "instruction" in forms:
        begin = "{{- bos_token -}}\n" if load_tokenizer(tokenizer).begin else ""
        return begin + ALPACA_TEMPLATE
    return ""


def _form_of_files(data: schema.Data) -> PromptForm:
    """The form of the first row of the training data."""
    assert isinstance(data.train, tuple)
    first = first_row(data.train, hub=True)
    if first is None:
        raise RecipeError(
            f"{', '.join(data.train)}: cannot be read, and the run, of an earlier version, does not "
            "record in which form it trained prompts; put the data back to where it was"
        )
    found = match_row(first[1], named_columns(vars(data)), [data.kind], data.ignore_columns or ())
    return "text" if found is None else form_of_row(first[1], found)
