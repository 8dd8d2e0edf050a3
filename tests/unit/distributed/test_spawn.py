"""torchrun of `run_ranks`."""

import subprocess
import sys

from launcher.distributed.spawn import TORCHRUN


def test_torchrun_is_ended_without_a_traceback(tmp_path):
    """`launcher selftest` ends it after Ctrl-C."""
    rank = tmp_path / "rank.py"
    rank.write_text("import time\nprint('ready', flush=True)\ntime.sleep(1000)")
    process = subprocess.Popen(
        [*TORCHRUN, "--nproc-per-node=1", rank],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "ready\n", sys.executable
        process.terminate()
        assert process.communicate(timeout=100) == ("", "")
        assert process.returncode == 143
    finally:
        process.kill()
