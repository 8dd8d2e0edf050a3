"""Text into token ids."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from launcher.data.tokenizer_json import TOKENIZER, open_tokenizer, read_json
from launcher.distributed.child_stacks import offer_stack
from launcher.distributed.spawn import end_with_parent
from launcher.errors import RecipeError, first_line
from launcher.libraries.families import MISTRAL_TOKENIZERS
from launcher.recipe import schema
from launcher.sources.hub import CHAT_TEMPLATE, NAMED_TEMPLATES, model_folder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = npt.NDArray[np.int32]

logger = logging.getLogger(__name__)

_TOKENIZER_FILES = (".json", ".txt", ".model", ".tiktoken", ".vocab", ".bpe", ".jinja")
_NOT_READ = (
    ".index.json",
    "generation_config.json",
    "processor_config.json",
    "adapter_config.json",
)
"""Ends of names of such files that no tokenizer reads."""
_KEYS_OF_CONFIG = ("model_type", "model_name", "_name_or_path", "tokenizer_class", "auto_map",
                   "transformers_version")  # fmt: skip
"""What transformers reads of config.json to choose the class of a tokenizer. Code of a tokenizer may
read more."""
_BYTES_IDENTITY = "bytes 66c407729331c690d5ec7918bdbd26f273781ae6971d60fe1590e6d778295bde"
"""Checksum of the byte tokenizer's ids and chat template; part of the names of stores."""
_SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Of the byte tokenizer: 256 ends a document and a turn, 257 to 259 start a turn."""
_CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role not in ["system", "user", "assistant"] -%}
        {{- raise_exception("a role must be system, user or assistant; got " ~ message.role) -}}
    {%- endif -%}
    {{- "<|" ~ message.role ~ "|>" -}}
    {%- if message.role == "assistant" -%}
        {%- generation -%}{{- message.content ~ "<|end|>" -}}{%- endgeneration -%}
    {%- else -%}
        {{- message.content ~ "<|end|>" -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


class ExtendedName(str):
    """The name of a tokenizer that gains tokens (model.new_tokens), or whose own Python code may
    run (model.trust_remote_code)."""

    tokens: tuple[str, ...]
    trusted: bool

    def __new__(
        cls, name: str, tokens: tuple[str, ...] = (), trusted: bool = False
    ) -> ExtendedName:
        made = super().__new__(cls, name)
        made.tokens, made.trusted = tokens, trusted
        return made

    @property
    def without_tokens(self) -> str:
        """The name of the tokenizer before it gains tokens."""
        return ExtendedName(str(self), trusted=True) if self.trusted else str(self)

    def __getnewargs__(self) -> tuple[str, tuple[str, ...], bool]:  # type: ignore[override]
        return str(self), self.tokens, self.trusted

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExtendedName) and self.__getnewargs__() == other.__getnewargs__()

    def __hash__(self) -> int:
        return hash(self.__getnewargs__())


def tokenizer_name(data: schema.Data, model: schema.Model) -> str | None:
    """data.tokenizer, or the model's, with model.new_tokens; None without a tokenizer.

    model.trust_remote_code is about the code in model.path, and about no other tokenizer."""
    name = data.tokenizer or model.path
    trusted = model.trust_remote_code and name == model.path
    if name is None or not (model.new_tokens or trusted):
        return name
    return ExtendedName(name, model.new_tokens or (), trusted)


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    begin: list[int] = []  # noqa: RUF012
    end = 256
    separates_pairs = False

    def ids(
        self, texts: Sequence[str], *, special: bool = False, longest: int | None = None
    ) -> list[Ids]:
        """Each text's ids, cut to `longest` tokens."""
        encoded = (np.frombuffer(text.encode(), dtype=np.uint8) for text in texts)
        return [ids[:longest].astype(np.int32) for ids in encoded]

    def pairs(self, pairs: Sequence[tuple[str, str]], *, longest: int | None = None) -> list[Ids]:
        """See `HuggingFaceTokenizer`."""
        raise TypeError("there is no token between two texts")

    def joined(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Ids, int]]:
        """Each pair of texts as one, and the index of the second one's first token."""
        whole = self.ids(["".join(pair) for pair in pairs])
        return [(ids, len(first.encode())) for ids, (first, _) in zip(whole, pairs, strict=True)]


class HuggingFaceTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.tokenizer = hugging_face_tokenizer(name)
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if eos is None:  # of an encoder, such as BERT
            bos, eos = self.tokenizer.cls_token_id, self.tokenizer.sep_token_id
        self._end: int | None = eos
        # Documents get a begin-of-text token (Llama's <|begin_of_text|>)
        begins = bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos]
        self.begin: list[int] = [bos] if begins else []

    @property
    def end(self) -> int:
        """Ends a document. Raises RecipeError if there is no such token."""
        if self._end is None:
            what = "has no end-of-text token (eos_token), which ends each document"
            raise RecipeError(f"data.tokenizer: {self._name}: {what}")
        return self._end

    def ids(
        self, texts: Sequence[str], *, special: bool = False, longest: int | None = None
    ) -> list[Ids]:
        """Each text's ids. special: with the tokens that the tokenizer adds at inference. longest:
        tokens to which it cuts a text."""
        options: dict[str, Any] = {} if longest is None else {"max_length": longest}
        encoded = self._encode(texts, special=special, truncation=longest is not None, **options)
        return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    @property
    def separates_pairs(self) -> bool:
        """Whether it has a form for two texts, with a token between them."""
        count = self.tokenizer.num_special_tokens_to_add
        return bool(count(pair=True) > count(pair=False))

    def pairs(self, pairs: Sequence[tuple[str, str]], *, longest: int | None = None) -> list[Ids]:
        """The ids of each pair of texts in this form. longest: tokens to which a pair is cut, the longer
        text first; None: it is whole."""
        both = [list(texts) for texts in zip(*pairs, strict=True)] if pairs else [[], []]
        encoded = self.tokenizer(
            *both,
            truncation=longest is not None,
            max_length=longest,
            verbose=False,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]

    def joined(self, pairs: Sequence[tuple[str, str]]) -> list[tuple[Ids, int]]:
        """Each pair of texts as one, and the index of the first token with a part of the second."""
        texts = ["".join(pair) for pair in pairs]
        if not self.tokenizer.is_fast:  # no offsets: the prompt ends where the tokens differ
            both = zip(self.ids(texts), self.ids([first for first, _ in pairs]), strict=True)
            return [(ids, _common(ids, alone)) for ids, alone in both]
        encoded = self._encode(texts, return_offsets_mapping=True)
        joined = []
        rows = zip(encoded["input_ids"], encoded["offset_mapping"], pairs, strict=True)
        for ids, offsets, (first, _) in rows:
            ends = np.maximum.accumulate([end for _, end in offsets])
            index = int(np.searchsorted(ends, len(first), side="right"))
            joined.append((np.array(ids, dtype=np.int32), index))
        return joined

    def _encode(self, texts: Sequence[str], *, special: bool = False, **options: Any) -> Any:
        options |= {"return_attention_mask": False, "return_token_type_ids": False}
        return self.tokenizer(list(texts), add_special_tokens=special, verbose=False, **options)


