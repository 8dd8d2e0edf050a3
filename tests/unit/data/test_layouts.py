"""What rows in the layouts of popular data sets become: text, and which of it carries loss."""

import json
from dataclasses import replace

import pytest

from launcher.data.encoder import make_encoder, prompt_form
from launcher.data.messages import dialogue, read_messages, read_tools
from launcher.data.opening import open_dataset
from launcher.data.problems import problem_lines
from launcher.data.run_data import recorded_prompts, tokenizer_to_keep, trained_prompts
from launcher.data.token_store import ModelTraits, rows_of_documents
from launcher.data.tokenizer import (
    has_chat_template,
    hugging_face_byte_tokenizer,
    hugging_face_tokenizer,
)
from launcher.errors import RecipeError
from launcher.models.micro_batch import IGNORED
from launcher.objectives.next_token import NextToken
from launcher.recipe import schema
from launcher.sources.finding import file_part, find_parts, first_row
from launcher.sources.layouts import guess, match_row, named_columns
from launcher.sources.location import Location
from launcher.sources.rows import read_rows
from tests.unit.data.rows import write

TEMPLATE = """\
{%- if tools %}<tools>{{ tools | tojson }}</tools>{% endif -%}
{%- for m in messages -%}
{{- "<|" ~ m.role ~ "|>" -}}
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor -%}
{{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    """Folders of a tokenizer with and without a chat template."""
    folder, found = tmp_path_factory.mktemp("tokenizers"), {}
    for name, template in (("chat", TEMPLATE), ("base", None)):
        tokenizer = hugging_face_byte_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)
        found[name] = str(folder / name)
    return found


def encoded(tmp_path, row, tokenizer, *, suffix=".jsonl", **data):
    """The document of a row whose kind is found by its columns."""
    file = write(tmp_path / f"a{suffix}", [row])
    _, first = first_row([str(file)])
    pair = any("rejected" in column for column in row)
    found = guess(first, {}, kinds=["preference" if pair else "chat"])
    kind = found.layout.kind
    settings = schema.Data(kind=kind, **data)
    encoder = make_encoder(kind, settings, tokenizer=tokenizer)
    (one,) = encoder.encode_rows(read_rows(file_part(Location(str(file)))))
    return kind, one


def shown(tmp_path, row, tokenizer, **more):
    """The kind of a row and its text, in which brackets are around what carries loss."""
    kind, one = encoded(tmp_path, row, tokenizer, **more)
    assert not one.problem, one.problem
    decoder, text, before = hugging_face_byte_tokenizer(), "", False
    for token, label in zip(one.ids.tolist(), one.labels_or_ids.tolist(), strict=True):
        learned = label != IGNORED
        text += {(False, True): "[", (True, False): "]"}.get((before, learned), "")
        text, before = text + decoder.decode([token]), learned
    return kind, text + ("]" if before else "")


ASKED = [{"from": "human", "value": "Say 1"}]
CALL = {"name": "weather", "arguments": {"city": "Rome"}}
TOOL = {"name": "weather", "parameters": {}}
CALLED = '<call>{"name": "weather", "arguments": {"city": "Rome"}}</call>'
SEES = '<tools>[{"type": "function", "function": {"name": "weather", "parameters": {}}}]</tools>'
ONE, HELLO = (
    "<|user|>Say 1<|end|><|assistant|>[1<|end|>]",
    "<|user|>Hi<|end|><|assistant|>[Hello.<|end|>]",
)
PAIR = f"{ONE}<|user|>Say 1<|end|><|assistant|>[No.<|end|>]"
ROWS = {
    "question": ({"question": "Say 1", "answer": "1", "id": 3}, "instruct", ONE),
    "prompt": ({"prompt": "Say 1", "completion": " 1"}, "instruct", ONE),
    "alpaca": (
        {"instruction": "Say", "input": "1", "output": "1", "text": "### ..."},
        "instruct",
        "<|user|>Say\n\n1<|end|><|assistant|>[1<|end|>]",
    ),
    "openorca": (
        {"system_prompt": "Brief.", "question": "Say 1", "response": "1"},
        "instruct",
        f"<|system|>Brief.<|end|>{ONE}",
    ),
    "history": (
        {"query": "Say 1", "response": "1", "history": [["Hi", "Hello."]]},
        "instruct",
        f"<|user|>Hi<|end|><|assistant|>Hello.<|end|>{ONE}",
    ),
    "xlam": (
        {"query": "Warm?", "answers": json.dumps([CALL]), "tools": json.dumps([TOOL])},
        "instruct",
        f"{SEES}<|user|>Warm?<|end|><|assistant|>[{CALLED}<|end|>]",
    ),
    "sharegpt calls": (
        {
            "conversations": [
                {"from": "human", "value": "Warm?"},
                {"from": "function_call", "value": json.dumps(CALL)},
                {"from": "observation", "value": "31"},
                {"from": "gpt", "value": "Yes."},
            ],
            "tools": json.dumps([TOOL]),
        },
        "chat",
        f"{SEES}<|user|>Warm?<|end|><|assistant|>[{CALLED}<|end|>]<|tool|>31<|end|><|assistant|>[Yes.<|end|>]",
    ),
    "roles": (
        {"messages": [{"role": "human", "value": "Hi"}, {"role": "Model", "content": "Hello."}]},
        "chat",
        HELLO,
    ),
    "json": (
        {
            "messages": json.dumps(
                [{"role": "user", "content": "Hi"}, {"role": "bot", "text": "Hello."}]
            )
        },
        "chat",
        HELLO,
    ),
    "gemini": (
        {
            "systemInstruction": {"role": "system", "parts": [{"text": "Brief."}]},
            "contents": [
                {"role": "user", "parts": [{"text": "Hi"}]},
                {"role": "model", "parts": [{"text": "Hello."}]},
            ],
        },
        "chat",
        f"<|system|>Brief.<|end|>{HELLO}",
    ),
    "lima": ({"conversations": ["Hi", "Hello."]}, "chat", HELLO),
    "swift": ({"conversation": [{"assistant": "Hello.", "human": "Hi"}]}, "chat", HELLO),
    "parts": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "value": "Hi"}], "loss_weight": 0.0},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "reasoning", "value": "Greet."},
                        {"type": "text", "value": "Hello."},
                    ],
                    "loss_weight": 1.0,
                },
            ]
        },
        "chat",
        "<|user|>Hi<|end|><|assistant|>[<think>Greet.</think>Hello.<|end|>]",
    ),
    "a message": (
        {
            "conversations": ASKED,
            "chosen": {"from": "gpt", "value": "1"},
            "rejected": {"from": "gpt", "value": "No."},
        },
        "preference",
        PAIR,
    ),
    "conversations": (
        {
            "chosen_messages": [
                *ASKED,
                {"role": "assistant", "content": [{"type": "text", "value": "1"}]},
            ],
            "rejected_messages": json.dumps([*ASKED, {"role": "assistant", "content": "No."}]),
        },
        "preference",
        PAIR,
    ),
    "dialogue": (
        {
            "chosen": "\n\nHuman: Say 1\n\nAssistant: 1",
            "rejected": "\n\nHuman: Say 1\n\nAssistant: No.",
        },
        "preference",
        PAIR,
    ),
    "rejected_response": (
        {"messages": [*ASKED, {"role": "assistant", "content": "1"}], "rejected_response": "No."},
        "preference",
        PAIR,
    ),
    "response and rejected_response": (
        {"query": "Say 1", "response": "1", "rejected_response": "No."},
        "preference",
        PAIR,
    ),
    "openai": (
        {
            "input": {"messages": ASKED, "tools": []},
            "preferred_output": [{"role": "assistant", "content": "1"}],
            "non_preferred_output": [{"role": "assistant", "content": "No."}],
        },
        "preference",
        PAIR,
    ),
    "ultrafeedback": (
        {
            "prompt": "Say 1",
            "messages": [*ASKED, {"from": "gpt", "value": "1"}],
            "chosen": [*ASKED, {"from": "gpt", "value": "1"}],
            "rejected": [*ASKED, {"from": "gpt", "value": "No."}],
        },
        "preference",
        PAIR,
    ),
    "a prompt as a dialogue": (
        {"prompt": "\n\nHuman: Say 1\n\nAssistant:", "chosen": " 1", "rejected": " No."},
        "preference",
        PAIR,
    ),
}


@pytest.mark.parametrize("name", ROWS)
def test_what_rows_become(tmp_path, tokenizers, name):
    row, kind, text = ROWS[name]
    assert shown(tmp_path, row, tokenizers["chat"]) == (kind, text)


def test_rows_of_tables(tmp_path, tokenizers):
    """A .csv holds messages as text; a .tsv has the same columns; a .parquet the fields of all."""
    text = json.dumps(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    )
    quoted = text.replace('"', '""')
    file = write(tmp_path / "a.csv", f'messages\n"{quoted}"\n')
    file_of_tabs = write(tmp_path / "b.tsv", "prompt\tcompletion\nHi\tHello.\nHi\tHello.\n")
    for path, kind, count in ((file, "chat", 1), (file_of_tabs, "instruct", 2)):
        encoder = make_encoder(kind, schema.Data(kind=kind), tokenizer=tokenizers["chat"])
        rows = list(encoder.encode_rows(read_rows(file_part(Location(str(path))))))
        assert [one.problem for one in rows] == [""] * count
        assert {hugging_face_byte_tokenizer().decode(one.ids) for one in rows} == {
            HELLO.replace("[", "").replace("]", "")
        }
    assert rows[-1].row.where == f"{file_of_tabs}:3"
    row = ROWS["history"][0] | {"system": None, "input": None}
    assert shown(tmp_path, row, tokenizers["chat"], suffix=".parquet")[1] == ROWS["history"][2]


def test_an_instruct_model_is_trained_in_its_own_format(tmp_path, tokenizers):
    """Alpaca's text is for tokenizers without a chat template, and by key."""
    assert has_chat_template(tokenizers["chat"])
    assert has_chat_template("bytes")
    assert not has_chat_template(tokenizers["base"])
    row, _, turns = ROWS["alpaca"]
    text = "### Instruction:\nSay\n\n### Input:\n1\n\n### Response:\n[1<|end|>]"
    assert shown(tmp_path, row, tokenizers["chat"])[1] == turns
    assert shown(tmp_path, row, tokenizers["base"])[1] == text
    assert shown(tmp_path, row, tokenizers["chat"], prompt_format="text")[1] == text
    template = str(write(tmp_path / "template.jinja", TEMPLATE))
    assert shown(tmp_path, row, tokenizers["base"], chat_template=template)[1] == turns
    with pytest.raises(RecipeError, match="has no chat template"):
        shown(tmp_path, row, tokenizers["base"], prompt_format="chat")
    # A question has no form of its own, as a prompt has
    question = {"question": "Say 1", "answer": "1"}
    asked = "### Instruction:\nSay 1\n\n### Response:\n[1<|end|>]"
    assert shown(tmp_path, question, tokenizers["base"])[1] == asked
    plain = {"prompt": "Say 1:", "completion": " 1"}
    assert shown(tmp_path, plain, tokenizers["base"])[1] == "Say 1:[ 1<|end|>]"
    row = ROWS["dialogue"][0]
    assert shown(tmp_path, row, tokenizers["base"])[1].startswith(
        "\n\nHuman: Say 1\n\nAssistant:[ 1"
    )


