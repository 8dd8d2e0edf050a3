"""The most probable tokens of teachers at each target of the training data, for distillation.

They are computed once, before the first step, by one teacher after the other, which the run's strategy
distributes. A teacher with another tokenizer reads the same rows in its own tokens.
Rank 0 writes them to the run folder, from where all ranks read what they train on. They do not
depend on the batches, so a resume, which reads them, may use another strategy, batch or number of
ranks. It computes what an interrupted start has not written.
"""

from __future__ import annotations

import functools
import gc
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.console import bytes_as_text, seconds_as_text
from launcher.data.collation import Collated, with_positions
from launcher.data.dataset import MixtureDataset, SequenceDataset
from launcher.data.loader import to_device
from launcher.data.packing import Integers, count_labels
from launcher.data.run_data import RunData
from launcher.data.store_files import map_array
from launcher.data.token_store import ModelTraits, open_store, values_of_documents
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
from launcher.objectives.teacher_rows import Alignment, TeacherRows, align
from launcher.recipe import schema
from launcher.recipe.schema import Recipe
from launcher.sources.hub import model_folder
from launcher.strategies.base import WrappedModel

if TYPE_CHECKING:
    from launcher.objectives.distillation import Distillation

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TeacherModel:
    """A teacher, on the meta device."""

    traits: ModelTraits
    """Its own: tokenizer, vocabulary, and how its rows are made."""
    load: Callable[[], WrappedModel]
    """Reads its weights. Every rank must call it."""


def with_teachers(
    data: RunData,
    settings: schema.Distillation,
    files: Mapping[str, TeacherFile],
    build: Callable[[str], TeacherModel],
    predict: Callable[..., torch.Tensor],
    *,
    model: ModelTraits,
    micro_batch_size: int,
    tokenizes: bool,
    ranks: RankLayout,
) -> RunData:
    """The data with the predictions of the teachers: from their files, or computed now, by one teacher
    after the other. Every rank must call this; rank 0 checks and writes the files.

    files, build: by the name of a teacher. predict: returns what a teacher predicts at each target of
    a micro-batch, (targets, 2 * columns): log-probabilities, and then ids; `columns` are top_k, and with
    `with_target` the target before them. model: that of the run. tokenizes: whether this process
    tokenizes what is not cached (one of a node)."""
    training: Any = data.training
    parts: dict[str, SequenceDataset] = getattr(training, "parts", {"": training})
    chosen = _teachers_of_documents(data, parts, settings, model=model, ranks=ranks)
    paths, sources = settings.paths(), data.data.sources()
    same = {name: shares_tokens(model.tokenizer, path) for name, path in paths.items()}
    # Then each row has the target, too, whose span may be several tokens
    with_target = not all(same.values())
    # Built if something is to be computed, or to be tokenized otherwise
    models = {name: functools.cache(functools.partial(build, name)) for name in paths}
    read: dict[str, dict[str, _TeacherData]] = {}
    for number, name in enumerate(paths):
        read[name] = {}
        for part_name, part in parts.items():
            documents, of_part = _trained_documents(part), chosen[part_name]
            if of_part is not None:
                documents = documents[of_part[documents] == number]
            if not same[name] and len(documents):
                read[name][part_name] = _data_in_its_tokens(
                    part,
                    sources[part_name],
                    documents,
                    teacher=settings.key_of(name),
                    path=paths[name],
                    own=model.tokenizer,
                    traits=models[name]().traits,
                    tokenizes=tokenizes,
                )
            elif of_part is None:
                read[name][part_name] = _TeacherData(part, documents)
            elif len(documents):
                of_teacher = part.objective.open(
                    part.store, sources[part_name], models[name]().traits, documents=documents
                )
                read[name][part_name] = _TeacherData(of_teacher, documents)
        if not read[name]:
            what = "no row that is trained has this teacher"
            raise RecipeError(f"{settings.key_of(name)}: {what}; leave it out")
        for each in read[name].values() if ranks.rank == 0 else ():
            _check_coverage(each, settings, teacher=settings.key_of(name))
    teachers: dict[str, list[TeacherRows | None]] = {part: [] for part in parts}
    for name in paths:
        teacher = models.pop(name)
        stored = _predicted(
            {part: each.dataset for part, each in read[name].items()},
            data.data,
            settings,
            files[name],
            teacher,
            predict,
            vocabulary=_predicted_entries(model, teacher, read[name]),
            with_target=with_target,
            micro_batch_size=micro_batch_size,
            ranks=ranks,
            title=f"teacher {name}" if name else "teacher",
        )
        for part_name, of_part_rows in teachers.items():
            if (found := read[name].get(part_name)) is None:
                of_part_rows.append(None)
                continue
            counts = targets_of_pieces(found.dataset)
            rows, stored = stored[: counts.sum()], stored[counts.sum() :]
            of_part_rows.append(
                TeacherRows.of(
                    found.dataset, counts, rows, found.alignment, with_target=with_target
                )
            )
        del teacher
        gc.collect()  # its wrapped model is in reference cycles
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    distilled: dict[str, SequenceDataset] = {}
    for name, part in parts.items():
        objective = cast("Distillation", part.objective)
        objective = replace(
            objective,
            teachers=tuple(teachers[name]),
            chosen=chosen[name],
            with_target=with_target,
        )
        unused = [column for column in part.store.unused if column != settings.teacher_column]
        store = replace(part.store, unused=unused)
        distilled[name] = replace(part, store=store, objective=objective)
    if isinstance(training, MixtureDataset):
        return replace(data, training=MixtureDataset(distilled, training.blend))
    return replace(data, training=distilled[""])


