"""A teacher's most probable tokens at each target of the training data, for distillation.

They are computed once, before the first step, by the teacher, which the run's strategy distributes.
Rank 0 writes them to the run folder, from where all ranks read what they train on. They do not
depend on the batches, so a resume, which reads them, may use another strategy, batch or number of
ranks. It computes what an interrupted start has not written.
"""

from __future__ import annotations

import functools
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.console import bytes_as_text, seconds_as_text
from launcher.data.collation import Collated, with_positions
from launcher.data.dataset import MixtureDataset, SequenceDataset
from launcher.data.loader import to_device
from launcher.data.packing import count_labels
from launcher.data.run_data import RunData
from launcher.data.store_files import MappedArray
from launcher.data.tokenizer import hugging_face_tokenizer, tokenizer_name
from launcher.distributed.process_group import from_rank_0, gather
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError, TrainingError
from launcher.files import checksum_of
from launcher.models.description import describe
from launcher.models.head import computes_loss
from launcher.models.micro_batch import MicroBatch
from launcher.models.record import record_of
from launcher.objectives.kept_files import TeacherFile, top_k_dtype
from launcher.objectives.sweeps import rows_in_order
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.strategies.base import WrappedModel

if TYPE_CHECKING:
    from launcher.objectives.distillation import Distillation

logger = logging.getLogger(__name__)


def with_teacher(
    data: RunData,
    settings: schema.Distillation,
    file: TeacherFile,
    load: Callable[[], WrappedModel],
    predict: Callable[[nn.Module, MicroBatch], torch.Tensor],
    *,
    micro_batch_size: int,
    vocabulary: int,
    ranks: RankLayout,
) -> RunData:
    """The data with the predictions of a teacher: from the file, or computed now by the model that
    `load` returns. Every rank must call this; rank 0 checks and writes the file.

    predict: returns what the teacher predicts at each target of a micro-batch, (targets, 2 *
    top_k): log-probabilities, and then ids. vocabulary: entries of the vocabulary of the trained
    model."""
    training: Any = data.training
    parts: dict[str, SequenceDataset] = getattr(training, "parts", {"": training})
    first = {name: first_targets(part) for name, part in parts.items()}
    rows = sum(int(each[-1]) for each in first.values())
    about = {"teacher": file.teacher, "top_k": settings.top_k, "rows": rows}
    about |= {"temperature": settings.temperature, "vocabulary": vocabulary}
    about |= {"sequences": [_digest(part) for part in parts.values()]}
    if file.config is not None:
        about["config"] = file.config
    done = from_rank_0(file.read(about) if ranks.rank == 0 else 0, ranks.group)
    if done < rows:
        if ranks.rank == 0:
            _announce(file, settings, rows, done)
        teacher, started = load(), time.monotonic()
        offsets = np.cumsum([0, *(count for each in first.values() for count in np.diff(each))])
        found = _predictions(
            training,
            data.data,
            teacher,
            settings,
            predict,
            first=int(np.searchsorted(offsets, done, side="right")) - 1,
            micro_batch_size=micro_batch_size,
            ranks=ranks,
        )
        if ranks.rank == 0:
            file.write(found, rows, about, done=done)
        for _ in found:  # the other ranks; none is left on rank 0
            pass
        logger.info(f"teacher: done in {seconds_as_text(time.monotonic() - started)}")
        gather(None, ranks.group)  # the file is complete
    stored, begin = np.load(file.path, mmap_mode="r").view(MappedArray), 0
    distilled: dict[str, SequenceDataset] = {}
    for name, part in parts.items():
        mine = stored[begin : begin + first[name][-1]]
        objective = cast("Distillation", part.objective)
        objective = replace(objective, teacher=mine, first=first[name])
        distilled[name] = replace(part, objective=objective)
        begin += first[name][-1]
    if isinstance(training, MixtureDataset):
        return replace(data, training=MixtureDataset(distilled, training.weights))
    return replace(data, training=distilled[""])


def first_targets(dataset: SequenceDataset) -> npt.NDArray[np.int64]:
    """The number of targets before each sequence, and of all: (sequences + 1,)."""
    store, sequences = dataset.store, dataset.sequences
    starts = sequences.starts.astype(np.int64)
    ends = store.offsets[np.searchsorted(store.offsets, starts, side="right")]
    last = np.minimum(starts + sequences.lengths + 1, ends)
    counts = last - starts - 1
    if store.labels is not None:  # in blocks: a store may be larger than the memory
        order = np.argsort(starts)
        counts[order] = count_labels(store.labels, starts[order] + 1, last[order])
    return np.append(0, np.cumsum(np.add.reduceat(counts, sequences.bounds[:-1])))


def _digest(dataset: SequenceDataset) -> str:
    """Names the tokens, and how they are divided into sequences: a prediction depends on what its
    sequence has before it."""
    sequences = dataset.sequences
    arrays = sequences.starts, sequences.lengths, sequences.bounds
    content = str(dataset.fingerprint["content"]).encode()
    return checksum_of([content, *(np.ascontiguousarray(a, dtype=np.int64).data for a in arrays)])


def _announce(file: TeacherFile, settings: schema.Distillation, rows: int, done: int) -> None:
    """Logs what the pass will write. Raises TrainingError if the disk has less space."""
    folder, row = file.path.parent, top_k_dtype(settings.top_k).itemsize
    free = shutil.disk_usage(folder).free
    text = f"the predictions of {rows:,} tokens take {bytes_as_text(rows * row)} in {folder}"
    if (rows - done) * row > free:
        what = f"{text}, where {bytes_as_text(free)} are free; lower distillation.top_k"
        raise TrainingError(f"teacher: {what}, or choose another run.dir")
    logger.info(f"teacher: {text}, of {bytes_as_text(free)} free")
    if done:
        logger.info(f"teacher: those of the first {done:,} tokens are there, from an earlier start")


