"""The data set of `make finetune` and the accuracy on it."""

import importlib
import json
import re
import subprocess
import sys

import pytest
import torch
import transformers

from launcher.data.tokenizer import hugging_face_byte_tokenizer
from tests import REPOSITORY

SCRIPT = REPOSITORY / "recipes/arithmetic.py"


@pytest.fixture(scope="module")
def arithmetic():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        yield importlib.import_module("arithmetic")


def test_train_and_test_sets_are_disjoint_and_correct(arithmetic, tmp_path):
    for folder in ("a", "b"):
        assert arithmetic.main(["generate", str(tmp_path / folder)]) == 0
    sums = {}
    for name in ("train", "test"):
        text = (tmp_path / "a" / f"{name}.jsonl").read_text()
        assert text == (tmp_path / "b" / f"{name}.jsonl").read_text()
        sums[name] = []
        for line in text.splitlines():
            question, reply = json.loads(line)["messages"]
            assert (question["role"], reply["role"]) == ("user", "assistant")
            first, second = map(int, re.fullmatch(r"(\d+) \+ (\d+)", question["content"]).groups())
            assert reply["content"] == str(first + second)
            sums[name].append((first, second))
    assert len(set(sums["train"] + sums["test"])) == len(sums["train"]) + len(sums["test"]) == 810
    assert len(sums["test"]) == arithmetic.TEST


class EvenAdder:
    """A model that adds correctly if the first number is even, and otherwise answers 0.

    It fills each answer with end tokens.
    """

    def eval(self):
        return self

    def generate(self, input_ids, attention_mask, **_):
        tokenizer = hugging_face_byte_tokenizer()
        rows = []
        for ids, mask in zip(input_ids, attention_mask, strict=True):
            question = tokenizer.decode(ids[mask.bool()], skip_special_tokens=True)
            assert ids[-1] == 259, "expected left padding and the start of an assistant turn"
            first, second = map(int, question.split(" + "))
            answer = f"{first + second if first % 2 == 0 else 0}".encode()
            rows.append([*ids.tolist(), *answer, *[256] * (4 - len(answer))])
        return torch.tensor(rows)


def test_accuracy_counts_exact_answers(arithmetic, tmp_path, monkeypatch, capsys):
    arithmetic.generate(tmp_path / "data")
    hugging_face_byte_tokenizer().save_pretrained(tmp_path / "hf")
    monkeypatch.setattr(
        transformers.AutoModelForCausalLM, "from_pretrained", lambda *_, **__: EvenAdder()
    )
    rows = [
        json.loads(line)["messages"][0]["content"]
        for line in (tmp_path / "data/test.jsonl").read_text().splitlines()
    ]
    even = sum(int(row.split()[0]) % 2 == 0 for row in rows)
    assert 0 < even < len(rows)
    share = arithmetic.accuracy(tmp_path / "hf", tmp_path / "data", max_new_tokens=8, batch_size=30)
    assert share == even / len(rows)
    assert (
        f"accuracy of {tmp_path}/hf: {even / len(rows):.1%} of 81 questions"
        in capsys.readouterr().out
    )


def test_missing_argument_prints_usage(arithmetic, capsys):
    assert arithmetic.main(["generate"]) == 2
    assert "generate FOLDER" in capsys.readouterr().err


def test_orders_are_json_and_those_of_the_test_set_are_others(tmp_path):
    script = SCRIPT.with_name("smollm2.py")
    subprocess.run([sys.executable, script, "generate", tmp_path], check=True, timeout=60)
    rows = {
        name: [
            json.loads(line)["messages"]
            for line in (tmp_path / f"{name}.jsonl").read_text("utf-8").splitlines()
        ]
        for name in ("train", "test")
    }
    assert {name: len(part) for name, part in rows.items()} == {"train": 300, "test": 50}
    asked = [messages[0]["content"] for part in rows.values() for messages in part]
    assert len(set(asked)) == 350
    for question, answer in rows["train"] + rows["test"]:
        order = json.loads(answer["content"])
        assert list(order) == ["name", "city", "item", "count"]
        assert all(str(value) in question["content"] for value in order.values())


def test_preferences_are_pairs_of_styles_of_sums_that_are_not_tested(tmp_path):
    script = SCRIPT.with_name("preferences.py")
    subprocess.run([sys.executable, script, "generate", tmp_path], check=True, timeout=60)
    rows = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("chats", "pairs", "test")
    }
    assert {name: len(part) for name, part in rows.items()} == {
        "chats": 1458,
        "pairs": 729,
        "test": 81,
    }
    asked = {
        name: {row["chosen"][0]["content"] for row in rows[name]} for name in ("pairs", "test")
    }
    assert not asked["pairs"] & asked["test"]
    for row in rows["pairs"]:
        first, second = map(int, row["chosen"][0]["content"].split(" + "))
        assert row["chosen"][1]["content"] == f"It is {first + second}."
        assert row["rejected"][1]["content"] == str(first + second)
