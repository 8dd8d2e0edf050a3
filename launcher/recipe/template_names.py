"""Chat templates that have a name: the files in `templates/`, for `data.chat_template`."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import suggestion
from launcher.sources.location import no_such

_FOLDER = Path(__file__).with_name("templates")


@dataclass(frozen=True)
class NamedTemplate:
    """What a name stands for, beside the template in `templates/NAME.jinja`."""

    models: str
    """The models that are served with it."""
    tokens: tuple[str, ...] = ()
    """Texts of the template that are tokens of these models."""
    aliases: tuple[str, ...] = ()
    """Other names, such as those of axolotl and LLaMA-Factory."""


_CHATML = ("<|im_start|>", "<|im_end|>")
_INST = ("[INST]", "[/INST]")
NAMED_TEMPLATES = {
    "chatml": NamedTemplate("base models, Yi, SmolLM", _CHATML, ("yi", "smollm")),
    "deepseek_v3": NamedTemplate(
        "DeepSeek-V2.5 and V3",
        ("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>"),
        ("deepseek3",),
    ),
    "gemma": NamedTemplate(
        "Gemma, Gemma 2 and Gemma 3",
        ("<start_of_turn>", "<end_of_turn>"),
        ("gemma2", "gemma3", "gemma3n"),
    ),
    "llama2": NamedTemplate("Llama 2"),
    "llama3": NamedTemplate(
        "Llama 3, 3.1, 3.2 and 3.3, without dates",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("llama3_1", "llama3.1"),
    ),
    "mistral": NamedTemplate(
        "Mistral 7B v0.3", aliases=("mistral_v2", "mistral_v3", "mistral_v2v3")
    ),
    "mistral_v1": NamedTemplate("Mistral 7B v0.1 and v0.2, Mixtral", aliases=("mixtral",)),
    "mistral_v3_tekken": NamedTemplate(
        "Mistral NeMo, Ministral", _INST, ("ministral", "mistral_nemo")
    ),
    "mistral_v7_tekken": NamedTemplate(
        "Mistral Small 3, without its default system prompt",
        ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", *_INST),
        ("mistral_small",),
    ),
    "phi3": NamedTemplate(
        "Phi-3 and Phi-3.5",
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        ("phi", "phi_3", "phi_35"),
    ),
    "phi4": NamedTemplate("Phi-4", (_CHATML[0], "<|im_sep|>", _CHATML[1])),
    "qwen2_5": NamedTemplate(
        "Qwen2.5, with its default system prompt", _CHATML, ("qwen", "qwen_25", "qwen2.5", "qwen25")
    ),
    "qwen3": NamedTemplate("Qwen3", _CHATML),
    "qwen3_nothink": NamedTemplate(
        "Qwen3 without thinking (Instruct-2507)", _CHATML, ("qwen3_instruct",)
    ),
    "zephyr": NamedTemplate("Zephyr"),
}
"""By name. Of each model the format of its plain conversations; those of Qwen with tools, too."""
_NAMES = {
    alias: name for name, template in NAMED_TEMPLATES.items() for alias in (name, *template.aliases)
}


def template_name(value: str) -> str | None:
    """The name in NAMED_TEMPLATES that `data.chat_template` means; None: it is a file. A file that
    exists is that file."""
    return None if os.path.exists(value) and not os.path.isdir(value) else _NAMES.get(value)


def template_file(value: str) -> Path:
    """The file of `data.chat_template`, which is a name or a file."""
    name = template_name(value)
    return Path(value) if name is None else _FOLDER / f"{name}.jinja"


def template_problem(value: str) -> str | None:
    """Why `data.chat_template` is neither a name nor a file; None: it is one."""
    if template_name(value) is not None or os.path.isfile(value):
        return None
    if "{{" in value or "{%" in value:
        return "is the text of a template; write it into a file, and name the file"
    if (
        os.sep in value
        or value.startswith("~")
        or Path(value).suffix in (".jinja", ".jinja2", ".j2")
    ):
        return no_such("file", value)
    near = suggestion(value, _NAMES)
    names = ", ".join(NAMED_TEMPLATES)
    return f"no template of that name{near}; known: {names}; or give a file with a Jinja template"


def missing_tokens(name: str, known: Collection[str]) -> list[str]:
    """The tokens of a named template that are not among the texts of a tokenizer's tokens."""
    return [token for token in NAMED_TEMPLATES[name].tokens if token not in known]


PAIR_TEMPLATES = {
    "qwen3": (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
        'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
        "<|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
}
"""Values of data.pair_template by name: those that published rerankers were trained with (Qwen3-Reranker's model card, 2025)."""
