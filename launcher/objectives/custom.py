"""The user's own data and loss (data.builder)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import nn

from launcher.data.collation import Collated, raise_error
from launcher.data.custom import CustomData, CustomDataset, build_custom_data
from launcher.errors import RecipeError
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.base import Example, Objective


@dataclass(frozen=True)
class Custom(Objective):
    """The loss of the data that the user's function builds."""

    data: CustomData | None = None
    """What the function returned; None: it was not called yet."""
    packs_documents: ClassVar[bool] = False
    predicts_tokens: ClassVar[bool] = False
    causal: ClassVar[bool] = False
    divides_loss: ClassVar[bool] = False
    targets_are_fixed: ClassVar[bool] = False

    def for_custom(self, data: CustomData) -> Custom:
        """With the loss of the data."""
        return replace(self, data=data)

    def loss(self, model: nn.Module, micro_batch: MicroBatch) -> torch.Tensor:
        """The user's loss, as a float32 scalar. Raises RecipeError if it is no scalar tensor."""
        assert self.data is not None
        loss: object = self.data.loss(model, micro_batch.extra["batch"])
        got = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            if not loss.ndim:
                if loss.is_complex():
                    raise RecipeError(
                        f"data.builder: its loss must be a real number; got {loss.dtype}"
                    )
                if torch.is_grad_enabled() and not loss.requires_grad:
                    raise RecipeError(
                        "data.builder: its loss has no gradient: it must follow from what the model "
                        "returns, without detach(), item(), no_grad() or whole numbers"
                    )
                weighted: torch.Tensor = loss.float() * micro_batch.extra["weight"]
                return weighted
            got = f"the shape {tuple(loss.shape)}"
        what = "its loss must be a scalar tensor, the sum over the micro-batch"
        raise RecipeError(f"data.builder: {what}; got {got}")

    def with_example(self, about: Example) -> tuple[Objective, Collated]:
        """A micro-batch of the first samples of the user's data."""
        assert about.data.builder is not None
        objective = replace(self, data=build_custom_data(about.data.builder, about.data.arguments))
        assert objective.data is not None
        samples = CustomDataset(objective.data.train, objective.data, about.data.builder)
        rows = [samples[index % len(samples)] for index in range(about.rows)]
        return objective, raise_error(samples.collate(rows))
