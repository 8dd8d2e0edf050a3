"""`launcher inspect`: what is shown is what the model is handed, and the totals are those of the rows. `launcher rows`."""

import itertools
import json
import random
import re

import numpy as np
import pytest

from launcher.cli.inspect_page import bins, load_decoder, spans, tokens_with_loss
from launcher.cli.main import run
from launcher.cli.rows import skipped_batches
from launcher.data.dataset import SequenceDataset
from launcher.data.packing import best_fit, separate, stream
from launcher.data.token_store import TokenStore
from launcher.data.tokenizer import hugging_face_byte_tokenizer
from launcher.errors import RecipeError
from launcher.models.chunked_loss import IGNORED
from tests.unit.small_recipe import SMALL


def store_of(documents, labels=None):
    def joined(rows):
        return np.concatenate([np.array(row, dtype=np.int32) for row in rows])

    return TokenStore(
        ids=joined(documents),
        labels=None if labels is None else joined(labels),
        offsets=np.cumsum([0] + [len(document) for document in documents]),
        largest_id=max(max(document) for document in documents),
    )


def chat_rows(turns):
    """Rows of input_ids and labels, as chat with the byte tokenizer has them; a turn is (asked, said)."""
    tokenizer = hugging_face_byte_tokenizer()
    for asked, said in turns:
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        labels = [
            token if mark else IGNORED
            for token, mark in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True)
        ]
        yield {"input_ids": rendered["input_ids"], "labels": labels}


@pytest.fixture
def chat(folder):
    rows = chat_rows(
        [("What is 1 + 2?\n", "It is 3 🙂"), ("A\tB\x1b[31m", "C"), ("x" * 100, "y" * 50)]
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "x.yaml").write_text(
        SMALL.replace("data.txt", "rows.jsonl") + "evaluation: {every_steps: null}\n"
    )
    return [
        "recipe=x.yaml",
        "data.kind=tokens",
        "data.sequence_length=64",
        "data.shuffle=false",
        "data.packing=true",
    ]


