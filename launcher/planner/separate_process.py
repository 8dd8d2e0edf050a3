"""Plans in a process of their own: a trace needs a fake process group, and a rank has a real one.

`ask` starts `python -m launcher.planner.separate_process`, which reads a job as JSON and writes
answers as JSON, one a line.
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


def ask(
    task: Task, recipe: Recipe, machine: Machine, *, seconds: float, **more: Any
) -> tuple[list[Answer], str]:
    """The answers within this time, and why there are no more of them (empty: there are).

    The process is killed at the limit, and when this process ends.
    """
    job = {
        "task": task,
        "recipe": to_yaml(recipe),
        "machine": dataclasses.asdict(machine),
        "parent": os.getpid(),
        "more": more,
    }
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
        answers, output = process.communicate(json.dumps(job), timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        answers, output = process.communicate()
        return _read(answers), f"planning took more than {seconds:g} s"
    finally:
        process.kill()
    failed = f"planning ended with status {process.returncode}:\n{output.strip()}"
    return _read(answers), failed if process.returncode else ""


def _read(text: str) -> list[Answer]:
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def machine_from(plain: dict[str, Any]) -> Machine:
    """The inverse of `dataclasses.asdict`."""
    return Machine(**(plain | {"rates": Rates(**plain["rates"])}))


def main(stdin: TextIO, answer: Callable[[Answer], None]) -> None:
    """Does one job."""
    job = json.load(stdin)
    if job["task"] == "explain":
        # torchrun's agent asks all processes of a failed rank to end; this one's rank still waits
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    end_with_parent(job["parent"])
    from launcher.planner import answers

    # Loaded here: the asking process may end at any moment, and would leave the folder behind
    with tempfile.TemporaryDirectory(prefix="launcher-plan-") as folder:
        file = Path(folder, "recipe.yaml")
        file.write_text(job["recipe"], encoding="utf-8")
        recipe = load_recipe([f"recipe={file}"], ranks=None, files=False).recipe
    machine, more = machine_from(job["machine"]), job["more"]
    if job["task"] == "choose":
        try:
            answer(answers.choose(recipe, machine, **more))
        except RecipeError as error:
            answer({"problems": error.problems})
    elif job["task"] == "foresee":
        os.nice(10)  # the training goes first
        answer(answers.foresee(recipe, machine))
    else:
        for one in answers.explain(recipe, machine, **more):
            answer(one)


if __name__ == "__main__":
    # Libraries print to standard output too
    _answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.stdin, lambda one: print(json.dumps(one), file=_answers, flush=True))
