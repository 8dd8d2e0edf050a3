"""Files of token ids that other tools write, made here from their published layouts."""

import gzip
import itertools
import json
import pickle
import struct

import numpy as np
import pytest

from launcher.data import token_files
from launcher.data.opening import open_dataset
from launcher.data.streaming import StreamingDataset
from launcher.data.token_store import ModelTraits, open_store, origin_of, rows_of_documents
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.objectives.next_token import NextToken
from launcher.planner import sizes
from launcher.recipe import schema
from launcher.recipe.load import load_recipe
from launcher.sources.finding import find_parts, first_row
from launcher.sources.layouts import guess
from tests.unit.data.rows import documents_of, write
from tests.unit.small_recipe import SMALL, says

END = 9
DOCUMENTS = [[5, 6, END], [END], [7, 1, 2, 3, 4, 5, 6, END], [8, END], [300, 20, 10, END]]
CODES = {"u1": 1, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def ids_of(documents):
    return [id for ids in documents for id in ids]


def megatron(prefix, documents, *, dtype="u2", parts=1, code=None, modes=False, sequences=None):
    """parts: sequences of each document, the last ones may be empty."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids_of(documents), f"<{dtype}").tofile(f"{prefix}.bin")
    lengths = [len(part) for ids in documents for part in np.array_split(ids, parts)]
    firsts = np.arange(0, len(lengths) + 1, parts, dtype="<i8")
    pointers = np.cumsum([0, *lengths])[:-1] * np.dtype(dtype).itemsize
    header = struct.pack(
        "<QBQQ", 1, CODES[dtype] if code is None else code, len(lengths), len(firsts)
    )
    content = b"MMIDIDX\x00\x00" + header + np.array(lengths, "<i4").tobytes()
    content += pointers.astype("<i8").tobytes() + firsts.tobytes()
    content += bytes(len(lengths)) if modes else b""
    prefix.with_name(f"{prefix.name}.idx").write_bytes(content)
    return prefix


def olmo(file, documents, *, dtype="u2", metadata=False, masks=None):
    file.parent.mkdir(parents=True, exist_ok=True)
    np.array(ids_of(documents), f"<{dtype}").tofile(file)
    ends = np.cumsum([0, *map(len, documents)]).tolist()
    if metadata:
        with gzip.open(file.with_suffix(".csv.gz"), "wt") as lines:
            for number, (start, end) in enumerate(itertools.pairwise(ends)):
                lines.write(f"{start},{end},id-{number},web/a.jsonl.gz,{number}\n")
    if masks is not None:
        np.array(ids_of(masks), bool).tofile(
            file.with_name(file.name.replace("token_ids", "labels_mask"))
        )
    return file


def datatrove(file, documents, *, dtype="u2", index=True, metadata=None, masks=None):
    np.array(ids_of(documents), f"<{dtype}").tofile(file)
    if index:
        np.cumsum([*map(len, documents)]).astype("<u8").tofile(f"{file}.index")
    if metadata is not None:
        file.with_name(f"{file.name}.metadata").write_text(f"gpt2|{metadata}\n5\n5 T")
    if masks is not None:
        np.array(ids_of(masks), bool).tofile(f"{file}.loss")
    return file


def litdata(folder, chunks, *, code=16, dtype="i4", **config):
    folder.mkdir()
    listed = []
    for number, documents in enumerate(chunks):
        ids, count = np.array(ids_of(documents), f"<{dtype}"), len(documents)
        starts = np.cumsum(
            [8 + 4 * count, *(len(ids) * np.dtype(dtype).itemsize for ids in documents)]
        )
        content = struct.pack("<I", count) + starts.astype("<u4").tobytes() + ids.tobytes()
        name = f"chunk-0-{number}.bin"
        (folder / name).write_bytes(content)
        listed.append({"chunk_size": count, "dim": len(ids), "filename": name, "chunk_bytes": 1})
    known = {"data_format": [f"no_header_tensor:{code}"], "item_loader": "TokensLoader"}
    known |= {"compression": None, "encryption": None, **config}
    (folder / "index.json").write_text(json.dumps({"chunks": listed, "config": known}))
    return folder


@pytest.fixture
def opened(tmp_path):
    def open_files(*patterns, vocabulary=400, tokenizer=None, build=True, **data):
        section = schema.Data(kind="tokens", cache=str(tmp_path / "cache"), **data)
        return open_store(
            tuple(map(str, patterns)),
            section,
            tokenizer=tokenizer,
            model=ModelTraits(vocabulary=vocabulary),
            build=build,
        )

    return open_files


def refused(opened, *patterns, **data):
    with pytest.raises(RecipeError) as caught:
        opened(*patterns, **data)
    return str(caught.value)


# Megatron


@pytest.mark.parametrize("dtype", ["i2", "i4", "i8", "u2"])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_document_of_megatron_has_all_its_sequences(tmp_path, opened, dtype, parts):
    prefix = megatron(tmp_path / "a_text_document", DOCUMENTS, dtype=dtype, parts=parts)
    store = opened(prefix)
    assert documents_of(store) == DOCUMENTS
    assert store.ids[3:7].dtype == np.int32
    assert store.largest_id == 300
    assert store.labels is None


def test_any_name_of_a_file_of_megatron_is_its_name(tmp_path, opened):
    prefix = megatron(tmp_path / "data/a_text_document", DOCUMENTS)
    (tmp_path / "data/config.json").write_text('{"tokenizer": "gpt2"}')
    folders = {
        opened(name).folder
        for name in (prefix, f"{prefix}.bin", f"{prefix}.idx", prefix.parent, f"{prefix.parent}/a*.*",
                     f"{prefix.parent}/*_text_document")
    }  # fmt: skip
    assert len(folders) == 1


def test_the_ids_stay_where_they_are(tmp_path, opened):
    store = opened(megatron(tmp_path / "a", DOCUMENTS))
    assert not (store.folder / "ids.bin").exists()
    again = pickle.loads(pickle.dumps(store.ids))
    assert again[0:4].tolist() == [5, 6, END, END]
    with (tmp_path / "a.bin").open("r+b") as file:
        file.write(struct.pack("<H", 77))
    assert store.ids[0:1].tolist() == [77]


def test_several_files_are_one_row_of_documents(tmp_path, opened):
    for number in range(3):
        documents = [*DOCUMENTS[number:], [number, END]]
        megatron(tmp_path / f"data/{number}", documents, dtype=["u2", "i4", "i8"][number])
    store = opened(tmp_path / "data")
    wanted = [ids for n in range(3) for ids in [*DOCUMENTS[n:], [n, END]]]
    assert documents_of(store) == wanted
    assert store.ids[:].tolist() == ids_of(wanted)
    assert origin_of(store, 6).where == f"{tmp_path}/data/1.bin document 1"
    rows = rows_of_documents(store, schema.Data(kind="tokens"), {0, 8}, tokenizer=None)
    assert [rows[0].where, rows[8].where] == [
        f"{tmp_path}/data/0.bin document 1",
        f"{tmp_path}/data/1.bin document 3",
    ]


def test_documents_without_tokens_are_counted_and_left_out(tmp_path, opened):
    store = opened(megatron(tmp_path / "a", [[], *DOCUMENTS[:2], [], [], DOCUMENTS[2], []]))
    assert documents_of(store) == DOCUMENTS[:3]
    assert store.empty == 4
    assert [origin_of(store, number).number for number in range(3)] == [2, 3, 6]


@pytest.mark.parametrize("limit", [1, 3, 6, 7, 99])
def test_a_limit_takes_the_first_documents(tmp_path, opened, limit):
    for name in "ab":
        megatron(tmp_path / f"data/{name}", DOCUMENTS)
    store = opened(tmp_path / "data", limit=limit)
    assert documents_of(store) == (2 * DOCUMENTS)[:limit]
    assert len(store.ids) == store.offsets[-1]


@pytest.mark.parametrize("block", [1, 4, 5, 1 << 22])
def test_documents_have_the_hashes_of_rows_with_the_same_tokens(
    tmp_path, opened, monkeypatch, block
):
    monkeypatch.setattr(token_files, "_BLOCK", block)
    rows = opened(write(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in DOCUMENTS]))
    store = opened(megatron(tmp_path / "a", DOCUMENTS))
    assert store.hashes.tolist() == rows.hashes.tolist()
    raw = opened(olmo(tmp_path / "a.npy", DOCUMENTS), end_token=END)
    assert raw.hashes.tolist() == rows.hashes.tolist()
    assert documents_of(raw) == DOCUMENTS


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("packing", [False, True])
def test_samples_are_those_of_rows_with_the_same_tokens(tmp_path, held_out, packing):
    numbers = np.random.default_rng(0)
    documents = [numbers.integers(0, 400, n).tolist() for n in numbers.integers(1, 40, 50)]
    write(tmp_path / "a.jsonl", [{"input_ids": ids} for ids in documents])
    megatron(tmp_path / "a", documents, dtype="i4", parts=2)
    made = []
    for name in ("a.jsonl", "a"):
        data = schema.Data(
            kind="tokens",
            train=(str(tmp_path / name),),
            cache=str(tmp_path / "cache"),
            sequence_length=16,
            packing=packing,
            validation_split=0.3,
        )
        dataset = open_dataset(
            data,
            data.train,
            objective=NextToken(),
            tokenizer=None,
            model=ModelTraits(vocabulary=400),
            build=True,
            held_out=held_out,
        )
        made.append(
            [[value.tolist() for value in dataset[n].values()] for n in range(len(dataset))]
        )
    assert made[0] == made[1]
    assert len(made[0]) > 5


def test_a_changed_index_is_another_store(tmp_path, opened):
    first = opened(megatron(tmp_path / "a", DOCUMENTS))
    second = opened(megatron(tmp_path / "a", [ids_of(DOCUMENTS)]))
    assert second.folder != first.folder
    assert second.fingerprint["content"] != first.fingerprint["content"]
    assert second.fingerprint["files"] == first.fingerprint["files"]


def test_an_id_beyond_the_vocabulary_is_named(tmp_path, opened):
    prefix = megatron(tmp_path / "a", [[], *DOCUMENTS])
    problem = refused(opened, prefix, vocabulary=300)
    assert says(
        "...a.bin document 6: token id 300 is beyond the model's vocabulary of 300 ...", problem
    )
    assert "token_dtype" not in problem
    opened(prefix, vocabulary=301)  # the store of a larger model
    assert refused(opened, prefix, vocabulary=300) == problem
    assert refused(opened, megatron(tmp_path / "b", [[3, -2]], dtype="i4")).endswith(
        "b.bin document 1: -2 is no token id"
    )
    ids = megatron(tmp_path / "c", [[3], [1 << 33]], dtype="i8")
    assert refused(opened, ids, vocabulary=None).endswith(
        f"c.bin document 2: {1 << 33} is no token id"
    )


def cut(file, size):
    file.write_bytes(file.read_bytes()[:size])


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda p: (p / "a.idx").unlink(), "no-index"),
        (lambda p: (p / "a.bin").unlink(), "no-ids"),
        (lambda p: cut(p / "a.bin", 34), "fewer-tokens"),
        (lambda p: cut(p / "a.bin", 35), "size"),
        (lambda p: cut(p / "a.idx", 20), "no-index-of-megatron"),
        (lambda p: cut(p / "a.idx", 60), "size-of-the-index"),
        (lambda p: (p / "a.bin").write_bytes(b""), "no-tokens"),
        (lambda p: megatron(p / "a", DOCUMENTS, code=7), "float"),
        (lambda p: megatron(p / "a", DOCUMENTS, code=9), "version"),
        (lambda p: megatron(p / "a", DOCUMENTS, modes=True), "multimodal"),
        (lambda p: megatron(p / "a", [[]]), "nothing"),
        (
            lambda p: (p / "a.idx").write_bytes((p / "a.idx").read_bytes()[:-8] + bytes(8)),
            "documents",
        ),
        (
            lambda p: (p / "a.idx").write_bytes(
                (p / "a.idx").read_bytes()[:54] + bytes([4]) + (p / "a.idx").read_bytes()[55:]
            ),
            "order",
        ),
    ],
)  # fmt: skip
def test_files_of_megatron_that_do_not_fit_are_refused(tmp_path, words, opened, change, rule):
    megatron(tmp_path / "data/a", DOCUMENTS)
    change(tmp_path / "data")
    words.check(f"megatron {rule}", refused(opened, tmp_path / "data/a"))


# OLMo


def test_raw_ids_have_the_type_that_the_vocabulary_needs(tmp_path, opened):
    small = olmo(tmp_path / "a.npy", DOCUMENTS)
    assert documents_of(opened(small, end_token=END, vocabulary=1 << 16)) == DOCUMENTS
    large = olmo(tmp_path / "b.npy", DOCUMENTS, dtype="u4")
    assert documents_of(opened(large, end_token=END, vocabulary=(1 << 16) + 1)) == DOCUMENTS
    problem = refused(opened, large, end_token=END)
    assert says("...b.npy: read as uint16, every other id is 0, ...token_dtype: uint32", problem)
    assert documents_of(opened(large, end_token=END, token_dtype="uint32")) == DOCUMENTS
    problem = refused(opened, small, end_token=END, vocabulary=100_000)
    expected = "...document 1: token id ... is beyond ... read as uint32: data.token_dtype says ..."
    assert says(expected, problem)
    problem = refused(opened, small, end_token=END, vocabulary=None)
    assert says(
        "...a.npy: nothing says which type its ids have; give data.token_dtype, ...", problem
    )


def test_raw_documents_end_with_the_tokenizers_end_or_the_given_one(tmp_path, opened):
    rows = [[65, 66, 256], [67, 256], [68]]  # 256 ends texts of the tokenizer `bytes`
    file = olmo(tmp_path / "a.npy", rows)
    assert documents_of(opened(file, tokenizer="bytes")) == rows
    assert documents_of(opened(file, end_token=66)) == [[65, 66], [256, 67, 256, 68]]
    assert documents_of(opened(file, end_token=399)) == [ids_of(rows)]
    problem = refused(opened, file)
    assert says("...a.npy: nothing says where its documents end; give data.end_token, ...", problem)
    none = olmo(tmp_path / "b.npy", DOCUMENTS)
    problem = refused(opened, none, tokenizer="bytes")
    assert says("...b.npy: no document ends with 256, ...; data.end_token ...", problem)


def test_the_documents_in_a_csv_beside_raw_ids_count(tmp_path, opened):
    rows = [[5, END, 6], [7, 8], [1, 2, END]]
    file = olmo(tmp_path / "data/part-0-00000.npy", rows, metadata=True)
    (tmp_path / "data/statistics.json").write_text("{}")
    assert documents_of(opened(tmp_path / "data")) == rows
    assert documents_of(opened(tmp_path / "data/part*")) == rows
    with gzip.open(file.with_suffix(".csv.gz"), "wt") as lines:
        lines.write("0,3,a\n3,5,b\n")
    assert says("...: it has 8 tokens, but its index ends at 5: ...", refused(opened, file))
    with gzip.open(file.with_suffix(".csv.gz"), "wt") as lines:
        lines.write("0,3,a\n4,8,b\n")
    expected = "...csv.gz:2: ...: a document begins at 4, and not at 3; ...data.end_token..."
    assert says(expected, refused(opened, file))
    file.with_suffix(".csv.gz").write_text("0,3")
    assert says("...csv.gz:1: each line must have ...", refused(opened, file))


def test_masks_of_olmo_become_labels(tmp_path, opened):
    masks = [[position > 1 for position in range(len(ids))] for ids in DOCUMENTS]
    olmo(tmp_path / "data/token_ids_part_0000.npy", DOCUMENTS, metadata=True, masks=masks)
    store = opened(tmp_path / "data")
    assert documents_of(store) == DOCUMENTS
    assert store.labels[:].tolist() == [
        id if position > 1 else IGNORED for ids in DOCUMENTS for position, id in enumerate(ids)
    ]
    content = store.fingerprint["content"]
    olmo(tmp_path / "data/token_ids_part_0000.npy", DOCUMENTS, metadata=True, masks=DOCUMENTS)
    assert opened(tmp_path / "data").fingerprint["content"] != content
    cut(tmp_path / "data/labels_mask_part_0000.npy", 3)
    expected = "...labels_mask_part_0000.npy: 3 bytes for 18 tokens; it needs one for each"
    assert says(expected, refused(opened, tmp_path / "data"))


def test_a_npy_file_with_a_header_says_its_type(tmp_path, opened):
    np.save(tmp_path / "a.npy", np.array(ids_of(DOCUMENTS), dtype=">i4"))
    assert documents_of(opened(tmp_path / "a.npy", end_token=END)) == DOCUMENTS
    np.save(tmp_path / "b.npy", np.ones((4, 8), dtype=np.uint16))
    problem = refused(opened, tmp_path / "b.npy", end_token=END)
    assert says("...b.npy: an array of 2 dimensions; ids must be one row, ...", problem)
    np.save(tmp_path / "c.npy", np.ones(8))
    problem = refused(opened, tmp_path / "c.npy", end_token=END)
    assert says("...c.npy: it holds float64, and no token ids", problem)
    cut(tmp_path / "a.npy", 128 + 40)
    problem = refused(opened, tmp_path / "a.npy", end_token=END)
    assert says("...a.npy: 10 values, but its header says 18: it is cut off", problem)


# datatrove and nanotron


@pytest.mark.parametrize("metadata", [None, 2])
def test_datatrove(tmp_path, opened, metadata):
    masks = [[position % 2 for position in range(len(ids))] for ids in DOCUMENTS]
    file = tmp_path / "00000_shuffled.ds"
    datatrove(file, [[], *DOCUMENTS], metadata=metadata, masks=masks)
    store = opened(tmp_path)
    assert documents_of(store) == DOCUMENTS
    assert store.empty == 1
    assert store.labels[0:4].tolist() == [IGNORED, 6, IGNORED, IGNORED]


def test_ids_of_datatrove_without_an_index(tmp_path, opened):
    file = datatrove(tmp_path / "a.ds", DOCUMENTS, dtype="u4", index=False, metadata=4)
    assert documents_of(opened(file, end_token=END)) == DOCUMENTS


@pytest.mark.parametrize(
    ("settings", "size", "rule"),
    [
        ({"metadata": 2}, 34, "fewer-tokens"),
        ({}, 34, "size"),
        ({"metadata": 3}, 36, "metadata"),
        ({"metadata": 4}, 36, "bytes-of-an-id"),
        ({"masks": [[1]]}, 36, "mask"),
    ],
)
def test_files_of_datatrove_that_do_not_fit_are_refused(
    tmp_path, words, opened, settings, size, rule
):
    file = datatrove(tmp_path / "a.ds", DOCUMENTS, **settings)
    cut(file, size)
    words.check(f"datatrove {rule}", refused(opened, file))


# litdata


@pytest.mark.parametrize(("code", "dtype"), [(16, "i4"), (17, "i8"), (20, "u2")])
def test_litdata(tmp_path, opened, code, dtype):
    folder = litdata(tmp_path / "a", [DOCUMENTS[:2], DOCUMENTS[2:]], code=code, dtype=dtype)
    store = opened(folder)
    assert documents_of(store) == DOCUMENTS
    assert documents_of(opened(folder / "*.bin")) == DOCUMENTS
    assert origin_of(store, 3).where == f"{folder}/chunk-0-1.bin document 2"


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"compression": "zstd"}, "compression"),
        ({"encryption": {"a": 1}}, "encryption"),
        ({"item_loader": "PyTreeLoader"}, "loader"),
        ({"data_format": ["str"]}, "format"),
        ({"data_format": ["no_header_tensor:1"]}, "format"),
        ({"code": 17}, "items"),
    ],
)
def test_other_chunks_of_litdata_are_refused(tmp_path, words, opened, settings, rule):
    file = litdata(tmp_path / "a", [DOCUMENTS], **settings)
    words.check(f"litdata {rule}", refused(opened, file))


def test_a_chunk_of_litdata_that_is_cut_off_is_refused(tmp_path, opened):
    folder = litdata(tmp_path / "a", [DOCUMENTS])
    cut(folder / "chunk-0-0.bin", 60)
    assert says("...chunk-0-0.bin: it does not fit ...", refused(opened, folder))
    (folder / "chunk-0-9.bin").write_bytes(b"12345678")
    expected = (
        "...chunk-0-9.bin: ...index.json does not name it, and ...chunk-0-9.idx is missing; ..."
    )
    assert says(expected, refused(opened, folder / "chunk-0-9.bin"))


# Finding


def test_the_kind_of_token_files_is_tokens(tmp_path):
    prefix = megatron(tmp_path / "m/a", DOCUMENTS)
    olmo(tmp_path / "o/a.npy", DOCUMENTS, metadata=True)
    (tmp_path / "o/settings.json").write_text('{"a": [1]}')
    folder = litdata(tmp_path / "l", [DOCUMENTS])
    for name in (prefix, prefix.parent, folder, tmp_path / "o", f"{tmp_path}/o/*"):
        _, row = first_row([str(name)])
        assert guess(row, {}).layout.kind == "tokens"


def test_a_folder_with_rows_of_another_kind_is_still_one(tmp_path):
    write(tmp_path / "chat.jsonl", [{"text": "a"}])
    np.save(tmp_path / "vectors.npy", np.ones(3))
    assert first_row([str(tmp_path)]) == (str(tmp_path / "chat.jsonl"), {"text": "a"})
    assert [part.name for part in find_parts((str(tmp_path),), kind="text")] == [
        str(tmp_path / "chat.jsonl")
    ]


def test_rows_and_token_files_are_two_sources(tmp_path, opened):
    prefix = megatron(tmp_path / "a", DOCUMENTS)
    rows = write(tmp_path / "rows.jsonl", [{"input_ids": [1, 2]}])
    expected = (
        "...a.bin: holds token ids, and is no source together with ...rows.jsonl; make them ..."
    )
    assert says(expected, refused(opened, prefix, rows))
    assert says(expected, refused(opened, tmp_path))


def test_other_kinds_do_not_read_token_files(tmp_path):
    prefix = megatron(tmp_path / "a", DOCUMENTS)
    with pytest.raises(RecipeError) as caught:
        find_parts((str(prefix),), kind="chat")
    assert "kind chat does not read token ids; use kind tokens, which does" in str(caught.value)


def test_columns_and_streaming_are_refused(tmp_path, opened):
    prefix = megatron(tmp_path / "a", DOCUMENTS)
    expected = "data: ...a.bin holds token ids, and no columns; remove the keys that name some: w"
    assert says(expected, refused(opened, prefix, weights_column="w"))
    data = schema.Data(kind="tokens", train=(str(prefix),), streaming=True)
    with pytest.raises(RecipeError, match=r"mapped as they are; set data\.streaming=false"):
        StreamingDataset(
            data, objective=NextToken(), tokenizer=None, model=ModelTraits(), seed=0, build=True
        )


def test_a_large_file_is_planned_by_its_index(tmp_path, monkeypatch):
    prefix = megatron(tmp_path / "a", DOCUMENTS)
    (tmp_path / "recipe.yaml").write_text(SMALL)
    words = [
        f"recipe={tmp_path}/recipe.yaml",
        f"data.train={prefix}",
        "model.config.vocab_size=400",
    ]
    recipe = load_recipe([*words, f"data.cache={tmp_path}/cache"], ranks=1).recipe
    assert recipe.data.kind == "tokens"
    counted = sizes.rows_here(recipe)
    monkeypatch.setattr(sizes, "COUNTED_BYTES", 0)
    estimated = sizes.rows_here(recipe)
    assert counted.lengths.tolist() == estimated.lengths.tolist() == [*map(len, DOCUMENTS)]
