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

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
Json = dict[str, Any]

PARTS = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
"""What tokenizer.json has beside its model and its tokens."""
_OF_TOKENS = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
"""Keys of a token of tokenizer.json, beside its id."""
_NO_MODEL = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
_SETTINGS_OF_MODELS = (
    *("unk_token", "continuing_subword_prefix", "end_of_word_suffix", "max_input_chars_per_word"),
    *("dropout", "fuse_unk", "byte_fallback", "ignore_merges"),
)
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


def open_tokenizer(folder: Path, content: Json, *, trusted: bool, **options: Any) -> Any:
    """The tokenizer of transformers in a folder, with the ids of its `tokenizer.json`, whose content
    is given; empty: there is none.

    The class is the one that `tokenizer_config.json` names, else that of the model's type. What the
    file says about a text holds, and a line says where transformers reads it otherwise. Of
    `tokenizer_config.json` the tokens count, and the settings that transformers 4 applies to the
    file where they are given: add_bos_token and add_eos_token of Llama's classes, add_prefix_space,
    and those of BERT's normalizer.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    config = read_json(folder / CONFIG)
    with_code = "auto_map" in config
    own = bool(content) and not (with_code and trusted)
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
        before = _readings(tokenizer)
        _use_file(tokenizer, folder / TOKENIZER, content)
        _apply_settings(tokenizer, config)
        if _readings(tokenizer) != before:
            name = type(tokenizer).__name__
            what = f"transformers' {name} reads text otherwise; the file decides"
            logger.info(f"data.tokenizer: {folder / TOKENIZER}: {what}")
    return tokenizer


def transformers_reads_alike(folder: Path, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether transformers by itself makes the ids of `tokenizer` from the files in a folder, of a
    sample of text."""
    from transformers import AutoTokenizer

    try:
        other = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception:  # its class cannot be built from the vocabulary
        return False
    return _readings(other) == _readings(tokenizer)


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


def _readings(tokenizer: Any) -> list[object]:
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


def _use_file(tokenizer: Any, file: Path, content: Json) -> None:
    """Gives the tokenizer what its file holds, if it has anything else. The tokens that transformers
    added stay.

    The vocabulary is not read from the file again where transformers took it over: for 262,000
    tokens that would double the time of opening.
    """
    from tokenizers import AddedToken, Tokenizer

    backend = tokenizer.backend_tokenizer
    tokens = {entry["id"]: entry for entry in content.get("added_tokens") or ()}
    own = Tokenizer.from_str(json.dumps({**content, "added_tokens": [], "model": _NO_MODEL}))
    parts = [part for part in PARTS if part != "post_processor" or own.post_processor is not None]
    added = backend.get_added_tokens_decoder()
    same_model = _has_model(backend, content.get("model") or {})
    if (
        same_model
        and all(_state(backend, part) == _state(own, part) for part in parts)
        and all(id in added and entry_of(id, added[id]) == tokens[id] for id in tokens)
    ):
        return
    model = backend.model if same_model else Tokenizer.from_file(str(file)).model
    backend.__setstate__(own.__getstate__())  # also forgets the tokens
    backend.model = model
    backend.encode_special_tokens = tokenizer.split_special_tokens
    backend.add_tokens(
        [AddedToken(**{key: entry[key] for key in _OF_TOKENS}) for entry in tokens.values()]
    )
    known = {entry["content"] for entry in tokens.values()}
    more = [token for _, token in sorted(added.items()) if token.content not in known]
    tokenizer.add_tokens(more)


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


def _has_model(backend: Any, model: Json) -> bool:
    """Whether a tokenizer has the model of a file. Of a large vocabulary some tokens are compared:
    classes that add tokens of their own move the ids of all others. transformers takes over merges
    and scores with the vocabulary."""
    own = backend.model
    if type(own).__name__ != model.get("type"):
        return False
    if model["type"] == "Unigram":  # its settings have no attributes
        state = json.loads(own.__getstate__())
        return all(value == model.get(key, False) for key, value in state.items())
    tokens = [*model["vocab"].items()]
    some = [*tokens[:1000], *tokens[1000:-100:64], *tokens[-100:]]
    return (
        len(tokens) == backend.get_vocab_size(with_added_tokens=False)
        and all(own.token_to_id(token) == id for token, id in some)
        and all(
            (getattr(own, key, None) or None) == (model.get(key) or None)
            for key in _SETTINGS_OF_MODELS
        )
    )


def _state(backend: Any, part: str) -> object:
    """What a part of a tokenizer does, as JSON; None: there is no such part."""
    if (value := getattr(backend, part)) is None:
        return None
    return _without(json.loads(value.__getstate__()), _WITHOUT_EFFECT.get(part, ()))


def _without(state: object, keys: tuple[str, ...]) -> object:
    if isinstance(state, dict):
        return {key: _without(value, keys) for key, value in state.items() if key not in keys}
    return [_without(each, keys) for each in state] if isinstance(state, list) else state


def entry_of(id: int, token: Any) -> Json:
    """An added token in the form of tokenizer.json."""
    return {"id": id, **{key: getattr(token, key) for key in _OF_TOKENS}}
