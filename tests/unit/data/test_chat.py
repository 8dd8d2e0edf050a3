"""Conversations and prompts: which tokens carry loss.

The template marks them, or a second rendering finds and verifies them.
"""

import importlib.util
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from launcher.data.chat_template import ChatTemplate
from launcher.data.encoder import make_encoder
from launcher.data.ends import stop_token_ids
from launcher.data.messages import (
    chat_of,
    parse_arguments,
    prompt_of,
    read_messages,
    read_tools,
    refuse_empty_answers,
)
from launcher.data.template_source import uses_tools
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.data.tokenizer_files import KeptTokenizer
from launcher.errors import RecipeError, RowError
from launcher.models.micro_batch import IGNORED
from launcher.recipe import schema
from launcher.sources.finding import file_part
from launcher.sources.location import Location
from launcher.sources.rows import read_rows
from tests import REPOSITORY
from tests.unit.data.rows import write

SPECIAL = ["<bos>", "<eos>", "<|begin|>", "<|end|>", "<|head|>", "<|neck|>", "<turn>", "</turn>"]


def bpe_tokenizer(*, trim=False):
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


def sentencepiece_tokenizer():
    """A tokenizer like that of Llama 2.

    Spaces become `▁`, one is prepended to the text, and unknown characters are encoded as bytes.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    merges = [("a", "n"), ("▁", "a"), ("n", "o"), ("y", "e"), ("ye", "s"), ("▁", "t"), ("▁t", "h")]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = ["▁", *(chr(code) for code in range(0x21, 0x7F))]
    words = ["<unk>", *SPECIAL, *byte_tokens, *letters, *(a + b for a, b in merges)]
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
        return sentencepiece_tokenizer()
    return bpe_tokenizer(trim=request.param == "trimmed")


# Templates like those of real models. [[ and ]] enclose the assistant's text: `without_marks`
# removes them, and `with_marks` replaces them by generation marks.
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


def without_marks(template):
    return template.replace("[[", "").replace("]]", "")


def with_marks(template):
    return template.replace("[[", "{% generation %}").replace("]]", "{% endgeneration %}")


def dialogue(*contents):
    """Messages that alternate between user and assistant, starting with the user."""
    roles = ("user", "assistant") * len(contents)
    return [{"role": role, "content": text} for role, text in zip(roles, contents, strict=False)]


def encoded(tokenizer, template, messages, tools=None, loss_from=0):
    chat = ChatTemplate(tokenizer, "it", template)
    [document] = chat.encode([chat.render(chat_of(messages, tools, loss_from=loss_from))])
    return document.ids, document.labels


def loss_texts(tokenizer, template, messages, **more):
    """The decoded spans that carry loss."""
    ids, labels = encoded(tokenizer, template, messages, **more)
    assert ((labels == IGNORED) | (labels == ids)).all()
    runs = itertools.groupby(zip(ids, labels, strict=True), key=lambda one: one[1] != IGNORED)
    return [tokenizer.decode([token for token, _ in run]) for loss, run in runs if loss]


CONVERSATIONS = {
    "one": dialogue("what is this?", "the answer is forty two"),
    "many": dialogue("yes", "no", "what?", "the quick answer", "maybe", "no"),
    "the user says the same": dialogue("no", "no", "no", "no"),
    "characters of several tokens": dialogue("日本?", "🙂日本🙂", "ü", "é🙂"),
    "white space": dialogue("a", "  two  spaces \n", "b", "\n\nlines\n\n"),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_marks_and_verified_rendering_agree(tokenizer, name, conversation):
    messages, unmarked = CONVERSATIONS[conversation], without_marks(TEMPLATES[name])
    ids, labels = encoded(tokenizer, unmarked, messages)
    marked_ids, marked_labels = encoded(tokenizer, with_marks(TEMPLATES[name]), messages)
    expected = tokenizer.apply_chat_template(messages, chat_template=unmarked)["input_ids"]
    assert ids.tolist() == marked_ids.tolist() == expected
    assert labels.tolist() == marked_labels.tolist()
    end = {"inst": " <eos>", "gemma": "</turn>"}.get(name, "<|end|>")
    answers = [message["content"].lstrip() for message in messages[1::2]]
    if name in ("headers", "inst", "gemma"):
        answers = [answer.strip() for answer in answers]
    runs = loss_texts(tokenizer, unmarked, messages)
    assert [run.strip() for run in runs] == [answer + end for answer in answers]


def test_marks_give_the_same_mask_as_transformers():
    tokenizer = bpe_tokenizer()
    for messages in CONVERSATIONS.values():
        options = {"return_dict": True, "return_assistant_tokens_mask": True}
        found = tokenizer.apply_chat_template(messages, chat_template=with_marks(CHATML), **options)
        ids, labels = encoded(tokenizer, with_marks(CHATML), messages)
        assert ids.tolist() == found["input_ids"]
        assert [int(label != IGNORED) for label in labels] == found["assistant_masks"]


def test_system_and_unanswered_turns_carry_no_loss(tokenizer):
    messages = [{"role": "system", "content": "no"}, *dialogue("yes", "no", "no")]
    for template in (CHATML, HEADERS, GEMMA):
        runs = loss_texts(tokenizer, without_marks(template), messages)
        assert len(runs) == 1
        assert runs == loss_texts(tokenizer, with_marks(template), messages)
    for template in (without_marks(CHATML), with_marks(CHATML)):
        four = dialogue("a", "yes", "b", "no")
        assert loss_texts(tokenizer, template, four, loss_from=2) == ["no<|end|>"]


def test_thinking_of_earlier_turns_is_dropped(tokenizer):
    messages = dialogue(
        "a", "<think>\nlong\n</think>\n\nyes", "b", "<think>\nshort\n</think>\n\nno"
    )
    # Without its reasoning the first answer would teach to answer without reasoning
    expected = ["<think>\nshort\n</think>\n\nno<|end|>"]
    for template in (with_marks(THINKING), without_marks(THINKING)):
        assert loss_texts(tokenizer, template, messages) == expected
    one_line = dialogue("a", "<think>long</think>yes", "b", "<think>short</think>no")
    assert loss_texts(tokenizer, without_marks(THINKING), one_line) == expected
    # A template that does not handle thinking keeps the text unchanged
    assert loss_texts(tokenizer, without_marks(CHATML), one_line) == [
        "<think>long</think>yes<|end|>",
        "<think>short</think>no<|end|>",
    ]


def test_tool_calls_and_reasoning_carry_loss(tokenizer):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "maybe"}}]}
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "what"}
    for last in (call, thought):
        messages = [*dialogue("a", "no", "b"), last]
        runs = loss_texts(tokenizer, without_marks(THINKING), messages)
        assert runs == loss_texts(tokenizer, with_marks(THINKING), messages)
        assert runs[0] == "no<|end|>"
        thinking = "<think>\nwhat\n</think>\n\nyes<|end|>"
        assert runs[1] == ("\n<call>maybe</call><|end|>" if last is call else thinking)


def test_eos_is_added_if_the_end_of_turn_is_missing(tokenizer):
    ids, _ = encoded(tokenizer, without_marks(PLAIN), dialogue("a", "yes", "b", "no"))
    assert ids[-1] == tokenizer.eos_token_id
    last = loss_texts(tokenizer, without_marks(PLAIN), dialogue("a", "yes", "b", "no"))[-1]
    assert last.strip("\n ") in ("no\n<eos>", "no<eos>")
    ids, _ = encoded(tokenizer, without_marks(CHATML), dialogue("a", "yes"))
    assert ids[-1] != tokenizer.eos_token_id
    # An end of turn that is not a special token carries loss, too
    text_end = without_marks(CHATML).replace("<|end|>", "##")
    assert loss_texts(tokenizer, text_end, dialogue("a", "yes", "b", "no"))[-1] == "no##\n<eos>"
    open_ended = loss_texts(tokenizer, without_marks(PLAIN), dialogue("a", "yes", "b"))
    assert [run.strip() for run in open_ended] == ["yes"]
    # Generation marks select the turn, and the same rule holds
    ids, labels = encoded(tokenizer, with_marks(PLAIN), dialogue("a", "yes"))
    assert ids[-1] == labels[-1] == tokenizer.eos_token_id


ANSWERED = dialogue("a", "yes")
REFUSED = [
    (
        without_marks(INST),
        [*ANSWERED, ANSWERED[1]],
        "turns",
    ),
    (without_marks(CHATML), dialogue("a"), "no-assistant-turn"),
    ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", ANSWERED, "other-text"),
    ("{% for m in messages %}{{ m.content * 2 }}{% endfor %}", ANSWERED, "twice"),
    ("{{ messages[0].content }}", ANSWERED, "nothing-to-verify"),
    ("{% generation %}{% endgeneration %}{{ messages[0].content }}", ANSWERED, "empty-generation"),
    ("{{ messages[9].content + 'x' }}", ANSWERED, "index"),
]


@pytest.mark.parametrize(("template", "messages", "rule"), REFUSED)
def test_unusable_conversations_are_refused(words, template, messages, rule):
    with words.refused(rule, RowError):
        encoded(bpe_tokenizer(), template, messages)


def test_unusable_templates_and_tokenizers_are_refused():
    with pytest.raises(RecipeError, match=r"^data.chat_template: line 2: "):
        encoded(bpe_tokenizer(), "{{ 'x' }}\n{% for %}", ANSWERED)
    missing = r"^data.tokenizer: it: has no chat template; set data.chat_template to a name, such as chatml, or to a file with one$"
    with pytest.raises(RecipeError, match=missing):
        ChatTemplate(bpe_tokenizer(), "it", None)

    class Slow:
        chat_template, is_fast = "x", False

    slow = r"^data.tokenizer: it: is a slow tokenizer \(Slow\), which gives no positions"
    with pytest.raises(RecipeError, match=slow):
        ChatTemplate(Slow(), "it", None)


# Templates with the structure of real models'. [[ and ]] enclose the marks of a careless author.
CALLS = "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}"
SAID = "{{ '<|begin|>' + m.role + '\n' + m.content + '<|end|>\n' }}"
QWEN3 = (
    "{% set ns = namespace(last=messages|length) %}{% for m in messages[::-1] %}{% if m.role == 'user' and ns.last == messages|length %}"
    "{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}{{ 'tools: ' + tools|length|string if tools }}"
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|begin|>assistant\n' }}"
    "{% if loop.index0 > ns.last and (loop.last or m.reasoning_content) %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"  # noqa: E501
    f"[[{{{{ m.content }}}}]]{CALLS}{{{{ '<|end|>\n' }}}}{{% else %}}{SAID}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"  # noqa: E501
)
GPT_OSS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if loop.last and m.reasoning_content %}{{ '<|begin|>assistant<|neck|>analysis ' + m.reasoning_content + '<|end|>' }}{% endif %}"
    "{% if m.tool_calls %}{{ '<|begin|>assistant' }}[[{{ ' to=' + m.tool_calls[0].function.name + '</turn>' }}]]"
    "{% else %}{{ '<|begin|>assistant<|neck|>final ' }}[[{{ m.content }}]]{{ '<eos>' if loop.last else '<|end|>' }}{% endif %}"
    "{% else %}{{ '<|begin|>' + m.role + '<|neck|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant' }}{% endif %}"
)
GLM = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|head|>\n<think></think>\n' }}[[{{ m.content }}]]"
    f"{CALLS}{{% else %}}{{{{ '<|begin|>\n' + m.content }}}}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|head|>' }}{% endif %}"
)
QWEN35 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|begin|>assistant\n' }}{% if loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}{% endif %}"  # noqa: E501
    f"[[{{{{ m.content }}}}]]{{{{ '<|end|>\n' }}}}{{% else %}}{SAID}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n<think>\n' }}{% if enable_thinking is false %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"  # noqa: E501
)
NEMOTRON = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|begin|>assistant\n' + ('<think>\n' + m.reasoning_content + '\n</think>' if m.reasoning_content else '<think></think>') }}"  # noqa: E501
    f"[[{{{{ m.content }}}}]]{{{{ '<|end|>\n' }}}}{{% else %}}{SAID}{{% endif %}}{{% endfor %}}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' + ('<think></think>' if enable_thinking is false else '<think>\n') }}{% endif %}"  # noqa: E501
)
COHERE2 = (
    "{% for m in messages %}{{ '<turn>' + m.role }}{% if m.role == 'assistant' %}{{ '<|head|>' }}[[{{ m.content }}]]{{ '<|neck|></turn>' }}"
    "{% else %}{{ m.content + '</turn>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<turn>assistant<|head|>' }}{% endif %}"
)
PHI = (
    "{% for m in messages %}{{ '<|head|>' + m.role + '\n' }}{% if m.role == 'assistant' %}[[{{ m.content }}]]{% else %}{{ m.content }}{% endif %}{{ '<|end|>\n' }}"  # noqa: E501
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant\n' }}{% else %}{{ eos_token }}{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'assistant' %}[[{% if m.tool_calls %}{{ '<|head|>' + m.tool_calls[0].function.name }}{% else %}{{ ' ' + m.content }}{% endif %}{{ eos_token }}]]"  # noqa: E501
    "{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"
)
# Llama 3's first template writes the generation prompt always; Granite 3 in the last pass of the loop
ALWAYS = CHATML.replace("{% if add_generation_prompt %}", "{% if true %}")
IN_LOOP = CHATML.replace("{% endfor %}{% if add", "{% if loop.last and add") + "{% endfor %}"
# Gemma 4 writes the results of tools in the turn that called them, and no prompt after them
GEMMA4 = (
    "{% set ns = namespace(tool=false) %}{% for m in messages %}{% if m.role != 'tool' %}"
    "{% if not ns.tool %}{{ '<turn>' + m.role + '\n' }}{% endif %}{% set ns.tool = false %}"
    "{% if m.role == 'assistant' %}[[{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<call>' + c.function.name + '</call>' }}{% endfor %}]]"
    "{% if m.tool_calls %}[[{{ '<|neck|>' }}]]{% set ns.tool = true %}{% for k in range(loop.index0 + 1, messages|length) %}"
    "{% if messages[k].role == 'tool' %}{{ 'result:' + messages[k].content + '<|head|>' }}{% endif %}{% endfor %}"
    "{% else %}[[{{ '</turn>' }}]]{% endif %}{% else %}{{ m.content + '</turn>' }}{% endif %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and not ns.tool %}{{ '<turn>assistant\n' }}{% endif %}"
)
# DeepSeek-R1's prompt opens a thought, which its template removes from every answer
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|head|>' }}[[{{ m.content.split('</think>')[-1] + '<eos>' }}]]"  # noqa: E501
    "{% else %}{{ '<|begin|>' + m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|head|><think>\n' }}{% endif %}"
)
# Gemma 4 (31B): the prompt holds an empty thought
EMPTY = "{{ '<|neck|>' if enable_thinking }}" + CHATML.replace(
    "assistant\n' }}{% endif %}",
    "assistant\n' }}{% if not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}",
)
# Mistral's shows the system prompt before the question only while this is the last message
LAST_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' }}{% if loop.last and messages[0].role == 'system' %}"
    "{{ messages[0].content + '\n' }}{% endif %}{{ m.content + '[/INST]' }}{% elif m.role == 'assistant' %}[[{{ ' ' + m.content + eos_token }}]]{% endif %}{% endfor %}"  # noqa: E501
)
# DeepSeek-V3 sees calls only in messages without content
NULL_CALLS = CHATML.replace(
    "[[{{ m.content + '<|end|>' }}]]",
    "[[{% if m.content is none %}{{ '<call>' + m.tool_calls[0].function.name }}{% else %}{{ m.content }}{% endif %}{{ '<|end|>' }}]]",
)
# EXAONE 4 goes through the numbers of the messages
BY_NUMBER = CHATML.replace(
    "{% for m in messages %}", "{% for i in range(messages|length) %}{% set m = messages[i] %}"
)
# Alpaca's, which writes the line between two messages at the end of the first one
LINES = (
    "{% for m in messages %}{{ m.role + ':\n' }}{% if m.role == 'assistant' %}[[{{ m.content + '<|end|>' }}]]{% else %}{{ m.content }}{% endif %}"  # noqa: E501
    "{% if not loop.last %}{{ '\n\n' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '\n\nassistant:\n' }}{% endif %}"
)
# SmolVLM reads contents as lists of parts
PARTS = CHATML.replace("m.content +", "m.content[0].text +")
# Llama 3.1 writes a call in place of the text beside it
CALL_ONLY = CHATML.replace(
    "{{ m.content + '<|end|>' }}]]",
    "{{ ('<call>' + m.tool_calls[0].function.name if m.tool_calls else m.content) + '<|end|>' }}]]",
)
NO_THOUGHT, CALL = "<think>\n\n</think>\n\n", {"function": {"name": "maybe"}}
TOOL_CHAT = [
    *dialogue("a"),
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "it"},
    *dialogue("", "no")[1:],
]
PARALLEL = [*TOOL_CHAT[:1], {**TOOL_CHAT[1], "tool_calls": [CALL, CALL]}, *TOOL_CHAT[2:]]
THOUGHTS = [
    {**message, **({"reasoning_content": f"what {at}"} if at % 2 else {})}
    for at, message in enumerate(dialogue("a", "yes", "b", "no"))
]
RULE = {
    "plain turns of qwen3": (
        QWEN3,
        dialogue("a", "yes", "b", "no"),
        ["yes<|end|>", f"{NO_THOUGHT}no<|end|>"],
    ),
    "parallel calls of qwen3": (
        QWEN3,
        PARALLEL,
        ["<call>maybe</call>" * 2 + "<|end|>", f"{NO_THOUGHT}no<|end|>"],
    ),
    "reasoning of qwen3": (QWEN3, THOUGHTS, ["<think>\nwhat 3\n</think>\n\nno<|end|>"]),
    "plain turns of gpt-oss": (
        GPT_OSS,
        dialogue("a", "yes", "b", "no"),
        ["<|neck|>final yes", "<|neck|>final no<eos>"],
    ),
    "a call of gpt-oss": (GPT_OSS, TOOL_CHAT, [" to=maybe</turn>", "<|neck|>final no<eos>"]),
    "reasoning of gpt-oss": (
        GPT_OSS,
        THOUGHTS,
        ["<|neck|>analysis what 3<|end|><|begin|>assistant<|neck|>final no<eos>"],
    ),
    "glm": (
        GLM,
        TOOL_CHAT,
        ["\n<think></think>\n<call>maybe</call><|begin|>", "\n<think></think>\nno<eos>"],
    ),
    "qwen3.5": (QWEN35, THOUGHTS, ["what 3\n</think>\n\nno<|end|>"]),
    "qwen3.5 without reasoning": (
        QWEN35,
        dialogue("a", "yes", "b", "no"),
        ["\n</think>\n\nno<|end|>"],
    ),
    "nemotron": (
        NEMOTRON,
        [*dialogue("a", "yes"), *THOUGHTS[2:]],
        ["yes<|end|>", "what 3\n</think>no<|end|>"],
    ),
    "cohere2": (
        COHERE2,
        dialogue("a", "yes", "b", "no"),
        ["yes<|neck|></turn>", "no<|neck|></turn>"],
    ),
    "phi": (PHI, dialogue("a", "yes", "b", "no"), ["yes<|end|>", "no<|end|>"]),
    "mistral": (MISTRAL, TOOL_CHAT, ["<|head|>maybe<eos>", " no<eos>"]),
    "llama 3": (ALWAYS, dialogue("a", "yes", "b", "no"), ["yes<|end|>", "no<|end|>"]),
    "granite": (IN_LOOP, dialogue("a", "yes", "b", "no"), ["yes<|end|>", "no<|end|>"]),
    "gemma 4": (GEMMA4, TOOL_CHAT, ["<call>maybe</call><|neck|>", "no</turn>"]),
    "alpaca": (LINES, dialogue("a", "yes", "b", "no"), ["yes<|end|>", "no<|end|>"]),
    "exaone 4": (BY_NUMBER, dialogue("a", "yes", "b", "no"), ["yes<|end|>", "no<|end|>"]),
}


@pytest.mark.parametrize("name", RULE)
@pytest.mark.parametrize("mark", [without_marks, with_marks])
def test_loss_is_on_all_that_the_model_must_produce(name, mark):
    template, messages, expected = RULE[name]
    tokenizer = bpe_tokenizer()
    tools = [{"name": "maybe"}] if "calls" in name else None
    runs = loss_texts(tokenizer, mark(template), messages, tools=tools)
    if name == "mistral":  # The space before an answer may be part of the prompt
        runs[1] = " " + runs[1].lstrip()
    assert runs == expected
    ids, _ = encoded(tokenizer, mark(template), messages, tools=tools)
    options = {"chat_template": without_marks(template), "tools": tools}
    stock = tokenizer.apply_chat_template(messages, **options)["input_ids"]
    assert ids.tolist() == stock + [tokenizer.eos_token_id] * (name == "glm")


MARKUP = re.compile(
    r"<\|[\w:.-]+\|>|<｜[\w▁]+｜>|<\|\w+>|<\w+\|>|</?s>|<(?:start|end)_of_\w+>|\[/?INST\]|\[gMASK\]|<sop>"
)
OF_TRL = importlib.util.find_spec("trl")


OF_A_CALL = {
    "city": 'Zürich\'s "old" town',
    "metric": True,
    "never": False,
    "none": None,
    "number": 0.5,
    "small": 1e-7,
    "nested": {"deep": [True, None, {"x": False}], "é": "ü"},
}


@pytest.mark.long
@pytest.mark.skipif(OF_TRL is None, reason="needs the package trl")
def test_stock_templates_write_arguments_as_json(tmp_path):
    """Or refuse them, as Gemma 4's older ones null. LFM2.5 writes calls in Python."""
    assert OF_TRL is not None
    root = next(iter(OF_TRL.submodule_search_locations or ()))
    wrong, shown = [], []
    for file in sorted(Path(root, "chat_templates").glob("*.jinja")):
        template = file.read_text()
        tokenizer = bpe_tokenizer()
        tokenizer.add_special_tokens(
            {"additional_special_tokens": sorted({*MARKUP.findall(template)})}
        )
        function = {"name": "maybe", "arguments": json.dumps(OF_A_CALL)}
        call = {"id": "a23456789", "type": "function", "function": function}
        messages = [
            *dialogue("a"),
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "name": "maybe", "tool_call_id": "a23456789", "content": "it"},
            *dialogue("", "no")[1:],
        ]
        read = read_messages(messages, "messages")
        chat = ChatTemplate(tokenizer, file.name, template)
        try:
            text = chat.render(chat_of(read)).text
        except RowError as error:
            if "as Python does" in str(error) and "gemma4" not in file.name:
                wrong.append(f"{file.name}: {error}")
            continue
        shown.append(file.name)
        if re.search(r"\b(True|False|None)\b|\{'", text) and "lfm2" not in file.name:
            wrong.append(f"{file.name}: {text}")
    assert not wrong, "\n".join(wrong)
    assert len(shown) > 20


