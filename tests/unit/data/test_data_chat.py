"""Conversations and prompts: which tokens carry loss, by the template's marks or by a rendering that is verified."""

import json

import pytest

from launcher.data.chat import ChatTemplate, RowError, read_messages, read_tools
from launcher.data.encoder import Encoder, make_encoder
from launcher.data.sources import file_part, read_rows
from launcher.errors import RecipeError
from launcher.models.chunked_loss import IGNORED
from launcher.recipe import schema

SPECIAL = ["<bos>", "<eos>", "<|begin|>", "<|end|>", "<|head|>", "<|neck|>", "<turn>", "</turn>"]


def trained(*, trim=False):
    """A byte-level BPE tokenizer with some merges. trim: white space is excluded from the offsets, as Llama 3 has it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    texts = [
        "the quick answer is forty two",
        "user assistant system model",
        " what is this? yes no maybe\n\n",
    ] * 3
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def sentencepiece():
    """In the shape of Llama 2's: spaces are written out, one is put in front, what has no token is spelt in bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    merges = [("a", "n"), ("▁", "a"), ("n", "o"), ("y", "e"), ("ye", "s"), ("▁", "t"), ("▁t", "h")]
    letters = [chr(code) for code in range(0x21, 0x7F)]
    words = [
        "<unk>",
        *SPECIAL,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *letters,
        *(a + b for a, b in merges),
    ]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={word: number for number, word in enumerate(words)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


@pytest.fixture(scope="module", params=["bytes", "trimmed", "sentencepiece"])
def tokenizer(request):
    return (
        sentencepiece()
        if request.param == "sentencepiece"
        else trained(trim=request.param == "trimmed")
    )


# Templates in the shape of real ones. What the assistant says stands between [[ and ]]: taken out, or turned into marks.
CHATML = "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' }}" + (
    "{% if m.role == 'assistant' %}[[{{ m.content + '<|end|>' }}]]{{ '\n' }}{% else %}{{ m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|neck|>\n\n' }}{% if m.role == 'assistant' %}"
    "[[{{ m.content | trim + '<|end|>' }}]]{% else %}{{ m.content | trim + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|neck|>\n\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must go user, assistant, user, ...') }}{% endif %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' }}[[{{ m.content | trim + ' ' + eos_token }}]]{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<turn>' + role + '\n' }}{% if role == 'model' %}[[{{ m.content | trim + '</turn>' }}]]{{ '\n' }}"
    "{% else %}{{ m.content | trim + '</turn>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<turn>model\n' }}{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set thought = said.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set said = said.split('</think>')[-1].lstrip('\n') %}{% endif %}{{ '<|begin|>assistant\n' }}"
    "[[{% if loop.index0 > ns.last and thought %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% for c in m.tool_calls or [] %}{{ '\n<call>' + c.function.name + '</call>' }}{% endfor %}{{ '<|end|>' }}]]{{ '\n' }}"
    "{% else %}{{ '<|begin|>' + m.role + '\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role + ': ' }}{% if m.role == 'assistant' %}[[{{ m.content }}]]{% else %}{{ m.content }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "inst": INST,
    "gemma": GEMMA,
    "thinking": THINKING,
}


def bare(template):
    return template.replace("[[", "").replace("]]", "")


def marked(template):
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


def said(*contents):
    """A conversation, the user first."""
    return [
        {"role": "assistant" if number % 2 else "user", "content": content}
        for number, content in enumerate(contents)
    ]


def encoded(tokenizer, template, messages, tools=None, loss_from=0):
    chat = ChatTemplate(tokenizer, "it", template)
    return chat.tokens([chat.render(messages, tools, loss_from=loss_from)])[0]


def learned(tokenizer, template, messages, **more):
    """The runs of text that carry loss."""
    ids, labels = encoded(tokenizer, template, messages, **more)
    assert all(
        label in (IGNORED, token)
        for token, label in zip(ids.tolist(), labels.tolist(), strict=True)
    )
    runs, before = [], False
    for token, label in zip(ids.tolist(), labels.tolist(), strict=True):
        if label != IGNORED:
            runs = runs if before else [*runs, []]
            runs[-1].append(token)
        before = label != IGNORED
    return [tokenizer.decode(run) for run in runs]


CONVERSATIONS = {
    "one": said("what is this?", "the answer is forty two"),
    "many": said("yes", "no", "what?", "the quick answer", "maybe", "no"),
    "the user says the same": said("no", "no", "no", "no"),
    "characters of several tokens": said("日本?", "🙂日本🙂", "ü", "é🙂"),
    "white space": said("a", "  two  spaces \n", "b", "\n\nlines\n\n"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_marks_and_verified_rendering_agree(tokenizer, name, conversation):
    messages = CONVERSATIONS[conversation]
    ids, labels = encoded(tokenizer, bare(TEMPLATES[name]), messages)
    marked_ids, marked_labels = encoded(tokenizer, marked(TEMPLATES[name]), messages)
    assert (
        ids.tolist()
        == marked_ids.tolist()
        == tokenizer.apply_chat_template(messages, chat_template=bare(TEMPLATES[name]))["input_ids"]
    )
    assert labels.tolist() == marked_labels.tolist()
    end = {"inst": " <eos>", "gemma": "</turn>"}.get(name, "<|end|>")
    answers = [message["content"] for message in messages[1::2]]
    runs = learned(tokenizer, bare(TEMPLATES[name]), messages)
    assert [run.strip() for run in runs] == [
        (answer.strip() if name in ("headers", "inst", "gemma") else answer.lstrip()) + end
        for answer in answers
    ]


def test_marks_are_read_as_transformers_reads_them():
    tokenizer = trained()
    for messages in CONVERSATIONS.values():
        found = tokenizer.apply_chat_template(
            messages,
            chat_template=marked(CHATML),
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        ids, labels = encoded(tokenizer, marked(CHATML), messages)
        assert ids.tolist() == found["input_ids"]
        assert [int(label != IGNORED) for label in labels] == found["assistant_masks"]


def test_a_system_turn_and_turns_without_an_answer(tokenizer):
    messages = [
        {"role": "system", "content": "no"},
        *said("yes", "no"),
        {"role": "user", "content": "no"},
    ]
    for template in (CHATML, HEADERS, GEMMA):
        assert len(learned(tokenizer, bare(template), messages)) == 1
        assert learned(tokenizer, bare(template), messages) == learned(
            tokenizer, marked(template), messages
        )


def test_thinking_of_earlier_turns_is_dropped(tokenizer):
    messages = said("a", "<think>\nlong\n</think>\n\nyes", "b", "<think>\nshort\n</think>\n\nno")
    expected = ["yes<|end|>", "<think>\nshort\n</think>\n\nno<|end|>"]
    assert (
        learned(tokenizer, marked(THINKING), messages)
        == learned(tokenizer, bare(THINKING), messages)
        == expected
    )
    one_line = said("a", "<think>long</think>yes", "b", "<think>short</think>no")
    assert learned(tokenizer, bare(THINKING), one_line) == expected
    # a template that knows nothing of it keeps it as it is
    assert learned(tokenizer, bare(CHATML), one_line) == [
        "<think>long</think>yes<|end|>",
        "<think>short</think>no<|end|>",
    ]


def test_calls_of_tools_and_reasoning_are_learned(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "maybe"}}]}
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "what"}
    for last in (call, thought):
        messages = [*said("a", "no", "b"), last]
        runs = learned(tokenizer, bare(THINKING), messages)
        assert runs == learned(tokenizer, marked(THINKING), messages)
        assert runs[0] == "no<|end|>"
        assert runs[1] == (
            "\n<call>maybe</call><|end|>"
            if last is call
            else "<think>\nwhat\n</think>\n\nyes<|end|>"
        )


