"""What data and models agree on about a micro-batch. Imports neither torch nor transformers."""

from __future__ import annotations

from typing import Literal

IGNORED = -100
"""Target of a token without loss."""
Masking = Literal["mask", "varlen"]
"""How attention keeps the documents of a row apart. mask: the model makes a mask from position_ids.
varlen: attention receives the bounds of the documents."""
