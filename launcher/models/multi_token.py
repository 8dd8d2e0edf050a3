"""Multi-token prediction (MTP): layers that predict the tokens after the next one.

A server guesses several tokens with them and lets the model check all of them in one pass. The layer of
depth k computes from the hidden states of the depth before, h_i, and the embeddings of the tokens k
places later, e_(i+k):

    h'_i = block(projection([norm(e_(i+k)); norm(h_i)]))

The head predicts token i + k + 1 from norm(h'_i) (DeepSeek-V3, arXiv 2412.19437, section 2.2). The
report leaves open whether hidden states are those before or after a norm. Here h_i of depth 0 is what
the model's head reads, after the last norm, as in vLLM, SGLang's `deepseek_nextn.py` and `MtpModel` of
transformers 5.23; and the next depth reads norm(h'_i), as in the last two. (vLLM's `deepseek_mtp.py`,
03356f8, gives it h'_i.) vLLM also takes zeros for the embedding at the first place of a text, which the
definition does not, and nor does this.

The layers are in the list `mtp` of the model. Their blocks are of the model's own class, and get the
arguments that a block of the trunk has got: position embeddings, masks, bounds of documents. The
later tokens come with the micro-batch (`MicroBatch.later`): another rank may have them in its part of a row.
`libraries/families.py` has the names of their tensors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries import families
from launcher.models.description import describe, embeddings, text_config
from launcher.models.micro_batch import IGNORED, MicroBatch
from launcher.models.names import clean_name
from launcher.models.record import record_of
from launcher.recipe import schema

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from launcher.models.head import Head

KEY = "model.mtp"
LIST = "mtp"
"""The attribute of a model with its layers."""
PER_DEPTH = ("loss", "weight", "right", "targets")
"""Sums of a depth: of the cross-entropies times their weights, of the weights, of the targets that the
layer guesses, and of all targets."""


class PredictionLayer(nn.Module):
    """The layer of one depth."""

    def __init__(self, block: nn.Module, norm: Callable[[], nn.Module], hidden: int) -> None:
        """block: of the model's class. norm: makes a norm of `hidden` features."""
        super().__init__()
        self.embedding_norm, self.hidden_norm = norm(), norm()
        self.projection = nn.Linear(2 * hidden, hidden, bias=False)
        self.block, self.norm = block, norm()

    def forward(
        self, hidden: torch.Tensor, embedding: torch.Tensor, **arguments: Any
    ) -> torch.Tensor:
        """(rows, tokens, features) of hidden states and of the embeddings of later tokens. Returns
        what the head and the next depth read. arguments: of the block."""
        joined = torch.cat([self.embedding_norm(embedding), self.hidden_norm(hidden)], dim=-1)
        found: torch.Tensor = self.norm(self.block(self.projection(joined), **arguments))
        return found


@dataclass
class _Call:
    """What a forward pass of the trunk leaves for the layers."""

    later: list[torch.Tensor]
    """For each depth the ids of the later tokens."""
    embeddings: list[torch.Tensor] = field(default_factory=list)
    """Those of the ids."""
    arguments: dict[str, Any] = field(default_factory=dict)


_running = ContextVar[_Call | None]("running", default=None)


