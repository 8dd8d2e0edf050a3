"""`launcher export`: the weights of a run as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import math
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from launcher.checkpoint import files
from launcher.checkpoint.files import (
    MARKER,
    DamagedCheckpointError,
    NoneLeftError,
    UnreadableError,
    list_checkpoints,
    newest_valid,
)
from launcher.cli.app import flag, make_parent, option
from launcher.console import bytes_as_text, configure_logging, task
from launcher.errors import EXIT_DONE, EXIT_NO, RecipeError
from launcher.recipe.functions import TRUST_HELP
from launcher.recipe.load import recorded_recipe
from launcher.recipe.section import Dtype
from launcher.reliability.run_directory import RunFolder
from launcher.sources.location import Location, is_in_store, no_such
from launcher.sources.store_names import READ_ONLY, refusal, scheme_of

_MOST_DELETED = 5
"""How often another checkpoint is taken because the run has deleted the one that was found."""


class _DeletedError(Exception):
    """A run that trains deleted a checkpoint before it was locked."""


def export(
    run: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run, or one of its checkpoints.")
    ],
    out: Annotated[
        str, option("Folder to write, new or empty; of a store, too: s3://BUCKET/FOLDER.", "OUT")
    ],
    step: Annotated[
        int | None,
        option("Checkpoint of this step. Default: the newest, or RUN_DIR/hf.", "N"),
    ] = None,
    dtype: Annotated[
        Dtype | None,
        option("bfloat16 | float16 | float32. Default: as the weights are stored.", "DTYPE"),
    ] = None,
    merged: Annotated[
        bool, flag("--merged", "Merge the adapters into the model that they belong to.")
    ] = False,
    base: Annotated[
        Literal["original", "quantized"] | None,
        option(
            "original | quantized: what --merged adds the adapters of a run with lora.quantize to. "
            "Default: checkpoint.export_base.",
            "BASE",
        ),
    ] = None,
    weights: Annotated[
        Literal["trained", "ema"],
        option(
            "trained | ema: the averages of optimizer.ema in place of the trained weights.",
            "WEIGHTS",
        ),
    ] = "trained",
    verify: Annotated[
        bool, flag("--verify", "Load OUT in a fresh process and compare it with the run.")
    ] = False,
    trust_run: Annotated[bool, flag("--trust-run", TRUST_HELP)] = False,
) -> int:
    """Write the weights of a run as a Hugging Face folder.

    Takes the newest checkpoint, or RUN_DIR/hf where that is of the same step, and prints the step.

    --verify compares weights, logits, tokenizer, chat template and end tokens of OUT with the
    checkpoint that it was written from, or an OUT that exists, which is not written, with the
    newest one. Exit status 3: they differ.

    The run may train meanwhile: it deletes no checkpoint that is read.

    \b
    Example:
      launcher export runs/qwen3_8b out=exported dtype=bfloat16
    """
    configure_logging(stream="stderr")
    if base is not None and not merged and not verify:
        raise RecipeError("command line: base: needs --merged")
    if step is not None:
        run = checkpoint_of_step(run, step)
    write = partial(
        _export,
        run,
        name=out,
        dtype=dtype,
        merged=merged,
        base=base,
        ema=weights == "ema",
        verify=verify,
        trust_run=trust_run,
    )
    if not is_in_store(out):
        return write(Path(out))
    target = Location(out.rstrip("/"))
    _refuse_target(target)
    with tempfile.TemporaryDirectory(prefix="launcher-export-") as scratch:
        folder = Path(scratch, target.last)
        status = write(folder)
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        try:
            with task(f"copying to {target.name}", size) as advance:
                target.upload(folder, advance=advance)
        except OSError as error:
            what = f"{error.filename or target.name}: {error.strerror or error}"
            raise RecipeError(f"export: {what}; OUT is not complete") from None
        print(f"{target.name}: {bytes_as_text(size)} copied")
    return status


def _refuse_target(target: Location) -> None:
    """Raises RecipeError if nothing can be written there, or something is there."""
    problem = refusal(target.name)
    if problem is None and scheme_of(target.name) in READ_ONLY:
        problem = f"{target.name} is only read; give s3://, gs:// or az://BUCKET/FOLDER"
    if problem is None and {"", ".", ".."} & {*target.name.split("/")[3:]}:
        problem = f"{target.name}: give the folder without //, /./ and /../"
    try:
        if problem is None and target.files(now=True):
            problem = f"{target.name} exists and is not empty; name a new folder"
    except OSError as error:
        problem = f"{error.filename}: {error.strerror}"
    if problem is not None:
        raise RecipeError(f"command line: out: {problem}")


def _export(
    run: Path,
    out: Path,
    *,
    name: str,
    dtype: Dtype | None,
    merged: bool,
    base: str | None,
    ema: bool,
    verify: bool,
    trust_run: bool,
) -> int:
    """name: of the folder, for messages."""
    with contextlib.ExitStack() as held:
        checkpoint = None
        if not (verify and out.is_dir() and any(out.iterdir())):
            try:
                checkpoint = _write(
                    run,
                    out,
                    dtype,
                    name=name,
                    merged=merged,
                    base=base,
                    ema=ema,
                    verify=verify,
                    trust_run=trust_run,
                    held=held,
                )
            except (OSError, DamagedCheckpointError) as error:
                raise RecipeError(f"export: {out} was not written: {error}") from None
            except KeyboardInterrupt as request:
                written = out.is_dir() and any(out.iterdir())
                request.add_note(f"{out} was {'' if written else 'not '}written")
                raise
        if not verify:
            return EXIT_DONE
        try:
            checkpoint = checkpoint or _to_compare(run, out, held)
            return _verify(run, out, checkpoint, name=name, base=base, ema=ema, trust_run=trust_run)
        except (OSError, DamagedCheckpointError) as error:
            what = f"{out} could not be compared with {run}"
            raise RecipeError(f"export: --verify: {what}: {error}") from None
        except KeyboardInterrupt as request:
            request.add_note(f"{out} was written, and not compared with the run")
            raise


def _write(
    run: Path,
    out: Path,
    dtype: Dtype | None,
    *,
    name: str,
    merged: bool,
    base: str | None,
    ema: bool,
    verify: bool,
    trust_run: bool,
    held: contextlib.ExitStack,
) -> Path | None:
    """Returns the checkpoint that it took the weights from, which `held` keeps, or with `verify` the
    one to compare with; None: it took those in hf."""
    weights, checkpoint = run / "hf", None
    # The adapter alone does not say which weights were quantized, and a merged model has none
    exported = base != "quantized" and not ema and any(weights.glob("*.safetensors"))
    if merged and exported and not (weights / "adapter_config.json").is_file():
        exported = find_checkpoint(run, held) is None
    step = RunFolder(run).exported_step() if exported else None
    if step is None or _newest_step(run) > step:
        checkpoint = find_checkpoint(run, held)
        valid = files.read_marker(checkpoint).step if checkpoint is not None else None
        if step is not None and valid is not None and valid <= step:
            checkpoint = None  # the newer ones are damaged
        else:
            step = valid
    if checkpoint is None and not exported:
        what = "has neither checkpoints nor weights in hf (checkpoint.export=at_end writes them)"
        what = "has no checkpoint" if ema else what
        if not run.is_dir():
            raise RecipeError(f"command line: {no_such('folder', str(run))}")
        raise RecipeError(f"command line: {run}: {what}")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"command line: {out} exists and is not empty; name a new folder")
    compared = checkpoint
    if verify and checkpoint is None:  # before anything is written
        compared = _to_compare(run, out, held)
    make_parent(out, "out")
    if checkpoint is not None:
        from launcher.checkpoint.export import export_checkpoint  # and with it torch
        from launcher.objectives.make import make_objective

        adapter = export_checkpoint(
            checkpoint,
            out,
            dtype=dtype,
            merged=merged,
            base=base,
            ema=ema,
            trust_run=trust_run,
            files=lambda recipe, model: make_objective(recipe, trained=False).export_files(model),
        )
    else:
        adapter = (weights / "adapter_config.json").is_file()
        if merged and not adapter:
            raise RecipeError(f"command line: --merged: {weights} has no adapter to merge")
        from launcher.checkpoint.export import export_folder

        export_folder(weights, out, dtype=dtype, merged=merged)
        adapter = adapter and not merged
    reader = "peft's PeftModel.from_pretrained" if adapter else "from_pretrained"
    source = f"{checkpoint or weights}, {'of an unknown step' if step is None else f'step {step}'}"
    print(f"{name}: {'the adapter, ' if adapter else ''}for {reader}, from {source}")
    return compared


def _to_compare(run: Path, out: Path, held: contextlib.ExitStack) -> Path:
    """The checkpoint that --verify compares with. Raises RecipeError if there is none."""
    checkpoint = find_checkpoint(run, held)
    if checkpoint is None:
        what = f"{run} has no checkpoint to compare {out} with; leave --verify out"
        raise RecipeError(f"command line: --verify: {what}")
    return checkpoint


def _newest_step(run: Path) -> float:
    """Step of the newest checkpoint, valid or not; -inf: there is none."""
    listed = list_checkpoints(run / "checkpoints")
    return files.step_of(listed[-1]) if listed else -math.inf


def _verify(
    run: Path,
    out: Path,
    checkpoint: Path,
    *,
    name: str,
    base: str | None,
    ema: bool,
    trust_run: bool,
) -> int:
    from launcher.checkpoint.verify import verify_export

    differences = verify_export(checkpoint, out, base=base, ema=ema, trust_run=trust_run)
    for difference in differences:
        print(f"differs: {difference}")
    print(f"{name} {'does not match' if differences else 'matches'} {checkpoint}")
    return EXIT_NO if differences else EXIT_DONE


def checkpoint_of_step(run: Path, step: int) -> Path:
    """The folder of a checkpoint of this run. Raises RecipeError if there is none of this step."""
    folder = run / "checkpoints" / files.checkpoint_name(step)
    if not (folder / MARKER).is_file():
        steps = [str(files.step_of(one)) for one in list_checkpoints(run / "checkpoints")]
        there = f"there are those of steps {', '.join(steps)}" if steps else "there is none"
        if not (run / "checkpoints").is_dir():
            runs = (one for one in run.parents[:2] if (one / "checkpoints").is_dir())
            there = f"give the folder of a run, such as {next(runs, 'runs/quickstart')}"
        raise RecipeError(f"command line: step={step}: {run} has no such checkpoint; {there}")
    return folder


def _advice_of_copy(run: Path) -> str:
    """How checkpoints are repaired from their copy (checkpoint.copy_to); empty: there is none."""
    file = run / "recipe.yaml"
    with contextlib.suppress(OSError, UnicodeDecodeError, RecipeError):
        copy_to = recorded_recipe(file.read_text(encoding="utf-8"), file=file).checkpoint.copy_to
        if copy_to is not None:
            what = f"the run has copies in {copy_to} (checkpoint.copy_to)"
            return f"\n{what}: start it again, which fetches missing files; then export"
    return ""


def find_checkpoint(run: Path, held: contextlib.ExitStack) -> Path | None:
    """`run` if it is a checkpoint, else the newest valid one of that run; None if there is none.
    Until `held` is closed, a run that trains does not delete it."""
    if (run / MARKER).is_file():
        held.enter_context(files.reading(run))
        problem = files.verify(run)
        if problem is not None:
            raise RecipeError(f"command line: {run} is damaged: {problem}")
        return run

    def check(path: Path) -> str | None:
        held.enter_context(files.reading(path))
        problem = files.verify(path)
        if problem is not None and not path.is_dir():
            raise _DeletedError
        return problem

    for _ in range(_MOST_DELETED):
        try:
            return newest_valid(list_checkpoints(run / "checkpoints"), check)
        except _DeletedError:  # the run trains, and has written a newer one
            continue
        except (NoneLeftError, UnreadableError) as error:
            raise RecipeError(f"command line: {error}{_advice_of_copy(run)}") from None
    raise RecipeError(
        f"command line: {run}: the run deleted {_MOST_DELETED} checkpoints before they were read; "
        "give the path of one that it keeps (checkpoint.keep_every), or stop the run"
    )
