"""Attachments: what rows have beside text, such as images and videos.

A token store has one table of them. What a kind of attachments must know is in `data/modality.py`.
"""

from __future__ import annotations

import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from launcher.errors import RowError
from launcher.files import checksum_of
from launcher.sources.layouts import ATTACHMENTS, with_article

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

ATTACHMENT = np.dtype(
    [
        ("kind", "u1"),
        ("first", "<i8"),
        ("end", "<i8"),
        ("begin", "<i8"),
        ("size", "<i8"),
        ("checksum", "<u8"),
        ("is_file", "?"),
        ("meta", "<i4", (4,)),
    ]
)
"""An attachment of a store: the number of its kind in ATTACHMENTS; its first token and the end of its
tokens; where its data begins in `attachment_data`, and the bytes of this; the checksum of its file;
whether the data is the path of the file or the file; and what its kind notes, or zeros."""
Attachments = tuple[npt.NDArray[Any], bytes]
"""The attachments of a document, of the type ATTACHMENT, counted from its first token, and their
data."""
_LONGEST_NAME = 300
"""Characters of a path in a message."""


@dataclass(frozen=True)
class Source(ABC):
    """The bytes of an attachment's file, or the path of the file."""

    data: bytes
    is_file: bool = False
    kind: ClassVar[str]
    """See `Modality`."""
    most_bytes: ClassVar[int] = 256 << 20
    """Bytes of the largest file."""

    @property
    def name(self) -> str:
        """For messages: without control characters, and of a long path the end."""
        if not self.is_file:
            return f"{with_article(self.kind)} in the row"
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in self.data.decode())
        return shown if len(shown) <= _LONGEST_NAME else f"...{shown[-_LONGEST_NAME:]}"

    def read(self) -> bytes:
        """The bytes of the file. Raises RowError."""
        if not self.is_file:
            return self.data
        path = Path(self.data.decode())
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise RowError(f"{self.name}: is not a file")
            if status.st_size > self.most_bytes:
                what = f"the file has {status.st_size:,} bytes, more than {self.most_bytes:,}"
                raise RowError(f"{self.name}: {what}")
            return path.read_bytes()
        except RowError:
            raise
        except FileNotFoundError:
            folder = f"{ATTACHMENTS[self.kind]}.folder"
            what = f"no such file; {folder} is where relative paths start, by default the"
            raise RowError(f"{self.name}: {what} folder of the row's file") from None
        except (OSError, ValueError) as error:  # ValueError: a null byte
            problem = error.strerror if isinstance(error, OSError) else None
            raise RowError(f"{self.name}: cannot be read: {problem or error}") from None

    def checksum(self, content: bytes) -> int:
        """A checksum of what `read` has returned."""
        return int(checksum_of([content])[:16], 16)

    @abstractmethod
    def shown(self, tokens: int, meta: Sequence[int]) -> tuple[str, Picture]:
        """A line about an attachment of this file with so many tokens, and a picture of it. Raises
        RowError."""


@dataclass(frozen=True)
class Attachment:
    """An attachment of a token store."""

    first: int
    """Its first token in the store."""
    end: int
    source: Source
    checksum: int
    """Of its file, when its row was tokenized."""
    meta: tuple[int, ...]
    """What its kind notes."""

    @property
    def kind(self) -> str:
        """See `Modality`."""
        return self.source.kind

    @property
    def name(self) -> str:
        """For messages."""
        return self.source.name

    def shown(self) -> tuple[str, Picture]:
        """See `Source`."""
        return self.source.shown(self.end - self.first, self.meta)


class Placed(NamedTuple):
    """An attachment of a conversation, in whose text its tokens stand."""

    tokens: int
    """The number of its tokens."""
    source: Source
    checksum: int
    """Of its file."""
    meta: tuple[int, ...]
    """What its kind notes."""
    start: int = 0
    """Where its text begins in that of the conversation."""


def attachment_table(placed: Iterable[tuple[Placed, int, int]]) -> Attachments:
    """The attachments of a document, each with its first token and the one after its last."""
    records, data = list[Any](), b""
    for one, first, end in placed:
        source, meta = one.source, (*one.meta, 0, 0, 0, 0)[:4]
        kind = [*ATTACHMENTS].index(source.kind)
        place = kind, first, end, len(data), len(source.data)
        records.append((*place, one.checksum, source.is_file, meta))
        data += source.data
    return np.array(records, dtype=ATTACHMENT), data


def join_attachments(
    documents: Sequence[Attachments | None], starts: Sequence[int]
) -> Attachments | None:
    """The attachments of documents that begin at these tokens, as of one; None: there are none."""
    tables, data, begin = [], [], 0
    for attachments, start in zip(documents, starts, strict=True):
        if attachments is not None and len(attachments[0]):
            tables.append(moved_attachments(attachments[0], start, begin))
            data.append(attachments[1])
            begin += len(attachments[1])
    return (np.concatenate(tables), b"".join(data)) if tables else None


def moved_attachments(table: npt.NDArray[Any], tokens: int, begin: int) -> npt.NDArray[Any]:
    """The attachments after so many tokens and so many bytes of data of others."""
    made = table.copy()
    made["first"] += tokens
    made["end"] += tokens
    made["begin"] += begin
    return made
