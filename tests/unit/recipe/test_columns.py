"""data.kind by the columns of the data, and data.validation_split beside data.validation."""

import csv
import gzip
import json
import re
import shlex
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from launcher.data.token_store import open_store
from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe
from launcher.sources.finding import find_parts
from launcher.sources.formats import ROW_FILES
from launcher.sources.layouts import no_layout
from tests.unit.small_recipe import SMALL

USER, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
CHAT = {"messages": [USER, ANSWER]}
INSTRUCT = {"instruction": "a", "input": "", "output": "b"}
PAIR = {"prompt": "a", "chosen": "b", "rejected": "c"}


def load(*overrides, **options):
    return load_recipe(["recipe=x.yaml", *overrides], ranks=None, **options)


def write(name, row):
    with open(name, "w", encoding="utf-8-sig") as file:  # editors on Windows write the mark
        file.write(json.dumps(row) + "\n\n")


@pytest.mark.parametrize(
    ("kind", "row", "more"),
    [
        ("chat", CHAT, []),
        ("chat", {"conversations": []}, []),
        ("chat", {"talk": []}, ["data.messages_column=talk"]),
        ("chat", {**PAIR, **CHAT}, []),  # UltraFeedback
        ("preference", {**PAIR, **CHAT}, ["preference.loss=dpo"]),
        ("preference", PAIR, ["preference.loss=dpo"]),
        ("preference", {**PAIR, **CHAT}, ["model.task=reward"]),
        ("instruct", INSTRUCT, []),
        ("instruct", {"prompt": "a", "completion": "b"}, []),
        ("tokens", {"input_ids": [1]}, []),
        ("text", {"text": "a", "label": 0}, []),
        ("classification", {"text": "a", "label": 0}, ["model.task=sequence_classification"]),
    ],
)
def test_kind_follows_from_the_columns(folder, kind, row, more):
    write("rows.jsonl", row)
    loaded = load("data.train=[rows.jsonl]", *more)
    assert loaded.recipe.data.kind == kind
    assert loaded.origins.of(("data", "kind")) == f"{kind}, by the columns of rows.jsonl"
    given = load("data.train=[rows.jsonl]", "data.kind=text", "model.task=causal_lm")
    assert (given.recipe.data.kind, given.origins.derived) == ("text", {})


def test_rows_with_the_name_of_a_text_are_refused(folder):
    """Unless data.kind is given: they would be trained with their braces, in validation and in
    mixtures, too."""
    lines = json.dumps(INSTRUCT) + "\n"
    write("rows.jsonl", {"text": "a"})
    for name in ("a.txt", "b.lines", "c", "d.txt.gz", "many/e.log"):
        (folder / name).parent.mkdir(exist_ok=True)
        content = (lines * 2).encode()
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
        where = f"{name}: its lines are JSON objects, .* set data.kind=text"
        pattern = name.partition("/")[0]
        for key in (
            f"data.train=[{pattern}]",
            f"data.train=[rows.jsonl, {pattern}]",
            f"data.train={{one: {{files: [rows.jsonl]}}, two: {{files: [{pattern}]}}}}",
            f"data={{train: [rows.jsonl], validation: [{pattern}], tokenizer: bytes, sequence_length: 8}}",
            f"data={{train: [rows.jsonl], validation: {{x: [{pattern}]}}, tokenizer: bytes, sequence_length: 8}}",
        ):
            with pytest.raises(RecipeError, match=where):
                load(key)
        assert load(f"data.train=[{pattern}]", "data.kind=text").recipe.data.kind == "text"
    (folder / "prose.txt").write_text("{not json}\n")
    (folder / "value.txt").write_text("{}\n1\n")
    (folder / "one.txt").write_text('{"a": 1}\nand text\n')
    for name in ("prose.txt", "value.txt", "one.txt"):
        assert load(f"data.train=[{name}]").recipe.data.kind == "text"


