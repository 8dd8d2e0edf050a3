"""Chat templates that have a name.

The texts are what the models' own templates write, as their tokenizers have them. Phi-3's also writes
the eos_token at the end of a conversation, after `<|end|>`.
"""

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from launcher.data.chat_template import ChatTemplate
from launcher.data.encoder import make_encoder
from launcher.data.ends import stop_token_ids
from launcher.data.messages import chat_of
from launcher.data.run_data import tokenizer_to_keep, trained_prompts
from launcher.data.template_source import read_template
from launcher.data.tokenizer import ExtendedName
from launcher.errors import RecipeError, RowError
from launcher.models.micro_batch import IGNORED
from launcher.recipe.schema import Data, Model
from launcher.recipe.template_names import NAMED_TEMPLATES, template_file, template_problem
from tests import REPOSITORY
from tests.unit.data.rows import write
from tests.unit.data.test_chat import bpe_tokenizer, dialogue, encode_file, loss_texts

SYSTEM = {"role": "system", "content": "Be kind."}
CHAT = [SYSTEM, *dialogue("Hi", "Hello!", "Bye", "See you!")]
CHATML = (
    "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    "[Hello!<|im_end|>]\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n[See you!<|im_end|>]\n"
)
# What carries loss is in brackets, which are written ( ) in the templates of Mistral
WRITTEN = {
    "chatml": CHATML,
    "deepseek_v3": "<bos>Be kind.<｜User｜>Hi<｜Assistant｜>[Hello!<eos>]<｜User｜>Bye<｜Assistant｜>[See you!<eos>]",
    "gemma": "<bos><start_of_turn>user\nBe kind.\n\nHi<end_of_turn>\n<start_of_turn>model\n"
    "[Hello!<end_of_turn>]\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n"
    "[See you!<end_of_turn>]\n",
    "llama2": "<bos>(INST) <<SYS>>\nBe kind.\n<</SYS>>\n\nHi (/INST) [Hello! <eos>]"
    "<bos>(INST) Bye (/INST) [See you! <eos>]",
    "llama3": "<bos><|start_header_id|>system<|end_header_id|>\n\nBe kind.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[Hello!<|eot_id|>]"
    "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n[See you!<|eot_id|>]",
    "mistral": "<bos>(INST) Be kind.\n\nHi(/INST) [Hello!<eos>](INST) Bye(/INST) [See you!<eos>]",
    "mistral_v1": "<bos>(INST) Be kind.\n\nHi (/INST) [Hello!<eos>](INST) Bye (/INST) [See you!<eos>]",
    "mistral_v3_tekken": "<bos>(INST)Be kind.\n\nHi(/INST)[Hello!<eos>](INST)Bye(/INST)[See you!<eos>]",
    "mistral_v7_tekken": "<bos>(SYSTEM_PROMPT)Be kind.(/SYSTEM_PROMPT)(INST)Hi(/INST)[Hello!<eos>]"
    "(INST)Bye(/INST)[See you!<eos>]",
    "phi3": "<|system|>\nBe kind.<|end|>\n<|user|>\nHi<|end|>\n<|assistant|>\n[Hello!<|end|>]\n"
    "<|user|>\nBye<|end|>\n<|assistant|>\n[See you!<|end|>]\n",
    "phi4": "<|im_start|>system<|im_sep|>Be kind.<|im_end|><|im_start|>user<|im_sep|>Hi<|im_end|>"
    "<|im_start|>assistant<|im_sep|>[Hello!<|im_end|>]<|im_start|>user<|im_sep|>Bye<|im_end|>"
    "<|im_start|>assistant<|im_sep|>[See you!<|im_end|>]",
    "qwen2_5": CHATML,
    "qwen3": CHATML.replace("[See", "[<think>\n\n</think>\n\nSee"),
    "qwen3_nothink": CHATML,
    "zephyr": "<|system|>\nBe kind.<eos>\n<|user|>\nHi<eos>\n<|assistant|>\n[Hello!<eos>]\n"
    "<|user|>\nBye<eos>\n<|assistant|>\n[See you!<eos>]\n",
}
LOOK = {"name": "look", "arguments": {"at": "ü"}}
CALLS = [
    SYSTEM,
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Wait.", "tool_calls": [{"function": LOOK}] * 2},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": "two"},
    {"role": "assistant", "content": "Yes."},
]
TOOL = {"type": "function", "function": {"name": "look"}}
CALL = '\n<tool_call>\n{"name": "look", "arguments": {"at": "ü"}}\n</tool_call>'
WITH_TOOLS = (
    "<|im_start|>system\nBe kind.\n\n# Tools\n\nYou may call one or more functions to assist with the "
    "user query.\n\nYou are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
    '{"type": "function", "function": {"name": "look"}}\n</tools>\n\nFor each function call, return a '
    "json object with function name and arguments within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call><|im_end|>\n'
    f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWait.{CALL}{CALL}<|im_end|>\n"
    "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
    "<|im_end|>\n<|im_start|>assistant\nYes.<|im_end|>\n"
)


