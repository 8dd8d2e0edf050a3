"""Attention of rows whose tokens are divided over the groups of a ring (ring attention: Liu et al., 2023,
arXiv 2310.01889).

Each group has other tokens of the rows (`row_division.placed`). In step s it attends to keys of group
g - s, which that group sends to it directly, and for which it returns gradients in the backward pass.
Only keys that a query of the receiver sees are sent: those of the one document that reaches from the
sender's tokens into the receiver's, within the window.

So for each pair of spans attention is that of a rectangle: some tokens at the start of the later span
attend to some at the end of the earlier one, to all of them or within a window. No mask and no bounds
of documents are needed there. Partial outputs are merged in float32 by the log-sum-exp of their
scores.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.nn import functional

from launcher.libraries.private import varlen_backward, varlen_forward
from launcher.models.attention import (
    LARGEST_HEAD,
    gradient_of_sinks,
    has_varlen_kernel,
    missing_for_varlen,
)
from launcher.models.description import layer_configs, text_config
from launcher.models.row_division import DividedRows, Span


def missing_for_ring(model: Any, device: torch.device, compute_dtype: torch.dtype) -> str | None:
    """What the run would need so that attention can be computed in parts, such as "bfloat16 or float16
    on GPUs"; None: nothing is missing."""
    config = text_config(model)
    layers = [] if config is None else layer_configs(config)
    if any(
        getattr(layer, key, 0) for layer in layers for key in ("attention_dropout", "attn_pdrop")
    ):
        return "a model without dropout in its attention"
    if device.type != "cuda":
        return None
    widths = [getattr(layer, "head_dim", None) or 0 for layer in layers]
    if max((width for width in widths if isinstance(width, int)), default=0) > LARGEST_HEAD:
        return f"heads of at most {LARGEST_HEAD} features"
    return missing_for_varlen(model, device, compute_dtype)


class Rectangle(NamedTuple):
    """Tokens of a group that attend to tokens of another one, or to its own earlier ones."""

    query: Span
    """Of the group's tokens."""
    key: Span
    """Of the tokens that arrive, or of the group's own."""
    left: int
    """How many keys before its own a query sees, if the last query is aligned with the last key, as in
    FlashAttention; -1: each sees all."""


class Step(NamedTuple):
    """An exchange of keys and values, and what is computed with those that arrive."""

    number: int
    sent: list[Span]
    """The group's tokens that go to the group `number` places further; empty: none."""
    received: int
    """Tokens that arrive from the group `number` places before."""
    blocks: list[Rectangle]


class Plan(NamedTuple):
    """What a group computes in the attention of a layer."""

    rows: DividedRows
    own: list[Rectangle]
    """Between spans of the group."""
    steps: list[Step]
    """Also those without tokens: all groups exchange in the same order, whatever documents they have,
    because messages between two ranks are matched by their order."""


def plan_of(rows: DividedRows, window: int | None) -> Plan:
    """What the group of these rows computes in layers with this window, in tokens; None: without."""
    if window not in rows.plans:
        rows.plans[window] = make_plan(rows, window)
    plan: Plan = rows.plans[window]
    return plan


def make_plan(rows: DividedRows, window: int | None) -> Plan:
    """`plan_of`, without keeping it."""
    steps, ring, group = list[Step](), len(rows.spans), rows.group
    for number in range(1, ring):
        sent = _seen(_rectangles(rows, (group + number) % ring, group, window))
        blocks = _rectangles(rows, group, (group - number) % ring, window)
        moved, place = dict[int, int](), 0
        for start, end in _seen(blocks):
            moved[end] = place - start
            place += end - start
        arrived = [
            block._replace(key=(block.key[0] + by, block.key[1] + by))
            for block in blocks
            for by in [moved[block.key[1]]]
        ]
        steps.append(Step(number, sent, place, arrived))
    return Plan(rows, _rectangles(rows, group, group, window), steps)