def test_columns_of_all_files_of_rows(folder):
    rows = [INSTRUCT, INSTRUCT]
    (folder / "a.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), "a.parquet")
    with open("a.csv", "w", newline="") as file:
        csv.DictWriter(file, INSTRUCT).writeheader()
    with (
        gzip.open("a.jsonl.gz", "wb") as one,
        pyarrow.output_stream("a.jsonl.zst", compression="zstd") as other,
    ):
        one.write(json.dumps(INSTRUCT).encode())
        other.write(json.dumps(INSTRUCT).encode())
    inner = folder / "inner"
    inner.mkdir()
    (inner / ".hidden.jsonl").write_text("{}")
    (inner / "notes.txt").write_text("")
    (inner / "rows.json").write_text(json.dumps(rows))
    (folder / "a.tsv").write_text("instruction\tinput\toutput\na\t\tb\n")
    names = ["a.json", "a.parquet", "a.csv", "a.tsv", "a.jsonl.gz", "a.jsonl.zst", "inner", "a.js*"]
    for name in names:
        assert (name, load(f"data.train=[{name}]").recipe.data.kind) == (name, "instruct")
    for damaged in (b"", b"{", b"[1]", b"\xff", b'"text"'):
        for name in ("b.json", "b.jsonl", "b.parquet", "b.jsonl.gz"):
            (folder / name).write_bytes(damaged)
            assert load(f"data.train=[{name}]").recipe.data.kind == "text"
            (folder / name).unlink()
    (folder / "wrapped.json").write_text(json.dumps({"version": 1, "data": rows}))
    with pytest.raises(RecipeError, match=r"wrapped.json: must hold a list .*'data' holds such a"):
        load("data.train=[wrapped.json]")
    (folder / "semicolons.csv").write_text("frage;antwort\na;b\n")
    with pytest.raises(RecipeError, match=r"the header is one column, 'frage;antwort'; if semi"):
        load("data.train=[semicolons.csv]")
    assert load("data.train=[gone.jsonl]", files=False).recipe.data.kind == "text"


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("chat", ["images.train=none", "model.path=owner/x", "model.config=null"]),
        ("preference", ["preference.loss=dpo"]),
        ("unpaired", ["kto.beta=0.1"]),
        ("classification", ["model.task=sequence_classification"]),
        ("chat", ["data.loss_on=last"]),
        ("text", []),
    ],
)
def test_kind_of_data_that_is_not_here_follows_from_the_other_keys(folder, kind, keys):
    """A plan needs no data. A kind that these keys exclude would hide that the data is missing."""
    keys += ["data.tokenizer=null"] if "images.train=none" in keys else []
    for train in ("gone.jsonl", "gone/*.jsonl", "owner/x", "null", "{a: {files: gone.jsonl}}"):
        loaded = load(f"data.train={train}", *keys, files=False)
        assert loaded.recipe.data.kind == kind, train
        by_keys = f"{kind}, by the other keys of the recipe"
        assert loaded.origins.of(("data", "kind")) == ("default" if kind == "text" else by_keys)
    for train in ("gone.jsonl", "gone/*.jsonl"):
        with pytest.raises(RecipeError) as error:
            load(f"data.train={train}", *keys)
        (problem,) = error.value.problems
        assert f"no such file or folder: {train}" in problem
    (folder / "damaged.jsonl").write_text("{")
    assert load("data.train=damaged.jsonl", *keys).recipe.data.kind == kind


def test_a_rule_about_the_kind_says_why_the_data_has_another(folder):
    keys = ["images.train=none", "model.path=owner/x", "model.config=null", "data.tokenizer=null"]
    write("rows.jsonl", {"text": "a"})
    (folder / "pictures").mkdir()
    (folder / "pictures" / "a.png").write_bytes(b"")
    rows = f"({ROW_FILES})"
    for train, why in (
        ("rows.jsonl", "by the columns of rows.jsonl"),
        ("data.txt", f"as data.txt is no file of rows {rows}"),
        ("pictures", f"as pictures holds no file of rows {rows}"),
    ):
        with pytest.raises(RecipeError) as error:
            load(f"data.train={train}", *keys)
        (problem,) = error.value.problems
        assert problem.endswith(f"or unpaired; it is text, {why}"), problem


def test_a_row_that_is_refused_is_the_only_problem(folder):
    """No rule about the kind of rows that have none."""
    keys = ["images.train=none", "model.path=owner/x", "model.config=null", "data.tokenizer=null"]
    for row in ({"title": "a"}, {"text": "a", "file_name": "a.png"}, {"text": "a", "image": "b"}):
        write("rows.jsonl", row)
        with pytest.raises(RecipeError, match=r"=rows[.]jsonl: rows[.]jsonl: ") as error:
            load("data.train=rows.jsonl", *keys)
        assert len(error.value.problems) == 1, error.value.problems


def test_a_path_that_exists_is_that_file(folder):
    """Also one with characters of a glob, which would match another name."""
    write("x[1].jsonl", CHAT)
    write("x1.jsonl", INSTRUCT)
    (folder / "all*").mkdir()
    write("all*/rows.jsonl", CHAT)
    for train in ("x[1].jsonl", "all*"):
        data = load(f"data.train=['{train}']", "data.cache=null").recipe.data
        assert data.kind == "chat"
        assert [Path(part.name).parts[0] for part in find_parts(data.train, kind="chat")] == [train]
    assert load("data.train=['x[12].jsonl']").recipe.data.kind == "instruct"


def test_each_source_of_a_mixture_has_its_kind(folder):
    write("chat.jsonl", CHAT)
    write("instruct.jsonl", INSTRUCT)
    a, b, c = "a: {files: data.txt}", "b: {files: chat.jsonl}", "c: {files: [instruct.jsonl]}"
    data = load(f"data.train={{{a}, {b}, {c}}}").recipe.data
    assert (data.kind, [source.kind for source in data.train.values()]) == (
        "text",
        [None, "chat", "instruct"],
    )
    data = load(f"data.train={{{b}, {c}, d: {{files: chat.jsonl, kind: text}}}}").recipe.data
    assert (data.kind, [source.kind for source in data.train.values()]) == (
        "chat",
        [None, "instruct", "text"],
    )


