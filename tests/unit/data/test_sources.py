"""From files to micro-batches: each token is used once, and errors name file and line."""

import bz2
import gzip
import itertools
import json
import lzma
import os
import random
import shutil
import threading
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.feather
import pytest
import torch
from datasets import Dataset, DatasetDict

from launcher.data import packing, token_store
from launcher.data.batching import NO_SAMPLE
from launcher.data.encoder import Encoder, make_encoder
from launcher.data.opening import make_order, open_dataset
from launcher.data.token_store import ModelTraits, TokenStore, cache_folder, open_store
from launcher.data.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    load_tokenizer,
    tokenizer_identity,
)
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources import rows as source_rows
from launcher.sources.finding import file_part, find_parts, first_row
from launcher.sources.formats import ROW_FILES
from launcher.sources.hub import load_data_set
from launcher.sources.layouts import guess
from launcher.sources.location import Location
from launcher.sources.ranges import split
from launcher.sources.rows import read_rows
from tests import datasets
from tests.micro_batches import contents
from tests.unit.data.rows import documents_of, store_names, write
from tests.unit.small_recipe import says

END = ByteTokenizer.end


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def read_documents(file):
    """The texts of a file. Raises the same error as open_store for the first unusable row."""
    encoder = make_encoder("text", schema.Data(), tokenizer="bytes")
    for encoded in encoder.encode_rows(read_rows(file_part(Location(str(file))))):
        if encoded.problem:
            raise RecipeError(f"{encoded.row.where}: {encoded.problem}")
        if encoded.ids.size:
            yield bytes(encoded.ids[:-1].tolist()).decode()


# Files


def test_patterns_match_files(tmp_path, monkeypatch):
    names = "b.txt a.txt c.jsonl tree/z.py tree/.git/x.py tree/y.md tree/.hidden d[1].txt"
    for name in [*names.split(), "tree/__pycache__/y.pyc", "tree/x.PNG"]:
        write(tmp_path / name, "x")
    monkeypatch.chdir(tmp_path)

    def found(*patterns, kind="text"):
        return [part.name for part in find_parts(patterns, kind=kind)]

    assert found("b.txt", "a.txt") == ["b.txt", "a.txt"]
    assert found("*.txt") == ["a.txt", "b.txt", "d[1].txt"]
    assert found("b.txt", "*.txt", "./b.txt") == ["b.txt", "a.txt", "d[1].txt"]
    assert found("tree") == ["tree/y.md", "tree/z.py"]
    assert found("tree/*", "c.jsonl") == ["tree/x.PNG", "tree/y.md", "tree/z.py", "c.jsonl"]
    assert found("**/*.py") == ["tree/z.py"]
    assert found("d[1].txt") == ["d[1].txt"]
    (tmp_path / "empty").mkdir()
    for unmatched in ("*.csv", "gone.txt", "empty"):
        where = f"^data: '{unmatched.replace('*', '.')}' matches no file .in {tmp_path}.$"
        with pytest.raises(RecipeError, match=where):
            found("b.txt", unmatched)
    write(tmp_path / "set/README.md", "a folder of rows may have a README")
    write(tmp_path / "set/a.jsonl", ["x"])
    assert found("set", kind="chat") == ["set/a.jsonl"]
    assert found("set") == ["set/README.md", "set/a.jsonl"]
    forms = f"kind chat reads {ROW_FILES}; use kind text for text files"
    with pytest.raises(RecipeError, match=rf"README.md: {forms}"):
        found("set/README.md", kind="chat")


@pytest.mark.parametrize("pattern", ["rows", "rows/*.jsonl", "rows/b.jsonl"])
def test_a_link_to_a_missing_file_is_refused(tmp_path, pattern):
    """As in a part of the hub's cache; the other files were read without it, in silence."""
    write(tmp_path / "rows/a.jsonl", ["x"])
    (tmp_path / "rows/b.jsonl").symlink_to(tmp_path / "gone")
    (tmp_path / "rows/.b.jsonl.lock").symlink_to("a link of an editor")
    problem = f"rows/b.jsonl: a link to {tmp_path / 'gone'}, which is not there"
    with pytest.raises(RecipeError, match=problem):
        find_parts([str(tmp_path / pattern)], kind="text")


def test_a_named_pipe_is_said_or_refused(tmp_path):
    """It was passed by in silence; as the only file it "matched no file"."""
    write(tmp_path / "rows/a.jsonl", ["x"])
    os.mkfifo(tmp_path / "rows/p.jsonl")
    notes = []
    (part,) = find_parts([str(tmp_path / "rows")], kind="text", notes=notes)
    assert part.name.endswith("a.jsonl")
    assert notes == [f"note: of {tmp_path}/rows, {tmp_path}/rows/p.jsonl is not read"]
    with pytest.raises(RecipeError, match=r"p\.jsonl: is a named pipe, .*; write its rows to a"):
        find_parts([str(tmp_path / "rows/p.jsonl")], kind="text")


# Documents

ROWS = [{"text": "one"}, {"text": "zwei ä 日本", "other": 3}, {"text": ""}, {"text": "drei\nvier"}]
READ = ["one", "zwei ä 日本", "drei\nvier"]
NUMBERS = [str(number) for number in range(2500)]


@pytest.mark.parametrize(
    ("name", "content", "documents"),
    [
        ("a.txt", "a whole\nfile\n", ["a whole\nfile\n"]),
        ("a.py", "print('ü')", ["print('ü')"]),
        ("mark.txt", "\ufeffone", ["one"]),
        ("noextension", "x", ["x"]),
        ("empty.txt", "", []),
        ("a.jsonl", ROWS, READ),
        ("upper.JSONL", '{"text": "x"}\n', ["x"]),
        ("blank.jsonl", '\n{"text": "x"}\n\n  \n{"text": "y"}', ["x", "y"]),
        ("a.json", ROWS, READ),
        ("a.csv", '\ufefftext,other\n"one",1\r\n"zwei ä 日本",\n,3\n"drei\nvier",\n', READ),
        ("a.parquet", [{"text": row["text"]} for row in ROWS], READ),
        ("long.parquet", NUMBERS, NUMBERS),
    ],
)
def test_documents_of_each_file_format(tmp_path, name, content, documents):
    assert list(read_documents(write(tmp_path / name, content))) == documents


