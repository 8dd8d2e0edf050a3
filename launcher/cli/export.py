"""`launcher export RUN_DIR OUT [dtype=bfloat16] [merged=true]`: the weights of a run as a Hugging Face folder.

RUN_DIR may also be one checkpoint, RUN_DIR/checkpoints/step_00000500.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.checkpoint.files import MARKER, NoneLeftError, newest_valid, verify
from launcher.errors import EXIT_DONE, RecipeError
from launcher.recipe.decode import suggestion
from launcher.recipe.schema import Recipe

_DTYPES = ("bfloat16", "float16", "float32")
_OPTIONS = ("dtype", "merged")
_FORM = "launcher export RUN_DIR OUT [dtype=bfloat16 | float16 | float32] [merged=true]"


def main(arguments: Sequence[str]) -> int:
    """Reads RUN_DIR/hf, which a finished run leaves with checkpoint.export: at_end, or else the newest checkpoint; writes OUT.
    Nothing is held whole.

    dtype: of the weights; without it as they are. merged: an adapter is added into the model it belongs to.
    """
    folders, options = _parse(arguments)
    run, out = folders
    checkpoint = _checkpoint(run)
    if checkpoint is not None:
        _refuse_if_used(out)
        from launcher.checkpoint.export import export_checkpoint

        merged = options["merged"] == "true"
        _tell(out, adapter=export_checkpoint(checkpoint, out, dtype=options["dtype"], merged=merged, save_tokenizer=_save_tokenizer))
        print(f"from {checkpoint}")
        return EXIT_DONE
    source = _weights(run)
    _refuse_if_used(out)
    adapter = (source / "adapter_config.json").is_file()
    if options["merged"] == "true" and not adapter:
        raise RecipeError(f"command line: merged=true: {source} holds a whole model already, there is no adapter to add in")
    from launcher.checkpoint.export import export_folder  # and with it torch

    export_folder(source, out, dtype=options["dtype"], merged=options["merged"] == "true")
    _tell(out, adapter=adapter and options["merged"] != "true")
    return EXIT_DONE


def _save_tokenizer(recipe: Recipe, folder: Path) -> None:
    from launcher.data.setup import tokenizer_to_keep

    tokenizer = tokenizer_to_keep(recipe.data, model_path=recipe.model.path)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _tell(out: Path, *, adapter: bool) -> None:
    print(f"{out}: " + ("the adapter, for peft's PeftModel.from_pretrained" if adapter else "for from_pretrained"))


def _checkpoint(run: Path) -> Path | None:
    """A checkpoint that was named itself, or the newest valid one of a run that has no export."""
    if (run / MARKER).is_file():
        problem = verify(run)
        if problem is not None:
            raise RecipeError(f"command line: {run} is damaged: {problem}")
        return run
    if any((run / "hf").glob("*.safetensors")) or not (run / "checkpoints").is_dir():
        return None
    try:
        return newest_valid(run / "checkpoints")
    except NoneLeftError as error:
        raise RecipeError(f"command line: {error}") from None


def _parse(arguments: Sequence[str]) -> tuple[tuple[Path, Path], dict[str, str | None]]:
    options: dict[str, str | None] = dict.fromkeys(_OPTIONS)
    folders, problems = [], []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or "/" in name:
            folders.append(Path(argument))
        elif name not in options:
            problems.append(f"command line: {argument}: unknown option{suggestion(name, _OPTIONS)}; there are {', '.join(_OPTIONS)}")
        else:
            options[name] = value
    if options["dtype"] not in (None, *_DTYPES):
        problems.append(f"command line: dtype={options['dtype']}: must be {' | '.join(_DTYPES)}")
    if options["merged"] not in (None, "true", "false"):
        problems.append(f"command line: merged={options['merged']}: must be true or false")
    if len(folders) != 2:
        problems.append(f"command line: needs two folders, and got {len(folders)}: {_FORM}")
    if problems:
        raise RecipeError(problems)
    return (folders[0], folders[1]), options


def _weights(run: Path) -> Path:
    source = run / "hf"
    if not run.is_dir():
        raise RecipeError(f"command line: {run}: no such folder")
    if not any(source.glob("*.safetensors")):
        started = "" if (run / "recipe.yaml").is_file() else " (it does not look like the folder of a run: no recipe.yaml)"
        raise RecipeError(
            f"command line: {run} has no weights{started}: a run leaves them in {source} when it ends, where the recipe says "
            "checkpoint.export: at_end, and in its checkpoints"
        )
    return source


def _refuse_if_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"command line: {out} is there already and not empty; name a new folder")
    if not out.absolute().parent.is_dir():
        raise RecipeError(f"command line: {out}: there is no folder {out.absolute().parent} to put it in")