def test_problems_name_the_columns(folder):
    write("rows.jsonl", PAIR)
    with pytest.raises(RecipeError) as error:
        load("data.train=[rows.jsonl]")
    what = "needs the section preference, such as preference.loss=dpo"
    why = "data.kind (preference, by the columns of rows.jsonl)"
    assert error.value.problems == [f"x.yaml:8: {why}: {what}"]


def test_rows_of_another_kind_are_named(folder):
    write("rows.jsonl", CHAT)
    data = load("data.kind=text", "data.train=[rows.jsonl]", "data.cache=cache").recipe.data
    with pytest.raises(RecipeError) as error:
        open_store(data.train, data, tokenizer="bytes", build=True)
    what = (
        "no column for text (text, content, raw_content, sentence); columns: messages; "
        "data.columns.text=NAME names it; or set data.kind=chat, which has such columns"
    )
    assert what in str(error.value)


def test_data_sets_of_the_hub_are_fetched_only_for_commands_that_train(folder, monkeypatch):
    fetched = []

    class Rows(list):
        column_names = ("messages",)

    monkeypatch.setattr(
        "launcher.sources.finding.load_data_set",
        lambda name: fetched.append(name) or Rows([CHAT]),
    )
    assert load("data.train=[owner/chats:train]").recipe.data.kind == "text"
    assert fetched == []
    assert load("data.train=[owner/chats:train]", hub=True).recipe.data.kind == "chat"
    assert load("data.train=[owner/x]", "data.kind=text", hub=True).recipe.data.kind == "text"
    assert fetched == ["owner/chats:train"]


def test_a_split_is_for_recipes_without_validation(folder):
    assert load("data.validation_split=0.1").recipe.data.validation_split == 0.1
    both = load("data.validation_split=0.1", "data.validation=[data.txt]")
    assert both.recipe.data.validation_split is None
    why = "null, because data.validation is given"
    assert both.origins.of(("data", "validation_split")) == why
    given = "  validation: [data.txt]\n  validation_split: 0.1\n"
    Path("x.yaml").write_text(SMALL.replace("data:\n", f"data:\n{given}"))
    assert load().origins.of(("data", "validation_split")) == why


def test_suggestions_can_be_typed_as_they_stand(tmp_path, monkeypatch):
    """Each error ends with arguments for a command line, also where names need quotes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL.replace("  kind: text\n", ""))
    cases = [
        ({"question": "a", "reply": "b"}, {"NAME": "reply"}, []),
        ({"title": "a", "body": "b"}, {"NAME": "body"}, []),
        ({"prompt": "a", "response": "b", "score": 3}, {}, []),
        ({"prompt": "a", "response": "b", "my score": 3, "Score": 4}, {}, []),
        ({"messages": [], "Weight": 2}, {}, []),
        ({"text": "a", "images": ["x"], "audio": "y"}, {}, ["data.ignore_columns='[images]'"]),
    ]
    for row, names, words in cases:
        (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
        given = ["recipe=x.yaml", "data.train=rows.jsonl", *(shlex.split(" ".join(words)))]
        with pytest.raises(RecipeError) as raised:
            load_recipe(given, ranks=None)
        message = str(raised.value).split("data.train=rows.jsonl", 1)[1]
        found = re.findall(r"data\.[a-z_.]+=(?:'[^']*'|\w+)", message)
        typed = shlex.split(" ".join(found))
        assert typed, str(raised.value)
        for name, column in names.items():
            typed = [word.replace(name, column) for word in typed][-1:]
        assert "rows.jsonl" not in _problems([*given, *typed])


def _problems(words):
    try:
        load_recipe(words, ranks=None)
    except RecipeError as error:
        return str(error)
    return ""


def test_columns_that_are_named_wrongly(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL.replace("  kind: text\n", ""))
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "response": "b"}\n')
    for words, problem in {
        ("data.ignore_columns=[respond]",): "a column that is not there: respond; did you mean "
        "response?; columns: prompt, response",
        ("data.columns={prompt: prompt, response: prompt}",): "'prompt' is the column of "
        "data.columns.prompt too; a column has one role",
        ("data.prompt_column=prompt", "data.response_column=prompt"): "'prompt' is the column of "
        "data.prompt_column too",
    }.items():
        with pytest.raises(RecipeError) as raised:
            load_recipe(["recipe=x.yaml", "data.train=rows.jsonl", *words], ranks=None)
        assert problem in str(raised.value)
    for kind in (None, "instruct", "preference"):
        rated = no_layout(["source", "instruction", "models", "completions"], {}, kind)
        assert "completions holds several answers: write the best as response, or two" in rated
    rows = no_layout(["messages", "text"], {}, "instruct")
    assert rows == (
        "no column for instruction (instruction, question, query, problem, ...) and response "
        "(response, completion, output, solution, ...); columns: messages, text; "
        "data.columns.instruction=NAME data.columns.response=NAME names it; or set "
        "data.kind=chat, which has such columns; rows of two kinds belong in two files, as two "
        "sources: data.train.a.files=FILE data.train.b.files=FILE"
    )
