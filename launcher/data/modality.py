"""What a kind of attachments must know: where it is in rows, and what models take of it.

`MODALITIES` (`data/attachment_inputs.py`) lists the kinds, such as `data/images.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from launcher.data.attachments import Attachment, Source
from launcher.data.coordinates import Located
from launcher.data.messages import Message
from launcher.sources.layouts import ATTACHMENTS
from launcher.sources.location import Location

if TYPE_CHECKING:
    from launcher.data.chat_template import Rendered
    from launcher.data.image_processor import AttachmentProcessor
    from launcher.models.tower_inputs import TowerInputs

Arrays = dict[str, npt.NDArray[Any]]
"""What a model takes of an attachment, by the names of its arguments. The first dimension counts
attachments, or parts of them."""


@dataclass(frozen=True)
class Modality(ABC):
    """A kind of attachments, with what a recipe says of it, and how a model takes it."""

    kind: ClassVar[str]
    """What an attachment is called, and the type of its part of a message: `image`."""
    source: ClassVar[type[Source]]
    refused_keys: ClassVar[Mapping[str, str]] = {}
    """Keys of parts that are not read, each with what is set in its place."""
    beginnings: ClassVar[tuple[str, ...]] = ()
    """How files of this kind begin in base64."""
    example: ClassVar[str]
    """The name of a file, for messages."""
    token_type: ClassVar[int]
    """What marks its tokens in the argument of transformers that says which tokens are attachments."""
    processor: str
    """The folder or hub id of the model, with its processor."""
    folder: str | None = None
    """Where relative paths start. None: at the folder of the row's file."""
    tower: TowerInputs | None = None
    """How the host makes the inputs of the model's tower; None: it takes the processor's arrays, or
    there is no model."""

    @property
    def nouns(self) -> str:
        """Several attachments, their section of a recipe, and the role of their column."""
        return ATTACHMENTS[self.kind]

    @classmethod
    @abstractmethod
    def of(cls, section: Any, model: str) -> Self:
        """As a section of a recipe says; None: without it. model: model.path."""

    def of_file(self, name: str) -> Self:
        """The same for the rows of a file, with its `folder`."""
        return self if self.folder is not None else replace(self, folder=Location(name).parent.name)

    @abstractmethod
    def identity(self) -> list[object]:
        """Changes when the tokens of an attachment, or what a model takes of it, could."""

    @property
    @abstractmethod
    def loaded(self) -> AttachmentProcessor:
        """The processor of this process. Raises RecipeError if there is none."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens that stand for an attachment, and those between its parts."""
        return self.loaded.token_ids

    @abstractmethod
    def limit_files(self, files: dict[str, dict[str, Any]]) -> None:
        """Writes what the recipe says of attachments into the contents of the processor's files, by
        their names: an exported model should see attachments as it was trained on them."""

    @classmethod
    @abstractmethod
    def of_export(cls, folder: Path, base: str | None) -> Self:
        """As of an exported model. base: that of an adapter."""

    def check(self, text: str, count: int, kinds: Collection[str]) -> None:
        """Raises RowError if the text of a conversation does not hold the placeholders of this number
        of attachments, or holds other tokens that stand for attachments. kinds: those that rows may
        have."""
        self.loaded.check(text, count, kinds)

    def expand(self, rendered: Rendered, sources: list[Any]) -> Rendered:
        """The conversation with the text of its attachments of this kind in the place of their
        placeholders, and with these. Raises RowError."""
        return self.loaded.expand(rendered, sources)

    def notes(self, found: Located) -> list[str]:
        """What to say at the start of the coordinates in the texts of rows."""
        return []

    @abstractmethod
    def example_arrays(self) -> Arrays:
        """What a model takes of an attachment that is larger than the limits of most processors."""

    @abstractmethod
    def message_part(self, path: str) -> tuple[Message, str]:
        """The part of a message that shows a file, and a line about it. Raises RowError."""

    def file_of(self, value: Any) -> bytes | None:
        """The bytes of the file of an object of another library; None: it is not of this kind."""
        return None

    @property
    def pixel_table(self) -> npt.NDArray[np.float32] | None:
        """The value of each byte, by which the device normalizes arrays in bytes; None: they are
        normalized."""
        return None if self.tower is None else self.loaded.pixel_table

    @property
    def blank(self) -> Arrays:
        """The arrays of a small attachment, for micro-batches without one."""
        in_bytes = self.pixel_table is not None
        return self.loaded.blank_in_bytes if in_bytes else self.loaded.blank

    def load(self, attachment: Attachment) -> Arrays:
        """What the model takes of an attachment. Raises RowError."""
        in_bytes, checksum = self.pixel_table is not None, attachment.checksum
        return self.loaded.read(attachment.source, in_bytes=in_bytes, checksum=checksum)[0].arrays

    def join(self, attachments: list[Arrays]) -> Arrays:
        """The arrays of several attachments."""
        return self.loaded.join(attachments)

    def grid(self, meta: Sequence[int], ids: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], int]:
        """The positions of its tokens in time, height and width, (3, tokens), from 0 on, and the
        position after it, for models that give these. meta: see `Attachment`. ids: its tokens, with
        those of text between its parts."""
        assert self.tower is not None
        return self.tower.form.positions(meta, ids == self.tower.token)

    @abstractmethod
    def largest(self, tokens: int) -> tuple[int, tuple[int, ...], Arrays] | None:
        """The largest attachment with at most so many tokens, for a plan: its tokens, meta and arrays;
        None: there is none."""

    @abstractmethod
    def planned(self, model: str) -> Modality:
        """The same for a plan, which may not have the processor's files. model: its class. Raises
        RecipeError for limits that the model does not have."""


class Planned(Modality):
    """Attachments of which only sizes are known, for a plan."""

    @property
    def token_ids(self) -> list[int]:
        assert self.tower is not None
        return [self.tower.token]

    @property
    def pixel_table(self) -> npt.NDArray[np.float32]:
        return np.zeros((3, 256), dtype=np.float32)

    @property
    def blank(self) -> Arrays:
        assert self.tower is not None
        made = self.tower.form.largest(self.tower.form.least_tokens)
        assert made is not None
        return made[2]

    def join(self, attachments: list[Arrays]) -> Arrays:
        joined: Arrays = {}
        for name in attachments[0]:
            arrays = [one[name] for one in attachments]
            if name.startswith("pixel_values"):  # which take no memory before they are used
                shapes = np.array([array.shape for array in arrays])
                whole = (shapes[:, 0].sum(), *shapes[:, 1:].max(axis=0))
                joined[name] = np.zeros(whole, dtype=np.uint8)
            else:
                joined[name] = np.concatenate(arrays)
        return joined
