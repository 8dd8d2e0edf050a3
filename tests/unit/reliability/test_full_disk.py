"""Writers of the run folder on a full disk and after other errors of the file system."""

import errno
import io
import os
import subprocess
import sys

import pytest

from launcher.cli.main import main
from launcher.errors import TrainingError
from launcher.files import replace_text
from launcher.metrics.sinks import JsonLines
from launcher.reliability.json_files import read_jsonl
from launcher.reliability.run_directory import RunFolder
from tests.full_disk import fill, full_disk

ERRORS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE]


@pytest.fixture
def disk(tmp_path):
    with full_disk(tmp_path / "disk", mebibytes=1) as folder:
        yield folder


def test_files_of_a_run_on_a_full_disk(disk, messages):
    """Lines are kept and written later; the state and the reason of a failure are written at once."""
    run = RunFolder(disk / "run")
    run.create("a: 1\n")
    run.write_status("running", step=1)
    run.note("started", ranks=1)
    metrics = JsonLines(run.metrics)
    metrics.write({"step": 0})
    free = fill(disk)
    for step in range(1, 200):
        metrics.write({"step": step, "loss": 1.25, "text": "x" * 100})
        run.note("saved", step=step)
    assert len(read_jsonl(run.metrics)) < 100, "the disk is not full"
    run.write_status("failed", step=9, reason="checkpoint_failed", error="long " * 2000)
    status = run.read_status()
    assert (status["state"], status["reason"]) == ("failed", "checkpoint_failed")
    warnings = [text for text in messages() if "kept in memory, training continues" in text]
    assert [text.split()[0] for text in warnings] == [str(run.metrics), str(run.events)] * 1
    assert "No space left on device" in warnings[0]
    assert not list(run.path.glob(".*")), "scratch files were left"
    free()
    metrics.write({"step": 200})
    run.note("finished", step=200)
    metrics.close("finished")
    assert [line["step"] for line in read_jsonl(run.metrics)] == list(range(201))
    assert [line.get("step") for line in read_jsonl(run.events)] == [None, *range(1, 201)]
    assert run.metrics.read_text().count("\n") == 201


def test_removed_steps_do_not_come_back(disk):
    metrics = JsonLines(disk / "metrics.jsonl")
    for step in range(1, 40):
        metrics.write({"step": step, "text": "x" * 100})
    free = fill(disk)
    for step in range(40, 80):
        metrics.write({"step": step, "text": "x" * 100})
    assert metrics.go_back(20, exact=True) == 59
    free()
    metrics.write({"step": 21})
    assert [line["step"] for line in read_jsonl(disk / "metrics.jsonl")] == list(range(1, 22))


def test_full_disk_leaves_the_recipe_as_it_was(disk):
    replace_text(disk / "recipe.yaml", "a: 1\n" * 1000)
    fill(disk)
    with pytest.raises(OSError, match="No space"):
        replace_text(disk / "recipe.yaml", "b: 1\n" * 10_000)
    assert (disk / "recipe.yaml").read_text() == "a: 1\n" * 1000
    assert not list(disk.glob(".*"))


PRINTS = """
import sys
from pathlib import Path
from launcher.reliability.run_directory import rank_log
folder, rank = Path(sys.argv[1]), int(sys.argv[2])
with rank_log(folder, rank) as console:
    for line in range(20_000):
        print("a line that fills the log", line)
    print("trained", file=console, flush=True)
"""


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_prints_to_a_full_disk(disk, rank):
    fill(disk)
    command = [sys.executable, "-c", PRINTS, disk, str(rank)]
    with (disk / "console").open("w") as console:  # also on the full disk
        ended = subprocess.run(command, stdout=console, stderr=subprocess.PIPE, text=True)
    assert ended.returncode in (0, 120), ended.stderr  # 120: the interpreter flushed its output
    assert "Traceback" not in ended.stderr
    assert "trained" in ended.stderr


def test_full_disk_during_tokenization(disk, tmp_path, capsys):
    """The cache is named, nothing of it is left, and preparation works once there is space."""
    (tmp_path / "text.txt").write_text("some text to train on\n" * 5000)
    cache, train = disk / "cache", f"data.train=[{tmp_path}/text.txt]"
    words = ["prepare", "recipe=quickstart", train, "data.validation=null", f"data.cache={cache}"]
    for room in (0, 200 << 10):  # for the lock; for a part of the tokens
        free = fill(disk)
        os.truncate(disk / "filler", (disk / "filler").stat().st_size - room)
        assert main(words) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith(f"data.cache: {cache}")
        assert "cannot be written to: No space left on device" in error
        assert not list(cache.rglob("*.bin"))
        free()
    assert main(words) == 0
    assert list(cache.rglob("ids.bin"))


@pytest.mark.parametrize("number", ERRORS)
def test_other_errors_of_the_file_system(tmp_path, monkeypatch, messages, number):
    """Every write fails with this error for some time; the lock cannot be read either."""
    run, failing = RunFolder(tmp_path), [True]
    (tmp_path / "log").mkdir()
    opened = io.open

    def refuse(*arguments, **options):
        mode = arguments[1] if len(arguments) > 1 else options.get("mode", "r")
        if failing[0] and str(tmp_path) in str(arguments[0]) and mode != "r":
            raise OSError(number, os.strerror(number))
        return opened(*arguments, **options)

    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr("builtins.open", refuse)
    metrics = JsonLines(run.metrics)
    run.write_status("running", step=1)
    run.note("started", ranks=1)
    metrics.write({"step": 1})
    assert os.strerror(number) in " ".join(messages())
    assert len(messages()) == 3
    failing[0] = False
    run.write_status("running", step=2)
    run.note("saved", step=2)
    metrics.write({"step": 2})
    metrics.close("finished")
    assert run.read_status()["step"] == 2
    assert [line["event"] for line in read_jsonl(run.events)] == ["started", "saved"]
    assert [line["step"] for line in read_jsonl(run.metrics)] == [1, 2]


def test_superseded_run_writes_nothing_even_on_a_full_disk(tmp_path):
    class Lost:
        def check(self):
            raise TrainingError("superseded", reason="superseded")

    run = RunFolder(tmp_path)
    run.ownership = Lost()
    for write in (lambda: run.note("saved", step=1), lambda: run.write_status("running", step=1)):
        with pytest.raises(TrainingError):
            write()
    assert not list(tmp_path.iterdir())