def _teachers_of_documents(
    data: RunData,
    parts: Mapping[str, SequenceDataset],
    settings: schema.Distillation,
    *,
    model: ModelTraits,
    ranks: RankLayout,
) -> dict[str, npt.NDArray[np.int16] | None]:
    """The number of the teacher of each document, for each part; None: there is one teacher."""
    names = list(settings.paths())
    if len(names) == 1 and settings.teacher is not None:
        return dict.fromkeys(parts)
    column = settings.teacher_column
    if column is None:
        return {
            name: np.full(part.store.documents, names.index(name), dtype=np.int16)
            for name, part in parts.items()
        }
    found: dict[str, npt.NDArray[np.int16] | None] = {}
    for name, part in parts.items():
        numbers = np.zeros(part.store.documents, dtype=np.int16)
        if ranks.rank == 0:
            rows = values_of_documents(
                part.store,
                data.data.sources()[name],
                column,
                tokenizer=model.tokenizer,
                modalities=model.attachments.modalities,
            )
            for document, row, value in rows:
                if value not in names:
                    got = f"got {value!r}" if column in (row.values or {}) else "no such column"
                    what = f"column {column!r} must name one of distillation.teachers"
                    raise RecipeError(f"{row.where}: {what} ({', '.join(names)}); {got}")
                numbers[document] = names.index(value)
        found[name] = from_rank_0(numbers, ranks.group)
    return found


@dataclass(frozen=True)
class _TeacherData:
    """The rows of a part of the data that one teacher reads."""

    dataset: SequenceDataset
    documents: Integers
    """Of the run's store."""
    alignment: Alignment | None = None


def _trained_documents(dataset: SequenceDataset) -> Integers:
    """The documents of a data set that have a part in a sequence."""
    starts = dataset.sequences.starts.astype(np.int64)
    return np.unique(np.searchsorted(dataset.store.offsets, starts, side="right") - 1)