def _predictions(
    dataset: SequenceDataset | MixtureDataset,
    data: schema.Data,
    teacher: WrappedModel,
    settings: schema.Distillation,
    predict: Callable[[nn.Module, MicroBatch], torch.Tensor],
    *,
    first: int,
    micro_batch_size: int,
    ranks: RankLayout,
) -> Iterator[npt.NDArray[Any]]:
    """The rows of the data set from the sequence `first` on, in order, in parts, on rank 0. Every
    rank must read all."""

    def compute(micro_batch: MicroBatch, collated: Collated) -> torch.Tensor:
        # From the tensors on the CPU: a GPU would be waited for to learn the number of positions
        found = with_positions(collated).micro_batch.positions
        positions = to_device(found, ranks.device)
        return teacher.without_gradients(predict, replace(micro_batch, positions=positions))

    for values in rows_in_order(
        dataset,
        data,
        teacher,
        compute,
        first=first,
        micro_batch_size=micro_batch_size,
        ranks=ranks,
        what="teacher",
    ):
        rows = np.empty(len(values), dtype=top_k_dtype(settings.top_k))
        rows["log_probability"], rows["id"] = np.split(values.cpu().numpy(), 2, axis=1)
        if np.isnan(rows["log_probability"]).any():
            what = "its predictions are not finite: check its weights, or use bfloat16 instead of"
            raise TrainingError(f"distillation.teacher: {what} float16", reason="not_finite")
        yield rows


def teacher_recipe(recipe: Recipe) -> Recipe:
    """The recipe with its teacher in place of the model."""
    assert recipe.distillation is not None
    model = schema.Model(
        path=recipe.distillation.teacher,
        attention=recipe.model.attention,
        trust_remote_code=recipe.model.trust_remote_code,
    )
    strategy, precision = recipe.strategy, recipe.strategy.mixed_precision
    if precision is not None:  # its predictions do not depend on the products of the model
        strategy = replace(strategy, mixed_precision=replace(precision, float8=None))
    return replace(
        recipe,
        model=model,
        lora=None,
        distillation=None,
        strategy=strategy,
        activation_checkpointing=None,
    )


class Prepared(Protocol):
    """What is compared of the model and its teacher (`training/model.py`)."""

    @property
    def model(self) -> nn.Module:
        """On the meta device."""


_Prepared = TypeVar("_Prepared", bound=Prepared)


def checked_teacher(
    recipe: Recipe,
    own: Prepared,
    prepare: Callable[[Recipe], _Prepared],
    *,
    planned: bool = False,
) -> _Prepared:
    """Builds the teacher by calling `prepare` with `teacher_recipe`. Raises RecipeError, which names
    the teacher, if that fails, or if `own`, the model of the recipe, cannot learn from it. `planned`:
    tokenizers that cannot be loaded are not compared."""
    assert recipe.distillation is not None
    try:
        teacher = prepare(teacher_recipe(recipe))
    except RecipeError as error:
        lines = (line.removeprefix("model.path: ") for line in error.problems)
        raise RecipeError([f"distillation.teacher: {line}" for line in lines]) from None
    check_student(teacher.model, recipe.distillation, key="distillation.teacher")
    sizes = (describe(each.model).vocabulary or 0 for each in (own, teacher))
    _check_vocabulary(recipe, *sizes, planned=planned)
    theirs, ours = (
        each.masking + (" and in recurrent layers" if each.recurrent else "")
        for each in (record_of(teacher.model), record_of(own.model))
    )
    if theirs != ours:
        what = f"keeps packed documents apart by {theirs}, the model by {ours}"
        raise RecipeError(f"distillation.teacher: {what}; set data.packing=false")
    return teacher


def check_student(
    model: nn.Module, settings: schema.Distillation, *, key: str = "distillation"
) -> None:
    """Raises RecipeError if this model cannot be the teacher, or learn from one."""
    if not computes_loss(model):
        what = f"not available for {type(model).__name__}, which does more than a linear layer"
        raise RecipeError(f"{key}: {what} to compute its logits")
    vocabulary = describe(model).vocabulary
    if vocabulary is not None and settings.top_k > vocabulary:
        what = f"{settings.top_k:,} is more than the vocabulary of {vocabulary:,}"
        raise RecipeError(f"distillation.top_k: {what} of {type(model).__name__}")


def _check_vocabulary(recipe: Recipe, own: int, of_teacher: int, *, planned: bool) -> None:
    """Raises RecipeError if the ids of the teacher's tokens differ from those of the model's. The
    numbers of entries may differ, since some models have spare ones."""
    settings, name = recipe.distillation, tokenizer_name(recipe.data, recipe.model)
    assert settings is not None
    same = None if name is None else _same_tokens(name, settings.teacher)
    if planned and same is None and recipe.data.kind != "tokens":
        return  # perhaps a tokenizer is not downloaded yet; training compares them
    what = f"its tokenizer has other tokens than that of the run, {name}"
    if same is None:  # there is none, as for rows of ids
        same = own == of_teacher
        what = f"its vocabulary of {of_teacher:,} entries is not that of the model, {own:,}"
    if not same:
        advice = "ids must mean the same tokens; choose a teacher of the same family of models"
        raise RecipeError(f"distillation.teacher: {what}: {advice}")


@functools.lru_cache(maxsize=4)
def _same_tokens(name: str, other: str) -> bool | None:
    """Whether two tokenizers give tokens the same ids; None if one of them cannot be loaded."""
    try:
        one, two = (hugging_face_tokenizer(each).get_vocab() for each in (name, other))
    except RecipeError:
        return None
    return bool(one == two)
