"""Packed documents of models with recurrent layers equal single documents."""

import copy
import functools
import importlib.util
import inspect
import itertools
import sys
import types

import numpy as np
import pytest
import torch
import transformers
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from launcher.data.collation import collate_sequences, make_sample
from launcher.data.packing import separate_pairs
from launcher.errors import RecipeError
from launcher.models import recurrent
from launcher.models.attention import check_isolation, isolate_documents
from launcher.models.description import describe
from launcher.models.documents import DocumentsOfCall, documents_at
from launcher.models.initialization import materialize
from launcher.models.record import record_of
from launcher.models.recurrent import (
    recurrent_layers,
    separate_documents,
    use_operators_without_values,
)
from launcher.objectives.answers import answer_log_probabilities
from launcher.objectives.preference import Preference
from launcher.recipe.schema import ActivationCheckpointing
from launcher.strategies.activation_checkpointing import checkpoint_blocks
from tests.datasets import dataset_of, rows_of
from tests.unit.models.recurrent_families import FAMILIES, build
from tests.unit.objectives.test_preference import store_of

CPU = torch.device("cpu")
ROWS = ([7, 40, 1, 16, 20], [30, 3, 33], [84])
"""Tokens of the documents of each row, which is 90 tokens wide."""
MASKED = {"falcon_mamba", "inkling_text", "mamba", "mamba2"}
"""Families without attention, and one whose attention is no plain one."""


def documents(rows=ROWS):
    generator = np.random.default_rng(0)
    return [[generator.integers(3, 96, size) for size in sizes] for sizes in rows]


def micro_batch(rows, **options):
    samples = [make_sample([(ids, np.append(ids[1:], -100)) for ids in row]) for row in rows]
    return collate_sequences(samples, length=90, packed=True, **options).micro_batch


def losses(logits, targets):
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )


def packable(model):
    """The masking of the model, which is changed as `change_forward` does it."""
    record_of(model).documents = separate_documents(model, CPU)
    assert record_of(model).recurrent
    options = {"sequence_length": 90, "device": CPU, "compute_dtype": torch.float32}
    return isolate_documents(model, **options)


def checkpoint(model, mode="full"):
    return checkpoint_blocks(
        model,
        describe(model).blocks,
        ActivationCheckpointing(mode=mode),
        recomputation=record_of(model).documents.recomputation,
    )


def compare(model_type, *, attention=None, checkpointing=False):
    """The masking, and the largest differences between packed and single documents: of logits, and
    of all gradients together, relative."""
    rows, single = documents(), build(model_type).train()
    packed = build(model_type, "meta", attention).train()
    masking = packable(packed)
    packed.to_empty(device=CPU).tie_weights()
    packed.load_state_dict(single.state_dict())
    rotary = dict(single.named_buffers())
    for name, buffer in packed.named_buffers():
        buffer.copy_(rotary[name])
    logits = []
    for row in rows:
        for ids in row:
            ids = torch.from_numpy(ids)[None]
            logits.append(single(input_ids=ids, use_cache=False).logits)
            losses(logits[-1][:, :-1], ids[:, 1:]).backward()
    if checkpointing:
        checkpoint(packed)
    made = micro_batch(rows, document_masking=masking, recurrent=True)
    found = packed(**made.inputs, use_cache=False).logits
    losses(found, made.targets).backward()
    parts = [
        part
        for row, sizes in zip(found, ROWS, strict=True)
        for part in row[: sum(sizes)].split(sizes)
    ]
    difference = max(
        float((part - expected[0]).abs().max())
        for part, expected in zip(parts, logits, strict=True)
    )
    pairs = [
        (one.grad - other.grad, other.grad)
        for one, other in zip(packed.parameters(), single.parameters(), strict=True)
        if other.grad is not None
    ]
    norms = [
        torch.cat([each.flatten() for each in side]).norm() for side in zip(*pairs, strict=True)
    ]
    return masking, difference, float(norms[0] / norms[1])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_packed_documents_equal_single_documents(model_type):
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {model_type}")
    masking, logits, gradients = compare(model_type)
    print(f"{model_type}: {masking}, logits {logits:.1e}, gradients {gradients:.1e}")
    assert masking == ("mask" if model_type in MASKED else "varlen")
    assert logits < 2e-6
    assert gradients < 1e-6


