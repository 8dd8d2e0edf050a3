"""How often routers choose each expert, and balance of a mixture of experts without a loss.

The choices of a step are counted where a layer of experts receives them. Recomputed blocks and
evaluations are not counted.

Some families add a bias to the router's scores when they choose experts, but not to the weights of the
experts: DeepSeek-V3, GLM-4.5, Nemotron-H and others. `model.router_bias_update_rate` updates it after
each step: b_i grows by the rate if expert i was chosen less often than the mean, and shrinks by the
rate if it was chosen more often (Wang et al., 2024, arXiv 2408.15664, algorithm 1; DeepSeek-V3, arXiv
2412.19437, section 2.1.2). The counts are those of the global batch, so the bias does not depend on
micro-batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.libraries.families import EXPERT_BIAS
from launcher.models.experts import find_experts
from launcher.models.micro_batch import MicroBatch

KEY = "model.router_bias_update_rate"
_Result = TypeVar("_Result")


@dataclass
class _Layer:
    """A layer of experts."""

    module: Any
    experts: int
    """Of all ranks."""
    bias_owner: nn.Module | None
    """The module with the bias, whose name is `bias_name`; None: there is none."""
    bias_name: str

    @property
    def bias(self) -> torch.Tensor | None:
        """(experts,) or (1, experts)."""
        owner = self.bias_owner
        bias: torch.Tensor | None = None if owner is None else getattr(owner, self.bias_name)
        return bias


class ExpertLoad:
    """Counts how often each expert is chosen in training."""

    def __init__(self, model: nn.Module) -> None:
        """model: whole, and not wrapped: names and numbers of experts are those of `find_experts`."""
        modules: dict[str, Any] = find_experts(model)
        self._layers = {
            name: _Layer(each, each.num_experts, *_find_bias(model, name))
            for name, each in modules.items()
        }
        self._text: torch.Tensor | None = None
        """Of each token of the micro-batch, whether the token is text and not padding; None: nothing is counted."""
        self._ranks: RankLayout | None = None
        self._rate = 0.0
        self._interval: torch.Tensor | None = None
        for module in modules.values():
            module.register_forward_pre_hook(self._count, with_kwargs=True)

    @property
    def names(self) -> list[str]:
        """The names of the layers."""
        return list(self._layers)

    @property
    def sizes(self) -> list[int]:
        """The number of experts of each layer."""
        return [layer.experts for layer in self._layers.values()]

    def start(self, model: nn.Module, ranks: RankLayout, *, rate: float) -> None:
        """Begins to count on the ranks of a wrapped model. rate: `model.router_bias_update_rate`."""
        self._ranks, self._rate = ranks, rate
        here = {id(module) for module in model.modules()}
        for layer in self._layers.values():
            if id(layer.module) not in here:  # another stage of a pipeline has it
                layer.module = layer.bias_owner = None
                continue
            # A plain attribute, whose value is an input of compiled blocks: they are compiled once
            layer.module.times_chosen = torch.zeros(
                layer.experts, dtype=torch.int64, device=ranks.device
            )

    def forget(self) -> None:
        """Drops the counts of a step that was not completed."""
        for layer in self._layers.values():
            if layer.module is not None:
                layer.module.times_chosen.zero_()

    def counting(
        self, loss: Callable[[nn.Module, MicroBatch], _Result]
    ) -> Callable[[nn.Module, MicroBatch], _Result]:
        """The same loss; while it runs, the choices for its tokens are counted."""

        @wraps(loss)
        def counted(model: nn.Module, micro_batch: MicroBatch) -> _Result:
            self._text = _text_of(micro_batch)
            try:
                return loss(model, micro_batch)
            finally:
                self._text = None

        return counted

    def _count(self, experts: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A hook before the forward pass of a layer of experts: of (tokens, features) and, as numbers
        of experts, (tokens, experts of a token)."""
        # A block is recomputed in the backward pass, when no loss runs
        if self._text is None or not torch.is_grad_enabled():
            return
        # The name of this argument depends on the family; the others are no integers
        chosen = next(each for each in (*args, *kwargs.values()) if not each.is_floating_point())
        counted = torch.ones_like(chosen)
        # An objective may call the model with other rows than those of the micro-batch
        if len(self._text) == len(chosen):
            counted = counted * self._text[:, None]
        experts.times_chosen.scatter_add_(0, chosen.flatten().long(), counted.flatten().long())

    @torch.no_grad()
    def end_step(self, skipped: torch.Tensor) -> None:
        """Updates the biases. skipped: 1 if the gradients of the step were not finite, so that it
        changed nothing, else 0. Every rank must call this. Does not wait for the device."""
        if not self._rate:
            return
        counts = self._sum_of_ranks()
        self._interval = counts if self._interval is None else self._interval + counts
        rate = self._rate * (1 - skipped.to(counts.device).float())
        for of_layer, layer in zip(counts, self._layers.values(), strict=True):
            if (bias := layer.bias) is not None:
                known = of_layer[: layer.experts]
                # Integers: the sign is that of the mean less the count
                sign = torch.sign(known.sum() - known * layer.experts)
                bias.add_((rate * sign).view_as(bias).to(bias.dtype))

    @torch.no_grad()
    def take(self) -> torch.Tensor:
        """(layers, most experts of a layer), int64: how often each expert was chosen on all ranks since
        the last call. Every rank must call this. Does not wait for the device."""
        if not self._rate:
            return self._sum_of_ranks()
        counts, self._interval = self._interval, None
        return self._sum_of_ranks() if counts is None else counts

    def _sum_of_ranks(self) -> torch.Tensor:
        """The counts of all ranks, which begin again at zero."""
        ranks = self._ranks
        assert ranks is not None
        counts = torch.zeros(
            len(self._layers), max(self.sizes), dtype=torch.int64, device=ranks.device
        )
        for row, layer in zip(counts, self._layers.values(), strict=True):
            # Of ranks that compute the same tokens, one counts; each stage has other layers
            if layer.module is not None and ranks.stage.counts:
                row[: layer.experts] = layer.module.times_chosen
        self.forget()
        if ranks.size > 1:
            with ranks.waiting():
                dist.all_reduce(counts, group=ranks.group)
        return counts