@pytest.mark.parametrize("kind", ["gz", "zst", "xz", "bz2"])
def test_compressed_files(tmp_path, kind):
    table = 'text,other\none,1\nzwei ä 日本,\n,3\n"drei\nvier",\n'
    contents = {"a.txt": "one\r\n", "b.jsonl": ROWS, "c.json": ROWS, "d.csv": table}
    for name, content in contents.items():
        plain = write(tmp_path / name, content).read_bytes()
        compressed = tmp_path / f"{name}.{kind}"
        if kind in ("xz", "bz2"):
            compressed.write_bytes({"xz": lzma, "bz2": bz2}[kind].compress(plain))
        else:
            method = {"gz": "gzip", "zst": "zstd"}[kind]
            with pyarrow.output_stream(str(compressed), compression=method) as out:
                out.write(plain)
        (tmp_path / name).unlink()
    for name in ("e.tar", "f.so", "g"):
        write(tmp_path / f"{name}.{kind}", b"no text")
    parts = find_parts((str(tmp_path),), kind="text")
    assert [Path(part.name).name for part in parts] == [f"{name}.{kind}" for name in contents]
    assert [part.form for part in parts] == ["text", "jsonl", "json", "csv"]
    found = [list(read_documents(Path(part.name))) for part in parts]
    assert found == [["one\r\n"], READ, READ, READ]
    assert len(find_parts((str(tmp_path),), kind="chat")) == 3
    assert [split(part, 4) for part in parts] == [[part] for part in parts]
    (line,) = [row.where for row in read_rows(parts[1]) if row.values == ROWS[3]]
    assert line == f"{parts[1].name}:4"
    whole = Path(parts[1].name).read_bytes()
    for damaged in (whole[:-12], b"x" * 20):
        file = write(tmp_path / f"damaged.jsonl.{kind}", damaged)
        with pytest.raises(RecipeError, match=rf"damaged.jsonl.{kind}: cannot be read: "):
            list(read_documents(file))
    with pytest.raises(RecipeError, match=r"a compressed .parquet cannot be read: decompress it"):
        find_parts((str(write(tmp_path / f"h.parquet.{kind}", b"x")),), kind="text")


def test_folders_of_save_to_disk_are_data_sets(tmp_path, cache, monkeypatch):
    def saved(folder, *texts):
        Dataset.from_list([{"text": text} for text in texts]).save_to_disk(tmp_path / folder)

    monkeypatch.chdir(tmp_path)
    saved("plain", "a", "b", "c")
    rows = {"train": ["d", "e"], "test": ["f"]}
    sets = {name: Dataset.from_list([{"text": one} for one in of]) for name, of in rows.items()}
    DatasetDict(sets).save_to_disk(tmp_path / "both")
    saved("tree/inside", "g")
    write(tmp_path / "tree/a.jsonl", ["h"])

    def found(*names, validation=False):
        parts = find_parts(names, kind="text", validation=validation)
        texts = [row.values["text"] for part in parts for row in read_rows(part)]
        pieces = [piece for part in parts for piece in split(part, 1)]
        assert [row.values["text"] for piece in pieces for row in read_rows(piece)] == texts
        return "".join(texts)

    assert found("plain", "both") == "abcde"
    assert found("both", validation=True) == "f"
    assert found("both/test") == "f"
    assert found("tree") == "hg"
    assert found("tree", "plain", "plain/") == "hgabc"
    store = create_store("plain", cache=cache)
    assert documents_of(store) == [[97, END], [98, END], [99, END]]
    assert create_store("plain", cache=cache).folder == store.folder
    shutil.rmtree("plain")
    saved("plain", "x", "y", "z")
    load_data_set.cache_clear()
    assert documents_of(create_store("plain", cache=cache)) == [[120, END], [121, END], [122, END]]
    DatasetDict({"train": sets["train"]}).save_to_disk(tmp_path / "train")
    with pytest.raises(
        RecipeError, match=r"train: has no split validation or test; .* train/train"
    ):
        found("train", validation=True)
    for file in Path("both/test").glob("*.arrow"):
        os.truncate(file, 10)
    load_data_set.cache_clear()
    with pytest.raises(
        RecipeError, match=r"data: both/test: save_to_disk wrote .* cannot be loaded"
    ):
        found("both/test")


LINE = '{"text": "x"}\n'
BROKEN_FILES = [
    ("a.jsonl", LINE + '{"text": \n', "not-json"),
    ("a.jsonl", LINE + '\n["x"]\n', "not-an-object"),
    ("a.jsonl", LINE + '{"body": "x"}\n', "no-column"),
    ("a.jsonl", '{"text": null}\n', "not-text"),
    ("a.jsonl", '{"text": "\\ud83d"}\n', "surrogate"),
    ("a.jsonl", '{"text": 3}\n', "number"),
    ("a.jsonl", '{"text": ["x"], "b": 1}\n', "list"),
    ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}\n', "encoding"),
    ("a.jsonl", LINE[:-1] + ",\n", "comma-at-the-end"),
    ("a.jsonl", LINE + '{"text": "x",}\n', "comma-before-a-brace"),
    ("a.jsonl", "[\n" + LINE + "]\n", "list-of-rows"),
    ("a.json", '{"text": "x"}', "one-object"),
    (
        "a.json",
        '{"v": 1, "data": [{"text": "x"}]}',
        "list-in-a-key",
    ),
    ("a.json", '{"a": ["x"], "b": ["y"]}', "columns"),
    ("a.json", '{"a": [{}], "b": [{}, {}]}', "several-lists"),
    ("a.json", '[{"text": "x"},]', "comma-before-a-bracket"),
    ("a.json", '[{"text": "x"}, 3]', "not-an-object"),
    ("a.json", '[\n{"text" "y"}]', "not-json"),
    ("a.json", '[{"text": "x"}, {"body": "x"}]', "no-column"),
    ("a.json", b'["\xff"]', "encoding"),
    ("a.json", LINE * 2, "lines-of-rows"),
    (
        "a.txt",
        b"a\nbc\xffd",
        "encoding",
    ),
    ("a.csv", 'text,n\n"x\ny",1\nz\n', "fields"),
    ("a.csv", b"text\nx\n\xff\n", "encoding"),
    (
        "a.csv",
        "text,text,b\nx,y,z\n",
        "column-twice",
    ),
    ("a.csv", "text;b\nx;y\n", "semicolons"),
    ("a.csv", "text\tb\nx\ty\n", "tabs"),
    ("a.csv", "body\nx\n", "no-column"),
    ("a.csv", 'text\n"x" y\n', "not-csv"),
    ("a.parquet", "hello", "damaged"),
    ("a.parquet", [{"text": "x"}, {"text": None}], "not-text"),
    ("a.parquet", [{"body": "x"}], "no-column"),
]


@pytest.mark.parametrize(("name", "content", "rule"), BROKEN_FILES)
def test_errors_name_file_and_line(tmp_path, words, name, content, rule):
    with words.refused(f"{name} {rule}"):
        list(read_documents(write(tmp_path / name, content)))


