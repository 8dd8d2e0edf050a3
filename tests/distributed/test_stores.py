"""Runs whose data is in an object store: they train what they train from a disk."""

import json
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from tests.distributed.launching import forked
from tests.object_store import BUCKET, Answer

RECIPE = """\
run: {name: files, max_steps: 6, dir: run, seed: 3}
model:
  config: {model_type: llama, vocab_size: 260, hidden_size: 8, intermediate_size: 16, num_hidden_layers: 1,
           num_attention_heads: 1, num_key_value_heads: 1}
  compile: false
data: {train: [], ignore_columns: [note], validation: null, kind: chat, tokenizer: bytes, sequence_length: 256, workers: 0,
       cache: cache, processes: 2}
batch: {global_batch_size: 4, micro_batch_size: 2}
strategy: {mixed_precision: null}
schedule: {kind: constant, warmup_steps: 0}
evaluation: {every_steps: null}
checkpoint: {every_steps: 3}
"""
RANKS = 2
STORED = ("ids.bin", "labels.bin", "offsets.npy", "origins.bin", "hashes.bin")


def chat(number):
    turns = (("user", f"What is {number}?"), ("assistant", f"It is {number}, and no more."))
    messages = [{"role": role, "content": content} for role, content in turns]
    return {"messages": messages, "note": random.Random(number).randbytes(5000).hex()}


def lines(numbers):
    return "".join(json.dumps(chat(number)) + "\n" for number in numbers)


@pytest.fixture
def folder(tmp_path, server):
    """9 MB of .jsonl, which is three tasks of tokenization, and a .parquet file, here and in the store."""
    server.fault = None
    files = tmp_path / "files"
    files.mkdir()
    (files / "a.jsonl").write_text(lines(range(900)))
    table = pa.Table.from_pylist([chat(number) for number in range(100)])
    pyarrow.parquet.write_table(table, files / "b.parquet", row_group_size=50)
    server.put_folder(files, "sft")
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def train(folder, server, *overrides, ranks=RANKS):
    server.requests.clear()
    server.sent.clear()
    return forked(
        Path(__file__).with_name("named_train.py"),
        f"recipe={folder}/recipe.yaml",
        *overrides,
        ranks=ranks,
        cwd=folder,
        timeout=200,
        **server.variables(),
    )


def losses(run):
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in found if "loss" in line}


def stores(cache):
    """The token stores in a cache, by the name of the store's folder."""
    return {file.parent.name: file.parent for file in cache.glob("*/*/meta.json")} | {
        file.parent.name: file.parent for file in cache.glob("*/meta.json")
    }


def by_rank(server):
    """Requests of each rank, by kind."""
    found = Counter()
    for request in server.requests:
        rank = re.search(r"app/rank(\d+)", request.agent)[1]
        kind = "LIST" if "list-type" in request.path else request.method
        found[int(rank), kind] += 1
    return found


@pytest.mark.long
def test_a_store_trains_what_a_disk_trains(folder, server):
    train(folder, server, "data.train=files/", "run.dir=local", "data.cache=one").check()
    assert server.requests == []
    away = [f"data.train=s3://{BUCKET}/sft/", "data.cache=two"]

    def every_fifth(request):
        if len(server.requests) % 5 == 0:
            return Answer(503, "SlowDown", "wait")
        return Answer(cut=2000) if len(server.requests) % 5 == 2 else None

    server.fault = every_fifth
    train(folder, server, *away, "run.dir=away").check()
    server.fault = None
    asked = by_rank(server)
    assert {rank for rank, _ in asked} == {0}, "the other rank asks nothing"
    assert losses(folder / "away") == losses(folder / "local")
    assert len(losses(folder / "local")) == 6
    (local,), (stored,) = ([*stores(folder / cache).values()] for cache in ("one", "two"))
    for name in STORED:
        there = [(each / name).exists() for each in (local, stored)]
        assert there[0] == there[1]
        if there[0]:
            assert (local / name).read_bytes() == (stored / name).read_bytes(), name
    assert np.load(local / "offsets.npy").size == 1001

    # The second start only lists: the tokens are in the cache
    server.requests.clear()
    train(folder, server, *away, "run.dir=again").check()
    second = by_rank(server)
    print("requests of the first start", dict(asked), "of the second", dict(second))
    assert {rank for rank, _ in second} == {0}
    assert sum(second.values()) <= 4
    assert second[0, "GET"] == 0
    for file in folder.rglob("*"):
        if file.is_file() and file.stat().st_size < 1 << 22 and "files" not in file.parts:
            assert b"hidden-word" not in file.read_bytes(), file


@pytest.mark.parametrize("streaming", [False, True])
def test_a_resume_sees_that_an_object_has_changed(folder, server, streaming):
    away = [f"data.train=s3://{BUCKET}/sft/*.jsonl", f"data.streaming={str(streaming).lower()}"]
    local = ["data.train=files/*.jsonl", away[1]]
    said = {}
    for place, words in (("local", local), ("away", away)):
        words = [*words, f"run.dir={place}", f"data.cache=cache-{place}"]
        train(folder, server, *words, "run.max_steps=3").check()
        (folder / "files/a.jsonl").write_text(lines(range(1, 901)))
        if place == "away":
            server.put("sft/a.jsonl", lines(range(1, 901)))
        result = train(folder, server, *words, "run.max_steps=6")
        assert result.status == 2, result.output
        error = json.loads((folder / place / "status.json").read_text())["error"]
        said[place] = re.sub("[0-9a-f]{8,}", "DIGEST", error.replace("away", "local"))
        (folder / "files/a.jsonl").write_text(lines(range(900)))
    assert said["away"].replace(f"s3://{BUCKET}/sft/", "files/") == said["local"]
    assert "is of other data" in said["away"]


def test_streaming_asks_on_one_rank(folder, server):
    words = ["data.streaming=true", "data.shard_size=1MiB", "run.max_steps=4"]
    train(folder, server, "data.train=files/", "run.dir=local", *words).check()
    train(folder, server, f"data.train=s3://{BUCKET}/sft/", "run.dir=away", *words).check()
    assert {rank for rank, _ in by_rank(server)} == {0}
    assert losses(folder / "away") == losses(folder / "local")


def test_an_error_of_a_store_ends_the_run_once(folder, server):
    server.fault = lambda request: Answer(403, "AccessDenied", "Access Denied")
    result = train(folder, server, f"data.train=s3://{BUCKET}/sft/", "run.dir=denied")
    assert result.status == 2, result.output
    assert result.output.count("no right to read it (403 AccessDenied: Access Denied)") == 1