def test_chat_and_export_use_the_format_that_was_trained(tmp_path, tokenizers):
    """After Alpaca's text they write its headings: a conversation is rendered as it was trained."""

    def trained(row, tokenizer, **data):
        file = str(write(tmp_path / "a.jsonl", [row]))
        kind = "preference" if "chosen" in row else "instruct"
        settings = schema.Data(kind=kind, train=(file,), **data)
        settings = replace(settings, tokenizer=tokenizers[tokenizer])
        prompts = recorded_prompts(None, settings, schema.Model())
        encoder = make_encoder(kind, settings, tokenizer=tokenizers[tokenizer])
        forms = {prompt_form(encoder, find_parts((file,), kind=kind))}
        assert trained_prompts(settings, schema.Model(), forms) == prompts
        kept = tokenizer_to_keep(settings, schema.Model(), prompts=prompts)
        return kept.tokenizer.chat_template

    turns = [{"role": "system", "content": "Brief."}]
    turns += [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    turns += [{"role": "user", "content": "Say 1"}, {"role": "assistant", "content": "1"}]
    row = {"question": "Say 1", "answer": "1", "history": [["Hi", "Hello."]], "system": "Brief."}
    for tokenizer, more in (("base", {}), ("chat", {"prompt_format": "text"})):
        written = trained(row, tokenizer, **more)
        loaded = hugging_face_tokenizer(tokenizers[tokenizer])
        text = loaded.apply_chat_template(turns, chat_template=written, tokenize=False)
        _, one = encoded(tmp_path, row, tokenizers[tokenizer], **more)
        assert text == loaded.decode(one.ids)
        asked = loaded.apply_chat_template(turns[:-1], chat_template=written, tokenize=False)
        assert asked.endswith("### Instruction:\nSay 1\n\n### Response:\n")
    assert trained(row, "chat") == TEMPLATE
    plain = {"prompt": "Say 1:", "completion": " 1"}
    assert trained(plain, "chat", prompt_format="text") is None  # nothing around the prompt
    assert trained(plain, "base") is None
    assert trained(ROWS["ultrafeedback"][0], "chat", prompt_format="text") == TEMPLATE
    chat = schema.Source(files=("a.jsonl",), weight=1.0, kind="chat")
    mixture = schema.Data(kind="instruct", prompt_format="text", train={"a": chat})
    mixture = replace(mixture, tokenizer=tokenizers["chat"])
    assert trained_prompts(mixture, schema.Model(), {"text"}).template is None


def test_where_data_has_moved_the_record_counts(tmp_path, tokenizers):
    """Without a record, of an earlier version, and without data the form of prompts is not guessed."""
    file = tmp_path / "a.jsonl"
    data = schema.Data(kind="instruct", train=(str(file),), tokenizer=tokenizers["base"])
    written = trained_prompts(data, schema.Model(), {"instruction"})
    assert "### Instruction" in written.template
    assert written.ends
    assert recorded_prompts(written.record(), data, schema.Model()) == written
    with pytest.raises(RecipeError, match=r"a.jsonl: cannot be read, .* put the data back"):
        recorded_prompts(None, data, schema.Model())
    template = write(tmp_path / "template.jinja", TEMPLATE)
    given = trained_prompts(replace(data, chat_template=str(template)), schema.Model(), set())
    template.unlink()
    gone = replace(data, chat_template=str(template))
    assert recorded_prompts(given.record(), gone, schema.Model()).template == TEMPLATE


def test_an_export_that_was_trained_as_text_is_trained_as_text_again(tmp_path, tokenizers):
    """Its chat template would be taken for that of an instruct model, and lose the input's heading."""
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    file = str(write(tmp_path / "a.jsonl", [row]))
    settings = schema.Data(kind="instruct", train=(file,), tokenizer=tokenizers["base"])
    (tmp_path / "export").mkdir()
    prompts = recorded_prompts(None, settings, schema.Model())
    tokenizer_to_keep(settings, schema.Model(), prompts=prompts).save(tmp_path / "export")
    assert has_chat_template(str(tmp_path / "export"))
    _, first = encoded(tmp_path, row, tokenizers["base"])
    _, again = encoded(tmp_path, row, str(tmp_path / "export"))
    assert again.ids.tolist() == first.ids.tolist()
    assert again.labels_or_ids.tolist() == first.labels_or_ids.tolist()


def test_reasoning_in_a_column(tmp_path, tokenizers):
    row = {"Question": "Say 1", "Complex_CoT": "One.", "Response": "1"}
    columns = {"reasoning": "Complex_CoT"}
    _, text = shown(tmp_path, row, tokenizers["chat"], columns=columns)
    assert text == "<|user|>Say 1<|end|><|assistant|>[<think>One.</think>1<|end|>]"
    _, one = encoded(tmp_path, row, tokenizers["base"], columns=columns)
    assert one.problem.startswith(
        "column 'Complex_CoT' holds reasoning, which only a chat template"
    )


PROBLEMS = [
    (
        {"prompt": "a", "completion": "b", "label": False},
        "column 'label' marks good and bad answers",
    ),
    ({"messages": ASKED, "images": ["x"]}, "column 'images' holds images"),
    ({"messages": [{"role": "user", "content": "a", "images": ["x"]}]}, "message 1: only text"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "message 1: only text"),
    (
        {"conversations": [{"from": "function_call", "value": "f()"}]},
        "message 1: its tool call is not",
    ),
    ({"query": "a", "answers": "[]", "tools": "[]"}, "column 'answers' is empty"),
    ({"question": "a", "answer": {"text": ["b"]}}, "column 'answer' must hold text or a list"),
    ({"question": "a", "context": {"b": 1}, "answer": "c"}, "column 'context' must hold text"),
]


def test_rows_that_cannot_be_used(tmp_path, tokenizers):
    for row, expected in PROBLEMS:
        _, one = encoded(tmp_path, row, tokenizers["chat"])
        assert one.problem.startswith(expected), one.problem


def test_parts_of_tools_are_calls_and_results():
    """As in Anthropic's messages."""
    messages = [
        {"role": "user", "content": "Warm?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Look."},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Rome"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "31"}]},
    ]
    function = {"type": "function", "function": CALL}
    assert read_messages(messages, "messages") == [
        messages[0],
        {
            "role": "assistant",
            "content": "I look.",
            "reasoning_content": "Look.",
            "tool_calls": [function],
        },
        {"role": "tool", "content": "31"},
    ]
    # Calls in messages of their own, of one answer
    turns = [
        {"role": "assistant", "content": "I look."},
        {"role": "tool_call", "content": json.dumps(CALL)},
        {"role": "tool_call", "content": json.dumps([CALL])},
    ]
    (message,) = read_messages(turns, "messages")
    assert message == {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [function, function],
    }
    assert read_tools([{"type": "function", "function": TOOL}]) == read_tools([TOOL])


def test_dialogues_as_text():
    assert dialogue("\n\nHuman: a\n\nb\n\nAssistant: c\n\nHuman: d\n\nAssistant:") == [
        {"role": "user", "content": "a\n\nb"},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": "d"},
    ]
    assert dialogue("Assistant: a") is dialogue("Said Human: a") is dialogue("") is None


def test_unused_columns_and_the_format_are_named_at_the_start(tmp_path, tokenizers):
    rows = [{"question": "a", "answer": "b", "category": "c" * (n == 150)} for n in range(200)]
    file = str(write(tmp_path / "rows.jsonl", rows))
    for tokenizer, how in (
        ("chat", "a user's and an assistant's turn of the"),
        ("base", "one text,"),
    ):
        for _ in range(2):  # also with tokens that were cached
            data = schema.Data(kind="instruct", cache=str(tmp_path / "cache"))
            dataset = open_dataset(
                data,
                (file,),
                objective=NextToken(),
                tokenizer=tokenizers[tokenizer],
                model=ModelTraits(),
                build=True,
            )
            _, note, unused = dataset.describe()
            assert note.startswith(f"a prompt and an answer are trained as {how}")
            assert unused == "note: columns not used: category"


def test_rows_that_are_too_long(tmp_path, tokenizers):
    rows = [{"question": "a", "answer": "b" * size} for size in (3, 60, 5, 70, 80)]
    file = str(write(tmp_path / "rows.jsonl", rows))

    def opened(**more):
        data = schema.Data(kind="instruct", sequence_length=32, cache=str(tmp_path / "c"), **more)
        options = {"tokenizer": tokenizers["chat"], "model": ModelTraits(), "build": True}
        return open_dataset(data, (file,), objective=NextToken(), **options)

    dropped = opened()
    assert dropped.sequences.long_documents == 3
    assert dropped.tokens == sum(size + 5 for size in (3, 5))
    assert dropped.describe()[2].startswith(
        "warning: 3 of 5 documents are dropped: they are longer"
    )
    assert opened(overlong="cut").sequences.cut_documents == 3
    with pytest.raises(RecipeError) as error:
        opened(overlong="error")
    *lines, last = error.value.problems
    what = "tokens, more than 32 (data.sequence_length)"
    assert lines == [
        f"{file}:{line}: {size + 5} {what}" for line, size in ((2, 60), (4, 70), (5, 80))
    ]
    assert last == (
        "3 of 5 rows are longer than a sequence, by up to 53 tokens; raise data.sequence_length, or "
        "set data.overlong: drop, or cut"
    )
    write(tmp_path / "rows.jsonl", rows[1:2])
    with pytest.raises(RecipeError, match=r"no row with loss fits into 32 tokens .*data.overlong"):
        opened()


@pytest.mark.parametrize("packing", [True, False])
def test_long_texts_are_dropped_on_request(tmp_path, packing):
    file = str(write(tmp_path / "rows.jsonl", ["a" * 5, "b" * 50, "c" * 6]))
    data = schema.Data(sequence_length=16, overlong="drop", packing=packing, cache=str(tmp_path))
    options = {"tokenizer": "bytes", "model": ModelTraits(), "build": True}
    dataset = open_dataset(data, (file,), objective=NextToken(), **options)
    seen = [
        token for index in range(len(dataset)) for token in dataset[index]["input_ids"].tolist()
    ]
    assert ord("b") not in seen
    assert (seen.count(ord("a")), seen.count(ord("c"))) == (5, 6)


@pytest.mark.parametrize("packing", [True, False])
def test_a_single_text_is_held_out_in_part(tmp_path, packing):
    file = str(write(tmp_path / "one.txt", "a" * 900 + "b" * 100))
    data = schema.Data(
        sequence_length=64, validation_split=0.1, packing=packing, cache=str(tmp_path / "c")
    )
    options = {"tokenizer": "bytes", "model": ModelTraits(), "build": True}
    training = open_dataset(data, (file,), objective=NextToken(), **options)
    held_out = open_dataset(data, (file,), objective=NextToken(), held_out=True, **options)
    assert (training.tokens, held_out.tokens) == (901, 100)
    last = training[len(training) - 1]
    assert last["targets"][-1] == IGNORED  # the next token is held out
    assert set(held_out[0]["input_ids"].tolist()) == {ord("b")}
    both = rows_of_documents(training.store, data, {0, 1}, tokenizer="bytes")
    assert [both[number].where for number in (0, 1)] == [file, file]


def test_held_out_documents_know_their_rows(tmp_path):
    rows = [{"text": f"row {number}"} for number in range(1, 41)]
    file = str(write(tmp_path / "rows.jsonl", rows))
    data = schema.Data(sequence_length=64, validation_split=0.2, cache=str(tmp_path / "c"))
    options = {"tokenizer": "bytes", "model": ModelTraits(), "build": True}
    store = open_dataset(data, (file,), objective=NextToken(), held_out=True, **options).store
    found = rows_of_documents(store, data, {0, 3}, tokenizer="bytes")
    for number, row in found.items():
        text = bytes(store.ids[slice(*store.offsets[number : number + 2])][:-1].tolist()).decode()
        assert row.where == f"{file}:{text.removeprefix('row ')}"


def test_the_causes_of_problems_are_counted():
    rows = [{"where": f"a:{n}", "problem": f"not JSON (column {n})"} for n in range(180)]
    rows += [{"where": f"b:{n}", "problem": "no answer"} for n in range(6)]
    *first, count, most, few = problem_lines(rows, rows=400)
    assert first == [f"a:{n}: not JSON (column {n})" for n in range(5)]
    assert count == "186 of 400 rows cannot be used (data.on_error=skip leaves them out):"
    assert most == "  180 like a:0: not JSON (column 0)"
    assert few == "  6 like b:0: no answer"
    partly = list(problem_lines(rows, rows=10_000, complete=False))[5]
    assert partly.startswith("186 of the first 10,000 rows cannot be used")
    everything = list(problem_lines(rows, rows=186))[5]
    assert everything == "186 of 186 rows cannot be used:"  # and nothing would be left
    assert list(problem_lines(rows[:2], rows=9)) == first[:2]
    many = [{"where": "a", "problem": "x" * n} for n in range(1, 12)]
    assert list(problem_lines(many, rows=11))[-1] == "  6 with 6 other causes"


TOOLS = [{"name": "weather", "parameters": {}}]
NO_TOOLS = "{% for m in messages %}{{ m.role ~ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("row", "rule"),
    [
        ({"answer": " \n"}, "empty"),
        (
            {"answer": None},
            "null",
        ),
        (
            {"answer": 42},
            "number",
        ),
        (
            {"answer": {"text": ["a"], "answer_start": [1]}},
            "object",
        ),
        (
            {"answer": "a", "functions": json.dumps(TOOLS)},
            "tools",
        ),
        (
            {"answer": "a", "reasoning": "b"},
            "reasoning",
        ),
    ],
)
def test_answers_that_cannot_be_learned(tmp_path, words, tokenizers, row, rule):
    _, one = encoded(tmp_path, {"question": "q", **row}, tokenizers["base"])
    words.check(rule, one.problem)


