"""Chooses the sizes of a run that are `auto`, from the rows of its data.

docs/engineering/experiments.md has the experiments behind the numbers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from launcher.data.attachment_inputs import attachments_of
from launcher.data.encoder import make_encoder
from launcher.data.packing import text_lengths
from launcher.data.token_files import make_reading
from launcher.data.token_store import (
    ModelTraits,
    TokenStore,
    open_store,
    store_rows,
    untokenized_bytes,
)
from launcher.data.tokenizer import tokenizer_name
from launcher.distributed.rank_layout import layout_sizes
from launcher.errors import RecipeError, first_line
from launcher.models.build import make_config
from launcher.planner.facts import Facts, Rows
from launcher.planner.speed import time_text
from launcher.recipe import schema
from launcher.recipe.derived import Choices, Derived, open_sizes, stands_for, with_value
from launcher.recipe.model_config import of_text
from launcher.recipe.schema import Recipe
from launcher.recipe.section import AutoInt
from launcher.recipe.yaml_text import as_override
from launcher.sources.finding import find_parts
from launcher.sources.hub import config_file
from launcher.sources.layouts import KINDS

logger = logging.getLogger(__name__)

FEWEST_TO_SPLIT = 20
"""No row is held out if there are fewer rows."""
LARGEST_HELD_OUT_SHARE = 0.1
"""The largest share of the rows that is held out."""
HELD_OUT_SHARE = 0.02
"""The share of the rows that is held out if that is between the two numbers below."""
FEWEST_HELD_OUT = 50
MOST_HELD_OUT = 2000
FEWEST_ROWS_OF_STEP = 4
MOST_ROWS_OF_STEP = 64
TOKENS_PER_STEP = 65_536
"""The most tokens of a step."""
EPOCHS = ((200, 5), (2_000, 3), (20_000, 2))
"""Passes over fewer training rows than so many; one over more."""
WARMUP_SHARE = 0.05
"""Share of a run's steps in which the learning rate rises."""
MOST_WARMUP_STEPS = 100
LONGEST = 4096
"""The most tokens of a sequence."""
TEXT_ROW = 256
"""Tokens of continuous text that count as a row."""
WIDTH_AND_RATE = 4096 * 1.0e-5
"""Width of a model x learning rate of all its weights: 1e-5 for the 4,096 of an 8B model, which is
usual. The best rate falls with the width (Yang et al., 2022, Tensor Programs V)."""
ADAPTER_RATE = 20
"""The learning rate of adapters / that of all weights: 2e-4 for 7B and 13B models, and 1e-4 for larger
ones (Dettmers et al., 2023, QLoRA)."""
RATES = {"full": (5.0e-6, 1.0e-4), "adapters": (1.0e-4, 5.0e-4)}
"""The smallest and the largest of these rates."""
WHOLE_ANSWERS = 0.1
"""Learning rate of objectives that compare whole answers / that of objectives that learn tokens."""
COUNTED_BYTES = 64 << 20
"""A command that does not train looks at the first rows of larger files only."""
LOOKED_AT = 2000
"""These first rows."""


def why_not_counted(recipe: Recipe) -> str | None:
    """Why the rows cannot be counted before training; None: they can."""
    if recipe.data.builder is not None:
        return "data.builder makes the rows"
    return "the data is streamed" if recipe.data.streaming else None


def traits_from_recipe(recipe: Recipe) -> ModelTraits:
    """The model's vocabulary, number of classes and processor of attachments, as far as the recipe sets
    them."""
    vocabulary: Any = of_text(recipe.model.config or {})[1].get("vocab_size")
    return ModelTraits(
        vocabulary=vocabulary,
        classes=recipe.model.num_labels,
        attachments=attachments_of(recipe.attachments, recipe.model),
    )


def open_stores(recipe: Recipe, *, build: bool) -> Iterator[tuple[schema.Data, TokenStore]]:
    """Each source of the training data, tokenized into the cache. build: see `open_store`. Raises
    RecipeError if a row cannot be used."""
    for data in recipe.data.sources().values():
        assert isinstance(data.train, tuple)
        yield (
            data,
            open_store(
                data.train,
                data,
                tokenizer=tokenizer_name(recipe.data, recipe.model),
                model=traits_from_recipe(recipe),
                build=build,
            ),
        )


