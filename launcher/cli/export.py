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

    dtype: of the weights; None: as they are stored. merged: adds adapters into their model.
    """
    if dtype not in (None, *_DTYPES):
        raise RecipeError(f"command line: dtype={dtype}: must be {' | '.join(_DTYPES)}")
    checkpoint = _checkpoint(run)
    if checkpoint is not None:
        _refuse_if_used(out)
        from launcher.checkpoint.export import export_checkpoint

        adapter = export_checkpoint(
            checkpoint, out, dtype=dtype, merged=merged, save_tokenizer=_save_tokenizer
        )
        _print_result(out, adapter=adapter)
        print(f"from {checkpoint}")
        return EXIT_DONE
    source = _weights(run)
    _refuse_if_used(out)
    adapter = (source / "adapter_config.json").is_file()
    if merged and not adapter:
        what = "holds a whole model already, there is no adapter to add in"
        raise RecipeError(f"command line: merged=true: {source} {what}")
    from launcher.checkpoint.export import export_folder  # and with it torch

    export_folder(source, out, dtype=dtype, merged=merged)
    _print_result(out, adapter=adapter and not merged)
    return EXIT_DONE


def _save_tokenizer(recipe: Recipe, folder: Path) -> None:
    from launcher.data.setup import tokenizer_to_keep

    tokenizer = tokenizer_to_keep(recipe.data, model_path=recipe.model.path)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _print_result(out: Path, *, adapter: bool) -> None:
    print(
        f"{out}: "
        + (
            "the adapter, for peft's PeftModel.from_pretrained"
            if adapter
            else "for from_pretrained"
        )
    )


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
        return newest_valid(list_checkpoints(run / "checkpoints"))
    except NoneLeftError as error:
        raise RecipeError(f"command line: {error}") from None


def _weights(run: Path) -> Path:
    source = run / "hf"
    if not run.is_dir():
        raise RecipeError(f"command line: {run}: no such folder")
    if not any(source.glob("*.safetensors")):
        started = (
            ""
            if (run / "recipe.yaml").is_file()
            else " (it does not look like the folder of a run: no recipe.yaml)"
        )
        raise RecipeError(
            f"command line: {run} has no weights{started}: a run leaves them in {source} when it "
            "ends, where the recipe says checkpoint.export: at_end, and in its checkpoints"
        )
    return source


def _refuse_if_used(out: Path) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RecipeError(f"command line: {out} is there already and not empty; name a new folder")
    if not out.absolute().parent.is_dir():
        raise RecipeError(
            f"command line: {out}: there is no folder {out.absolute().parent} to put it in"
        )
