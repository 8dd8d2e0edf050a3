"""`launcher chat` with models of random weights: prompts, ends, turns, checkpoints and refusals."""

import io
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.cli.chat_model import ChatModel
from launcher.cli.main import main
from launcher.data.run_data import tokenizer_to_keep
from launcher.data.tokenizer import hugging_face_byte_tokenizer
from launcher.recipe.load import to_yaml
from launcher.recipe.schema import Data, Model
from tests.unit.models.test_export import (
    create_checkpoint,
    export_model,
    load_with_adapters,
    model_with_seed,
    recipe_of,
)
from tests.unit.models.test_load import save

CHAT = ("data.kind=chat", "data.train=[chats.jsonl]", "data.tokenizer=bytes")


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    folder = save(tmp_path_factory.mktemp("llama"), vocab_size=260, max_position_embeddings=64)
    hugging_face_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def talk(monkeypatch, capsys):
    """Returns a function that runs `launcher chat` with lines from a pipe."""

    def run(*words, lines, status=0):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        words = [str(word) for word in words]
        capsys.readouterr()
        assert main(["chat", "max_new_tokens=5", "temperature=0", *words]) == status
        return capsys.readouterr()

    return run


def greedy(model, text, count=5):
    """The most likely tokens after a text with special tokens, by whole forward passes."""
    tokenizer = hugging_face_byte_tokenizer()
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    new = []
    with torch.no_grad():
        for _ in range(count):
            token = int(model(input_ids=ids).logits[0, -1].argmax())
            if token == 256:  # <|end|>
                break
            new.append(token)
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
    return tokenizer.decode(new, skip_special_tokens=True)


def test_a_folder_answers_with_its_template_and_remembers_turns(pretrained, talk):
    model = AutoModelForCausalLM.from_pretrained(pretrained).eval()
    first = greedy(model, "<|user|>hi<|end|><|assistant|>")
    before = f"<|user|>hi<|end|><|assistant|>{first}<|end|>"
    second = greedy(model, f"{before}<|user|>more<|end|><|assistant|>")
    again = greedy(model, "<|user|>more<|end|><|assistant|>")
    assert len({first, second, again}) == 3
    printed = talk(pretrained, lines="hi\n\nmore\n/reset\nmore\n")
    assert printed.out == f"{first}\n{second}\n{again}\n"
    prompt = "'<|user|>LINE<|end|><|assistant|>'"
    assert printed.err == f"{pretrained}: each line is a turn of the chat template: {prompt}\n"


@pytest.mark.parametrize(
    ("words", "prompt"),
    [
        ((), "{}"),
        (
            (*CHAT, "data.system=Be brief"),
            "<|system|>Be brief<|end|><|user|>{}<|end|><|assistant|>",
        ),
    ],
)
def test_a_run_and_its_export_answer_alike(tmp_path, pretrained, talk, words, prompt):
    """A run on texts completed lines, and its export answered with the template of its tokenizer; the
    export had no system prompt."""
    recipe = recipe_of(f"model.path={pretrained}", "data.tokenizer=bytes", *words)
    run, export = tmp_path / "run", tmp_path / "exported/hf"
    model = model_with_seed(pretrained, 3)
    create_checkpoint(run, model, 10, recipe)
    tokenizer = tokenizer_to_keep(Data(tokenizer="bytes"), Model())
    export_model(model, export, tokenizer=tokenizer)
    (export.parent / "recipe.yaml").write_text(to_yaml(recipe))
    for folder in (run, export, export.parent):
        printed = talk(folder, lines="hi\n")
        assert printed.out == f"{greedy(model, prompt.format('hi'))}\n"
        shown = "no chat template" if prompt == "{}" else repr(prompt.format("LINE"))
        assert shown in printed.err


def test_checkpoints_of_a_run(tmp_path, pretrained, talk):
    """The newest one, or that of a step, with the run's system prompt."""
    recipe = recipe_of(f"model.path={pretrained}", *CHAT, "data.system=Be brief")
    answers = []
    for step in (10, 20):
        model = model_with_seed(pretrained, step)
        create_checkpoint(tmp_path, model, step, recipe)
        prompt = "<|system|>Be brief<|end|><|user|>hi<|end|><|assistant|>"
        answers.append(greedy(model, prompt))
    other = greedy(model, "<|system|>Sing<|end|><|user|>hi<|end|><|assistant|>")
    assert len({*answers, other}) == 3
    assert talk(tmp_path, lines="hi\n").out == f"{answers[1]}\n"
    assert talk(tmp_path, "step=10", lines="hi\n").out == f"{answers[0]}\n"
    assert talk(tmp_path, "system=Sing", lines="hi").out == f"{other}\n"
    missing = talk(tmp_path, "step=15", lines="hi", status=2).err
    assert missing.endswith("has no such checkpoint; there are those of steps 10, 20\n")
    for inside in ("hf", "checkpoints/step_00000010"):  # not the folder of the run
        missing = talk(tmp_path / inside, "step=10", lines="", status=2).err
        assert missing.endswith(
            f"no such checkpoint; give the folder of a run, such as {tmp_path}\n"
        )
    refused = talk(tmp_path, "system=a\udcff", lines="hi\n", status=2).err
    assert refused == "command line: system: holds bytes that are not UTF-8\n"


