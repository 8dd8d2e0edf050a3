"""`launcher inspect`: samples as the model receives them, totals over the rows. `launcher rows`."""

import base64
import io
import itertools
import re
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from launcher.checkpoint.files import commit, scratch_folder
from launcher.cli.inspect_own import describe, picture_of
from launcher.cli.inspect_page import _open, bins, load_decoder, spans
from launcher.cli.main import run
from launcher.cli.rows import positions_of
from launcher.data.batching import SampleOrder
from launcher.data.packing import pack
from launcher.data.token_store import TokenStore
from launcher.data.tokenizer import hugging_face_byte_tokenizer
from launcher.errors import RecipeError
from launcher.files import write_file
from launcher.models.micro_batch import IGNORED
from launcher.recipe.data_sets import data_sets
from launcher.recipe.load import load_recipe
from tests.datasets import dataset_of
from tests.distributed import vision
from tests.image_models import make_image, make_model
from tests.unit.data.rows import write
from tests.unit.small_recipe import SMALL
from tests.video_files import make_video


def chat_rows(turns):
    """Yields rows of input_ids and labels like data.kind=chat with the byte tokenizer.

    Each turn is a pair (user message, assistant message).
    """
    tokenizer = hugging_face_byte_tokenizer()
    for question, answer in turns:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        rendered = tokenizer.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        ids, masks = rendered["input_ids"], rendered["assistant_masks"]
        labels = [token if mark else IGNORED for token, mark in zip(ids, masks, strict=True)]
        yield {"input_ids": ids, "labels": labels}


@pytest.fixture
def chat(folder):
    turns = [("What is 1 + 2?\n", "It is 3 🙂"), ("A\tB\x1b[31m", "C"), ("x" * 100, "y" * 50)]
    write(folder / "rows.jsonl", chat_rows(turns))
    recipe = SMALL.replace("data.txt", "rows.jsonl") + "evaluation: {every_steps: null}\n"
    (folder / "x.yaml").write_text(recipe)
    data = ("kind=tokens", "sequence_length=64", "shuffle=false", "packing=true")
    return ["recipe=x.yaml", *(f"data.{setting}" for setting in data)]


def inspect(capsys, *arguments):
    assert run(["inspect", *arguments]) == 0
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


def sample(lines, number):
    """Returns the heading of a sample and the lines after it."""
    first = next(at for at, line in enumerate(lines) if line.startswith(f"sample {number} "))
    return lines[first].rstrip(" ━"), lines[first + 1 :]


def table(lines):
    matches = (re.fullmatch(r"(\S.*?)  +(\S.*)", line) for line in lines)
    return {match[1]: match[2] for match in matches if match}


def test_text_with_loss_is_in_brackets(chat, capsys):
    """The documents have 31, 13 and 154 tokens.

    Best-fit packing puts the last 26 tokens of the third document after the first document.
    """
    lines = inspect(capsys, *chat, "samples=2")
    heading, text = sample(lines, 1)
    assert heading == "sample 1 · 57 tokens · 38 with loss (67%) · 2 documents · 7 padding"
    assert [line.rstrip(" ┈") for line in text[:5]] == [
        "<|user|>What is 1 + 2?↵",
        "<|end|><|assistant|>⟦It is 3 🙂<|end|>⟧",
        "next document, 26 tokens",
        "… 128 tokens of it come before these",
        f"⟦{'y' * 25}<|end|>⟧",
    ]
    heading, text = sample(lines, 2)
    assert heading == "sample 2 · 13 tokens · 2 with loss (15%) · 51 padding"
    assert text[0] == "<|user|>A→   B␛[31m<|end|><|assistant|>⟦C<|end|>⟧"
    assert not any(line.startswith("sample 3") for line in lines)
    # A sequence from the middle of a document; its last target is the next sequence's first token
    # The first 64 tokens of the document have no target, and are left out
    heading, text = sample(inspect(capsys, *chat, "samples=3"), 3)
    assert heading == "sample 3 · 64 tokens · 26 with loss (41%)"
    assert text[:3] == [
        "… 64 tokens of it come before these",
        f"{'x' * 37}<|end|><|assistant|>⟦{'y' * 25}⟧",
        "… 26 tokens of it come after these",
    ]
    _, text = sample(inspect(capsys, *chat, "samples=3", "tokens=10"), 3)
    assert text[1:4] == ["x" * 10, "… 54 more tokens (tokens=64 shows them)", ""]


