"""`launcher selftest`: starts `launcher.diagnostics.selftest` under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import EXIT_FAILED
from launcher.recipe.load import load_recipe


def main(overrides: Sequence[str], *, ranks: int, steps: int, shrink: bool) -> int:
    """Returns 0 where all variants have the same losses, 3 where one exceeds its tolerance."""
    recipe = load_recipe(overrides, ranks=None).recipe  # reports mistakes before any process starts
    device = "cpu" if recipe.run.device == "cpu" else "any"
    environment = {"OMP_NUM_THREADS": "1"} | dict(
        os.environ
    )  # torchrun's default, without its warning
    with tempfile.TemporaryDirectory(prefix="launcher-selftest-") as folder:
        # torchrun exits with 0 or 1 only, so the verdict comes in a file
        verdict = Path(folder) / "verdict"
        setting = json.dumps(
            {
                "recipe": list(overrides),
                "device": device,
                "steps": steps,
                "shrink": shrink,
                "verdict": str(verdict),
            }
        )
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        print(f"starting {ranks} processes ...", flush=True)
        process = subprocess.Popen(
            [*command, "-m", "launcher.diagnostics.selftest", setting], env=environment
        )
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()
            return 130
        return int(verdict.read_text()) if verdict.exists() else EXIT_FAILED
