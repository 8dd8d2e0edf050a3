"""The loss without full logits: values, gradients, and supported models."""

import collections
import copy
import functools
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.data.collation import collate_sequences
from launcher.models import head as head_module
from launcher.models.build import build_model
from launcher.models.description import embeddings
from launcher.models.head import (
    IGNORED,
    Chunking,
    Head,
    Transform,
    chunk_width,
    computes_loss,
    linear_cross_entropy,
    logits_transform,
)
from launcher.models.initialization import random_weights
from launcher.models.lora import add_adapters
from launcher.models.micro_batch import MicroBatch
from launcher.models.record import record_of
from launcher.objectives.loss import summed_loss
from launcher.recipe.schema import Lora, Model

CPU = torch.device("cpu")
SMALL = {"vocab_size": 300, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
SMALL |= {"num_attention_heads": 2, "num_key_value_heads": 2}


@pytest.fixture
def small_chunks(monkeypatch):
    """Sets chunks of 64 vocabulary entries for 32 tokens."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 32 * 64)


def random_leaf(*shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(len(shape) + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_()


def full_loss(logits, targets):
    return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


@pytest.mark.parametrize(
    "transform", [Transform(), Transform(0.25), Transform(1.5, 4.0)], ids=["", "scale", "softcap"]
)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_values_and_gradients_match_cross_entropy(transform, bias):
    leaves = [random_leaf(32, 8), random_leaf(300, 8), *([random_leaf(300)] if bias else [])]
    inputs, weight, added = (*leaves, None)[:3]
    targets = torch.randint(300, (32,))
    targets[::5] = IGNORED
    logits = F.linear(inputs, weight, added) * transform.scale
    if transform.softcap is not None:
        logits = torch.tanh(logits / transform.softcap) * transform.softcap
    expected = full_loss(logits, targets)
    wanted = torch.autograd.grad(expected * 0.3, leaves)
    for width in (64, 100, 300):
        found = linear_cross_entropy(inputs, weight, added, targets, Chunking(transform, width))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        for one, other in zip(torch.autograd.grad(found * 0.3, leaves), wanted, strict=True):
            assert (one - other).norm() <= 1e-6 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transform", [Transform(), Transform(0.25), Transform(1.5, 4.0)], ids=str)
def test_gpu_and_compiled_operators_give_the_same_loss(transform, dtype, monkeypatch):
    """Operators on GPUs cast what they read and write; on a CPU that is the same to the bit."""
    leaves = [random_leaf(32, 8, dtype=dtype), random_leaf(300, 8, dtype=dtype)]
    targets = torch.randint(300, (32,), generator=torch.Generator().manual_seed(1))
    targets[::5] = IGNORED

    def results(compile=False):
        chunking = Chunking(transform, 128, compile)  # the last chunk is smaller
        loss = linear_cross_entropy(leaves[0], leaves[1], None, targets, chunking)
        return [loss, *torch.autograd.grad(loss * 0.3, leaves)]

    expected = results()
    with monkeypatch.context() as patch:
        patch.setattr(head_module, "_copies_to_cast", lambda tensor: False)
        assert all(map(torch.equal, results(), expected))
    # The graphs are those that Inductor gets; it would take a minute with a C++ compiler
    torch._dynamo.reset()
    compiled = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    monkeypatch.setattr(head_module, "_compiled", functools.cache(compiled))
    rounding = 1e-6 if dtype == torch.float32 else 1e-3
    for found, wanted in zip(results(compile=True), expected, strict=True):
        assert (found - wanted).norm() <= rounding * wanted.norm()
    torch._dynamo.reset()


def test_operators_move_few_bytes_for_each_logit(monkeypatch):
    """In bfloat16 with eager operators of a GPU, without the features, which depend on the model."""
    monkeypatch.setattr(head_module, "_copies_to_cast", lambda tensor: False)
    with FakeTensorMode():
        inputs, weight = (torch.empty(n, 1, dtype=torch.bfloat16) for n in (4096, 2**14))
        loss_of = linear_cross_entropy
        targets = torch.zeros(4096, dtype=torch.long)
        with Traffic() as traffic:
            loss_of(inputs.requires_grad_(), weight, None, targets, Chunking(Transform(), 2**13))
            forward = traffic.bytes
        logits = torch.empty(4096, 2**13, dtype=torch.bfloat16)
        arguments = (torch.zeros(4096, 1), targets[:, None], torch.ones(4096, 1), Transform())
        with Traffic() as backward:
            head_module._gradient(logits, *arguments)
    assert forward / (4096 * 2**14) == pytest.approx(22, abs=0.1)
    # A product writes the logits, and two read their gradient
    assert backward.bytes / logits.numel() + 2 + 4 == pytest.approx(26, abs=0.1)


class Traffic(TorchDispatchMode):
    """Counts the bytes that operators read and write. Reading or writing at indices, and views,
    count as nothing."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not views and func.__name__.split(".")[0] not in (
            "gather",
            "scatter_add_",
            "empty_like",
        ):
            read = (args, {name: x for name, x in (kwargs or {}).items() if name != "out"})
            tensors = [x for x in tree_leaves((read, out)) if isinstance(x, torch.Tensor)]
            self.bytes += sum(tensor.nbytes for tensor in tensors)
        return out


