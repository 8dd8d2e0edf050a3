"""Recurrent layers of rows whose tokens are divided over ranks (context parallelism).

Each rank projects its tokens. Then all ranks of a row exchange tokens against heads or channels: each
computes convolution and state of all tokens, in the order of the row, for its share of the heads. It
calls the layer's own forward method on a share of the layer: an object with the layer's attributes,
except for the projections, which are done, the weights of convolution and decay, of which it has those
of its heads, and the numbers of heads. After the exchange back, gate, norm and last projection see all
features of this rank's tokens, so that gates are never sent and norms over all heads are exact.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.documents import DocumentsOfCall
from launcher.models.recurrent import recurrent_layers, separated
from launcher.models.row_division import RowDivision, all_to_all, computes_whole_rows

Finish = Callable[[torch.Tensor], torch.Tensor]
Sent = list[tuple[Literal["heads", "groups"], torch.Tensor]]
"""(rows, tokens, heads or groups, features)."""


class _Heads(NamedTuple):
    """The heads of a layer that a rank computes, and the groups (key heads, B and C) that they need."""

    heads: slice
    groups: slice

    @property
    def counts(self) -> tuple[int, int]:
        """Their numbers."""
        return self.heads.stop - self.heads.start, self.groups.stop - self.groups.start


class _Family(NamedTuple):
    """How layers with the same attributes are divided."""

    sizes: Callable[[Any], tuple[int, int]]
    """The numbers of heads and of groups of a layer."""
    project: Callable[[Any, torch.Tensor], tuple[Sent, Finish]]
    """From a rank's tokens: what is sent, and the function of the result, which arrives as (rows, tokens,
    features of all heads)."""
    compute: Callable[..., torch.Tensor]
    """From the layer, its heads here and what arrived, (rows, all tokens, features): the result of the
    heads. Also takes the bounds of documents, for kernels."""


class _Share:
    """A layer, but with other attributes."""

    def __init__(self, layer: Any, **own: Any) -> None:
        self.__dict__.update(own, whole_layer=layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole_layer, name)


def _first(tensor: torch.Tensor, *others: object) -> torch.Tensor:
    """In the place of a projection, which is done, or of a norm, which follows."""
    return tensor


def _convolution(conv: nn.Module, *channels: tuple[int, int]) -> SimpleNamespace:
    """The weight and bias of these channels."""
    weight: Any = conv.weight
    bias: Any = conv.bias
    if bias is not None:
        bias = torch.cat([bias[start:end] for start, end in channels])
    return SimpleNamespace(weight=torch.cat([weight[a:b] for a, b in channels]), bias=bias)


def _channels(before: int, part: slice, size: int) -> tuple[int, int]:
    """Those of a part of the heads of this size, which begin after others."""
    return before + part.start * size, before + part.stop * size


# Gated delta networks (Qwen3-Next, Qwen3.5)


def _project_delta(layer: Any, hidden: torch.Tensor) -> tuple[Sent, Finish]:
    if hasattr(layer, "in_proj_qkvz"):
        query, key, value, gate, b, a = layer.fix_query_key_value_ordering(
            layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
        )
    else:
        sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
        query, key, value = layer.in_proj_qkv(hidden).split(sizes, dim=-1)
        gate, b, a = layer.in_proj_z(hidden), layer.in_proj_b(hidden), layer.in_proj_a(hidden)
    query, key = (_by_head(each, layer.head_k_dim) for each in (query, key))
    value = _by_head(value, layer.head_v_dim)
    sent: Sent = [("groups", query), ("groups", key), ("heads", value)]
    sent += [("heads", each.unsqueeze(-1)) for each in (b, a)]

    def finish(core: torch.Tensor) -> torch.Tensor:
        flat = (each.reshape(-1, layer.head_v_dim) for each in (core, gate))
        out: torch.Tensor = layer.out_proj(layer.norm(*flat).reshape(*hidden.shape[:2], -1))
        return out

    return sent, finish


def _by_head(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """(rows, tokens, heads, size), of a tensor that may have the heads joined."""
    return tensor.reshape(*tensor.shape[:2], -1, size)


def _compute_delta(
    layer: Any, mine: _Heads, tokens: torch.Tensor, **bounds: torch.Tensor
) -> torch.Tensor:
    heads, groups = mine.counts
    key_dim, value_dim = groups * layer.head_k_dim, heads * layer.head_v_dim
    qkv, b, a = torch.split(tokens, [2 * key_dim + value_dim, heads, heads], dim=-1)
    query, key, value = torch.split(qkv, [key_dim, key_dim, value_dim], dim=-1)
    share = _Share(
        layer,
        key_dim=key_dim,
        value_dim=value_dim,
        num_k_heads=groups,
        num_v_heads=heads,
        conv1d=_convolution(
            layer.conv1d,
            _channels(0, mine.groups, layer.head_k_dim),
            _channels(layer.key_dim, mine.groups, layer.head_k_dim),
            _channels(2 * layer.key_dim, mine.heads, layer.head_v_dim),
        ),
        A_log=layer.A_log[mine.heads],
        dt_bias=layer.dt_bias[mine.heads],
        in_proj_qkv=lambda _: qkv,
        in_proj_z=lambda _: value,  # the gate is not here, and `norm` does not read it
        in_proj_b=lambda _: b,
        in_proj_a=lambda _: a,
        in_proj_qkvz=_first,
        in_proj_ba=_first,
        fix_query_key_value_ordering=lambda *_: (
            *(query, key, value),
            *(_by_head(value, layer.head_v_dim), b, a),
        ),
        norm=_first,
        out_proj=_first,
    )
    out: torch.Tensor = type(layer).forward(share, tokens, **bounds)
    return out


# Mamba-2 (Nemotron-H, Bamba, Granite 4, Zamba2)


def _project_mamba(layer: Any, hidden: torch.Tensor) -> tuple[Sent, Finish]:
    states = layer.n_groups * layer.ssm_state_size
    sizes = [layer.intermediate_size, layer.intermediate_size, states, states, layer.num_heads]
    gate, inner, b, c, dt = layer.in_proj(hidden).split(sizes, dim=-1)
    sent: Sent = [("heads", inner.unflatten(-1, (layer.num_heads, -1)))]
    sent += [("groups", each.unflatten(-1, (layer.n_groups, -1))) for each in (b, c)]
    sent.append(("heads", dt.unsqueeze(-1)))

    def finish(core: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = layer.out_proj(layer.norm(core, gate).to(hidden.dtype))
        return out

    return sent, finish


def _compute_mamba(
    layer: Any, mine: _Heads, tokens: torch.Tensor, **bounds: torch.Tensor
) -> torch.Tensor:
    heads, groups = mine.counts
    inner, states = heads * layer.head_dim, groups * layer.ssm_state_size
    first = layer.intermediate_size
    all_states = layer.n_groups * layer.ssm_state_size
    gate = tokens[..., :inner]  # in the place of the gate, which is not here
    share = _Share(
        layer,
        training=False,  # the fused kernel of training has norm and projection, which need all heads
        intermediate_size=inner,
        conv_dim=inner + 2 * states,
        n_groups=groups,
        num_heads=heads,
        conv1d=_convolution(
            layer.conv1d,
            _channels(0, mine.heads, layer.head_dim),
            _channels(first, mine.groups, layer.ssm_state_size),
            _channels(first + all_states, mine.groups, layer.ssm_state_size),
        ),
        A_log=layer.A_log[mine.heads],
        dt_bias=layer.dt_bias[mine.heads],
        D=layer.D[mine.heads],
        in_proj=lambda each: torch.cat([gate, each], dim=-1),
        norm=_first,
        out_proj=_first,
    )
    out: torch.Tensor = type(layer).forward(share, tokens, **bounds)
    return out


# Short convolutions (LFM2)


def _project_short(layer: Any, hidden: torch.Tensor) -> tuple[Sent, Finish]:
    b, c, x = layer.in_proj(hidden).chunk(3, dim=-1)
    return [("heads", (b * x).unsqueeze(-1))], lambda core: layer.out_proj(c * core)


def _compute_short(
    layer: Any, mine: _Heads, tokens: torch.Tensor, **bounds: torch.Tensor
) -> torch.Tensor:
    own = _convolution(layer.conv, (mine.heads.start, mine.heads.stop))
    convolve: Any = sys.modules[type(layer).__module__]
    out: torch.Tensor = convolve.causal_conv1d_fn(
        tokens.transpose(1, 2), own.weight.squeeze(1), own.bias, **bounds
    )
    return out.transpose(1, 2)


_DELTA = _Family(
    lambda layer: (layer.num_v_heads, layer.num_k_heads), _project_delta, _compute_delta
)
_MAMBA = _Family(lambda layer: (layer.num_heads, layer.n_groups), _project_mamba, _compute_mamba)
_SHORT = _Family(lambda layer: (layer.conv.weight.shape[0],) * 2, _project_short, _compute_short)


def _family_of(layer: nn.Module) -> _Family | None:
    """How a layer is divided, by its modules and parameters; None: it cannot be."""
    children = {name for name, _ in layer.named_children()}
    parameters = {name for name, _ in layer.named_parameters(recurse=False)}
    separate = {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"}
    if {"conv1d", "norm", "out_proj"} <= children and (
        {"in_proj_qkvz", "in_proj_ba"} <= children or separate <= children
    ):
        return _DELTA
    if {"conv1d", "norm", "in_proj", "out_proj"} <= children and (
        {"A_log", "dt_bias", "D"} <= parameters
    ):
        # Falcon-H1 scales the projected features, by a buffer with an entry for each of them
        known = hasattr(layer, "n_groups") and hasattr(layer, "num_heads")
        return _MAMBA if known and not list(layer.buffers(recurse=False)) else None
    if children == {"conv", "in_proj", "out_proj"}:
        module = sys.modules[type(layer).__module__]
        return _SHORT if hasattr(module, "causal_conv1d_fn") else None
    return None


def exchanged_features(block: nn.Module) -> int:
    """The features of a token that ranks exchange in the recurrent layers of a block, there and back;
    0: it has none that can be divided."""
    found = 0
    for layer in block.modules():
        family, each = _family_of(layer), cast(Any, layer)
        if family is _DELTA:
            found += 2 * each.key_dim + 2 * each.value_dim + 2 * each.num_v_heads
        elif family is _MAMBA:
            states = each.n_groups * each.ssm_state_size
            found += 2 * each.intermediate_size + 2 * states + each.num_heads
        elif family is _SHORT:
            found += 2 * each.conv.weight.shape[0]
    return found


def check_recurrent_layers(model: nn.Module, size: int, *, key: str) -> None:
    """Raises RecipeError, which names `key`, if this number of ranks cannot divide the model's recurrent
    layers."""
    for layer in recurrent_layers(model).values():
        of_model = f"the recurrent layers of {type(model).__name__} ({type(layer).__name__})"
        family = _family_of(layer)
        if family is None:
            what = "gated delta networks as in Qwen3.5, Mamba-2 and short convolutions can"
            raise RecipeError(f"{key}: {of_model} cannot be divided over ranks: {what}; use 1")
        heads, groups = family.sizes(layer)
        fits = [n for n in range(1, heads + 1) if _fits(heads, groups, n)]
        if size not in fits:
            of_heads = "channels" if family is _SHORT else f"heads (in {groups} groups)"
            what = f"{size} ranks cannot divide the {heads} {of_heads} of {of_model}"
            raise RecipeError(f"{key}: {what}; use one of {', '.join(map(str, fits))}")


def _fits(heads: int, groups: int, ranks: int) -> bool:
    """Whether each rank has as many heads, of whole groups or of one."""
    own, of_group = heads // ranks, heads // groups
    return heads % ranks == 0 and (own % of_group == 0 or of_group % own == 0)


def divide_recurrent_layers(
    model: nn.Module, rows: RowDivision, call: DocumentsOfCall | None
) -> None:
    """Divides the recurrent layers of a model over all ranks that have parts of its rows.
    `check_recurrent_layers` has accepted them. call: what says which tokens of the rows the ranks have,
    with a ring."""
    for layer in recurrent_layers(model).values():
        family = _family_of(layer)
        assert family is not None
        compute = partial(family.compute, layer, _heads_of(family, layer, rows, rows.rank))
        divided: Any = partial(
            _divided, family, layer, rows, call, layer.forward, separated(layer, compute)
        )
        layer.forward = divided


def _heads_of(family: _Family, layer: nn.Module, rows: RowDivision, rank: int) -> _Heads:
    """Those of a rank."""
    heads, groups = family.sizes(layer)
    first = rank * heads // rows.size
    last = (rank + 1) * heads // rows.size
    of_group = heads // groups
    return _Heads(slice(first, last), slice(first // of_group, (last - 1) // of_group + 1))


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="collectives between the ranks of a row"
)
def _divided(
    family: _Family,
    layer: nn.Module,
    rows: RowDivision,
    call: DocumentsOfCall | None,
    whole: Any,
    compute: Any,
    hidden_states: torch.Tensor,
    *args: Any,
    **options: Any,
) -> Any:
    """The layer's forward of this rank's part of the tokens, (rows, tokens, features)."""
    if computes_whole_rows():
        return whole(hidden_states, *args, **options)
    assert rows.groups is not None
    assert options.get("attention_mask") is None, "padding on the right needs no mask"
    sent, finish = family.project(layer, hidden_states)
    parts = list[torch.Tensor]()
    for rank in range(rows.size):
        heads = _heads_of(family, layer, rows, rank)
        of_rank = [each[:, :, getattr(heads, kind)].flatten(2) for kind, each in sent]
        parts.append(torch.cat(of_rank, dim=-1))
    received = all_to_all(torch.stack(parts), rows.groups.all)
    order = None
    if rows.ring > 1:
        assert call is not None
        assert call.divided is not None
        order = call.divided.order
        assert order is not None
    count, width = hidden_states.shape[:2]
    if order is None:  # a row is the slices of the ranks, one after the other
        tokens = torch.cat(received.unbind(), dim=1)
    else:
        tokens = received.flatten(0, 2)[order].view(count, width * rows.size, -1)
    out = compute(tokens)
    if order is None:
        back = torch.stack(out.chunk(rows.size, dim=1))
    else:
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        back = out.flatten(0, 1)[places].view(rows.size, count, width, -1)
    received = all_to_all(back, rows.groups.all)
    return finish(torch.cat(received.unbind(), dim=-1))
