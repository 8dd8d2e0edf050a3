"""Conversations and prompts: which tokens carry loss.

The template marks them, or a second rendering finds and verifies them.
"""

import itertools

import pytest

from launcher.data.chat import ChatTemplate, RowError, read_messages, read_tools
from launcher.data.encoder import make_encoder
from launcher.data.sources import file_part, read_rows
from launcher.errors import RecipeError
from launcher.models.chunked_loss import IGNORED
from launcher.recipe import schema
from tests.unit.data.rows import write

SPECIAL = ["<bos>", "<eos>", "<|begin|>", "<|end|>", "<|head|>", "<|neck|>", "<turn>", "</turn>"]


def trained(*, trim=False):
    """A byte-level BPE tokenizer with some merges.

    trim: token offsets exclude white space, as in Llama 3's tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=trim)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["the quick answer is forty two", "user assistant system model"]
    texts += [" what is this? yes no maybe\n\n"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": SPECIAL, "initial_alphabet": alphabet, "show_progress": False}
    tokenizer.train_from_iterator(texts * 3, trainers.BpeTrainer(vocab_size=400, **options))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def sentencepiece():
    """A tokenizer like that of Llama 2.

    Spaces become `▁`, one is prepended to the text, and unknown characters are encoded as bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    merges = [("a", "n"), ("▁", "a"), ("n", "o"), ("y", "e"), ("ye", "s"), ("▁", "t"), ("▁t", "h")]
    spelt = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *(chr(code) for code in range(0x21, 0x7F))]
    words = ["<unk>", *SPECIAL, *spelt, *letters, *(a + b for a, b in merges)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>")
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
    if request.param == "sentencepiece":
        return sentencepiece()
    return trained(trim=request.param == "trimmed")


# Templates like those of real models. [[ and ]] enclose the assistant's text: `bare` removes them,
# and `marked` replaces them by generation marks.
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
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "inst": INST, "gemma": GEMMA}
TEMPLATES["thinking"] = THINKING


def bare(template):
    return template.replace("[[", "").replace("]]", "")


def marked(template):
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