def test_unreadable_files_are_refused(tmp_path):
    file = write(tmp_path / "a.parquet", [{"text": "x" * 1000}])
    whole = file.read_bytes()
    for damaged in (whole[:100], whole[:-20], whole[:4] + b"\0" * 100 + whole[104:], b""):
        file.write_bytes(damaged)
        with pytest.raises(RecipeError, match=r"a.parquet: not a parquet file, or a damaged one: "):
            list(read_documents(file))
    with pytest.raises(RecipeError, match=r"gone: cannot be read: No such file or directory"):
        list(read_documents(tmp_path / "gone"))


# Tokenizers


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    """A tokenizer with six words. It puts <s> before a text if special tokens are requested."""
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


def copy_folder(folder, to):
    for file in folder.iterdir():
        write(to / file.name, file.read_bytes())
    return to


def test_hugging_face_tokenizer(tokenizer_folder):
    tokenizer = load_tokenizer(str(tokenizer_folder))
    assert isinstance(tokenizer, HuggingFaceTokenizer)
    ids = [one.tolist() for one in tokenizer.ids(["a small  world is small", "", "a"])]
    assert ids == [[3, 4, 5, 2, 4], [], [3]]
    assert [ids.tolist() for ids in tokenizer.ids(["a", ""], special=True)] == [[0, 3], [0]]
    assert (tokenizer.begin, tokenizer.end) == ([0], 1)
    assert tokenizer.ids(["a"])[0].dtype == np.int32
    assert tokenizer.ids(["small " * 100_000])[0].shape == (100_000,)


def test_texts_with_begin_and_end_tokens_get_no_others(tokenizer_folder, tmp_path):
    encoder = make_encoder("text", schema.Data(), tokenizer=str(tokenizer_folder))
    rows = [{"text": text} for text in ("a", "<s> a", "a </s>", "<s> a </s>")]
    found = encoder.encode_rows(
        read_rows(file_part(Location(str(write(tmp_path / "a.jsonl", rows)))))
    )
    assert [one.ids.tolist() for one in found] == [[0, 3, 1]] * 4


