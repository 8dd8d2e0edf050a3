"""The load-balancing loss of a mixture of experts over global batches.

The loss of a batch is N * sum_i f_i * P_i (Fedus et al., 2022, arXiv 2101.03961, equations 4 to 6):
of N experts, f_i is the number of times that a token is sent to expert i, per token, and P_i is the
mean of the router's probability of i. Both are over all layers together, as in transformers'
`load_balancing_loss_func`, whose value this is if f is that of the same batch.

A product of two means is not the sum of those of the parts of a batch, so a loss of each micro-batch
depends on their size and on the number of ranks. It is linear in P once f is known. Here f is that of
the whole step before: its micro-batches on all ranks. It has no gradient in any case.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.description import experts_of_token, text_config

KEY = "model.router_balance"


class RouterBalance:
    """The balance loss of the steps of a run, and the shares of the experts that it takes from one
    step to the next."""

    def __init__(self, *, chosen: int, ranks: RankLayout) -> None:
        """chosen: the experts of a token."""
        self.chosen, self._ranks = chosen, ranks
        self.shares: torch.Tensor | None = None
        """f of the last step: (experts,), float32, with the sum `chosen`. None before the first step,
        which takes equal shares: the loss is constant then, and has no gradient."""
        self._counts: torch.Tensor | None = None
        self._scale: torch.Tensor | float = 1.0

    def begin(self, tokens: int, weight: torch.Tensor) -> None:
        """Begins a step.

        tokens: those of the global batch without padding. weight: what the step divides its loss by.
        """
        self._counts, self._scale = None, weight / max(1, tokens)

    def loss(
        self, router_logits: Sequence[torch.Tensor], text: torch.Tensor | None
    ) -> torch.Tensor:
        """A micro-batch's part of the loss, a float32 scalar, without its coefficient; and counts the
        choices of experts. The parts of a step add up to the loss times the step's `weight`.

        router_logits: of each layer, (tokens, experts). text: of as many tokens, bool, false in
        padding; None: there is none.
        """
        tokens, experts = router_logits[0].shape
        device = router_logits[0].device
        if self.shares is None:
            self.shares = torch.full((experts,), self.chosen / experts, device=device)
        if self._counts is None:
            self._counts = torch.zeros(experts, dtype=torch.int64, device=device)
        text = (
            torch.ones(tokens, dtype=torch.bool, device=device) if text is None else text.flatten()
        )
        choices = text.long().repeat_interleave(self.chosen)
        probabilities = torch.zeros(experts, device=device)
        for logits in router_logits:
            of_tokens = logits.softmax(-1)
            self._counts.scatter_add_(0, of_tokens.topk(self.chosen).indices.flatten(), choices)
            probabilities = probabilities + (of_tokens.float() * text[:, None]).sum(0)
        mean = (self.shares * probabilities).sum() * (experts / len(router_logits))
        return mean * self._scale

    def end(self, skipped: torch.Tensor) -> None:
        """Ends a step, whose shares are those of the next one. skipped: 1 if its gradients were not
        finite, so that it changed nothing, else 0. Every rank must call this. Does not wait for the
        device."""
        if self._counts is None:  # the model has returned no router logits
            return
        assert self.shares is not None
        if self._ranks.size > 1:
            if not self._ranks.counts:
                self._counts.zero_()
            with self._ranks.waiting():
                dist.all_reduce(self._counts, group=self._ranks.group)
        total = self._counts.sum()
        # In float64: a share is the same for any division of the batch
        found = (self._counts.double() * (self.chosen / total.clamp(min=1))).float()
        kept = (skipped.to(total.device) > 0) | (total == 0)
        self.shares, self._counts = torch.where(kept, self.shares, found), None

    def state(self) -> list[float] | None:
        """`shares`, for a checkpoint. Waits for the device."""
        return None if self.shares is None else self.shares.tolist()

    def restore(self, state: list[float] | None) -> None:
        """Continues from the state in a checkpoint; None: as before the first step."""
        self.shares = None if state is None else torch.tensor(state, device=self._ranks.device)


def wants_balance(model: nn.Module) -> bool:
    """Whether the model's config asks for a balance loss (output_router_logits)."""
    configs = (getattr(model, "config", None), text_config(model))
    return any(getattr(config, "output_router_logits", False) for config in configs)


def router_balance(model: nn.Module, ranks: RankLayout) -> RouterBalance | None:
    """The balance of a model whose config has output_router_logits; None without it. Raises
    RecipeError if its config does not say how many experts a token has."""
    if not wants_balance(model):
        return None
    chosen = getattr(model, "num_experts_per_tok", None) or experts_of_token(text_config(model))
    if not chosen:
        what = f"the config of {type(model).__name__} does not say how many experts a token has"
        raise RecipeError(f"{KEY}: {what}; use micro_batch")
    return RouterBalance(chosen=chosen, ranks=ranks)
