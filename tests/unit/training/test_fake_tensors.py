"""Tests of the fake tensors of traces."""

import pytest
import torch

from launcher.libraries.private import FakeTensorMode
from launcher.training import fake_tensors
from launcher.training.fake_tensors import ShapesMode


def properties(tensor):
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


def operators():
    """Results of operators that return new tensors, views, arguments and several tensors."""
    one = torch.empty(2, 6, 4)
    whole = torch.empty(3, 4, dtype=torch.int64)
    yield one, [one * 2, whole * 2, whole * 2.0, whole / 1, whole * True]
    yield one, [one[:, 1:], one[:, 2:], one.transpose(0, 1), one.transpose(0, 1).reshape(-1)]
    yield one, [*one.split(2, dim=1), one @ one.transpose(1, 2), one.to(torch.bfloat16)]
    yield one, [one.add_(1), torch.zeros(3), torch.zeros(3, dtype=torch.float64), one.detach()]
    small = torch.empty(4, 3).t()
    yield small, [small.contiguous(), small.view(3, 4), small.t_(), small * 2, small.sum((0, 1))]


def test_remembered_shapes_are_those_of_torch(monkeypatch):
    """Also in the second pass, in which torch computes few of them."""
    computed = []
    dispatch = FakeTensorMode.__torch_dispatch__

    def counted(mode, func, *args, **kwargs):
        computed.append(func)
        return dispatch(mode, func, *args, **kwargs)

    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = [(owner, list(results)) for owner, results in operators()]
    monkeypatch.setattr(fake_tensors, "_RESULTS", {})
    monkeypatch.setattr(FakeTensorMode, "__torch_dispatch__", counted)
    counts = []
    for _ in range(2):
        computed.clear()
        with ShapesMode():
            found = [(owner, list(results)) for owner, results in operators()]
        counts.append(len(computed))
        for (owner, results), (own, same) in zip(expected, found, strict=True):
            assert list(map(properties, same)) == list(map(properties, results))
            shared = [one.untyped_storage() is owner.untyped_storage() for one in results]
            assert [one.untyped_storage() is own.untyped_storage() for one in same] == shared
            assert [one is own for one in same] == [one is owner for one in results]
    assert counts[0] > 20
    assert counts[1] <= 3  # the split, whose results are several, and the transposition in place


def test_values_are_not_invented():
    with ShapesMode():
        for _ in range(2):
            assert torch.tensor(3).item() == 3  # a constant, which fake tensors know
            with pytest.raises(RuntimeError):
                torch.empty(2).sum().item()


def test_tensors_of_other_devices_stay_there():
    with ShapesMode():
        for _ in range(2):
            on_cpu = torch.empty_like(torch.empty(2, device="meta"), device="cpu")
            assert (on_cpu + 1).device.type == "cpu"
