"""Rows of kind preference: prompts, both answers, and rows that cannot be used."""

import itertools

import numpy as np
import pytest

from launcher.data.pairs import with_shared_prompt
from launcher.data.token_store import open_store
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from tests.datasets import objective_of
from tests.unit.data.rows import write
from tests.unit.data.test_chat import bpe_tokenizer

END = 256
USER = {"role": "user", "content": "Hi"}


def answer(text):
    return {"role": "assistant", "content": text}


def pair_of(tmp_path, row, **settings):
    """Prompt and answers as the bytes of the two parts of the only document."""
    settings = {"prompt_format": "text"} | settings
    file = write(tmp_path / "rows.jsonl", [row])
    data = schema.Data(kind="preference", tokenizer="bytes", cache=str(tmp_path / "c"), **settings)
    store = open_store((str(file),), data, tokenizer="bytes", build=True)
    assert store.documents == 1
    middle = int(store.first_lengths[0])
    parts = []
    for first, last in itertools.pairwise((0, middle, len(store.ids))):
        ids, labels = store.ids[first:last], store.labels[first:last]
        known = (labels != IGNORED).tolist()
        assert known == sorted(known)  # the prompt carries no loss, and then all tokens do
        assert ids[-1] == END
        prompt = known.index(True)
        texts = [bytes(id for id in half.tolist() if id < END) for half in np.split(ids, [prompt])]
        parts.append(tuple(text.decode() for text in texts))
    return parts


def refusal(tmp_path, row):
    with pytest.raises(RecipeError) as error:
        pair_of(tmp_path, row)
    return str(error.value)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 + 2 =", "chosen": " 4", "rejected": " five"},
        {"chosen": "2 + 2 = 4", "rejected": "2 + 2 = five"},
        {"instruction": "2 + 2 =", "chosen": " 4", "rejected": " five"},
    ],
)
def test_text(row, tmp_path):
    if "instruction" in row:
        (prompt, chosen), (other, rejected) = pair_of(tmp_path, row)
        assert prompt == other
        assert "2 + 2 =" in prompt
        assert (chosen, rejected) == (" 4", " five")
    else:
        assert pair_of(tmp_path, row) == [("2 + 2 =", " 4"), ("2 + 2 =", " five")]


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt"),
    [
        ("问：好吗？答：好", "问：好吗？答：不好", "问：好吗？答："),
        ("是吗？对。", "是吗？对不起", "是吗？对"),
        ("yes:sure", "yes:surely not", "yes:"),
        ("a b:c", "a b:d", "a"),
    ],
)
def test_prompt_of_texts_without_white_space(chosen, rejected, prompt):
    """The second is the prompt of TRL's `extract_prompt`, too: languages without white space."""
    row = {"chosen": chosen, "rejected": rejected}
    found = with_shared_prompt(row, "prompt", "chosen", "rejected")
    assert found["prompt"] == prompt
    assert found["prompt"] + found["chosen"] == chosen
    assert found["prompt"] + found["rejected"] == rejected


def test_ids_of_pairs_are_those_of_trl(tmp_path):
    """TRL's DPOTrainer tokenizes prompt + answer + end as one text. So do these rows, with and
    without white space between prompt and answer."""
    rows = [("2 + 2 =", "4", "five"), ("2 + 2 =", " 4", " five"), ("un", "likely", "til")]
    folder, tokenizer = tmp_path / "tokenizer", bpe_tokenizer()
    tokenizer.save_pretrained(folder)
    for prompt, chosen, rejected in rows:
        row = {"prompt": prompt, "chosen": chosen, "rejected": rejected}
        file = write(tmp_path / "rows.jsonl", [row])
        data = schema.Data(
            kind="preference",
            cache=str(tmp_path / "c"),
            prompt_format="text",
            tokenizer=str(folder),
        )
        store = open_store((str(file),), data, tokenizer=str(folder), build=True)
        ends = np.split(store.ids, [int(store.first_lengths[0])])
        for ids, answer in zip(ends, (chosen, rejected), strict=True):
            assert ids.tolist() == tokenizer(prompt + answer + tokenizer.eos_token)["input_ids"]


def test_columns_with_other_names(tmp_path):
    row = {"question": "a", "good": "b", "bad": "c"}
    settings = {"prompt_column": "question", "chosen_column": "good", "rejected_column": "bad"}
    assert pair_of(tmp_path, row, **settings) == [("a", "b"), ("a", "c")]


def test_messages_begin_with_the_prompt():
    rows = (
        {"chosen": [USER, answer("a")], "rejected": [USER, answer("b")]},
        {"prompt": "Hi", "chosen": [USER, answer("a")], "rejected": [USER, answer("b")]},
    )
    for row in rows:
        found = with_shared_prompt(row, "prompt", "chosen", "rejected")
        assert found["prompt"] == [USER]
        assert (found["chosen"], found["rejected"]) == ([answer("a")], [answer("b")])


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "s"}]])
def test_a_prompt_that_the_answers_repeat_is_there_once(system):
    prompt = [*system, USER]
    row = {"prompt": prompt, "chosen": [*prompt, answer("a")], "rejected": [*prompt, answer("b")]}
    found = with_shared_prompt(row, "prompt", "chosen", "rejected")
    assert found == {"prompt": prompt, "chosen": [answer("a")], "rejected": [answer("b")]}


@pytest.mark.parametrize("prompt", ["Hi", [USER]])
def test_a_given_prompt_stays(prompt):
    same = answer("first")
    row = {"prompt": prompt, "chosen": [same, answer("a")], "rejected": [same, answer("b")]}
    assert with_shared_prompt(row, "prompt", "chosen", "rejected") == row


def test_a_conversation_is_rendered_with_the_template(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    row = {"chosen": [USER, answer("a")], "rejected": [USER, answer("bc")]}
    (prompt, chosen), (other, rejected) = pair_of(tmp_path, row, chat_template=str(template))
    assert prompt.startswith("<user>Hi")
    assert "<assistant>" in other
    assert (chosen, rejected) == ("a", "bc")


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "same-answer"),
        ({"prompt": "a", "chosen": "b"}, "no-column"),
        ({"prompt": "a", "chosen": "", "rejected": "b"}, "empty-answer"),
        ({"chosen": "b", "rejected": "c"}, "no-prompt"),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, "type-of-prompt"),
        ({"chosen": [USER], "rejected": [USER, answer("a")]}, "empty-answer"),
        ({"prompt": "a", "chosen": [answer("b")], "rejected": "c"}, "one-text"),
        ({"prompt": "a", "chosen": "b", "rejected": [answer("c")]}, "one-text"),
    ],
)
def test_rows_that_cannot_be_used(row, rule, words, tmp_path):
    words.check(rule, refusal(tmp_path, row))


def test_answers_that_the_template_makes_equal(tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}")
    row = {"prompt": [USER], "chosen": [answer("a")], "rejected": [answer("a ")]}
    with pytest.raises(RecipeError, match="are the same answer after the chat template"):
        pair_of(tmp_path, row, chat_template=str(template))


def test_no_pair_fits(tmp_path):
    from launcher.data.opening import open_dataset
    from launcher.data.token_store import ModelTraits

    file = write(tmp_path / "x.jsonl", [{"prompt": "a" * 30, "chosen": "b", "rejected": "c"}])
    data = schema.Data(kind="preference", sequence_length=20, cache=str(tmp_path / "c"))
    options = {"tokenizer": "bytes", "model": ModelTraits(), "build": True}
    with pytest.raises(RecipeError, match="no pair fits into 20 tokens"):
        open_dataset(data, (str(file),), objective=objective_of(data), **options)
