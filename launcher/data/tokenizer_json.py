"""Opens tokenizers so that their `tokenizer.json` decides.

transformers 5 builds the normalizer, pre-tokenizer and decoder of many classes anew, and takes only
the vocabulary from the file. It may also choose the class by the `model_type` of `config.json`, in
place of the one that `tokenizer_config.json` names. transformers 4, llama.cpp and other programs read
the file as it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

TOKENIZER, CONFIG = "tokenizer.json", "tokenizer_config.json"
Json = dict[str, Any]

_PARTS = ("normalizer", "pre_tokenizer", "decoder", "model", "post_processor")
_WITHOUT_EFFECT = {
    "pre_tokenizer": ("trim_offsets",),
    "decoder": ("trim_offsets", "add_prefix_space", "use_regex"),
}
"""Keys that change nothing where they are: they belong to other parts that have the same type."""
_BEGIN_OR_END = ("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer")
"""Classes for which transformers 4 and llama.cpp follow add_bos_token and add_eos_token where the
file says otherwise (DeepSeek V3). transformers 5 does not read them beside a file."""
_LOWER_CASE = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
"""Settings of BERT's tokenizers, and the attributes of its normalizer."""
_SAMPLE = (
    "In 1999 it was 12345 and 2026,  the quick fox\n\n    return x + 100  \n"
    "\tdef f(x):\r\n        return {'a_b': [1.5, None]}  # CamelCase, don't, I'LL, we've\n"
    "na\u00efve \u00c5ngstr\u00f6m cafe\u0301 \uff21\uff22 \u2460 \ufb01 \u6f22\u5b57\u4eee\u540d "
    "\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 \U0001f642\u00a0\u200b! "
    "https://example.org/?q=1&r=2 3.14159 + 2 = ?"
)
"""Text in which rules for digits, spaces, lines, letters and marks differ."""


def open_tokenizer(folder: Path, *, trusted: bool, **options: Any) -> Any:
    """The tokenizer of transformers in a folder, with the ids of its `tokenizer.json`.

    The class is the one that `tokenizer_config.json` names, else that of the model's type. What the
    file says about a text holds, and a line says where transformers reads it otherwise. Of
    `tokenizer_config.json` the tokens count, and the settings that transformers 4 applies to the
    file where they are given: add_bos_token and add_eos_token of Llama's classes, add_prefix_space,
    and those of BERT's normalizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file, config = folder / TOKENIZER, read_json(folder / CONFIG)
    with_code = "auto_map" in config
    own = file.is_file() and not (with_code and trusted)
    kinds: list[Any] = [AutoTokenizer]
    options["local_files_only"] = True
    if options.get("fix_mistral_regex"):  # transformers corrects what it reads from the file
        own = False
    elif own and not with_code:
        kinds = [_named_class(config) or AutoTokenizer, PreTrainedTokenizerFast]
    for kind in kinds:
        try:
            # Without trust_remote_code, transformers would ask in a terminal
            tokenizer = kind.from_pretrained(str(folder), trust_remote_code=trusted, **options)
            break
        except Exception:  # a class that cannot be built from this vocabulary
            if kind is kinds[-1]:
                raise
    if own and getattr(tokenizer, "is_fast", False):
        before = _reads(tokenizer)
        _take_file(tokenizer, file, config)
        if _reads(tokenizer) != before:
            what = (
                f"transformers' {type(tokenizer).__name__} reads text otherwise; the file decides"
            )
            logger.info(f"data.tokenizer: {file}: {what}")
    return tokenizer


def others_read_alike(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether transformers by itself makes the ids of `tokenizer` from the files in a folder, of a
    sample of text."""
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception:  # its class cannot be built from the vocabulary
        return False
    return _reads(other) == _reads(tokenizer)


