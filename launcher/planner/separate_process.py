"""Plans made in a process of their own: a plan needs a process group that does not exist, and a rank has one that does.

`ask` starts it; `python -m launcher.planner.separate_process` is it: a job comes in as JSON, answers go out as JSON, one a line.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TextIO

from launcher.distributed.environment import alone
from launcher.distributed.spawn import end_with_parent
from launcher.errors import RecipeError
from launcher.planner.machine import Machine, Rates
from launcher.recipe.load import load_recipe, to_yaml
from launcher.recipe.schema import Recipe

Task = Literal["choose", "explain", "foresee"]
Answer = dict[str, Any]


def ask(task: Task, recipe: Recipe, machine: Machine, *, seconds: float, **more: Any) -> tuple[list[Answer], str]:
    """What the other process answered within so many seconds, and why there is no more of it; empty where all went well.

    It is ended at the limit, and with this process.
    """
    job = {"task": task, "recipe": to_yaml(recipe), "machine": dataclasses.asdict(machine), "parent": os.getpid(), **more}
    paths = [path or os.getcwd() for path in sys.path]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "launcher.planner.separate_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=alone() | {"PYTHONPATH": os.pathsep.join(paths)},
        )
    except OSError as error:  # no memory for another process
        return [], f"no process to plan in could be started: {error.strerror}"
    try:
        answers, complaints = process.communicate(json.dumps(job), timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        answers, complaints = process.communicate()
        return _read(answers), f"planning took more than {seconds:g} s"
    finally:
        process.kill()
    trouble = f"planning ended with status {process.returncode}:\n{complaints.strip()}" if process.returncode else ""
    return _read(answers), trouble


def _read(text: str) -> list[Answer]:
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def machine_from(plain: dict[str, Any]) -> Machine:
    """The inverse of `dataclasses.asdict`."""
    return Machine(**(plain | {"rates": Rates(**plain["rates"])}))


def main(stdin: TextIO, tell: Callable[[Answer], None]) -> None:
    """Does one job."""
    job = json.load(stdin)
    if job["task"] == "explain":
        # torchrun's agent has asked all of this rank to end: the rank ends this process when it has its answer
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(job["parent"])
    # Here, not in the process that asks: that may end at any moment, and would leave the folder behind
    with tempfile.TemporaryDirectory(prefix="launcher-plan-") as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(job["recipe"], encoding="utf-8")
        recipe = load_recipe([f"recipe={file}"], ranks=None, files=False).recipe
    machine = machine_from(job["machine"])
    if job["task"] == "choose":
        from launcher.planner.resolve import resolve

        try:
            resolved = resolve(recipe, machine, limit_micro_batch=job["limit_micro_batch"])
        except RecipeError as error:
            tell({"problems": error.problems})
            return
        tell({"recipe": to_yaml(resolved.recipe), "overrides": list(resolved.overrides), "why": resolved.why})
        return
    if job["task"] == "foresee":
        os.nice(10)  # the training goes first
        from launcher.planner.formatting import micro_batches, where
        from launcher.planner.planning import make_plan

        step = make_plan(recipe, machine).step
        place = where(step.peak, micro_batches=micro_batches(recipe, machine.ranks))
        tell({"peak": step.peak.components.total, "where": place})
        return
    from launcher.planner.suggestions import explain

    for answer in explain(recipe, machine, phase=job["phase"], measured=job["measured"], outside=job["outside"]):
        tell(answer)


if __name__ == "__main__":
    # What libraries print is no answer
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def _tell(answer: Answer) -> None:
        print(json.dumps(answer), file=_answers, flush=True)

    main(sys.stdin, _tell)