@pytest.mark.long
@pytest.mark.skipif(OF_TRL is None, reason="needs the package trl")
def test_stock_templates():
    """Those that trl has: each row is learned from the end of its generation prompt."""
    assert OF_TRL is not None
    folder = next(iter(OF_TRL.submodule_search_locations or ()))
    wrong, files = [], sorted(Path(folder, "chat_templates").glob("*.jinja"))
    system = {"role": "system", "content": "Be kind."}
    for file in files:
        template = file.read_text()
        tokenizer = bpe_tokenizer()
        special = {"additional_special_tokens": sorted({*MARKUP.findall(template)})}
        tokenizer.add_special_tokens(special)
        for messages in (
            dialogue("Hi", "Hello!"),
            dialogue("Hi", "Hello!", "Bye", "See you!"),
            [system, *dialogue("Hi", "Hello!", "Bye", "See you!")],
        ):
            chat = ChatTemplate(tokenizer, file.name, template)
            try:
                rendered = chat.render(chat_of(messages))
            except RowError as error:
                if "System role not supported" not in str(error):
                    wrong.append(f"{file.name}: {error}")
                continue
            start, end = rendered.turns[-1].start, rendered.turns[-1].end
            served = {
                chat.apply(messages[:-1], None, add_generation_prompt=True, **mode).rstrip()
                for mode in ({}, {"enable_thinking": False})
            }
            marked = "deepseek" in file.name and "training" in file.name
            if rendered.text[:start].rstrip() not in served and not marked:
                wrong.append(f"{file.name}: {rendered.text[:start]!r} is none of {served}")
            if messages[-1]["content"] not in rendered.text[start:end]:
                wrong.append(f"{file.name}: {rendered.text[start:end]!r}")
    assert not wrong, "\n".join(wrong)
    assert len(files) > 60