@pytest.mark.parametrize("model_type", ["granitemoehybrid", "nemotron_h", "qwen3_5_text"])
def test_packed_documents_with_a_mask(model_type):
    """As in bfloat16 on CPUs. granitemoehybrid makes its masks without positions."""
    masking, logits, gradients = compare(model_type, attention="eager")
    assert masking == "mask"
    assert logits < 2e-6
    assert gradients < 1e-6


@pytest.mark.parametrize("model_type", ["jamba", "nemotron_h", "qwen3_5_text"])
def test_layers_that_are_computed_again_have_the_same_documents(model_type):
    _, logits, gradients = compare(model_type, checkpointing=True)
    assert logits < 2e-6
    assert gradients < 1e-6


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_calls_in_flight_have_documents_of_their_own(mode):
    """As in a pipeline: a stage computes more micro-batches before it goes back through the first."""
    one, other = build("nemotron_h").train(), build("nemotron_h").train()
    made = [
        micro_batch(documents(sizes), document_masking=packable(model) and "varlen", recurrent=True)
        for model, sizes in ((one, ROWS), (other, [[20, 20], [50, 2, 2], [1, 80]]))
    ]
    for each in made:  # one call after the other, without recomputation
        losses(one(**each.inputs, use_cache=False).logits, each.targets).backward()
    checkpoint(other, mode)
    found = [losses(other(**each.inputs, use_cache=False).logits, each.targets) for each in made]
    for loss in found:
        loss.backward()
    for expected, parameter in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5)
    assert record_of(other).documents.documents is None, "nothing stays on the model"


@pytest.mark.long
@pytest.mark.parametrize("mode", ["full", "all_but_attention", "selective"])
@pytest.mark.parametrize(
    "model_type", ["granitemoehybrid", "lfm2", "nemotron_h", "qwen3_5_text", "qwen3_next"]
)
def test_compiled_blocks_that_are_computed_again(model_type, mode):
    """A block without a recurrent layer is checkpointed in its graph, others outside of graphs."""
    torch._dynamo.reset()
    plain, compiled = build(model_type).train(), build(model_type).train()
    made = [
        micro_batch(documents(sizes), document_masking=packable(model) and "varlen", recurrent=True)
        for model, sizes in ((plain, ROWS), (compiled, [[20, 20], [50, 2, 2], [1, 80]]))
    ]
    for block in checkpoint(compiled, mode).values():
        block.compile(backend="aot_eager")
    losses_of = [
        [losses(model(**each.inputs, use_cache=False).logits, each.targets) for each in made]
        for model in (plain, compiled)
    ]
    for expected, found in zip(*losses_of, strict=True):  # both calls are in flight
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        expected.backward()
        found.backward()
    for (name, one), other in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_without_separation_documents_mix():
    """What the tests above would measure without the change."""
    model = build("qwen3_5_text")
    (row,) = documents([[7, 40]])
    tensors = micro_batch([row], document_masking="mask").inputs
    with torch.no_grad():
        packed = model(**tensors, use_cache=False).logits[0, 7:47]
        alone = model(input_ids=torch.from_numpy(row[1])[None], use_cache=False).logits[0]
    assert (packed - alone).abs().max() > 1e-3


def test_a_check_at_the_start_finds_layers_that_mix_documents():
    """`check_isolation` with the arguments that a recurrent model gets."""
    options = {"name": "Model", "vocabulary": 96, "device": CPU, "recurrent": True}
    model = build("qwen3_5_text")
    masking = packable(model)
    check_isolation(model, document_masking=masking, **options)
    for layer in recurrent_layers(model).values():
        del layer.forward
    with pytest.raises(RecipeError, match="a packed document sees the one before it"):
        check_isolation(model, document_masking=masking, **options)