def _data_in_its_tokens(
    part: SequenceDataset,
    data: schema.Data,
    documents: Integers,
    *,
    teacher: str,
    path: str,
    own: str | None,
    traits: ModelTraits,
    tokenizes: bool,
) -> _TeacherData:
    """These documents of the run as the tokenizer of the teacher and its chat template write them.
    teacher: its key in the recipe. own: the tokenizer of the run. Raises RecipeError if the tokens
    cannot be compared."""
    assert own is not None
    files = data.train
    assert isinstance(files, tuple)
    # What is too long for the teacher alone has predictions up to its end, and what it cannot read none
    data = replace(data, tokenizer=path, overlong="cut", on_error="skip")
    try:
        if hugging_face_tokenizer(path).chat_template:
            data = replace(data, chat_template=None)
        store = open_store(files, data, tokenizer=path, model=traits, build=tokenizes)
    except RecipeError as error:
        lines = [
            f"{teacher}: with its tokens and its chat template: {problem}"
            for problem in error.problems
        ]
        raise RecipeError(lines) from None
    alignment = align(part.store, store, data, own=own, other_tokenizer=path, key=teacher)
    theirs = alignment.documents[documents]
    theirs = theirs[theirs >= 0]
    if not len(theirs):
        raise RecipeError(f"{teacher}: {path} can read none of the rows of the run")
    dataset = part.objective.open(store, data, traits, documents=np.unique(theirs))
    return _TeacherData(dataset, documents, alignment)


def _check_coverage(read: _TeacherData, settings: schema.Distillation, *, teacher: str) -> None:
    """Logs how many targets a teacher with other tokens will have a prediction for. Raises RecipeError if
    there are none."""
    if (alignment := read.alignment) is None:
        return
    if skipped := alignment.other.skipped:
        first = skipped[0]
        what = f"{len(skipped):,} rows cannot be read with its chat template and have no prediction"
        logger.warning(f"{teacher}: {what}, such as {first['where']}: {first['problem']}")
    counts = targets_of_pieces(read.dataset)
    unknown = np.broadcast_to(np.zeros(1, top_k_dtype(2)), int(counts.sum()))
    rows = TeacherRows.of(read.dataset, counts, unknown, alignment, with_target=True)
    coverage = rows.coverage(read.documents)
    example = alignment.difference(read.documents)
    if not coverage.known:
        what = "none of its texts are those of the run, so that its predictions are of no use"
        raise RecipeError(f"{teacher}: {what}{example}")
    logger.info(f"{teacher}: {coverage}")
    if coverage.share < _LITTLE:
        rest = 1 - settings.weight
        what = f"the other targets have the cross-entropy alone, times {rest:g} (1 - weight)"
        logger.warning(f"{teacher}: only {coverage.share:.1%} have a prediction; {what}{example}")


_LITTLE = 0.9
"""A smaller share of targets with a prediction is a warning."""


def _predicted(
    parts: Mapping[str, SequenceDataset],
    data: schema.Data,
    settings: schema.Distillation,
    file: TeacherFile,
    teacher: Callable[[], TeacherModel],
    predict: Callable[..., torch.Tensor],
    *,
    vocabulary: int,
    with_target: bool,
    micro_batch_size: int,
    ranks: RankLayout,
    title: str,
) -> npt.NDArray[Any]:
    """What a teacher predicts at all targets of the parts, from its file, or computed now."""
    counts = np.concatenate([targets_of_sequences(part) for part in parts.values()])
    rows, columns = int(counts.sum()), settings.top_k + with_target
    about = {"teacher": file.teacher, "top_k": columns, "rows": rows}
    about |= {"temperature": settings.temperature, "vocabulary": vocabulary}
    about |= {"sequences": [_digest(part) for part in parts.values()]}
    about |= {"with_target": True} if with_target else {}
    if file.config is not None:
        about["config"] = file.config
    done = from_rank_0(file.read(about) if ranks.rank == 0 else 0, ranks.group)
    if done < rows:
        if ranks.rank == 0:
            _announce(file, columns, rows, done, title)
        wrapped, started = teacher().load(), time.monotonic()
        found = _predictions(
            next(iter(parts.values())) if len(parts) == 1 else MixtureDataset({**parts}, None),
            data,
            wrapped,
            functools.partial(
                predict, settings=settings, vocabulary=vocabulary, with_target=with_target
            ),
            columns=columns,
            first=int(np.searchsorted(np.append(0, np.cumsum(counts)), done, side="right")) - 1,
            micro_batch_size=micro_batch_size,
            ranks=ranks,
        )
        if ranks.rank == 0:
            file.write(found, rows, about, done=done)
        for _ in found:  # the other ranks; none is left on rank 0
            pass
        logger.info(f"{title}: done in {seconds_as_text(time.monotonic() - started)}")
        gather(None, ranks.group)  # the file is complete
    return map_array(file.path)