def tokenizer_of(name):
    """A tokenizer that has the tokens of a named template."""
    tokenizer = bpe_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*NAMED_TEMPLATES[name].tokens]})
    return tokenizer


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_named_template_writes_the_format_of_its_models(name):
    """And each answer carries loss with the token that ends it."""
    tokenizer, template = tokenizer_of(name), read_template(name)
    text = re.sub(r"[\[\]]", "", WRITTEN[name]).translate(str.maketrans("()", "[]"))
    options = {"chat_template": template, "tokenize": False}
    assert tokenizer.apply_chat_template(CHAT, **options) == text
    learned = loss_texts(tokenizer, template, CHAT)
    assert [part.strip() for part in learned] == re.findall(r"\[(.*?)\]", WRITTEN[name], re.DOTALL)
    asked = tokenizer.apply_chat_template(CHAT[:-1], add_generation_prompt=True, **options)
    assert asked == text[: len(asked)]
    assert text[len(asked) :].strip().startswith(("See", "<think>"))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "qwen3_nothink"])
def test_templates_of_qwen_write_tools_and_calls(name):
    tokenizer, template = tokenizer_of(name), read_template(name)
    options = {"tools": [TOOL], "chat_template": template, "tokenize": False}
    thought = "<think>\n\n</think>\n\n" if name == "qwen3" else ""
    written = WITH_TOOLS.replace("Yes.", f"{thought}Yes.")
    assert tokenizer.apply_chat_template(CALLS, **options) == written
    ends = loss_texts(tokenizer, template, CALLS, tools=[TOOL])
    assert ends == [f"Wait.{CALL}{CALL}<|im_end|>", f"{thought}Yes.<|im_end|>"]