def test_a_copy_of_the_model_computes_with_its_own_layers():
    """A plan and a trial of attention copy models."""
    model = build("lfm2")
    packable(model)
    tensors = micro_batch(documents(), document_masking="varlen", recurrent=True).inputs
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        assert copied(**tensors, use_cache=False).logits.abs().max() > 0
        assert model(**tensors, use_cache=False).logits.abs().max() == 0


def test_rows_of_one_document_are_computed_as_they_are(monkeypatch):
    """After a packed micro-batch, too."""
    model = build("lfm2")
    packable(model)
    ids = torch.arange(3, 23).view(2, 10)
    with torch.no_grad():
        expected = build("lfm2")(input_ids=ids, use_cache=False).logits
        tensors = micro_batch(documents(), document_masking="varlen", recurrent=True).inputs
        model(**tensors, use_cache=False)
        found = model(input_ids=ids, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("sizes", [[1], [5, 5], [1, 64, 2, 2, 3, 40], list(range(1, 30))])
def test_the_layout_has_every_token_once_and_little_padding(sizes):
    positions = np.concatenate([np.arange(size) for size in sizes])[None]
    layout = documents_at(positions)
    tokens = torch.arange(positions.size) + 100
    padded = [tokens[batch] for batch in layout.batches]
    assert torch.equal(torch.cat([batch.flatten() for batch in padded])[layout.order], tokens[None])
    assert sum(batch.numel() for batch in padded) <= 2 * len(tokens)
    starts = [0, *itertools.accumulate(sizes)]
    assert layout.bounds.tolist() == starts
    assert layout.numbers[0].tolist() == np.repeat(np.arange(len(sizes)), sizes).tolist()
    # Each row of a batch is a document, followed by its last token
    for batch in layout.batches:
        for row in batch.tolist():
            number = starts.index(row[0])
            span = list(range(starts[number], starts[number + 1]))
            assert row == span + [span[-1]] * (len(row) - len(span))


@pytest.mark.long
def test_compiled_blocks_compute_recurrent_layers_as_they_are():
    """Another micro-batch has other documents, and no graph depends on them."""
    torch._dynamo.reset()
    eager, compiled = build("lfm2").train(), build("lfm2").train()
    for model in (eager, compiled):
        packable(model)
    for block in describe(compiled).blocks.values():
        block.compile(backend="aot_eager")
    for sizes in (ROWS, [[20, 20], [50, 2, 2], [1, 80]]):
        tensors = micro_batch(documents(sizes), document_masking="varlen", recurrent=True).inputs
        found, expected = (model(**tensors, use_cache=False).logits for model in (compiled, eager))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)
        found.sum().backward()
        expected.sum().backward()
    for one, other in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("packing", [True, False])
def test_the_answers_of_a_pair_are_computed_by_themselves(packing):
    """Both are in one row, also without packing."""
    generator = np.random.default_rng(0)
    pairs = [
        [generator.integers(3, 96, size).tolist() for size in (9, 4 + n, 20 - 5 * n)]
        for n in range(3)
    ]
    store = store_of(pairs)
    sequences = separate_pairs(
        store.offsets, store.first_lengths, store.labels_or_ids, sequence_length=45
    )
    model, single = build("nemotron_h"), build("nemotron_h")
    rows = dataset_of(
        store,
        sequences,
        90,
        joined=packing,
        objective=Preference(),
        document_masking=packable(model),
        recurrent=True,
    )
    made = rows.collate(rows_of(rows))
    found = answer_log_probabilities(model, made.micro_batch).value
    for number, answers in zip(made.documents.tolist(), found.tolist(), strict=True):
        prompt, *texts = pairs[number]
        for answer, log_probability in zip(texts, answers, strict=True):
            ids = torch.tensor([prompt + answer])
            logits = single(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
            of_tokens = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])
            assert log_probability == pytest.approx(float(of_tokens.sum()), abs=1e-5)