def _common(ids: Ids, others: Ids) -> int:
    """Number of equal tokens at the beginning."""
    most = min(len(ids), len(others))
    different = np.flatnonzero(ids[:most] != others[:most])
    return int(different[0]) if len(different) else most


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def hugging_face_byte_tokenizer() -> PreTrainedTokenizerBase:
    """Ids 0 to 255 are the bytes of UTF-8, as in ByteTokenizer; 256 to 259 are special tokens.

    The chat template marks the assistant's text and the end of its turn as generated.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # A byte-level vocabulary writes each byte as a character: a printable byte as itself, the
    # others as U+0100 onwards. There are no merges, so nothing else is in it.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable}
    vocabulary |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in _SPECIAL_TOKENS]
    )
    end, *roles = _SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=end,
        additional_special_tokens=roles,
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )


@functools.lru_cache(maxsize=4)
def hugging_face_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """The transformers tokenizer of a folder, a hub id or `bytes`. Raises RecipeError if there is
    none, or if it cannot gain the tokens of an ExtendedName."""
    trusted = isinstance(name, ExtendedName) and name.trusted
    if isinstance(name, ExtendedName) and name.tokens:
        return _extended(copy.deepcopy(hugging_face_tokenizer(name.without_tokens)), name)
    if name == "bytes":
        return hugging_face_byte_tokenizer()
    folder = model_folder(name, key="data.tokenizer", weights=False)
    try:
        content = read_json(folder / TOKENIZER)
        fix = _fix_of_mistral(folder, content)
        tokenizer = open_tokenizer(folder, content, trusted=trusted, **fix)
        tokenizer.corrected = fix.get("fix_mistral_regex", False)
        if not tokenizer.chat_template:  # where processors keep theirs
            tokenizer.chat_template = read_json(folder / CHAT_TEMPLATE).get("chat_template")
        return cast("PreTrainedTokenizerBase", tokenizer)
    except Exception as error:  # broken files raise many classes
        what = first_line(error)
        if "trust_remote_code" in str(error):
            what = "it needs its own Python code, which is not run by default: if you have read it "
            what += "and trust it, set model.trust_remote_code=true, which holds for model.path"
        raise RecipeError(f"data.tokenizer: {name}: no tokenizer could be loaded: {what}") from None


def _fix_of_mistral(folder: Path, tokenizer: dict[str, Any]) -> dict[str, bool]:
    """transformers' option for tokenizers of Mistral that older versions stored with Llama 3's
    pattern: they split words otherwise than the model learned. Their older tokenizers have no
    pattern, and the option would break them."""
    config = read_json(folder / "config.json")
    major = str(config.get("transformers_version") or "0").partition(".")[0]
    if config.get("model_type") not in MISTRAL_TOKENIZERS or (major.isdigit() and int(major) >= 5):
        return {}
    splitters = (tokenizer.get("pre_tokenizer") or {}).get("pretokenizers") or [{}]
    vocabulary = (tokenizer.get("model") or {}).get("vocab") or ()
    # transformers, too, corrects only tokenizers of this size
    wrong = len(vocabulary) > 100_000 and "(?i:'s|'t|" in json.dumps(splitters[0].get("pattern"))
    if wrong:
        logger.info(f"data.tokenizer: {folder}: Llama 3's pattern is replaced by Mistral's")
    return {"fix_mistral_regex": wrong}


def _extended(tokenizer: PreTrainedTokenizerBase, name: ExtendedName) -> PreTrainedTokenizerBase:
    """Adds the tokens, which are found in a text as it is, before it is normalized. Those of the
    form `<|...|>` are special tokens: they may end turns, and decoded answers do not show them."""
    from transformers import AddedToken

    known = tokenizer.get_vocab()
    problems = [
        f"{token} is token {known[token]} of the tokenizer {name} already; leave it out"
        for token in name.tokens
        if token in known
    ]
    if not problems:
        for token in name.tokens:
            markup = token.startswith("<|") and token.endswith("|>")  # as in Llama 3 and Qwen
            tokenizer.add_tokens(AddedToken(token, normalized=False, special=markup))
        ids = tokenizer.convert_tokens_to_ids(list(name.tokens))
        first = max(known.values()) + 1
        problems = [
            f"{token}: the tokenizer {name} cannot gain it: it makes it {tokenizer.tokenize(token)}"
            for index, token in enumerate(name.tokens)
            if tokenizer(token, add_special_tokens=False)["input_ids"] != [ids[index]]
            or ids[index] != first + index
        ]
    if problems:
        raise RecipeError([f"model.new_tokens: {problem}" for problem in problems])
    return tokenizer


def new_token_ids(name: str | None) -> range:
    """The ids of the tokens that a tokenizer gains."""
    if not isinstance(name, ExtendedName) or not name.tokens:
        return range(0)
    ids = hugging_face_tokenizer(name).convert_tokens_to_ids(list(name.tokens))
    return range(ids[0], ids[-1] + 1)


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str | None) -> Tokenizer:
    """The tokenizer of a folder, a hub id or `bytes`. Raises RecipeError if there is none."""
    assert name is not None
    # Threads of tokenizers do not survive a fork, and each forked process would print a warning
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def tokenizer_identity(name: str) -> str:
    """Changes whenever the ids of a text could. Reads the tokenizer's files without loading it."""
    if isinstance(name, ExtendedName) and name.tokens:
        both = json.dumps([tokenizer_identity(name.without_tokens), name.tokens])
        return hashlib.sha256(both.encode()).hexdigest()
    if name == "bytes":
        return _BYTES_IDENTITY
    digest = hashlib.sha256()
    for file_name, content in _tokenizer_files(name):
        digest.update(json.dumps([file_name, len(content)]).encode() + content)
    return digest.hexdigest()


