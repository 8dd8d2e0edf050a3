"""`launcher rows`: the files and lines that a step was trained on, with the loss of each row."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml

from launcher.checkpoint import files
from launcher.checkpoint.resume import data_changes
from launcher.cli.app import flag, option
from launcher.errors import EXIT_DONE, RecipeError
from launcher.metrics.console import configure_logging
from launcher.recipe.decode import decode
from launcher.recipe.schema import Batch, Recipe
from launcher.reliability.run_directory import RunFolder, read_jsonl

if TYPE_CHECKING:
    from launcher.data.origins import TrainedRow
    from launcher.data.setup import RunData

_PREVIEW = 60
"""Characters of the text to print."""


def rows(
    run: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run.")],
    step: Annotated[int, option("Optimizer step, from 1.", "N")],
    loss: Annotated[
        bool, flag("--loss", "Compute the loss of each row, and list the largest first.")
    ] = False,
) -> int:
    """List the rows that a step was trained on: file, line, tokens and the beginning of the text.

    The order of samples is a function of seed and step, so nothing was logged for this. Start it
    in the folder in which the run was started.

    \b
    Example:
      launcher rows runs/qwen3_8b step=340 --loss
    """
    configure_logging(stream="stderr")
    recipe = _recipe(run, step)
    skipped = skipped_batches(read_jsonl(run / "events.jsonl"), step, run=run)
    opened, tokenizer = _open(run, recipe), recipe.data.tokenizer or recipe.model.path

    from launcher.data.origins import trained_rows

    found = trained_rows(opened, batch=step - 1 + skipped, tokenizer=tokenizer)
    if not found:
        raise RecipeError(f"command line: step={step}: the run ends before, with its last epoch")
    title = f"step {step}: {found[-1].sequence:,} sequences, {len(found):,} rows"
    print(title + (f"; {skipped:,} batches before it were skipped" if skipped else ""))
    _print(found, _losses(run, recipe, step, found) if loss else None, tokenizer)
    return EXIT_DONE


def _recipe(run: Path, step: int) -> Recipe:
    """The recipe of a run. Raises RecipeError if its rows cannot be listed."""
    file = run / "recipe.yaml"
    if not file.is_file():
        raise RecipeError(f"command line: {run} is not the folder of a run: it has no recipe.yaml")
    recipe, _, _ = decode(yaml.safe_load(file.read_text(encoding="utf-8")))
    if recipe.data.streaming:
        what = "the rows of a step are known only after all rows before it are tokenized"
        raise RecipeError(f"{file}: data.streaming: {what}, so they cannot be listed")
    if step > (most := recipe.run.max_steps or step):
        raise RecipeError(f"command line: step={step}: the run has {most} steps (run.max_steps)")
    if recipe.checkpoint.allow_changes:
        what = "seed, data or global batch may have changed in a resume (checkpoint.allow_changes)"
        print(f"note: {what}; this is the order by the present recipe.yaml")
    return recipe


def skipped_batches(events: list[dict[str, Any]], step: int, *, run: Path) -> int:
    """Batches that the run had skipped before a step, because it diverged on them.

    events: of events.jsonl. Raises RecipeError if another run trained the step.
    """
    skipped, other, other_step = 0, run, 0
    for event in events:
        if event.get("from_scratch"):
            skipped, other_step = 0, 0
        if event["event"] != "resumed":
            continue
        source = Path(event.get("origin", run / "checkpoints/own")).parent.parent
        if source.resolve() != run.resolve():
            other, other_step = source, event["step"]
        if event["step"] < step:
            skipped = event.get("skipped_batches", 0)
    if step <= other_step:
        what = f"{run} was started from step {other_step} of another run"
        raise RecipeError(
            f"command line: step={step}: {what}; see launcher rows {other} step={step}"
        )
    return skipped


def _open(run: Path, recipe: Recipe) -> RunData:
    """The data of a run. Raises RecipeError if it has changed."""
    import torch

    from launcher.checkpoint.reader import read_state
    from launcher.data.setup import open_run_data
    from launcher.data.token_store import ModelInputs
    from launcher.distributed.process_group import DataParallel

    group: Any = None  # one process
    alone = DataParallel(rank=0, size=1, group=group, device=torch.device("cpu"))
    day = recipe.data.date or RunFolder(run).first_day()
    data = dataclasses.replace(recipe.data, validation=None, date=day)
    size = recipe.batch.global_batch_size
    batch = Batch(global_batch_size=size, micro_batch_size=1)  # any gives the same rows
    recipe = dataclasses.replace(recipe, data=data, batch=batch)
    opened = open_run_data(recipe, model=ModelInputs(), ranks=alone, build=True, skipped_rows=None)
    for checkpoint in files.list_checkpoints(run / "checkpoints")[-1:]:
        changes = list(data_changes(read_state(checkpoint)["data"], opened.fingerprint))
        if changes:
            what = "the data has changed since the run, and with it the order of samples:"
            raise RecipeError([f"{run}: {what}", *(f"  {line}" for line in changes)])
    return opened


def _losses(run: Path, recipe: Recipe, step: int, found: list[TrainedRow]) -> list[float]:
    """The loss of each row, in float32, without dropout and without the rest of its sequence."""
    import torch

    from launcher.checkpoint.export import open_checkpoint_weights, open_exported_weights
    from launcher.data.loader import to_device

    gpu = torch.cuda.is_available() and recipe.run.device != "cpu"
    device = torch.device("cuda" if gpu else "cpu")
    checkpoints = files.list_checkpoints(run / "checkpoints")
    before = [path for path in checkpoints if files.step_of(path) < step]
    nearest = [*reversed(before), *checkpoints[len(before) :]]
    checkpoint = next((path for path in nearest if files.verify(path) is None), None)
    if checkpoint is not None:
        weights: Any = open_checkpoint_weights(checkpoint)
    elif (run / "hf").is_dir():
        weights = open_exported_weights(run / "hf")
    else:
        raise RecipeError(f"command line: --loss: {run} has neither a checkpoint nor hf/")
    title = f"losses with the weights of {checkpoint or run / 'hf'}"
    for line in read_jsonl(run / "metrics.jsonl"):
        if line.get("step") == step and line.get("loss") is not None:
            title += f"; the step's loss in training was {line['loss']}"
    print(title)
    model, losses = weights.load(device), []
    for row in found:
        collated = row.dataset.collate([row.sample])
        with torch.no_grad():
            summed = float(row.dataset.loss(model, to_device(collated["tensors"], device)))
        targets = collated["loss_tokens"]
        losses.append(summed / targets if targets else math.nan)
    return losses


def _print(found: list[TrainedRow], losses: list[float] | None, tokenizer: str | None) -> None:
    from launcher.cli.inspect_page import load_decoder

    decoder = load_decoder(tokenizer) if found[0].of is not None else None
    table = []
    for row, loss in zip(found, losses or [math.nan] * len(found), strict=True):
        tokens = text = ""
        if decoder is not None and row.of is not None:
            ids = row.sample["input_ids"].tolist()
            part = f"{row.first:,}-{row.first + len(ids) - 1:,} of "
            tokens = f"{part if len(ids) < row.of else ''}{row.of:,}"
            text = " ".join(decoder.text(ids[:_PREVIEW]).split())[:_PREVIEW]
        shown = "" if math.isnan(loss) else f"{loss:.4f}"
        table.append((loss, (str(row.sequence), shown, tokens, row.where, text)))
    if losses is not None:
        table.sort(key=lambda line: math.inf if math.isnan(line[0]) else -line[0])
    cells = [("sequence", "loss" if losses else "", "tokens", "row", "text")]
    cells += [line for _, line in table]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for sequence, shown, tokens, where, text in cells:
        numbers = f"{sequence:>{widths[0]}}  {shown:>{widths[1]}}  {tokens:>{widths[2]}}"
        print(f"{numbers}  {where:<{widths[3]}}  {text}".rstrip())