def untokenized(recipe: Recipe) -> int:
    """Bytes, about, of training files that are not tokenized yet, and that are not streamed. Raises
    RecipeError as `open_stores`."""
    if recipe.data.streaming or recipe.data.builder is not None:
        return 0
    tokenizer, model = tokenizer_name(recipe.data, recipe.model), traits_from_recipe(recipe)
    return sum(
        untokenized_bytes(data.train, data, tokenizer=tokenizer, model=model)
        for data in recipe.data.sources().values()
        if isinstance(data.train, tuple)
    )


def count_rows(recipe: Recipe, *, build: bool = True) -> Rows:
    """Counts the rows of the training data. build, raises: see `open_stores`."""
    stores = [*open_stores(recipe, build=build)]
    lengths = np.concatenate([text_lengths(store, data.batch_unit) for data, store in stores])
    hashes = [store.hashes for _, store in stores if store.hashes is not None]
    known = len(hashes) == len(stores) and len(lengths) > 1
    return Rows(lengths, np.concatenate(hashes) if known else None)


def rows_here(recipe: Recipe) -> Rows | str:
    """The rows of the training data, for a command that does not train: of large files estimated
    from the first rows. Or why they are not known."""
    if (why := why_not_counted(recipe)) is not None:
        return why
    before = logging.root.manager.disable
    logging.disable(logging.INFO)  # the command's output may be JSON
    try:
        found = [
            (
                data,
                find_parts(
                    data.train, kind=data.kind, max_document=data.max_document_bytes, notes=[]
                ),
            )
            for data in recipe.data.sources().values()
            if isinstance(data.train, tuple)
        ]
        size = sum(part.size for _, parts in found for part in parts)
        if size <= COUNTED_BYTES:
            return count_rows(recipe)
        lengths, read = [], 0
        for data, parts in found:
            traits, tokenizer = (
                traits_from_recipe(recipe),
                tokenizer_name(recipe.data, recipe.model),
            )
            reading = make_reading(
                parts, data, tokenizer=tokenizer, vocabulary=traits.vocabulary, columns=[]
            )
            if reading is not None:
                _, bounds = reading.file(parts[0].name)
                read += parts[0].size
                lengths.append(np.diff(bounds))
                continue
            encoder = make_encoder(
                data.kind,
                data,
                tokenizer=tokenizer,
                modalities=traits.attachments.modalities,
            )
            rows = list(itertools.islice(encoder.encode_rows(encoder.read(parts)), LOOKED_AT))
            read += sum(encoded.row.size for encoded in rows)
            lengths.append(text_lengths(store_rows(rows), data.batch_unit))
        return Rows(np.concatenate(lengths), scale=max(1.0, size / max(1, read)))
    except (RecipeError, OSError) as error:
        return f"the data or its tokenizer is not here, or cannot be read ({first_line(error)})"
    finally:
        logging.disable(before)


def choose_sizes(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices]:
    """Replaces each size that is `auto`: if the rows are not known, by what `auto` stands for. Raises
    RecipeError if there are fewer rows than ranks."""
    assert facts.rows is not None
    choices = {}
    for key, value, why in _choices(recipe, facts.rows, ranks=facts.ranks):
        choices[key] = Derived(value, why)
        if key == "checkpoint.every_steps":  # `choose_saves` may shorten it
            value = AutoInt(value)
        recipe = with_value(recipe, key, value)
    if "data.packing" in open_sizes(recipe):  # rows are packed, as usual
        recipe = with_value(recipe, "data.packing", True)
    return recipe, choices