def test_an_answer_without_an_end_of_turn_gets_the_end_of_text(tokenizer):
    ids, _ = encoded(tokenizer, bare(PLAIN), said("a", "yes", "b", "no"))
    assert ids[-1] == tokenizer.eos_token_id
    assert learned(tokenizer, bare(PLAIN), said("a", "yes", "b", "no"))[-1].strip("\n ") in (
        "no\n<eos>",
        "no<eos>",
    )
    ids, _ = encoded(tokenizer, bare(CHATML), said("a", "yes"))
    assert ids[-1] != tokenizer.eos_token_id
    # an end of turn that is no token of its own is learned with it
    spelt = bare(CHATML).replace("<|end|>", "##")
    assert learned(tokenizer, spelt, said("a", "yes", "b", "no"))[-1] == "no##\n<eos>"
    open_ended = [*said("a", "yes"), {"role": "user", "content": "b"}]
    assert [run.strip() for run in learned(tokenizer, bare(PLAIN), open_ended)] == ["yes"]
    # marks are taken as they are
    ids, labels = encoded(tokenizer, marked(PLAIN), said("a", "yes"))
    assert ids[-1] != tokenizer.eos_token_id
    assert labels[-1] == IGNORED


REFUSED = [
    (
        bare(INST),
        [*said("a", "b"), {"role": "assistant", "content": "c"}],
        "refuses this conversation: turns must go user, assistant",
    ),
    (
        bare(CHATML),
        [{"role": "user", "content": "a"}],
        "no assistant turn, so nothing to learn from",
    ),
    (
        "{% for m in messages %}{{ m.content | upper }}{% endfor %}",
        said("a", "yes"),
        "message 2: the assistant's part ... cannot be verified; put {% gen",
    ),
    (
        "{% for m in messages %}{{ m.content * 2 }}{% endfor %}",
        said("a", "yes"),
        "cannot be verified",
    ),
    ("{{ messages[0].content }}", said("a", "yes"), "cannot be verified"),
    (
        "{% generation %}{% endgeneration %}{{ messages[0].content }}",
        said("a", "yes"),
        "marks enclose nothing here",
    ),
    ("{{ messages[9].content + 'x' }}", said("a", "yes"), "the chat template"),
]


