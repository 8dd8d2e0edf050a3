"""Pipeline parallelism: the order in which a rank runs its stages of the micro-batches of a step.

1F1B (Narayanan et al., 2019, PipeDream; 2021, arXiv 2104.04473, section 2.2): after some forward
passes a rank alternates between one forward and one backward pass, so that at most as many
micro-batches as there are stages are in flight. Interleaved: a rank has two stages of half the blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from launcher.distributed.rank_layout import STAGES
from launcher.strategies.base import MicroBatchSchedule, NormGroup, WrappedModel, local_gradient

_T = TypeVar("_T")


@dataclass(frozen=True)
class Pass:
    """A forward or backward pass of a stage of this rank."""

    forward: bool
    chunk: int
    """The number of the stage among those of this rank."""
    micro_batch: int


def schedule(micro_batches: int, *, rank: int, ranks: int, chunks: int = 1) -> list[Pass]:
    """The passes of a rank in order. chunks: stages of each rank. With several, the micro-batches come
    in groups of as many as there are ranks. Those that are left come after all others have ended."""
    left = micro_batches % ranks if chunks > 1 else 0
    complete = micro_batches - left
    before = ranks - 1 - rank if chunks == 1 else 2 * (ranks - 1 - rank) + (chunks - 1) * ranks
    # With fewer, all forward passes come first: with the order of full groups, ranks would wait for
    # each other
    parts = ((range(complete), before), (range(complete, micro_batches), left * chunks))
    return [each for numbers, first in parts for each in _passes(numbers, first, ranks, chunks)]


def passes_in_flight(passes: Sequence[Pass]) -> int:
    """The most forward passes whose backward pass is to come."""
    return max(itertools.accumulate(1 if each.forward else -1 for each in passes))


def _passes(numbers: Sequence[int], before: int, ranks: int, chunks: int) -> list[Pass]:
    """The passes of these micro-batches: `before` forward passes, then a forward and a backward pass in
    turn, then the other backward passes."""
    size = ranks if chunks > 1 else max(1, len(numbers))
    groups = [numbers[start : start + size] for start in range(0, len(numbers), size)]
    forward = [Pass(True, chunk, n) for g in groups for chunk in range(chunks) for n in g]
    backward = [Pass(False, chunk, n) for g in groups for chunk in range(chunks)[::-1] for n in g]
    found = forward[:before]
    for position, each in enumerate(forward[before:]):
        found += [each, backward[position]]
    return found + backward[max(0, len(forward) - before) :]


class Links(Protocol):
    """What a pipeline asks of the `Links` of `launcher.models.pipeline`."""

    group: dist.ProcessGroup
    size: int
    rank: int

    def between(self, stage: int, *, backwards: bool) -> dist.ProcessGroup:
        """The group in which a stage sends to the next one, or gets the gradient of what it sent."""


class StagedModel(Protocol):
    """What a pipeline asks of the `StagedModel` of `launcher.models.pipeline`."""

    count: int
    own: list[int]
    device: torch.device

    @property
    def links(self) -> Links:
        """The groups in which stages send."""

    @property
    def tied_weights(self) -> list[nn.Parameter]:
        """The trained parameters of which the first and the last stage have copies."""

    @property
    def other_of_tied(self) -> int:
        """The rank in the group that has the other copies."""

    def blocks_text(self, rank: int) -> str:
        """The numbers of the blocks of a rank in the group."""

    def is_last(self, stage: int) -> bool:
        """Whether a stage computes the loss."""

    def rank_of(self, stage: int) -> int:
        """The rank in the group that has a stage."""

    def enter(self, stage: int, received: torch.Tensor | None) -> None:
        """The next forward pass is that of this stage."""

    def leave(self) -> torch.Tensor | None:
        """The activation for the next stage."""

    def buffer(self, ids: torch.Tensor) -> torch.Tensor:
        """Memory for the activation that a stage receives."""


class _Exchange:
    """The activations and gradients that a rank exchanges in a step. A transfer that this rank will
    wait for is begun one pass ahead."""

    def __init__(
        self,
        passes: Sequence[Pass],
        staged: StagedModel,
        ids_of: Callable[[int], torch.Tensor],
        waiting: Callable[..., AbstractContextManager[None]],
    ) -> None:
        """ids_of: the ids of a micro-batch, which have the shape of its activation."""
        self._staged, self._ids_of, self._waiting = staged, ids_of, waiting
        self._awaited = [each for each in passes if self._group(each) is not None]
        self._begun: dict[Pass, tuple[torch.Tensor, dist.Work]] = {}
        self._sending: list[tuple[dist.Work, torch.Tensor]] = []

    def receive(self, each: Pass, like: torch.Tensor | None = None) -> torch.Tensor | None:
        """What a pass begins with: the activation of the stage before, or the gradient of `like`. None
        if there is none."""
        if each not in self._awaited:
            return None
        if each not in self._begun:
            self._begin(each, like)
        self._awaited.remove(each)
        tensor, work = self._begun.pop(each)
        with self._waiting(STAGES):
            work.wait()
        return tensor

    def begin_next(self, outputs: dict[tuple[int, int], tuple[Any, torch.Tensor]]) -> None:
        """Begins the transfers of the next activation and the next gradient, if the output that the
        gradient is of exists."""
        for forward in (True, False):
            following = next((each for each in self._awaited if each.forward is forward), None)
            if following is None or following in self._begun:
                continue
            output = outputs.get((following.chunk, following.micro_batch))
            if forward or output is not None:
                self._begin(following, None if output is None else output[1])

    def send(self, tensor: torch.Tensor, each: Pass) -> None:
        """Begins to send the result of a pass: an activation, or the gradient of one."""
        staged, stage = self._staged, self._staged.own[each.chunk]
        to = stage + 1 if each.forward else stage - 1
        group = staged.links.between(min(stage, to), backwards=not each.forward)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, group=group, group_dst=staged.rank_of(to))
        assert work is not None
        self._sending = [pair for pair in self._sending if not pair[0].is_completed()]
        self._sending.append((work, tensor))

    def finish(self) -> None:
        """Waits until all that was sent has been received."""
        with self._waiting(STAGES):
            for work, _ in self._sending:
                work.wait()
        self._sending = []

    def _group(self, each: Pass) -> dist.ProcessGroup | None:
        """The group in which a pass receives what it begins with; None: it receives nothing."""
        stage = self._staged.own[each.chunk]
        if (stage == 0) if each.forward else self._staged.is_last(stage):
            return None
        before = stage - 1 if each.forward else stage
        return self._staged.links.between(before, backwards=not each.forward)

    def _begin(self, each: Pass, like: torch.Tensor | None) -> None:
        staged, stage = self._staged, self._staged.own[each.chunk]
        if each.forward:
            tensor = staged.buffer(self._ids_of(each.micro_batch))
            source = staged.rank_of(stage - 1)
        else:
            assert like is not None
            tensor = torch.empty_like(like, memory_format=torch.contiguous_format)
            source = staged.rank_of(stage + 1)
        work = dist.irecv(tensor, group=self._group(each), group_src=source)
        assert work is not None
        self._begun[each] = tensor, work


class Pipeline(MicroBatchSchedule):
    """The passes of the stages of a rank, of a model that another strategy shards over the ranks with the
    same blocks."""

    def __init__(self, staged: StagedModel, *, schedule: str) -> None:
        """schedule: `strategy.pipeline_schedule`."""
        self.staged, self._name = staged, schedule

    def attach(self, wrapped: WrappedModel) -> None:
        """Makes this the order of the micro-batches of a wrapped model, whose norm then includes all stages."""
        wrapped.micro_batch_schedule = self
        wrapped.norm_groups.append(NormGroup(self.staged.links.group, of_stages=True))
        if 0 not in self.staged.own:
            wrapped.counted_elsewhere = frozenset(self.staged.tied_weights)

    def description(self) -> str:
        blocks = self.staged.blocks_text(self.staged.links.rank)
        sizes = f"{self.staged.count} stages over {self.staged.links.size} ranks"
        return f"pipeline ({self._name}): {sizes}, blocks {blocks} here"

    def accumulate(
        self,
        wrapped: WrappedModel,
        micro_batches: Sequence[_T],
        loss: Callable[[nn.Module, _T], torch.Tensor],
        factor: torch.Tensor,
        *,
        heartbeat: Callable[[str], None],
        stop_reached: Callable[[], bool],
    ) -> torch.Tensor | None:
        """Runs this rank's passes of a step. The sum of the losses is that of the last stage, and 0 on
        the other ranks."""
        staged, size = self.staged, self.staged.links.size
        chunks = len(staged.own)
        stop = stop_reached
        if chunks > 1:  # ranks would wait for each other if they stopped within a step
            if stop_reached():
                return None
            stop = _never
        passes = schedule(len(micro_batches), rank=staged.links.rank, ranks=size, chunks=chunks)
        last_of = {each.chunk: each for each in passes if not each.forward}
        # What is on the host is not copied to the device for its shape
        host: Any = getattr(micro_batches, "host", micro_batches)
        exchange = _Exchange(
            passes, staged, lambda number: host[number].inputs["input_ids"], wrapped.waiting
        )
        in_flight: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        total = torch.zeros_like(factor)
        for each in passes:
            key, stage = (each.chunk, each.micro_batch), staged.own[each.chunk]
            if each.forward:
                if stop():
                    return None
                heartbeat("forward")
                received = exchange.receive(each)
                exchange.begin_next(in_flight)
                if received is not None:
                    received.requires_grad_()
                staged.enter(stage, received)
                summed, sent = wrapped.call(self._forward, micro_batches[each.micro_batch], loss)
                if staged.is_last(stage):
                    total = total + summed.detach()
                    sent = (summed if summed.ndim == 0 else summed[0]) * factor
                else:
                    total = total + torch.zeros_like(summed)
                    exchange.send(sent.detach(), each)
                in_flight[key] = received, sent
                continue
            heartbeat("backward")
            received, output = in_flight[key]
            gradient = exchange.receive(each, output)
            del in_flight[key]
            exchange.begin_next(in_flight)
            with wrapped.micro_batch(last=each == last_of[each.chunk]):
                if output.requires_grad:  # not if all before it is frozen
                    output.backward(gradient)  # type: ignore[no-untyped-call]
            if received is not None:
                exchange.send(_gradient_of(received), each)
        exchange.finish()
        self._add_tied(wrapped)
        return total

    def _forward(
        self, model: nn.Module, micro_batch: _T, loss: Callable[[nn.Module, _T], torch.Tensor]
    ) -> tuple[torch.Tensor, Any]:
        """The loss, and the activation for the next stage: FSDP looks among the results for the tensors
        that backward passes begin with."""
        summed = loss(model, micro_batch)
        return summed, self.staged.leave()

    @torch.no_grad()
    def _add_tied(self, wrapped: WrappedModel) -> None:
        """Adds the gradients that the first and the last stage have of weights that they share."""
        staged, group = self.staged, self.staged.links.group
        every = [local_gradient(p) for p in staged.tied_weights if p.grad is not None]
        own = [gradient for gradient in every if gradient.numel()]
        if not own:
            return
        mine = [gradient.to(staged.device).contiguous() for gradient in own]
        others = [torch.empty_like(gradient) for gradient in mine]
        operations = [
            dist.P2POp(operation, gradient, group=group, group_peer=staged.other_of_tied)
            for sent, received in zip(mine, others, strict=True)
            for operation, gradient in ((dist.isend, sent), (dist.irecv, received))
        ]
        with wrapped.waiting(STAGES):
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        for gradient, other in zip(own, others, strict=True):
            gradient.add_(other.to(gradient.device))  # offloaded gradients are in host memory


def _never() -> bool:
    return False


def _gradient_of(received: torch.Tensor) -> torch.Tensor:
    gradient, received.grad = received.grad, None
    return torch.zeros_like(received) if gradient is None else gradient
