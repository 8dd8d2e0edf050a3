"""`launcher rows`: the files and lines that a step was trained on, with the loss of each row."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import chain, groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.checkpoint import files
from launcher.checkpoint.resume import counted_otherwise, data_changes
from launcher.cli.app import flag, option
from launcher.cli.tables import make_table, print_parts
from launcher.console import configure_logging
from launcher.errors import EXIT_DONE, RecipeError, first_line
from launcher.recipe.functions import TRUST_HELP, refuse_code
from launcher.recipe.load import recorded_recipe
from launcher.recipe.objectives import objective_of
from launcher.recipe.schema import Batch, Model, Recipe
from launcher.reliability.json_files import Json, read_jsonl
from launcher.reliability.run_directory import RunFolder

if TYPE_CHECKING:
    from launcher.data.origins import TrainedRow
    from launcher.data.run_data import RunData

_PREVIEW = 60
"""Characters of the text to print."""


def rows(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    step: Annotated[int, option("Optimizer step, from 1.", "N")],
    loss: Annotated[
        bool, flag("--loss", "Compute the loss of each row, and list the largest first.")
    ] = False,
    trust_run: Annotated[bool, flag("--trust-run", TRUST_HELP)] = False,
) -> int:
    """List the rows that a step was trained on: file, line, tokens and beginning of the text.

    Of a chat the text is that of the user's last turn.

    The order of samples is a function of seed and step, so nothing was logged for this. Start it
    in the folder in which the run was started.

    \b
    Example:
      launcher rows runs/qwen3_8b step=340 --loss
    """
    configure_logging(stream="stderr")
    recipe = _recipe(run, step, loss=loss)
    # The model is built and the loss computed for losses only; the data has no other code
    without = dataclasses.replace(recipe, model=Model(config={}), objective=None)
    needed = recipe if loss else without
    refuse_code(needed, run / "recipe.yaml", trust_run=trust_run)
    events, size = RunFolder(run).read_events(), recipe.batch.global_batch_size
    built = [event for event in events if event["event"] == "built"]
    if built and (why := counted_otherwise(built[-1], recipe.data)) is not None:
        raise RecipeError(f"{run} {why}")
    positions, skipped = positions_of(events, step, run=run, global_batch_size=size)

    from launcher.data.batching import MixtureOrder
    from launcher.data.origins import trained_rows
    from launcher.data.tokenizer import tokenizer_name

    tokenizer = tokenizer_name(recipe.data, recipe.model)
    with _open(run, recipe, positions.start) as opened:
        trained = trained_rows(opened, positions, tokenizer=tokenizer)
        if not trained:
            raise RecipeError(
                f"command line: step={step}: the run ends before, with its last epoch"
            )
        title = f"step {step}: {trained[-1].sequence:,} {recipe.data.batch_unit}, "
        title += f"{len(trained):,} rows"
        if 0 < (last := RunFolder(run).last_step()) < step:
            print(f"note: step {last:,} is the last one that the run has recorded")
        title += f"; {skipped:,} batches before it were skipped" if skipped else ""
        losses = None
        if loss:
            losses, weights = _losses(run, recipe, step, trained, trust_run=trust_run)
            title += f"\n{weights}"
        print(title)
        _print_rows(trained, losses, recipe)
        if isinstance(opened.order, MixtureOrder):
            print(_shares(trained, opened.order.shares_at(positions.start), recipe))
    return EXIT_DONE


def _shares(rows: list[TrainedRow], planned: list[float], recipe: Recipe) -> str:
    """How many sequences of a step each source of a mixture has."""
    of = Counter({row.sequence: row.source for row in rows}.values())
    each = zip(recipe.data.sources(), planned, strict=True)
    parts = [f"{name} {of[name] / of.total():.1%} (planned {share:.1%})" for name, share in each]
    return f"shares of the {of.total():,} {recipe.data.batch_unit}: {', '.join(parts)}"


def _recipe(run: Path, step: int, *, loss: bool = False) -> Recipe:
    """The recipe of a run. Raises RecipeError if its rows cannot be listed."""
    file = run / "recipe.yaml"
    if not file.is_file():
        raise RecipeError(f"command line: {run} is not the folder of a run: it has no recipe.yaml")
    try:
        recipe = recorded_recipe(file.read_text(encoding="utf-8"), file=file)
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{file} cannot be read: {first_line(error)}") from None
    if loss and (why := objective_of(recipe).no_row_losses) is not None:
        raise RecipeError(f"command line: --loss: not available for {why}")
    if step > (most := recipe.run.max_steps or step):
        raise RecipeError(f"command line: step={step}: the run has {most} steps (run.max_steps)")
    if recipe.checkpoint.allow_changes:
        what = "seed or data may have changed in a resume (checkpoint.allow_changes)"
        print(f"note: {what}; this is the order by the present recipe.yaml")
    return recipe


def positions_of(
    events: list[Json], step: int, *, run: Path, global_batch_size: int
) -> tuple[range, int]:
    """The positions of a step's samples in the data, and how many batches the run had skipped
    before it because it diverged on them.

    events are those of events.jsonl; global_batch_size is for events that do not have it. Raises
    RecipeError if another run trained the step.
    """
    size, skipped, end = global_batch_size, 0, sys.maxsize
    other, other_step, from_scratch = run, 0, True
    first = (0, 0, size)  # step and samples before a start, and its global batch size
    for event in events:
        if event.get("from_scratch"):
            skipped, other_step, end, from_scratch = 0, 0, sys.maxsize, True
            first = (0, 0, size)
        if event["event"] == "built" and from_scratch:
            first, from_scratch = (0, 0, event.get("global_batch_size", size)), False
        if event["event"] != "resumed":
            continue
        at, samples = event["step"], event.get("samples")
        source = Path(event.get("origin") or run / "checkpoints/own").parent.parent
        if source.resolve() != run.resolve():
            other, other_step = source, at
        if at < step:
            skipped, end = event.get("skipped_batches") or 0, sys.maxsize
            before = (at + skipped) * size if samples is None else samples
            first = (at, before, event.get("global_batch_size", size))
        elif at == step and samples is not None:  # the step may have ended a shorter run
            end = samples
    if step <= other_step:
        what = f"{run} was started from step {other_step} of another run"
        raise RecipeError(
            f"command line: step={step}: {what}; see launcher rows {other} step={step}"
        )
    begin = first[1] + (step - 1 - first[0]) * first[2]
    return range(begin, min(begin + first[2], end)), skipped


@contextlib.contextmanager
def _open(run: Path, recipe: Recipe, position: int) -> Iterator[RunData]:
    """The data of a run. Of a stream, the shards from that of a global position on are tokenized apart
    from those of the run, which may train. Raises RecipeError if the data has changed."""
    import torch

    from launcher.checkpoint.reader import read_state
    from launcher.data.attachment_inputs import attachments_of
    from launcher.data.batching import Position
    from launcher.data.run_data import open_run_data
    from launcher.data.streaming import StreamOrder
    from launcher.data.token_store import ModelTraits
    from launcher.data.tokenizer import tokenizer_name
    from launcher.distributed.environment import cache_folder
    from launcher.distributed.rank_layout import RankLayout
    from launcher.objectives.make import make_objective

    group: Any = None  # one process
    alone = RankLayout(rank=0, size=1, group=group, device=torch.device("cpu"))
    day = recipe.data.date or RunFolder(run).first_day()
    data = dataclasses.replace(recipe.data, validation=None, date=day)
    size = recipe.batch.global_batch_size
    batch = Batch(global_batch_size=size, micro_batch_size=1)  # any gives the same rows
    with contextlib.ExitStack() as stack:
        if data.streaming:
            cache = cache_folder(data.cache)
            cache.mkdir(parents=True, exist_ok=True)
            own = stack.enter_context(tempfile.TemporaryDirectory(prefix="rows-", dir=cache))
            data = dataclasses.replace(data, cache=own)
        opened = open_run_data(
            data,
            batch,
            recipe.run,
            objective=make_objective(recipe, trained=False),
            model=ModelTraits(
                tokenizer=tokenizer_name(data, recipe.model),
                attachments=attachments_of(recipe.attachments, recipe.model),
            ),
            ranks=alone,
            build=True,
        )
        order = opened.order
        stream = order if isinstance(order, StreamOrder) else None
        for checkpoint in reversed(_checkpoints(run)):
            try:
                state = read_state(checkpoint)
                changes = list(data_changes(state.get("data") or {}, opened.fingerprint))
                saved = state.get("stream") or {}
                if stream is not None and saved["order"] != stream.digest:
                    changes.append("what decides the order of samples")
                is_later = stream is not None and saved["samples"] > position
            except (ValueError, TypeError, AttributeError, KeyError) as error:  # any JSON
                if not checkpoint.is_dir():  # the run trains, and has deleted it: take another one
                    continue
                raise RecipeError(f"{checkpoint} is damaged: {first_line(error)}") from None
            if changes:
                what = "the data has changed since the run, and with it the order of samples:"
                raise RecipeError([f"{run}: {what}", *(f"  {line}" for line in changes)])
            if not is_later:  # else a stream would start after the position
                opened = opened.starting(Position(samples=position, stream=saved))
                break
        if isinstance(opened.order, StreamOrder):
            opened.order.skip_to(position)
        yield opened


def _checkpoints(run: Path) -> list[Path]:
    """The checkpoints that are valid by their markers. Raises RecipeError."""
    try:
        listed = files.list_checkpoints(run / "checkpoints")
    except OSError as error:
        raise RecipeError(f"{run / 'checkpoints'} cannot be read: {error.strerror}") from None
    return [path for path in listed if files.verify(path, deep=False) is None]


def _nearest(run: Path, step: int, held: contextlib.ExitStack) -> Path | None:
    """The newest valid checkpoint before a step, else the first one after it; None without one.
    Until `held` is closed, a run that trains does not delete it."""
    checkpoints = _checkpoints(run)
    before = [path for path in checkpoints if files.step_of(path) < step]
    for path in (*reversed(before), *checkpoints[len(before) :]):
        held.enter_context(files.reading(path))
        if files.verify(path) is None:
            return path
    return None


def _losses(
    run: Path, recipe: Recipe, step: int, rows: list[TrainedRow], *, trust_run: bool
) -> tuple[list[float], str]:
    """The loss of each row, in float32, without dropout and without the rest of its sequence; and a
    line about the weights that compute it."""
    import torch

    from launcher.checkpoint.export import open_checkpoint_weights, open_exported_weights
    from launcher.data.collation import raise_error
    from launcher.data.dataset import SequenceDataset
    from launcher.data.loader import to_device
    from launcher.errors import RowError
    from launcher.models.towers import use_towers
    from launcher.objectives.base import dataset_objective
    from launcher.objectives.make import make_objective

    gpu = torch.cuda.is_available() and recipe.run.device != "cpu"
    device = torch.device("cuda" if gpu else "cpu")
    with contextlib.ExitStack() as held:
        checkpoint = _nearest(run, step, held)
        try:
            if checkpoint is not None:
                weights: Any = open_checkpoint_weights(checkpoint, trust_run=trust_run)
            elif (run / "hf").is_dir():
                weights = open_exported_weights(run / "hf")
                if recipe.attachments:
                    use_towers(weights.model, dict.fromkeys(recipe.attachments, "none"))
            else:
                raise RecipeError(f"command line: --loss: {run} has neither a checkpoint nor hf/")
            model, losses = weights.load(device), []
        except (OSError, files.DamagedCheckpointError) as error:
            raise RecipeError(f"command line: --loss: {first_line(error)}") from None
    title = f"losses with the weights of {checkpoint or run / 'hf'}"
    wanted = f'"step": {step},'.encode()
    for line in read_jsonl(run / "metrics.jsonl", wanted=lambda line: wanted in line):
        if line.get("step") == step and line.get("loss") is not None:
            title += f"; the step's loss in training was {line['loss']:.4f}"
    objective = make_objective(recipe).for_validation()
    for row in rows:
        dataset, sample = row.dataset, row.sample
        if isinstance(dataset, SequenceDataset):  # a builder's has an objective of its own
            attachments = dataset.inputs.attachments.of_model(model)
            inputs = dataclasses.replace(dataset.inputs, attachments=attachments)
            dataset = dataclasses.replace(dataset, objective=objective, inputs=inputs)
            start = int(dataset.store.offsets[row.document]) + row.first
            piece = row.document, start, start + len(sample["input_ids"])
            try:
                sample = attachments.complete(sample, dataset.store, [piece])
            except RowError as error:
                raise RecipeError(f"{row.where}: {error}") from None
        collated = raise_error(dataset.collate([sample]))
        with torch.no_grad():
            sums = dataset_objective(dataset).loss(model, to_device(collated.micro_batch, device))
        # The sums of its metrics follow the loss
        losses.append(float(sums.flatten()[0]) / collated.weight if collated.weight else math.nan)
    return losses, title


def _print_rows(rows: list[TrainedRow], losses: list[float] | None, recipe: Recipe) -> None:
    from launcher.cli.inspect_page import load_decoder
    from launcher.data.tokenizer import tokenizer_name

    decoder = None
    if rows[0].of is not None:
        name = tokenizer_name(recipe.data, recipe.model)
        decoder = load_decoder(recipe.data.tokenizer and name, name)
    lines = []
    for row, loss in zip(rows, losses or [math.nan] * len(rows), strict=True):
        tokens = text = ""
        if decoder is not None and row.of is not None:
            ids = row.sample["input_ids"].tolist()
            tokens = f"{row.of:,}"
            if len(ids) < row.of:
                tokens = f"{row.first:,}-{row.first + len(ids) - 1:,} of {tokens}"
            # The tokens of an attachment stand there once
            runs = ([token] if token in decoder.special else run for token, run in groupby(ids))
            first = list(islice(chain.from_iterable(runs), _PREVIEW))
            text = decoder.text(first) if row.question is None else row.question
            text = " ".join(text.split())[:_PREVIEW]
        cells = [str(row.sequence), tokens, row.where, text]
        if losses is not None:
            cells.insert(1, "" if math.isnan(loss) else f"{loss:.4f}")
        lines.append((loss, cells))
    columns = [">sequence", ">tokens", "row", "text"]
    if losses is not None:
        columns.insert(1, ">loss")
        lines.sort(key=lambda line: math.inf if math.isnan(line[0]) else -line[0])
    print_parts(make_table(columns, [cells for _, cells in lines]))
