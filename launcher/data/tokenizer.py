"""Text into token ids."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import signal
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.errors import RecipeError
from launcher.recipe.hub import model_folder

Ids = npt.NDArray[np.int32]

_TOKENIZER_FILES = (".json", ".txt", ".model", ".tiktoken", ".vocab", ".bpe", ".jinja")
_BYTES_IDENTITY = "bytes 66c407729331c690d5ec7918bdbd26f273781ae6971d60fe1590e6d778295bde"
"""Of the ids and the chat template in byte_tokenizer.py; part of the names of stores."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    begin: list[int] = []  # noqa: RUF012
    end = 256

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32) for text in texts]

    as_inference = ids


class HuggingFaceTokenizer:
    """A tokenizer of transformers."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.tokenizer = hugging_face_tokenizer(name)
        bos = self.tokenizer.bos_token_id
        # Documents get a begin-of-text token (Llama's <|begin_of_text|>), but no [CLS]
        begins = bos is not None and self.tokenizer("a")["input_ids"][:1] == [bos]
        self.begin: list[int] = [bos] if begins else []
        """Begins a document."""

    @property
    def end(self) -> int:
        """Ends a document. Raises RecipeError if there is no such token."""
        if self.tokenizer.eos_token_id is None:
            raise RecipeError(
                f"data.tokenizer: {self._name}: has no end-of-text token (eos_token), which ends "
                "each document"
            )
        return int(self.tokenizer.eos_token_id)

    def ids(self, texts: Sequence[str]) -> list[Ids]:
        """Each text's ids, without special tokens."""
        return self._call(texts, add_special_tokens=False)

    def as_inference(self, texts: Sequence[str]) -> list[Ids]:
        """Each text's ids, with the special tokens that the tokenizer adds by default."""
        return self._call(texts, add_special_tokens=True)

    def _call(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[Ids]:
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts),
            add_special_tokens=add_special_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )
        return [np.array(ids, dtype=np.int32) for ids in encoded["input_ids"]]


Tokenizer = ByteTokenizer | HuggingFaceTokenizer


def hugging_face_tokenizer(name: str) -> Any:
    """The transformers tokenizer of a folder, a hub id or `bytes`. Raises RecipeError if none."""
    if name == "bytes":
        from launcher.data.byte_tokenizer import hugging_face_byte_tokenizer

        return hugging_face_byte_tokenizer()
    from transformers import AutoTokenizer

    folder = model_folder(name, key="data.tokenizer", weights=False)
    try:
        return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # broken files raise many classes
        known = isinstance(error, (OSError, ValueError))
        what = (str(error).splitlines() or [""])[0] if known else repr(error)
        raise RecipeError(f"data.tokenizer: {name}: no tokenizer could be loaded: {what}") from None


@functools.lru_cache(maxsize=4)
def load_tokenizer(name: str) -> Tokenizer:
    """The tokenizer `bytes`, or that of a folder or hub id. Cached: loading takes a second."""
    # Its threads do not survive a fork, and each process forked later would print a warning
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return ByteTokenizer() if name == "bytes" else HuggingFaceTokenizer(name)


def tokenizer_identity(name: str) -> str:
    """Changes whenever the ids of a text could. Reads the tokenizer's files without loading it."""
    if name == "bytes":
        return _BYTES_IDENTITY
    digest = hashlib.sha256()
    for file in sorted(model_folder(name, key="data.tokenizer", weights=False).iterdir()):
        wanted = file.suffix in _TOKENIZER_FILES and not file.name.endswith(".index.json")
        if wanted and file.is_file():
            content = file.read_bytes()
            digest.update(json.dumps([file.name, len(content)]).encode() + content)
    return digest.hexdigest()


def prepare_worker_process() -> None:
    """For a process that a rank starts: it ignores requests to stop the rank, and tokenizes with
    one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
