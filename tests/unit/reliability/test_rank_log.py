"""Tests of what a rank prints on the console, and what is in its log only."""

import subprocess
import sys

import pytest

from tests import REPOSITORY

PRINTS = """
import logging, os, sys, warnings
from pathlib import Path
from launcher.console import configure_logging, held_errors
from launcher.reliability.run_directory import rank_log
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
with held_errors() as held:
    os.write(2, b"frames at the import\\n")
    warnings.warn("a warning at the import", FutureWarning)
with rank_log(folder, rank, before=held[0]) as console:
    configure_logging()
    os.write(2, b"frames of C++\\n")
    warnings.warn("a warning")
    logging.getLogger("library").warning("a warning of a library")
    print("printed")
    print("printed as an error", file=sys.stderr)
    logging.getLogger("launcher.x").warning("of the launcher")
    print("reported", file=console)
os.write(2, b"after\\n")
logging.getLogger("library").warning("a later warning")
"""
SILENT = ["frames at the import", "FutureWarning: a warning at the import", "frames of C++"]
SILENT += ["UserWarning: a warning", "a warning of a library"]


def run(code, *words):
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=REPOSITORY,
        timeout=100,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_warnings_and_cpp_output_are_in_the_log_only(tmp_path, rank):
    status, console = run(PRINTS, str(tmp_path), str(rank))
    assert status == 0, console
    log = (tmp_path / f"rank_{rank}.log").read_text()
    for text in SILENT:
        assert text not in console
        assert log.count(text) == 1, text
    own = ["printed", "printed as an error", "warning: of the launcher"]
    assert [line for line in own if line in log.splitlines()] == own
    assert sorted(console.splitlines()) == sorted(
        [*(own if rank == 0 else []), "reported", "after", "a later warning"]
    )


def test_what_is_held_is_printed_after_an_error():
    code = """
import os
from launcher.console import held_errors
with held_errors():
    os.write(2, b"why\\n")
    raise SystemExit(3)
"""
    assert run(code) == (3, "why\n")


STOPPED = """\
import os, sys
from launcher.console import held_errors
from launcher.reliability.signals import report_stop_at_start
with held_errors():
    print("a warning", file=sys.stderr)
    report_stop_at_start(None, "SIGTERM")
    os._exit(3)
"""


def test_a_stop_while_libraries_are_imported_is_reported():
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True)
    said = "stopped by SIGTERM before the first step: there is nothing to save\n"
    assert (ended.returncode, ended.stderr) == (3, said)