def test_weights_other_than_one_are_shown(folder, capsys):
    """Those of parts times those of messages; a part of weight 0 is text without loss."""
    answers = [
        {"role": "assistant", "reasoning_content": "why", "content": "A", "weight": 0.5},
        {"role": "assistant", "reasoning_content": "how", "content": "B"},
    ]
    rows = [{"messages": [{"role": "user", "content": "Hi"}, answer]} for answer in answers]
    write(folder / "rows.jsonl", rows)
    recipe = SMALL.replace("data.txt", "rows.jsonl") + "evaluation: {every_steps: null}\n"
    (folder / "x.yaml").write_text(recipe)
    keys = ("kind=chat", "chat_template=qwen3", "message_weights=true", "shuffle=false")
    data = ["recipe=x.yaml", *(f"data.{key}" for key in keys), "data.packing=false"]
    lines = inspect(capsys, *data, "samples=2", "data.loss_weights={reasoning: 0.2}")
    assert "⟦tokens with loss⟧, ⟦0.5×those with half the weight⟧, and tokens without" in lines
    start = "⟦0.1×<think>↵"
    text = sample(lines, 1)[1]
    assert text[text.index(start) :][:5] == [start, "why↵", "</think>↵", "↵", "⟧⟦0.5×A<|im_end|>↵"]
    start, (_, text) = "⟦0.2×<think>↵", sample(lines, 2)
    assert text[text.index(start) :][3:5] == ["↵", "⟧⟦B<|im_end|>↵"]
    _, text = sample(inspect(capsys, *data, "samples=1", "data.loss_weights={reasoning: 0}"), 1)
    assert text[text.index("why↵") :][:4] == ["why↵", "</think>↵", "↵", "⟦0.5×A<|im_end|>↵"]


def test_totals_and_histogram(chat, capsys):
    lines = inspect(capsys, *chat, "samples=1")
    assert {
        "documents": "3",
        "tokens of a document, median": "31",
        "tokens of a document, 90 % up to": "154",
        "tokens of a document, longest": "154",
        "sequences of up to 64": "3",
        "tokens in them": "134",
        "tokens with loss": "66  (49.3%)",
        "padding": f"{58 / 192:.1%}",
        "documents that continue in another sequence": "1",
    }.items() <= table(lines).items()
    assert "documents that lose their end" not in table(lines)
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


def test_data_sets_are_selected_by_name(chat, capsys, folder):
    mixture = (
        "data.train={web: {files: rows.jsonl, weight: 1}, talk: {files: rows.jsonl, weight: 3}}"
    )
    sets = "data.validation={near: rows.jsonl, far: rows.jsonl}"
    lines = inspect(capsys, *chat, "data.train=null", mixture, sets, "samples=4")
    shown = [
        line.partition(" tokens")[0].rpartition(" · ")[0].partition(" · ")[2]
        for line in lines
        if line.startswith("sample ")
    ]
    assert sorted(shown) == ["talk", "talk", "talk", "web"]
    assert any(re.fullmatch(r" *share of the sequences +25.0% +75.0%", line) for line in lines)
    histograms = [line.rstrip(" ━") for line in lines if "by tokens" in line]
    assert histograms == ["web: documents by tokens", "talk: documents by tokens"]
    assert any("small · near" in line for line in inspect(capsys, *chat, sets, "set=near"))
    both = "data.validation={web: rows.jsonl}"
    lines = inspect(capsys, *chat, "data.train=null", mixture, both, "set=web", "samples=1")
    assert any("in the order of the run" in line for line in lines)  # the training set of that name
    known = "there are train, validation, web, talk, near, far"
    with pytest.raises(RecipeError, match=rf"set=nera: no .*; did you mean near\?; {known}"):
        run(["inspect", *chat, "data.train=null", mixture, sets, "set=nera"])
    with pytest.raises(RecipeError, match=r"set=validation: no set of that name; there are train$"):
        run(["inspect", *chat, "set=validation"])