def test_a_template_that_drops_tools_or_reasoning_names_the_column(tmp_path, tokenizers):
    template = str(write(tmp_path / "no_tools.jinja", NO_TOOLS))
    row = {"question": "q", "answer": "a"}
    for more in ({"functions": TOOLS}, {"thinking": "b"}):
        _, one = encoded(tmp_path, row | more, tokenizers["chat"], chat_template=template)
        (column,) = more
        assert f"data.ignore_columns='[{column}]'" in one.problem


def test_inspect_counts_only_the_documents_of_a_set(tmp_path, tokenizers):
    rows = [{"question": "a", "answer": "b" * size} for size in range(3, 23)]
    file = str(write(tmp_path / "rows.jsonl", rows))
    data = schema.Data(
        kind="instruct", validation_split=0.25, sequence_length=64, cache=str(tmp_path / "c")
    )
    options = {"tokenizer": tokenizers["chat"], "model": ModelTraits(), "build": True}
    training = open_dataset(data, (file,), objective=NextToken(), **options)
    held_out = open_dataset(data, (file,), objective=NextToken(), held_out=True, **options)
    lengths = [*training.document_lengths.tolist(), *held_out.document_lengths.tolist()]
    assert sorted(lengths) == [size + 5 for size in range(3, 23)]
    assert len(held_out.document_lengths) == held_out.sequences.documents > 0


