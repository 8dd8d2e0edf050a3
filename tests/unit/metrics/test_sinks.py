"""Tests of the sinks. wandb's records are read back from its files."""

import json
import socket
import sys
import time

import pytest

from launcher.metrics.sinks import OptionalSink, TensorBoard, Wandb, open_sinks
from launcher.recipe import schema
from launcher.reliability.run_directory import RunFolder
from tests.distributed.launching import run
from tests.wandb_files import history, read_records

SCRIPT = """
import sys
from pathlib import Path
from launcher.metrics.sinks import Wandb
from launcher.recipe import schema

from launcher.metrics import sinks

sinks.WANDB_START = 3
settings = schema.Wandb(project="test", mode=MODE, tags=("first", "second"), group="sweep")
folder = Path(sys.argv[1])
metrics = sinks.JsonLines(folder / "metrics.jsonl")
sink = Wandb(settings, name="name", folder=folder, config={}, metrics=folder / "metrics.jsonl")
step = 0
for word in sys.argv[2:]:
    if word in ("exact", "changed"):
        sink.go_back(step, exact=word == "exact")
        continue
    step = int(word)
    for each in (metrics, sink):
        each.write({"step": step, "loss": 1.0, "time": 0.0})
samples = [{"step": step, "prompt": "1 + 1", "answer": answer} for answer in "23"]
sink.write({"step": step, "eval_loss": 0.5, "time": 0.0, "samples": samples})
sink.close("finished")
"""


@pytest.mark.slow
def test_wandb_gets_each_step_once_unless_its_results_change(tmp_path):
    """Steps repeat with others after a rewind in one process, and with the same results after a
    resume in a second process."""
    for steps in ((1, 2, 3, "changed", 2, 3, 4), ("exact", 3, 4, 5)):
        code = SCRIPT.replace("MODE", repr("offline"))
        run([sys.executable, "-c", code, tmp_path, *steps], timeout=60).check()
    rows = list(history(tmp_path / "wandb"))
    assert [row["step"] for row in rows if "training/loss" in row] == [1, 2, 3, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "evaluation/eval_loss" in row] == [4, 5]
    tables = [json.loads(file.read_text()) for file in tmp_path.rglob("*.table.json")]
    assert [table["columns"] for table in tables] == [["step", "prompt", "answer"]] * 2
    assert sorted(table["data"] for table in tables) == [
        [[step, "1 + 1", "2"], [step, "1 + 1", "3"]] for step in (4, 5)
    ]
    records = list(read_records(tmp_path / "wandb"))
    assert len({message.run_id for kind, message in records if kind == "run"}) == 1
    (started, *_) = [message for kind, message in records if kind == "run"]
    assert (list(started.tags), started.run_group) == (["first", "second"], "sweep")
    axes = {message.glob_name: message.step_metric for kind, message in records if kind == "metric"}
    assert axes["training/*"] == axes["evaluation/*"] == "step"


def test_wandb_asks_nothing_in_a_terminal(tmp_path, monkeypatch):
    """Without a key it would ask, and the run would wait for an answer."""
    import wandb

    class Terminal:
        def isatty(self):
            return True

    seen, terminal = [], Terminal()
    monkeypatch.setattr(sys, "stdin", terminal)

    def init(**settings):
        seen.append((sys.stdin.isatty(), sys.stdin.read()))
        raise RuntimeError("stop")

    monkeypatch.setattr(wandb, "init", init)
    settings = schema.Wandb(project="test", mode="offline")
    with pytest.raises(RuntimeError, match="stop"):
        Wandb(settings, name="name", folder=tmp_path, config={}, metrics=tmp_path / "metrics.jsonl")
    assert seen == [(False, "")]
    assert sys.stdin is terminal