def test_spans_do_not_break_characters(tmp_path):
    """Covers a special token, a change of loss inside a character, and an unknown token id."""
    ids = [258, *b"a", *"🙂".encode(), *b"b", 300]
    loss = [False] * 4 + [True] * 4
    assert list(spans(ids, loss, load_decoder("bytes"))) == [
        ("<|user|>", False, True, 1.0),
        ("a", False, False, 1.0),
        ("🙂b<300>", True, False, 1.0),
    ]
    (tmp_path / "config.json").write_text("{}")  # of a model without a tokenizer
    for decoder in (load_decoder(None), load_decoder(None, str(tmp_path))):
        assert [span.text for span in spans(ids[:2], loss[:2], decoder)] == ["258 97 "]
    with pytest.raises(RecipeError, match="no tokenizer could be loaded"):
        load_decoder(str(tmp_path))


@pytest.mark.parametrize(
    ("kind", "packing"), [("text", True), ("tokens", True), ("tokens", False), ("chat", True)]
)
@pytest.mark.parametrize("labelled", [False, True])
def test_tokens_with_loss_match_the_targets(kind, packing, labelled, monkeypatch):
    monkeypatch.setattr("launcher.data.packing._COUNTED_TOKENS", 100)
    generator = np.random.default_rng(5)
    offsets = np.cumsum([0, *generator.integers(1, 60, 80)])
    ids = generator.integers(0, 250, offsets[-1], dtype=np.int32)
    labels = np.where(generator.random(len(ids)) < 0.5, ids, IGNORED) if labelled else None
    store = TokenStore(ids=ids, labels=labels, offsets=offsets)
    sequences = pack(offsets, kind, packing=packing, sequence_length=16, labels=labels)
    dataset = dataset_of(store, sequences, 16, packing)
    rows = [dataset[index] for index in range(len(dataset))]
    assert dataset.tokens == sum(len(row["input_ids"]) for row in rows)
    counts = [int((row["targets"] != IGNORED).sum()) for row in rows]
    assert min(counts) > 0
    assert sequences.targets == sum(counts)
    if kind != "chat":  # nothing is cut off, so no target is lost
        targets = ids if labels is None else labels
        firsts = int((targets[offsets[:-1]] != IGNORED).sum())
        assert sum(counts) == int((targets != IGNORED).sum()) - firsts


@pytest.mark.parametrize("lengths", [[1], [5, 5, 5], [1, 2, 3, 900], [63, 64, 65], [1, 64, 128]])
@pytest.mark.parametrize("mark", [1, 64, 150, 10**6])
def test_histogram_bins_cover_every_length(lengths, mark):
    rows = bins(np.array(lengths), mark=mark)
    for low, high, count in rows:
        assert sum(low <= length <= high for length in lengths) == count
    assert sum(count for _, _, count in rows) == len(lengths)
    assert all(high + 1 == low for (_, high, _), (low, _, _) in itertools.pairwise(rows))
    assert not any(low <= mark < high for low, high, _ in rows)


def test_padding_without_packing_and_with_streaming(chat, capsys):
    lines = inspect(capsys, *chat, "data.packing=false", "samples=1")
    assert table(lines)["padding"] in (
        "47.6%",
        "47.7%",
    )  # rows of 31, 13, 64 and 26 tokens, padded to 64
    lines = inspect(capsys, *chat, "data.streaming=true", "samples=1")
    assert "small · train   the first 1,000 rows" in lines
    assert table(lines)["tokens with loss"] == "66  (49.3%)"


def test_padding_is_that_of_the_device_that_trains(chat, capsys, monkeypatch):
    """Rows on a GPU have multiples of 128 tokens."""

    def padding(*more):
        long = ["data.packing=false", "data.sequence_length=512", "batch.micro_batch_size=1"]
        lines = inspect(capsys, *chat, *long, "samples=1", *more)
        return table(lines)["padding"]

    assert padding() == "0.0%"
    monkeypatch.setattr("launcher.cli.inspect_page.torch.cuda.is_available", lambda: True)
    share = 1 - (31 + 13 + 154) / (128 + 128 + 256)
    assert float(padding().rstrip("%")) == pytest.approx(100 * share, abs=0.5)  # of 64 rows
    assert padding("run.device=cpu") == "0.0%"


