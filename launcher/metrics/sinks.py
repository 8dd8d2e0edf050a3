"""The sinks of records: metrics.jsonl; wandb, tensorboard and a user's tracker if enabled. On rank
0 only."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import sys
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from launcher.errors import first_line
from launcher.files import replace_text
from launcher.recipe import schema
from launcher.recipe.functions import import_function
from launcher.reliability.json_files import Lines, last_line
from launcher.reliability.run_directory import RunFolder

logger = logging.getLogger(__name__)

WANDB_START, WANDB_END = 30, 60
"""Seconds that a run waits for wandb's server: then it is recorded offline, or what is left is not
uploaded at the end. In between wandb has a process of its own."""
_TAIL = 1 << 18
"""Bytes at the end of metrics.jsonl that are read first when later steps are removed."""
Record = dict[str, Any]
"""A line of metrics.jsonl, and maybe `samples`, the answers that an evaluation generated."""


class Sink(Protocol):
    """Takes the records of steps and evaluations."""

    def write(self, record: Record) -> None:
        """Takes a record."""

    def go_back(self, step: int, *, exact: bool) -> int:
        """Called when training resumes after this step: drops the records of later steps, so that
        each step counts once; returns how many were dropped. exact: their results will be the
        same."""

    def close(self, state: str) -> None:
        """Called at the end of the run, with its state."""


class JsonLines:
    """One JSON object per line, readable during the run."""

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)

    def go_back(self, step: int, *, exact: bool) -> int:
        return remove_later_steps(self._lines, step)

    def write(self, record: Record) -> None:
        self._lines.append({key: value for key, value in record.items() if key != "samples"})

    def close(self, state: str) -> None:
        self._lines.close()


def remove_later_steps(file: Lines, step: int) -> int:
    """Removes the lines after `step`, and lines beside them that a crash has damaged; returns how
    many. Reads the end of the file: a run of weeks has written hundreds of megabytes."""
    file.close()
    forgotten = file.forget(lambda line: _step_of(line) <= step)
    if not file.path.exists():
        return forgotten
    with file.path.open("r+b") as stream:
        begin, lines = _last_lines(stream, step)
        kept = [line for line in lines if line.endswith(b"\n") and _step_of(line) <= step]
        if len(kept) < len(lines):
            stream.seek(begin)
            stream.write(b"".join(kept))
            stream.truncate()
    return forgotten + len(lines) - len(kept)


def _last_lines(stream: BinaryIO, step: int) -> tuple[int, list[bytes]]:
    """Where the last lines begin, and these lines. The first of them is of `step` or of an earlier
    one, unless they are all lines."""
    end, size = stream.seek(0, os.SEEK_END), _TAIL
    while True:
        begin = stream.seek(max(0, end - size))
        if begin > 0:
            begin += len(stream.readline())  # the end of a line
        lines = stream.readlines()
        if begin == 0 or (lines and _step_of(lines[0]) <= step):
            return begin, lines
        size *= 4


def _step_of(line: str | bytes) -> float:
    """Infinity if the line is damaged."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return math.inf


class OptionalSink:
    """A sink that may fail: the failure is logged, the sink disabled, and the run continues."""

    def __init__(self, name: str, make: Callable[[], Sink]) -> None:
        self._name = name
        self._sink: Sink | None = None
        with self._failing():
            self._sink = make()

    def write(self, record: Record) -> None:
        with self._failing():
            if self._sink is not None:
                self._sink.write(record)

    def go_back(self, step: int, *, exact: bool) -> int:
        with self._failing():
            return 0 if self._sink is None else self._sink.go_back(step, exact=exact)
        return 0

    def close(self, state: str) -> None:
        with self._failing():
            if self._sink is not None:
                self._sink.close(state)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # whatever a library raises, the run continues
            self._sink = None
            problem = first_line(error)
            logger.warning(f"{self._name} is disabled from now on, training continues: {problem}")


def _numbers(record: Record) -> dict[str, float]:
    prefix = "evaluation" if "eval_loss" in record else "training"
    values = {name: value for name, value in record.items() if name not in ("step", "time")}
    values |= {f"eval_loss/{name}": loss for name, loss in record.get("eval_losses", {}).items()}
    values |= {f"loss/{name}": loss for name, loss in record.get("losses", {}).items()}
    values |= {f"share/{name}": share for name, share in record.get("shares", {}).items()}
    return {
        f"{prefix}/{name}": value
        for name, value in values.items()
        if isinstance(value, (int, float))
    }


@contextlib.contextmanager
def _no_questions() -> Iterator[None]:
    """Without a key, wandb asks for one in a terminal, and the run would wait for an answer."""
    outer = sys.stdin
    with open(os.devnull) as sys.stdin:
        try:
            yield
        finally:
            sys.stdin = outer