def sizes_text(rows: Rows | str | None, chosen: Iterable[Choices]) -> str:
    """The choices in lines below each other. rows: None: no choice depends on them."""
    choices = {key: choice for choices in chosen for key, choice in choices.items()}
    heading = f": for {rows.text()}" if isinstance(rows, Rows) else f": the usual sizes: {rows}"
    if rows is None:
        heading = " stands for"
    overrides = {as_override(key, choice.value): choice.reason for key, choice in choices.items()}
    width = max(map(len, overrides))
    lines = (f"\n      {override:<{width}}  {why}".rstrip() for override, why in overrides.items())
    return f"auto{heading}{''.join(lines)}"


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    rows: int
    """Rows that are trained in a pass over the data."""
    samples: int
    """What a batch counts, in a pass: packed sequences, rows, or pairs."""
    unit: str
    steps: int
    passes: float
    tokens: float
    """Tokens of a step."""

    def text(self, seconds: float | None = None, *, device: str = "cuda") -> str:
        """In a line. seconds: of a step on the device, by plan."""
        passes = "1 pass" if self.passes == 1 else f"{self.passes:.3g} passes"
        packed = "" if self.samples == self.rows else f" in {self.samples:,} {self.unit}"
        text = f"{self.rows:,} rows{packed}: {self.steps:,} steps are {passes} over the data"
        if seconds is None:
            return text
        return f"{text}, {time_text(self.steps * seconds, device)}"


def why_no_row_fits(recipe: Recipe, rows: Rows) -> str | None:
    """Why training has no row: all are longer than a sequence, and dropped; None: some are not."""
    data = recipe.data
    if not data.drops_overlong or (rows.lengths <= data.sequence_length).any():
        return None
    what = f"data: no row fits into {data.sequence_length:,} tokens (data.sequence_length); the "
    return f"{what}shortest has {rows.lengths.min():,}; raise it, or cut such rows (data.overlong)"


def check_repeats(recipe: Recipe, samples: int) -> None:
    """Raises RecipeError if a step sees a row twice, and the recipe does not allow it. samples: of
    the data; 0: not known."""
    data, size = recipe.data, recipe.batch.global_batch_size
    if not 0 < samples < size or data.repeat_in_step:
        return
    unit = _unit(recipe)
    text = (
        f"batch.global_batch_size: {size:,} {unit} are more than the {samples:,} of the data, so each "
        f"step would see a row {size / samples:,.1f} times; batch.global_batch_size="
        f"{max(1, samples // 8)} makes {math.ceil(samples / max(1, samples // 8))} steps of an epoch"
    )
    if data.packing and not data.joins_rows:
        text += ", data.packing=false trains each row by itself"
    raise RecipeError(f"{text}, and data.repeat_in_step=true allows it")


def run_length(recipe: Recipe, rows: Rows) -> Length:
    """The length of a run whose sizes are chosen. The number of packed sequences is an estimate."""
    data, length, batch = recipe.data, recipe.data.sequence_length, recipe.batch.global_batch_size
    counted = rows.lengths[rows.lengths <= length] if data.drops_overlong else rows.lengths
    split = 0.0 if data.validation is not None else data.validation_split or 0.0
    kept = rows.trained(split, length if data.drops_overlong else None)
    mean = float(counted.mean()) if len(counted) else float(length)
    samples, tokens = kept, min(mean, length) if not data.packing else mean
    if data.packing and data.batch_unit == "sequences":
        samples = _sequences(kept * mean, length)
        tokens = kept * mean / samples
    steps = recipe.run.max_steps or math.ceil((recipe.run.epochs or 1) * samples / batch)
    passes = steps * batch / samples if recipe.run.max_steps else float(recipe.run.epochs or 1)
    return Length(kept, samples, _unit(recipe), steps, passes, tokens * min(batch, samples))


def _sequences(tokens: float, length: int) -> int:
    """Packed sequences of some tokens: a few hundredths of them stay empty."""
    return max(1, math.ceil(tokens / (0.97 * length)))