def test_truncated_chats_and_skipped_rows_are_reported(folder, capsys):
    question, long_text = {"role": "user", "content": "Hi"}, "hello " * 20
    answers = [[{"role": "assistant", "content": text}] for text in (long_text, "yes")]
    rows = [[question, *answers[0]], [question], [question, *answers[1]]]
    write(folder / "data.jsonl", [{"messages": row} for row in rows])
    data = ("kind=chat", "train=data.jsonl", "sequence_length=32", "on_error=skip", "shuffle=false")
    options = ["recipe=x.yaml", *(f"data.{setting}" for setting in data)]
    dropped = table(inspect(capsys, *options))
    assert dropped["documents longer than a sequence, dropped"] == "1"
    lines = inspect(capsys, *options, "data.overlong=cut")
    assert f"<|user|>Hi<|end|><|assistant|>⟦{long_text[:27]}⟧" in lines
    assert "… 94 tokens are cut off" in lines
    assert "<|user|>Hi<|end|><|assistant|>⟦yes<|end|>⟧" in lines
    assert table(lines)["documents that lose their end"] == "1  (94 tokens)"
    at = lines.index("1 rows are skipped; a run lists them in skipped_rows.jsonl:")
    assert lines[at + 1].startswith("  1 like data.jsonl:2: ")


def test_class_names_are_shown(folder, capsys):
    rows = [{"text": "good", "label": "fine"}, {"text": "bad", "label": "poor"}]
    write(folder / "data.jsonl", rows)
    classes = ["kind=classification", "labels=[poor,fine]", "shuffle=false", "train=data.jsonl"]
    task = "model.task=sequence_classification"
    lines = inspect(capsys, "recipe=x.yaml", task, *(f"data.{setting}" for setting in classes))
    heading, text = sample(lines, 1)
    assert re.fullmatch(r"sample 1 · \d tokens · class 1, fine", heading)
    assert text[0].startswith("good")
    assert "tokens with loss" not in table(lines)  # the targets are classes


def test_unknown_keys_of_the_model_are_refused(folder):
    expected = r"model.config.vocab_sise=300: unknown key; did you mean vocab_size\?"
    for command in ("inspect", "prepare"):
        with pytest.raises(RecipeError, match=expected):
            run([command, "recipe=x.yaml", "model.config.vocab_sise=300"])


OWN = """
run: {name: own, max_steps: 2, seed: 4}
model: {builder: "tests.distributed.vision:model"}
data: {builder: "tests.distributed.vision:data"}
batch: {global_batch_size: 8, micro_batch_size: 4}
"""


def test_samples_of_a_builder_are_shown(folder, capsys):
    """The samples are those of the run, in its order; the page has their pictures."""
    (folder / "own.yaml").write_text(OWN)
    lines = inspect(capsys, "recipe=own.yaml", "samples=2", "out=own.html")
    order = SampleOrder(samples=50, seed=4, shuffle=True)
    bars = vision.Bars(0, 50)
    for number in (1, 2):
        heading, text = sample(lines, number)
        index = order.sample(number - 1)
        assert heading.startswith(f"sample {number} · index {index}")
        image, label = bars[index]
        first = ", ".join(f"{value:.4g}" for value in image.flatten()[:8].tolist())
        assert text[0].startswith("[0]  float32 (1, 8, 8), from -")
        assert text[0].endswith(f": {first}, …")
        assert text[1] == f"[1]  int: {label}"
    (at,) = [number for number, line in enumerate(lines) if line.startswith("micro-batch")]
    assert lines[at].startswith("micro-batch · 4 samples · 4 targets")
    assert lines[at + 1].startswith("['images']  float32 (4, 1, 8, 8), from ")
    assert lines[at + 2].startswith("['labels']  int64 (4,), from 0 to 1: ")
    assert table(lines)["samples"] == "50"
    sources = re.findall(
        r'<img src="data:image/png;base64,([^"]*)"', (folder / "own.html").read_text()
    )
    assert len(sources) == 2
    with Image.open(io.BytesIO(base64.b64decode(sources[0]))) as picture:
        assert picture.size == (96, 96)
        small = np.asarray(picture.resize((8, 8), Image.Resampling.NEAREST))
    image = bars[order.sample(0)][0][0].numpy()
    assert np.abs(small - (image - image.min()) / np.ptp(image) * 255).max() < 1


