"""Reward models: classifiers of transformers with one label, whose logit is the score of a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import logsigmoid

from launcher.errors import RecipeError
from launcher.models.applied import applied

if TYPE_CHECKING:
    from transformers import PreTrainedModel

METRICS = ("accuracy", "margin", "mean_reward")
"""Means over pairs. The names are TRL's."""
_NOT_INPUTS = ("ends", "margins", "text_mask")


class TokenScores:
    """Replaces the forward methods of a classifier and of its head: the model returns the logits of
    every token, (rows, tokens, 1), not only those of the last token of a row. So a row may hold
    several texts. The head must be the module `score`, which transformers applies to every token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        head = getattr(model, "score", None)
        if not isinstance(head, nn.Module):
            raise RecipeError(
                f"model.task: reward: {type(model).__name__} does not score each token (it has no "
                "module `score`); give a causal language model, such as llama or qwen3"
            )
        self._model_forward, self._head_forward = model.forward, head.forward
        self._logits: torch.Tensor | None = None
        model.forward, head.forward = self._forward, self._forward_head
        applied(model).token_scores = self

    def _forward(self, *args: object, **kwargs: object) -> Any:
        try:
            outputs = self._model_forward(*args, **kwargs)
            outputs.logits = self._logits
        finally:
            self._logits = None
        return outputs

    def _forward_head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head_forward(hidden)
        self._logits = logits
        return logits


def summed_reward_loss(model: nn.Module, micro_batch: Mapping[str, Any]) -> torch.Tensor:
    """The sum over pairs of -log sigmoid(chosen - rejected - margin) of their scores, and the sums
    of METRICS without gradients: a float32 vector. A micro-batch is that of `RewardDataset`."""
    inputs = {name: value for name, value in micro_batch.items() if name not in _NOT_INPUTS}
    scores = model(**inputs, use_cache=False).logits.float().flatten()[micro_batch["ends"]]
    margins = scores[:, 0] - scores[:, 1]
    loss = -logsigmoid(margins - micro_batch["margins"]).sum()
    columns = [(margins > 0).float(), margins, scores.mean(1)]
    return torch.cat([loss.view(1), torch.stack(columns).sum(1).detach()])
