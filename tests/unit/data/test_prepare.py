"""`launcher prepare`: afterwards everything is in the cache, and what trains needs no network."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cli.main import main
from launcher.data.token_store import open_store
from launcher.recipe.load import load_recipe
from tests import REPOSITORY

MIXTURE = """\
run: {name: small, max_steps: 10}
model: {config: {model_type: llama, vocab_size: 300}}
data:
  train:
    prose: {files: prose.jsonl, weight: 2}
    ids: {files: ids.jsonl, kind: tokens}
  validation:
    near: near.txt
    far: [far.csv]
  tokenizer: bytes
  cache: cache
batch: {global_batch_size: 8, micro_batch_size: 8}
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(MIXTURE)
    Path("prose.jsonl").write_text('{"text": "ab"}\n{"text": "c"}\n')
    Path("ids.jsonl").write_text('{"input_ids": [1, 2]}\n')
    Path("near.txt").write_text("near")
    Path("far.csv").write_text("text\nfar\n")
    return "recipe=x.yaml"


def test_every_set_is_tokenized_and_found_again(recipe, capsys, monkeypatch, messages):
    assert main(["prepare", recipe]) == 0
    printed = capsys.readouterr().out
    for line in (
        "data.train.prose: 2 documents, 5 tokens: cache/",
        "data.train.ids: 1 documents, 2 tokens: cache/",
    ):
        assert line in printed
    for line in (
        "data.validation.near: 1 documents, 5 tokens: cache/",
        "data.validation.far: 1 documents, 4 tokens: cache/",
    ):
        assert line in printed
    assert printed.endswith(
        "ready: training needs no network now, and with HF_HUB_OFFLINE=1 it requests nothing\n"
    )
    data = load_recipe([recipe], ranks=None).recipe.data
    for module in ("datasets", "transformers", "launcher.data.tokenization"):
        monkeypatch.setitem(sys.modules, module, None)
    before = len(messages())
    for kind, files in (
        ("text", ("prose.jsonl",)),
        ("tokens", ("ids.jsonl",)),
        ("text", ("near.txt",)),
        ("text", ("far.csv",)),
    ):
        store = open_store(
            files, dataclasses.replace(data, kind=kind), tokenizer="bytes", build=True
        )
        assert str(store.folder) in printed
    assert len(messages()) == before
    assert main(["prepare", recipe]) == 0
    assert "tokenizing" not in capsys.readouterr().out


def test_bad_data_is_reported(recipe, capsys):
    Path("far.csv").write_text("text\nfar\na,b\n")
    assert main(["prepare", recipe]) == 2
    assert capsys.readouterr().err == "far.csv:3: 2 fields, but the header in line 1 has 1\n"


def test_what_is_streamed_is_not_fetched(recipe, capsys):
    streamed = ["data.train=[prose.jsonl, me/large]", "data.streaming=true"]
    assert main(["prepare", recipe, *streamed]) == 0
    printed = capsys.readouterr().out
    assert (
        "data.train: read while training (data.streaming), me/large through the network\n"
        in printed
    )
    assert "data.validation.near: 1 documents" in printed
    assert printed.endswith("\nready\n")


def test_ids_beyond_the_model_are_reported(recipe, capsys):
    Path("ids.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [300]}\n')
    assert main(["prepare", recipe]) == 2
    assert (
        capsys.readouterr().err
        == "ids.jsonl:2: token id 300 is beyond the model's vocabulary of 300 (model.config.vocab_size)\n"
    )


def test_a_model_in_the_cache_of_the_hub(recipe, tmp_path):
    """In a process of its own: the hub's library reads its environment once."""
    from tests.unit.data.test_data_chat import CHATML, bare, trained

    snapshot = tmp_path / "home/hub/models--me--model/snapshots/0123abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "home/hub/models--me--model/refs").mkdir()
    (tmp_path / "home/hub/models--me--model/refs/main").write_text("0123abc")
    (snapshot / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (snapshot / "model.safetensors").write_bytes(b"x" * 2**20)
    tokenizer = trained()
    tokenizer.chat_template = bare(CHATML)
    tokenizer.save_pretrained(snapshot)
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "yes"}]
    Path("chat.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    Path("hub.yaml").write_text(
        "run: {name: small, max_steps: 10}\nmodel: {path: me/model}\ndata: {kind: chat, train: chat.jsonl, cache: cache}\n"
        "batch: {global_batch_size: 8, micro_batch_size: 8}\n"
    )
    environment = os.environ | {
        "HF_HOME": str(tmp_path / "home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(REPOSITORY),
    }
    command = [sys.executable, "-m", "launcher.cli.main", "prepare", "recipe=hub.yaml"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert f"model      me/model: {snapshot} (1." in done.stdout
    assert "data.train: 1 documents, " in done.stdout
    gone = subprocess.run(
        [*command, "model.path=me/gone"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert gone.returncode == 2
    assert "model.path: me/gone is not in the hub's cache and could not be fetched: " in gone.stderr
    assert "Traceback" not in gone.stderr
