"""The results for rows: token ids with what belongs to them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from launcher.data.attachments import Attachments
from launcher.data.columns import Weights
from launcher.data.coordinates import Located
from launcher.data.tokenizer import Ids
from launcher.sources.rows import Row


@dataclass(frozen=True, slots=True)
class Document:
    """What the tokens of a row are."""

    ids: Ids = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """Empty: the row has no text, or cannot be used."""
    labels: Ids | None = None
    """Each token as it is predicted at the position before it, or IGNORED; None: the ids."""
    class_number: int | None = None
    """The class, for kind classification."""
    first_length: int | None = None
    """Of a pair of answers: the tokens of the first one with its prompt, which the ids begin with."""
    desirable: bool | None = None
    """Of an answer that is good or not: whether it is good."""
    cut_tokens: int = 0
    """Tokens that texts which the tokenizer cuts were longer than data.sequence_length."""
    further_documents: int = 0
    """Documents of a query beyond data.documents."""
    weights: Weights | None = None
    """The weight of each token as a target; None: each counts 1."""
    margin: float | None = None
    """Of a pair: by how much the first answer should be better; None: the data does not say."""
    attachments: Attachments | None = None
    """None: the row is text."""
    coordinates: Located | None = None
    """What the coordinates in its text are; None: there are none."""

    @property
    def labels_or_ids(self) -> Ids:
        """The labels, which are the ids if there are no others. Not shifted: the target at a position,
        in a sample and a micro-batch, is the label of the token after it."""
        return self.ids if self.labels is None else self.labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded(Document):
    """The result for one row."""

    row: Row
    problem: str = ""
    """Why the row cannot be used."""

    @property
    def skipped(self) -> dict[str, str]:
        """For the list of skipped rows."""
        return {"where": self.row.where, "problem": self.problem}