def test_validation_sets_of_a_builder(folder, capsys):
    (folder / "own.yaml").write_text(OWN)
    lines = inspect(capsys, "recipe=own.yaml", "set=validation", "samples=1")
    heading, _ = sample(lines, 1)
    assert heading.startswith("sample 1 · index 0")
    assert table(lines)["samples"] == "10"
    with pytest.raises(RecipeError, match=r"set=valid: no set .*; did you mean validation\?"):
        run(["inspect", "recipe=own.yaml", "set=valid"])
    with pytest.raises(RecipeError, match=r"tokens: the samples of data.builder are tensors"):
        run(["inspect", "recipe=own.yaml", "tokens=9"])


def test_values_of_samples_are_described():
    value = {
        "ids": np.arange(100000, 100020),
        "odd": [torch.tensor([1.0, float("nan")]), torch.empty(0, 3), None],
        "name": "x" * 100,
        "picture": Image.new("L", (5, 6)),
        "many": list(range(20)),
        "none": {},
    }
    lines = [line for line, _ in describe(value)]
    assert lines[0].startswith(
        "['ids']  array of int64 (20,), from 1e+05 to 1e+05: 100000, 100001,"
    )
    assert lines[1:4] == [
        "['odd'][0]  float32 (2,), from 1 to 1, 1 values not finite: 1, nan",
        "['odd'][1]  float32 (0, 3)",
        "['odd'][2]  NoneType: None",
    ]
    assert lines[4] == f"['name']  str: '{'x' * 79}…"
    assert lines[5] == "['picture']  PIL image, 5 x 6 pixels, L"
    assert lines[6] == "['many'][0]  int: 0"
    assert lines[-2:] == ["['many']  … 4 more items", "['none']  empty dict"]


@pytest.mark.parametrize(
    ("shape", "dtype", "mode"),
    [
        ((3, 8, 9), torch.float32, "RGB"),
        ((8, 9, 3), torch.uint8, "RGB"),
        ((4, 8, 9), torch.float16, "RGBA"),
        ((1, 8, 9), torch.int64, "L"),
        ((8, 9), torch.bool, "L"),
        ((8, 9), torch.float32, None),
        ((3, 7, 9), torch.float32, None),
        ((5, 8, 9), torch.float32, None),
        ((2, 3, 8, 9), torch.uint8, None),
    ],
)
def test_tensors_that_look_like_images_have_pictures(shape, dtype, mode):
    picture = picture_of(torch.ones(shape, dtype=dtype))
    assert (picture and picture.mode) == mode
    if picture is not None:
        assert picture.size == (99, 88)
        whole = {torch.uint8: 1, torch.int64: 1}.get(dtype, 255)
        assert np.asarray(picture).max() == np.asarray(picture).min() == whole


def rows_of(capsys, step):
    """Returns the sequence, tokens, row and text of each line that `launcher rows` prints."""
    assert run(["rows", "run", f"step={step}"]) == 0
    first, _, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith(f"step {step}: ")
    if lines[-1].startswith("shares of the "):  # of a mixture with weights
        del lines[-1]
    return [
        re.fullmatch(
            r" *(\d+) +((?:\S+ of )?\S+)  (\S+(?: row number \d+| row \d+)?) *(.*)", line
        ).groups()
        for line in lines
    ]


