"""`model.compile`: `auto`, the cache folder, and what is logged. No C++ compiler is needed."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from launcher.checkpoint.resume import Latest
from launcher.data import collation
from launcher.data.collation import collate_sequences, make_sample
from launcher.data.images import PlannedImages
from launcher.distributed import triton_support
from launcher.distributed.environment import Environment, set_compile_cache
from launcher.models import attention
from launcher.models.attention import VARLEN
from launcher.models.description import describe
from launcher.models.record import record_of
from launcher.models.towers import tower_blocks
from launcher.planner.machine import known_machine
from launcher.reliability.progress import Progress
from launcher.run import compilation as run_compilation
from launcher.run import resolve
from launcher.strategies import compilation
from launcher.strategies.compilation import graph_breaks, why_eager
from launcher.strategies.wrap import _mark_documents
from tests import varlen_on_cpu
from tests.image_models import make_model
from tests.unit.models.test_images import levels, with_weights
from tests.unit.models.test_packed_attention import MODELS, build, isolate
from tests.unit.planner.example_plans import RECIPE


@pytest.fixture(autouse=True)
def _reset_dynamo():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
    counters.clear()


def test_compile_cache_folder(tmp_path):
    variables = {}
    for name in ("cache", "other"):  # the second call changes nothing
        set_compile_cache(tmp_path / "data" / name, Environment(), variables)
        assert variables == {"TORCHINDUCTOR_CACHE_DIR": f"{tmp_path}/data/cache/inductor"}
    set_compile_cache(Path("relative"), Environment(), variables := {})
    (tmp_path / "file").touch()
    set_compile_cache(tmp_path / "file" / "cache", Environment(), unwritable := {})
    assert unwritable == {}, "torch makes the folder when it is imported, and would fail"
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


@pytest.mark.slow
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
    for block in describe(model).blocks.values():
        block.compile(backend="eager")
    graphs = set()
    for starts, reference in zip(packings, expected, strict=True):
        assert torch.allclose(logits(*starts), reference, atol=1e-6)
        graphs.add(counters["stats"]["unique_graphs"])
    (reason,) = graph_breaks()
    assert "attention of one document after the other" in reason
    assert len(graphs) == 1, "a different number of documents must not recompile the blocks"


def sample(*documents):
    """A packed row of documents with these numbers of tokens."""
    return make_sample([(np.arange(size) % 64, np.arange(size) % 64) for size in documents])


def packed_rows(*rows, length):
    options = {"length": length, "packed": True, "document_masking": "varlen"}
    return collate_sequences([sample(*row) for row in rows], **options).micro_batch.inputs


def test_length_of_the_longest_document_is_rounded_up():
    def longest(length, *rows):
        tensors = packed_rows(*rows, length=length)
        assert tensors["max_length_q"] == tensors["max_length_k"]
        return tensors["max_length_q"]

    assert longest(4096, [3000, 1096]) == 4096
    assert longest(4096, [2048, 2048], [100] * 40) == 2048
    assert longest(4096, [257] * 15, [150] * 27) == 512
    assert longest(4096, [64] * 64) == 256
    assert longest(4096, [64] * 8) == 4096, "padding is a document, too"
    assert longest(3000, [2500, 400]) == 3000, "at most the row"
    assert longest(64, [32, 32]) == 64


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "kinds"), [("llama", 1), pytest.param("gemma3_text", 2, marks=pytest.mark.long)]
)
def test_length_of_the_longest_document_causes_one_recompilation(model_type, kinds, monkeypatch):
    """In training, by the operator of GPUs; Gemma has two kinds of layers."""
    varlen_on_cpu.register()
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda tensor: True)
    monkeypatch.setattr(collation, "_SHORTEST", 4)
    settings = MODELS[model_type]
    if kinds == 2:
        settings = settings | {"layer_types": ["sliding_attention", "full_attention"]}
    assert isolate(model_type, "sdpa", **settings) == ("varlen", VARLEN)
    model = build(model_type, VARLEN, **settings)
    model.register_forward_pre_hook(_mark_documents, with_kwargs=True)
    for block in describe(model).blocks.values():
        block.compile(backend="aot_eager", fullgraph=True)
    packings = [(16, 16), (4,) * 8, (8,) * 4, (16, 8, 8), (2,) * 16, (30, 2), (5, 3) * 4]

    def train():
        """Graphs after each step."""
        torch._dynamo.reset()
        counters.clear()
        graphs, lengths = [], set()
        for packing in packings:
            tensors = packed_rows(packing, length=32)
            model(**tensors, use_cache=False).logits.sum().backward()
            graphs.append(counters["stats"]["unique_graphs"])
            lengths.add(tensors["max_length_q"])
        return graphs, len(lengths)

    assert train() == ([kinds, *[2 * kinds] * (len(packings) - 1)], 4)
    monkeypatch.setattr(collation, "_rounded_length", lambda bounds, width: width)
    assert train() == ([kinds] * len(packings), 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "most"),
    [
        ("qwen2_5_vl", 3),
        *(
            pytest.param(family, most, marks=pytest.mark.long)
            for family, most in [
                ("gemma3", 2),
                ("gemma4", 3),
                ("idefics3", 2),
                ("mistral3", 2),
                ("qwen3_vl", 3),
            ]
        ),
    ],
)
def test_blocks_of_towers_are_compiled_for_all_images(family, most, monkeypatch, tmp_path):
    """For the first micro-batch; once more for any number of patches, with gradients of its inputs in
    the first block or without; and for a single image, or several."""
    varlen_on_cpu.register()
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda tensor: True)
    model = with_weights(make_model(tmp_path / family, family))
    inputs = record_of(model).towers.kinds["image"].inputs
    images = PlannedImages("", tower=inputs)
    attention.use_tower_attention(
        model, inputs.form, device=torch.device("cpu"), compute_dtype=torch.float32
    )

    def train(sizes):
        """The features of images of these numbers of tokens, and the gradients of the tower."""
        least = inputs.form.least_tokens
        arrays = images.join([inputs.form.largest(least * size)[2] for size in sizes])
        generator = np.random.default_rng(sum(sizes))
        arrays["pixel_values"] = generator.random(arrays["pixel_values"].shape, dtype=np.float32)
        tower = inputs.make(arrays, torch.zeros(1, 1))["tower"]
        depths = levels(inputs.form.features(model.base_model, tower))
        model.zero_grad()
        sum(depth.square().sum() for depth in depths).backward()
        found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [*(depth.detach() for depth in depths), *found]

    batches = [[4], [6, 4], [9, 4, 12], [6], [4, 4, 9, 16], [12], [16, 6], [9]]
    expected = [train(sizes) for sizes in batches]
    for block in tower_blocks(model).values():
        block.compile(backend="aot_eager", fullgraph=True)
    graphs = []
    for sizes, values in zip(batches, expected, strict=True):
        for one, other in zip(train(sizes), values, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
        graphs.append(counters["stats"]["unique_graphs"])
    assert len(set(graphs[3:])) == 1, graphs
    assert graphs[-1] <= most, graphs


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=8)
def test_variants_are_compiled_up_to_a_limit_that_is_named(caplog):
    """Nine variants: more than torch's own limit."""
    caplog.set_level("INFO")
    watch = run_compilation.Compilation(Progress(), rank=0)

    class Block(nn.Module):
        def forward(self, x, kind):
            return x + len(kind)

    def run(variants):
        torch._dynamo.reset()
        counters.clear()
        block = Block()
        block.compile(backend="eager")
        with watch.observed():
            for kind in range(variants):
                block(torch.ones(2), str(kind))
                watch.report(1)
        return counters["stats"]["unique_graphs"]

    assert run(9) == 8
    (line,) = [r for r in caplog.records if r.levelname == "WARNING" and "launcher" in r.name]
    assert "compile: a function is not compiled. Dynamo recompile limit exceeded" in line.message
    assert "recompile_limit" in line.message
    caplog.clear()
    compilation.prepare_compile(torch.device("cpu"))
    assert run(9) == 9
    assert not [r for r in caplog.records if r.levelname == "WARNING"]
    with torch._dynamo.config.patch(recompile_limit=100):
        compilation.prepare_compile(torch.device("cpu"))
        assert torch._dynamo.config.recompile_limit == 100, "a higher limit stays"