def _choices(recipe: Recipe, rows: Rows | str, *, ranks: int) -> Iterator[tuple[str, Any, str]]:
    """Key, value and reason of each choice."""
    auto = set(open_sizes(recipe))
    groups = layout_sizes(recipe.strategy, ranks=ranks).data_parallel_size
    if isinstance(rows, str):
        for key in open_sizes(recipe):
            if key != "data.packing":
                value: Any = stands_for(recipe, key)
                if key == "data.sequence_length":
                    value = min(value, _positions(recipe) or value)
                elif key == "batch.global_batch_size":
                    value = -(-value // groups) * groups
                yield key, value, ""
        return
    data = recipe.data
    most = int(data.sequence_length)
    if "data.sequence_length" in auto:
        most = min(LONGEST, _positions(recipe) or LONGEST)
    cuts = not data.drops_overlong
    lengths = rows.lengths if cuts else rows.lengths[rows.lengths <= most]
    if not len(lengths):
        raise RecipeError(
            f"data.sequence_length: all {len(rows.lengths):,} rows are longer than {most:,} tokens, "
            f"the shortest has {int(rows.lengths.min()):,}; give a larger data.sequence_length"
        )
    tokens, count = float(lengths.sum()) * rows.scale, round(len(lengths) * rows.scale)
    if data.kind == "text":
        count = max(count, int(tokens / TEXT_ROW))
    share = data.validation_split or 0.0
    if "data.validation_split" in auto:
        share, why = 0.0, "rows are given for it"
        if data.validation is None:
            share, why = _held_out(count)
        yield "data.validation_split", share or None, why
    train = max(1, round(count * (1 - share)))
    if data.kind != "text":
        train = rows.trained(share, None if cuts else most)
    mean = tokens / count
    wanted = 2 ** round(math.log2(math.sqrt(train) / 2))
    wanted = min(max(wanted, FEWEST_ROWS_OF_STEP), MOST_ROWS_OF_STEP)
    wanted = max(groups, min(wanted, round(TOKENS_PER_STEP / mean)))
    length, packed = most, data.packing and data.batch_unit == "sequences"
    longest = int(lengths.max()) if not cuts else min(most, int(lengths.max()))
    if "data.sequence_length" in auto:
        length, why = _length(longest, most, wanted * mean / groups if packed else 0)
        if (dropped := len(rows.lengths) - len(lengths)) and rows.scale == 1:
            why = f"the longest row of up to {most:,} tokens has {longest:,}; longer rows are dropped: {dropped:,}"
        if data.kind == "text":
            length = min(most, max(TEXT_ROW, 2 ** int(math.log2(max(1, wanted * mean / groups)))))
            why = "so that a step has a sequence for each rank"
        length = max(2, length - length % recipe.strategy.context_parallel_size)
        yield "data.sequence_length", length, why
    if packed and "data.packing" in auto and data.kind != "text":
        what = None
        if wanted * mean < 2 * length * groups:
            step = round(wanted * mean)
            what = f"packed sequences would be longer than a step of {step:,} tokens"
        elif length < 2 * mean:
            what = "a sequence has room for one row"
        if what is not None:
            packed = False
            yield "data.packing", False, what
    batch, samples = recipe.batch.global_batch_size, train
    if packed:
        samples = _sequences(train * mean, length)
    if "batch.global_batch_size" in auto:
        batch, why = _batch(
            wanted,
            samples,
            train,
            groups,
            unit=_unit(replace(recipe, data=replace(data, packing=packed))),
        )
        yield "batch.global_batch_size", batch, why
    epochs = recipe.run.epochs
    if "run.epochs" in auto:
        epochs = next((passes for below, passes in EPOCHS if train < below), 1)
        yield (
            "run.epochs",
            epochs,
            f"for {train:,} {'sequences' if data.kind == 'text' else 'rows'}",
        )
    steps = max(1, math.ceil(samples / batch))
    whole = recipe.run.max_steps or steps * (epochs or 1)
    if "schedule.warmup_steps" in auto:
        warmup = min(MOST_WARMUP_STEPS, math.ceil(WARMUP_SHARE * whole))
        yield "schedule.warmup_steps", warmup, f"{WARMUP_SHARE:.0%} of about {whole:,} steps"
    for section, limit in (("evaluation", 100), ("checkpoint", 200)):
        if f"{section}.every_steps" in auto:
            every = min(limit, steps)
            why = "once an epoch" if every == steps else f"an epoch has about {steps:,} steps"
            yield f"{section}.every_steps", every, why


def _unit(recipe: Recipe) -> str:
    """What a batch counts, for users."""
    unit = recipe.data.batch_unit
    return "rows" if unit == "sequences" and not recipe.data.packing else unit


def _held_out(rows: int) -> tuple[float, str]:
    """The share of rows that is held out, and why."""
    if rows < FEWEST_TO_SPLIT:
        what = "1 row is" if rows == 1 else f"{rows} rows are"
        return 0.0, f"{what} too few to hold some out; give data.validation for a score"
    held = max(FEWEST_HELD_OUT, min(HELD_OUT_SHARE * rows, MOST_HELD_OUT))
    held = min(held, LARGEST_HELD_OUT_SHARE * rows)
    share = round(held / rows, 4)
    return share, f"about {share:.0%} of {rows:,} rows, for evaluation"


def _length(longest: int, most: int, tokens: float) -> tuple[int, str]:
    """Tokens of a sequence, for rows of up to `longest`, and why."""
    multiple = 64 if longest > 64 else 16
    length = min(most, -(-longest // multiple) * multiple)
    if tokens > 2 * length:  # longer sequences waste less at their ends
        length = min(most, max(length, 2 ** int(math.log2(tokens / 2))))
    return length, f"the longest row has {longest:,} tokens"


def _batch(wanted: int, samples: int, train: int, groups: int, *, unit: str) -> tuple[int, str]:
    """Samples of a step, and why: about `wanted` of the `train` rows, which are `samples` of the
    unit."""
    if samples < groups:
        raise RecipeError(
            f"batch.global_batch_size: {samples:,} of the {unit} are trained, by {groups} "
            "data-parallel ranks, so a step would see one twice; use fewer ranks"
        )
    size = max(1, round(wanted * samples / train))
    size = min(max(1, round(size / groups)) * groups, samples // groups * groups)
    steps = math.ceil(samples / size)
    each = "" if unit != "sequences" else f", about {round(size * train / samples)} rows"
    return size, f"{samples:,} {unit}, so an epoch has about {steps:,} steps{each}"


def choose_rate(recipe: Recipe, facts: Facts) -> tuple[Recipe, Choices]:
    """Replaces `optimizer.learning_rate: auto`, by the width of the model."""
    rate, why = _learning_rate(recipe)
    key = "optimizer.learning_rate"
    return with_value(recipe, key, rate), {key: Derived(rate, why)}


def _learning_rate(recipe: Recipe) -> tuple[float, str]:
    """The peak learning rate, and why."""
    adapters = recipe.lora is not None
    what = "adapters" if adapters else "full"
    whole = KINDS[recipe.data.kind].learned == "whole answers" and recipe.data.builder is None
    scale = (ADAPTER_RATE if adapters else 1.0) * (WHOLE_ANSWERS if whole else 1.0)
    width = _config_value(recipe, "hidden_size")
    smallest, largest = (limit * (WHOLE_ANSWERS if whole else 1.0) for limit in RATES[what])
    trained = "adapters" if adapters else "all weights"
    if not isinstance(width, int) or width < 1:
        return 1.0e-5 * scale, f"for {trained}; the width of the model is not known"
    rate = min(max(scale * WIDTH_AND_RATE / width, smallest), largest)
    return float(f"{rate:.1e}"), f"for {trained} of a model of width {width:,}"


def _positions(recipe: Recipe) -> int | None:
    """The most tokens of a sequence by the model's config."""
    positions = _config_value(recipe, "max_position_embeddings")
    return positions if isinstance(positions, int) and positions > 1 else None


def _config_value(recipe: Recipe, name: str) -> Any:
    """A value of the model's config for text; None where it is not known."""
    config: dict[str, Any] = {}
    if recipe.model.path is not None:
        with contextlib.suppress(RecipeError, OSError, ValueError):
            file = config_file(recipe.model.path, fetch=True)
            if file is not None:
                config = json.loads(file.read_text(encoding="utf-8"))
    whole = replace(recipe.model, path=None, config=config | (recipe.model.config or {}))
    with contextlib.suppress(Exception):  # what is wrong with it is reported when it is built
        return getattr(make_config(whole, None).get_text_config(decoder=True), name, None)
    return None
