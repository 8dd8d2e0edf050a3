"""The `launcher` command: finds the verb, calls it, turns what it raises into a message and an exit status."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from launcher import __version__
from launcher.errors import EXIT_DONE, EXIT_USAGE, RecipeError
from launcher.recipe.decode import suggestion
from launcher.recipe.find import recipe_folders

VERBS = {
    "inspect": "decoded samples as the model will see them: what carries loss, what is cut, how long documents are",
    "show": "the resolved recipe, each value with where it came from",
    "plan": "will it fit: memory of a rank by component, and the fastest configuration that fits",
    "prepare": "on a node with network: fetch model and data, tokenize into the cache",
    "export": "the weights of a run as a Hugging Face folder, in another dtype, an adapter merged",
    "status": "how a run stands: step, loss, checkpoint, restarts and why, time lost; a folder of runs gives a table",
    "submit": "a job of Slurm that is requeued until the run is finished; sweeps as job arrays; --dry-run, --follow",
    "doctor": "is this machine, node or allocation fit to train, and how fast: GPUs, limits, disks, clocks, links",
    "selftest": "the same losses over strategies, accumulation and ranks, on your recipe and machine",
}


TAKES = {
    "doctor": "[ranks=] [json=] [shared=] [--node]",
    "export": "RUN_DIR OUT [dtype=] [merged=]",
    "plan": "recipe=NAME gpu=h100 [nodes= ...]",
    "status": "RUN_DIR",
    "submit": "recipe=NAME nodes=2 [time= ...]",
}
"""What a verb takes where it is not a recipe."""


def usage() -> str:
    """What the command can do."""
    width = max(map(len, VERBS))
    shipped = ", ".join(sorted({file.stem for folder in recipe_folders() for file in folder.glob("*.yaml")}))
    verbs = "\n".join(
        f"  launcher {verb:<{width}} {TAKES.get(verb, 'recipe=NAME [key=value ...]'):<35} {what}" for verb, what in VERBS.items()
    )
    return (
        f"launcher {__version__}\n\n"
        f"  torchrun --nproc-per-node GPUS launcher/train.py recipe=NAME [key=value ...]   train\n{verbs}\n\n"
        f"recipe= takes the path of a .yaml file, or the name of a shipped recipe: {shipped}."
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs `launcher VERB ...`; returns the exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help", "help"):
        print(usage())
        return EXIT_DONE if words else EXIT_USAGE
    if words[0] in ("-V", "--version"):
        print(__version__)
        return EXIT_DONE
    if words[0] not in VERBS:
        print(f"launcher {words[0]}: no such command{suggestion(words[0], VERBS)}; there are {', '.join(VERBS)}", file=sys.stderr)
        return EXIT_USAGE
    try:
        command = importlib.import_module(f"launcher.cli.{words[0]}")
        status: int = command.main(words[1:])
        return status
    except RecipeError as error:
        print(error, file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `launcher show ... | head`
        sys.stderr.close()
        return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