@pytest.mark.parametrize(
    ("template", "messages", "what"), REFUSED, ids=[what[:25] for *_, what in REFUSED]
)
def test_a_conversation_that_cannot_be_used(template, messages, what):
    with pytest.raises(RowError) as refused:
        encoded(trained(), template, messages)
    for part in what.split(" ... "):
        assert part in str(refused.value)


def test_a_template_that_is_no_template():
    with pytest.raises(RecipeError, match=r"^data.chat_template: line 2: "):
        encoded(trained(), "{{ 'x' }}\n{% for %}", said("a", "yes"))


def test_loss_on_the_response_of_a_conversation_alone(tokenizer):
    for template in (bare(CHATML), marked(CHATML)):
        assert learned(tokenizer, template, said("a", "yes", "b", "no"), loss_from=2) == [
            "no<|end|>"
        ]


def test_a_tokenizer_without_a_template_or_without_offsets():
    with pytest.raises(
        RecipeError,
        match=r"^data.tokenizer: it: has no chat template; set data.chat_template to a file with one$",
    ):
        ChatTemplate(trained(), "it", None)

    class Slow:
        chat_template, is_fast = "x", False

    with pytest.raises(
        RecipeError,
        match=r"^data.tokenizer: it: is a slow tokenizer \(Slow\), which gives no positions",
    ):
        ChatTemplate(Slow(), "it", None)


# Messages


def test_messages():
    turns = [
        {"from": "system", "value": "s", "weight": None},
        {"from": "human", "value": "h"},
        {"from": "gpt", "value": "g"},
        {"from": "tool", "value": "t"},
    ]
    assert [(m["role"], m["content"]) for m in read_messages(turns, "conversations")] == [
        ("system", "s"),
        ("user", "h"),
        ("assistant", "g"),
        ("tool", "t"),
    ]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [1], "name": "x"}
    assert read_messages([{"role": "user", "content": parts}, call], "messages") == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [1], "name": "x"},
    ]
    assert read_tools('[{"a": 1}]') == [{"a": 1}]
    assert read_tools(None) is read_tools("") is read_tools([]) is None