@pytest.mark.parametrize("side", ["right", "left"])
def test_long_texts_for_classification_keep_the_closing_token(tmp_path, cache, side):
    """Ids equal transformers' with truncation."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = {"[CLS]": 0, "[SEP]": 1, "[UNK]": 2} | {f"w{number}": 3 + number for number in range(9)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[UNK]", truncation_side=side
    )
    wrapped.save_pretrained(tmp_path / "tokenizer")
    texts = [" ".join(f"w{number}" for number in range(count)) for count in (2, 3, 4, 9)]
    file = write(tmp_path / "a.jsonl", [{"text": text, "label": 0} for text in texts])
    data = schema.Data(kind="classification", sequence_length=5, cache=str(cache))
    dataset = open_dataset(
        data,
        (str(file),),
        objective=datasets.objective_of(data),
        tokenizer=str(tmp_path / "tokenizer"),
        model=ModelTraits(),
        build=True,
    )
    expected = [wrapped(text, truncation=True, max_length=5)["input_ids"] for text in texts]
    assert [dataset[index]["input_ids"].tolist() for index in range(4)] == expected
    assert expected[3] == ([0, 3, 4, 5, 1] if side == "right" else [0, 9, 10, 11, 1])
    assert dataset.describe()[1].startswith("warning: 2 of 4 documents are longer than 5 tokens")
    assert "7 tokens (26.9% of all)" in dataset.describe()[1]


def test_tokenizer_identity_changes_with_its_files(tokenizer_folder, tmp_path):
    identity = tokenizer_identity(str(tokenizer_folder))
    copy = copy_folder(tokenizer_folder, tmp_path / "copy")
    write(copy / "model.safetensors", b"weights")
    write(copy / "model.safetensors.index.json", b"{}")
    assert tokenizer_identity(str(copy)) == identity
    for name in ("merges.txt", "chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        write(copy / name, "a b")
        assert tokenizer_identity(str(copy)) != identity
        (copy / name).unlink()


def test_files_that_no_tokenizer_reads_do_not_tokenize_again(tokenizer_folder, tmp_path):
    """config.json is that of the model, but for the keys that choose the class of the tokenizer."""
    copy = copy_folder(tokenizer_folder, tmp_path / "copy")
    write(copy / "config.json", json.dumps({"model_type": "llama", "rope_theta": 1e4}))
    identity = tokenizer_identity(str(copy))
    write(
        copy / "config.json", json.dumps({"rope_theta": 1e6, "model_type": "llama", "dtype": "a"})
    )
    for name in ("generation_config.json", "preprocessor_config.json", "adapter_config.json"):
        write(copy / name, "{}")
    assert tokenizer_identity(str(copy)) == identity
    for more in (
        {"model_type": "mistral"},
        {"tokenizer_class": "A"},
        {"transformers_version": "5"},
    ):
        write(copy / "config.json", json.dumps({"model_type": "llama"} | more))
        assert tokenizer_identity(str(copy)) != identity


def test_tokenizer_without_eos_token_is_refused(tokenizer_folder, tmp_path, cache):
    copy = copy_folder(tokenizer_folder, tmp_path / "copy")
    config = json.loads((copy / "tokenizer_config.json").read_text())
    del config["eos_token"]
    write(copy / "tokenizer_config.json", json.dumps(config))
    message = r"has no end-of-text token \(eos_token\), which ends each document"
    with pytest.raises(RecipeError, match=rf"data.tokenizer: .*copy: {message}"):
        create_store(write(tmp_path / "a.txt", "a"), cache=cache, tokenizer=str(copy))


@pytest.mark.parametrize("content", [None, "", "{}", "garbage"])
def test_folder_without_a_tokenizer_is_refused(tmp_path, content):
    if content is not None:
        write(tmp_path / "tokenizer.json", content)
    message = f"^data.tokenizer: {tmp_path}: no tokenizer could be loaded: "
    with pytest.raises(RecipeError, match=message):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_a_pipe_in_a_folder_is_refused(tmp_path, name):
    """Its reader would wait for ever."""
    os.mkfifo(tmp_path / name)
    message = f"^data.tokenizer: {tmp_path / name} is not a regular file"
    for read in (load_tokenizer, tokenizer_identity):
        with pytest.raises(RecipeError, match=message):
            read(str(tmp_path))


def test_a_pipe_as_chat_template_is_refused(tmp_path):
    os.mkfifo(tmp_path / "template")
    data = schema.Data(kind="chat", chat_template=str(tmp_path / "template"))
    with pytest.raises(RecipeError, match=r"data.chat_template: .*is not a regular file"):
        make_encoder("chat", data, tokenizer="bytes")


# Stores


def create_store(*patterns, cache, kind="text", tokenizer="bytes", column="text", build=True):
    data = schema.Data(kind=kind, text_column=column, cache=str(cache))
    return open_store(tuple(map(str, patterns)), data, tokenizer=tokenizer, build=build)


def test_store_of_text(tmp_path, cache, tokenizer_folder):
    text = write(tmp_path / "b.txt", "ab")
    store = create_store(text, write(tmp_path / "a.jsonl", ["ä", "", "z\r\n"]), cache=cache)
    assert documents_of(store) == [[97, 98, END], [0xC3, 0xA4, END], [122, 13, 10, END]]
    assert (store.documents, store.largest_id, store.labels) == (3, END, None)
    assert isinstance(store.ids, np.memmap)
    assert store.ids.dtype == np.int32
    words = create_store(write(text, "a small world"), cache=cache, tokenizer=str(tokenizer_folder))
    assert documents_of(words) == [[0, 3, 4, 5, 1]]


def test_store_is_tokenized_once(tmp_path, cache, messages):
    file = write(tmp_path / "a.jsonl", [{"text": "ab", "body": "c"}])
    first = create_store(file, cache=cache)
    assert says("tokenizing 1 file (0.0 MiB)", messages()[0])
    assert says("tokenized 1 documents, 3 tokens in ... s (... tokens/s)", messages()[1])
    again, other_rank = (
        create_store(file, cache=cache),
        create_store(file, cache=cache, build=False),
    )
    assert documents_of(first) == documents_of(again) == documents_of(other_rank)
    assert documents_of(first) == [[97, 98, END]]
    assert store_names(cache) == [first.folder.name]
    assert len(messages()) == 2
    # A different column, or different content of the same size, gives a new store
    assert documents_of(create_store(file, cache=cache, column="body")) == [[99, END]]
    write(file, [{"text": "xy", "body": "c"}])
    os.utime(file, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns + 1))
    assert documents_of(create_store(file, cache=cache)) == [[120, 121, END]]
    assert len(messages()) == 2 * len(store_names(cache)) == 6


@pytest.mark.parametrize("how", ["in place", "replaced", "folder"])
def test_a_file_of_the_same_size_and_time_is_noticed(tmp_path, cache, how):
    """Its old tokens were used."""
    if how == "folder":
        Dataset.from_list([{"text": "ab"}]).save_to_disk(tmp_path / "rows")
        Dataset.from_list([{"text": "xy"}]).save_to_disk(tmp_path / "other")
        pattern = tmp_path / "rows"
        (file,), (other,) = (list((tmp_path / name).glob("*.arrow")) for name in ("rows", "other"))
    else:
        pattern = file = write(tmp_path / "a.jsonl", [{"text": "ab"}])
        other = write(tmp_path / "other.jsonl", [{"text": "xy"}])
    state = file.stat()
    assert other.stat().st_size == state.st_size
    assert documents_of(create_store(pattern, cache=cache)) == [[97, 98, END]]
    if how == "replaced":
        other.replace(file)
    else:
        file.write_bytes(other.read_bytes())
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    load_data_set.cache_clear()
    assert documents_of(create_store(pattern, cache=cache)) == [[120, 121, END]]


@pytest.mark.parametrize("kind", ["int32", "int64", "uint16", "large"])
def test_tokens_of_arrow_are_arrays(tmp_path, cache, kind):
    """Lists of Python integers took a hundred times longer. The results are those of .jsonl."""
    rows = [
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "weights": [1.0, 0.5, 2.0]},
        {"input_ids": [8], "labels": None, "weights": [3.0]},
        {"input_ids": [], "labels": [], "weights": []},
        {"input_ids": [9, 300], "labels": [9, -100], "weights": [1.0, 1.0]},
    ]
    made = pyarrow.large_list if kind == "large" else pyarrow.list_
    ids = made(pyarrow.int64() if kind == "large" else getattr(pyarrow, kind)())
    fields = {"input_ids": ids, "labels": made(pyarrow.int64()), "weights": made(pyarrow.float32())}
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema(fields))
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=3)
    Dataset(table).save_to_disk(tmp_path / "saved")
    write(tmp_path / "a.jsonl", rows)
    stores = []
    for name in ("a.jsonl", "a.parquet", "saved"):
        data = schema.Data(kind="tokens", cache=str(cache), weights_column="weights")
        stores.append(open_store((str(tmp_path / name),), data, tokenizer=None, build=True))
    assert documents_of(stores[0]) == [[5, 6, 7], [8], [9, 300]]
    assert len({store.fingerprint["content"] for store in stores}) == 1
    arrays = [
        row.values
        for row in read_rows(file_part(Location(str(tmp_path / "a.parquet"))), arrays=True)
    ]
    assert all(isinstance(row["input_ids"], np.ndarray) for row in arrays)


@pytest.mark.parametrize(
    ("column", "rule"),
    [
        ([[1.5]], "whole-numbers"),
        ([[1], [2**40]], "32-bits"),
        ([[1], [2, None]], "whole-numbers"),
        ([[1], [-3]], "negative"),
    ],
)
def test_wrong_tokens_of_arrow_are_refused(tmp_path, words, cache, column, rule):
    write(tmp_path / "a.parquet", [{"input_ids": ids} for ids in column])
    data = schema.Data(kind="tokens", cache=str(cache))
    with words.refused(f"a.parquet {rule}"):
        open_store((str(tmp_path / "a.parquet"),), data, tokenizer=None, build=True)


def damage(file, size):
    if size is None:
        file.unlink()
    else:
        os.truncate(file, size)


def test_damaged_store_is_built_again(tmp_path, cache, messages):
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] * 4
    file = write(tmp_path / "a.jsonl", rows)
    first, told = create_store(file, cache=cache, kind="tokens"), 0
    folder, whole = first.folder, documents_of(first)
    faults = [
        ("ids.bin", 40, "ids.bin has 40 bytes instead of 48"),
        ("ids.bin", 0, "ids.bin has 0 b"),
    ]
    faults += [
        ("labels.bin", 44, "labels.bin has 44 b"),
        ("offsets.npy", 150, ""),
        ("meta.json", 0, ""),
    ]
    faults += [("offsets.npy", 0, ""), ("ids.bin", None, ""), ("meta.json", None, "")]
    faults += [("labels.bin", None, "No such file")]
    for name, size, message in faults:
        assert len(messages()) == 3 * told + 2, "a whole store is used"
        damage(folder / name, size)
        again, told = create_store(file, cache=cache, kind="tokens"), told + 1
        assert f"{folder} is damaged and is built again: " in messages()[-3]
        assert message in messages()[-3]
        assert (documents_of(again), again.labels.tolist()) == (whole, [-100, 2, 3] * 4)
        assert again.fingerprint == first.fingerprint
        assert store_names(cache) == [folder.name]


def test_store_is_on_the_disk_before_it_gets_its_name(tmp_path, cache, monkeypatch):
    synced, real = [], os.fsync

    def fsync(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    store = create_store(write(tmp_path / "a.txt", "ab"), cache=cache)
    names = [path.name for path in synced if path.parent.name.startswith(f".{store.folder.name}")]
    assert sorted(names) == sorted(path.name for path in store.folder.iterdir())
    *_, scratch, parent = synced
    assert scratch.name.startswith(f".{store.folder.name}")
    assert parent == cache.resolve()


def test_damaged_store_that_cannot_be_removed_is_refused(tmp_path, cache, monkeypatch):
    file = write(tmp_path / "a.txt", "ab")
    damage(create_store(file, cache=cache).folder / "ids.bin", 0)

    def rename(path, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "rename", rename)
    message = (
        r"^data.cache: .* is damaged \(ids.bin has 0 bytes instead of 12\) and cannot be removed"
    )
    with pytest.raises(RecipeError, match=message):
        create_store(file, cache=cache)


def test_other_ranks_wait_for_the_store(tmp_path, cache):
    file, waited = write(tmp_path / "a.txt", "ab"), []

    def wait():
        waited.append(documents_of(create_store(file, cache=cache, build=False)))

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(0.15)
    assert waiting.is_alive()
    create_store(file, cache=cache)
    waiting.join(120)
    assert waited == [[[97, 98, END]]]


def test_cache_folder(tmp_path, monkeypatch):
    assert cache_folder("some/where") == Path("some/where")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / "launcher"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder(None) == tmp_path / ".cache" / "launcher"
    file = write(tmp_path / "a.txt", "ab")
    message = f"^data.cache: {file} cannot be written to: Not a directory$"
    with pytest.raises(RecipeError, match=message):
        create_store(file, cache=file)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_store_of_tokens(tmp_path, cache, name):
    rows = [{"input_ids": [1, 2, 3]}, {"input_ids": []}, {"input_ids": [7]}]
    store = create_store(write(tmp_path / name, rows), cache=cache, kind="tokens")
    assert (documents_of(store), store.labels, store.largest_id) == ([[1, 2, 3], [7]], None, 7)
    rows = [
        {"input_ids": [1, 2, 3], "labels": [IGNORED, 9, 3]},
        {"input_ids": [4, 5]},
        {"input_ids": [6], "labels": None},
    ]
    store = create_store(write(tmp_path / f"more_{name}", rows), cache=cache, kind="tokens")
    assert documents_of(store) == [[1, 2, 3], [4, 5], [6]]
    assert store.labels.tolist() == [IGNORED, 9, 3, 4, 5, 6]
    assert store.largest_id == 9


BROKEN_TOKENS = [
    (
        [{"input_ids": [1]}, {"text": "x"}],
        "no-column",
    ),
    ([{"input_ids": "abc"}], "whole-numbers"),
    ([{"input_ids": [1, 2.0]}], "whole-numbers"),
    ([{"input_ids": [1, True]}], "whole-numbers"),
    ([{"input_ids": [1, -1]}], "negative"),
    ([{"input_ids": [2**31]}], "32-bits"),
    ([{"input_ids": [1, 2], "labels": [1]}], "number-of-labels"),
    ([{"input_ids": [1], "labels": [-1]}], "label"),
    ([{"input_ids": [1], "labels": [None]}], "whole-numbers-as-labels"),
]


@pytest.mark.parametrize(("rows", "rule"), BROKEN_TOKENS)
def test_invalid_token_rows_are_refused(tmp_path, words, cache, rows, rule):
    file = write(tmp_path / "a.jsonl", rows)
    with words.refused(f"tokens {rule}"):
        create_store(file, cache=cache, kind="tokens")
    assert store_names(cache) == [], "an incomplete store is left behind"


NO_ROWS = "{file}: it has no rows; remove it, or leave it out of the patterns"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "", NO_ROWS),
        ("a.jsonl", "\n\n", NO_ROWS),
        ("a.json", "[]", NO_ROWS),
        ("a.csv", "text,label\n", NO_ROWS),
        ("a.jsonl", [""], "data: no document with text in 2 files"),
    ],
)
def test_files_without_documents_are_refused(tmp_path, cache, name, content, expected):
    file, empty = write(tmp_path / name, content), write(tmp_path / "b.txt", "")
    with pytest.raises(RecipeError) as error:
        create_store(file, empty, cache=cache)
    assert str(error.value) == expected.format(file=file)


# Packing


def best_fit(offsets, length):
    return packing.best_fit(packing.separate(offsets, length), length)


PACKINGS = {"stream": packing.stream, "separate": packing.separate, "best_fit": best_fit}


def counting_store(sizes):
    """Documents of these sizes. The id of a token is its index in the store, so ids are unique."""
    offsets = np.cumsum([0, *sizes], dtype=np.int64)
    ids = np.arange(offsets[-1], dtype=np.int32)
    return TokenStore(ids=ids, labels=None, offsets=offsets, largest_id=len(ids) - 1)


def pieces_of(sequences):
    """(start, length) of the pieces of each sequence."""
    pieces = list(zip(sequences.starts.tolist(), sequences.lengths.tolist(), strict=True))
    return [pieces[start:end] for start, end in itertools.pairwise(sequences.bounds.tolist())]


def random_cases(times=120):
    rng = random.Random(5)
    for _ in range(times):
        longest = rng.choice([1, 3, 10, 40])
        sizes = [rng.randint(1, longest) for _ in range(rng.randint(1, 30))]
        yield sizes, rng.choice([1, 2, 3, 5, 8, 16, 64])


@pytest.mark.parametrize("name", PACKINGS)
def test_packing_keeps_every_token_and_target_once(name):
    for sizes, length in random_cases():
        store = counting_store(sizes)
        sequences = PACKINGS[name](store.offsets, length)
        dataset = datasets.dataset_of(store, sequences, length, name != "separate")
        firsts, lasts = set(store.offsets[:-1].tolist()), set((store.offsets[1:] - 1).tolist())
        ids, targets = [], []
        for index, pieces in enumerate(pieces_of(sequences)):
            row = {key: value.tolist() for key, value in dataset[index].items()}
            assert 1 <= len(row["input_ids"]) <= length, (sizes, length)
            tokens = [token for start, size in pieces for token in range(start, start + size)]
            assert row["input_ids"] == tokens
            assert row["position_ids"] == [
                position for _, size in pieces for position in range(size)
            ]
            for start, size in pieces:
                assert not firsts & set(range(start + 1, start + size)), (
                    "a piece has tokens of more than one document"
                )
            ids += tokens
            targets += row["targets"]
        assert sorted(ids) == list(range(sum(sizes))), (sizes, length)
        assert targets == [IGNORED if token in lasts else token + 1 for token in ids]


def test_documents_are_split_at_the_expected_positions():
    for sizes, length in random_cases():
        offsets, total = counting_store(sizes).offsets, sum(sizes)
        sequences = packing.stream(offsets, length)
        filled = [sum(size for _, size in pieces) for pieces in pieces_of(sequences)]
        assert filled == [min(length, total - start) for start in range(0, total, length)]
        bounds = list(itertools.pairwise(offsets.tolist()))
        cut = sum((end - 1) // length > start // length for start, end in bounds)
        assert sequences.split_documents == cut
        separate = packing.separate(offsets, length)
        assert pieces_of(separate) == [
            [(at, min(length, end - at))]
            for start, end in bounds
            for at in range(start, end, length)
        ]
        fitted = best_fit(offsets, length)
        assert sorted(itertools.chain(*pieces_of(fitted))) == [
            one for (one,) in pieces_of(separate)
        ]
        filled = sorted(sum(size for _, size in pieces) for pieces in pieces_of(fitted))
        assert len(filled) == 1 or filled[0] + filled[1] > length, (
            "two sequences would fit into one"
        )
        longer = sum(size > length for size in sizes)
        assert separate.split_documents == fitted.split_documents == longer


def test_best_fit_is_close_to_the_optimum():
    """The documents fit into a known number of sequences without padding."""
    rng = random.Random(3)
    for full in (1, 7, 40, 200):
        sizes = []
        for _ in range(full):
            cuts = sorted({0, 64, *(rng.randrange(1, 64) for _ in range(rng.randint(0, 6)))})
            sizes += [end - start for start, end in itertools.pairwise(cuts)]
        rng.shuffle(sizes)
        assert full <= len(best_fit(counting_store(sizes).offsets, 64)) <= 11 / 9 * full + 4
    sequences = best_fit(counting_store([3, 9, 2, 5, 10, 1]).offsets, 10)
    in_order = [[(0, 3), (12, 2), (14, 5)], [(3, 9), (29, 1)], [(19, 10)]]
    assert pieces_of(sequences) == in_order, "sequences must stay close to the order of the files"


# Micro-batches


@pytest.mark.parametrize(
    ("length", "targets"),
    [
        (4, [[IGNORED, 7, 8, IGNORED], [9, IGNORED]]),
        # The first label of a piece is the last target of the previous piece
        (2, [[IGNORED, 7], [8, IGNORED], [9, IGNORED]]),
        (1, [[IGNORED], [7], [8], [IGNORED], [9], [IGNORED]]),
    ],
)
def test_labels_are_shifted(length, targets):
    """Documents [5 6 7 8], with loss on 7 and 8, and [3 4], where the label of 4 is 9."""
    store = TokenStore(
        ids=np.array([5, 6, 7, 8, 3, 4], dtype=np.int32),
        labels=np.array([IGNORED, IGNORED, 7, 8, 3, 9], dtype=np.int32),
        offsets=np.array([0, 4, 6]),
    )
    dataset = datasets.dataset_of(store, packing.separate(store.offsets, length), length)
    assert [dataset[index]["targets"].tolist() for index in range(len(dataset))] == targets
    collated = dataset.collate([dataset[index] for index in range(len(dataset))])
    assert (collated.tokens, collated.loss_tokens) == (6, 3)


def dataset_of(sizes, length, *, packed):
    store = counting_store(sizes)
    sequences = (best_fit if packed else packing.separate)(store.offsets, length)
    return datasets.dataset_of(store, sequences, length, packed)


def test_rows_are_padded_on_the_right():
    dataset = dataset_of([3, 1, 2], 8, packed=False)
    collated = dataset.collate([dataset[index] for index in range(3)])
    dtypes = {name: tensor.dtype for name, tensor in contents(collated.micro_batch).items()}
    assert dtypes.pop("text_mask") == torch.bool
    assert {*dtypes.values()} == {torch.int64}
    assert {name: tensor.tolist() for name, tensor in contents(collated.micro_batch).items()} == {
        "input_ids": [[0, 1, 2], [3, 0, 0], [4, 5, 0]],
        "text_mask": [[1, 1, 1], [1, 0, 0], [1, 1, 0]],
        "targets": [[1, 2, IGNORED], [IGNORED] * 3, [5, IGNORED, IGNORED]],
        "positions": [0, 1, 6],
    }
    assert (collated.tokens, collated.loss_tokens) == (6, 3)


def test_packed_rows_have_full_length_and_separate_positions():
    dataset = dataset_of([3, 2, 6], 6, packed=True)
    collated = dataset.collate([dataset[0], dataset[1]])
    tensors = {name: tensor.tolist() for name, tensor in contents(collated.micro_batch).items()}
    assert tensors["input_ids"] == [[0, 1, 2, 3, 4, 0], [5, 6, 7, 8, 9, 10]]
    assert tensors["targets"] == [[1, 2, IGNORED, 4, IGNORED, IGNORED], [6, 7, 8, 9, 10, IGNORED]]
    assert tensors["position_ids"] == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]
    assert (collated.tokens, collated.loss_tokens) == (11, 8)
    # Padding is a separate document
    dataset = dataset_of([2, 1], 6, packed=True)
    assert dataset.collate([dataset[0]]).micro_batch.inputs["position_ids"].tolist() == [
        [0, 1, 0, 0, 1, 2]
    ]
    one_document_rows = dataset_of([6, 4], 6, packed=True)
    made = one_document_rows.collate([one_document_rows[0], one_document_rows[1]])
    tensors = contents(made.micro_batch)
    assert "position_ids" not in tensors, "no row has several documents, so no positions are needed"
    assert tensors["input_ids"].shape == (2, 6)


@pytest.mark.parametrize("packed", [True, False])
def test_rows_without_a_sample_have_zero_weight(packed):
    dataset = dataset_of([3], 4, packed=packed)
    single = dataset.collate([dataset[0]])
    with_empty_rows = dataset.collate([dataset[0], dataset[NO_SAMPLE], dataset[NO_SAMPLE]])
    assert with_empty_rows.tokens == single.tokens > 0
    assert with_empty_rows.loss_tokens == single.loss_tokens > 0
    targets = with_empty_rows.micro_batch.targets
    assert targets[0].tolist() == single.micro_batch.targets[0].tolist()
    assert targets[1:].eq(IGNORED).all()
    assert with_empty_rows.micro_batch.inputs["input_ids"].shape == (3, 4 if packed else 3)
    empty = dataset.collate([dataset[NO_SAMPLE]])
    assert (empty.tokens, empty.loss_tokens) == (0, 0)
    assert empty.micro_batch.inputs["input_ids"].shape == (1, 4 if packed else 1)


# From files to sequences


def dataset_from_file(file, cache, *, vocabulary=1000, **more):
    data = schema.Data(train=(str(file),), cache=str(cache), tokenizer="bytes", **more)
    model = ModelTraits(vocabulary=vocabulary)
    options = {"tokenizer": "bytes", "model": model, "build": True}
    return open_dataset(data, data.train, objective=datasets.objective_of(data), **options)


def test_default_packing_of_each_kind(tmp_path, cache):
    text = write(tmp_path / "a.jsonl", ["abc", "de", "f"])
    stream = dataset_from_file(text, cache, sequence_length=4)
    sequences = [stream[index]["input_ids"].tolist() for index in range(len(stream))]
    # The last sequence would be the end of "f" alone, without a target
    assert sequences == [[*b"abc", END], [*b"de", END, *b"f"]]
    rows = [{"input_ids": [1, 2]}, {"input_ids": [4, 5, 6]}, {"input_ids": [7, 8]}]
    tokens = write(tmp_path / "b.jsonl", rows)
    fitted = dataset_from_file(tokens, cache, kind="tokens", sequence_length=4)
    sequences = [fitted[index]["input_ids"].tolist() for index in range(len(fitted))]
    assert sequences == [[1, 2, 7, 8], [4, 5, 6]]
    for file, kind in ((text, "text"), (tokens, "tokens")):
        assert len(dataset_from_file(file, cache, kind=kind, sequence_length=8, packing=False)) == 3


def test_sources_of_a_mixture(tmp_path, cache):
    many = write(tmp_path / "many.jsonl", [{"body": "x" * 7} for _ in range(9)])
    few = write(tmp_path / "few.jsonl", [{"input_ids": [1, 2]}] * 2)
    sources = {
        "many": {"files": str(many), "text_column": "body", "limit": 8},
        "few": {"files": str(few), "kind": "tokens"},
    }

    def opened(**weights):
        train = {
            name: schema.Source(**{**source, "files": (source["files"],)}, **weights)
            for name, source in sources.items()
        }
        data = schema.Data(train=train, cache=str(cache), sequence_length=8, packing=False)
        return open_dataset(
            data,
            train,
            objective=datasets.objective_of(data),
            tokenizer="bytes",
            model=ModelTraits(vocabulary=300),
            build=True,
        )

    found = opened()
    assert [part.store.documents for part in found.parts.values()] == [8, 2]
    assert [line.partition(":")[0] for line in found.describe()] == [
        "many (80.0% of the sequences)",
        "few (20.0% of the sequences)",
    ]
    for shuffle in (True, False):  # each sequence once in an epoch
        order = make_order(found, seed=3, shuffle=shuffle, epochs=2)
        samples = [order.sample(position) for position in range(21)]
        for epoch in (samples[:10], samples[10:20]):
            assert sorted(epoch) == list(range(10))
            assert (epoch == list(range(10))) == (not shuffle)
        assert samples[20] == NO_SAMPLE
    order = make_order(opened(weight=1.0), seed=3, shuffle=True, epochs=2)
    assert sum(order.sample(position) >= 8 for position in range(20)) == 10


@pytest.mark.parametrize("suffix", [".ndjson", ".jl", ".jsonlines", ".jl.gz"])
def test_other_names_of_json_lines(tmp_path, suffix):
    plain = write(tmp_path / "a.jsonl", ["one", "two"]).read_bytes()
    (tmp_path / "a.jsonl").unlink()
    write(tmp_path / f"a{suffix}", gzip.compress(plain) if suffix.endswith(".gz") else plain)
    for kind in ("text", "chat"):
        (part,) = find_parts((str(tmp_path),), kind=kind)
        assert part.form == "jsonl"
        assert [row.values for row in read_rows(part)] == [{"text": "one"}, {"text": "two"}]


@pytest.mark.parametrize("arrays", [False, True])
@pytest.mark.parametrize("written", ["file", "stream", "feather"])
def test_arrow_files(tmp_path, written, arrays):
    """In batches that are larger than those that are read at once; nulls stay apart from []."""
    rows = [
        {"input_ids": [number, number + 1], "labels": None if number % 3 else [number, 7], "n": "x"}
        for number in range(300)
    ]
    rows[4]["input_ids"] = []
    table, file = pyarrow.Table.from_pylist(rows), tmp_path / "a.arrow"
    if written == "feather":
        file = tmp_path / "a.feather"
        pyarrow.feather.write_feather(table, str(file))
    else:
        make = pyarrow.ipc.new_file if written == "file" else pyarrow.ipc.new_stream
        with make(str(file), table.schema) as writer:
            writer.write_table(table)
    (part,) = find_parts((str(tmp_path),), kind="tokens")
    assert part.form == "arrow"
    found = list(read_rows(part, arrays=arrays))
    assert [row.number for row in found] == list(range(1, 301))
    for row, expected in zip(found, rows, strict=True):
        plain = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in row.values.items()
        }
        assert plain == expected
    assert guess_of(file) == "tokens"
    file.write_bytes(file.read_bytes()[:40])
    (row,) = read_rows(part)
    assert "not an Arrow file, or a damaged one" in row.problem


def guess_of(file):
    return guess(first_row([str(file)])[1], {}).layout.kind


def test_null_lists_with_the_oldest_pyarrow():
    """In pyarrow 17 each scalar is true: `bool(pyarrow.scalar(False))`."""

    class Scalars:
        def __init__(self, array):
            self.to_pylist = array.to_pylist

        def __iter__(self):
            return iter([object()] * len(self.to_pylist()))

    class Column:
        def __init__(self, array):
            self.array = array

        def __getattr__(self, name):
            return getattr(self.array, name)

        def is_valid(self):
            return Scalars(self.array.is_valid())

    column = pyarrow.array([None, [1, 2], []], type=pyarrow.list_(pyarrow.int64()))
    first, *others = source_rows._column(Column(column))
    assert first is None
    assert [value.tolist() for value in others] == [[1, 2], []]


OTHER_CONTENT = {
    "gzip data; add .gz": gzip.compress(b"text"),
    "xz data; add .xz": lzma.compress(b"text"),
    "bzip2 data; add .bz2": bz2.compress(b"text"),
    "Parquet data; name it .parquet": b"PAR1\x15\x04\x15",
    "Arrow data; name it .arrow": b"ARROW1\0\0\xff\xff\xff\xff",
    "UTF-16 text; convert it (iconv -f UTF-16 -t": '{"text": "a"}\n'.encode("utf-16"),
    "UTF-16 text; convert it (iconv -f UTF-16LE -t": '{"text": "a"}\n'.encode("utf-16-le"),
    "UTF-16 text; convert it (iconv -f UTF-16BE -t": '{"text": "a"}\n'.encode("utf-16-be"),
    "a PDF document": b"%PDF-1.7\n%\xe2\xe3",
}


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.json", "a.csv", "a", "a.jsonl.gz"])
@pytest.mark.parametrize("what", OTHER_CONTENT)
def test_other_content_is_named_by_its_first_bytes(tmp_path, name, what):
    content = OTHER_CONTENT[what]
    file = write(tmp_path / name, gzip.compress(content) if name.endswith(".gz") else content)
    (row,) = read_rows(file_part(Location(str(file))))
    assert row.problem.startswith(f"it holds {what}"), row.problem
    assert row.where == str(file)


@pytest.mark.parametrize("text", ["BZh is no archive", "PAR1 is text", "%PDF-1 is text", "ä"])
def test_text_may_begin_like_other_content(tmp_path, text):
    (row,) = read_rows(file_part(Location(str(write(tmp_path / "a.txt", text)))))
    assert row.values == {"text": text}


@pytest.mark.parametrize("suffix", ["xz", "bz2"])
def test_a_damaged_compressed_file_is_named(tmp_path, suffix):
    compress = {"xz": lzma, "bz2": bz2}[suffix].compress
    whole = compress(b'{"text": "a"}\n' * 10_000)
    file = write(tmp_path / f"a.jsonl.{suffix}", whole[:-20])
    with pytest.raises(RecipeError, match=rf"a.jsonl.{suffix}: cannot be read: "):
        list(read_rows(file_part(Location(str(file)))))


def test_what_is_not_read_is_named(tmp_path, cache):
    write(tmp_path / "a.jsonl", ["one"])
    for name in ("README.md", "b/c.md", "d.tar.gz", ".git/config", "__pycache__/x.pyc"):
        write(tmp_path / name, "x")
    notes = []
    find_parts((str(tmp_path),), kind="chat", notes=notes)
    listed = "3 files (2 .md, 1 .tar.gz; such as README.md)"
    assert notes == [f"note: of {tmp_path}, {listed} are not read"]
    notes.clear()
    find_parts((str(tmp_path),), kind="text", notes=notes)
    documents = "2 files (2 .md; such as README.md) are no files of rows, and are one document each"
    assert notes == [
        f"note: {documents}",
        f"note: of {tmp_path}, {tmp_path}/d.tar.gz is not read",
    ]
    dataset = dataset_from_file(tmp_path, cache, kind="text", sequence_length=8)
    assert notes == [line for line in dataset.describe() if line.startswith("note: ")]


def test_token_id_beyond_the_vocabulary_is_refused(tmp_path, cache):
    text = write(tmp_path / "a.txt", "abc")
    assert len(dataset_from_file(text, cache, vocabulary=257)) == 1
    message = r"token id 256 is beyond the model's vocabulary of 256 \(model.config.vocab_size\)$"
    with pytest.raises(RecipeError, match=rf"a.txt: {message}"):
        dataset_from_file(text, cache, vocabulary=256)
    label = write(tmp_path / "b.jsonl", [{"input_ids": [1, 2], "labels": [1, 12]}])
    with pytest.raises(
        RecipeError, match=r"b.jsonl:1: token id 12 is beyond the model's .* of 10 "
    ):
        dataset_from_file(label, cache, kind="tokens", vocabulary=10)


def test_an_id_beyond_the_vocabulary_ends_the_start_at_once(tmp_path, cache, monkeypatch):
    """No file is read to its end, the next start reads none, and a store of a larger model has the
    origin of the row."""
    rows = [{"input_ids": [1, 2]}, {"input_ids": [3, 12]}, *[{"input_ids": [4]}] * 300]
    file = write(tmp_path / "a.jsonl", rows)
    monkeypatch.setattr(token_store, "_STORE_ROWS", 1)
    read = []
    original = Encoder.read

    def counted(encoder, parts):
        for row in original(encoder, parts):
            read.append(row.number)
            yield row

    monkeypatch.setattr(Encoder, "read", counted)

    def opened(vocabulary, *, build=True):
        read.clear()
        data = schema.Data(train=(str(file),), kind="tokens", cache=str(cache), sequence_length=8)
        model = ModelTraits(vocabulary=vocabulary)
        return open_store(data.train, data, tokenizer=None, model=model, build=build)

    message = r"a.jsonl:2: token id 12 is beyond the model's vocabulary of 10 "
    with pytest.raises(RecipeError, match=message):
        opened(10)
    assert max(read) < 100
    for build in (True, False):
        with pytest.raises(RecipeError, match=message):
            opened(10, build=build)
        assert read == []
    assert opened(13).documents == 302, "a larger model"
    with pytest.raises(RecipeError, match=r"a.jsonl:2: token id 12 .* of 11 "):
        opened(11)
    opened(11, build=False)
    assert read == []


def answer_rows(*prompts):
    return [{"prompt": "p" * size, "response": "yes"} for size in prompts]


@pytest.mark.parametrize("packing", [True, False])
def test_rows_whose_targets_are_cut_off_are_dropped(tmp_path, cache, packing):
    """With sequences of 8 tokens, a prompt of 9 leaves no target, and one of 8 the first."""
    options: dict = {"kind": "instruct", "sequence_length": 8, "packing": packing}
    options |= {"overlong": "cut", "prompt_format": "text"}
    rows = answer_rows(2, 9, 8, 20)
    dataset = dataset_from_file(write(tmp_path / "a.jsonl", rows), cache, **options)
    collated = [dataset.collate([dataset[index]]) for index in range(len(dataset))]
    assert [one.loss_tokens for one in collated] == [4, 1]
    size, _, cut, dropped = dataset.describe()
    assert size.startswith("2 documents, 14 tokens in 2 sequences of up to 8")
    assert size.endswith("; 35.7% of these tokens carry loss")  # 5 of 14
    assert cut.startswith("warning: 3 of 4 documents are longer than 8 tokens")
    within = "in their first 8 tokens (data.sequence_length)"
    assert dropped == f"warning: 2 of 4 documents have no token with loss {within} and are dropped"
    file = write(tmp_path / "b.jsonl", answer_rows(9, 10))
    with pytest.raises(RecipeError) as error:
        dataset_from_file(file, cache, **options)
    why = "each answer begins after the first 8 tokens of its row (data.sequence_length)"
    assert str(error.value) == f"data: no token with loss in {file}: {why}"


def test_token_rows_without_labels_are_dropped(tmp_path, cache):
    rows = [{"input_ids": [1, 2], "labels": [-100, -100]}, {"input_ids": [3, 4]}]
    file = write(tmp_path / "a.jsonl", rows)
    dataset = dataset_from_file(file, cache, kind="tokens", sequence_length=8)
    assert [dataset[index]["input_ids"].tolist() for index in range(len(dataset))] == [[3, 4]]
    dropped = "warning: 1 of 2 documents have no token with loss and are dropped"
    assert dataset.describe()[1] == dropped
