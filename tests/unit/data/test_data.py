"""From files to micro-batches: each token once, and each problem with its file and line."""

import itertools
import json
import os
import random
import threading

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from launcher.data import packing
from launcher.data.batching import NO_SAMPLE
from launcher.data.dataset import SequenceDataset, open_dataset
from launcher.data.encoder import make_encoder
from launcher.data.sources import file_part, find_parts, read_rows
from launcher.data.token_store import ModelInputs, TokenStore, cache_folder, open_store
from launcher.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    tokenizer_identity,
)
from launcher.errors import RecipeError
from launcher.models.chunked_loss import IGNORED
from launcher.recipe import schema
from tests.unit.small_recipe import says

END = ByteTokenizer.end


@pytest.fixture
def cache(tmp_path):
    return str(tmp_path / "cache")


def write(file, content):
    """Text and bytes as they are; a list as the rows of a .jsonl, .json or .parquet file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif isinstance(content, str):
        file.write_bytes(content.encode())
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in content))
    elif file.suffix == ".json":
        file.write_text(json.dumps(content))
    else:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(content), file)
    return file


def read_documents(file, *, column):
    """The texts of a file; raises what open_store would, for the first row that cannot be used."""
    encoder = make_encoder("text", schema.Data(text_column=column), tokenizer="bytes")
    for encoded in encoder.encode_rows(read_rows(file_part(file), column=column)):
        if encoded.problem:
            raise RecipeError(f"{encoded.row.where}: {encoded.problem}")
        if encoded.ids.size:
            yield bytes(encoded.ids[:-1].tolist()).decode()


# Files


def test_files_of_patterns(tmp_path, monkeypatch):
    names = [
        "b.txt",
        "a.txt",
        "c.jsonl",
        "tree/z.py",
        "tree/.git/x.py",
        "tree/y.md",
        "tree/.hidden",
        "tree/__pycache__/y.pyc",
        "tree/x.PNG",
        "d[1].txt",
    ]
    for name in names:
        write(tmp_path / name, "x")
    monkeypatch.chdir(tmp_path)

    def found(*patterns):
        return [part.name for part in find_parts(patterns, kind="text")]

    assert found("b.txt", "a.txt") == ["b.txt", "a.txt"]
    assert found("*.txt") == ["a.txt", "b.txt", "d[1].txt"]
    assert found("b.txt", "*.txt", "./b.txt") == ["b.txt", "a.txt", "d[1].txt"]
    assert found("tree") == ["tree/y.md", "tree/z.py"]
    assert found("tree/*", "c.jsonl") == ["tree/x.PNG", "tree/y.md", "tree/z.py", "c.jsonl"]
    assert found("**/*.py") == ["tree/z.py"]
    assert found("d[1].txt") == ["d[1].txt"]
    (tmp_path / "empty").mkdir()
    for nothing in ("*.csv", "gone.txt", "empty"):
        with pytest.raises(
            RecipeError,
            match=f"^data: '{nothing.replace('*', '.')}' matches no file .in {tmp_path}.$",
        ):
            find_parts(("b.txt", nothing), kind="text")


# Documents

ROWS = [{"text": "one"}, {"text": "zwei ä 日本", "other": 3}, {"text": ""}, {"text": "drei\nvier"}]
SOURCES = [
    ("a.txt", "a whole\nfile\n", ["a whole\nfile\n"]),
    ("a.py", "print('ü')", ["print('ü')"]),
    ("noextension", "x", ["x"]),
    ("empty.txt", "", []),
    ("a.jsonl", ROWS, ["one", "zwei ä 日本", "drei\nvier"]),
    ("upper.JSONL", '{"text": "x"}\n', ["x"]),
    ("blank.jsonl", '\n{"text": "x"}\n\n  \n{"text": "y"}', ["x", "y"]),
    ("a.json", ROWS, ["one", "zwei ä 日本", "drei\nvier"]),
    (
        "a.csv",
        '\ufefftext,other\n"one",1\r\n"zwei ä 日本",\n,3\n"drei\nvier",\n',
        ["one", "zwei ä 日本", "drei\nvier"],
    ),
    ("a.parquet", [{"text": row["text"]} for row in ROWS], ["one", "zwei ä 日本", "drei\nvier"]),
    (
        "long.parquet",
        [{"text": str(number)} for number in range(2500)],
        [str(number) for number in range(2500)],
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "documents"), SOURCES, ids=[name for name, _, _ in SOURCES]
)
def test_documents(tmp_path, name, content, documents):
    assert list(read_documents(write(tmp_path / name, content), column="text")) == documents


BROKEN_FILES = [
    ("a.jsonl", '{"text": "x"}\n{"text": \n', ":2: not JSON: Expecting value (column 9)"),
    (
        "a.jsonl",
        '{"text": "x"}\n\n["x"]\n',
        ':3: must be an object such as {"text": ...}; got list',
    ),
    (
        "a.jsonl",
        '{"text": "x"}\n{"body": "x"}\n',
        ":2: column 'text' must hold text; no such column; columns: body (data.text_column names it)",
    ),
    (
        "a.jsonl",
        '{"text": null}\n',
        ":1: column 'text' must hold text; got NoneType; columns: text (data.text_column names it)",
    ),
    (
        "a.jsonl",
        '{"text": "\\ud83d"}\n',
        ":1: column 'text' holds half a surrogate pair (\\ud800 to \\udfff), which is no character",
    ),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', ":2: not UTF-8 text (byte 10)"),
    ("a.json", '{"text": "x"}', ": must be a list of objects; got dict"),
    ("a.json", '[{"text": "x"}, 3]', ' row 2: must be an object such as {"text": ...}; got int'),
    (
        "a.json",
        '[\n{"text": "x"},\n{"text" "y"}]',
        ": not JSON: Expecting ':' delimiter (line 3, column 9)",
    ),
    (
        "a.json",
        '[{"text": "x"}, {"body": "x"}]',
        " row 2: column 'text' must hold text; no such column; columns: body (data.text_column names it)",
    ),
    ("a.json", b'["\xff"]', ": not UTF-8 text (byte 2)"),
    (
        "a.json",
        '{"text": "x"}\n{"text": "y"}',
        ": not JSON: Extra data (line 2, column 1); if it has one object per line, name it .jsonl",
    ),
    (
        "a.txt",
        b"a\nbc\xffd",
        ":2: not UTF-8 text (byte 4); convert it, or leave it out",
    ),
    ("a.csv", 'text,n\n"x\ny",1\nz\n', ":4: 1 fields, but the header in line 1 has 2"),
    ("a.csv", b"text\nx\n\xff\n", ":3: not UTF-8 text"),
    ("a.csv", "text,text\nx,y\n", ":1: the header names a column twice: text"),
    ("a.csv", "body\nx\n", ":2: column 'text' must hold text; no such column; columns: body (...)"),
    ("a.csv", 'text\n"x" y\n', ":2: not CSV: ',' expected after '\"'"),
    ("a.parquet", "hello", ": not a parquet file, or a damaged one: ..."),
    (
        "a.parquet",
        [{"text": "x"}, {"text": None}],
        " row 2: column 'text' must hold text; got NoneType; columns: text (...)",
    ),
    (
        "a.parquet",
        [{"body": "x"}],
        " row 1: column 'text' must hold text; no such column; columns: body (...)",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    BROKEN_FILES,
    ids=[f"{name}-{said[:30]}" for name, _, said in BROKEN_FILES],
)
def test_broken_files_name_file_and_line(tmp_path, name, content, said):
    file = write(tmp_path / name, content)
    with pytest.raises(RecipeError) as refused:
        list(read_documents(file, column="text"))
    assert says(f"{file}{said}", str(refused.value)), str(refused.value)


def test_damaged_parquet(tmp_path):
    file = write(tmp_path / "a.parquet", [{"text": "x" * 1000}])
    whole = file.read_bytes()
    for damaged in (whole[:100], whole[:-20], whole[:4] + b"\0" * 100 + whole[104:], b""):
        file.write_bytes(damaged)
        with pytest.raises(RecipeError, match=r"a.parquet: not a parquet file, or a damaged one: "):
            list(read_documents(file, column="text"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json"])
def test_a_missing_file(tmp_path, name):
    with pytest.raises(RecipeError, match=f"{name}: cannot be read: No such file or directory"):
        list(read_documents(tmp_path / name, column="text"))


def test_the_place_of_a_row(tmp_path):
    rows = [{"a": 1}, {"a": 2}]
    for name, places in {
        "a.jsonl": (":1", ":2"),
        "a.json": (" row 1", " row 2"),
        "a.parquet": (" row 1", " row 2"),
    }.items():
        file = write(tmp_path / name, rows)
        found = [(row.where, row.values) for row in read_rows(file_part(file))]
        assert found == [(f"{file}{place}", row) for place, row in zip(places, rows, strict=True)]


# Tokenizers


def test_bytes():
    tokenizer = load_tokenizer("bytes")
    found = tokenizer.ids(["aé\n", "", "日本🙂"])
    assert [ids.tolist() for ids in found[:2]] == [[97, 0xC3, 0xA9, 10], []]
    assert found[2].dtype == np.int32
    assert bytes(found[2].tolist()).decode() == "日本🙂"
    assert (tokenizer.begin, tokenizer.end) == ([], END)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer of six words that puts <s> before a text where special tokens are asked for."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"<s>": 0, "</s>": 1, "<unk>": 2, "a": 3, "small": 4, "world": 5}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(folder)
    return folder


def copied(folder, to):
    for file in folder.iterdir():
        write(to / file.name, file.read_bytes())
    return to


def test_hugging_face_tokenizer(tokenizer_folder):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    assert [ids.tolist() for ids in tokenizer.ids(["a small  world is small", "", "a"])] == [
        [3, 4, 5, 2, 4],
        [],
        [3],
    ]
    assert [ids.tolist() for ids in tokenizer.ids(["a", ""], special=True)] == [[0, 3], [0]]
    assert (tokenizer.begin, tokenizer.end) == ([0], 1)
    assert tokenizer.ids(["a"])[0].dtype == np.int32
    assert tokenizer.ids(["small " * 100_000])[0].shape == (100_000,)


def test_the_identity_of_a_tokenizer_follows_its_files(tokenizer_folder, tmp_path):
    identity = tokenizer_identity(str(tokenizer_folder))
    copy = copied(tokenizer_folder, tmp_path / "copy")
    assert tokenizer_identity(str(copy)) == identity
    write(copy / "model.safetensors", b"weights")
    write(copy / "model.safetensors.index.json", b"{}")
    assert tokenizer_identity(str(copy)) == identity
    for name in ("merges.txt", "chat_template.jinja"):
        write(copy / name, "a b")
        assert tokenizer_identity(str(copy)) != identity
        (copy / name).unlink()


def test_tokenizer_without_an_end_of_text(tokenizer_folder, tmp_path):
    copy = copied(tokenizer_folder, tmp_path / "copy")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["eos_token"]
    write(copy / "tokenizer_config.json", json.dumps(config))
    with pytest.raises(
        RecipeError,
        match=r"data.tokenizer: .*copy: has no end-of-text token \(eos_token\), which ends each document",
    ):
        store_of(write(tmp_path / "a.txt", "a"), cache=str(tmp_path / "cache"), tokenizer=str(copy))


@pytest.mark.parametrize("content", [None, "", "{}", "garbage"])
def test_folder_without_a_tokenizer(tmp_path, content):
    if content is not None:
        write(tmp_path / "tokenizer.json", content)
    with pytest.raises(
        RecipeError, match=f"^data.tokenizer: {tmp_path}: no tokenizer could be loaded: "
    ):
        load_tokenizer(str(tmp_path))


# Stores


def store_of(*patterns, cache, kind="text", tokenizer="bytes", column="text", build=True):
    return open_store(
        tuple(map(str, patterns)),
        schema.Data(kind=kind, text_column=column, cache=cache),
        tokenizer=tokenizer if kind == "text" else None,
        build=build,
    )


def stores(cache):
    """What is in the cache, apart from the locks."""
    return sorted({path.name for path in cache_folder(cache).iterdir()} - {"locks"})


def documents_of(store):
    return [store.ids[start:end].tolist() for start, end in itertools.pairwise(store.offsets)]


def test_store_of_text(tmp_path, cache):
    files = [
        write(tmp_path / "b.txt", "ab"),
        write(tmp_path / "a.jsonl", [{"text": "ä"}, {"text": ""}, {"text": "z\r\n"}]),
    ]
    store = store_of(*files, cache=cache)
    assert documents_of(store) == [[97, 98, END], [0xC3, 0xA4, END], [122, 13, 10, END]]
    assert (store.documents, store.largest_id, store.labels) == (3, END, None)
    assert isinstance(store.ids, np.memmap)
    assert store.ids.dtype == np.int32


def test_store_with_a_hugging_face_tokenizer(tmp_path, cache, tokenizer_folder):
    file = write(tmp_path / "a.txt", "a small world")
    assert documents_of(store_of(file, cache=cache, tokenizer=str(tokenizer_folder))) == [
        [0, 3, 4, 5, 1]
    ]
    assert documents_of(store_of(file, cache=cache)) == [[*b"a small world", END]]


def test_a_store_is_tokenized_once(tmp_path, cache, messages):
    file = write(tmp_path / "a.txt", "ab")
    first = store_of(file, cache=cache)
    assert says("tokenizing 1 files (0.0 MiB)", messages()[0])
    assert says("tokenized 1 documents, 3 tokens in ... s (... tokens/s)", messages()[1])
    again = store_of(file, cache=cache)
    other_rank = store_of(file, cache=cache, build=False)
    assert len(messages()) == 2
    assert documents_of(first) == documents_of(again) == documents_of(other_rank)
    assert stores(cache) == [first.folder.name]


def test_another_column_or_content_changes_the_store(tmp_path, cache, messages):
    file = write(tmp_path / "a.jsonl", [{"text": "ab", "body": "c"}])
    assert documents_of(store_of(file, cache=cache)) == [[97, 98, END]]
    assert documents_of(store_of(file, cache=cache, column="body")) == [[99, END]]
    write(file, [{"text": "xy", "body": "c"}])  # of the same size
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    assert documents_of(store_of(file, cache=cache)) == [[120, 121, END]]
    assert len(messages()) == 2 * len(stores(cache)) == 6


def test_other_ranks_wait_for_the_store(tmp_path, cache):
    file = write(tmp_path / "a.txt", "ab")
    waited = []
    waiting = threading.Thread(
        target=lambda: waited.append(documents_of(store_of(file, cache=cache, build=False))),
        daemon=True,
    )
    waiting.start()
    waiting.join(0.15)
    assert waiting.is_alive()
    store_of(file, cache=cache)
    waiting.join(10)
    assert waited == [[[97, 98, END]]]


def test_cache_folder(tmp_path, monkeypatch):
    assert cache_folder("some/where") == type(tmp_path)("some/where")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "launcher"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "launcher"


def test_a_cache_that_cannot_be_written(tmp_path):
    file = write(tmp_path / "a.txt", "ab")
    with pytest.raises(
        RecipeError, match=f"^data.cache: {file} cannot be written to: Not a directory$"
    ):
        store_of(file, cache=str(file))


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
@pytest.mark.parametrize(
    ("rows", "documents", "labels", "largest"),
    [
        (
            [{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [7]}],
            [[1, 2, 3], [7]],
            None,
            7,
        ),
        (
            [
                {"input_ids": [1, 2, 3], "labels": [IGNORED, 9, 3]},
                {"input_ids": [4, 5]},
                {"input_ids": [6], "labels": None},
            ],
            [[1, 2, 3], [4, 5], [6]],
            [IGNORED, 9, 3, 4, 5, 6],
            9,
        ),
    ],
    ids=["ids", "labels"],
)
def test_store_of_tokens(tmp_path, cache, name, rows, documents, labels, largest):
    store = store_of(write(tmp_path / name, rows), cache=cache, kind="tokens")
    assert documents_of(store) == documents
    assert (None if store.labels is None else store.labels.tolist()) == labels
    assert store.largest_id == largest


BROKEN_TOKENS = [
    ([{"input_ids": [1]}, {"text": "x"}], ":2: no column 'input_ids'; columns: text"),
    ([{"input_ids": "abc"}], ":1: input_ids must be a list of whole numbers"),
    ([{"input_ids": [1, 2.0]}], ":1: input_ids must be a list of whole numbers"),
    ([{"input_ids": [1, True]}], ":1: input_ids must be a list of whole numbers"),
    ([{"input_ids": [1, -1]}], ":1: input_ids must not be negative; got -1"),
    ([{"input_ids": [2**31]}], ":1: input_ids has an id beyond 32 bits"),
    (
        [{"input_ids": [1, 2], "labels": [1]}],
        ":1: 2 input_ids, but 1 labels; there must be one for each token (-100: no loss)",
    ),
    (
        [{"input_ids": [1, 2], "labels": [1, -1]}],
        ":1: labels must be token ids, or -100 for no loss; got -1",
    ),
    ([{"input_ids": [1, 2], "labels": [1, None]}], ":1: labels must be a list of whole numbers"),
]


@pytest.mark.parametrize(("rows", "said"), BROKEN_TOKENS, ids=[said for _, said in BROKEN_TOKENS])
def test_broken_token_rows(tmp_path, cache, rows, said):
    file = write(tmp_path / "a.jsonl", rows)
    with pytest.raises(RecipeError) as refused:
        store_of(file, cache=cache, kind="tokens")
    assert str(refused.value) == f"{file}{said}"
    assert stores(cache) == [], "half a store is left behind"


def test_token_rows_in_a_text_file_are_refused(tmp_path, cache):
    file = write(tmp_path / "a.txt", "1 2 3")
    with pytest.raises(
        RecipeError,
        match=r"a.txt: kind tokens reads .jsonl, .json, .parquet, .csv; use kind text for text files",
    ):
        store_of(file, cache=cache, kind="tokens")


def test_only_empty_files(tmp_path, cache):
    write(tmp_path / "tree/a.txt", "")
    write(tmp_path / "tree/b.jsonl", [{"text": ""}])
    with pytest.raises(RecipeError, match=r"^data: no document with text in 2 files$"):
        store_of(tmp_path / "tree", cache=cache)


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.jsonl", ""), ("a.jsonl", "\n\n"), ("a.json", "[]"), ("a.csv", "text,label\n")],
)
def test_a_file_without_rows(tmp_path, cache, name, content):
    file = write(tmp_path / name, content)
    with pytest.raises(RecipeError) as refused:
        store_of(file, write(tmp_path / "b.jsonl", [{"text": "x"}]), cache=cache)
    assert (
        str(refused.value) == f"{file}: it has no rows; remove it, or leave it out of the patterns"
    )


# Packing

PACKINGS = {"stream": packing.stream, "separate": packing.separate, "best_fit": packing.best_fit}


def counting_store(sizes):
    """Documents of these sizes; each token's id is its own place, so that none can be taken for another."""
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    return TokenStore(
        ids=np.arange(offsets[-1], dtype=np.int32),
        labels=None,
        offsets=offsets,
        largest_id=int(offsets[-1]) - 1,
    )