def test_a_run_on_text_completes_lines(tmp_path, pretrained, talk):
    """The tokenizer has a chat template, but the run did not train with it."""
    model = model_with_seed(pretrained, 3)
    recipe = recipe_of(f"model.path={pretrained}", "data.tokenizer=bytes")
    create_checkpoint(tmp_path, model, 10, recipe)
    printed = talk(tmp_path, lines="ab\nab\n")
    assert printed.out == 2 * f"{greedy(model, 'ab')}\n"
    assert "no chat template; each line is completed" in printed.err
    answer = greedy(model, "<|user|>ab<|end|><|assistant|>")
    assert talk(tmp_path, "--template", lines="ab\n").out == f"{answer}\n"
    refused = talk(tmp_path, "system=x", lines="ab\n", status=2)
    assert refused.err.endswith("command line: system: needs a chat template\n")


def test_an_adapter_answers(tmp_path, pretrained, talk):
    model = load_with_adapters(pretrained)
    tokenizer = tokenizer_to_keep(Data(tokenizer="bytes"), Model())
    folder = export_model(model, tmp_path / "hf", tokenizer=tokenizer)
    answer = greedy(model, "<|user|>hi<|end|><|assistant|>")
    assert answer != greedy(
        AutoModelForCausalLM.from_pretrained(pretrained), "<|user|>hi<|end|><|assistant|>"
    )
    for named in (folder, tmp_path):  # RUN_DIR/hf
        assert talk(named, lines="hi\n").out == f"{answer}\n"


def test_interrupt_stops_the_answer_and_not_the_chat(pretrained, talk, monkeypatch):
    answer, calls = ChatModel.answer, []

    def interrupted(self, messages, sampling, write):
        calls.append(messages)
        if len(calls) == 1:
            write("half")
            raise KeyboardInterrupt
        answer(self, messages, sampling, write)

    monkeypatch.setattr(ChatModel, "answer", interrupted)
    printed = talk(pretrained, lines="hi\nmore\n").out
    assert printed.startswith("half [stopped]\n")
    assert [turn["content"] for turn in calls[1]] == ["hi", "half", "more"]


def test_what_cannot_be_answered_is_refused(tmp_path, pretrained, talk):
    printed = talk(pretrained, lines="long " * 20 + "\nhi\n")
    assert "not answered: the conversation has " in printed.err
    assert "and the model 64 positions; /reset" in printed.err
    assert len(printed.out.splitlines()) == 1
    printed = talk(tmp_path / "none", lines="", status=2)
    assert printed.err.startswith(f"command line: no such folder: {tmp_path}/none (looked for")
    assert "neither a checkpoint nor a model" in talk(tmp_path, lines="", status=2).err
    for word, problem in (("top_p=0", "top_p must be above 0"), ("temperature=-1", "at least 0")):
        assert problem in talk(pretrained, word, lines="", status=2).err
    classifier = save(
        tmp_path / "classifier", auto="AutoModelForSequenceClassification", vocab_size=260
    )
    printed = talk(classifier, lines="", status=2)
    assert printed.err.endswith(
        "LlamaForSequenceClassification does not generate text; use transformers' pipeline\n"
    )


def test_answers_do_not_control_the_terminal(pretrained, talk, monkeypatch):
    def answer(self, messages, sampling, write):
        write("\x1b[2Ja\tb\nc\x9b\r")

    monkeypatch.setattr(ChatModel, "answer", answer)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    replaced = "\N{REPLACEMENT CHARACTER}"
    printed = talk(pretrained, lines="hi\n")
    assert printed.out == f"{replaced}[2Ja\tb\nc{replaced}{replaced}\n"


def test_bytes_that_are_no_text_are_replaced(pretrained, talk, monkeypatch):
    """Surrogates instead of these bytes made the tokenizer raise TypeError."""
    with monkeypatch.context() as patch:
        stdin = io.TextIOWrapper(io.BytesIO(b"h\xffi\n"), "utf-8", errors="surrogateescape")
        patch.setattr(io, "StringIO", lambda _: stdin)
        odd = talk(pretrained, lines="")
    assert odd == talk(pretrained, lines="h\N{REPLACEMENT CHARACTER}i\n")


def test_a_temperature_next_to_0_takes_the_most_likely_tokens(pretrained, talk):
    """Logits divided by it overflowed."""
    cold = talk(pretrained, "temperature=1e-320", lines="hi\n")
    assert cold == talk(pretrained, lines="hi\n")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_temperatures_that_are_none(pretrained, talk, value):
    printed = talk(pretrained, f"temperature={value}", lines="hi\n", status=2)
    assert printed.err == "command line: temperature must be a number of at least 0\n"