def test_a_call_at_the_end_of_a_row_ends_as_before_its_result():
    """GLM-4.5's templates end no turn: a result begins with <|observation|>, a question with
    <|user|>."""
    headings = "('<|begin|>' if m.role == 'user' else '<turn>')"
    template = without_marks(GLM).replace("'<|begin|>\n'", headings)
    assert template.count("<turn>") == 1
    called = "\n<think></think>\n<call>maybe</call><turn>"
    assert loss_texts(bpe_tokenizer(), template, TOOL_CHAT[:2]) == [called]
    learned = loss_texts(bpe_tokenizer(), template, TOOL_CHAT)
    assert learned == [called, "\n<think></think>\nno<eos>"]


SERVED = {
    # Template, messages, the end of what carries no loss, and what carries it
    "no thought": (R1, dialogue("a", "no"), "<think>\n", "\n</think>\n\nno<eos>"),
    "a thought": (
        R1,
        dialogue("a", "<think>\nwhat\n</think>\n\nno"),
        "<think>\n",
        "what\n</think>\n\nno<eos>",
    ),
    "a thought without its first mark": (
        R1,
        dialogue("a", "what\n</think>\n\nno"),
        "<think>\n",
        "what\n</think>\n\nno<eos>",
    ),
    "a thought beside it": (R1, [THOUGHTS[0], THOUGHTS[1]], "<think>\n", "what 1\n</think>\n\nyes<eos>"),
    "two turns": (R1, dialogue("a", "yes", "b", "no"), "<think>\n", "\n</think>\n\nno<eos>"),
    "an empty thought": (EMPTY, dialogue("a", "yes", "b", "no"), "<think></think>", "no<|end|>"),
    "a system prompt": (
        LAST_SYSTEM,
        [{"role": "system", "content": "the"}, *dialogue("a", "no")],
        "[INST]the\na[/INST]",
        " no<eos>",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SERVED)
def test_the_last_turn_follows_the_prompt_that_the_template_never_shows(name):
    """No row of DeepSeek-R1 was accepted, and the advice went in a circle."""
    template, messages, prompt, answer = SERVED[name]
    tokenizer, template = bpe_tokenizer(), without_marks(template)
    messages = read_messages(messages, "messages")
    ids, labels = encoded(tokenizer, template, messages)
    first = int((labels != IGNORED).argmax())
    served = tokenizer.apply_chat_template(
        messages[:-1], chat_template=template, add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(ids[:first]) == served
    assert served.endswith(prompt)
    assert loss_texts(tokenizer, template, messages) == [answer]


def test_marks_are_used_where_the_prompt_differs_from_the_turns():
    tokenizer, messages = bpe_tokenizer(), dialogue("a", "yes", "b", "no")
    ids, labels = encoded(tokenizer, with_marks(R1), messages)
    found = tokenizer.apply_chat_template(
        messages,
        chat_template=with_marks(R1),
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    assert ids.tolist() == found["input_ids"]
    assert [int(label != IGNORED) for label in labels] == found["assistant_masks"]
    # But not for a turn without its reasoning
    thoughts = dialogue("a", "<think>\nwhat\n</think>\n\nyes", "b", "no")
    assert loss_texts(tokenizer, with_marks(R1), thoughts) == ["no<eos>"]


def test_text_beside_a_call_is_learned_or_its_turn_is_not():
    tokenizer, said = bpe_tokenizer(), [dict(message) for message in TOOL_CHAT]
    said[1]["content"] = "the answer"
    assert loss_texts(tokenizer, without_marks(CALL_ONLY), said) == ["no<|end|>"]
    assert loss_texts(tokenizer, with_marks(CALL_ONLY), said) == ["no<|end|>"]
    with pytest.raises(RowError, match="message 2: the chat template leaves out the text beside"):
        encoded(tokenizer, without_marks(CALL_ONLY), said[:2])
    assert loss_texts(tokenizer, without_marks(QWEN3), said)[0].startswith("the answer<call>")


def test_reasoning_is_not_found_in_other_texts():
    """`end` is in the mark of the turn's end, and `no` in the answer."""
    for thought in ("end", "no", "assistant"):
        messages = [*dialogue("a"), {**dialogue("", "no")[1], "reasoning_content": thought}]
        with pytest.raises(RowError, match="message 2: the chat template leaves out its reasoning"):
            encoded(bpe_tokenizer(), without_marks(CHATML), messages)
        kept = loss_texts(bpe_tokenizer(), without_marks(THINKING), messages)
        assert kept == [f"<think>\n{thought}\n</think>\n\nno<|end|>"]


def test_a_thought_without_its_first_mark(caplog):
    """vLLM returns the answers of DeepSeek-R1 so, because the prompt ends in that mark."""
    caplog.set_level("INFO")
    opens = without_marks(THINKING).replace(
        "assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"
    )
    assert opens.count("<think>\n' }}{% endif %}") == 1
    for answers in (
        ("what</think>yes", "maybe</think>no"),
        ("what\n</think>\n\nyes", "maybe\n</think>no"),
    ):
        opened = tuple(("<think>\n" if "\n" in text else "<think>") + text for text in answers)
        bare, whole = (
            read_messages(dialogue("a", first, "b", second), "messages")
            for first, second in (answers, opened)
        )
        assert loss_texts(bpe_tokenizer(), opens, bare) == ["maybe\n</think>\n\nno<|end|>"]
        assert loss_texts(bpe_tokenizer(), opens, whole) == ["maybe\n</think>\n\nno<|end|>"]
        assert "<think> is added to answers that have only </think>" in caplog.text
        caplog.clear()


MENTIONS = ("The tag </think> closes a thought.", "In HTML write <b></think></b>", "See `</think>`")


@pytest.mark.parametrize("text", MENTIONS)
def test_a_text_that_mentions_the_mark_stays_as_it_is(text):
    messages = read_messages(dialogue("a", text), "messages")
    assert messages == dialogue("a", text)
    tokenizer = bpe_tokenizer()
    assert loss_texts(tokenizer, without_marks(CHATML), messages) == [f"{text}<|end|>"]
    with pytest.raises(RowError, match="takes the text before </think> for reasoning"):
        encoded(tokenizer, without_marks(THINKING), messages)


def test_calls_without_content_and_contents_in_parts(tmp_path, folder):
    tokenizer = bpe_tokenizer()
    for content in ("", None):
        rows = [{"messages": [TOOL_CHAT[0], {**TOOL_CHAT[1], "content": content}]}]
        template = str(write(tmp_path / "t.jinja", without_marks(NULL_CALLS)))
        (one,) = encode_file(tmp_path, rows, "chat", folder, chat_template=template)
        assert tokenizer.decode(one.labels[one.labels != IGNORED]) == "<call>maybe<|end|>"
    plain, parts = (encoded(tokenizer, without_marks(each), ANSWERED) for each in (CHATML, PARTS))
    assert [each.tolist() for each in plain] == [each.tolist() for each in parts]
    drops = CHATML.replace("[[{{ m.content + '<|end|>' }}]]", "{{ '<|end|>' }}")
    with pytest.raises(RowError, match="message 2: the chat template leaves out its content"):
        encoded(tokenizer, drops, ANSWERED)


IDS = (
    "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' }}{% for c in m.tool_calls or [] %}{% if (c.id or '')|length != 9 %}"
    "{{ raise_exception('ids have nine letters') }}{% endif %}{{ c.function.name + ' ' + c.id }}{% endfor %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id + ' ' }}{% endif %}{{ m.content + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)


@pytest.mark.parametrize("ids", [("call_abcdefgh1", "call_abcdefgh2"), (None, None)])
def test_ids_of_calls_for_a_template_that_wants_nine_letters(tmp_path, folder, ids):
    """Mistral's refuse the ids of OpenAI, and rows without any."""
    first, second = ({**CALL, **({"id": own} if own else {})} for own in ids)
    results: list[dict[str, Any]] = [
        {"role": "tool", "content": text, **({"tool_call_id": own} if own else {})}
        for text, own in zip(("yes", "no"), ids, strict=True)
    ]
    if ids[0]:
        results.reverse()
    called = {"role": "assistant", "content": "", "tool_calls": [first, second]}
    messages = [*dialogue("a"), called, *results, *dialogue("", "maybe")[1:]]
    template = str(write(tmp_path / "ids.jinja", IDS))
    (one,) = encode_file(tmp_path, [{"messages": messages}], "chat", folder, chat_template=template)
    assert not one.problem
    text = bpe_tokenizer().decode(one.ids)
    made = re.findall(r"f (\w{9})", text)
    assert len({*made}) == 2
    answered = dict(zip(("yes", "no"), made, strict=True))
    for result, own in answered.items():
        assert f"tool\n{own} {result}<|end|>" in text


def test_the_message_about_another_prompt_names_the_switch():
    with pytest.raises(RowError, match=r"set data.chat_template_kwargs.enable_thinking=true, or"):
        encoded(bpe_tokenizer(), without_marks(EMPTY), dialogue("a", "no", "b"))
    chat = ChatTemplate(
        bpe_tokenizer(), "it", without_marks(EMPTY), values={"enable_thinking": True}
    )
    rendered = chat.render(chat_of(dialogue("a", "yes", "b", "no")))
    assert len(rendered.turns) == 2


IN_ONE_TURN = (
    "{% for m in messages if m.role != 'tool' %}{{ '<|begin|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ c.function.name + messages[2].content }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
LOSES = [
    (GPT_OSS, PARALLEL, "call"),
    (CHATML, THOUGHTS[:2], "reasoning"),
    (QWEN35.replace("loop.last", "false"), dialogue("a", "no", "b"), "generation-prompt"),
    # What a tool returned is not for the model to say
    (IN_ONE_TURN, TOOL_CHAT, "answer-of-a-tool"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "messages", "rule"), LOSES)
def test_rows_that_a_template_renders_in_part_are_refused(words, template, messages, rule):
    with words.refused(f"left out: {rule}", RowError):
        encoded(bpe_tokenizer(), without_marks(template), messages)


def test_the_number_of_renderings_does_not_grow_with_the_turns(monkeypatch):
    rendered, apply = [], ChatTemplate.apply
    monkeypatch.setattr(
        ChatTemplate, "apply", lambda *args, **more: rendered.append(1) or apply(*args, **more)
    )
    counts = []
    for turns in (2, 100):
        rendered.clear()
        messages = [TOOL_CHAT[0], *TOOL_CHAT[1:3] * turns, TOOL_CHAT[3]]
        assert len(loss_texts(bpe_tokenizer(), without_marks(QWEN3), messages)) == turns + 1
        counts.append(len(rendered))
    assert counts[0] == counts[1] < 12


def test_a_template_prints_the_date_of_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("launcher.data.encoder.today", lambda: "2026-03-01")
    tokenizer = bpe_tokenizer()
    dated = without_marks(CHATML).replace("{% for", "{{ strftime_now('%d %b %Y') }}{% for", 1)
    encoders = {}
    for name, template in (("plain", without_marks(CHATML)), ("dated", dated)):
        tokenizer.chat_template = template
        tokenizer.save_pretrained(tmp_path / name)
        for day in (None, "2026-03-02"):
            data = schema.Data(kind="chat", date=day)
            encoders[name, day] = make_encoder("chat", data, tokenizer=str(tmp_path / name))
    same, other = (encoders["plain", day].identity() for day in (None, "2026-03-02"))
    assert same == other
    assert [encoders["dated", day].fingerprint()["date"] for day in (None, "2026-03-02")] == [
        "2026-03-01",
        "2026-03-02",
    ]
    file = write(tmp_path / "a.jsonl", [{"messages": ANSWERED}])
    for day, shown in ((None, "01 Mar 2026"), ("2026-03-02", "02 Mar 2026")):
        (one,) = encoders["dated", day].encode_rows(read_rows(file_part(Location(str(file)))))
        assert tokenizer.decode(one.ids).startswith(shown + "<|begin|>user")
    computed = dated.replace("'%d %b %Y'", "messages[0].content")
    with pytest.raises(RecipeError, match="its format must be a text"):
        encoded(tokenizer, computed, ANSWERED)


@pytest.mark.long
def test_the_pattern_of_mistral_is_corrected(tmp_path, caplog):
    """Older transformers stored Mistral's tokenizers with Llama 3's pattern. Those of Mistral 7B have
    none, and stay."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    llama3 = Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|\s+")
    alphabet = [*pre_tokenizers.ByteLevel.alphabet(), *(f"<{at}>" for at in range(100_000))]
    vocabulary = {word: at for at, word in enumerate(alphabet)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    wrong, old = PreTrainedTokenizerFast(tokenizer_object=backend), sentencepiece_tokenizer()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(llama3, "isolated")
    wrong.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_only])
    cases = {
        "wrong": (wrong, "4.50.0"),
        "corrected by transformers": (wrong, "5.1.0"),
        "old": (old, "4.50.0"),
    }
    patterns = {}
    for name, (tokenizer, version) in cases.items():
        tokenizer.save_pretrained(tmp_path / name)
        config = {"model_type": "mistral", "transformers_version": version}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        with caplog.at_level("INFO", logger="launcher"):
            loaded = hugging_face_tokenizer(str(tmp_path / name))
        patterns[name] = str(loaded.backend_tokenizer.pre_tokenizer)
        (exported := tmp_path / f"{name} exported").mkdir()
        KeptTokenizer(name, loaded, tmp_path / name).save(exported)
        kept = json.loads((exported / "tokenizer.json").read_text())["pre_tokenizer"]
        assert (r"\p{Lu}" in json.dumps(kept)) == (name == "wrong")
    assert r"\p{Lu}" in patterns["wrong"]
    assert r"\p{Lu}" not in patterns["corrected by transformers"]
    assert patterns["old"] == str(old.backend_tokenizer.pre_tokenizer)
    assert caplog.text.count("Llama 3's pattern is replaced by Mistral's") == 1


# Messages


def test_message_formats_are_normalized():
    speakers = {"system": "s", "human": "h", "gpt": "g", "tool": "t"}
    turns = [{"from": name, "value": text, "weight": None} for name, text in speakers.items()]
    roles = zip(("system", "user", "assistant", "tool"), "shgt", strict=True)
    expected = [{"role": role, "content": text} for role, text in roles]
    assert read_messages(turns, "conversations") == expected
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"name": "f", "arguments": {}}]
    call = {"role": "assistant", "content": None, "tool_calls": calls, "name": "x"}
    found = read_messages([{"role": "user", "content": parts}, call], "messages")
    assert found == [{"role": "user", "content": "ab"}, call | {"content": ""}]
    assert read_tools('[{"a": 1}]') == [{"a": 1}]
    assert read_tools(None) is read_tools("") is read_tools([]) is None


@pytest.mark.parametrize(
    ("messages", "rule"),
    [
        ("x", "text"),
        ([], "no-messages"),
        ([{"content": "x"}], "no-role"),
        ([{"role": "critic", "content": "x"}], "role"),
        ([{"from": "narrator"}], "from"),
        ([{"role": "user"}], "no-content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "image"),
    ],
)
def test_invalid_messages_are_refused(words, messages, rule):
    with words.refused(f"messages: {rule}", RowError):
        read_messages(messages, "messages")


# Rows


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = bpe_tokenizer()
    tokenizer.chat_template = without_marks(CHATML)
    tokenizer.save_pretrained(folder)
    return str(folder)


def encode_file(tmp_path, rows, kind, folder, suffix=".jsonl", **data):
    encoder = make_encoder(kind, schema.Data(kind=kind, **data), tokenizer=folder)
    return list(
        encoder.encode_rows(
            read_rows(file_part(Location(str(write(tmp_path / f"a{suffix}", rows)))))
        )
    )


def split_by_loss(one, tokenizer):
    """Returns the text without loss and the text with loss."""
    ids = one.ids.tolist()
    first = next(number for number, label in enumerate(one.labels.tolist()) if label != IGNORED)
    assert one.labels.tolist() == [IGNORED] * first + ids[first:]
    return tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:])


ALPACA = "### Instruction:\nwhat?\n\n"
INSTRUCT = [
    ({"prompt": "what? ", "completion": "yes"}, ("what?", " yes<eos>")),
    ({"prompt": "what?", "response": " no"}, ("what?", " no<eos>")),
    ({"instruction": "what?", "output": "no"}, (f"{ALPACA}### Response:\n", "no<eos>")),
    (
        {"instruction": "what?", "input": "b", "output": "no"},
        (f"{ALPACA}### Input:\nb\n\n### Response:\n", "no<eos>"),
    ),
]


def test_instruct_rows(tmp_path, folder):
    tokenizer = bpe_tokenizer()
    text = {"prompt_format": "text"}
    found = encode_file(tmp_path, [row for row, _ in INSTRUCT], "instruct", folder, **text)
    assert [split_by_loss(one, tokenizer) for one in found] == [
        expected for _, expected in INSTRUCT
    ]
    # Prompt and response are tokenized as one text
    assert found[0].ids.tolist() == [*tokenizer("what? yes")["input_ids"], tokenizer.eos_token_id]
    columns = {"prompt_column": "q", "response_column": "a", **text}
    (named,) = encode_file(tmp_path, [{"q": "a?", "a": "no"}], "instruct", folder, **columns)
    assert split_by_loss(named, tokenizer) == ("a?", "no<eos>")
    rows = [
        {"prompt": dialogue("a", "b", "c"), "completion": dialogue("", "no")[1:]},
        {"prompt": dialogue("a"), "response": "no"},
    ]
    for one in encode_file(tmp_path, rows, "instruct", folder):
        assert tokenizer.decode([t for t in one.labels if t != IGNORED]) == "no<|end|>"
    # With a chat template, prompts and responses become conversations
    template = str(write(tmp_path / "template.jinja", with_marks(CHATML)))
    rows = [{"prompt": "a", "response": "no"}, {"instruction": "a", "input": "b", "output": "no"}]
    found = encode_file(tmp_path, rows, "instruct", folder, chat_template=template)
    assert [tokenizer.decode(one.ids) for one in found] == [
        f"<|begin|>user\n{question}<|end|>\n<|begin|>assistant\nno<|end|>\n"
        for question in ("a", "a\n\nb")
    ]


def test_chat_rows(tmp_path, folder):
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "no"}]
    found = encode_file(tmp_path, [{"messages": ANSWERED}], "chat", folder)
    turns[1]["value"] = "yes"
    found += encode_file(tmp_path, [{"conversations": turns}], "chat", folder)
    found += encode_file(tmp_path, [{"talk": ANSWERED}], "chat", folder, messages_column="talk")
    ids = bpe_tokenizer().apply_chat_template(ANSWERED, chat_template=without_marks(CHATML))[
        "input_ids"
    ]
    assert [one.ids.tolist() for one in found] == [ids] * 3
    assert len({tuple(one.labels.tolist()) for one in found}) == 1


def test_bad_rows_do_not_affect_good_rows(tmp_path, folder):
    good, surrogate = {"messages": ANSWERED}, {"messages": dialogue("a", "\ud83d")}
    rows = [good, {"messages": dialogue("a")}, {"text": "x"}, surrogate, good]
    found = encode_file(tmp_path, rows, "chat", folder)
    assert [one.problem for one in found] == [
        "",
        "no assistant turn, so nothing to learn from",
        "no column for messages (messages, conversations, conversation, contents, ...); columns: text; "
        "data.columns.messages=NAME names it",
        "the conversation holds half a surrogate pair (\\ud800 to \\udfff), which is no character",
        "",
    ]
    assert [one.row.where.rpartition(":")[2] for one in found] == ["1", "2", "3", "4", "5"]
    assert found[0].ids.tolist() == found[4].ids.tolist()


BROKEN_INSTRUCT = [
    (
        {"prompt": "a"},
        "no column for response (response, completion, output, solution, ...); columns",
    ),
    ({"prompt": "a", "output": ""}, "column 'output' is empty, so there is nothing to learn from"),
    ({"prompt": 3, "output": "x"}, "column 'prompt' must hold text or a list of messages; got"),
    ({"instruction": 3, "output": "x"}, "column 'instruction' must hold text; got int"),
    ({"prompt": "a", "completion": dialogue("x")}, "no assistant turn, so nothing to learn from"),
]


def test_invalid_instruct_rows_are_reported(tmp_path, folder):
    found = encode_file(tmp_path, [row for row, _ in BROKEN_INSTRUCT], "instruct", folder)
    for one, (_, expected) in zip(found, BROKEN_INSTRUCT, strict=True):
        assert one.problem.startswith(expected), one.problem


def test_empty_answers_are_refused_in_chats_as_in_instructions(tmp_path, folder):
    """They taught to say nothing. What carries no loss may be empty, and so may the text of calls."""
    silent = dialogue("a", "", "b", "no")
    silent[1] |= {"weight": 0}
    called = [*dialogue("a"), {"role": "assistant", "content": "", "reasoning_content": "x"}]
    rows = [dialogue("a", ""), dialogue("a", "yes", "b", " \n"), silent, dialogue("", "yes")]
    found = encode_file(tmp_path, [{"messages": row} for row in rows], "chat", folder)
    what = "of the assistant is empty, so there is nothing to learn from"
    hint = "loss: false in the message keeps it without loss"
    assert [one.problem for one in found] == [
        f"turn 1 {what}; {hint}",
        f"turn 2 {what}; {hint}",
        "",
        "",
    ]
    refuse_empty_answers(called, 0)
    prompted = [{"prompt": dialogue("a"), "completion": [{"role": "assistant", "content": ""}]}]
    (one,) = encode_file(tmp_path, prompted, "instruct", folder)
    assert one.problem == f"turn 1 {what}; {hint}"
    for loss_on, problem in (("last", ""), ("all", f"turn 1 {what}; {hint}")):
        row = [{"messages": dialogue("a", "", "b", "no")}]
        (one,) = encode_file(tmp_path, row, "chat", folder, loss_on=loss_on)
        assert one.problem == problem


def test_classification_rows(tmp_path, folder):
    labels = (1, "0", "good", 2, None, True)
    rows = [{"text": "yes", "label": label} for label in labels] + [{"text": "", "label": 1}]
    found = encode_file(tmp_path, rows, "classification", folder, labels=("bad", "good"))
    assert [one.class_number for one in found] == [1, 0, 1, None, None, None, None]
    assert found[0].ids.tolist() == bpe_tokenizer()("yes")["input_ids"]
    form = "is no class; it must be a whole number from 0 to 1, or a name: bad, good"
    assert [one.problem for one in found[3:]] == [
        f"column 'label': 2 {form}",
        "column 'label' is empty (null); it must hold the label",
        f"column 'label': True {form}",
        "column 'text' is empty",
    ]
    unnamed = encode_file(tmp_path, rows, "classification", folder)
    assert [one.class_number for one in unnamed] == [1, 0, None, 2, None, None, None]


# Fields beside the messages


@pytest.mark.parametrize("template", [with_marks(CHATML), without_marks(CHATML)])
def test_messages_without_loss(tokenizer, template):
    """OpenAI's `weight: 0` and ShareGPT's `loss: false`."""
    for field in ({"weight": 0}, {"loss": False}):
        first = dialogue("a", "yes", "b", "no")
        first[1] |= field
        first[3] |= {"weight": 1, "loss": True}
        last = dialogue("a", "yes", "b", "no")
        last[3] |= field
        for messages, answer in ((first, "no<|end|>"), (last, "yes<|end|>")):
            messages = read_messages(messages, "messages")
            assert loss_texts(tokenizer, template, messages) == [answer]
    with pytest.raises(
        RowError, match=r"^no assistant turn carries loss, so nothing to learn from$"
    ):
        encoded(tokenizer, template, read_messages(last[2:], "messages"))
    with pytest.raises(
        RowError, match=r"^message 1: whether it carries loss must be 0 or 1 .* got weight: 0.5$"
    ):
        read_messages([{**last[1], "weight": 0.5}], "messages")


@pytest.mark.parametrize("marked", [True, False])
def test_weights_of_messages_are_those_of_their_tokens(tmp_path, folder, marked):
    """Also of what ends the turn; of tools' names for them, and times that of the row."""
    tokenizer = bpe_tokenizer()
    (tmp_path / "t.jinja").write_text((with_marks if marked else without_marks)(CHATML))
    messages = dialogue("a", "yes", "b", "no", "c", "what?")
    messages[1] |= {"weight": 0.25}
    messages[3] |= {"loss_scale": 0}
    rows = [
        {"messages": messages, "worth": 2.0},
        {"messages": dialogue("a", "yes"), "worth": 3.0},
        {"messages": [*messages[:1], {**messages[1], "train": 1}], "worth": 1.0},
        {"messages": [*messages[:1], {**messages[1], "weight": -1}], "worth": 1.0},
    ]
    options = {"chat_template": str(tmp_path / "t.jinja"), "message_weights": True}
    for column, factors in ((None, (1, 1)), ("worth", (2, 3))):
        named = {} if column is None else {"weights_column": column}
        first, second, *wrong = encode_file(tmp_path, rows, "chat", folder, **options, **named)
        for found, parts in (
            (first, {"yes<|end|>": 0.25, "what?<|end|>": 1}),
            (second, {"yes<|end|>": 1}),
        ):
            factor = factors[found is second]
            learned = found.labels_or_ids != IGNORED
            weights = found.weights[learned]
            texts = dict.fromkeys(dict.fromkeys(weights.tolist()), "")
            for weight in texts:
                texts[weight] = tokenizer.decode(found.ids[learned][weights == weight])
            assert texts == {weight * factor: text for text, weight in parts.items()}
        assert wrong[0].problem.startswith(
            "message 2: weight: 0.25, train: 1: these weights differ"
        )
        problem = (
            "message 2: its weight in the loss must be 0, or from 1e-20 to 1e20; got weight: -1"
        )
        assert wrong[1].problem == problem
    plain = encode_file(tmp_path, rows[1:2], "chat", folder)
    assert plain[0].weights is None


@pytest.mark.parametrize("masks", [{"weight": 0, "train": True}, {"loss": True, "masked": 1}])
def test_masks_of_a_message_that_differ_are_refused(masks):
    """The one without loss was taken, in silence."""
    (first, one), (last, other) = masks.items()
    problem = (
        f"^message 1: {first}: {one}, {last}: {other}: one says that it carries loss, another "
    )
    with pytest.raises(RowError, match=rf"{problem}.* data.ignore_columns='\[{last}\]' trains"):
        read_messages([{"role": "assistant", "content": "yes", **masks}], "messages")
    same = {"weight": 0, "train": False, "masked": True}
    (message,) = read_messages([{"role": "assistant", "content": "yes", **same}], "messages")
    assert message["loss"] is False


def test_system_column(tmp_path, folder):
    tokenizer, system = bpe_tokenizer(), {"role": "system", "content": "what?"}
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "yes"}]
    rows = [
        {"conversations": turns, "system": "what?"},
        {"messages": [system, *ANSWERED], "system": "what?"},
        {"messages": ANSWERED, "system": ""},
        {"messages": ANSWERED, "system": None},
        {"messages": [system, *ANSWERED], "system": "no"},
        {"messages": ANSWERED, "system": 3},
    ]
    found = encode_file(tmp_path, rows, "chat", folder)
    expected = [
        tokenizer.apply_chat_template(messages, chat_template=without_marks(CHATML))["input_ids"]
        for messages in ([system, *ANSWERED], ANSWERED)
    ]
    assert [one.ids.tolist() for one in found[:4]] == [expected[number] for number in (0, 0, 1, 1)]
    assert [one.problem for one in found[4:]] == [
        "column 'system' and message 1 hold different system prompts; remove one",
        "column 'system' must hold text; got int",
    ]


def test_system_column_and_default_system_prompt(tmp_path, folder):
    tokenizer, own = bpe_tokenizer(), {"role": "system", "content": "what?"}
    rows = [
        {"messages": ANSWERED, "about": "yes"},
        {"messages": ANSWERED, "about": None, "system": "no"},
        {"messages": [own, *ANSWERED]},
        {"messages": [own, *ANSWERED], "about": "yes"},
    ]
    settings = {"system_column": "about", "system": "maybe"}
    found = encode_file(tmp_path, rows, "chat", folder, **settings)
    begins = [
        f"<|begin|>system\n{text}<|end|>\n<|begin|>user" for text in ("yes", "maybe", "what?")
    ]
    for one, begin in zip(found, begins, strict=False):
        assert tokenizer.decode(one.ids).startswith(begin)
    assert found[3].problem.startswith("column 'about' and message 1 hold different system prompts")
    rows = [{"prompt": "what?", "response": "no", **more} for more in ({}, {"about": "yes"})]
    text = {**settings, "prompt_format": "text"}
    found = encode_file(tmp_path, rows, "instruct", folder, **text)
    assert [split_by_loss(one, tokenizer) for one in found] == [
        ("maybe\n\nwhat?", "no<eos>"),
        ("yes\n\nwhat?", "no<eos>"),
    ]
    no, yes = dialogue("", "no")[1:], dialogue("", "yes")[1:]
    pair = {"prompt": dialogue("a"), "chosen": no, "rejected": yes}
    (one,) = encode_file(tmp_path, [pair], "preference", folder, **settings)
    assert tokenizer.decode(one.ids).count(begins[1]) == 2


READS_TOOLS = "{% if tools %}{{ tools[0].function.name }}{% endif %}"
CALLED = [{"name": "maybe"}]


@pytest.mark.parametrize("kind", ["chat", "instruct", "preference"])
def test_tools_that_the_template_does_not_read_are_refused(tmp_path, folder, kind):
    """Also those of a row that is text, which no template renders."""
    asked, no, yes = dialogue("a"), dialogue("", "no")[1:], dialogue("", "yes")[1:]
    row: dict[str, Any] = {
        "chat": {"messages": ANSWERED},
        "instruct": {"prompt": asked, "response": no},
        "preference": {"prompt": asked, "chosen": no, "rejected": yes},
    }[kind]
    tools = [None, [], "", "[]", CALLED, json.dumps(CALLED)]
    rows = [{**row, "tools": each} for each in tools]
    why = "the model would not see the row's tools"
    hint = "set data.chat_template to one that reads them, or data.ignore_columns='[tools]'"
    problems = [one.problem for one in encode_file(tmp_path, rows, kind, folder)]
    assert problems == [*[""] * 4, *[f"{why}: the chat template does not read them; {hint}"] * 2]
    template = write(tmp_path / "tools.jinja", READS_TOOLS + without_marks(CHATML))
    found = encode_file(tmp_path, rows, kind, folder, chat_template=str(template))
    assert [one.problem for one in found] == [""] * 6
    texts = [bpe_tokenizer().decode(one.ids) for one in found]
    assert [text.startswith("maybe<") for text in texts] == [False] * 4 + [True] * 2
    if kind != "chat":
        row = {"prompt": "a", "response": "no", "chosen": "no", "rejected": "yes"}
        rows = [{**row, "tools": each} for each in tools]
        found = encode_file(tmp_path, rows, kind, folder, prompt_format="text")
        problems = [one.problem for one in found]
        text = "text is trained on without a chat template"
        assert problems == [*[""] * 4, *[f"{why}: {text}; {hint}"] * 2]


def test_the_template_that_is_used_with_tools_is_the_one_that_must_read_them(tmp_path):
    """A tokenizer may have another template for rows with tools."""
    tokenizer, plain = bpe_tokenizer(), without_marks(CHATML)
    templates = {"default": "{{ tools }}" + plain, "tool_use": plain}
    for name, problem in (("plain", True), ("reads", False)):
        if not problem:
            templates = {"default": plain, "tool_use": "{{ tools }}" + plain}
        tokenizer.chat_template = templates
        tokenizer.save_pretrained(tmp_path / name)
        rows = [{"messages": ANSWERED, "tools": CALLED}, {"messages": ANSWERED}]
        found = encode_file(tmp_path, rows, "chat", str(tmp_path / name))
        assert [bool(one.problem) for one in found] == [problem, False]


@pytest.mark.parametrize(
    ("template", "reads"),
    [
        ("{{ messages[0].tools }}{# tools #} tools", False),
        ("{% macro f(tools) %}{{ tools }}{% endmacro %}", False),
        ("{% macro f(tools) %}{{ tools }}{% endmacro %}{{ f(tools) }}", True),
        ("{% if not tools is defined %}{% set tools = none %}{% endif %}", True),
        ("{% for m in messages %}{% if tools %}{% break %}{% endif %}{% endfor %}", True),
        ("{%- generation -%}{{ m }}{%- endgeneration %}", False),
        ("{% generation %}{{ tools }}{% endgeneration %}", True),
        ("{% no template", True),
    ],
)
def test_whether_a_template_reads_tools(template, reads):
    assert uses_tools(template) is reads


def test_values_for_the_template(tmp_path, folder):
    """Served with enable_thinking: false, Qwen3's prompt holds the empty block of thoughts."""
    tokenizer = bpe_tokenizer()
    template = str(write(tmp_path / "qwen3.jinja", without_marks(QWEN3)))
    rows = [{"messages": dialogue("a", "yes", "b", "no")}, {"messages": THOUGHTS}]

    def texts(**settings):
        found = encode_file(tmp_path, rows, "chat", folder, chat_template=template, **settings)
        kept = [
            [token for token in one.labels if token != IGNORED] for one in found if one.ids.size
        ]
        return found, [tokenizer.decode(tokens) for tokens in kept]

    plain, thought = texts()[1]
    assert plain == f"yes<|end|>{NO_THOUGHT}no<|end|>"
    assert texts(chat_template_kwargs={"enable_thinking": True})[1] == [plain, thought]
    found, kept = texts(chat_template_kwargs={"enable_thinking": False})
    assert kept == ["no<|end|>"]  # earlier turns are shown without the block
    assert found[1].problem.startswith("message 4: the chat template's generation prompt ends in")


def test_which_turns_carry_loss(tmp_path, folder):
    tokenizer, system = bpe_tokenizer(), {"role": "system", "content": "no"}
    first = dialogue("a", "yes", "b", "no")
    silent = dialogue("a", "yes", "b")
    silent[1] |= {"weight": 0}
    rows = [{"messages": [system, *first]}, {"messages": first[:3]}, {"messages": silent}]

    def texts(loss_on, kind="chat", rows=rows, **more):
        found = encode_file(
            tmp_path, rows, kind, folder, loss_on=loss_on, prompt_format="text", **more
        )
        kept = [[t for t in one.labels_or_ids if t != IGNORED] for one in found]
        return [one.problem or tokenizer.decode(t) for one, t in zip(found, kept, strict=True)]

    no_loss = "no assistant turn carries loss, so nothing to learn from"
    assert texts("assistant") == ["yes<|end|>no<|end|>", "yes<|end|>", no_loss]
    assert texts("last") == ["no<|end|>", "yes<|end|>", no_loss]
    (whole, asked), problem = texts("all")[:2], texts("all")[2]
    ids = tokenizer.apply_chat_template(rows[0]["messages"], chat_template=without_marks(CHATML))
    assert whole == tokenizer.decode(ids["input_ids"])
    assert asked.endswith("b<|end|>\n")  # no eos_token after what the user says
    assert problem == "message 2 is to carry no loss, but data.loss_on is all"
    plain = [{"prompt": "a? ", "response": "no"}, {"prompt": "a", "response": first[1:]}]
    assert texts("all", "instruct", plain)[0] == "a? no<eos>"
    assert texts("last", "instruct", plain) == [" no<eos>", "no<|end|>"]
    template = str(write(tmp_path / "plain.jinja", without_marks(PLAIN)))
    assert texts("all", rows=rows[:1], chat_template=template)[0].endswith("assistant: no\n<eos>")
    template = str(write(tmp_path / "drops.jinja", without_marks(GPT_OSS)))
    (lost,) = texts("all", rows=[{"messages": PARALLEL}], chat_template=template)
    assert lost.startswith("message 2: the chat template leaves out a tool call (maybe)")


def test_alpaca_system_and_history(tmp_path, folder):
    tokenizer = bpe_tokenizer()
    row = {"instruction": "what?", "output": "no", "system": "maybe"}
    history = [["a", "yes"]]
    rows = [row | {"history": history}, row | {"history": "[]"}]
    rows += [row | {"history": json.dumps(history)}, row | {"history": [["a"]]}]
    rows += [{"prompt": "what?", "response": "no", "system": "maybe"}]
    found = encode_file(tmp_path, rows, "instruct", folder, prompt_format="text")
    before = "### Instruction:\na\n\n### Response:\nyes\n\n"
    whole = (f"maybe\n\n{before}{ALPACA}### Response:\n", "no<eos>")
    assert [split_by_loss(one, tokenizer) for one in found if not one.problem] == [
        whole,
        (f"maybe\n\n{ALPACA}### Response:\n", "no<eos>"),
        whole,
        ("maybe\n\nwhat?", "no<eos>"),
    ]
    pairs = "column 'history' must hold a list of pairs of texts, [question, answer]"
    assert found[3].problem == pairs
    template = str(write(tmp_path / "template.jinja", with_marks(CHATML)))
    (one,) = encode_file(tmp_path, rows[:1], "instruct", folder, chat_template=template)
    turns = [{"role": "system", "content": "maybe"}, *dialogue("a", "yes", "what?", "no")]
    expected = tokenizer.apply_chat_template(turns, chat_template=without_marks(CHATML))
    assert one.ids.tolist() == expected["input_ids"]
    assert tokenizer.decode([token for token in one.labels if token != IGNORED]) == "no<|end|>"


ARGUMENTS = (
    "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' }}{% if m.role == 'assistant' %}[[{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}{{ '<|end|>' }}]]"
    "{% else %}{{ m.content + '<|end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
)


def calling(arguments):
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"messages": [*dialogue("a"), {"role": "assistant", "tool_calls": [call]}]}


def test_tool_arguments_are_objects_without_the_nulls_of_a_schema(tmp_path, folder):
    """As in the templates of Qwen2.5 and Llama 3.2, which write the arguments as JSON."""
    tokenizer = bpe_tokenizer()
    template = str(write(tmp_path / "calls.jinja", with_marks(ARGUMENTS)))
    rows = [calling({"a": 2, "in": {"b": 1}}), calling({"in": {"c": [{"d": 1}, {}]}, "city": "x"})]
    expected = ['{"a": 2, "in": {"b": 1}}', '{"in": {"c": [{"d": 1}, {}]}, "city": "x"}']

    def arguments(rows, **options):
        found = encode_file(tmp_path, rows, "chat", folder, chat_template=template, **options)
        return [
            one.problem or tokenizer.decode([token for token in one.labels if token != IGNORED])
            for one in found
        ]

    assert arguments(rows) == [f"f{text}<|end|>" for text in expected]
    assert arguments(rows, suffix=".parquet") == arguments(rows)
    assert arguments([calling(text) for text in expected]) == arguments(rows)
    # A null that is written in JSON stays, and no arguments are an empty object
    assert arguments([calling({"a": None}), calling("")]) == ['f{"a": null}<|end|>', "f{}<|end|>"]
    what = "message 2: the arguments of a tool call"
    assert [text[: len(what) + 8] for text in arguments([calling("{a"), calling("[1]")])] == [
        f"{what} are not",
        f"{what} must be",
    ]
    # A template that takes the arguments only as text, as DeepSeek-R1's
    as_text = with_marks(ARGUMENTS).replace(
        "c.function.arguments | tojson", "'' + c.function.arguments"
    )
    write(tmp_path / "calls.jinja", as_text)
    assert arguments([calling(text) for text in expected]) == [
        f"f{text}<|end|>" for text in expected
    ]


# Prompt and response as one text


def test_prompt_and_response_are_one_text(tmp_path):
    """A SentencePiece tokenizer puts `▁` before a text, but not before its second part.

    Llama 2's gives `<0x0A>`, `Hello` for "### Response:\\nHello", and `▁Hello` for "Hello" alone.
    """
    tokenizer = sentencepiece_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [
        {"prompt": "a\n", "response": "no"},
        {"prompt": "b:", "response": "yes<eos>"},
        {"prompt": "日", "response": "本"},
    ]
    for one, row in zip(
        encode_file(tmp_path, rows, "instruct", str(tmp_path / "tokenizer")), rows, strict=True
    ):
        joint = tokenizer(row["prompt"] + row["response"])["input_ids"]
        end = [] if row["response"].endswith("<eos>") else [tokenizer.eos_token_id]
        assert one.ids.tolist() == joint + end
        learned = [token for token in one.labels if token != IGNORED]
        answer = tokenizer.convert_ids_to_tokens(learned)
        assert answer[0] in ("no", "yes", "<0xE6>")
        assert tokenizer.decode(learned).strip() == row["response"].removesuffix("<eos>") + "<eos>"


# Ends of answers


def test_ends_of_the_training_data(tmp_path, folder):
    tokenizer = bpe_tokenizer()

    def ends(template=None, **data):
        if template is not None:
            data["chat_template"] = str(write(tmp_path / "template.jinja", template))
        found = stop_token_ids(schema.Data(**data), tokenizer=folder)
        return [tokenizer.convert_ids_to_tokens(token) for token in found]

    assert ends() == ["<eos>"]
    assert ends(kind="chat") == ["<|end|>"]
    assert ends(kind="chat", template=with_marks(GEMMA)) == ["</turn>"]
    assert ends(kind="chat", template=without_marks(PLAIN)) == ["<eos>"]
    with_line_end = with_marks(CHATML.replace("'<|end|>' }}]]{{ '\n' }}", "'<|end|>\n' }}]]"))
    assert with_line_end != with_marks(CHATML)
    assert ends(kind="chat", template=with_line_end) == ["<|end|>"]
    assert ends(kind="chat", template=with_marks(PLAIN)) == ["<eos>"]
    assert ends(kind="instruct") == ["<|end|>"]
    # rows are texts or messages
    assert ends(kind="instruct", prompt_format="text") == ["<eos>", "<|end|>"]
    assert ends(kind="instruct", template=with_marks(CHATML)) == ["<|end|>"]
    assert ends(kind="tokens") == ends(kind="classification") == []
    # Calls, and turns before another message, may end otherwise
    assert ends(kind="chat", template=without_marks(GPT_OSS)) == ["<eos>", "</turn>"]
    assert ends(kind="chat", template=without_marks(GEMMA4)) == ["<|neck|>", "</turn>"]
    headings = without_marks(GLM).replace(
        "'<|begin|>\n'", "('<|begin|>' if m.role == 'user' else '<turn>')"
    )
    assert ends(kind="chat", template=headings) == ["<eos>", "<|begin|>", "<turn>"]
    assert ends(kind="chat", template=headings, loss_on="last") == ["<eos>", "<turn>"]
    # The end of one of several calls is not that of the turn
    several = without_marks(THINKING).replace("</call>", "</turn>")
    only_one = "{% endfor %}{{ '<|end|>' if m.tool_calls|default([])|length != 1 }}"
    several = several.replace("{% endfor %}{{ '<|end|>' }}", only_one)
    assert several.count("!= 1") == 1
    assert ends(kind="chat", template=several) == ["<|end|>"]
    source = {"files": ("x",), "weight": 1.0}
    mixture = {"a": schema.Source(**source), "b": schema.Source(kind="chat", **source)}
    assert ends(kind="text", train=mixture) == ["<eos>", "<|end|>"]
    assert stop_token_ids(schema.Data(kind="chat"), tokenizer="bytes") == [256]


CALL = {"function": {"name": "f", "arguments": {}}}


def test_an_answer_with_an_empty_list_of_calls_has_none():
    """Mistral's template asks whether there is the key, and wrote [TOOL_CALLS] instead of the
    answer; Llama 3's refused the row."""
    (message,) = read_messages([{"role": "assistant", "content": "a", "tool_calls": []}], "m")
    assert message == {"role": "assistant", "content": "a"}


def test_calls_may_be_json():
    turn = {"role": "assistant", "tool_calls": json.dumps([CALL])}
    (message,) = read_messages([turn], "m")
    assert message["tool_calls"] == [CALL]


@pytest.mark.parametrize(
    "turn",
    [
        {"role": "assistant", "tool_calls": "f()"},
        {"role": "assistant", "tool_calls": {"name": "f"}},
        {"role": "assistant", "tool_calls": 1.5},
        {"role": "assistant", "tool_calls": ["f"]},
        {"role": "assistant", "tool_calls": [{"function": "f"}]},
        {"role": "assistant", "tool_calls": "[" * 100_000},
        {"role": "assistant", "function_call": "f"},
        {"from": ["gpt"], "value": "a"},
    ],
)
def test_a_malformed_message_is_a_problem_of_its_row(turn):
    """It ended the run with a traceback, also with data.on_error: skip."""
    with pytest.raises(RowError, match="message 1"):
        read_messages([turn], "m")


def test_arguments_nested_too_deeply_are_a_problem_of_their_row():
    call = {"function": {"name": "f", "arguments": "[" * 100_000}}
    with pytest.raises(RowError, match="arguments"):
        parse_arguments([{"role": "assistant", "content": "", "tool_calls": [call]}])


def test_example_of_tool_calls_in_the_documents():
    """The row and the template of docs/reference/data.md give the text that the page shows."""
    text = (
        (REPOSITORY / "docs/reference/data.md")
        .read_text()
        .partition("### Tool calls and reasoning")[2]
    )
    blocks = re.findall(r"^```(json|jinja|text)\n(.*?)\n```", text, re.DOTALL | re.MULTILINE)
    row, template, shown = (block for _, block in blocks[:3])
    fields = json.loads(row)
    tokenizer = bpe_tokenizer()
    marks = [f"<|{role}|>" for role in ("user", "assistant", "tool", "end")]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    messages = parse_arguments(read_messages(fields["messages"], "messages"))
    ids, labels = encoded(tokenizer, template, messages, tools=read_tools(fields["tools"]))
    parts = []
    for learned, run in itertools.groupby(
        zip(ids, labels, strict=True), key=lambda one: one[1] != IGNORED
    ):
        part = tokenizer.decode([token for token, _ in run])
        parts.append(f"[{part}]" if learned else part)
    assert "".join(parts).rstrip() == shown


PRINTED = {
    "whole": "{{ c.function.arguments }}",
    "joined": "{{ 'a: ' ~ c.function.arguments }}",
    "as text": "{{ c.function.arguments | string }}",
    "as JSON": "{{ c.function.arguments | tojson }}",
    "only text": "{{ 'a: ' + c.function.arguments }}",
}
WRITTEN = '{"city": "Zürich", "metric": true, "n": null, "list": [false, 1e-07, {"x": null}]}'


def calling_maybe(arguments, key="arguments"):
    function = {"name": "maybe", key: arguments}
    return [*dialogue("a"), {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}]  # fmt: skip


def template_of_calls(printed):
    return (
        "{% for m in messages %}{{ '<|begin|>' + m.role + '\n' }}{% if m.tool_calls %}"
        "{% for c in m.tool_calls %}{{ c.function.name }} " + printed + "{% endfor %}"
        "{% else %}{{ m.content }}{% endif %}{{ '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
    )


@pytest.mark.parametrize("printed", PRINTED)
@pytest.mark.parametrize("given", [json.loads, str], ids=["an object", "JSON"])
@pytest.mark.parametrize("key", ["arguments", "parameters", "args", "input"])
def test_arguments_of_calls_are_json(tmp_path, folder, printed, given, key):
    template = str(write(tmp_path / "t.jinja", template_of_calls(PRINTED[printed])))
    rows = [{"messages": calling_maybe(given(WRITTEN), key)}]
    (one,) = encode_file(tmp_path, rows, "chat", folder, chat_template=template)
    assert not one.problem
    learned = bpe_tokenizer().decode(one.labels[one.labels != IGNORED])
    assert learned in (f"maybe {WRITTEN}<|end|>", f"maybe a: {WRITTEN}<|end|>")


@pytest.mark.parametrize(
    ("arguments", "wanted"), [(None, "{}"), ("", "{}"), ({}, "{}"), ([], "{}")]
)
def test_calls_without_arguments(tmp_path, folder, arguments, wanted):
    template = str(write(tmp_path / "t.jinja", template_of_calls(PRINTED["whole"])))
    rows = [{"messages": calling_maybe(arguments)}]
    (one,) = encode_file(tmp_path, rows, "chat", folder, chat_template=template)
    learned = bpe_tokenizer().decode(one.labels[one.labels != IGNORED])
    assert learned == f"maybe {wanted}<|end|>"


def test_arguments_that_are_printed_one_by_one(tmp_path, folder, caplog):
    """As in Qwen3-Coder's template. Where true would become a text, the row is refused."""
    caplog.set_level("INFO")
    each = "{% for k, v in c.function.arguments | items %}{{ k }}=VALUE;{% endfor %}"
    value = (
        "{{ v | tojson if v is mapping or (v is sequence and v is not string) else v | string }}"
    )
    template = str(write(tmp_path / "t.jinja", template_of_calls(each.replace("VALUE", value))))
    rows = [{"messages": calling_maybe(WRITTEN)}, {"messages": calling_maybe({"text": "True"})}]
    one, two = encode_file(tmp_path, rows, "chat", folder, chat_template=template)
    wanted = ['city=Zürich;metric=true;n=null;list=[false, 1e-07, {"x": null}];', "text=True;"]
    for row, text in zip((one, two), wanted, strict=True):
        assert bpe_tokenizer().decode(row.labels[row.labels != IGNORED]) == f"maybe {text}<|end|>"
    assert caplog.text.count("each one is written as JSON") == 1
    quoted = "{{ '\"' ~ v ~ '\"' if v is string else v }}"
    template = str(write(tmp_path / "t.jinja", template_of_calls(each.replace("VALUE", quoted))))
    (one, _) = encode_file(tmp_path, rows, "chat", folder, chat_template=template)
    assert one.problem.startswith("the chat template prints arguments of a call as Python does")
    inner = "{% for x, y in v | items %}{{ x }}={{ y }};{% endfor %}"
    template = str(write(tmp_path / "t.jinja", template_of_calls(each.replace("VALUE", inner))))
    rows = [{"messages": calling_maybe({"a": {"b": value}})} for value in (True, 1)]
    one, two = encode_file(tmp_path, rows, "chat", folder, chat_template=template)
    assert one.problem.startswith("the chat template prints arguments of a call as Python does")
    assert not two.problem


def test_prompts_and_other_texts_take_calls_as_rows_do():
    """A text that looks like a call of Python changes nothing."""
    printed = template_of_calls("{{ c.function.name }}{{ c.function.arguments }}")
    asked, called = calling_maybe(WRITTEN)
    messages = [{**asked, "content": "[maybe(x=None)]"}, called, *dialogue("b")]
    chat = ChatTemplate(bpe_tokenizer(), "t", printed)
    text = chat.render(prompt_of(messages)).text
    assert WRITTEN in text
    assert text.endswith("b<|end|><|begin|>assistant\n")
    assert chat.render(chat_of(messages)).text in text


def test_prompts_open_thoughts_as_rows_do():
    opens = without_marks(CHATML).replace("assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}")  # fmt: skip
    chat = ChatTemplate(bpe_tokenizer(), "t", opens)
    text = chat.render(prompt_of(dialogue("a", "what</think>yes", "b"))).text
    assert "<think>what</think>yes" in text


@pytest.mark.parametrize("arguments", ["[1]", "3", 3, True, [1]])
def test_arguments_that_are_no_object_are_refused(tmp_path, folder, arguments):
    template = str(write(tmp_path / "t.jinja", template_of_calls(PRINTED["whole"])))
    rows = [{"messages": calling_maybe(arguments)}]
    (one,) = encode_file(tmp_path, rows, "chat", folder, chat_template=template)
    assert one.problem.startswith("message 2: the arguments of a tool call must be an object; got")


def test_a_call_with_arguments_twice_is_refused():
    messages = calling_maybe("{}")
    messages[1]["tool_calls"][0]["function"]["parameters"] = {"a": 1}
    with pytest.raises(
        RowError, match=r"^message 2: a tool call has arguments and parameters; keep"
    ):
        read_messages(messages, "messages")


@pytest.mark.parametrize(
    ("key", "without", "with_loss"),
    [
        *((key, 0, 1) for key in ("loss_mask", "loss_scale", "loss_weight", "weight")),
        *((key, False, True) for key in ("loss", "train", "training", "trainable")),
        ("masked", True, False),
    ],
)
def test_keys_that_say_whether_a_message_carries_loss(key, without, with_loss):
    messages = dialogue("a", "5", "b", "4")
    messages[1] |= {key: without}
    messages[3] |= {key: with_loss}
    found = read_messages(messages, "messages")
    assert [message.get("loss", True) for message in found] == [True, False, True, True]
    assert all(key not in message for message in found if key != "loss")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mask", 1),
        ("train_detail", [{"begin_offset": 0, "end_offset": 1, "train": False}]),
        ("supervise", False),
        ("learn", 0),
        ("importance", 0.5),
    ],
)
def test_keys_that_may_say_it_are_refused_unless_they_are_named(tmp_path, folder, key, value):
    messages = dialogue("a", "5")
    messages[1][key] = value
    rows = [{"messages": messages}]
    (one,) = encode_file(tmp_path, rows, "chat", folder)
    assert one.problem.startswith(f"message 2: {key}: ")
    assert f"data.ignore_columns='[{key}]' trains without it" in one.problem
    (one,) = encode_file(tmp_path, rows, "chat", folder, ignore_columns=(key,))
    assert not one.problem


def test_numbers_that_say_nothing_about_loss():
    """Of WildChat, OpenAssistant and others."""
    more = {"turn_identifier": 7, "toxic": False, "token_counter": 3, "temperature": 0.5}
    more |= {"message_id": 1, "timestamp": 1.5, "redacted": False, "top_p": 1}
    messages = [message | more for message in dialogue("a", "5")]
    assert [message["content"] for message in read_messages(messages, "messages")] == ["a", "5"]


def test_turns_of_xtuner():
    turns = [
        {"system": "s", "input": "a", "output": "b"},
        {"input": "c", "output": "d", "output_with_loss": False},
        {"input": "", "output": "e"},
    ]
    assert read_messages(turns, "conversation") == [
        {"role": "system", "content": "s"},
        *dialogue("a", "b", "c"),
        {"role": "assistant", "content": "d", "loss": False},
        {"role": "assistant", "content": "e"},
    ]
