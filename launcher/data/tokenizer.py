"""Text into token ids."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from launcher.errors import RecipeError
from launcher.recipe.hub import model_folder

Ids = npt.NDArray[np.int32]

_TOKENIZER_FILES = (".json", ".txt", ".model", ".tiktoken", ".vocab", ".bpe", ".jinja")
"""What a tokenizer may be made of: merges.txt, spiece.model and chat_template.jinja as well as tokenizer.json."""


class Tokenizer(Protocol):
    """Texts into ids. Documents are `begin`, `ids`, `end`."""

    begin: list[int]
    """What it puts in front of a text by itself (Llama's <|begin_of_text|>); most put nothing."""

    @property
    def end(self) -> int:
        """The end-of-text token. Raises RecipeError where it has none."""

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Each text's ids, without special tokens."""

    def as_inference(self, texts: Sequence[str]) -> list[Ids]:
        """Each text's ids as calling the tokenizer gives them, with the special tokens it adds by itself."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    begin: list[int] = []  # noqa: RUF012
    end = 256

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """The bytes of each text."""
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    as_inference = ids


class HuggingFaceTokenizer:
    """A Hugging Face tokenizer."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.tokenizer = hugging_face_tokenizer(name)
        bos = self.tokenizer.bos_token_id
        # Of what some tokenizers put in front, [CLS] say, only a begin-of-text is part of a document.
        self.begin = (
            [bos] if bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos] else []
        )

    @property
    def end(self) -> int:
        """The tokenizer's eos_token."""
        if self.tokenizer.eos_token_id is None:
            raise RecipeError(
                f"data.tokenizer: {self._name}: has no end-of-text token (eos_token), which ends each document"
            )
        return int(self.tokenizer.eos_token_id)

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Each text's ids; a batch is tokenized in threads, unless TOKENIZERS_PARALLELISM says no."""
        return self._call(texts, add_special_tokens=False)

    def as_inference(self, texts: Sequence[str]) -> list[Ids]:
        """With [CLS], begin of text, or whatever the tokenizer adds."""
        return self._call(texts, add_special_tokens=True)

    def _call(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Ids]:
        if not texts:
            return []
        found = self.tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.array(ids, dtype=np.int32) for ids in found["input_ids"]]


def hugging_face_tokenizer(name: str) -> Any:
    """The transformers tokenizer (PreTrainedTokenizerBase) of a folder or hub id, or that of `bytes`.

    Raises RecipeError where there is none.
    """
    if name == "bytes":
        import importlib

        return importlib.import_module("launcher.data.byte_tokenizer").hugging_face_byte_tokenizer()
    from transformers import AutoTokenizer

    folder = model_folder(name, key="data.tokenizer", weights=False)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (
        Exception
    ) as error:  # whatever a broken file makes it raise: the folder came from the user
        what = (
            (str(error).splitlines() or [""])[0]
            if isinstance(error, (OSError, ValueError))
            else repr(error)
        )
        raise RecipeError(f"data.tokenizer: {name}: no tokenizer could be loaded: {what}") from None
    return tokenizer


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, a folder with a Hugging Face tokenizer, or a hub id. Kept for the process: loading takes a second."""
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def tokenizer_identity(name: str) -> str:
    """Changes whenever the ids of a text could. Reads the tokenizer's files, and does not load it."""
    if name == "bytes":
        source = Path(__file__).with_name("byte_tokenizer.py")  # its chat template and special ids
        return "bytes " + (
            hashlib.sha256(source.read_bytes()).hexdigest() if source.exists() else ""
        )
    digest = hashlib.sha256()
    for file in sorted(model_folder(name, key="data.tokenizer", weights=False).iterdir()):
        if (
            file.is_file()
            and file.suffix in _TOKENIZER_FILES
            and not file.name.endswith(".index.json")
        ):
            content = file.read_bytes()
            digest.update(json.dumps([file.name, len(content)]).encode() + content)
    return digest.hexdigest()
