"""`launcher selftest recipe=... [ranks=2] [steps=5] [shrink=true]`: starts `launcher.diagnostics.selftest` under torchrun."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from launcher.cli.options import take_options
from launcher.errors import EXIT_FAILED
from launcher.recipe.load import load_recipe


def main(arguments: Sequence[str]) -> int:
    """0: every variant has the same losses; 3: one differs by more than its tolerance."""
    options, rest = take_options(arguments, {"ranks": 2, "steps": 5, "shrink": False})
    recipe = load_recipe(rest, ranks=None).recipe  # reports mistakes before any process starts
    device = "cpu" if recipe.run.device == "cpu" else "any"
    ranks = options["ranks"]
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)  # torchrun's own default, without its warning
    with tempfile.TemporaryDirectory(prefix="launcher-selftest-") as folder:
        # torchrun itself knows no status but 0 and 1: the verdict comes in a file
        verdict = Path(folder) / "verdict"
        setting = json.dumps(
            {"recipe": rest, "device": device, "steps": options["steps"], "shrink": options["shrink"], "verdict": str(verdict)}
        )
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        print(f"starting {ranks} processes ...", flush=True)
        process = subprocess.Popen([*command, "-m", "launcher.diagnostics.selftest", setting], env=environment)
        try:
            process.wait()
        except KeyboardInterrupt:
            process.wait()
            return 130
        return int(verdict.read_text()) if verdict.exists() else EXIT_FAILED