def _rectangles(rows: DividedRows, queries: int, keys: int, window: int | None) -> list[Rectangle]:
    """What the tokens of group `queries` attend to of the earlier spans of group `keys`, besides what
    is within a span. Every query of a rectangle sees a key, so that its log-sum-exp is finite."""
    found, ends = list[Rectangle](), rows.ends
    mine, theirs = rows.spans[queries], rows.spans[keys]
    after = np.searchsorted(ends, mine[:, 0], side="right")
    # Only a span that begins within a document sees earlier ones: the tokens of this document
    for index in np.flatnonzero(ends[after - 1] < mine[:, 0]).tolist():
        start, end, place = mine[index].tolist()
        document, end = int(ends[after[index] - 1]), min(end, int(ends[after[index]]))
        low = np.searchsorted(theirs[:, 1], document, side="right")
        high = np.searchsorted(theirs[:, 1], start, side="right")
        for key_start, key_end, key_place in theirs[low:high].tolist():
            first, last, left = max(document, key_start), end, -1
            if window is not None:
                first = max(first, start - window + 1)
                last = min(last, key_end + window - 1)
                if first >= key_end or last <= start:
                    continue
                left = key_end - last + window - 1
                left = -1 if left >= key_end - first - 1 else left
            key = key_place + first - key_start, key_place + key_end - key_start
            found.append(Rectangle((place, place + last - start), key, left))
    return found


def _seen(blocks: Iterable[Rectangle]) -> list[Span]:
    """The keys of rectangles, each of which ends where a span of the sender ends: of those with the same
    end, the longest."""
    first: dict[int, int] = {}
    for block in blocks:
        start, end = block.key
        first[end] = min(first.get(end, start), start)
    return sorted((start, end) for end, start in first.items())


def ring_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: DividedRows,
    group: dist.ProcessGroup,
    *,
    scale: float | None,
    window: int | None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of this group's tokens to all earlier ones of their documents.

    query, key and value are (tokens, heads, head size), those of all rows one after the other; query may
    have more heads. sinks are (heads,). scale: None: head size ** -0.5. Returns (tokens, heads, head size
    of value).
    """
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    size = value.shape[-1]
    if has_varlen_kernel(query):  # it takes one head size, a multiple of 8
        widest = -(-max(query.shape[-1], size) // 8) * 8
        query, key, value = (
            functional.pad(each, (0, widest - each.shape[-1])) for each in (query, key, value)
        )
    out: torch.Tensor = _Ring.apply(  # type: ignore[no-untyped-call]
        query, key, value, sinks, plan_of(rows, window), group, _kernels(query)(scale, window)
    )
    return out[..., :size]


class _Ring(torch.autograd.Function):
    """With L = log sum_j exp(s_j) over all keys, weights are exp(s_j - L). So each rectangle's gradients
    follow from L, the output and its gradient alone (FlashAttention's backward pass), and no partial
    output is kept. A sink is one more score without a value."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        plan: Plan,
        group: dist.ProcessGroup,
        kernels: Kernels,
    ) -> torch.Tensor:
        exchange = _Exchange(group, torch.cat([key, value], dim=-1), plan.steps)
        exchange.start(0)
        out, log_sum = kernels.documents(query, key, value, plan.rows)
        # Copies: selective checkpointing keeps what operators return, and it may not change
        out, log_sum = out.to(torch.float32, copy=True), log_sum.clone()
        for block in plan.own:
            _merge(out, log_sum, block, kernels.rectangle(query, key, value, block))
        for index, step in enumerate(plan.steps):
            exchange.start(index + 1)
            sizes = [key.shape[-1], value.shape[-1]]
            their_key, their_value = torch.split(exchange.received(index), sizes, dim=-1)
            for block in step.blocks:
                found = kernels.rectangle(query, their_key, their_value, block)
                _merge(out, log_sum, block, found)
        if sinks is not None:
            with_sink = torch.logaddexp(log_sum, sinks.float()[:, None])
            out *= (log_sum - with_sink).exp().t().unsqueeze(2)
            log_sum = with_sink
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, log_sum)
        ctx.plan, ctx.group, ctx.kernels = plan, group, kernels
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, sinks, out, log_sum = ctx.saved_tensors
        plan, kernels, sizes = ctx.plan, ctx.kernels, [key.shape[-1], value.shape[-1]]
        state = _State(gradient.contiguous(), query, out, log_sum)
        own = torch.cat([key, value], dim=-1)
        exchange = _Exchange(ctx.group, own, plan.steps)
        exchange.start(0)
        of_query, *of_own = kernels.documents_backward(state, key, value, plan.rows)
        of_query = of_query.to(torch.float32, copy=True)
        of_both = torch.cat(of_own, dim=-1).float()
        del of_own

        def add(blocks: list[Rectangle], both: torch.Tensor, to: torch.Tensor) -> None:
            keys, values = torch.split(both, sizes, dim=-1)
            for block in blocks:
                of_block, *of_keys = kernels.rectangle_backward(state, keys, values, block)
                of_query[slice(*block.query)] += of_block
                to[slice(*block.key)] += torch.cat(of_keys, dim=-1)

        add(plan.own, own, of_both)
        returned: _Exchange | None = None
        for index, step in enumerate(plan.steps):
            exchange.start(index + 1)
            theirs = exchange.received(index)
            of_theirs = torch.zeros_like(theirs, dtype=torch.float32)
            add(step.blocks, theirs, of_theirs)
            # It returns directly, and so is rounded once; it is awaited after the next step
            before = returned
            returned = _Exchange(ctx.group, of_theirs.to(key.dtype), [step], back=True)
            returned.start(0)
            if before is not None:
                before.add_to(of_both)
        if returned is not None:
            returned.add_to(of_both)
        of_key, of_value = torch.split(of_both.to(key.dtype), sizes, dim=-1)
        of_sinks = None
        if sinks is not None:
            of_sinks = gradient_of_sinks(gradient, out, sinks, log_sum)
        return of_query.to(query.dtype), of_key, of_value, of_sinks, None, None, None