def test_bfloat16_gradients_are_as_accurate_as_full_logits():
    inputs, weight = (
        random_leaf(32, 64, dtype=torch.bfloat16),
        random_leaf(300, 64, dtype=torch.bfloat16),
    )
    targets, chunking = torch.randint(300, (32,)), Chunking(Transform(), 64)
    losses = [
        full_loss((inputs.double() @ weight.double().T).float(), targets),
        full_loss((inputs @ weight.T).float(), targets),
        linear_cross_entropy(inputs, weight, None, targets, chunking),
    ]
    gradients = [torch.autograd.grad(loss, (inputs, weight)) for loss in losses]
    for exact, plain, chunked in zip(*gradients, strict=True):
        assert (chunked - exact).norm() <= 1.2 * (plain - exact).norm()


def test_loss_without_targets_is_zero():
    inputs, weight = random_leaf(4, 8), random_leaf(300, 8)
    chunking = Chunking(Transform(), 64)
    for targets in (torch.full((4,), IGNORED), torch.zeros(0, dtype=torch.long)):
        loss = linear_cross_entropy(inputs[: len(targets)], weight, None, targets, chunking)
        loss.backward()
        assert loss == 0
        assert torch.count_nonzero(weight.grad) == 0


@pytest.mark.parametrize(
    ("tokens", "vocabulary", "width"),
    [
        (4096, 128256, 10688),  # 12 equal chunks instead of 8
        (4096, 151936, 15232),  # no 10 to 20 chunks are equal
        (128, 32000, 32000),
        (1, 100, 100),
        (2**20, 32000, 64),
    ],
)
def test_chunk_width(tokens, vocabulary, width):
    assert chunk_width(tokens, vocabulary) == width


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transform", [Transform(), Transform(0.25), Transform(1.5, 4.0)], ids=str)
@pytest.mark.parametrize("on_gpu", [False, True], ids=["", "operators of GPUs"])
def test_kept_logits_give_the_same_bits(transform, dtype, on_gpu, monkeypatch):
    monkeypatch.setattr(head_module, "_copies_to_cast", lambda tensor: not on_gpu)
    shapes = (32, 8), (300, 8), (300,)
    inputs, weight, bias = leaves = [random_leaf(*shape, dtype=dtype) for shape in shapes]
    targets = torch.randint(300, (32,), generator=torch.Generator().manual_seed(1))
    targets[::5] = IGNORED
    for reduction in ("sum", "none"):
        found = []
        for keep in (False, True):
            chunking = Chunking(transform, 64, reduction=reduction, keep_logits=keep)
            loss = linear_cross_entropy(inputs, weight, bias, targets, chunking)
            gradient = torch.ones_like(loss) * 0.3
            first = torch.autograd.grad(loss, leaves, gradient, retain_graph=True)
            again = torch.autograd.grad(loss, leaves, gradient)  # the logits are gone
            found.append([loss, *first, *again])
        assert all(map(torch.equal, *found)), reduction