BROKEN_MESSAGES = [
    (
        "x",
        "column 'messages' must hold a list of messages, each with role and content (or from and value); got str",
    ),
    (
        [],
        "column 'messages' must hold a list of messages, each with role and content (or from and value); got an empty list",
    ),
    (
        [{"content": "x"}],
        "message 1: no role; must be one of system, developer, user, assistant, tool, function, ipython",
    ),
    ([{"role": "bot", "content": "x"}], "message 1: unknown role 'bot'; must be one of"),
    (
        [{"from": "narrator", "value": "x"}],
        "message 1: unknown role 'narrator' in `from`; must be one of human, user, gpt",
    ),
    ([{"role": "user"}], "message 1: content must be text, or a list of text parts; got nothing"),
    (
        [{"role": "user", "content": [{"type": "image"}]}],
        "message 1: a content part is 'image'; only text can be trained on",
    ),
]


@pytest.mark.parametrize(
    ("messages", "said_"), BROKEN_MESSAGES, ids=[said_[:40] for _, said_ in BROKEN_MESSAGES]
)
def test_broken_messages(messages, said_):
    with pytest.raises(RowError) as refused:
        read_messages(messages, "messages")
    assert str(refused.value).startswith(said_)


# Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = trained()
    tokenizer.chat_template = bare(CHATML)
    tokenizer.save_pretrained(folder)
    return str(folder)


def results(tmp_path, rows, kind, folder, **data):
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    encoder = make_encoder(kind, schema.Data(kind=kind, **data), tokenizer=folder)
    return list(encoder.encode_rows(read_rows(file_part(file))))


def shown(one, tokenizer):
    """(what carries no loss, what does)"""
    ids = one.ids.tolist()
    first = next(number for number, label in enumerate(one.labels.tolist()) if label != IGNORED)
    assert one.labels.tolist() == [IGNORED] * first + ids[first:]
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])


INSTRUCT = [
    ({"prompt": "what? ", "completion": "yes"}, ("what? ", "yes<eos>")),
    ({"prompt": "what?", "response": " no"}, ("what?", " no<eos>")),
    (
        {"instruction": "what?", "output": "no"},
        ("### Instruction:\nwhat?\n\n### Response:\n", "no<eos>"),
    ),
    (
        {"instruction": "a", "input": "b", "output": "no"},
        ("### Instruction:\na\n\n### Input:\nb\n\n### Response:\n", "no<eos>"),
    ),
]


def test_instruct_rows(tmp_path, folder):
    tokenizer = trained()
    found = results(tmp_path, [row for row, _ in INSTRUCT], "instruct", folder)
    assert [shown(one, tokenizer) for one in found] == [expected for _, expected in INSTRUCT]
    # prompt and response are tokenized each by itself: joined, they would not be the tokens of the joined text
    assert (
        found[0].ids.tolist()[: len(tokenizer("what? ")["input_ids"])]
        == tokenizer("what? ")["input_ids"]
    )


def test_instruct_columns_and_conversations(tmp_path, folder):
    tokenizer = trained()
    (named,) = results(
        tmp_path,
        [{"q": "a", "a": "no"}],
        "instruct",
        folder,
        prompt_column="q",
        response_column="a",
    )
    assert shown(named, tokenizer) == ("a", "no<eos>")
    rows = [
        {"prompt": said("a", "b", "c"), "completion": said("", "no")[1:]},
        {"prompt": said("a"), "response": "no"},
    ]
    first, second = results(tmp_path, rows, "instruct", folder)
    assert tokenizer.decode([t for t in first.labels if t != IGNORED]) == "no<|end|>"
    assert tokenizer.decode([t for t in second.labels if t != IGNORED]) == "no<|end|>"


def test_a_template_makes_conversations_of_prompts(tmp_path, folder):
    template = tmp_path / "template.jinja"
    template.write_text(marked(CHATML))
    tokenizer = trained()
    rows = [{"prompt": "a", "response": "no"}, {"instruction": "a", "input": "b", "output": "no"}]
    first, second = results(tmp_path, rows, "instruct", folder, chat_template=str(template))
    for one, asked in ((first, "a"), (second, "a\n\nb")):
        assert (
            tokenizer.decode(one.ids)
            == f"<|begin|>user\n{asked}<|end|>\n<|begin|>assistant\nno<|end|>\n"
        )


