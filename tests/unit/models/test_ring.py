"""A ring computes the attention of dense scores, also with the operators of GPUs.

The groups of a ring are threads of this process. Between two of them messages arrive in order, as with
NCCL, whose messages have no tags."""

import queue
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.models import ring
from launcher.models.row_division import RowDivision
from tests import varlen_on_cpu

RING, ROWS, WIDTH, HEADS, GROUPS, SIZE = 3, 2, 48, 4, 2, 12
TOTAL, PATIENCE = ROWS * WIDTH, 60
BOUNDS = ([0, 48, 96], [0, 7, 40, 41, 48, 96], [0, 30, 48, 80, 96])


@pytest.fixture
def in_threads(monkeypatch):
    """Lets groups exchange through queues."""
    sent = {(a, b): queue.Queue() for a in range(RING) for b in range(RING)}

    def operation(function, tensor, *, group, group_peer):
        return function, tensor, group.rank(), group_peer

    def start(operations):
        works = []
        for function, tensor, rank, peer in operations:
            if function == "send":
                sent[rank, peer].put(tensor.clone())
            else:
                works.append(
                    SimpleNamespace(wait=lambda t=tensor, k=(peer, rank): take(t, sent[k]))
                )
        return works

    def take(tensor, messages):
        arrived = messages.get(timeout=PATIENCE)
        assert arrived.shape == tensor.shape
        tensor.copy_(arrived)

    names = {"P2POp": operation, "isend": "send", "irecv": "receive", "batch_isend_irecv": start}
    monkeypatch.setattr(ring, "dist", SimpleNamespace(**names, ProcessGroup=object))
    yield
    assert all(messages.empty() for messages in sent.values())


def of_groups(function):
    """What a function of a group's number returns in a thread of each group."""
    found = {}

    def run(group):
        try:
            found[group] = function(group)
        except BaseException as error:
            found[group] = error

    threads = [threading.Thread(target=run, args=(group,)) for group in range(RING)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE)
    for value in found.values():
        if isinstance(value, BaseException):
            raise value
    return [found[group] for group in range(RING)]


def dense(query, key, value, sinks, bounds, window):
    """Attention of all scores within documents."""
    document = torch.tensor(np.searchsorted(bounds, np.arange(TOTAL), side="right"))
    place = torch.arange(TOTAL)
    seen = (document[:, None] == document) & (place[:, None] >= place)
    if window is not None:
        seen &= place[:, None] - place < window
    key, value = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / 4
    scores = scores.masked_fill(~seen, -torch.inf)
    scores = torch.cat([scores, sinks.view(HEADS, 1, 1).expand(HEADS, TOTAL, 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., :-1], value)


def off(found, expected):
    return float((found.float() - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("bounds", BOUNDS, ids=["one", "many", "several"])
@pytest.mark.parametrize("window", [None, 11])
@pytest.mark.parametrize(
    ("kernels", "dtype", "limit"),
    [
        ("plain", torch.float32, 2e-6),
        ("flash", torch.float32, 2e-6),
        ("flash", torch.bfloat16, 1.5e-2),
    ],
)
def test_attention_and_gradients_are_those_of_all_scores(
    in_threads, monkeypatch, kernels, dtype, limit, window, bounds
):
    if kernels == "flash":
        varlen_on_cpu.register()
        monkeypatch.setattr(ring, "has_varlen_kernel", lambda tensor: True)
    calls = dict(varlen_on_cpu.CALLS)
    generator = torch.Generator().manual_seed(0)
    # Values are wider than queries, as with multi-head latent attention
    shapes = [(TOTAL, HEADS, SIZE), (TOTAL, GROUPS, SIZE), (TOTAL, GROUPS, 16), (HEADS,)]
    whole = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    weight = torch.randn(TOTAL, HEADS, 16, generator=generator)
    query, key, value, of_heads = whole
    expected = dense(query, key, value, of_heads, bounds, window)
    (expected * weight).sum().backward()

    def attend(group):
        division = RowDivision(RING, RING, group)
        rows = division.place(np.array(bounds), rows=ROWS, width=WIDTH)
        tokens = torch.from_numpy(
            np.concatenate([np.arange(a, b) for a, b, _ in rows.spans[group]])
        )
        own = [each.detach()[tokens].to(dtype).requires_grad_() for each in whole[:3]]
        sinks = whole[3].detach().clone().requires_grad_()
        member = SimpleNamespace(rank=lambda: group, size=lambda: RING)
        query, key, value = own
        out = ring.ring_attention(
            query, key, value, rows, member, scale=0.25, window=window, sinks=sinks
        )
        (out.float() * weight[tokens]).sum().backward()
        return tokens, out.detach(), [each.grad for each in own], sinks.grad

    found = of_groups(attend)
    for tokens, out, gradients, _ in found:
        assert off(out, expected.detach()[tokens]) < limit
        for gradient, of_all in zip(gradients, whole[:3], strict=True):
            assert off(gradient, of_all.grad[tokens]) < limit
    assert off(sum(sinks for *_, sinks in found), whole[3].grad) < limit
    assert (calls != varlen_on_cpu.CALLS) is (kernels == "flash")


def test_heads_of_autocast_are_computed_in_its_dtype(in_threads):
    def attend(group):
        rows = RowDivision(RING, RING, group).place(np.array(BOUNDS[0]), rows=ROWS, width=WIDTH)
        member = SimpleNamespace(rank=lambda: group, size=lambda: RING)
        query = torch.randn(TOTAL // RING, HEADS, 8)
        with torch.autocast("cpu", torch.bfloat16):
            return ring.ring_attention(query, query, query, rows, member, scale=None, window=None)

    assert {out.dtype for out in of_groups(attend)} == {torch.bfloat16}
