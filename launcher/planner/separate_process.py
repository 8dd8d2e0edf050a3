"""Plans in a separate process: a trace needs a fake process group, and a rank has a real one.

`ask` starts `python -m launcher.planner.separate_process`, which reads a pickled task from standard
input and writes pickled answers to standard output.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
from typing import Any

from launcher.distributed.environment import alone
from launcher.distributed.spawn import end_with_parent
from launcher.errors import RecipeError


def ask(task: str, *arguments: Any, seconds: float) -> tuple[list[Any], str]:
    """What the generator `answers.TASK(*arguments)` yields within the time limit, and why there is
    no more (empty: it ended). A RecipeError that it raises is the last answer.

    The process is killed at the limit, and when this process ends.
    """
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-P", "-m", "launcher.planner.separate_process", str(os.getpid())]
    pipe = subprocess.PIPE
    try:
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, env=alone() | {"PYTHONPATH": paths}
        )
    except OSError as error:  # no memory for another process
        return [], f"no process to plan in could be started: {error.strerror}"
    trouble = ""
    try:
        output, errors = process.communicate(pickle.dumps((task, arguments)), timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        trouble = f"planning took more than {seconds:g} s"
    finally:
        process.kill()
    if process.returncode and not trouble:
        printed = errors.decode(errors="replace").strip()
        trouble = f"planning ended with status {process.returncode}:\n{printed}"
    answers, stream = [], io.BytesIO(output)
    try:
        while True:
            answers.append(pickle.load(stream))
    except (EOFError, pickle.UnpicklingError):  # the end, or where the process was killed
        return answers, trouble


def _main() -> None:
    end_with_parent(int(sys.argv[1]))
    # After a failure torchrun sends SIGTERM to all processes while the rank waits for the answers
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries print to standard output too
    from launcher.planner import answers

    task, arguments = pickle.load(sys.stdin.buffer)
    try:
        for answer in getattr(answers, task)(*arguments):
            pickle.dump(answer, output)
            output.flush()
    except RecipeError as error:
        pickle.dump(error, output)
    output.close()


if __name__ == "__main__":
    _main()