def watch_experts(model: nn.Module) -> ExpertLoad | None:
    """Makes the layers of experts of a meta model ready to be counted, before it is divided or compiled;
    None if it has none that transformers' interface computes."""
    return ExpertLoad(model) if find_experts(model) else None


def make_biases_buffers(model: nn.Module, *, needed: bool) -> None:
    """Makes the biases of a meta model buffers where they are frozen parameters, so that all ranks have
    them whole, and checkpoints hold them. Raises RecipeError if they are needed and a model has none."""
    found = [_find_bias(model, name) for name in find_experts(model)]
    if needed and all(owner is None for owner, _ in found):
        what = f"{type(model).__name__} has no bias that its routers add to choose experts"
        raise RecipeError(f"{KEY}: {what} ({', '.join(EXPERT_BIAS)}); set it to 0")
    for owner, name in found:
        if owner is not None and (value := owner._parameters.pop(name, None)) is not None:
            owner.register_buffer(name, value.detach())


def _find_bias(model: nn.Module, experts: str) -> tuple[nn.Module | None, str]:
    """The module with the bias of a layer of experts, and its name there. The module around the layer
    has it."""
    for module in model.get_submodule(experts.rpartition(".")[0]).modules():
        for name in EXPERT_BIAS:
            if getattr(module, name, None) is not None:
                return module, name
    return None, ""


def _text_of(micro_batch: MicroBatch) -> torch.Tensor:
    """(tokens,), bool: false in padding. Always a tensor, so that blocks are compiled once."""
    text = micro_batch.text
    ids = micro_batch.inputs.get("input_ids")
    if text is None and ids is not None:
        text = torch.ones(ids.shape, dtype=torch.bool, device=ids.device)
    # Without either, the number of tokens is not known, and all are counted
    return torch.ones(0, dtype=torch.bool) if text is None else text.flatten().bool()