def test_qwen3_shows_reasoning_after_the_last_question_only():
    tokenizer = tokenizer_of("qwen3")
    chat = dialogue("Hi", "<think>\nno\n</think>\n\nHello!", "Hi", "Hello!")
    chat[3]["reasoning_content"] = "yes"
    options = {"chat_template": read_template("qwen3"), "tokenize": False}
    text = tokenizer.apply_chat_template(chat, **options)
    asked, first, again, last = text.split("<|im_end|>\n")[:4]
    assert asked == again == "<|im_start|>user\nHi"
    assert first == "<|im_start|>assistant\nHello!"
    assert last == "<|im_start|>assistant\n<think>\nyes\n</think>\n\nHello!"
    options |= {"add_generation_prompt": True, "enable_thinking": False}
    text = tokenizer.apply_chat_template(chat[:1], **options)
    assert text == f"{asked}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def test_qwen2_5_has_a_default_system_prompt():
    options = {"chat_template": read_template("qwen2_5"), "tokenize": False}
    text = tokenizer_of("qwen2_5").apply_chat_template(CHAT[1:], **options)
    prompt = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    assert text.startswith(
        f"<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


@pytest.mark.parametrize("name", ["gemma", "llama2", "mistral", "mistral_v7_tekken", "deepseek_v3"])
def test_no_message_is_left_out(name):
    """A message that a format has no place for is refused."""
    chat = ChatTemplate(tokenizer_of(name), "it", read_template(name))
    tool, later = ({"role": role, "content": "more"} for role in ("tool", "system"))
    refusals = "no place for the role|must alternate"
    for messages in ([*CHAT[:2], tool, *CHAT[2:]], [*CHAT[:3], later, *CHAT[3:]]):
        if name == "mistral_v7_tekken" and later in messages:
            assert "[SYSTEM_PROMPT]more" in chat.render(chat_of(messages)).text
            continue
        with pytest.raises(RowError, match=refusals):
            chat.render(chat_of(messages))


def test_names_of_other_tools_are_known():
    for name, known in NAMED_TEMPLATES.items():
        assert {template_file(alias) for alias in known.aliases} <= {template_file(name)}
        assert template_problem(name) is None
    assert template_file("qwen_25") == template_file("qwen") == template_file("qwen2_5")
    assert template_file("gemma3") == template_file("gemma")
    files = {file.stem for file in template_file("chatml").parent.iterdir()}
    assert files == {*NAMED_TEMPLATES}


def test_a_file_with_the_name_of_a_template_is_that_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3").mkdir()  # a model, perhaps
    assert read_template("qwen3").startswith("{#- Qwen3")
    write(tmp_path / "chatml", "{{ messages }}")
    assert read_template("chatml") == "{{ messages }}"
    assert make_encoder("chat", Data(chat_template="chatml"), tokenizer="bytes").notes == []


@pytest.mark.parametrize(
    "value",
    [
        "chatlm",
        "llama-3",
        "gone/t.jinja",
        "{{ messages }}",
    ],
)
def test_a_template_that_is_neither_a_name_nor_a_file(words, value):
    words.check(value, str(template_problem(value)))


# Tokens


def save(tokenizer, folder):
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_a_tokenizer_without_the_tokens_of_a_template_is_said(tmp_path):
    """The last answer ends with the eos_token; with model.new_tokens each ends with the template's."""
    plain = save(bpe_tokenizer(), tmp_path / "plain")
    data = Data(kind="chat", chat_template="chatml")
    (note,) = make_encoder("chat", data, tokenizer=plain).notes
    mend = 'model.new_tokens=\'["<|im_start|>", "<|im_end|>"]\''
    assert note.startswith(
        "warning: the tokenizer does not have <|im_start|>, <|im_end|> of data.ch"
    )
    assert note.endswith(f"; {mend} makes them tokens that end answers")
    eos = bpe_tokenizer().eos_token_id
    assert stop_token_ids(data, tokenizer=plain) == [eos]
    (one,) = encode_file(tmp_path, [{"messages": CHAT}], "chat", plain, chat_template="chatml")
    assert one.ids[-1] == one.labels[-1] == eos

    grown = ExtendedName(plain, ("<|im_start|>", "<|im_end|>"))
    assert make_encoder("chat", data, tokenizer=grown).notes == []
    (end,) = stop_token_ids(data, tokenizer=grown)
    (one,) = encode_file(tmp_path, [{"messages": CHAT}], "chat", grown, chat_template="chatml")
    assert (one.labels == end).sum() == 2
    assert eos not in one.ids
    assert one.labels[-1] == IGNORED  # the line break after the last answer


def test_an_export_has_the_named_template_and_its_end(tmp_path):
    folder = save(tokenizer_of("chatml"), tmp_path / "base")
    data, model = Data(kind="chat", chat_template="chatml"), Model(path=folder)
    kept = tokenizer_to_keep(data, model, prompts=trained_prompts(data, model, set()))
    assert kept is not None
    Path(tmp_path, "out").mkdir()
    kept.save(tmp_path / "out")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert loaded.chat_template == read_template("chatml")
    assert loaded.apply_chat_template(CHAT, tokenize=False) == re.sub(r"[\[\]]", "", CHATML)
    assert stop_token_ids(data, tokenizer=folder) == [loaded.convert_tokens_to_ids("<|im_end|>")]


def test_a_tokenizer_without_a_template_names_one(tmp_path):
    (tmp_path / "base").mkdir()
    folder = save(bpe_tokenizer(), tmp_path / "base")
    with pytest.raises(
        RecipeError, match=r"set data.chat_template to a name, such as chatml, or to a"
    ):
        encode_file(tmp_path, [{"messages": CHAT}], "chat", folder)


def test_the_documents_list_the_names():
    text = (REPOSITORY / "docs/reference/data.md").read_text()
    for name, known in NAMED_TEMPLATES.items():
        others = ", ".join(f"`{alias}`" for alias in known.aliases)
        assert f"| `{name}` | {known.models} | {others} |" in text
