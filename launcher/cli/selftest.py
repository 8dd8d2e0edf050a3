"""`launcher selftest`: starts `launcher.diagnostics.selftest` under torchrun."""

from __future__ import annotations

from collections.abc import Sequence

from launcher.distributed.spawn import run_ranks
from launcher.errors import EXIT_FAILED
from launcher.recipe.load import load_recipe


def main(overrides: Sequence[str], *, ranks: int, steps: int, shrink: bool) -> int:
    """Returns 0 where all variants have the same losses, 3 where one exceeds its tolerance."""
    recipe = load_recipe(overrides, ranks=None).recipe  # reports mistakes before any process starts
    setting = {
        "recipe": list(overrides),
        "device": "cpu" if recipe.run.device == "cpu" else "any",
        "steps": steps,
        "shrink": shrink,
    }
    print(f"starting {ranks} processes ...", flush=True)
    try:
        ended = run_ranks("launcher.diagnostics.selftest", setting, ranks=ranks, console=True)
    except KeyboardInterrupt:
        return 130
    # torchrun's own status is 0 or 1
    return EXIT_FAILED if ended.result is None else int(ended.result)
