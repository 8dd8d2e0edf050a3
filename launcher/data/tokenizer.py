"""Text into token ids."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from launcher.errors import RecipeError

_TOKENIZER_FILES = (".json", ".txt", ".model", ".tiktoken", ".vocab", ".bpe")
"""What a tokenizer may be made of: merges.txt and spiece.model as well as tokenizer.json."""


class Tokenizer(Protocol):
    """A document into ids, its end marked."""

    identity: str
    """Changes whenever the ids of a text could."""

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of a document, the end-of-document token last."""


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and 256 for the end of a document."""

    identity = "bytes"
    end = 256

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The bytes of the text and the end-of-document id."""
        data = np.frombuffer(text.encode(), dtype=np.uint8)
        return np.append(data.astype(np.int32), np.int32(self.end))


class FolderTokenizer:
    """A Hugging Face tokenizer from a folder, its own end-of-text token after each document."""

    def __init__(self, folder: str) -> None:
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except Exception as error:  # whatever a broken file makes it raise: the folder came from the user
            what = (str(error).splitlines() or [""])[0] if isinstance(error, (OSError, ValueError)) else repr(error)
            raise RecipeError(f"data.tokenizer: {folder}: no tokenizer could be loaded: {what}") from None
        if self._tokenizer.eos_token_id is None:
            raise RecipeError(f"data.tokenizer: {folder}: has no end-of-text token (eos_token), which ends each document")
        digest = hashlib.sha256()
        for file in sorted(Path(folder).iterdir()):
            if file.is_file() and file.suffix in _TOKENIZER_FILES:
                digest.update(file.name.encode() + file.read_bytes())
        self.identity = digest.hexdigest()

    def encode(self, text: str) -> npt.NDArray[np.int32]:
        """The ids of the text, without special tokens but the end of text."""
        ids = self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return np.array([*ids, self._tokenizer.eos_token_id], dtype=np.int32)


def load_tokenizer(name: str) -> Tokenizer:
    """`bytes`, or a folder with a Hugging Face tokenizer."""
    return ByteTokenizer() if name == "bytes" else FolderTokenizer(name)