@dataclass
class MultiToken:
    """The layers of a model, and what is computed with them."""

    settings: schema.MultiToken
    depths: int
    names: dict[str, str]
    """By the beginnings of the layers' names in checkpoints: those in the model."""
    shared: dict[str, str]
    """By the names of tensors that checkpoints have beside the layers: the clean name of the
    parameter of the model that they are copies of."""

    def conversions(self) -> list[Any]:
        """Transformers' renamings from checkpoints to the model, the most special names first."""
        from transformers.core_model_loading import WeightRenaming

        return [WeightRenaming("^" + re.escape(old), new) for old, new in self.names.items()]

    def stored_name(self, name: str) -> str:
        """The name that a tensor of a layer has in checkpoints, before experts are divided."""
        for old, new in self.names.items():
            if name.startswith(new):
                return old + name.removeprefix(new)
        return name

    def ask(
        self,
        head: Head,
        model: nn.Module,
        micro_batch: MicroBatch,
        question: Callable[[Head, torch.Tensor], torch.Tensor],
    ) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """`Head.ask`, with the losses of the layers from the same forward pass: the answer (tokens, 1),
        the model's other outputs, and `losses`. In training nothing is asked of frozen layers: their
        sums are NaN."""
        count = 1 + len(PER_DEPTH) * self.depths
        if torch.is_grad_enabled() and not self.settings.train:
            answer, outputs = head.ask(model, micro_batch.inputs, question)
            unknown = answer.new_full((count,), float("nan"), dtype=torch.float32)
            return answer, outputs, unknown.index_fill(0, unknown.new_zeros(1).long(), 0.0)
        call = _Call([each.inputs["input_ids"] for each in micro_batch.later])

        def both(head: Head, hidden: torch.Tensor) -> torch.Tensor:
            answer = question(head, hidden)
            assert answer.shape[1] == 1
            more = self.losses(model, head, hidden, micro_batch, call)
            # One tensor, by which FSDP finds the backward pass of the head
            return torch.cat([answer, more[:, None]])

        token = _running.set(call)
        try:
            answer, outputs = head.ask(model, micro_batch.inputs, both)
        finally:
            _running.reset(token)
        return answer[:-count], outputs, answer[-count:, 0]

    def losses(
        self, model: Any, head: Head, hidden: torch.Tensor, micro_batch: MicroBatch, call: _Call
    ) -> torch.Tensor:
        """(1 + 4 x depths,), float32: what is added to the sum of the next-token losses for its
        gradient; then for each depth without gradients the sums `PER_DEPTH`. `right` is NaN in training.

        hidden: (tokens, features), which the head reads. Only targets within the document count.
        """
        assert micro_batch.targets is not None
        state, evaluates = hidden.view(*micro_batch.targets.shape, -1), not torch.is_grad_enabled()
        if self.settings.detach:
            state = state.detach()
            if not evaluates:
                # Otherwise FSDP would keep the layer's weights and gradients until the end of the
                # backward pass: it reduces gradients where it has computed that of an input
                state.requires_grad_()
        total, sums = hidden.new_zeros((), dtype=torch.float32), list[torch.Tensor]()
        of_depths = zip(getattr(model, LIST), micro_batch.later, call.embeddings, strict=True)
        for layer, later, embedding in of_depths:
            read = embedding.detach() if self.settings.detach else embedding
            state = layer(state, read, **call.arguments)
            assert later.targets is not None
            states, wanted = state.flatten(0, 1), later.at_positions(later.targets)
            if later.positions is not None:
                states = states.index_select(0, later.positions)
            counted = (wanted != IGNORED).float()
            weights = counted
            if later.weights is not None:
                weights = later.at_positions(later.weights) * counted
            with _frozen(head.layer, frozen=self.settings.detach):
                each = head.cross_entropies(states, wanted)[:, 0]
            loss = (each * weights).sum()
            total = total + loss
            right = loss.new_full((), float("nan"))
            if evaluates:
                right = ((head.greedy(states) == wanted) * counted).sum()
            sums += [loss.detach(), weights.sum(), right, counted.sum()]
        total = total * (self.settings.weight / self.depths)
        return torch.stack([total, *sums])