def _predicted_entries(
    model: ModelTraits, teacher: Callable[[], TeacherModel], read: Mapping[str, _TeacherData]
) -> int:
    """The entries of the teacher's vocabulary that may be predicted: those that the model has, or of
    another tokenizer the tokens that it knows."""
    alignment = next(iter(read.values())).alignment
    if alignment is None:
        return model.vocabulary or 0
    return min(teacher().traits.vocabulary or 0, len(alignment.texts[1].texts))


def targets_of_pieces(dataset: SequenceDataset) -> npt.NDArray[np.int64]:
    """The number of targets of each piece, in the order of the sequences."""
    store, sequences = dataset.store, dataset.sequences
    starts = sequences.starts.astype(np.int64)
    ends = store.offsets[np.searchsorted(store.offsets, starts, side="right")]
    last = np.minimum(starts + sequences.lengths + 1, ends)
    counts: npt.NDArray[np.int64] = last - starts - 1
    if store.labels is not None:  # in blocks: a store may be larger than the memory
        order = np.argsort(starts)
        counts[order] = count_labels(store.labels, starts[order] + 1, last[order])
    return counts


def targets_of_sequences(dataset: SequenceDataset) -> npt.NDArray[np.int64]:
    """The number of targets of each sequence."""
    counts: npt.NDArray[np.int64] = np.add.reduceat(
        targets_of_pieces(dataset), dataset.sequences.bounds[:-1]
    )
    return counts


def _digest(dataset: SequenceDataset) -> str:
    """Names the tokens, and how they are divided into sequences: a prediction depends on what its
    sequence has before it."""
    sequences = dataset.sequences
    arrays = sequences.starts, sequences.lengths, sequences.bounds
    content = str(dataset.fingerprint["content"]).encode()
    return checksum_of([content, *(np.ascontiguousarray(a, dtype=np.int64).data for a in arrays)])


def _announce(file: TeacherFile, columns: int, rows: int, done: int, title: str) -> None:
    """Logs what the pass will write. Raises TrainingError if the disk has less space."""
    folder, row = file.path.parent, top_k_dtype(columns).itemsize
    free = shutil.disk_usage(folder).free
    text = f"the predictions of {rows:,} tokens take {bytes_as_text(rows * row)} in {folder}"
    if (rows - done) * row > free:
        what = f"{text}, where {bytes_as_text(free)} are free; lower distillation.top_k"
        raise TrainingError(f"{title}: {what}, or choose another run.dir")
    logger.info(f"{title}: {text}, of {bytes_as_text(free)} free")
    if done:
        logger.info(f"{title}: those of the first {done:,} tokens are there, from an earlier start")