@pytest.mark.long
def test_unreachable_wandb_server_means_offline_records(tmp_path):
    with socket.socket() as unreachable:  # bound, but not listening
        unreachable.bind(("127.0.0.1", 0))
        server = f"http://127.0.0.1:{unreachable.getsockname()[1]}"
        code = "from launcher.console import configure_logging; configure_logging()" + SCRIPT
        command = [sys.executable, "-c", code.replace("MODE", repr("online")), tmp_path, 1, 2]
        key = "0" * 40
        result = run(command, timeout=60, WANDB_BASE_URL=server, WANDB_API_KEY=key).check()
    assert "warning: wandb cannot be reached" in result.output
    assert f"wandb sync {tmp_path}/wandb/offline-run-*" in result.output
    rows = list(history(tmp_path / "wandb"))
    assert [row["step"] for row in rows if "training/loss" in row] == [1, 2]


def test_tensorboard_shows_each_step_once(tmp_path):
    """After a resume in another process, and after a rewind in the same one."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoard(tmp_path)
    for step in range(1, 18):
        first.write({"step": step, "loss": 1.0})
    first._writer.flush()  # and is killed
    second = TensorBoard(tmp_path)
    second.go_back(10, exact=True)
    for step in range(11, 20):
        second.write({"step": step, "loss": 2.0})
    second.go_back(15, exact=False)
    for step in range(16, 25):
        second.write({"step": step, "loss": 3.0})
    second.close("finished")
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("training/loss")
    assert [point.step for point in shown] == list(range(1, 25))
    assert [point.value for point in shown] == [1.0] * 10 + [2.0] * 5 + [3.0] * 9


def test_tensorboard_forgets_a_start_without_a_checkpoint(tmp_path):
    """The next start begins at step 1 again, and nothing tells it to go back."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for value in (1.0, 2.0):
        sink = TensorBoard(tmp_path)
        for step in range(1, 5):
            sink.write({"step": step, "loss": value})
        sink._writer.flush()  # and is killed
        time.sleep(1.1)  # the names of event files have whole seconds
    shown = EventAccumulator(str(tmp_path)).Reload().Scalars("training/loss")
    assert [(point.step, point.value) for point in shown] == [(step, 2.0) for step in range(1, 5)]


def test_failing_sink_is_logged_once_and_disabled(messages):
    class Outage:
        writes = 0

        def write(self, record):
            Outage.writes += 1
            raise ConnectionError("the network is gone\nand much more")

        def close(self, state):
            raise AssertionError("a disabled sink must not be closed")

    def refused():
        raise RuntimeError("no API key")

    sink = OptionalSink("wandb", Outage)
    for step in range(3):
        sink.write({"step": step})
    sink.close("finished")
    OptionalSink("wandb", refused).write({"step": 1})
    assert Outage.writes == 1
    disabled = "wandb is disabled from now on, training continues:"
    assert messages() == [f"{disabled} the network is gone", f"{disabled} no API key"]


TRACKER = """
class Tracker:
    def __init__(self, name, folder, config):
        self.file = (folder / "tracked").open("a")
        print(name, config["run"], file=self.file)

    def write(self, step, numbers):
        print(step, numbers, file=self.file)

    def close(self, state):
        print(state, file=self.file)
        self.file.close()
"""


def test_a_tracker_of_the_user_gets_numbers_and_may_fail(tmp_path, monkeypatch, caplog):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_tracker.py").write_text(TRACKER)
    logging = schema.Logging(tracker="my_tracker:Tracker")
    sinks = open_sinks(logging, RunFolder(tmp_path), name="mine", config={"run": "values"})
    for sink in sinks:
        sink.write({"step": 1, "time": 0.0, "loss": 2.0, "losses": {"a": 3.0}})
        sink.go_back(0, exact=True)
        sink.write({"step": 1, "time": 0.0, "eval_loss": 1.0})
        sink.close("finished")
    assert (tmp_path / "tracked").read_text().splitlines() == [
        "mine values",
        "1 {'training/loss': 2.0, 'training/loss/a': 3.0}",
        "1 {'evaluation/eval_loss': 1.0}",
        "finished",
    ]
    absent = schema.Logging(tracker="my_tracker:Absent")
    open_sinks(absent, RunFolder(tmp_path), name="mine", config={})
    assert "logging.tracker is disabled from now on, training continues" in caplog.text
    assert "has no function Absent; it has Tracker" in caplog.text
