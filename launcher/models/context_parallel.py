"""Context parallelism: the ranks of a group compute parts of the same rows.

Each rank has a part of the tokens of every row. In attention, the ranks exchange tokens against
heads: each computes attention of all tokens for its share of the heads (Ulysses: Jacobs et al.,
2023, arXiv 2309.14509). More ranks than heads allow are several such groups, which exchange keys and
values in a ring (`ring.py`). Recurrent layers exchange tokens against heads over all ranks
(`divided_recurrent.py`). All other layers see each token for itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries import families
from launcher.libraries.private import attention_implementation, tree_map_only
from launcher.models.attention import (
    DIVIDED_ROWS,
    VARLEN,
    has_sinks,
    refuse_other_layers,
    set_text_attention,
    varlen_attention,
)
from launcher.models.description import largest_of_layers, text_config
from launcher.models.divided_recurrent import check_recurrent_layers, divide_recurrent_layers
from launcher.models.documents import DocumentsOfCall
from launcher.models.predictions import logits
from launcher.models.record import record_of
from launcher.models.recurrent import recurrent_layers
from launcher.models.ring import ring_attention
from launcher.models.row_division import (
    RowDivision,
    RowGroups,
    computes_whole_rows,
    exchanged,
    rings_that_fit,
    whole_rows,
)
from launcher.sources.layouts import ATTACHMENTS, nouns_of, with_article

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KEY, RING = "strategy.context_parallel_size", "strategy.context_parallel_ring"
_numbers = itertools.count()


def ring_of(model: nn.Module, size: int, ring: int | None, *, tensor_parallel_size: int = 1) -> int:
    """The number of groups of a ring of `size` ranks: `ring`, or without it (strategy.
    context_parallel_ring: null) the smallest one that the model's attention heads allow. Raises
    RecipeError if the rows have attachments and would be divided over several groups: those are known
    before `check_rows`, which needs the ring's rows."""
    config = text_config(model)
    heads = 0 if config is None else largest_of_layers(config, "num_attention_heads")
    if ring is None:
        # A size that does not divide the heads is refused later
        rings = rings_that_fit(size, max(1, heads // tensor_parallel_size))
        ring = rings[0] if heads else 1
    if ring > 1 and (towers := record_of(model).towers) is not None:
        nouns = nouns_of(towers.kinds)
        without = " ".join(f"{ATTACHMENTS[kind]}=null" for kind in towers.kinds)
        raise RecipeError(
            f"{RING}: rows with {nouns} are not divided over a ring of {ring}; use a {KEY} that divides "
            f"the {heads} attention heads of {type(model).__name__}, or set {without} for rows of text"
        )
    return ring


def check_rows(
    model: PreTrainedModel,
    rows: RowDivision,
    *,
    sequence_length: int,
    tensor_parallel_size: int = 1,
    missing_for_varlen: str | None = None,
    missing_for_ring: str | None = None,
) -> None:
    """Raises RecipeError if these ranks cannot compute parts of the model's rows. Each rank has the heads
    of one of `tensor_parallel_size` parts of the layers. `missing_for_varlen` and `missing_for_ring` are
    the results of the functions of these names, for messages."""
    name, towers = type(model).__name__, record_of(model).towers
    if towers is not None and (towers.both_ways or not towers.inputs_known):
        kind, nouns = next(iter(towers.kinds)), nouns_of(towers.kinds)
        why = f"does not say which features of {with_article(kind)} belong to a part of a row"
        if towers.both_ways:
            why = f"attends to {nouns} in both directions, with masks that cannot be divided"
        without = " ".join(f"{ATTACHMENTS[kind]}=null" for kind in towers.kinds)
        raise RecipeError(f"{KEY}: {name} {why}; use 1, or set {without} for rows of text")
    if model.config.model_type in families.SHIFTED_POSITIONS:
        what = "positions begin after the id of the padding token"
        raise RecipeError(
            f"{KEY}: in {name} {what}, which is not supported for parts of rows; use 1"
        )
    refuse_other_layers(model, sequence_length, key=KEY, instead="use 1", recurrent=True)
    check_recurrent_layers(model, rows.size, key=KEY)
    if tensor_parallel_size > 1 and recurrent_layers(model):
        what = (
            f"the recurrent layers of {name} are not divided over context and tensor parallel ranks"
        )
        raise RecipeError(f"{KEY}: {what} at once; use 1, or strategy.tensor_parallel_size=1")
    config = model.config.get_text_config(decoder=True)
    if attention_implementation(model) != VARLEN:
        why = f"packed rows need {missing_for_varlen}; use it, data.packing=false, or"
        if attention_implementation(model) != "sdpa":
            why = "it needs model.attention=sdpa; use it, or"
        elif missing_for_varlen is None:
            why = "it is not plain causal attention (biases, caps, wide heads or other masks); use"
        raise RecipeError(f"{KEY}: the attention of {name} cannot be divided: {why} 1")
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {str(value) for value in _values(rope) if value in ("dynamic", "longrope")}
    if kinds:
        what = f"{name} scales rotary positions ({', '.join(kinds)}) by the longest row it sees"
        raise RecipeError(f"{KEY}: {what}, and each rank sees a part; use 1")
    heads, size = config.num_attention_heads, rows.size
    if heads % (rows.heads * tensor_parallel_size):
        own, rest = divmod(heads, tensor_parallel_size)
        rings = [] if rest else rings_that_fit(size, own)
        ranks = str(rows.heads)
        if tensor_parallel_size > 1:
            ranks += f" x {tensor_parallel_size} (strategy.tensor_parallel_size)"
        groups = "1 group" if rows.ring == 1 else f"{rows.ring} groups"
        advice = " or ".join(map(str, rings))
        raise RecipeError(
            f"{RING}: {groups} of {rows.heads} ranks, and {ranks} does not divide the {heads} attention "
            f"heads of {name}; "
            + (f"use {advice}, or null" if rings else "use another strategy.tensor_parallel_size")
        )
    if rows.ring > 1 and missing_for_ring is not None:
        fits = [n for n in range(1, heads + 1) if heads % (n * tensor_parallel_size) == 0]
        raise RecipeError(
            f"{RING}: attention of {name} over a ring of {rows.ring} needs {missing_for_ring}; use "
            f"it, or one of {', '.join(map(str, fits))} as {KEY}"
        )


def divide_rows(model: PreTrainedModel, rows: RowDivision) -> None:
    """Divides the rows of a model over ranks: its attention becomes `context_parallel_attention`, and
    its recurrent layers those of `divide_recurrent_layers`."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    assert rows.groups is not None
    record, call = record_of(model), None
    # The table is that of the process, and another model may have another group
    attention = f"{DIVIDED_ROWS}_{rows.groups.all.group_name}"
    if rows.ring > 1:
        attention += f"_{next(_numbers)}"
        call = record.documents = record.documents or DocumentsOfCall.of(model)
        # NCCL makes the connections of a group in its first call, which all of its ranks must make. In
        # a step of the ring some may have nothing to send
        dist.barrier(group=rows.groups.ring)
    function = partial(context_parallel_attention, rows.groups, call)
    ALL_ATTENTION_FUNCTIONS.register(attention, function)
    set_text_attention(model, attention)
    if recurrent_layers(model):
        divide_recurrent_layers(model, rows, call)


def _values(parameters: Any) -> Iterator[Any]:
    """The values of nested dicts: some models have rotary positions for each kind of layer."""
    for value in parameters.values():
        if isinstance(value, dict):
            yield from _values(value)
        elif isinstance(value, str):
            yield value


@torch.compiler.disable(  # type: ignore[no-untyped-call, untyped-decorator]
    reason="collectives between the ranks of a row"
)
def context_parallel_attention(
    groups: RowGroups,
    call: DocumentsOfCall | None,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """`varlen_attention` of rows whose tokens are divided over ranks.

    query, key and value are (batch, heads, tokens of this rank, head size); the bounds of documents
    are those of the whole rows. call: what says which tokens of the rows a group has, with a ring.
    Returns (batch, tokens of this rank, heads, head size).
    """
    if computes_whole_rows():
        return varlen_attention(module, query, key, value, attention_mask, **options)
    group = groups.heads
    size = 1 if group is None else group.size()
    query_heads, key_heads = query.shape[1], key.shape[1]
    if key_heads % size:
        # A rank needs the key heads of its query heads: the fewest copies that divide
        copies = (size if size % key_heads == 0 else query_heads) // key_heads
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    if group is not None:
        # (batch, heads of this rank, tokens of all of its ranks, head size)
        query, key, value = (exchanged(tensor, group) for tensor in (query, key, value))
        if has_sinks(options):
            options["s_aux"] = options["s_aux"].chunk(size)[group.rank()]
    if groups.ring is None:
        out, _ = varlen_attention(module, query, key, value, attention_mask, **options)
    else:
        assert attention_mask is None
        assert call is not None
        assert call.divided is not None
        batch, _, tokens, _ = query.shape
        query, key, value = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
        out = ring_attention(
            query,
            key,
            value,
            call.divided,
            groups.ring,
            scale=options.get("scaling"),
            window=options.get("sliding_window"),
            sinks=options.get("s_aux"),
        )
        out = out.reshape(batch, tokens, *out.shape[1:])
    return out if group is None else exchanged(out, group), None


@torch.no_grad()
def check_context_parallel(
    model: nn.Module,
    group: dist.ProcessGroup,
    rows: RowDivision,
    *,
    name: str,
    vocabulary: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Raises RecipeError unless context parallel ranks compute the logits of the whole row: a layer
    besides attention may mix tokens.

    Every rank must call this. name is that of the model's class. dtype is that of the computation;
    differences within its rounding error are accepted, since kernels may add in another order.
    """
    width = 8 * rows.size
    divided = rows.place(np.array([0, width]), rows=1, width=width, recurrent=True)
    generator = torch.Generator().manual_seed(0)
    row = torch.randint(vocabulary, (1, width), generator=generator).to(device)
    positions = torch.arange(width, device=device).unsqueeze(0)
    training = model.training
    model.eval()
    try:
        with whole_rows():
            whole = logits(model, {"input_ids": row, "position_ids": positions})
        inputs: dict[str, Any] = {"input_ids": row, "position_ids": positions}
        inputs = {name: rows.take(tensor, divided) for name, tensor in inputs.items()}
        if divided is not None:
            inputs["divided_rows"] = tree_map_only(
                torch.Tensor, lambda tensor: tensor.to(device), divided
            )
        shared = logits(model, inputs)
        mine = torch.from_numpy(rows.tokens(divided, rows=1, width=width)[0].copy())
        whole = whole[:, mine.to(device)].float()
        largest = whole.abs().max().clamp(min=torch.finfo(torch.float32).tiny)  # all may be 0
        difference = (shared.float() - whole).abs().max() / largest
    finally:
        model.train(training)
    dist.all_reduce(difference, op=dist.ReduceOp.MAX, group=group)
    if not float(difference) < max(1e-4, 4 * torch.finfo(dtype).eps):
        raise RecipeError(
            f"{KEY}: {name} computes other logits for a part of a row than for the whole row (they "
            f"differ by {float(difference):.1e}), so another layer mixes tokens; use 1"
        )