@contextmanager
def _frozen(module: nn.Module, *, frozen: bool) -> Iterator[None]:
    """Computes with a module whose parameters get no gradient."""
    trained = [p for p in module.parameters() if frozen and p.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def add_layers(model: PreTrainedModel, settings: schema.MultiToken) -> None:
    """Adds the layers that the config of a model on the meta device names. Raises RecipeError if it
    names none, or if it is not known how the family computes them."""
    # First: the blocks of the layers are none of the trunk
    depths, layout = _layout(model)
    describe(model)
    text, decoder = text_config(model), model.get_decoder()
    trunk = text.num_hidden_layers

    def norm() -> nn.Module:
        made: nn.Module = type(decoder.norm)(text.hidden_size, eps=text.rms_norm_eps)
        return made

    layers, names = nn.ModuleList(), dict[str, str]()
    sources = _full_attention(text, decoder)
    for depth in range(depths):
        # With the model's own config, whose attention may change
        with torch.device("meta"), _one_more_layer(text, trunk + depth):
            block = type(sources[0])(text, trunk + depth)
            layers.append(PredictionLayer(block, norm, text.hidden_size))
        names |= {
            old.format(layer=trunk + depth): f"{LIST}.{depth}.{new}" for old, new in layout.names
        }
    if not settings.train:
        layers.requires_grad_(False)
    setattr(model, LIST, layers.float())
    of = {id(p): name for name, p in model.named_parameters()}
    ends = dict(zip(("input", "output"), embeddings(model), strict=True))
    shared = {
        name.format(layer=trunk + depth): clean_name(of[id(ends[end].weight)])
        for depth in range(depths)
        for name, end in layout.shared
    }
    made = MultiToken(settings, depths, names, shared)
    record_of(model).multi_token = made
    record_of(model).conversions[:0] = made.conversions()
    ends["input"].register_forward_hook(_embed_later)
    for block in sources:  # the last one counts; a trace has fewer of them
        block.register_forward_pre_hook(_keep_arguments, with_kwargs=True)


def train_only(model: nn.Module) -> None:
    """Freezes all but the layers."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(f"{LIST}."))


@contextmanager
def without_layers(model: nn.Module) -> Iterator[None]:
    """For adapters, which are of the trunk: its layers are trained whole beside them."""
    if record_of(model).multi_token is None:
        yield
        return
    layers = getattr(model, LIST)
    delattr(model, LIST)
    try:
        yield
    finally:
        setattr(model, LIST, layers)


def prediction_layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers of a model by name, as they are now; empty if it has none."""
    if record_of(model).multi_token is None:
        return {}
    return {f"{LIST}.{index}": layer for index, layer in enumerate(getattr(model, LIST))}


def _layout(model: PreTrainedModel) -> tuple[int, families.MultiTokenLayout]:
    """The number of the layers of a model, and the row of its family."""
    text: Any = text_config(model)
    kind = text.model_type
    layout = families.MULTI_TOKEN.get(kind)
    if layout is None:
        known = ", ".join(families.MULTI_TOKEN)
        what = f"it is not known how {kind} computes layers of multi-token prediction"
        raise RecipeError(f"{KEY}: {what} (known: {known}); set it to null, and they are copied")
    count = getattr(text, layout.count, None)
    count = 1 if count is None else count
    if not count:
        what = f"the model has no layers of multi-token prediction ({layout.count}: 0)"
        raise RecipeError(f"{KEY}: {what}; set it to null")
    if layout.most is not None and count > layout.most:
        what = (
            f"{layout.count}: {count} is more than {layout.most}, which checkpoints of {kind} have"
        )
        raise RecipeError(f"{KEY}: {what}; set it to null")
    if getattr(text, "mtp_use_dedicated_embeddings", False):
        what = "its layers have embeddings of their own (mtp_use_dedicated_embeddings)"
        raise RecipeError(f"{KEY}: {what}, which the launcher does not train; set it to null")
    return count, layout


def _full_attention(text: Any, decoder: Any) -> list[Any]:
    """The blocks of the trunk with full attention."""
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * len(decoder.layers)
    full = [b for b, kind in zip(decoder.layers, kinds, strict=True) if kind == "full_attention"]
    if not full:
        what = "no block of the trunk has full attention, whose masks and positions they take"
        raise RecipeError(f"{KEY}: {what}; set it to null")
    return full


@contextmanager
def _one_more_layer(text: Any, index: int) -> Iterator[None]:
    """A config with values for a layer with this index, as a block is built from it."""
    lists = {key: getattr(text, key, None) for key in families.INDEXED_BY_LAYER}
    before = {key: [*values] for key, values in lists.items() if values}
    for key, values in before.items():
        more = [families.INDEXED_BY_LAYER[key]] * (index + 1 - len(values))
        setattr(text, key, [*values, *more])
    try:
        yield
    finally:
        for key, values in before.items():
            setattr(text, key, values)


# Hooks without a state of their own: a copy of the model has them, too


def _embed_later(module: nn.Module, arguments: object, output: object) -> None:
    """Looks the later tokens up, too. FSDP has gathered the weight now, and not when the layers run."""
    if (call := _running.get()) is not None:
        call.embeddings = [module.forward(ids) for ids in call.later]


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _keep_arguments(module: nn.Module, arguments: object, named: dict[str, Any]) -> None:
    if (call := _running.get()) is not None:
        call.arguments = {key: value for key, value in named.items() if key != "hidden_states"}