def prints_date(name: str) -> bool:
    """Whether a chat template of the tokenizer prints today's date. Loads no tokenizer."""
    return str(name) != "bytes" and any(
        b"strftime_now(" in text for _, text in _tokenizer_files(name)
    )


ALPACA_TEMPLATE = """\
{%- for message in messages -%}
    {%- if message.role == "system" -%}
        {{- message.content ~ "\\n\\n" -}}
    {%- elif message.role == "user" -%}
        {{- "### Instruction:\\n" ~ message.content ~ "\\n\\n### Response:\\n" -}}
    {%- elif message.role == "assistant" -%}
        {{- message.content ~ (eos_token if loop.last else "\\n\\n") -}}
    {%- endif -%}
{%- endfor -%}
"""
"""Writes what kind instruct trains as text where the prompt is an instruction."""


def has_chat_template(name: str) -> bool:
    """Whether the tokenizer has a chat template. Loads no tokenizer."""
    return str(name) == "bytes" or any(True for _ in _chat_templates(name))


def has_alpaca_template(name: str) -> bool:
    """Whether the tokenizer is that of an export of a model that was trained on texts with Alpaca's
    headings. Loads no tokenizer."""
    if str(name) == "bytes":
        return False
    end = ALPACA_TEMPLATE.strip()
    return any(str(template).strip().endswith(end) for template in _chat_templates(name))


def _chat_templates(name: str) -> Iterator[object]:
    """The chat templates in the files of a tokenizer: texts, or lists of named ones."""
    for file, content in _tokenizer_files(name):
        if file.endswith(".jinja"):
            yield content.decode(errors="replace")
        elif file in ("tokenizer_config.json", CHAT_TEMPLATE):
            try:
                config = json.loads(content)
            except ValueError:  # reported when the tokenizer is loaded
                continue
            if isinstance(config, dict) and config.get("chat_template"):
                yield config["chat_template"]


def _tokenizer_files(name: str) -> Iterator[tuple[str, bytes]]:
    """Names and contents of a tokenizer's files, with its named chat templates."""
    folder = model_folder(name, key="data.tokenizer", weights=False)
    code = (".py",) if isinstance(name, ExtendedName) and name.trusted else ()
    for file in sorted([*folder.iterdir(), *folder.glob(f"{NAMED_TEMPLATES}/*.jinja")]):
        if file.suffix not in (*_TOKENIZER_FILES, *code) or file.name.endswith(_NOT_READ):
            continue
        content = file.read_bytes()
        if file.name == "config.json" and not code:
            known = read_json(file)
            content = json.dumps({key: known.get(key) for key in _KEYS_OF_CONFIG}).encode()
        yield str(file.relative_to(folder)), content


def prepare_worker_process(worker: int) -> None:
    """In a loader process: ignores requests to stop the rank, ends with it, and tokenizes in one
    thread."""
    for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        end_with_parent(parent.pid)
    offer_stack()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