class Calls(TorchDispatchMode):
    """Counts the calls of operators by name."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_kept_logits_are_computed_once():
    inputs, weight = random_leaf(32, 8), random_leaf(320, 8)
    targets = torch.randint(320, (32,))
    for keep in (False, True):
        chunking = Chunking(Transform(), 64, keep_logits=keep)
        with Calls() as calls:
            linear_cross_entropy(inputs, weight, None, targets, chunking).backward()
        products = calls.counts["mm.default"] + calls.counts["mm.out"]
        assert products == 5 * (3 if keep else 4)
        # The product writes into the weight's gradient
        assert calls.counts["mm.out"] == 5


def test_passes_without_gradients_keep_no_logits(monkeypatch):
    inputs, weight = random_leaf(32, 8), random_leaf(320, 8)
    made, plain = [], head_module.logits_of

    def recorded(*arguments):
        assert sum(ref() is not None for ref in made) <= 1
        logits = plain(*arguments)
        made.append(weakref.ref(logits))
        return logits

    monkeypatch.setattr(head_module, "logits_of", recorded)
    chunking = Chunking(Transform(), 64, keep_logits=True)
    with torch.no_grad():
        linear_cross_entropy(inputs, weight, None, torch.randint(320, (32,)), chunking)
    assert len(made) == 5


@pytest.mark.parametrize("vocabulary", [320, 300], ids=["equal chunks", "a narrower last chunk"])
@pytest.mark.parametrize("keep", [False, True], ids=["", "kept"])
def test_the_loss_is_compiled_once(vocabulary, keep, monkeypatch):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(
        head_module, "_compiled", functools.cache(lambda f: torch.compile(f, backend=backend))
    )
    inputs, weight = random_leaf(32, 8), random_leaf(vocabulary, 8)
    chunking = Chunking(Transform(), 64, True, keep_logits=keep)
    targets = torch.randint(vocabulary, (32,))
    for _ in range(2):
        linear_cross_entropy(inputs, weight, None, targets, chunking).backward()
    assert len(graphs) == 2, "one for the forward pass, one for the backward pass"
    torch._dynamo.reset()


def build(lora=None, **config):
    attention = "eager" if config["model_type"] == "gemma2" else "sdpa"
    model = build_model(Model(config=SMALL | config, attention=attention), sequence_length=16)
    if lora is not None:
        add_adapters(model, lora, base_dtype=torch.float32)
    record_of(model).head = Head(embeddings(model)[1], logits_transform(model))
    assert computes_loss(model)
    random_weights(model, CPU, CPU, seed=1)
    for index, parameter in enumerate(model.parameters()):
        parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(index))
    return model


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "llama", "tie_word_embeddings": True},
        {"model_type": "gemma2", "head_dim": 8, "final_logit_softcapping": 3.0},
        {"model_type": "granite", "logits_scaling": 4.0},
        {"model_type": "cohere", "logit_scale": 0.1},
        {"model_type": "phi"},  # its head has a bias
        # Its base model returns other fields than those of llama
        {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ],
    ids=lambda config: "-".join(str(value) for value in config.values()),
)
@pytest.mark.parametrize("adapters", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("few", [False, True], ids=["all targets", "few targets"])
def test_loss_of_models_matches_full_logits(config, adapters, few):
    layer = "c_attn" if config["model_type"] == "gpt2" else "q_proj"
    lora = Lora(rank=2, target_modules=("lm_head", layer)) if adapters else None
    model = build(lora, **config)
    rows = []
    for _ in range(2):
        ids, targets = torch.randint(300, (2, 16))
        targets[: 9 * few] = IGNORED
        row = {"input_ids": ids, "targets": targets, "position_ids": torch.arange(16)}
        rows.append({name: tensor.numpy() for name, tensor in row.items()})
    batch = collate_sequences(rows, length=16, packed=False, document_masking="mask").micro_batch
    assert (batch.positions is not None) is few
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    logits = model(input_ids=batch.inputs["input_ids"], use_cache=False).logits
    expected, found = (
        full_loss(logits.flatten(0, 1), batch.targets.flatten()),
        summed_loss(model, batch),
    )
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-5)
    gradients = [torch.autograd.grad(loss, trained) for loss in (found, expected)]
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() <= 3e-5 * other.norm()
    with torch.no_grad():
        assert summed_loss(model.eval(), batch) == pytest.approx(float(expected), rel=1e-6)


class DoubledLogits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.config, self.base_model, self.lm_head = model.config, model.base_model, model.lm_head

    def get_output_embeddings(self):
        return self.lm_head

    def forward(self, **inputs):
        outputs = self.base_model(**inputs)
        outputs.logits = 2 * self.lm_head(outputs.last_hidden_state)
        return outputs


def test_model_with_modified_logits_uses_full_logits():
    config = SMALL | {"model_type": "llama"}
    with torch.device("meta"):
        model = DoubledLogits(build_model(Model(config=config), sequence_length=16))
    assert logits_transform(model) is None
    assert not computes_loss(model)
    assert "forward" not in vars(model) | vars(model.lm_head) | vars(model.base_model)


def test_copied_model_uses_its_own_weights():
    model = build(model_type="llama")
    other = copy.deepcopy(model)
    other.lm_head.weight.data.zero_()
    ids = torch.zeros(1, 4, dtype=torch.long)
    batch = MicroBatch({"input_ids": ids}, torch.ones_like(ids))
    assert summed_loss(other, batch).item() == pytest.approx(4 * torch.tensor(300.0).log().item())
    assert summed_loss(model, batch).item() != pytest.approx(summed_loss(other, batch).item())