def _merge(
    out: torch.Tensor,
    log_sum: torch.Tensor,
    block: Rectangle,
    found: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Adds attention to further keys: out (tokens, heads, size), float32, and log_sum (heads,
    tokens) become those of all. In place."""
    own_out, own_sum = out[slice(*block.query)], log_sum[:, slice(*block.query)]
    merged = torch.logaddexp(own_sum, found[1])
    shares = [(each - merged).exp().t().unsqueeze(2) for each in (own_sum, found[1])]
    own_out.mul_(shares[0]).addcmul_(found[0].float(), shares[1])
    own_sum.copy_(merged)


class _Exchange:
    """Pieces of a tensor (tokens, ...) that go to other groups of the ring while this one computes.
    back: the gradients of pieces, which return to the sender."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        tensor: torch.Tensor,
        steps: list[Step],
        *,
        back: bool = False,
    ) -> None:
        self._group, self._tensor, self._steps, self._back = group, tensor, steps, back
        self._works: dict[int, tuple[list[Any], torch.Tensor, torch.Tensor | None]] = {}

    def start(self, index: int) -> None:
        """Starts the exchange of a step, if there is such a step."""
        if index >= len(self._steps):
            return
        step, rank, size = self._steps[index], self._group.rank(), self._group.size()
        ahead, behind = (rank + step.number) % size, (rank - step.number) % size
        sent: torch.Tensor | None = None
        if self._back:  # what arrived is on its way back
            ahead, behind = behind, ahead
            sent = self._tensor if step.received else None
            count = sum(end - start for start, end in step.sent)
        else:
            parts = [self._tensor[start:end] for start, end in step.sent]
            sent = torch.cat(parts) if parts else None
            count = step.received
        received = self._tensor.new_empty(count, *self._tensor.shape[1:])
        operations = list[dist.P2POp]()
        if sent is not None:
            sent = sent.contiguous()
            operations.append(dist.P2POp(dist.isend, sent, group=self._group, group_peer=ahead))
        if count:
            operations.append(
                dist.P2POp(dist.irecv, received, group=self._group, group_peer=behind)
            )
        works = dist.batch_isend_irecv(operations) if operations else []
        # What is sent lives until the work is done
        self._works[index] = works, received, sent

    def received(self, index: int) -> torch.Tensor:
        """What has arrived in a step. Waits for it."""
        works, received, _ = self._works.pop(index)
        for work in works:
            work.wait()
        return received

    def add_to(self, total: torch.Tensor) -> None:
        """Adds what has returned to that of the tokens that were sent."""
        received, place = self.received(0), 0
        for start, end in self._steps[0].sent:
            total[start:end] += received[place : place + end - start]
            place += end - start


