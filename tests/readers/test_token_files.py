"""Token files, written by the tools whose files they are. `make test-readers` installs these."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launcher.data.token_store import ModelTraits, open_store
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from tests import REPOSITORY
from tests.unit.data.rows import documents_of
from tests.unit.small_recipe import says

READERS = Path(os.environ.get("READERS", REPOSITORY / "build/readers"))
PACKAGES = READERS / "token_writers"
END, LARGEST = 1, 50_000

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not PACKAGES.is_dir(), reason="needs `make test-readers`"),
]


@pytest.fixture(scope="module")
def documents():
    numbers = np.random.default_rng(0)
    return [[*numbers.integers(2, LARGEST, n).tolist(), END] for n in (3, 0, 17, 40, 1, 30, 9)]


def write(out, tool, documents, **settings):
    """What a tool printed about the files that it wrote."""
    out.mkdir()
    request = {"packages": str(PACKAGES), "tool": tool, "out": str(out), "documents": documents}
    file = out.with_suffix(".json")
    file.write_text(json.dumps(request | {"settings": settings}))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("token_writers.py")), str(file)],
        capture_output=True,
        text=True,
        timeout=200,
        cwd=out,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def read(pattern, cache, **data):
    section = schema.Data(kind="tokens", cache=str(cache), **data)
    model = ModelTraits(vocabulary=LARGEST)
    return open_store((str(pattern),), section, tokenizer=None, model=model, build=True)


@pytest.mark.parametrize(("dtype", "parts"), [("uint16", 1), ("int32", 3), ("int64", 1)])
def test_megatron(tmp_path, documents, figures, dtype, parts):
    out = tmp_path / "out"
    wanted = write(out, "megatron", documents, dtype=dtype, parts=parts)["read"]
    names = [out / "corpus_text_document", out, out / "*", out / "corpus_text_document.idx"]
    for name in names:
        store = read(name, tmp_path / "cache")
        assert documents_of(store) == documents
    assert [id for ids in wanted for id in ids] == store.ids[:].tolist()
    assert len(wanted) == parts * len(documents)
    figure = f"{len(documents)} documents of {len(wanted)} sequences equal"
    figures("Megatron-Core, token files", dtype, "", figure)


def test_a_multimodal_index_of_megatron_is_refused(tmp_path, documents):
    write(tmp_path / "out", "megatron", documents, dtype="int32", multimodal=True)
    with pytest.raises(RecipeError) as caught:
        read(tmp_path / "out", tmp_path / "cache")
    assert says("....idx: a multimodal index, ... only text is read: ...", str(caught.value))


@pytest.mark.parametrize("size", [2, 4])
def test_datatrove(tmp_path, documents, figures, size):
    """nanotron's Nanosets are these files. Also its writer of Megatron's files."""
    masks = [[number % 3 > 0 for number in range(len(ids))] for ids in documents]
    write(tmp_path / "out", "datatrove", documents, token_size=size, masks=masks)
    store = read(tmp_path / "out", tmp_path / "cache")
    assert documents_of(store) == documents
    labels = [id if i % 3 else IGNORED for ids in documents for i, id in enumerate(ids)]
    assert store.labels[:].tolist() == labels
    write(tmp_path / "without", "datatrove", documents, token_size=size, save_index=False)
    store = read(tmp_path / "without", tmp_path / "cache", end_token=END)
    assert documents_of(store) == documents
    write(tmp_path / "megatron", "datatrove_megatron", documents, token_size=size)
    assert documents_of(read(tmp_path / "megatron", tmp_path / "cache")) == documents
    figures("datatrove, token files", f"{size} bytes", "", f"{len(documents)} documents equal")


@pytest.mark.parametrize("dtype", ["uint16", "int32", "int64"])
def test_litdata(tmp_path, documents, figures, dtype):
    blocks = write(tmp_path / "out", "litdata", documents, dtype=dtype)["read"]
    store = read(tmp_path / "out", tmp_path / "cache")
    assert len(store.files) > 1
    assert documents_of(store) == documents
    text = f" {' '.join(map(str, store.ids[:].tolist()))} "
    assert blocks
    assert all(f" {' '.join(map(str, block))} " in text for block in blocks)
    figures("litdata, token files", dtype, "", f"{len(documents)} documents equal")


def test_compressed_chunks_of_litdata_are_refused(tmp_path, documents):
    write(tmp_path / "out", "litdata", documents, dtype="int32", compression="zstd")
    with pytest.raises(RecipeError) as caught:
        read(tmp_path / "out", tmp_path / "cache")
    expected = "...index.json: chunks with compression (zstd) cannot be memory-mapped; ..."
    assert says(expected, str(caught.value))


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_olmo(tmp_path, documents, figures, dtype):
    write(tmp_path / "out", "olmo", documents, dtype=dtype)
    store = read(tmp_path / "out", tmp_path / "cache", end_token=END, token_dtype=dtype)
    assert documents_of(store) == documents
    bounds = write(tmp_path / "with", "olmo", documents, dtype=dtype, eos=END)["read"]
    store = read(tmp_path / "with", tmp_path / "cache", token_dtype=dtype)
    assert documents_of(store) == documents
    assert [end for _, end in bounds] == store.offsets[1:].tolist()
    figures("OLMo-core, token files", dtype, "", f"{len(documents)} documents equal")