@pytest.fixture
def able(monkeypatch, tmp_path):
    """A machine that has what Triton needs. Returns monkeypatch."""
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(triton_support.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(
        triton_support.importlib.util, "find_spec", lambda name: name == "triton" or None
    )
    monkeypatch.setattr(
        triton_support.shutil, "which", lambda name: "/bin/gcc" if name == "gcc" else None
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.delenv("CC", raising=False)
    return monkeypatch


def test_auto_is_off_where_nothing_can_be_compiled(able, tmp_path):
    assert "CPUs" in why_eager("cpu")
    assert why_eager("cuda") is None, "of a machine that is planned for, nothing else is known"
    assert why_eager("cuda", check_triton=True) is None
    (tmp_path / "Python.h").unlink()
    assert "python3-dev" in why_eager("cuda", check_triton=True)
    able.setattr(triton_support.shutil, "which", lambda name: None)
    assert "no C compiler" in why_eager("cuda", check_triton=True)
    able.setattr(torch.cuda, "get_device_capability", lambda device: (6, 1))
    assert "7.0" in why_eager("cuda", check_triton=True)
    able.setattr(triton_support.importlib.util, "find_spec", lambda name: None)
    assert why_eager("cuda", check_triton=True) == "Triton is not installed"


@pytest.mark.parametrize(
    ("reasons", "before", "compiles", "said"),
    [
        ([None, None], None, True, "model.compile=true"),
        ([None, "no gcc"], None, False, "model.compile=false: no gcc; each block then launches"),
        ([None, None], False, False, "model.compile=false: as in the checkpoint"),
        ([None, None], True, True, "model.compile=true"),
        (["no gcc", None], True, False, "losses will differ by rounding"),
    ],
)
def test_auto_is_the_same_on_all_ranks_and_after_a_restart(
    reasons, before, compiles, said, monkeypatch, caplog
):
    """One rank that cannot compile is enough; a run keeps the choice of its checkpoint."""
    caplog.set_level("INFO")
    monkeypatch.setattr(resolve, "why_eager", lambda device, check_triton: reasons[0])
    monkeypatch.setattr(resolve, "gather", lambda value, group: reasons)
    monkeypatch.setattr(resolve, "from_rank_0", lambda value, group: value)
    recorded = {} if before is None else {"model": {"compile": before}}
    monkeypatch.setattr(resolve, "recorded_recipe", lambda run, start: recorded)
    ranks = SimpleNamespace(rank=0, size=2, group=None, device=torch.device("cuda"))
    recipe = dataclasses.replace(RECIPE, model=dataclasses.replace(RECIPE.model, compile="auto"))
    monkeypatch.setattr(resolve, "_write", lambda recipe, ranks, run: None)
    here = known_machine("h100", nodes=1, gpus_per_node=2)
    more = {"start": Latest(), "ranks": ranks, "run": None}
    resolved = resolve.resolve_by_machine(recipe, here, **more)
    assert resolved.model.compile is compiles
    assert said in caplog.text
    again = resolve.resolve_by_machine(resolved, here, **more)
    assert again is resolved


def test_compilation_is_logged_and_no_hang(caplog):
    caplog.set_level("INFO")
    progress, phases = Progress(), []
    progress.step_done(0)  # from here on, phases have a time limit

    class Block(nn.Module):
        def forward(self, x):
            return x + 1

    def backend(graph, inputs):
        phases.append(progress.slow_phase)
        return graph.forward

    block, watch = Block(), run_compilation.Compilation(progress, rank=0)
    block.compile(backend=backend)
    with watch.observed():
        for step in (1, 2):
            block(torch.ones(2))
            watch.report(step)
            assert progress.slow_phase is None
    assert phases == ["compile"]
    first, second = caplog.messages
    assert first.startswith("compile: the first step compiles the blocks")
    assert second.startswith("compile: 1 graphs in ")
    assert second.endswith("until step 1")
    torch._dynamo.reset()
    block(torch.ones(2))
    assert len(caplog.messages) == 2, "outside, nothing is followed"
