"""Tests of files of data in object stores and on web servers: what is listed and read, and faults."""

import bz2
import gzip
import io
import json
import lzma
import os
import random

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from launcher.data.images import RowImages
from launcher.data.placing import source_of
from launcher.errors import RecipeError, RowError
from launcher.recipe.load import load_recipe
from launcher.sources import store_requests, stores
from launcher.sources.fetched import fetched_folder
from launcher.sources.finding import (
    content_sample,
    file_states,
    find_parts,
    first_row,
    first_rows,
    found,
    rows_as_text,
)
from launcher.sources.location import matching
from launcher.sources.ranges import split
from launcher.sources.rows import read_all
from tests.object_store import BUCKET, Answer, forget, once, web_server

pytestmark = pytest.mark.slow
ROOT = f"s3://{BUCKET}"


def made(count, seed=0, width=40):
    rng = random.Random(seed)
    return [
        {"text": f"row {number} {rng.randbytes(width // 2).hex()}", "number": number}
        for number in range(count)
    ]


def jsonl(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def parquet(rows, group=100):
    stream = io.BytesIO()
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), stream, row_group_size=group)
    return stream.getvalue()


def read(parts):
    return [row.values for row in read_all(parts)]


# Listings


NAMES = [
    *("a.jsonl", "b.jsonl", "sft/a.jsonl", "sft/b.parquet", "sft/c/d.jsonl", "sft/c/e/f.jsonl"),
    *("sft/.hidden/g.jsonl", "sft/.h.jsonl", "sft-2/a.jsonl", "sft/[1].jsonl", "sft/x y+z.jsonl"),
    *("sft/é.jsonl", "sft/c.jsonl"),
]
PATTERNS = [
    *("*.jsonl", "sft/*.jsonl", "sft/*", "s*/a.jsonl", "sft/?.jsonl", "sft/[ab].*", "**/*.jsonl"),
    *("sft/**/*.jsonl", "sft/c", "sft/c/", "sft", "sft/a.jsonl", "sft/.*", "sft/*/*", "sft/**/e"),
    *("sft/[1].jsonl", "sft/gone", "gone/*.jsonl", "**/e/*", "sft/[!a].jsonl", "sft/x y+z.jsonl"),
]


@pytest.fixture
def both(store, tmp_path):
    for name in NAMES:
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}\n")
        store.put(name, "{}\n")
    return tmp_path


@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_name_what_they_name_on_a_disk(both, pattern):
    local = [each.name.removeprefix(f"{both}/") for each in matching(f"{both}/{pattern}")]
    found = [each.name.removeprefix(f"{ROOT}/") for each in matching(f"{ROOT}/{pattern}")]
    assert found == local


@pytest.mark.parametrize("pattern", ["", "sft", "sft/", "sft/*", "**", "sft/**", "s*"])
def test_folders_hold_what_they_hold_on_a_disk(both, pattern):
    parts = [find_parts((f"{root}/{pattern}",), kind="chat") for root in (both, ROOT)]
    local, found = ([part.name for part in each] for each in parts)
    assert [name.removeprefix(f"{both}/") for name in local] == [
        name.removeprefix(f"{ROOT}/") for name in found
    ]
    assert [part.size for part in parts[1]] == [3] * len(found)


def test_a_listing_is_asked_for_once(store):
    for number in range(30):
        store.put(f"many/{number}.jsonl", jsonl(made(3, number)))
    store.requests.clear()
    parts = find_parts((f"{ROOT}/many/*.jsonl",), kind="text")
    file_states(parts), content_sample(parts), find_parts((f"{ROOT}/many/*.jsonl",), kind="text")
    assert [request.path.partition("?")[0] for request in store.requests] == [f"/{BUCKET}"]


def test_a_folder_that_a_program_made_is_no_object(store):
    store.put("sft/", "")
    store.put("sft/a.jsonl", jsonl(made(2)))
    assert [part.name for part in find_parts((f"{ROOT}/sft",), kind="text")] == [
        f"{ROOT}/sft/a.jsonl"
    ]


def test_the_state_is_that_of_the_object(store):
    def state():
        forget()
        return found((f"{ROOT}/a.jsonl",), kind="text", max_document=1 << 20)

    store.put("a.jsonl", jsonl(made(20)))
    first, again = state(), state()
    assert first.states == again.states
    assert first.sample == again.sample
    store.put("a.jsonl", jsonl(made(20, seed=1)))
    other = state()
    assert other.states != first.states
    assert other.sample != first.sample