def random_sizes(chance):
    longest = chance.choice([1, 3, 10, 40])
    return [chance.randint(1, longest) for _ in range(chance.randint(1, 30))]


def pieces_of(sequences):
    """(start, length) of the pieces of each sequence."""
    pieces = list(zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True))
    return [pieces[start:end] for start, end in itertools.pairwise(sequences.bounds.tolist())]


def cases(times=120):
    chance = random.Random(5)
    for _ in range(times):
        yield random_sizes(chance), chance.choice([1, 2, 3, 5, 8, 16, 64])


@pytest.mark.parametrize("name", PACKINGS)
def test_every_token_is_in_one_piece_and_one_target(name):
    for sizes, length in cases():
        store = counting_store(sizes)
        sequences = PACKINGS[name](store.offsets, length)
        dataset = SequenceDataset(store, sequences, length, packed=name != "separate")
        firsts, lasts = set(store.offsets[:-1].tolist()), set((store.offsets[1:] - 1).tolist())
        ids, targets = [], []
        for index, pieces in enumerate(pieces_of(sequences)):
            row = {key: value.tolist() for key, value in dataset[index].items()}
            assert 1 <= len(row["input_ids"]) <= length, (sizes, length)
            tokens = [token for start, size in pieces for token in range(start, start + size)]
            assert row["input_ids"] == tokens
            assert row["position_ids"] == [place for _, size in pieces for place in range(size)]
            for start, size in pieces:
                assert not firsts & set(range(start + 1, start + size)), "more than one document"
            ids += tokens
            targets += row["targets"]
        assert sorted(ids) == list(range(sum(sizes))), (sizes, length)
        assert targets == [IGNORED if token in lasts else token + 1 for token in ids]


