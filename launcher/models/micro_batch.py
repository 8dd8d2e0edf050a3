"""Names and types of a micro-batch that the data, which makes it, and the models share.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

IGNORED = -100
"""Target of a token without loss."""
Masking = Literal["mask", "varlen"]
"""How attention keeps the documents of a row apart. mask: the model makes a mask from position_ids.
varlen: attention receives the bounds of the documents."""


class RowPart(NamedTuple):
    """The part of each row that a rank computes (strategy.context_parallel_size)."""

    number: int = 0
    parts: int = 1

    def of(self, tokens: int) -> slice:
        """The tokens of this part, of a row of `tokens`, a multiple of `parts`."""
        size = tokens // self.parts
        return slice(self.number * size, (self.number + 1) * size)


WHOLE_ROW = RowPart()