def test_chat_rows(tmp_path, folder):
    rows = [
        {"messages": said("a", "no")},
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "no"}]},
    ]
    first, second = results(tmp_path, rows, "chat", folder)
    assert (
        first.ids.tolist()
        == second.ids.tolist()
        == trained().apply_chat_template(said("a", "no"), chat_template=bare(CHATML))["input_ids"]
    )
    assert first.labels.tolist() == second.labels.tolist()
    (named,) = results(
        tmp_path, [{"talk": said("a", "no")}], "chat", folder, messages_column="talk"
    )
    assert named.ids.tolist() == first.ids.tolist()


def test_a_bad_row_between_good_ones(tmp_path, folder):
    rows = [
        {"messages": said("a", "no")},
        {"messages": said("a")},
        {"text": "x"},
        {"messages": said("a", "\ud83d")},
        {"messages": said("a", "no")},
    ]
    found = results(tmp_path, rows, "chat", folder)
    assert [one.problem for one in found] == [
        "",
        "no assistant turn, so nothing to learn from",
        "column 'messages' must hold messages; no such column; columns: text "
        "(data.messages_column names it; null: messages or conversations)",
        "the conversation holds half a surrogate pair (\\ud800 to \\udfff), which is no character",
        "",
    ]
    assert [one.row.where.rpartition(":")[2] for one in found] == ["1", "2", "3", "4", "5"]
    assert found[0].ids.tolist() == found[4].ids.tolist()


BROKEN_INSTRUCT = [
    (
        {"prompt": "a"},
        "column 'response' must hold text or a list of messages; no such column; columns: prompt (data.response_column names it; null:",
    ),
    ({"prompt": "a", "output": ""}, "column 'output' is empty, so there is nothing to learn from"),
    (
        {"prompt": 3, "output": "x"},
        "column 'prompt' must hold text or a list of messages; got int; columns: prompt, output (data.prompt_column",
    ),
    ({"instruction": 3, "output": "x"}, "column 'instruction' must hold text; got int"),
    ({"prompt": "a", "completion": said("x")}, "no assistant turn, so nothing to learn from"),
]


def test_broken_instruct_rows(tmp_path, folder):
    found = results(tmp_path, [row for row, _ in BROKEN_INSTRUCT], "instruct", folder)
    for one, (_, expected) in zip(found, BROKEN_INSTRUCT, strict=True):
        assert one.problem.startswith(expected), one.problem


def test_classification_rows(tmp_path, folder):
    tokenizer = trained()
    rows = [
        {"text": "yes", "label": 1},
        {"text": "no", "label": "0"},
        {"text": "no", "label": "good"},
        {"text": "no", "label": 2},
    ]
    rows += [{"text": "no"}, {"text": "", "label": 1}, {"text": "no", "label": True}]
    found = results(tmp_path, rows, "classification", folder, labels=("bad", "good"))
    assert [one.category for one in found] == [1, 0, 1, None, None, None, None]
    assert found[0].ids.tolist() == tokenizer("yes")["input_ids"]
    assert found[3].problem == (
        "column 'label': 2 is no class; it must be a whole number from 0 to 1, or a name: bad, good"
    )
    assert (
        found[4].problem
        == "column 'label' must hold the label; no such column; columns: text (data.label_column names it)"
    )
    assert found[5].problem == "column 'text' is empty"
    assert found[6].problem.startswith(
        "column 'label': True is no class; it must be a whole number from 0 to 1, or a name: bad, good"
    )
    unnamed = results(tmp_path, rows, "classification", folder)
    assert [one.category for one in unnamed] == [1, 0, None, 2, None, None, None]


def test_what_a_kind_does_not_use_changes_nothing():
    data = schema.Data(text_column="body", prompt_column="q", labels=("a", "b"))
    assert make_encoder("text", data, tokenizer="bytes") == make_encoder(
        "text", schema.Data(text_column="body"), tokenizer="bytes"
    )
    assert isinstance(make_encoder("tokens", data, tokenizer="bytes"), Encoder)
    assert make_encoder("tokens", data, tokenizer="bytes").tokenizer is None