# Reading

ROWS = made(3000)
FORMS = {
    "a.jsonl": lambda: jsonl(ROWS).encode(),
    "a.parquet": lambda: parquet(ROWS),
    "a.json": lambda: json.dumps(ROWS).encode(),
    "a.csv": lambda: "\n".join(["text,number", *(f"{r['text']},{r['number']}" for r in ROWS)]),
    "a.jsonl.gz": lambda: gzip.compress(jsonl(ROWS).encode()),
    "a.jsonl.bz2": lambda: bz2.compress(jsonl(ROWS).encode()),
    "a.jsonl.xz": lambda: lzma.compress(jsonl(ROWS).encode()),
    "a.jsonl.zst": lambda: pa.compress(jsonl(ROWS).encode(), "zstd", asbytes=True),
    "a.arrow": lambda: feather(),
    "a.txt": lambda: "words " * 60_000,
}


def feather():
    stream = io.BytesIO()
    pyarrow.feather.write_feather(pa.Table.from_pylist(ROWS), stream, chunksize=200)
    return stream.getvalue()


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("small", [True, False])
def test_rows_are_those_of_a_local_file(store, tmp_path, monkeypatch, name, small):
    if not small:
        monkeypatch.setattr(stores, "_SMALL", 0)
        monkeypatch.setattr(stores, "_MOST_OF_REQUEST", 10_000)
    content = FORMS[name]()
    content = content.encode() if isinstance(content, str) else content
    (tmp_path / name).write_bytes(content)
    store.put(name, content)
    local = find_parts((str(tmp_path / name),), kind="text")
    stored = find_parts((f"{ROOT}/{name}",), kind="text")
    expected = read(local)
    assert read(stored) == expected
    assert len(expected) == (1 if name == "a.txt" else len(ROWS))
    pieces = [split(part, 20_000) for part in (local[0], stored[0])]
    cuts = [[(piece.start, piece.end, piece.size) for piece in each] for each in pieces]
    assert cuts[0] == cuts[1]
    assert len(cuts[0]) > 5 or name not in ("a.jsonl", "a.parquet")
    assert read(pieces[1]) == expected
    wheres = [[row.where for row in read_all(each)][-1] for each in pieces]
    assert wheres[1] == wheres[0].replace(str(tmp_path), ROOT)


def test_a_range_is_read_and_no_more(store, monkeypatch):
    monkeypatch.setattr(stores, "_SMALL", 0)
    store.put("a.jsonl", jsonl(ROWS))
    store.put("a.parquet", parquet(ROWS))
    for name in ("a.jsonl", "a.parquet"):
        (part,) = find_parts((f"{ROOT}/{name}",), kind="text")
        pieces = split(part, 50_000)
        store.sent.clear()
        rows = read([pieces[2]])
        assert rows[0]["number"] > 0
        assert sum(store.sent) < 60_000
        assert len(store.sent) == 1


def test_parts_of_a_file_read_it_once(store):
    store.put("a.jsonl", jsonl(made(6000, width=2000)))
    (part,) = find_parts((f"{ROOT}/a.jsonl",), kind="text")
    pieces = split(part, 4 << 20)
    assert len(pieces) == 3
    store.sent.clear()
    assert len(read(pieces)) == 6000
    assert sum(store.sent) == part.size + (1 << 16), "the beginning is looked at before"


def test_the_first_row_is_seen_before_all_is_read(store):
    store.put("a.jsonl", jsonl(made(200_000)))
    store.sent.clear()
    name, row = first_row([f"{ROOT}/*.jsonl"])
    assert (name, row) == (f"{ROOT}/a.jsonl", made(1)[0])
    assert sum(store.sent) < 1 << 18
    assert len(first_rows([f"{ROOT}/*.jsonl"], 7)[1]) == 7
    store.put("a.log", jsonl(made(10)))
    forget()
    assert rows_as_text([f"{ROOT}/a.log"]) == f"{ROOT}/a.log"


def test_a_folder_of_save_to_disk_is_refused(store):
    for name in ("state.json", "dataset_info.json", "data.arrow"):
        store.put(f"saved/{name}", "{}")
    with pytest.raises(RecipeError, match=f"data: {ROOT}/saved: a folder of save_to_disk"):
        find_parts((f"{ROOT}/saved",), kind="chat")


# Faults

