"""Sweeps: `sweep.KEY=A,B` stands for a run with each value, in a folder of its own."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from launcher.cli.requests import SIGNALS
from launcher.cli.status import print_runs, summarize
from launcher.distributed.spawn import end_with_parent
from launcher.errors import EXIT_DONE, EXIT_FAILED, EXIT_STOPPED, RecipeError
from launcher.recipe.decode import shown
from launcher.recipe.load import load_recipe
from launcher.reliability.signals import requests_to_stop

Sweep = list[tuple[str, list[str]]]
"""Keys with their values."""

_CLOSES = {"[": "]", "{": "}", '"': '"', "'": "'"}


def take_sweep(arguments: Sequence[str]) -> tuple[list[str], Sweep]:
    """The arguments without `sweep.KEY=A,B`, and these. Raises RecipeError."""
    rest: list[str] = []
    sweep: Sweep = []
    problems = []
    for argument in arguments:
        key, equals, text = argument.partition("=")
        if not equals or not key.startswith("sweep."):
            rest.append(argument)
            continue
        values, closing = _values(text)
        key, problem = key.removeprefix("sweep."), ""
        if closing:
            problem = f"{closing} is missing; write text with a bracket or quote in other quotes"
        elif not all(values):
            problem = "a value is empty; write sweep.KEY=A,B,C, and null for none"
        elif key == "run.dir":
            problem = "each run has its own folder below run.dir already; give run.dir=FOLDER"
        elif key in (known for known, _ in sweep):
            problem = "the key has a sweep already; give all its values in one: sweep.KEY=A,B,C"
        if problem:
            problems.append(f"command line: {shown(argument)}: {problem}")
        sweep.append((key, values))
    if problems:
        raise RecipeError(problems)
    return rest, sweep


def _values(text: str) -> tuple[list[str], str]:
    """The values of a sweep, and the brackets and quotes that are missing at its end: `1,[2,3]` is
    two values."""
    values, closing = [""], ""
    for character in text:
        if character == "," and not closing:
            values.append("")
            continue
        values[-1] += character
        if character == closing[:1]:
            closing = closing[1:]
        elif closing[:1] not in ("'", '"'):
            closing = _CLOSES.get(character, "") + closing
    return values, closing


def combinations(sweep: Sweep) -> Iterator[tuple[str, ...]]:
    """The overrides of each run."""
    choices = [[f"{key}={value}" for value in values] for key, values in sweep]
    return itertools.product(*choices)


def labels(sweep: Sweep) -> dict[str, tuple[str, ...]]:
    """The overrides of each run, by its name, which is also the name of its folder below run.dir.

    Raises RecipeError if two runs would have the same name.
    """
    short = [key.rsplit(".", 1)[-1] for key, _ in sweep]
    names = [
        name if short.count(name) == 1 else key for name, (key, _) in zip(short, sweep, strict=True)
    ]
    runs: dict[str, tuple[str, ...]] = {}
    for values in combinations(sweep):
        plain = [re.sub(r"[^-+.=A-Za-z0-9_]", "_", value.partition("=")[2]) for value in values]
        label = ",".join(f"{name}={value}" for name, value in zip(names, plain, strict=True))
        if label in runs:
            problem = "two runs would have the same name and folder; give each value once"
            raise RecipeError(f"command line: sweep: {problem}")
        runs[label] = values
    return runs


_ASKED = [status for number in SIGNALS for status in (128 + number, -number)]
"""Statuses of a run that is asked to stop before it has checked its recipe."""


@contextlib.contextmanager
def _requests_to(handle: Callable[[int], object]) -> Iterator[None]:
    """Passes requests to stop to a function while the block runs."""
    numbers = requests_to_stop()
    before = {n: signal.signal(n, lambda number, _: handle(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(status: int) -> str:
    """A text that says how a process with this exit status ended."""
    if status == EXIT_STOPPED or status in _ASKED:
        return "stopped"
    if status < 0:
        return f"failed with {signal.Signals(-status).name}"
    return f"failed with status {status}" if status else "finished"


class LocalSweep:
    """Runs `launcher train` on this machine for each combination, `throttle` of them at a time."""

    def __init__(
        self, overrides: Sequence[str], sweep: Sweep, options: Sequence[str], *, ranks: int | None
    ) -> None:
        """options: of `launcher train`. ranks: of each run, if known.

        Raises RecipeError if a recipe of the sweep is wrong.
        """
        self.runs: dict[Path, list[str]] = {}
        """The folder of each run, and the command that trains it."""
        self.device = "auto"
        """run.device of the last run."""
        for label, values in labels(sweep).items():
            recipe = load_recipe([*overrides, *values], ranks=ranks, hub=True).recipe
            folder, self.device = Path(recipe.run.dir) / label, recipe.run.device
            name = json.dumps(f"{recipe.run.name} {label}")
            own = [f"run.dir={json.dumps(str(folder))}", f"run.name={name}"]
            command = [sys.executable, "-m", "launcher", "train", *options]
            self.runs[folder] = [*command, *overrides, *values, *own]
        self.waiting = list(self.runs)
        """Folders of the runs that were not started yet."""
        self.ended: dict[Path, str] = {}
        """How each run ended: `finished`, `stopped`, or `failed with` its status."""

    def run(self, throttle: int, devices: Sequence[Sequence[str]]) -> int:
        """Runs all; returns 0, the status of the first that failed, or 75 after a request to stop.

        devices: for each run that may run at the same time, its GPUs; empty: all that are visible.
        With several at a time, each writes its output to FOLDER.log.
        """
        waiting, free = self.waiting, list(range(throttle))
        running: dict[int, tuple[Path, subprocess.Popen[bytes]]] = {}
        requests: list[int] = []
        failed: list[int] = []
        with _requests_to(requests.append):
            sent = 0
            while running or (waiting and not requests):
                while waiting and free and not requests:
                    folder, place = waiting.pop(0), free.pop(0)
                    process = self._start(folder, throttle, devices[place] if devices else ())
                    running[place] = folder, process
                for number in requests[sent:]:
                    for _, process in running.values():
                        process.send_signal(number)
                sent = len(requests)
                time.sleep(0.1)
                for place, (folder, process) in list(running.items()):
                    if (status := process.poll()) is not None:
                        self.ended[folder] = _outcome(status)
                        print(f"{folder}: {self.ended[folder]}", flush=True)
                        if self.ended[folder] not in ("finished", "stopped"):
                            failed.append(status if status > 0 else EXIT_FAILED)
                        free.append(place)
                        del running[place]
        if requests or "stopped" in self.ended.values():
            return EXIT_STOPPED
        return failed[0] if failed else EXIT_DONE

    def print_table(self) -> None:
        """Prints the state of each run, also of those that were not started or failed early."""
        summaries = [summarize(folder, time.time()) for folder in self.runs]
        for summary in summaries:
            state, _, status = self.ended.get(summary.path, "not started").partition(" with ")
            if not summary.status and state != "not started":
                status = "before its first step; see its output"
            if not summary.status or (
                state == "failed" and summary.state in ("finished", "stopped")
            ):
                summary.state, summary.reason = state, status
        print_runs(summaries)

    def _start(
        self, folder: Path, throttle: int, devices: Sequence[str]
    ) -> subprocess.Popen[bytes]:
        environment = dict(os.environ)
        if devices:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        several = throttle > 1
        print(f"{folder}: started{f', output in {folder}.log' * several}", flush=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{folder}.log" if several else os.devnull, "ab") as log:
            return subprocess.Popen(
                self.runs[folder],
                env=environment,
                stdout=log if several else None,
                stderr=subprocess.STDOUT if several else None,
                # The run saves and stops if the sweep is killed
                preexec_fn=partial(end_with_parent, os.getpid(), signal.SIGTERM),
            )
