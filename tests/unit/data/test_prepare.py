"""`launcher prepare` fills the cache, so that training needs no network."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launcher.cli.main import main
from launcher.data import index
from launcher.data.token_store import open_store
from launcher.recipe.load import load_recipe
from tests import REPOSITORY
from tests.unit.data.rows import write

MIXTURE = """\
run: {name: small, max_steps: 10}
model: {config: {model_type: llama, vocab_size: 300}}
data:
  train:
    prose: {files: prose.jsonl, weight: 2}
    ids: {files: ids.jsonl, kind: tokens, weight: 1}
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


def test_every_data_set_is_tokenized_and_cached(recipe, capsys, monkeypatch, messages):
    assert main(["prepare", recipe]) == 0
    printed = capsys.readouterr().out
    sets = {
        "train.prose": ("text", "prose.jsonl", "2 documents, 5 tokens"),
        "train.ids": ("tokens", "ids.jsonl", "1 documents, 2 tokens"),
        "validation.near": ("text", "near.txt", "1 documents, 5 tokens"),
        "validation.far": ("text", "far.csv", "1 documents, 4 tokens"),
    }
    ready = "training needs no network now, and with HF_HUB_OFFLINE=1 it requests nothing"
    assert printed.endswith(f"ready: {ready}\n")
    data = load_recipe([recipe], ranks=None).recipe.data
    for module in ("datasets", "transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    before = len(messages())
    for name, (kind, file, size) in sets.items():
        own = dataclasses.replace(data, kind=kind)
        store = open_store((file,), own, tokenizer="bytes", build=True)
        assert f"data.{name}: {size}: {store.folder} (" in printed
    assert len(messages()) == before
    assert main(["prepare", recipe]) == 0
    assert "tokenizing" not in capsys.readouterr().out


def test_large_sets_are_packed(recipe, capsys, monkeypatch):
    """The first start would pack them, while all ranks wait."""
    monkeypatch.setattr(index, "_DOCUMENTS", 2)
    rows = [json.dumps({"text": "some words"}) for _ in range(50)]
    Path("prose.jsonl").write_text("\n".join(rows) + "\n")
    words = ["data.train=[prose.jsonl]", "data.kind=text", "data.validation=null"]
    words += ["data.sequence_length=16"]
    assert main(["prepare", recipe, *words]) == 0
    assert "packed     " in capsys.readouterr().out
    (found,) = Path("cache").glob("*/index-*")
    before = found.stat().st_mtime_ns
    assert main(["prepare", recipe, *words]) == 0
    assert found.stat().st_mtime_ns == before


def test_bad_data_is_reported(recipe, capsys):
    Path("ids.jsonl").write_text('{"input_ids": [1, 2]}\n{"input_ids": [300]}\n')
    assert main(["prepare", recipe]) == 2
    message = "token id 300 is beyond the model's vocabulary of 300 (model.config.vocab_size)"
    assert capsys.readouterr().err == f"ids.jsonl:2: {message}\n"


def test_streamed_data_is_not_fetched(recipe, capsys):
    streamed = ["data.train=[prose.jsonl, me/large]", "data.streaming=true"]
    assert main(["prepare", recipe, *streamed]) == 0
    printed = capsys.readouterr().out
    read = "data.train: read while training (data.streaming), me/large through the network\n"
    assert read in printed
    assert "data.validation.near: 1 documents" in printed
    assert printed.endswith("\nready\n")


@pytest.mark.long
def test_model_in_the_hub_cache_is_found(recipe, tmp_path):
    """Runs in a subprocess, because the hub's library reads its environment variables only once."""
    from tests.unit.data.test_chat import CHATML, bpe_tokenizer, without_marks

    model = tmp_path / "home/hub/models--me--model"
    snapshot = model / "snapshots/0123abc"
    write(model / "refs/main", "0123abc")
    write(snapshot / "config.json", json.dumps({"model_type": "llama"}))
    write(snapshot / "model.safetensors", b"x" * 2**20)
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = without_marks(CHATML)
    tokenizer.save_pretrained(snapshot)
    turns = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "yes"}]
    write(Path("chat.jsonl"), [{"messages": turns}])
    Path("hub.yaml").write_text(
        "run: {name: small, max_steps: 10}\nmodel: {path: me/model}\ndata: {kind: chat, train: chat.jsonl, cache: cache}\n"
        "batch: {global_batch_size: 8, micro_batch_size: 8}\n"
    )
    home = {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}

    def prepare(*overrides):
        command = [sys.executable, "-m", "launcher.cli.main", "prepare", "recipe=hub.yaml"]
        options: Any = {"capture_output": True, "text": True, "timeout": 300}
        environment = os.environ | home | {"PYTHONPATH": str(REPOSITORY)}
        return subprocess.run([*command, *overrides], env=environment, **options)

    result = prepare()
    assert result.returncode == 0, result.stderr
    assert f"model      me/model: {snapshot} (1." in result.stdout
    assert "data.train: 1 documents, " in result.stdout
    missing = prepare("model.path=me/gone")
    assert missing.returncode == 2
    assert (
        "model.path: me/gone is not in the hub's cache and could not be fetched: " in missing.stderr
    )
    assert "Traceback" not in missing.stderr