PASSING = {
    "503": Answer(503, "SlowDown", "Please reduce your request rate."),
    "500": Answer(500, "InternalError", "We encountered an internal error."),
    "timeout": Answer(400, "RequestTimeout", "Your socket connection was not read from."),
    "nothing": Answer(cut=0),
    "half": Answer(cut=5000),
}


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.gz"])
@pytest.mark.parametrize("fault", PASSING)
def test_nothing_is_lost_or_repeated_by_a_fault_that_passes(store, monkeypatch, name, fault):
    monkeypatch.setattr(stores, "_SMALL", 0)
    monkeypatch.setattr(stores, "_MOST_OF_REQUEST", 30_000)
    store.put(name, FORMS[name]())
    (part,) = find_parts((f"{ROOT}/{name}",), kind="text")
    asked = []

    def every_second(request):
        asked.append(request)
        return PASSING[fault] if len(asked) % 2 else None

    store.fault = every_second
    assert read([part]) == ROWS
    assert len(asked) > 2


def test_a_listing_is_whole_after_a_fault(store):
    for number in range(5):
        store.put(f"many/{number}/a.jsonl", jsonl(made(1)))
    store.fault = once(3, PASSING["503"], of=lambda request: "list-type" in request.path)
    assert len(find_parts((f"{ROOT}/many/*/*.jsonl",), kind="text")) == 5


def test_a_silent_server_is_asked_again(store, monkeypatch):
    monkeypatch.setattr("s3fs.S3FileSystem.read_timeout", 0.5)
    store.put("a.jsonl", jsonl(ROWS))
    (part,) = find_parts((f"{ROOT}/a.jsonl",), kind="text")
    store.fault = once(1, Answer(seconds=3.0))
    assert read([part]) == ROWS


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            Answer(503, "SlowDown", "Please reduce your request rate."),
            r"the store failed 8 times, last with: 503 SlowDown: Please reduce your request rate; start",
        ),
        (
            Answer(400, "ExpiredToken", "The provided token has expired."),
            r"the credentials have expired \(400 ExpiredToken: The provided token has expired\); renew",
        ),
        (
            Answer(403, "AccessDenied", "Access Denied"),
            r"no right to read it \(403 AccessDenied: Access Denied\); ask the owner .* ~/\.aws",
        ),
        (
            Answer(403, "InvalidAccessKeyId", "The key does not exist."),
            r"the credentials are wrong \(403 InvalidAccessKeyId: The key does not exist\)",
        ),
    ],
)
def test_an_error_names_the_object_and_what_to_do(store, answer, said):
    store.put("a.jsonl", jsonl(ROWS))
    (part,) = find_parts((f"{ROOT}/a.jsonl",), kind="text")
    store.fault = lambda request: answer
    with pytest.raises(RecipeError, match=f"{ROOT}/a.jsonl: cannot be read: {said}"):
        read([part])
    forget()
    for pattern in ("a.jsonl", "*.jsonl"):  # HEAD has no body, which has the words
        with pytest.raises(RecipeError, match=f"data: {ROOT}.* cannot be read: {said}"):
            find_parts((f"{ROOT}/{pattern}",), kind="text")
        with pytest.raises(RecipeError, match=f"{ROOT}.* cannot be read: {said}"):
            first_row([f"{ROOT}/{pattern}"])


def test_an_object_or_bucket_that_is_not_there(store):
    store.put("sft/train.jsonl", jsonl(ROWS))
    with pytest.raises(RecipeError) as error:
        find_parts((f"{ROOT}/sft/trian.jsonl",), kind="text")
    said = f"data: no such file or folder: {ROOT}/sft/trian.jsonl; did you mean {ROOT}/sft/train.jsonl?"
    assert str(error.value) == said
    with pytest.raises(RecipeError, match=rf"no such file or folder: {ROOT}/sft/\*.parquet$"):
        find_parts((f"{ROOT}/sft/*.parquet",), kind="text")
    for pattern in ("a.jsonl", "*.jsonl", "sft/**/a", "sft"):
        with pytest.raises(
            RecipeError, match=r"there is no bucket other-bucket \(404 NoSuchBucket"
        ):
            find_parts((f"s3://other-bucket/{pattern}",), kind="text")
    (part,) = find_parts((f"{ROOT}/sft/train.jsonl",), kind="text")
    store.client.delete_object(Bucket=BUCKET, Key="sft/train.jsonl")
    with pytest.raises(
        RecipeError, match=f"{ROOT}/sft/train.jsonl: cannot be read: it is not there"
    ):
        read([part])


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_rows_of_two_versions_are_not_mixed(store, monkeypatch, name):
    monkeypatch.setattr(stores, "_SMALL", 0)
    monkeypatch.setattr(stores, "_MOST_OF_REQUEST", 30_000)
    store.put(name, FORMS[name]())
    (part,) = find_parts((f"{ROOT}/{name}",), kind="text")
    rows = read_all([part])
    first = next(rows)
    assert first.values == ROWS[0]
    store.put(name, FORMS[name]() + b" ")
    with pytest.raises(RecipeError, match=f"{ROOT}/{name}: cannot be read: it has changed while"):
        list(rows) + read([part])