def test_a_stream_is_cut_every_length_tokens():
    for sizes, length in cases():
        store = counting_store(sizes)
        dataset = SequenceDataset(store, packing.stream(store.offsets, length), length, packed=True)
        rows = [dataset[index]["input_ids"].tolist() for index in range(len(dataset))]
        assert rows == [
            list(range(start, min(start + length, sum(sizes))))
            for start in range(0, sum(sizes), length)
        ]
        ends = list(itertools.accumulate(sizes))
        cut = sum(
            (end - 1) // length > (end - size) // length
            for end, size in zip(ends, sizes, strict=True)
        )
        assert dataset.sequences.split_documents == cut


def test_separate_documents():
    for sizes, length in cases():
        store = counting_store(sizes)
        sequences = packing.separate(store.offsets, length)
        expected = []
        for size, end in zip(sizes, itertools.accumulate(sizes), strict=True):
            expected += [
                [(start, min(length, end - start))] for start in range(end - size, end, length)
            ]
        assert pieces_of(sequences) == expected
        assert sequences.split_documents == sum(size > length for size in sizes)


def test_best_fit_cuts_long_documents_only_and_leaves_no_two_sequences_to_join():
    for sizes, length in cases():
        store = counting_store(sizes)
        sequences = packing.best_fit(store.offsets, length)
        assert sorted(piece for pieces in pieces_of(sequences) for piece in pieces) == [
            piece
            for pieces in pieces_of(packing.separate(store.offsets, length))
            for piece in pieces
        ]
        filled = sorted(sum(size for _, size in pieces) for pieces in pieces_of(sequences))
        assert len(filled) == 1 or filled[0] + filled[1] > length, (sizes, length)
        assert sequences.split_documents == sum(size > length for size in sizes)