def read_json(file: Path) -> Json:
    """The object in a file; empty if there is none, or if it holds something else."""
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _named_class(config: Mapping[str, Any]) -> Any:
    """The class of transformers that `tokenizer_config.json` names, if it is one that reads
    `tokenizer.json`; else None. transformers takes another one for some types of models."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    name = config.get("tokenizer_class")
    if not isinstance(name, str):
        return None
    found = tokenizer_class_from_name(name) or PreTrainedTokenizerFast  # as transformers does
    return found if issubclass(found, PreTrainedTokenizerFast) else None


def _reads(tokenizer: Any) -> list[object]:
    """Of each sample of text its ids, those with the tokens that begin or end it, and their text."""
    special = "".join(f"{token}a b" for token in tokenizer.all_special_tokens[:8])
    found: list[object] = []
    for text in (_SAMPLE, f"  a{special} ", "\u2581a\u2581b", " "):
        try:
            ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            whole = tokenizer(text, verbose=False)["input_ids"]
            found.append((ids, whole, tokenizer.decode(ids)))
        except Exception as error:  # a class without its own unknown token
            found.append(str(error))
    return found


def _take_file(tokenizer: Any, file: Path, config: Mapping[str, Any]) -> None:
    """Gives the tokenizer the parts of its file, if it has others, and then the settings of its
    config. The tokens that transformers added stay."""
    from tokenizers import Tokenizer

    backend, own = tokenizer.backend_tokenizer, Tokenizer.from_file(str(file))
    added, tokens = backend.get_added_tokens_decoder(), own.get_added_tokens_decoder()
    parts = _PARTS if own.post_processor is not None else _PARTS[:-1]
    if any(_state(backend, part) != _state(own, part) for part in parts) or any(
        id not in added or _meaning(added[id]) != _meaning(token) for id, token in tokens.items()
    ):
        backend.__setstate__(own.__getstate__())
        backend.encode_special_tokens = tokenizer.split_special_tokens
        known = {token.content for token in tokens.values()}
        more = [token for _, token in sorted(added.items()) if token.content not in known]
        tokenizer.add_tokens(more)
    _apply_settings(tokenizer, config)


def _apply_settings(tokenizer: Any, config: Mapping[str, Any]) -> None:
    """Settings of `tokenizer_config.json` that change parts of the file, as in transformers 4."""
    from tokenizers.normalizers import BertNormalizer
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    backend = tokenizer.backend_tokenizer
    space, splitter = config.get("add_prefix_space"), backend.pre_tokenizer
    if isinstance(space, bool) and isinstance(splitter, ByteLevel):
        splitter.add_prefix_space = space
    normalizer = backend.normalizer
    if isinstance(normalizer, BertNormalizer) and type(tokenizer) is not PreTrainedTokenizerFast:
        for key, attribute in _LOWER_CASE.items():
            if key in config:
                setattr(normalizer, attribute, config[key])
    given = "add_bos_token" in config or "add_eos_token" in config
    if given and str(config.get("tokenizer_class")).removesuffix("Fast") in _BEGIN_OR_END:
        ids = tokenizer("a", verbose=False)["input_ids"]
        begin = bool(config.get("add_bos_token", True)) and tokenizer.bos_token_id is not None
        end = bool(config.get("add_eos_token")) and tokenizer.eos_token_id is not None
        if begin != (ids[0] == tokenizer.bos_token_id) or end != (
            ids[-1] == tokenizer.eos_token_id
        ):
            tokenizer.add_bos_token, tokenizer.add_eos_token = begin, end


def _state(backend: Any, part: str) -> object:
    """What a part of a tokenizer does, as JSON; None: there is no such part."""
    if (value := getattr(backend, part)) is None:
        return None
    state = json.loads(value.__getstate__())
    if part == "model":  # no prefix is "" or null
        return {key: content or None for key, content in state.items()}
    return _without(state, _WITHOUT_EFFECT.get(part, ()))


def _without(state: object, keys: tuple[str, ...]) -> object:
    if isinstance(state, dict):
        return {key: _without(value, keys) for key, value in state.items() if key not in keys}
    return [_without(each, keys) for each in state] if isinstance(state, list) else state


def _meaning(token: Any) -> tuple[object, ...]:
    flags = token.single_word, token.lstrip, token.rstrip, token.normalized, token.special
    return token.content, *flags
