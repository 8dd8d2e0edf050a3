"""Shares of the heads of recurrent layers. tests/distributed/test_rows.py trains with them."""

import functools
import sys
from typing import Any

import pytest
import torch

from launcher.models import divided_recurrent
from launcher.models.divided_recurrent import _family_of, _heads_of
from launcher.models.recurrent import recurrent_layers, separate_documents, separated
from launcher.models.row_division import RowDivision
from tests.unit.models.recurrent_families import build

DIVIDED = {
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "nemotron_h": 8,
    "bamba": 4,
    "granitemoehybrid": 8,
    "zamba2": 4,
    "lfm2": 8,
}
"""Families, and ranks that divide their heads: also more ranks than groups of heads."""
FUNCTIONS = ("causal_conv1d_fn", "torch_chunk_gated_delta_rule", "mamba2_chunk_scan")


def shares(layer, hidden, ranks, **bounds):
    """What the layer computes if each of the ranks has a share of its heads."""
    family, rows = _family_of(layer), RowDivision(ranks)
    sent, finish = family.project(layer, hidden)
    found = []
    for rank in range(ranks):
        heads = _heads_of(family, layer, rows, rank)
        parts = [each[:, :, getattr(heads, kind)].flatten(2) for kind, each in sent]
        found.append(family.compute(layer, heads, torch.cat(parts, dim=-1), **bounds))
    return finish(torch.cat(found, dim=-1))


def first_layer(model_type):
    return next(iter(recurrent_layers(build(model_type)).values()))


@pytest.mark.parametrize("model_type", DIVIDED)
@pytest.mark.parametrize("training", [True, False])
def test_shares_of_heads_are_the_layer(model_type, training):
    layer = first_layer(model_type).train(training)
    hidden = torch.randn(2, 20, 32, generator=torch.Generator().manual_seed(0))
    for ranks in (1, 2, DIVIDED[model_type]):
        found, expected = shares(layer, hidden, ranks), layer(hidden)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text", "nemotron_h", "lfm2"])
def test_kernels_of_shares_get_the_bounds_of_documents(model_type, monkeypatch):
    layer, seen = first_layer(model_type), []

    def recorded(function):
        def call(*args, **options):
            given = [options.pop(key, None) for key in ("seq_idx", "cu_seq_lens_q", "cu_seqlens")]
            seen.append(any(each is not None for each in given))
            return function(*args, **options)

        return call

    module = sys.modules[type(layer).__module__]
    for name in FUNCTIONS:
        if hasattr(module, name):
            monkeypatch.setattr(module, name, recorded(getattr(module, name)))
    bounds = {"cu_seq_lens_q": torch.tensor([0, 8, 20]), "seq_idx": torch.zeros(1, 20)}
    shares(layer, torch.randn(1, 20, 32), 2, **bounds)
    assert len(seen) == 2 * (1 if model_type == "lfm2" else 2)
    assert all(seen)


def test_a_share_computes_each_document_by_itself_as_the_layer_does():
    model = build("lfm2")
    layer = next(iter(recurrent_layers(model).values()))
    assert separated(layer, divided_recurrent._first) is divided_recurrent._first
    call = separate_documents(model, torch.device("cpu"))
    found = separated(layer, divided_recurrent._first)
    assert isinstance(found, functools.partial)
    own: Any = layer.forward
    assert found.func is own.func
    assert found.args == (divided_recurrent._first, call, False)