def test_rows_of_an_epoch_match_the_files(folder, capsys):
    """A mixture of a JSON Lines file, a parquet file and a text file.

    Some JSON lines are empty or invalid. The text file spans several sequences.
    """
    lines = ['{"text": "one line"}', '{"text": ""}', "", "no JSON", '{"text": "another"}']
    write(folder / "lines.jsonl", "".join(line + "\n" for line in lines))
    texts = [f"row {number}" for number in range(1, 6)]
    write(folder / "table.parquet", texts, row_group_size=2)
    write(folder / "long.txt", "0123456789" * 5)
    mixture = (
        "{a: {files: [lines.jsonl], weight: 1}, b: {files: [table.parquet, long.txt], weight: 4}}"
    )
    data = "tokenizer: bytes\n  sequence_length: 16\n  packing: false\n  on_error: skip"
    recipe = SMALL.replace("[data.txt]", mixture).replace("tokenizer: bytes", data)
    recipe = recipe.replace("max_steps: 10", "epochs: 1").replace("_size: 64", "_size: 2")
    write(folder / "run/recipe.yaml", recipe)
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
    assert len(found) == 10, "an epoch has 11 sequences; the last one is in step 6"
    tokens = {text: tokens for _, tokens, where, text in found if where == "long.txt"}
    assert tokens == {text: f"{part} of 51" for part, text in parts if text in tokens}
    assert len(tokens) >= 2
    assert [row[0] for row in found] == ["1", "2"] * 5
    assert len(rows_of(capsys, 6)) == 1
    with pytest.raises(RecipeError, match="step=7: the run ends before, with its last epoch"):
        run(["rows", "run", "step=7"])


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        (
            "chat",
            {
                "messages": [
                    {"role": "system", "content": "A long introduction. " * 9},
                    {"role": "user", "content": "Hello"},
                    {"role": "assistant", "content": "Hi"},
                    {"role": "user", "content": "What is\n1 + 1?"},
                    {"role": "assistant", "content": "2"},
                ]
            },
        ),
        ("instruct", {"prompt": "What is\n1 + 1?", "response": "2"}),
        (
            "preference",
            {
                "chosen": [
                    {"role": "user", "content": "What is\n1 + 1?"},
                    {"role": "assistant", "content": "2"},
                ],
                "rejected": [
                    {"role": "user", "content": "What is\n1 + 1?"},
                    {"role": "assistant", "content": "3"},
                ],
            },
        ),
    ],
)
def test_rows_show_the_last_turn_of_the_user(folder, capsys, kind, rows):
    """They showed the first 60 characters, which are the same in all rows with a system prompt."""
    write(folder / "chats.jsonl", [rows] * 4)
    data = f"tokenizer: bytes\n  kind: {kind}\n  sequence_length: 300\n  packing: false"
    recipe = SMALL.replace("data.txt", "chats.jsonl").replace("tokenizer: bytes", data)
    recipe = recipe.replace("kind: text\n", "").replace("_size: 64", "_size: 2")
    write(folder / "run/recipe.yaml", recipe)
    assert [text for *_, text in rows_of(capsys, 1)] == ["What is 1 + 1?"] * 2


def test_rows_refuses_missing_runs_and_steps(folder, capsys):
    def error_message(*arguments):
        with pytest.raises(RecipeError) as error:
            run(["rows", *arguments])
        return str(error.value)

    assert "it has no recipe.yaml" in error_message("run", "step=1")
    (folder / "run").mkdir()
    (folder / "run/recipe.yaml").write_text(SMALL)
    assert "step=11: the run has 10 steps (run.max_steps)" in error_message("run", "step=11")
    capsys.readouterr()
    assert "--loss: run has neither a checkpoint nor hf/" in error_message(
        "run", "step=1", "--loss"
    )
    assert capsys.readouterr().out == "", "a title without its table"


def test_rows_of_a_stream(folder, capsys):
    """Each row is in one step of each pass, and the steps do not depend on which is asked for first.
    Nothing is left in the cache."""
    write(folder / "rows.jsonl", [f"row {number:02}" for number in range(60)])
    data = "tokenizer: bytes\n  sequence_length: 8\n  packing: false\n  shard_size: 0.4KB"
    recipe = SMALL.replace("data.txt", "rows.jsonl").replace("tokenizer: bytes", data)
    recipe = recipe.replace("_size: 64", "_size: 6").replace("kind: text", "streaming: true")
    write(folder / "run/recipe.yaml", recipe)
    last = rows_of(capsys, 10)
    first = [row for step in range(1, 11) for row in rows_of(capsys, step)]
    assert first[-6:] == last
    texts = {where: text for _, _, where, text in first}
    assert texts == {f"rows.jsonl:{number + 1}": f"row {number:02}<|end|>" for number in range(60)}
    assert not [*folder.rglob("rows-*")]


def test_rows_of_a_run_with_damaged_checkpoints(folder, capsys):
    write(folder / "data.txt", "abcdefgh" * 400)
    write(folder / "run/recipe.yaml", SMALL)
    (folder / "run/checkpoints/step_00000009").mkdir(parents=True)
    expected = rows_of(capsys, 1)
    scratch = scratch_folder(folder / "run/checkpoints", 10)
    commit(
        scratch, step=10, ranks=1, files={"state.json": write_file(scratch / "state.json", b"[")}
    )
    with pytest.raises(RecipeError, match=r"step_00000010 is damaged: state.json cannot be read"):
        run(["rows", "run", "step=1"])
    (folder / "run/checkpoints/step_00000010/commit.json").unlink()
    assert rows_of(capsys, 1) == expected
    shutil.rmtree(folder / "run/checkpoints")
    (folder / "run/checkpoints").symlink_to("checkpoints")
    with pytest.raises(RecipeError, match="run/checkpoints cannot be read: Too many levels"):
        run(["rows", "run", "step=1"])


