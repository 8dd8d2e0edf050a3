"""Requests to stop in every phase of a run, sent to `launcher train`, to its group or to a rank."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.distributed.launching import run, wait_until
from tests.distributed.test_data import INSTRUCT, rows_file
from tests.distributed.test_train import SMALL
from tests.run_files import status
from tests.unit.data.rows import write

PAIRS = [{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"}] * 32
STOP_TRAIN = REPOSITORY / "tests/distributed/stop_train.py"


def ranks(launcher):
    """Process ids; torchrun starts each rank in a session, and process group, of its own."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children")
    assert wait_until(lambda: len(children.read_text().split()) == 2, process=launcher)
    return [int(child) for child in children.read_text().split()]


def blocks_signals(process):
    """Whether `launcher train` has checked the recipe, and does not die of a signal any more."""
    text = Path(f"/proc/{process.pid}/status").read_text().split("SigBlk:")[1].split()[0]
    return int(text, 16) >> (signal.SIGTERM - 1) & 1


SEND = {
    "launcher": lambda process, number: process.send_signal(number),
    "group": lambda process, number: os.killpg(process.pid, number),
    "rank": lambda process, number: os.kill(ranks(process)[1], number),
    "rank's group": lambda process, number: os.killpg(ranks(process)[1], number),
}


def start(folder, phase, act, **variables):
    """Trains until `act(process)` stops the run in a phase."""
    run_dir, reached = folder / "run", folder / "reached"
    overrides = [f"run.dir={run_dir}", "data.workers=2", f"data.cache={folder}/cache"]
    overrides += ["run.device=cpu", "run.max_steps=100000", "checkpoint.every_steps=50"]
    if phase == "tokenize":
        # A row of 360 bytes must fit, or the first pass leaves it out and never encodes it
        overrides += [*INSTRUCT[:2], f"data.train=[{rows_file(folder)}]"]
        overrides += ["data.sequence_length=512", "model.config.max_position_embeddings=512"]
    elif phase == "reference":
        overrides += ["data.kind=preference", "preference={loss: dpo}", "data.workers=0"]
        overrides += [f"data.train=[{write(folder / 'pairs.jsonl', PAIRS)}]"]
    elif phase == "evaluate":
        overrides += ["data.validation=${data.train}", "evaluation.every_steps=2"]
    elif phase == "save":
        overrides += ["checkpoint.every_steps=2"]
    elif phase in ("export", "end"):
        overrides += ["run.max_steps=2"]

    def begun(process):
        if phase == "boot":
            return blocks_signals(process)
        if phase == "step":
            metrics = run_dir / "metrics.jsonl"
            return metrics.exists() and metrics.stat().st_size
        return reached.exists()

    def during(process):
        assert wait_until(lambda: begun(process), process=process), "the phase was not reached"
        act(process)

    command = [sys.executable, STOP_TRAIN, "gpus=2", "run.device=cpu", *SMALL, *overrides]
    return run_dir, run(command, during=during, PHASE=phase, REACHED=str(reached), **variables)


@pytest.mark.parametrize(
    ("phase", "number", "target"),
    [
        ("save", signal.SIGUSR1, "launcher"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("boot", signal.SIGTERM, "group"),
                ("boot", signal.SIGUSR1, "launcher"),
                ("boot", signal.SIGINT, "rank's group"),
                ("import", signal.SIGINT, "launcher"),
                ("import", signal.SIGTERM, "rank"),
                ("import", signal.SIGUSR1, "group"),
                ("tokenize", signal.SIGTERM, "rank's group"),
                ("reference", signal.SIGTERM, "launcher"),
                ("tokenize", signal.SIGUSR1, "launcher"),
                ("tokenize", signal.SIGINT, "rank"),
                ("step", signal.SIGTERM, "rank's group"),
                ("step", signal.SIGUSR1, "group"),
                ("step", signal.SIGINT, "rank"),
                ("evaluate", signal.SIGTERM, "rank's group"),
                ("evaluate", signal.SIGINT, "launcher"),
                ("evaluate", signal.SIGUSR1, "rank"),
                ("save", signal.SIGTERM, "rank's group"),
                ("save", signal.SIGINT, "group"),
                ("export", signal.SIGTERM, "rank's group"),
                ("export", signal.SIGINT, "launcher"),
            )
        ),
    ],
)
def test_run_stops_in_every_phase(phase, number, target, tmp_path):
    run_dir, result = start(tmp_path, phase, lambda process: SEND[target](process, number))
    assert "Traceback" not in result.output, result.output
    outcome = status(run_dir)
    if phase == "export":  # nothing is left to stop: the export is completed
        assert (result.check(0).status, outcome["state"]) == (0, "finished")
        assert (run_dir / "hf/model.safetensors").exists()
        return
    result.check(75)
    assert (outcome["state"], outcome["error"]) == ("stopped", None)
    if phase == "reference":
        kept = (
            f"the next start continues with what has been computed in {run_dir}/{phase}.safetensors"
        )
        assert f"stopped by SIGTERM before the first step: {kept}" in result.output
        assert (run_dir / "reference.safetensors").exists()
        assert outcome["step"] == 0
    elif phase == "tokenize" or outcome["step"] == 0:
        assert result.output.count("before the first step: there is nothing to save") == 1
        assert outcome["step"] == 0
    else:
        assert (run_dir / f"checkpoints/step_{outcome['step']:08}/commit.json").exists()
        assert "start it again to resume" in result.output


@pytest.mark.long
@pytest.mark.parametrize(
    ("phase", "state", "first", "second"),
    [
        ("import", "failed", "stopping before the first step", "are killed before the first step"),
        (
            "save",
            "failed",
            "stopping after the next step at the latest, saving",
            "are killed; steps since the last",
        ),
        ("export", "failed", "all steps are trained", "are killed; steps since the last"),
        ("end", "finished", "the run is finished already", "the run is finished already"),
    ],
)
def test_second_sigint_ends_the_run_at_once(phase, state, first, second, tmp_path):
    def interrupt_twice(process):
        process.send_signal(signal.SIGINT)
        time.sleep(4)  # two seconds would be taken for the same request
        process.send_signal(signal.SIGINT)

    run_dir, result = start(tmp_path, phase, interrupt_twice, SECONDS="10000")
    result.check(0 if state == "finished" else 1)
    lines = [line for line in result.output.splitlines() if "again" in line]
    assert [first in lines[0], second in lines[1], len(lines)] == [True, True, 2], lines
    assert status(run_dir)["state"] == state