def said(*contents):
    """Messages that alternate between user and assistant, starting with the user."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def encoded(tokenizer, template, messages, tools=None, loss_from=0):
    chat = ChatTemplate(tokenizer, "it", template)
    return chat.tokens([chat.render(messages, tools, loss_from=loss_from)])[0]


def learned(tokenizer, template, messages, **more):
    """The decoded spans that carry loss."""
    ids, labels = encoded(tokenizer, template, messages, **more)
    assert ((labels == IGNORED) | (labels == ids)).all()
    runs = itertools.groupby(zip(ids, labels, strict=True), key=lambda one: one[1] != IGNORED)
    return [tokenizer.decode([token for token, _ in run]) for loss, run in runs if loss]


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
    messages, bare_ = CONVERSATIONS[conversation], bare(TEMPLATES[name])
    ids, labels = encoded(tokenizer, bare_, messages)
    marked_ids, marked_labels = encoded(tokenizer, marked(TEMPLATES[name]), messages)
    expected = tokenizer.apply_chat_template(messages, chat_template=bare_)["input_ids"]
    assert ids.tolist() == marked_ids.tolist() == expected
    assert labels.tolist() == marked_labels.tolist()
    end = {"inst": " <eos>", "gemma": "</turn>"}.get(name, "<|end|>")
    answers = [message["content"].lstrip() for message in messages[1::2]]
    if name in ("headers", "inst", "gemma"):
        answers = [answer.strip() for answer in answers]
    runs = learned(tokenizer, bare_, messages)
    assert [run.strip() for run in runs] == [answer + end for answer in answers]


def test_marks_give_the_same_mask_as_transformers():
    tokenizer = trained()
    for messages in CONVERSATIONS.values():
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = tokenizer.apply_chat_template(messages, chat_template=marked(CHATML), **options)
        ids, labels = encoded(tokenizer, marked(CHATML), messages)
        assert ids.tolist() == found["input_ids"]
        assert [int(label != IGNORED) for label in labels] == found["assistant_masks"]


def test_system_and_unanswered_turns_carry_no_loss(tokenizer):
    messages = [{"role": "system", "content": "no"}, *said("yes", "no", "no")]
    for template in (CHATML, HEADERS, GEMMA):
        runs = learned(tokenizer, bare(template), messages)
        assert len(runs) == 1
        assert runs == learned(tokenizer, marked(template), messages)
    for template in (bare(CHATML), marked(CHATML)):
        four = said("a", "yes", "b", "no")
        assert learned(tokenizer, template, four, loss_from=2) == ["no<|end|>"]


def test_thinking_of_earlier_turns_is_dropped(tokenizer):
    messages = said("a", "<think>\nlong\n</think>\n\nyes", "b", "<think>\nshort\n</think>\n\nno")
    expected = ["yes<|end|>", "<think>\nshort\n</think>\n\nno<|end|>"]
    for template in (marked(THINKING), bare(THINKING)):
        assert learned(tokenizer, template, messages) == expected
    one_line = said("a", "<think>long</think>yes", "b", "<think>short</think>no")
    assert learned(tokenizer, bare(THINKING), one_line) == expected
    # A template that does not handle thinking keeps the text unchanged
    assert learned(tokenizer, bare(CHATML), one_line) == [
        "<think>long</think>yes<|end|>",
        "<think>short</think>no<|end|>",
    ]


def test_tool_calls_and_reasoning_carry_loss(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "maybe"}}]}
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "what"}
    for last in (call, thought):
        messages = [*said("a", "no", "b"), last]
        runs = learned(tokenizer, bare(THINKING), messages)
        assert runs == learned(tokenizer, marked(THINKING), messages)
        assert runs[0] == "no<|end|>"
        thinking = "<think>\nwhat\n</think>\n\nyes<|end|>"
        assert runs[1] == ("\n<call>maybe</call><|end|>" if last is call else thinking)


def test_eos_is_added_if_the_end_of_turn_is_missing(tokenizer):
    ids, _ = encoded(tokenizer, bare(PLAIN), said("a", "yes", "b", "no"))
    assert ids[-1] == tokenizer.eos_token_id
    last = learned(tokenizer, bare(PLAIN), said("a", "yes", "b", "no"))[-1]
    assert last.strip("\n ") in ("no\n<eos>", "no<eos>")
    ids, _ = encoded(tokenizer, bare(CHATML), said("a", "yes"))
    assert ids[-1] != tokenizer.eos_token_id
    # An end of turn that is not a special token carries loss, too
    spelt = bare(CHATML).replace("<|end|>", "##")
    assert learned(tokenizer, spelt, said("a", "yes", "b", "no"))[-1] == "no##\n<eos>"
    open_ended = learned(tokenizer, bare(PLAIN), said("a", "yes", "b"))
    assert [run.strip() for run in open_ended] == ["yes"]
    # With generation marks, no EOS token is added
    ids, labels = encoded(tokenizer, marked(PLAIN), said("a", "yes"))
    assert ids[-1] != tokenizer.eos_token_id
    assert labels[-1] == IGNORED


ANSWERED = said("a", "yes")
REFUSED = [
    (bare(INST), [*ANSWERED, ANSWERED[1]], "refuses this conversation: turns must go user, assis"),
    (bare(CHATML), said("a"), "no assistant turn, so nothing to learn from"),
    ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", ANSWERED, "message 2: the"),
    ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", ANSWERED, "; put {% gen"),
    ("{{ messages[0].content }}", ANSWERED, "cannot be verified"),
    ("{% generation %}{% endgeneration %}{{ messages[0].content }}", ANSWERED, "enclose nothing"),
    ("{{ messages[9].content + 'x' }}", ANSWERED, "the chat template refuses"),
]


@pytest.mark.parametrize(("template", "messages", "what"), REFUSED)
def test_unusable_conversations_are_refused(template, messages, what):
    with pytest.raises(RowError) as refused:
        encoded(trained(), template, messages)
    assert what in str(refused.value)


def test_unusable_templates_and_tokenizers_are_refused():
    with pytest.raises(RecipeError, match=r"^data.chat_template: line 2: "):
        encoded(trained(), "{{ 'x' }}\n{% for %}", ANSWERED)
    missing = (
        r"^data.tokenizer: it: has no chat template; set data.chat_template to a file with one$"
    )
    with pytest.raises(RecipeError, match=missing):
        ChatTemplate(trained(), "it", None)

    class Slow:
        chat_template, is_fast = "x", False

    slow = r"^data.tokenizer: it: is a slow tokenizer \(Slow\), which gives no positions"
    with pytest.raises(RecipeError, match=slow):
        ChatTemplate(Slow(), "it", None)


# Messages


def test_message_formats_are_normalized():
    speakers = {"system": "s", "human": "h", "gpt": "g", "tool": "t"}
    turns = [{"from": name, "value": text, "weight": None} for name, text in speakers.items()]
    roles = zip(("system", "user", "assistant", "tool"), "shgt", strict=True)
    expected = [{"role": role, "content": text} for role, text in roles]
    assert read_messages(turns, "conversations") == expected
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"role": "assistant", "content": None, "tool_calls": [1], "name": "x"}
    found = read_messages([{"role": "user", "content": parts}, call], "messages")
    assert found == [{"role": "user", "content": "ab"}, call | {"content": ""}]
    assert read_tools('[{"a": 1}]') == [{"a": 1}]
    assert read_tools(None) is read_tools("") is read_tools([]) is None


LIST = "column 'messages' must hold a list of messages, each with role and content (or from and value); got"
ROLES = "must be one of system, developer, user, assistant, tool, function, ipython"


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ("x", f"{LIST} str"),
        ([], f"{LIST} an empty list"),
        ([{"content": "x"}], f"message 1: no role; {ROLES}"),
        ([{"role": "bot", "content": "x"}], f"message 1: unknown role 'bot'; {ROLES}"),
        ([{"from": "narrator"}], f"message 1: unknown role 'narrator'; {ROLES}"),
        ([{"role": "user"}], "message 1: content must be text, or a list of text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 1: only text can be"),
    ],
)
def test_invalid_messages_are_refused(messages, what):
    with pytest.raises(RowError) as refused:
        read_messages(messages, "messages")
    assert str(refused.value).startswith(what)


# Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = trained()
    tokenizer.chat_template = bare(CHATML)
    tokenizer.save_pretrained(folder)
    return str(folder)


def results(tmp_path, rows, kind, folder, **data):
    encoder = make_encoder(kind, schema.Data(kind=kind, **data), tokenizer=folder)
    return list(encoder.encode_rows(read_rows(file_part(write(tmp_path / "a.jsonl", rows)))))


def shown(one, tokenizer):
    """Returns the text without loss and the text with loss."""
    ids = one.ids.tolist()
    first = next(number for number, label in enumerate(one.labels.tolist()) if label != IGNORED)
    assert one.labels.tolist() == [IGNORED] * first + ids[first:]
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])


ALPACA = "### Instruction:\nwhat?\n\n"
INSTRUCT = [
    ({"prompt": "what? ", "completion": "yes"}, ("what? ", "yes<eos>")),
    ({"prompt": "what?", "response": " no"}, ("what?", " no<eos>")),
    ({"instruction": "what?", "output": "no"}, (f"{ALPACA}### Response:\n", "no<eos>")),
    (
        {"instruction": "what?", "input": "b", "output": "no"},
        (f"{ALPACA}### Input:\nb\n\n### Response:\n", "no<eos>"),
    ),
]


def test_instruct_rows(tmp_path, folder):
    tokenizer = trained()
    found = results(tmp_path, [row for row, _ in INSTRUCT], "instruct", folder)
    assert [shown(one, tokenizer) for one in found] == [expected for _, expected in INSTRUCT]
    # Prompt and response are tokenized separately
    prompt = tokenizer("what? ")["input_ids"]
    assert found[0].ids.tolist()[: len(prompt)] == prompt
    columns = {"prompt_column": "q", "response_column": "a"}
    (named,) = results(tmp_path, [{"q": "a", "a": "no"}], "instruct", folder, **columns)
    assert shown(named, tokenizer) == ("a", "no<eos>")
    rows = [
        {"prompt": said("a", "b", "c"), "completion": said("", "no")[1:]},
        {"prompt": said("a"), "response": "no"},
    ]
    for one in results(tmp_path, rows, "instruct", folder):
        assert tokenizer.decode([t for t in one.labels if t != IGNORED]) == "no<|end|>"
    # With a chat template, prompts and responses become conversations
    template = str(write(tmp_path / "template.jinja", marked(CHATML)))
    rows = [{"prompt": "a", "response": "no"}, {"instruction": "a", "input": "b", "output": "no"}]
    found = results(tmp_path, rows, "instruct", folder, chat_template=template)
    assert [tokenizer.decode(one.ids) for one in found] == [
        f"<|begin|>user\n{asked}<|end|>\n<|begin|>assistant\nno<|end|>\n"
        for asked in ("a", "a\n\nb")
    ]


def test_chat_rows(tmp_path, folder):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "no"}]
    found = results(tmp_path, [{"messages": ANSWERED}], "chat", folder)
    turns[1]["value"] = "yes"
    found += results(tmp_path, [{"conversations": turns}], "chat", folder)
    found += results(tmp_path, [{"talk": ANSWERED}], "chat", folder, messages_column="talk")
    ids = trained().apply_chat_template(ANSWERED, chat_template=bare(CHATML))["input_ids"]
    assert [one.ids.tolist() for one in found] == [ids] * 3
    assert len({tuple(one.labels.tolist()) for one in found}) == 1


def test_bad_rows_do_not_affect_good_rows(tmp_path, folder):
    good, surrogate = {"messages": ANSWERED}, {"messages": said("a", "\ud83d")}
    rows = [good, {"messages": said("a")}, {"text": "x"}, surrogate, good]
    found = results(tmp_path, rows, "chat", folder)
    assert [one.problem for one in found] == [
        "",
        "no assistant turn, so nothing to learn from",
        "column 'messages' must hold messages; no such column; columns: text "
        "(data.messages_column names it; null: messages, conversations)",
        "the conversation holds half a surrogate pair (\\ud800 to \\udfff), which is no character",
        "",
    ]
    assert [one.row.where.rpartition(":")[2] for one in found] == ["1", "2", "3", "4", "5"]
    assert found[0].ids.tolist() == found[4].ids.tolist()


BROKEN_INSTRUCT = [
    ({"prompt": "a"}, "column 'response' must hold text or a list of messages; no such"),
    ({"prompt": "a", "output": ""}, "column 'output' is empty, so there is nothing to learn from"),
    ({"prompt": 3, "output": "x"}, "column 'prompt' must hold text or a list of messages; got"),
    ({"instruction": 3, "output": "x"}, "column 'instruction' must hold text; got int"),
    ({"prompt": "a", "completion": said("x")}, "no assistant turn, so nothing to learn from"),
]


def test_invalid_instruct_rows_are_reported(tmp_path, folder):
    found = results(tmp_path, [row for row, _ in BROKEN_INSTRUCT], "instruct", folder)
    for one, (_, expected) in zip(found, BROKEN_INSTRUCT, strict=True):
        assert one.problem.startswith(expected), one.problem


def test_classification_rows(tmp_path, folder):
    labels = (1, "0", "good", 2, None, True)
    rows = [{"text": "yes", "label": label} for label in labels] + [{"text": "", "label": 1}]
    found = results(tmp_path, rows, "classification", folder, labels=("bad", "good"))
    assert [one.category for one in found] == [1, 0, 1, None, None, None, None]
    assert found[0].ids.tolist() == trained()("yes")["input_ids"]
    form = "is no class; it must be a whole number from 0 to 1, or a name: bad, good"
    assert [one.problem for one in found[3:]] == [
        f"column 'label': 2 {form}",
        "column 'label' must hold the label; got NoneType; columns: text, label (data.label_column names it)",
        f"column 'label': True {form}",
        "column 'text' is empty",
    ]
    unnamed = results(tmp_path, rows, "classification", folder)
    assert [one.category for one in unnamed] == [1, 0, None, 2, None, None, None]