@pytest.mark.parametrize(
    ("model_type", "packages", "takes"),
    [
        ("qwen3_5_text", {"fla", "causal_conv1d"}, True),
        ("qwen3_5_text", {"fla"}, False),
        ("nemotron_h", {"mamba_ssm", "causal_conv1d"}, True),
        ("nemotron_h", {"causal_conv1d"}, False),
        ("lfm2", {"causal_conv1d"}, True),
        ("lfm2", set(), False),
        # Their kernels take no bounds
        ("jamba", {"mamba_ssm", "causal_conv1d"}, False),
        ("kimi_linear", {"fla", "causal_conv1d"}, False),
    ],
)
def test_layers_whose_kernels_take_the_bounds_of_documents(
    model_type, packages, takes, monkeypatch
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        recurrent.importlib.util,
        "find_spec",
        lambda name: object() if name in packages else None if "_" in name else find(name),
    )
    layers = recurrent_layers(build(model_type, "meta")).values()
    assert {recurrent._kernels_take_bounds(layer) for layer in layers} == {takes}


@torch.no_grad()
def test_kernels_on_gpus_receive_one_row_and_the_bounds():
    """The kernels themselves have not been run: this layer is a stand-in on a fake GPU."""
    received = {}

    def layer(hidden_states, **options):
        received.update(options, shape=tuple(hidden_states.shape))
        return hidden_states.narrow(-1, 0, 3)  # a CPU build cannot index on a GPU

    call = DocumentsOfCall()
    positions = np.array([[0, 1, 2, 0, 1], [0, 1, 0, 1, 2]])
    call.documents = layout = documents_at(positions)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows = torch.empty(2, 5, 4, device="cuda")
        out = recurrent._by_document(layer, call, True, rows, cu_seq_lens_q=None, cache=1)
    assert tuple(out.shape) == (2, 5, 3)
    assert received.pop("shape") == (1, 10, 4)
    assert received == {"cache": 1, "cu_seq_lens_q": layout.bounds, "seq_idx": layout.numbers}
    assert layout.bounds.tolist() == [0, 3, 5, 7, 10]
    assert layout.numbers.tolist() == [[0, 0, 0, 1, 1, 2, 2, 3, 3, 3]]


def test_kernels_of_other_packages_get_tensors_with_values_only(monkeypatch):
    """On an H200 with flash-linear-attention, the trial of attention on the meta device launched its
    kernels on a null address, and the run ended with an illegal memory access."""
    from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback
    from transformers.models.qwen3_5 import modeling_qwen3_5 as code

    called = []

    operators = inspect.unwrap(code.torch_chunk_gated_delta_rule)

    @functools.wraps(operators)  # transformers passes the arguments of its signature
    def chunk_gated_delta_rule(query, *args, **options):
        assert not query.is_meta
        assert not isinstance(query, FakeTensor)
        called.append(query.shape)
        return operators(query, *args, **options)

    package = types.SimpleNamespace(chunk_gated_delta_rule=chunk_gated_delta_rule)
    monkeypatch.setitem(sys.modules, "fla", package)
    decorator = use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "fla")
    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", decorator(operators))
    model = build("qwen3_5_text", device="meta")
    use_operators_without_values(model)
    use_operators_without_values(model)  # once more changes nothing
    assert packable(model) == "varlen"
    with FakeTensorMode(allow_non_fake_inputs=True):
        materialize(model, parameters=CPU, buffers=CPU)
        model(input_ids=torch.zeros(1, 8, dtype=torch.long), use_cache=False)
    assert not called
    model = build("qwen3_5_text")
    ids = torch.arange(8)[None]
    found = model(input_ids=ids, use_cache=False).logits
    assert len(called) == 1
    monkeypatch.setattr(code, "torch_chunk_gated_delta_rule", operators)
    torch.testing.assert_close(found, model(input_ids=ids, use_cache=False).logits)
