"""Tokenization for several ranks: one rank uses several processes; an error ends all ranks."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.distributed.launching import PATIENCE, run, torchrun, wait_until
from tests.distributed.test_train import SMALL, TRAIN, training_metrics
from tests.run_files import status

ROWS = 12_000
SCRIPT = """
import sys, time
import launcher.data.encoder as encoder
from launcher.data.token_store import open_store
from launcher.console import configure_logging
from launcher.recipe import schema

configure_logging()
file, cache, processes, seconds = sys.argv[1:]
fast = encoder.encodable
encoder.encodable = lambda *arguments: (time.sleep(float(seconds)), fast(*arguments))[1]
data = schema.Data(kind="instruct", cache=cache, processes=int(processes))
found = open_store((file,), data, tokenizer="bytes", build=True)
print("documents:", found.documents)
"""
INSTRUCT = ["data.kind=instruct", "data.processes=2", "run.max_steps=1"]


def rows_file(folder, bad=None):
    """Writes a file that is large enough to be tokenized in worker processes."""
    row = json.dumps({"prompt": "what? " * 60, "response": "so"}) + "\n"
    with (folder / "rows.jsonl").open("w") as file:
        for number in range(ROWS):
            file.write("{\n" if number == bad else row)
    assert (folder / "rows.jsonl").stat().st_size > 4 << 20
    return folder / "rows.jsonl"


@pytest.mark.long
def test_bad_row_ends_all_ranks_and_worker_processes(tmp_path):
    file = rows_file(tmp_path, bad=ROWS - 5)
    paths = [f"data.train=[{file}]", f"data.cache={tmp_path}/cache", f"run.dir={tmp_path}/run"]
    result = torchrun(TRAIN, *SMALL, *INSTRUCT, *paths, ranks=2)
    assert result.status == 1, "torchrun exits with status 1 after any failure"
    shown = f"{file}:{ROWS - 4}: not JSON: "
    assert shown in result.output.split("Traceback")[0]
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["reason"]) == ("failed", "recipe")
    assert ended["error"].startswith(shown)
    assert list((tmp_path / "cache").rglob("*.bin")) == [], (
        "an incomplete token store was left behind"
    )


def test_worker_processes_end_with_killed_parent(tmp_path):
    """launching.run raises if a process is still alive after the command."""
    cache = tmp_path / "cache"

    def kill(process):
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        tokenizes = wait_until(lambda: len(children.read_text().split()) >= 2)
        assert tokenizes, "no worker process was started"
        os.kill(process.pid, signal.SIGKILL)
        time.sleep(1)

    result = run(
        [sys.executable, "-c", SCRIPT, rows_file(tmp_path), cache, "2", "0.01"],
        during=kill,
        PYTHONPATH=str(REPOSITORY),
    )
    assert result.status == -signal.SIGKILL


@pytest.mark.long
def test_waiting_process_takes_over_tokenization(tmp_path):
    """The processes can belong to different jobs.

    Three processes start, the process that tokenizes is killed, and one of the others takes over.
    """
    file, cache = tmp_path / "rows.jsonl", tmp_path / "cache"
    file.write_text((json.dumps({"prompt": "what?", "response": "so"}) + "\n") * 300)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}

    def start(seconds):
        command = [sys.executable, "-c", SCRIPT, str(file), str(cache), "1", str(seconds)]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    started = [start(60)]
    try:
        assert "tokenizing 1 file" in started[0].stdout.readline()
        started += [start(0.001), start(0.001)]
        time.sleep(2)  # one of the others takes over, whether it waits already or comes later
        started[0].kill()
        outputs = [process.communicate(timeout=100 * PATIENCE)[0] for process in started[1:]]
    finally:
        for process in started:
            process.kill()
            process.wait()
    assert all("documents: 300" in output for output in outputs), outputs
    assert sum("tokenizing 1 file" in output for output in outputs) == 1, outputs
    assert [path.name for path in cache.iterdir() if path.name.startswith(".")] == []


@pytest.mark.long
def test_ranks_share_the_sequences_of_many_documents(tmp_path):
    """One rank packs, the other waits. A second run finds what the first one wrote."""
    file = tmp_path / "rows.jsonl"
    with file.open("w") as rows:
        for number in range(70_000):
            rows.write(
                json.dumps({"prompt": f"{number}?", "response": "so " * (number % 7 + 1)}) + "\n"
            )
    split = ["data.packing=true", "data.validation_split=0.01", "run.max_steps=2"]
    paths = [f"data.train=[{file}]", f"data.cache={tmp_path}/cache"]
    losses = []
    for name, packed in (("first", 2), ("second", 0)):
        run_dir = tmp_path / name
        result = torchrun(TRAIN, *SMALL, *INSTRUCT, *split, *paths, f"run.dir={run_dir}", ranks=2)
        result.check()
        assert result.output.count("packing 6") + result.output.count("packing 7") == packed
        losses.append([line["loss"] for line in training_metrics(run_dir)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert len([*(tmp_path / "cache").glob("*/index-*")]) == 2