def positions(tmp_path, step, *events):
    return positions_of(list(events), step, run=tmp_path / "run", global_batch_size=10)


def test_skipped_batches_before_a_step_are_counted(tmp_path):
    def skipped(step, *events):
        found, count = positions(tmp_path, step, *events)
        assert found == range(10 * (step - 1 + count), 10 * (step + count))
        return count

    start, scratch = ({"event": "started", "from_scratch": scratch} for scratch in (False, True))
    rewind = {"event": "resumed", "step": 4, "reason": "not_finite", "skipped_batches": 2}
    again = {"event": "resumed", "step": 8, "reason": "loss_spike", "skipped_batches": 5}
    origin = str(tmp_path / "run/checkpoints/step_00000002")
    back = {"event": "resumed", "step": 2, "skipped_batches": 0, "origin": origin}
    history = [scratch, rewind, start, {"event": "resumed", "step": 6, "skipped_batches": 2}, again]
    assert [skipped(step, *history) for step in (1, 4, 5, 6, 8, 9)] == [0, 0, 2, 2, 2, 5]
    assert [skipped(step, *history, start, back) for step in (2, 3, 9)] == [0, 0, 0]
    assert skipped(9, *history, scratch) == 0
    other = back | {"origin": origin.replace("/run/", "/other/"), "skipped_batches": 3}
    assert skipped(3, scratch, other) == 3
    with pytest.raises(RecipeError, match=r"see launcher rows .*other step=2"):
        skipped(2, scratch, other)


def test_positions_follow_changes_of_the_batch_size(tmp_path):
    """4 steps of 10 samples, 3 of 6, which end an epoch of 55 samples, then 8 a step; a rewind."""

    def start(step, samples, size, skipped=0):
        more = {"step": step, "samples": samples, "skipped_batches": skipped}
        built = {"event": "built", "global_batch_size": size}
        return [
            {"event": "started"},
            built,
            {"event": "resumed", **more, "global_batch_size": size},
        ]

    history = [
        {"event": "started", "from_scratch": True},
        {"event": "built", "global_batch_size": 10},
    ]
    history += start(4, 40, 6) + start(7, 55, 8) + start(9, 87, 8, skipped=2)[2:]
    expected = {4: (30, 40), 5: (40, 46), 7: (52, 55), 8: (55, 63), 9: (63, 71), 10: (87, 95)}
    found = {step: positions(tmp_path, step, *history) for step in expected}
    assert {step: (one.start, one.stop) for step, (one, _) in found.items()} == expected
    assert [skipped for _, skipped in found.values()] == [0, 0, 0, 0, 0, 2]
    scratch = [
        {"event": "started", "from_scratch": True},
        {"event": "built", "global_batch_size": 5},
    ]
    assert positions(tmp_path, 7, *history, *scratch) == (range(30, 35), 0)


def test_the_page_as_html_shows_the_images_of_rows(folder, capsys):
    """Small copies of the images are in the page itself, and texts are escaped."""
    make_model(folder / "model", "qwen2_5_vl")
    make_image(folder / "wide.png", size=(500, 250))
    user = {"role": "user", "content": "<image>Is <b>1 < 2</b>?"}
    rows = [{"messages": [user, {"role": "assistant", "content": "Yes"}], "images": ["wide.png"]}]
    write(folder / "rows.jsonl", rows)
    recipe = (
        "run: {name: '<i>{x}', max_steps: 1}\nmodel: {path: model}\nimages: {train: none}\n"
        "data: {train: rows.jsonl, sequence_length: 256, workers: 0}\n"
        "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
        "optimizer: {learning_rate: 0.1}\n"
    )
    (folder / "x.yaml").write_text(recipe)
    lines = inspect(capsys, "recipe=x.yaml", "samples=1", "out=pages/page.html")
    [line] = [line for line in lines if line.startswith("image: ")]
    assert re.search(r"/wide.png, 500 x 250 pixels: \d+ tokens, \d+ x \d+$", line)
    page = (folder / "pages/page.html").read_text()
    assert "&lt;b&gt;1 &lt; 2&lt;/b&gt;" in page
    assert "<title>&lt;i&gt;{x} · train</title>" in page
    assert "<b>" not in page
    [picture] = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="">image: ', page)
    assert Image.open(io.BytesIO(base64.b64decode(picture))).size == (240, 120)
    assert "500 x 250 pixels" in page
    (folder / "wide.png").unlink()
    with pytest.raises(RecipeError, match=r"data: .*wide.png: no such file"):
        run(["inspect", "recipe=x.yaml"])