def printed(capsys, *arguments):
    assert run(["inspect", *arguments]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def test_what_carries_loss_stands_in_brackets_where_there_are_no_colours(chat, capsys):
    """The documents have 31, 13 and 154 tokens; best fit puts the third one's last 26 behind the first."""
    lines = printed(capsys, *chat, "samples=2")
    first = next(index for index, line in enumerate(lines) if line.startswith("sample 1 "))
    assert (
        lines[first].rstrip(" ━")
        == "sample 1 · 57 tokens · 38 with loss (67%) · 2 documents · 7 padding"
    )
    assert lines[first + 1 : first + 3] == [
        "<|user|>What is 1 + 2?↵",
        "<|end|><|assistant|>⟦It is 3 🙂<|end|>⟧",
    ]
    assert lines[first + 3].rstrip(" ┈") == "next document, 26 tokens"
    assert lines[first + 4 : first + 6] == [
        "… 128 tokens of it are in another sequence",
        f"⟦{'y' * 25}<|end|>⟧",
    ]
    second = next(index for index, line in enumerate(lines) if line.startswith("sample 2 "))
    assert lines[second].rstrip(" ━") == "sample 2 · 13 tokens · 2 with loss (15%) · 51 padding"
    assert lines[second + 1] == "<|user|>A→   B␛[31m<|end|><|assistant|>⟦C<|end|>⟧"
    assert not any(line.startswith("sample 3") for line in lines)


def test_a_sequence_in_the_middle_of_a_document_and_tokens_left_out(chat, capsys):
    lines = printed(capsys, *chat, "samples=4")
    fourth = next(index for index, line in enumerate(lines) if line.startswith("sample 4 "))
    assert (
        lines[fourth].rstrip(" ━") == "sample 4 · 64 tokens · 26 with loss (41%)"
    )  # one of them is the next sequence's first
    assert lines[fourth + 1 : fourth + 4] == [
        "… 64 tokens of it are in another sequence",
        f"{'x' * 37}<|end|><|assistant|>⟦{'y' * 25}⟧",
        "… 26 tokens of it are in another sequence",
    ]
    lines = printed(capsys, *chat, "samples=4", "tokens=10")
    third = next(index for index, line in enumerate(lines) if line.startswith("sample 3 "))
    assert lines[third + 1 : third + 4] == [
        f"<|user|>{'x' * 9}",
        "… 54 more tokens (tokens=64 shows them)",
        "",
    ]


def test_totals_and_histogram(chat, capsys):
    lines = printed(capsys, *chat, "samples=1")
    table = {
        match[1]: match[2] for line in lines if (match := re.fullmatch(r"(\S.*?)  +(\S.*)", line))
    }
    assert table["documents"] == "3"
    quantiles = {"median": "31", "90 % up to": "154", "longest": "154"}
    for quantile, tokens in quantiles.items():
        assert table[f"tokens of a document, {quantile}"] == tokens
    assert table["sequences of up to 64"] == "4"
    assert table["tokens in them"] == "198"
    assert table["tokens with loss"] == "66  (33.3%)"
    assert table["padding"] == f"{58 / 256:.1%}"
    assert table["documents that continue in another sequence"] == "1"
    assert "documents that lose their end" not in table
    marker = next(index for index, line in enumerate(lines) if "data.sequence_length 64" in line)
    drawn = [re.sub(r" *█+ *", " # ", line).strip() for line in lines]
    assert drawn[marker - 3 : marker] == [
        "9 –  16 # 1",
        "17 –  32 # 1",
        "33 –  64                                              0",
    ]
    assert [" ".join(line.split()) for line in drawn[marker + 1 : marker + 3]] == [
        "65 – 128 0",
        "129 – 256 # 1",
    ]


def test_sets_by_name(chat, capsys, folder):
    mixture = "data.train={web: {files: rows.jsonl}, talk: {files: rows.jsonl, weight: 3}}"
    sets = "data.validation={near: rows.jsonl, far: rows.jsonl}"
    lines = printed(capsys, *chat, "data.train=null", mixture, sets, "samples=4")
    shown = [
        line.partition(" tokens")[0].rpartition(" · ")[0].partition(" · ")[2]
        for line in lines
        if line.startswith("sample ")
    ]
    assert sorted(shown) == ["talk", "talk", "talk", "web"]
    assert any(re.fullmatch(r" *share of the sequences +25.0% +75.0%", line) for line in lines)
    assert [line.rstrip(" ━") for line in lines if "by tokens" in line] == [
        "web: documents by tokens",
        "talk: documents by tokens",
    ]
    assert any("small · near" in line for line in printed(capsys, *chat, sets, "set=near"))
    with pytest.raises(
        RecipeError,
        match=r"set=nera: no set of that name; did you mean near\?; there are train, validation, web, talk, near, far",
    ):
        run(["inspect", *chat, "data.train=null", mixture, sets, "set=nera"])
    with pytest.raises(RecipeError, match=r"set=validation: no set of that name; there are train$"):
        run(["inspect", *chat, "set=validation"])


def test_spans_do_not_break_characters():
    """A special token, half a character at a change of loss, an id that no tokenizer knows."""
    ids = [258, *b"a", *"🙂".encode(), *b"b", 300]
    loss = [False] * 4 + [True] * 4
    assert list(spans(ids, loss, load_decoder("bytes"))) == [
        ("<|user|>", False, True),
        ("a", False, False),
        ("🙂b<300>", True, False),
    ]
    assert [span.text for span in spans(ids[:2], loss[:2], load_decoder(None))] == ["258 97 "]


def dataset_of(documents, labels, packing, length):
    store = store_of(documents, labels)
    return SequenceDataset(store, packing(store.offsets, length), length, packing is not separate)


@pytest.mark.parametrize("packing", [stream, best_fit, separate])
@pytest.mark.parametrize("labelled", [False, True])
def test_tokens_with_loss_are_the_targets_of_the_rows(packing, labelled):
    chance = random.Random(5)
    documents = [[chance.randrange(250) for _ in range(chance.randrange(1, 60))] for _ in range(80)]
    labels = (
        [[chance.choice([IGNORED, token]) for token in document] for document in documents]
        if labelled
        else None
    )
    dataset = dataset_of(documents, labels, packing, 16)
    rows = [dataset[index] for index in range(len(dataset))]
    assert dataset.tokens == sum(len(row["input_ids"]) for row in rows)
    assert tokens_with_loss(dataset) == sum(int((row["targets"] != IGNORED).sum()) for row in rows)


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 2, 3, 900], [63, 64, 65], [1, 64, 128]])
@pytest.mark.parametrize("mark", [1, 64, 150, 10**6])
def test_every_length_has_its_bin(lengths, mark):
    rows = bins(np.array(lengths), mark=mark)
    assert [sum(low <= length <= high for length in lengths) for low, high, _ in rows] == [
        count for _, _, count in rows
    ]
    assert sum(count for _, _, count in rows) == len(lengths)
    assert all(high + 1 == low for (_, high, _), (low, _, _) in itertools.pairwise(rows))
    assert not any(low <= mark < high for low, high, _ in rows)