def test_best_fit_is_near_the_fewest_sequences():
    """Documents that are known to fit into so many sequences, without a token of padding."""
    chance = random.Random(3)
    for full in (1, 7, 40, 200):
        sizes = []
        for _ in range(full):
            cuts = sorted({0, 64, *(chance.randrange(1, 64) for _ in range(chance.randint(0, 6)))})
            sizes += [end - start for start, end in itertools.pairwise(cuts)]
        chance.shuffle(sizes)
        assert full <= len(packing.best_fit(counting_store(sizes).offsets, 64)) <= 11 / 9 * full + 4


def test_best_fit_stays_near_the_order_of_the_files():
    sequences = packing.best_fit(counting_store([3, 9, 2, 5, 10, 1]).offsets, 10)
    assert pieces_of(sequences) == [[(0, 3), (12, 2), (14, 5)], [(3, 9), (29, 1)], [(19, 10)]]


# Micro-batches


def labelled_store():
    """[5 6 7 8] with a loss on 7 and 8, and [3 4] with a loss on 4, which counts as 9."""
    return TokenStore(
        ids=np.array([5, 6, 7, 8, 3, 4], dtype=np.int32),
        labels=np.array([IGNORED, IGNORED, 7, 8, 3, 9], dtype=np.int32),
        offsets=np.array([0, 4, 6]),
        largest_id=9,
    )