def _predictions(
    dataset: SequenceDataset | MixtureDataset,
    data: schema.Data,
    teacher: WrappedModel,
    predict: Callable[[nn.Module, MicroBatch], torch.Tensor],
    *,
    columns: int,
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
        rows = np.empty(len(values), dtype=top_k_dtype(columns))
        rows["log_probability"], rows["id"] = np.split(values.cpu().numpy(), 2, axis=1)
        if np.isnan(rows["log_probability"]).any():
            what = "its predictions are not finite: check its weights, or use bfloat16 instead of"
            raise TrainingError(f"distillation.teacher: {what} float16", reason="not_finite")
        yield rows


def teacher_recipe(recipe: Recipe, name: str) -> Recipe:
    """The recipe with the teacher of this name in place of the model."""
    assert recipe.distillation is not None
    model = schema.Model(
        path=recipe.distillation.paths()[name],
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
    name: str,
    *,
    planned: bool = False,
) -> _Prepared:
    """Builds the teacher of this name by calling `prepare` with `teacher_recipe`. Raises RecipeError,
    which names the teacher, if that fails, or if `own`, the model of the recipe, cannot learn from it.
    `planned`: tokenizers that cannot be loaded are not compared."""
    settings = recipe.distillation
    assert settings is not None
    key = settings.key_of(name)
    try:
        teacher = prepare(teacher_recipe(recipe, name))
    except RecipeError as error:
        lines = (line.removeprefix("model.path: ") for line in error.problems)
        raise RecipeError([f"{key}: {line}" for line in lines]) from None
    check_student(teacher.model, settings, key=key)
    sizes = (describe(each.model).vocabulary or 0 for each in (own, teacher))
    if not _check_vocabulary(recipe, name, *sizes, planned=planned):
        return teacher
    theirs, ours = (
        each.document_masking + (" and in recurrent layers" if each.recurrent else "")
        for each in (record_of(teacher.model), record_of(own.model))
    )
    if theirs != ours:
        what = f"keeps packed documents apart by {theirs}, the model by {ours}"
        raise RecipeError(f"{key}: {what}; set data.packing=false")
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


def _check_vocabulary(
    recipe: Recipe, name: str, own: int, of_teacher: int, *, planned: bool
) -> bool:
    """Whether the ids of the teacher's tokens are those of the model's. Raises RecipeError if they are
    not, and the tokens cannot be compared by their texts. The numbers of entries may differ, since some
    models have spare ones."""
    settings, tokenizer = recipe.distillation, tokenizer_name(recipe.data, recipe.model)
    assert settings is not None
    path, key = settings.paths()[name], settings.key_of(name)
    same = None if tokenizer is None else _same_tokens(tokenizer, path)
    of_ids = all(each.kind == "tokens" for each in recipe.data.sources().values())
    if tokenizer is not None and same is None and not planned and not of_ids:
        problem = _tokenizer_problem(path) or _tokenizer_problem(tokenizer)
        what = f"its tokens cannot be compared with those of the run: {problem}"
        if _has_tokenizer(path) or own != of_teacher:
            raise RecipeError(f"{key}: {what}; put the files of its tokenizer there")
        what = "there is no tokenizer, and its ids are taken for those of the run, of which there are as many"
        logger.warning(f"{key}: {path}: {what}")
    if planned and same is None and recipe.data.kind != "tokens":
        return True  # perhaps a tokenizer is not downloaded yet; training compares them
    family = "choose a teacher of the same family of models"
    if same is None:  # there is none, as for rows of ids
        if own == of_teacher:
            return True
        what = f"its vocabulary of {of_teacher:,} entries is not that of the model, {own:,}"
        raise RecipeError(f"{key}: {what}: ids must mean the same tokens; {family}")
    other = f"its tokenizer has other tokens than that of the run, {tokenizer}"
    if not same and any(each.kind == "tokens" for each in recipe.data.sources().values()):
        what = "rows of ids (data.kind: tokens) have no text that it could read"
        raise RecipeError(f"{key}: {other}: {what}; {family}")
    if not same and settings.answers != "data":
        what = "they are compared for answers in the data only"
        raise RecipeError(f"{key}: {other}: {what} (distillation.answers: data); or {family}")
    return same


def _has_tokenizer(name: str) -> bool:
    """Whether a folder or hub model has files of a tokenizer."""
    folder = model_folder(name, key="distillation.teacher", weights=False)
    return any("token" in file.name or file.name.startswith("vocab") for file in folder.iterdir())


def _tokenizer_problem(name: str) -> str:
    """Why a tokenizer cannot be loaded; empty: it can."""
    try:
        hugging_face_tokenizer(name)
    except RecipeError as error:
        return str(error).removeprefix("data.tokenizer: ")
    return ""


def shares_tokens(tokenizer: str | None, teacher: str) -> bool:
    """Whether the ids of a checked teacher mean the tokens of the run's tokenizer."""
    return tokenizer is None or _same_tokens(tokenizer, teacher) is not False


@functools.lru_cache(maxsize=32)
def _same_tokens(name: str, other: str) -> bool | None:
    """Whether two tokenizers give tokens the same ids; None if one of them cannot be loaded."""
    try:
        one, two = (hugging_face_tokenizer(each).get_vocab() for each in (name, other))
    except RecipeError:
        return None
    return bool(one == two)
