"""Names and types of a micro-batch that the data, which makes it, and the models share.

Imports neither torch nor transformers before a micro-batch is pinned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

IGNORED = -100
"""Target of a token without loss."""
DocumentMasking = Literal["mask", "varlen"]
"""How attention keeps the documents of a row apart. mask: the model makes a mask from position_ids.
varlen: attention receives the bounds of the documents."""


@dataclass(frozen=True)
class MicroBatch:
    """Some rows: what the model is called with, and what its loss compares with.

    It is no dict and no pytree, so that FSDP, which casts the tensors in the arguments of a forward
    method to its dtype, sees one value: targets, weights and `extra` keep theirs.
    """

    inputs: Mapping[str, Any]
    """The arguments of the model's forward method."""
    targets: torch.Tensor | None = None
    """(rows, tokens): what follows each token, or IGNORED. Of classes: (rows,)."""
    positions: torch.Tensor | None = None
    """(positions,): the flattened targets whose loss is computed; None: all."""
    weights: torch.Tensor | None = None
    """(rows, tokens), float32: those of the targets; None: each counts 1."""
    text_mask: torch.Tensor | None = None
    """(rows, tokens), bool: false in padding; None: there is none."""
    sources: torch.Tensor | None = None
    """The number of the source of each loss, or of each row, of a mixture."""
    source_count: int = 0
    later: tuple[MicroBatch, ...] = ()
    """For each depth of multi-token prediction: the `input_ids` so many places later in the documents,
    and the targets there with their positions and weights."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What the objective has put in beside these."""

    def mapped(self, function: Callable[[Any], Any]) -> MicroBatch:
        """The same with `function` of each field that has tensors: of `to_device`, for example."""
        own = vars(self)
        changed = {name: function(own[name]) for name in own if _may_have_tensors(own[name])}
        later = tuple(each.mapped(function) for each in self.later)
        return MicroBatch(**{**own, **changed, "later": later})

    def pin_memory(self) -> MicroBatch:
        """In page-locked memory. torch's DataLoader calls it."""
        import torch

        from launcher.libraries.private import tree_map_only

        return self.mapped(partial(tree_map_only, torch.Tensor, torch.Tensor.pin_memory))

    @property
    def counted(self) -> torch.Tensor:
        """(rows, tokens) or (rows,), bool: whether there is a target."""
        assert self.targets is not None
        return self.targets != IGNORED

    @property
    def text(self) -> torch.Tensor | None:
        """(rows, tokens): false or 0 in padding; None: there is none."""
        found: torch.Tensor | None = self.text_mask
        return self.inputs.get("attention_mask") if found is None else found

    def at_positions(self, of_tokens: torch.Tensor) -> torch.Tensor:
        """What the flattened targets at `positions`, or all of them, have of (rows, tokens)."""
        flat = of_tokens.flatten()
        return flat if self.positions is None else flat[self.positions]


def _may_have_tensors(value: object) -> bool:
    return not (
        value is None or isinstance(value, int) or (isinstance(value, Mapping) and not value)
    )