def test_no_credentials(store, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    with pytest.raises(
        RecipeError, match="no credentials: Unable to locate credentials; give them"
    ):
        find_parts((f"{ROOT}/a.jsonl",), kind="text")


def test_a_forked_process_has_its_own_connections(store):
    store.put("a.jsonl", jsonl(ROWS))
    (part,) = find_parts((f"{ROOT}/a.jsonl",), kind="text")
    assert read([part]) == ROWS
    forget_content = stores._content.cache_clear
    forget_content()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if read([part]) == ROWS else 2
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert read([part]) == ROWS


# Names


@pytest.mark.parametrize(
    "name",
    [
        "s4://bucket/a.jsonl",
        "ftp://host/a.jsonl",
        "file:///a.jsonl",
        "s3://",
        "S3://bucket/a.jsonl",
        "https://host/*.jsonl",
    ],
)
def test_a_name_that_cannot_be_read(name, words, folder):
    with words.refused(name) as error:
        load_recipe(["recipe=x.yaml", f"data.train={name}"], ranks=1)
    assert len(error.value.problems) == 1


@pytest.mark.parametrize(
    "name",
    [
        "s3://me:hidden-word@bucket/a.jsonl",
        "https://me:hidden-word@host/a.jsonl",
        "https://host/a.jsonl?X-Amz-Algorithm=AWS4&X-Amz-Signature=hidden-word&X-Amz-Date=1",
        "https://account.blob.core.windows.net/c/a.jsonl?sv=2024&sig=hidden-word",
        "https://host/a.jsonl?token=hidden-word",
    ],
)
@pytest.mark.parametrize("key", ["data.train", "data.validation", "model.path"])
def test_a_secret_enters_no_message(name, key, folder):
    with pytest.raises(RecipeError) as error:
        load_recipe(["recipe=x.yaml", f"{key}={name}", "data.kind=text"], ranks=1)
    assert "hidden-word" not in str(error.value)
    assert "***" in str(error.value)
    if key != "model.path":
        assert "may hold no secret" in str(error.value)


def test_a_plan_needs_no_store(folder, monkeypatch):
    for module in ("s3fs", "aiohttp"):
        monkeypatch.setitem(__import__("sys").modules, module, None)
    load_recipe(["recipe=x.yaml", f"data.train={ROOT}/a.jsonl"], ranks=1, files=False)
    with pytest.raises(RecipeError, match=r"needs s3fs.*pip install 'launcher\[s3\]'"):
        load_recipe(["recipe=x.yaml", f"data.train={ROOT}/a.jsonl"], ranks=1)


def fetched(name, *patterns):
    return fetched_folder(name, key="model.path", patterns=patterns or ("*.json", "*.safetensors"))


def test_a_model_is_fetched_once(store):
    files = {
        "config.json": b"{}",
        "model.safetensors": bytes(20 << 20),
        "1_Pooling/config.json": b"1",
    }
    for name, content in files.items():
        store.put(f"models/m/{name}", content)
    store.put("models/m/other.bin", b"not needed")
    store.fault = once(2, Answer(503, "SlowDown"))
    tokenizer = fetched(f"{ROOT}/models/m", "*.json")
    assert not (tokenizer / "model.safetensors").exists()
    folder = fetched(f"{ROOT}/models/m/")
    assert folder == tokenizer
    found = {str(file.relative_to(folder)): file for file in folder.rglob("*") if file.is_file()}
    assert {name: file.read_bytes() for name, file in found.items()} == files
    store.requests.clear()
    assert fetched(f"{ROOT}/models/m") == folder
    assert store.requests == []
    forget()
    assert fetched(f"{ROOT}/models/m") == folder
    assert len(store.requests) == 1, "a listing"
    # Other weights are another folder
    store.put("models/m/model.safetensors", b"others")
    forget()
    other = fetched(f"{ROOT}/models/m")
    assert other != folder
    assert (other / "model.safetensors").read_bytes() == b"others"
    assert (folder / "model.safetensors").stat().st_size == 20 << 20


def test_a_model_that_is_not_there(store):
    store.put("models/m/config.json", b"{}")
    for name, said in [
        (
            f"{ROOT}/models/n",
            f"model.path: no such folder with a config.json: {ROOT}/models/n",
        ),
        ("s3://gone/models/n", "model.path: s3://gone/models/n: there is no bucket gone"),
        ("s4://b/m", "model.path: s4://b/m: unknown scheme"),
    ]:
        with pytest.raises(RecipeError, match=said):
            fetched(name)
    store.fault = lambda request: Answer(403, "AccessDenied")
    forget()
    with pytest.raises(RecipeError, match=r"model.path: .*no right to read it"):
        fetched(f"{ROOT}/models/m")


def test_a_model_of_a_store_is_checked_before_torch(folder, monkeypatch):
    for path, said in [
        ("s4://b/m", "unknown scheme s4"),
        ("s3://b/m?token=hidden-word", "hidden|secret"),
    ]:
        with pytest.raises(RecipeError, match=said):
            load_recipe(["recipe=x.yaml", f"model={{path: '{path}', config: null}}"], ranks=1)
    load_recipe(["recipe=x.yaml", "model={path: 's3://b/m', config: null}"], ranks=1)
    monkeypatch.setitem(__import__("sys").modules, "s3fs", None)
    with pytest.raises(RecipeError, match=r"model.path=s3://b/m: s3://b/m: needs s3fs"):
        load_recipe(["recipe=x.yaml", "model.path=s3://b/m", "model.config=null"], ranks=1)


# Web servers


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.jsonl.gz"])
def test_files_of_web_servers(name, ranges, monkeypatch):
    monkeypatch.setattr(stores, "_SMALL", 0)
    forget()
    content = FORMS[name]()
    with web_server({name: content}, ranges=ranges) as (address, asked):
        (part,) = find_parts((f"{address}/{name}?download=true",), kind="text")
        assert part.size == len(content)
        pieces = split(part, 20_000)
        assert (len(pieces) > 5) == (ranges and name != "a.jsonl.gz")
        asked.clear()
        assert read(pieces) == ROWS
        assert ranges or len(asked) == 1, "it is downloaded once"
        with pytest.raises(RecipeError, match=f"no such file or folder: {address}/gone.jsonl"):
            find_parts((f"{address}/gone.jsonl",), kind="text")


@pytest.mark.parametrize("ranges", [True, False])
def test_a_web_server_that_fails(ranges, monkeypatch):
    monkeypatch.setattr(stores, "_SMALL", 0)
    monkeypatch.setattr(store_requests, "FIRST_PAUSE", 0.001)
    forget()
    content, fails = jsonl(ROWS).encode(), [0]

    def answer(handler):
        if fails[0] and handler.command == "GET":
            fails[0] -= 1
            handler.send_response(200 if fails[0] % 2 else 502)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content[:1000] if fails[0] % 2 else b"")
            handler.close_connection = True
            return False
        return content

    with web_server({"a.jsonl": answer}, ranges=ranges) as (address, _):
        (part,) = find_parts((f"{address}/a.jsonl",), kind="text")
        fails[0] = 3
        assert read([part]) == ROWS
        content = content + b"{}\n"
        stores._copy.cache_clear()
        with pytest.raises(
            RecipeError, match=r"a.jsonl: cannot be read: it has changed|store failed"
        ):
            read([part])


# Attachments


def test_a_path_in_a_row_of_a_store_is_refused(tmp_path):
    images = RowImages("model").of_file(f"{ROOT}/sft/a.jsonl")
    assert images.folder == f"{ROOT}/sft"
    with pytest.raises(RowError, match=r"a.png: is in a store, .* or set images.folder"):
        source_of("a.png", images)
    assert source_of("/a.png", images).data == b"/a.png"
    local = RowImages("model", folder=str(tmp_path)).of_file(f"{ROOT}/sft/a.jsonl")
    assert source_of("a.png", local).data == f"{tmp_path}/a.png".encode()