@pytest.mark.parametrize(
    ("length", "targets"),
    [
        (4, [[IGNORED, 7, 8, IGNORED], [9, IGNORED]]),
        (
            2,
            [[IGNORED, 7], [8, IGNORED], [9, IGNORED]],
        ),  # the first label of a piece is the target of the piece before
        (1, [[IGNORED], [7], [8], [IGNORED], [9], [IGNORED]]),
    ],
)
def test_labels_are_shifted(length, targets):
    store = labelled_store()
    dataset = SequenceDataset(store, packing.separate(store.offsets, length), length, packed=False)
    assert [dataset[index]["targets"].tolist() for index in range(len(dataset))] == targets
    collated = dataset.collate([dataset[index] for index in range(len(dataset))])
    assert (collated["tokens"], collated["loss_tokens"]) == (6, 3)


def dataset_of(sizes, length, *, packed):
    store = counting_store(sizes)
    return SequenceDataset(
        store,
        (packing.best_fit if packed else packing.separate)(store.offsets, length),
        length,
        packed=packed,
    )


def test_rows_are_padded_on_the_right():
    dataset = dataset_of([3, 1, 2], 8, packed=False)
    collated = dataset.collate([dataset[index] for index in range(3)])
    assert collated["tensors"]["input_ids"].tolist() == [[0, 1, 2], [3, 0, 0], [4, 5, 0]]
    assert collated["tensors"]["targets"].tolist() == [
        [1, 2, IGNORED],
        [IGNORED] * 3,
        [5, IGNORED, IGNORED],
    ]
    assert sorted(collated["tensors"]) == ["input_ids", "target_positions", "targets"]
    assert collated["tensors"]["target_positions"].tolist() == [0, 1, 6]
    assert {tensor.dtype for tensor in collated["tensors"].values()} == {torch.int64}
    assert (collated["tokens"], collated["loss_tokens"]) == (6, 3)


