"""`model.compile`: the cache folder, and reports of graph breaks. No C++ compiler is needed."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from launcher.distributed.environment import set_compile_cache
from launcher.models.attention import VARLEN
from launcher.models.build import find_blocks
from launcher.strategies.wrap import _mark_documents, graph_breaks
from tests.unit.models.test_packed_attention import build, isolate


@pytest.fixture(autouse=True)
def _reset_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def test_compile_cache_folder():
    variables = {}
    for folder in ("/data/cache", "/other"):  # the second call changes nothing
        set_compile_cache(Path(folder), variables)
        assert variables == {"TORCHINDUCTOR_CACHE_DIR": "/data/cache/inductor"}
    set_compile_cache(Path("relative"), variables := {})
    assert Path(variables["TORCHINDUCTOR_CACHE_DIR"]) == Path.cwd() / "relative" / "inductor"


class ReadsTensorValue(nn.Module):
    """Breaks the graph, because its code depends on the value of a tensor."""

    def forward(self, x):
        return x * 2 if x.sum().item() > 0 else x


def test_each_graph_break_reason_is_reported_once():
    model = nn.Sequential(nn.Linear(2, 2), ReadsTensorValue(), ReadsTensorValue())
    for block in model:
        block.compile(backend="eager")
    assert graph_breaks() == []
    model(torch.ones(2))
    (reason,) = graph_breaks()
    assert "item" in reason or "_local_scalar_dense" in reason
    assert "\n" not in reason
    model(torch.ones(2))
    assert graph_breaks() == [reason]


def test_number_of_documents_does_not_cause_recompilation():
    """In float32 on a CPU, attention is computed separately for each document."""
    assert isolate("llama", "sdpa") == ("varlen", VARLEN)
    model = build("llama", VARLEN)

    def logits(*starts):
        bounds = torch.tensor([*starts, 16], dtype=torch.int32)
        positions = torch.cat([torch.arange(int(n)) for n in bounds.diff()]).unsqueeze(0)
        inputs = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": 16, "max_length_k": 16, "use_cache": False}
        ids = torch.arange(16).unsqueeze(0)
        return model(input_ids=ids, position_ids=positions, **inputs).logits

    packings = [(0, 5), (0, 3, 9), (0, 2, 4, 11), (0, 7), (0, 1, 2, 3, 4)]
    expected = [logits(*starts) for starts in packings]
    model.register_forward_pre_hook(_mark_documents, with_kwargs=True)
    for block in find_blocks(model).values():
        block.compile(backend="eager")
    graphs = set()
    for starts, reference in zip(packings, expected, strict=True):
        assert torch.allclose(logits(*starts), reference, atol=1e-6)
        graphs.add(counters["stats"]["unique_graphs"])
    (reason,) = graph_breaks()
    assert "attention of one document after the other" in reason
    assert len(graphs) == 1, "a different number of documents must not recompile the blocks"