class Wandb:
    """Weights & Biases, with the whole recipe as the run's config.

    Its server keeps what was logged. An exact resume therefore logs only what earlier starts have
    not logged; another one logs the steps again, beside the earlier ones.
    """

    def __init__(
        self, wandb: schema.Wandb, *, name: str, folder: Path, config: dict[str, Any], metrics: Path
    ) -> None:
        """metrics: the file with the records of earlier starts."""
        import wandb as library

        self._table = library.Table
        self._logged = {
            loss: int(last_line(metrics, having=("step", loss)).get("step", 0))
            for loss in ("loss", "eval_loss")
        }
        self._repeated = dict.fromkeys(self._logged, 0)
        """The last step that is not logged again, of training and of evaluations."""
        known = folder / "wandb_id"  # a resumed run continues in the same one
        if not known.exists():
            replace_text(known, uuid.uuid4().hex[:8])
        settings: dict[str, Any] = {
            "id": known.read_text(),
            "resume": "allow",
            "project": wandb.project,
            "entity": wandb.entity,
            "name": name,
            "dir": folder,
            "config": config,
            "tags": wandb.tags,
            "group": wandb.group,
            "settings": library.Settings(
                init_timeout=WANDB_START, finish_timeout=WANDB_END, console="off"
            ),
        }
        try:
            with _no_questions():
                self._run = library.init(mode=wandb.mode, **settings)
        except Exception as error:  # wandb raises many kinds if its server cannot be reached
            if wandb.mode == "offline":
                raise
            library.teardown()
            self._run = library.init(mode="offline", **settings)
            logger.warning(
                f"wandb cannot be reached ({first_line(error)}): this start is recorded offline; "
                f"upload it with: wandb sync {folder}/wandb/offline-run-*"
            )
        # wandb's own step can only increase; a resume or a rewind repeats steps
        for prefix in ("training", "evaluation"):
            self._run.define_metric(f"{prefix}/*", step_metric="step")

    def go_back(self, step: int, *, exact: bool) -> int:
        self._repeated = dict(self._logged) if exact else dict.fromkeys(self._logged, 0)
        return 0

    def write(self, record: Record) -> None:
        kind = "eval_loss" if "eval_loss" in record else "loss"
        if record["step"] <= self._repeated[kind]:
            return
        self._logged[kind] = record["step"]
        more = {}
        if samples := record.get("samples"):
            rows = [list(sample.values()) for sample in samples]
            more["evaluation/samples"] = self._table(columns=list(samples[0]), data=rows)
        self._run.log({"step": record["step"], **_numbers(record), **more})

    def close(self, state: str) -> None:
        self._run.finish(exit_code=0 if state == "finished" else 1)


class TensorBoard:
    """Event files, one of each start that writes."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._make: Any = partial(SummaryWriter, str(folder))
        self._writer: Any = None

    def go_back(self, step: int, *, exact: bool) -> int:
        """TensorBoard drops what earlier files have from `purge_step` on."""
        self.close("")
        self._writer = self._make(purge_step=step + 1)
        return 0

    def write(self, record: Record) -> None:
        # An earlier start may have ended before its first checkpoint, and logged the same steps
        self._writer = self._writer or self._make(purge_step=record["step"])
        for key, value in _numbers(record).items():
            self._writer.add_scalar(key, value, record["step"])

    def close(self, state: str) -> None:
        if self._writer is not None:
            self._writer.close()


class Tracker:
    """What a function of the user returns: an object with `write(step, numbers)` and
    `close(state)`. Steps that are trained again are written again."""

    def __init__(self, function: str, *, name: str, folder: Path, config: dict[str, Any]) -> None:
        make = import_function(function, key="logging.tracker")
        self._tracker = make(name=name, folder=folder, config=config)

    def go_back(self, step: int, *, exact: bool) -> int:
        return 0

    def write(self, record: Record) -> None:
        self._tracker.write(record["step"], _numbers(record))

    def close(self, state: str) -> None:
        self._tracker.close(state)


def open_sinks(
    logging: schema.Logging, run: RunFolder, *, name: str, config: dict[str, Any]
) -> list[Sink]:
    """metrics.jsonl, then the sinks that the recipe enables. name, config: of the run, for wandb;
    config is the whole recipe."""
    sinks: list[Sink] = [JsonLines(run.metrics)]
    if (wandb := logging.wandb) is not None:
        make = partial(Wandb, wandb, name=name, folder=run.path, config=config, metrics=run.metrics)
        sinks.append(OptionalSink("wandb", make))
    if logging.tensorboard:
        make_board = partial(TensorBoard, run.path / "tensorboard")
        sinks.append(OptionalSink("tensorboard", make_board))
    if (function := logging.tracker) is not None:
        make_tracker = partial(Tracker, function, name=name, folder=run.path, config=config)
        sinks.append(OptionalSink("logging.tracker", make_tracker))
    return sinks
