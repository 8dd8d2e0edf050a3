"""`launcher export`: the weights of a run as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from launcher.checkpoint.files import (
    MARKER,
    NoneLeftError,
    list_checkpoints,
    newest_valid,
    verify,
)
from launcher.errors import EXIT_DONE, RecipeError
from launcher.recipe.schema import Recipe

_DTYPES = ("bfloat16", "float16", "float32")


def main(run: Path, out: Path, *, dtype: str | None, merged: bool) -> int:
    """Writes the weights of RUN_DIR/hf, or else those of the newest checkpoint, to `out`.

    dtype: of the weights; None: as they are stored. merged: merges adapters into their model.
    """
    if dtype not in (None, *_DTYPES):
        raise RecipeError(f"command line: dtype={dtype}: must be {' | '.join(_DTYPES)}")
    checkpoint = _checkpoint(run)
    source = _weights(run) if checkpoint is None else checkpoint
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"command line: {out} exists and is not empty; name a new folder")
    if not out.absolute().parent.is_dir():
        raise RecipeError(f"command line: {out}: there is no folder {out.absolute().parent}")
    if checkpoint is None:
        adapter = (source / "adapter_config.json").is_file()
        if merged and not adapter:
            raise RecipeError(f"command line: merged=true: {source} has no adapter to merge")
        from launcher.checkpoint.export import export_folder  # and with it torch

        export_folder(source, out, dtype=dtype, merged=merged)
        adapter = adapter and not merged
    else:
        from launcher.checkpoint.export import export_checkpoint

        adapter = export_checkpoint(
            checkpoint, out, dtype=dtype, merged=merged, save_tokenizer=_save_tokenizer
        )
    reader = "peft's PeftModel.from_pretrained" if adapter else "from_pretrained"
    print(f"{out}: {'the adapter, ' if adapter else ''}for {reader}, from {source}")
    return EXIT_DONE


def _save_tokenizer(recipe: Recipe, folder: Path) -> None:
    from launcher.data.setup import tokenizer_to_keep

    tokenizer = tokenizer_to_keep(recipe.data, model_path=recipe.model.path)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _checkpoint(run: Path) -> Path | None:
    """`run` if it is a checkpoint, or the newest valid one of a run that has no export."""
    if (run / MARKER).is_file():
        problem = verify(run)
        if problem is not None:
            raise RecipeError(f"command line: {run} is damaged: {problem}")
        return run
    if any((run / "hf").glob("*.safetensors")) or not (run / "checkpoints").is_dir():
        return None
    try:
        return newest_valid(list_checkpoints(run / "checkpoints"))
    except NoneLeftError as error:
        raise RecipeError(f"command line: {error}") from None


def _weights(run: Path) -> Path:
    source = run / "hf"
    if not run.is_dir():
        raise RecipeError(f"command line: {run}: no such folder")
    if not any(source.glob("*.safetensors")):
        is_run = (run / "recipe.yaml").is_file()
        hint = "" if is_run else " (no recipe.yaml: it does not look like the folder of a run)"
        raise RecipeError(
            f"command line: {run} has no weights{hint}: a run writes them to {source} at its end, "
            "if the recipe has checkpoint.export: at_end, and to its checkpoints"
        )
    return source
