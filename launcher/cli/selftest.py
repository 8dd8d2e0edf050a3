"""`launcher selftest recipe=... [ranks=2] [steps=5] [shrink=true]`: starts `launcher.diagnostics.selftest` under torchrun."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.cli.options import take_options
from launcher.distributed.spawn import run_ranks
from launcher.errors import EXIT_FAILED
from launcher.recipe.load import load_recipe


def main(arguments: Sequence[str]) -> int:
    """0: every variant has the same losses; 3: one differs by more than its tolerance."""
    options, rest = take_options(arguments, {"ranks": 2, "steps": 5, "shrink": False})
    recipe = load_recipe(rest, ranks=None).recipe  # reports mistakes before any process starts
    device = "cpu" if recipe.run.device == "cpu" else "any"
    ranks = int(options["ranks"] or 0)
    setting = {
        "recipe": rest,
        "device": device,
        "steps": options["steps"],
        "shrink": options["shrink"],
    }
    print(f"starting {ranks} processes ...", flush=True)
    try:
        ended = run_ranks("launcher.diagnostics.selftest", setting, ranks=ranks, console=True)
    except KeyboardInterrupt:
        return 130
    # torchrun's own status is 0 or 1
    return EXIT_FAILED if ended.result is None else int(ended.result)