def test_the_page_shows_frames_of_videos(folder, capsys):
    """A strip of frames, as wide as a page shows it."""
    make_model(folder / "model", "qwen2_5_vl")
    make_video(folder / "clip.mp4", 20, size=(160, 90), fps=10)
    user = {"role": "user", "content": "<video>What moves?"}
    rows = [{"messages": [user, {"role": "assistant", "content": "Yes"}], "videos": ["clip.mp4"]}]
    write(folder / "rows.jsonl", rows)
    recipe = (
        "run: {name: clips, max_steps: 1}\nmodel: {path: model}\nvideos: {fps: 3}\n"
        "data: {train: rows.jsonl, sequence_length: 256, workers: 0}\n"
        "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
        "optimizer: {learning_rate: 0.1}\n"
    )
    (folder / "x.yaml").write_text(recipe)
    lines = inspect(capsys, "recipe=x.yaml", "samples=1", "out=pages/page.html")
    [line] = [line for line in lines if line.startswith("video: ")]
    assert line.endswith("/clip.mp4, 160 x 90 pixels, 20 frames, 2.0 s: 54 tokens, 3 x 3 x 6")
    assert any(line.split() == ["videos", "1"] for line in lines)
    page = (folder / "pages/page.html").read_text()
    [picture] = re.findall(r'<img src="data:image/png;base64,([^"]*)" alt="">video: ', page)
    strip = Image.open(io.BytesIO(base64.b64decode(picture)))
    assert strip.size == (720, 67)
    # The bright square is at the left of the first frame, and at the right of the last one
    colours = np.asarray(strip)[30].astype(int)
    red = np.flatnonzero((colours[:, 0] > 200) & (colours[:, 2] < 80))
    assert red.min() < 30
    assert red.max() > 690


def test_images_are_counted_that_are_trained(folder, capsys):
    """Not those of rows that are dropped, behind a cut, or held out for evaluation."""
    make_model(folder / "model", "qwen2_5_vl")
    make_image(folder / "a.png", size=(56, 56))
    answer = {"role": "assistant", "content": "Yes"}
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>" * count}, answer],
            "images": ["a.png"] * count,
        }
        for count in (1, 60)
    ]
    write(folder / "rows.jsonl", rows)
    asked = [
        {"messages": [{"role": "user", "content": f"{row}<image>"}, answer], "images": ["a.png"]}
        for row in range(50)
    ]
    write(folder / "many.jsonl", asked)
    (folder / "x.yaml").write_text(
        "run: {name: x, max_steps: 1}\nmodel: {path: model}\nimages: {train: none}\n"
        "data: {train: rows.jsonl, sequence_length: 64, workers: 0, cache: null, kind: chat}\n"
        "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
        "optimizer: {learning_rate: 0.1}\n"
    )

    def counted(*words):
        lines = inspect(capsys, "recipe=x.yaml", "samples=1", *words)
        found = (re.match(r"(images[a-z ]*?)  +(\d+)", line) for line in lines)
        facts = dict(match.groups() for match in found if match)
        return facts.get("images"), facts.get("images that are dropped or cut off")

    assert counted("data.sequence_length=1024") == ("61", None)
    assert counted("data.overlong=drop") == ("1", "60")
    assert counted("data.overlong=cut", "data.loss_on=all") == ("11", "50")
    recipe = load_recipe(["recipe=x.yaml", "data.overlong=drop"], ranks=None).recipe
    [files] = data_sets(recipe.data)
    assert "; 1 images (60 more are dropped or cut off)" in _open(recipe, files).describe()[0]
    split = ("data.train=many.jsonl", "data.validation_split=0.5")
    trained, held_out = (int(counted(*split, *more)[0]) for more in ((), ("set=validation",)))
    assert trained + held_out == 50
    assert min(trained, held_out) > 0