class _State(NamedTuple):
    """What the backward pass knows of all tokens of the group."""

    gradient: torch.Tensor
    """Of the output."""
    query: torch.Tensor
    out: torch.Tensor
    log_sum: torch.Tensor
    """Log-sum-exp of scores, (heads, tokens)."""

    def of(self, span: Span) -> _State:
        """Of these tokens."""
        one = slice(*span)
        log_sum = self.log_sum[:, one].contiguous()
        return _State(self.gradient[one], self.query[one], self.out[one], log_sum)


def _kernels(tensor: torch.Tensor) -> type[Kernels]:
    return Flash if has_varlen_kernel(tensor) else Plain


class Kernels(ABC):
    """How attention of documents and rectangles is computed. query, key and value are (tokens, heads,
    head size). Results are the output and the log-sum-exp (heads, tokens), and in the backward pass the
    gradients of query, key and value."""

    def __init__(self, scale: float, window: int | None) -> None:
        self.scale = scale
        self.left = -1 if window is None else window - 1

    @abstractmethod
    def documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: DividedRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Causal attention within the parts of documents that a group has next to each other."""

    @abstractmethod
    def documents_backward(
        self, state: _State, key: torch.Tensor, value: torch.Tensor, rows: DividedRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The backward pass of `documents`, with the log-sum-exp of all keys."""

    @abstractmethod
    def rectangle(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Rectangle
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention of a rectangle of these tokens."""

    @abstractmethod
    def rectangle_backward(
        self, state: _State, key: torch.Tensor, value: torch.Tensor, block: Rectangle
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The backward pass of `rectangle`, with the log-sum-exp of all keys."""


class Flash(Kernels):
    """FlashAttention for variable lengths. A rectangle is one sequence, whose bounds are made on the
    device, without a synchronization."""

    def documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: DividedRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        longest, sides = max(rows.lengths), (self.left, 0)
        return varlen_forward(query, key, value, rows.bounds, longest, self.scale, sides)[:2]

    def documents_backward(
        self, state: _State, key: torch.Tensor, value: torch.Tensor, rows: DividedRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return varlen_backward(
            state.gradient,
            state.query,
            key,
            value,
            state.out,
            state.log_sum,
            rows.bounds,
            max(rows.lengths),
            _no_random(key),
            self.scale,
            (self.left, 0),
        )

    def rectangle(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Rectangle
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, keys = query[slice(*block.query)], slice(*block.key)
        bounds, counts = _one_sequence(block, query.device)
        return varlen_forward(
            query,
            key[keys],
            value[keys],
            bounds[0],
            counts[0],
            self.scale,
            (block.left, -1),
            key_bounds=bounds[1],
            longest_key=counts[1],
        )[:2]

    def rectangle_backward(
        self, state: _State, key: torch.Tensor, value: torch.Tensor, block: Rectangle
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own, keys = state.of(block.query), slice(*block.key)
        bounds, counts = _one_sequence(block, key.device)
        return varlen_backward(
            own.gradient,
            own.query,
            key[keys],
            value[keys],
            own.out,
            own.log_sum,
            bounds[0],
            counts[0],
            _no_random(key),
            self.scale,
            (block.left, -1),
            key_bounds=bounds[1],
            longest_key=counts[1],
        )


def _one_sequence(
    block: Rectangle, device: torch.device
) -> tuple[list[torch.Tensor], tuple[int, int]]:
    """The bounds of a rectangle's queries and of its keys, and their numbers."""
    counts = block.query[1] - block.query[0], block.key[1] - block.key[0]
    ends = torch.arange(2, dtype=torch.int32, device=device)
    return [ends * count for count in counts], counts


def _no_random(tensor: torch.Tensor) -> torch.Tensor:
    """The state of random numbers, which the kernel reads only with dropout."""
    return torch.zeros(2, dtype=torch.uint64, device=tensor.device)


class Plain(Kernels):
    """All scores of a document or rectangle, in the order of operations of FlashAttention, for CPUs."""

    def documents(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: DividedRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [
            self._attend(query[span], key[span], value[span], self.left, True)
            for span in itertools.starmap(slice, _spans(rows))
        ]
        return torch.cat([out for out, _ in parts]), torch.cat([one for _, one in parts], dim=1)

    def documents_backward(
        self, state: _State, key: torch.Tensor, value: torch.Tensor, rows: DividedRows
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = [
            self._attend_backward(
                state.of(span), key[slice(*span)], value[slice(*span)], self.left, True
            )
            for span in _spans(rows)
        ]
        of_query, of_key, of_value = map(torch.cat, zip(*parts, strict=True))
        return of_query, of_key, of_value

    def rectangle(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block: Rectangle
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys = slice(*block.key)
        return self._attend(query[slice(*block.query)], key[keys], value[keys], block.left, False)

    def rectangle_backward(
        self, state: _State, key: torch.Tensor, value: torch.Tensor, block: Rectangle
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        own, keys = state.of(block.query), slice(*block.key)
        return self._attend_backward(own, key[keys], value[keys], block.left, False)

    def _scores(
        self, query: torch.Tensor, key: torch.Tensor, left: int, causal: bool
    ) -> torch.Tensor:
        """(heads, queries, keys), -inf where a query does not see a key."""
        scores = torch.einsum("qhd,khd->hqk", query, key).float() * self.scale
        if causal or left >= 0:
            queries, keys = (
                torch.arange(each.shape[0], device=key.device) for each in (query, key)
            )
            distance = queries[:, None] + len(keys) - len(queries) - keys
            hidden = (distance < 0) & causal
            if left >= 0:
                hidden |= distance > left
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, left: int, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
        scores = self._scores(query, key, left, causal)
        log_sum = scores.logsumexp(2)
        weights = (scores - log_sum[..., None]).exp().to(value.dtype)
        return torch.einsum("hqk,khd->qhd", weights, value), log_sum

    def _attend_backward(
        self, state: _State, key: torch.Tensor, value: torch.Tensor, left: int, causal: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient, query, out, log_sum = state
        groups = key.shape[1]
        key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
        weights = (self._scores(query, key, left, causal) - log_sum[..., None]).exp()
        of_value = torch.einsum("hqk,qhd->khd", weights.to(value.dtype), gradient)
        mean = (gradient.float() * out.float()).sum(2).t()[..., None]
        of_weights = torch.einsum("qhd,khd->hqk", gradient, value).float()
        of_scores = (weights * (of_weights - mean) * self.scale).to(query.dtype)
        of_query = torch.einsum("hqk,khd->qhd", of_scores, key)
        of_key = torch.einsum("hqk,qhd->khd", of_scores, query)
        of_key, of_value = (
            each.view(each.shape[0], groups, -1, each.shape[2]).sum(2)
            for each in (of_key, of_value)
        )
        return of_query, of_key, of_value


def _spans(rows: DividedRows) -> list[Span]:
    """The parts of documents that a group has next to each other."""
    return [*pairwise(np.cumsum([0, *rows.lengths]).tolist())]


def _repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    return tensor.repeat_interleave(heads // tensor.shape[1], dim=1)