def test_packed_rows_have_the_full_length_and_positions_of_their_own():
    dataset = dataset_of([3, 2, 6], 6, packed=True)
    collated = dataset.collate([dataset[0], dataset[1]])
    assert collated["tensors"]["input_ids"].tolist() == [[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 9, 10]]
    assert collated["tensors"]["targets"].tolist() == [
        [1, 2, IGNORED, 4, IGNORED, IGNORED],
        [6, 7, 8, 9, 10, IGNORED],
    ]
    assert collated["tensors"]["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert (collated["tokens"], collated["loss_tokens"]) == (11, 8)


def test_padding_is_a_document_of_its_own():
    dataset = dataset_of([2, 1], 6, packed=True)
    assert dataset.collate([dataset[0]])["tensors"]["position_ids"].tolist() == [[0, 1, 0, 0, 1, 2]]
    one_each = dataset_of([6, 4], 6, packed=True)
    tensors = one_each.collate([one_each[0], one_each[1]])["tensors"]
    assert "position_ids" not in tensors, "no row holds several documents"
    assert tensors["input_ids"].shape == (2, 6)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_without_a_sample_weigh_nothing(packed):
    dataset = dataset_of([3], 4, packed=packed)
    alone = dataset.collate([dataset[0]])
    with_nothing = dataset.collate([dataset[0], dataset[NO_SAMPLE], dataset[NO_SAMPLE]])
    for count in ("tokens", "loss_tokens"):
        assert with_nothing[count] == alone[count] > 0
    assert with_nothing["tensors"]["targets"][0].tolist() == alone["tensors"]["targets"][0].tolist()
    assert with_nothing["tensors"]["targets"][1:].eq(IGNORED).all()
    assert with_nothing["tensors"]["input_ids"].shape == (3, 4 if packed else 3)
    nothing = dataset.collate([dataset[NO_SAMPLE]])
    assert (nothing["tokens"], nothing["loss_tokens"]) == (0, 0)
    assert nothing["tensors"]["input_ids"].shape == (1, 4 if packed else 1)


# All of it


def data_section(file, cache, **more):
    return schema.Data(train=(str(file),), cache=cache, **({"tokenizer": "bytes"} | more))


def opened(file, cache, *, vocabulary=1000, **more):
    data = data_section(file, cache, **more)
    return open_dataset(
        data,
        data.train,
        tokenizer=data.tokenizer,
        model=ModelInputs(vocabulary=vocabulary),
        build=True,
    )


def test_packing_of_each_kind(tmp_path, cache):
    text = write(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": "de"}, {"text": "f"}])
    stream = opened(text, cache, sequence_length=4)
    assert [stream[index]["input_ids"].tolist() for index in range(len(stream))] == [
        [*b"abc", END],
        [*b"de", END, *b"f"],
        [END],
    ]
    rows = write(
        tmp_path / "b.jsonl",
        [{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6]}, {"input_ids": [7]}],
    )
    fitted = opened(rows, cache, kind="tokens", tokenizer=None, sequence_length=4)
    assert [fitted[index]["input_ids"].tolist() for index in range(len(fitted))] in (
        [[1, 2, 3, 7], [4, 5, 6]],
        [[1, 2, 3], [4, 5, 6, 7]],
    )
    for file, kind in ((text, "text"), (rows, "tokens")):
        assert (
            len(
                opened(
                    file,
                    cache,
                    kind=kind,
                    tokenizer="bytes" if kind == "text" else None,
                    sequence_length=8,
                    packing=False,
                )
            )
            == 3
        )


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path, cache):
    text = write(tmp_path / "a.txt", "abc")
    assert len(opened(text, cache, vocabulary=257)) == 1
    with pytest.raises(
        RecipeError,
        match=r"a.txt: token id 256 is beyond the model's vocabulary of 256 \(model.config.vocab_size\)$",
    ):
        opened(text, cache, vocabulary=256)
    label = write(tmp_path / "b.jsonl", [{"input_ids": [1, 2], "labels": [1, 12]}])
    with pytest.raises(
        RecipeError, match=r"b.jsonl:1: token id 12 is beyond the model's vocabulary of 10 "
    ):
        opened(label, cache, kind="tokens", tokenizer=None, vocabulary=10)