def test_parts_of_columns_count_as_columns(tmp_path, tokenizers):
    """SQuAD's answers. A part that is not there is null."""
    rows = [
        {"context": "c", "question": "q", "answers": {"text": ["a", "b"], "answer_start": [1, 2]}},
        {"context": "c", "question": "q", "answers": {"text": [], "answer_start": []}},
    ]
    columns = {"response": "answers.text[0]"}
    data = schema.Data(kind="instruct", columns=columns, prompt_format="text")
    encoder = make_encoder("instruct", data, tokenizer="bytes")
    unused: list[str] = []
    file = write(tmp_path / "squad.jsonl", rows)
    one, two = encoder.encode_rows(read_rows(file_part(Location(str(file)))), unused=unused)
    text = "### Instruction:\nq\n\n### Input:\nc\n\n### Response:\na"
    assert bytes(one.ids[:-1].astype("uint8")).decode() == text
    assert (
        two.problem
        == "column 'answers.text[0]' is empty (null); it must hold text or a list of messages"
    )
    assert not unused
    named = named_columns({"columns": columns})
    assert guess(rows[0], named).layout.needs == ("instruction", "response")


def test_articles_and_their_highlights():
    """CNN/DailyMail; an article beside a question stays its input."""
    found = match_row({"article": "a", "highlights": "h", "id": "1"}, {}, ["instruct"])
    assert found.columns == {"instruction": "article", "response": "highlights"}
    found = match_row({"article": "a", "question": "q", "answer": "b"}, {}, ["instruct"])
    assert found.columns == {"instruction": "question", "response": "answer", "input": "article"}