def test_padding_without_packing_and_a_stream(chat, capsys):
    lines = printed(capsys, *chat, "data.packing=false", "samples=1")
    assert any(
        re.fullmatch(r"padding +38.[12]%", line.rstrip()) for line in lines
    )  # rows of 31, 13, 64, 64, 26 to 64
    lines = printed(capsys, *chat, "data.streaming=true", "samples=1")
    assert "small · train   the first 1,000 rows" in lines
    assert any(re.fullmatch(r"tokens with loss +66  \(33.3%\)", line.rstrip()) for line in lines)


def test_chats_that_lose_their_end_and_rows_that_are_skipped(folder, capsys):
    talk = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "hello " * 20}]
    rows = [
        {"messages": talk},
        {"messages": talk[:1]},
        {"messages": [talk[0], {"role": "assistant", "content": "yes"}]},
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    chats = [
        "data.kind=chat",
        "data.train=data.jsonl",
        "data.sequence_length=32",
        "data.on_error=skip",
        "data.shuffle=false",
    ]
    lines = printed(capsys, "recipe=x.yaml", *chats)
    assert f"<|user|>Hi<|end|><|assistant|>⟦{('hello ' * 20)[:27]}⟧" in lines
    assert "… 94 tokens are cut off" in lines
    assert "<|user|>Hi<|end|><|assistant|>⟦yes<|end|>⟧" in lines
    assert any(
        re.fullmatch(r"documents that lose their end +1  \(94 tokens\)", line.rstrip())
        for line in lines
    )
    assert any(
        line.startswith(("skipped: data.jsonl:2: ", f"skipped: {folder}/data.jsonl:2: "))
        for line in lines
    )


def test_classes_are_named(folder, capsys):
    (folder / "data.jsonl").write_text(
        '{"text": "good", "label": "fine"}\n{"text": "bad", "label": "poor"}\n'
    )
    classes = [
        "data.kind=classification",
        "data.labels=[poor,fine]",
        "model.task=sequence_classification",
        "data.shuffle=false",
    ]
    lines = printed(capsys, "recipe=x.yaml", *classes, "data.train=data.jsonl")
    first = next(index for index, line in enumerate(lines) if line.startswith("sample 1 "))
    assert re.fullmatch(r"sample 1 · \d tokens · class 1, fine ━+", lines[first])
    assert lines[first + 1].startswith("good")


def test_data_of_a_builder_is_not_inspected(folder):
    with pytest.raises(RecipeError, match=r"^data.builder: "):
        run(["inspect", "recipe=x.yaml", "data.builder=a:b", "data.train=null"])


def rows_of(capsys, step):
    """Sequence, tokens, row and text of each line that `launcher rows` prints."""
    assert run(["rows", "run", f"step={step}"]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"step {step}: ")
    return [
        re.fullmatch(
            r" *(\d+) +((?:\S+ of )?\S+)  (\S+(?: row number \d+| row \d+)?) *(.*)", line
        ).groups()
        for line in lines
    ]


def test_rows_of_an_epoch_are_those_of_the_files(folder, capsys):
    """A mixture of lines, some of them empty or unusable, of a parquet file, and of a text file in several sequences."""
    import pyarrow
    import pyarrow.parquet

    lines = ['{"text": "one line"}', '{"text": ""}', "", "no JSON", '{"text": "another"}']
    (folder / "lines.jsonl").write_text("".join(line + "\n" for line in lines))
    table = pyarrow.table({"text": [f"row {number}" for number in range(1, 6)]})
    pyarrow.parquet.write_table(table, folder / "table.parquet", row_group_size=2)
    (folder / "long.txt").write_text("0123456789" * 5)
    (folder / "run").mkdir()
    recipe = SMALL.replace(
        "[data.txt]",
        "{a: {files: [lines.jsonl]}, b: {files: [table.parquet, long.txt], weight: 4}}",
    )
    recipe = recipe.replace("max_steps: 10", "epochs: 1").replace(
        "global_batch_size: 64", "global_batch_size: 2"
    )
    recipe = recipe.replace(
        "tokenizer: bytes",
        "tokenizer: bytes\n  sequence_length: 16\n  packing: false\n  on_error: skip",
    )
    (folder / "run/recipe.yaml").write_text(recipe)
    found = [row for step in range(1, 6) for row in rows_of(capsys, step)]
    expected = {("lines.jsonl:1", "one line<|end|>"), ("lines.jsonl:5", "another<|end|>")}
    expected |= {(f"table.parquet row {number}", f"row {number}<|end|>") for number in range(1, 6)}
    parts = [
        ("0-15", "0123456789012345"),
        ("16-31", "6789012345678901"),
        ("32-47", "2345678901234567"),
        ("48-50", "89<|end|>"),
    ]
    expected |= {("long.txt", text) for _, text in parts}
    assert {(where, text) for _, _, where, text in found} <= expected
    assert len(found) == 10, (
        "an epoch has as many sequences as the sources: 11; the last is in step 6"
    )
    tokens = {text: tokens for _, tokens, where, text in found if where == "long.txt"}
    assert tokens == {text: f"{part} of 51" for part, text in parts if text in tokens}
    assert len(tokens) >= 2
    assert [row[0] for row in found] == ["1", "2"] * 5
    assert len(rows_of(capsys, 6)) == 1
    with pytest.raises(RecipeError, match="step=7: the run ends before, with its last epoch"):
        run(["rows", "run", "step=7"])


def test_rows_that_cannot_be_listed(folder):
    def refusal(*arguments):
        with pytest.raises(RecipeError) as error:
            run(["rows", *arguments])
        return str(error.value)

    assert "it has no recipe.yaml" in refusal("run", "step=1")
    (folder / "run").mkdir()
    (folder / "run/recipe.yaml").write_text(SMALL)
    assert "step=11: the run has 10 steps (run.max_steps)" in refusal("run", "step=11")
    assert "--loss: run has neither a checkpoint nor hf/" in refusal("run", "step=1", "loss=true")
    (folder / "run/recipe.yaml").write_text(SMALL.replace("bytes", "bytes\n  streaming: true"))
    assert "run/recipe.yaml: data.streaming: the rows of a step are known only" in refusal(
        "run", "step=1"
    )


def test_batches_that_were_skipped_before_a_step(tmp_path):
    def skipped(step, *events):
        return skipped_batches(list(events), step, run=tmp_path / "run")

    start, scratch = (
        {"event": "started", "from_scratch": False},
        {"event": "started", "from_scratch": True},
    )
    rewind = {"event": "resumed", "step": 4, "reason": "not_finite", "skipped_batches": 2}
    again = {"event": "resumed", "step": 8, "reason": "loss_spike", "skipped_batches": 5}
    back = {
        "event": "resumed",
        "step": 2,
        "skipped_batches": 0,
        "origin": str(tmp_path / "run/checkpoints/step_00000002"),
    }
    history = [scratch, rewind, start, {"event": "resumed", "step": 6, "skipped_batches": 2}, again]
    assert [skipped(step, *history) for step in (1, 4, 5, 6, 8, 9)] == [0, 0, 2, 2, 2, 5]
    assert [skipped(step, *history, start, back) for step in (2, 3, 9)] == [0, 0, 0]
    assert skipped(9, *history, scratch) == 0
    other = back | {
        "origin": str(tmp_path / "other/checkpoints/step_00000002"),
        "skipped_batches": 3,
    }
    assert skipped(3, scratch, other) == 3
    with pytest.raises(RecipeError, match=r"see launcher rows .*other step=2"):
        skipped(2, scratch, other)
