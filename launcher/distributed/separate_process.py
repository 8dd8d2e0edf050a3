"""Runs a function in another process: a plan needs a fake process group, a rank has a real one.

`run_in_process` starts `python -m launcher.distributed.separate_process`, which reads a pickled
task from standard input and writes the pickled answer to standard output.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import TypeVar

from launcher.distributed.environment import alone
from launcher.distributed.spawn import end_with_parent
from launcher.errors import RecipeError, TrainingError

Answer = TypeVar("Answer")


def run_in_process(
    seconds: float | None, task: Callable[..., Answer], *arguments: object
) -> Answer:
    """Runs a module-level function in a new process and returns its result.

    The process is killed when its parent ends. Raises RecipeError if the function does, TrainingError
    if the process fails or takes too long.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "launcher.distributed.separate_process", str(os.getpid())],
            input=pickle.dumps((task, arguments)),
            capture_output=True,
            env=alone() | {"PYTHONPATH": paths},
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        raise TrainingError(f"planning took more than {seconds:g} s") from None
    except OSError as error:  # no memory for another process
        why = f"no process to plan in could be started: {error.strerror}"
        raise TrainingError(why) from error
    if done.returncode or not done.stdout:  # code that ends the process with 0 gives no answer
        printed = done.stderr.decode(errors="replace").strip()
        raise TrainingError(f"planning ended with status {done.returncode}:\n{printed}")
    answer = pickle.loads(done.stdout)
    if isinstance(answer, RecipeError):
        raise answer
    return answer  # type: ignore[no-any-return]


def _main() -> None:
    end_with_parent(int(sys.argv[1]))
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to standard output too
    task, arguments = pickle.load(sys.stdin.buffer)
    try:
        answer = task(*arguments)
    except RecipeError as error:
        answer = error
    pickle.dump(answer, output)
    output.close()


if __name__ == "__main__":
    _main()
