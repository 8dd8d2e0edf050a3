"""Single-process tests of activation checkpointing and offload, DDP and scalars."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode

from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.libraries.private import fake_store
from launcher.models.initialization import random_weights
from launcher.models.shards import local_part
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema
from launcher.strategies import activation_checkpointing, fsdp
from launcher.strategies.activation_checkpointing import checkpoint_blocks, is_checkpointed
from launcher.strategies.activation_offload import ActivationOffload
from launcher.strategies.base import joint_norm
from launcher.strategies.ddp import Ddp
from launcher.strategies.wrap import Parts, wrap
from launcher.training.model import prepare_model


class Block(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), norm

    def forward(self, x):
        return torch.relu(self.norm(self.linear(x)))


def layers(number):
    return nn.Sequential(*[Block(nn.LayerNorm(4)) for _ in range(number)])


def checkpointed(model, **options):
    settings = schema.ActivationCheckpointing(**options)
    return checkpoint_blocks(model, dict(model.named_children()), settings)


def test_blocks_with_batch_norm_are_not_checkpointed():
    """Checkpointing would update the statistics twice, as the control shows."""
    x, model = torch.randn(8, 4), nn.Sequential(Block(nn.BatchNorm1d(4)), Block(nn.LayerNorm(4)))
    assert [is_checkpointed(block) for block in checkpointed(model).values()] == [False, True]
    control = checkpoint_wrapper(Block(nn.BatchNorm1d(4)))
    for module, updates in ((model, 1), (control, 2)):
        module(x).sum().backward()
        norm = next(m for m in module.modules() if isinstance(m, nn.BatchNorm1d))
        assert int(norm.num_batches_tracked) == updates


def test_every_nth_block_is_checkpointed():
    model = layers(5)
    blocks = checkpointed(model, every_n_blocks=2)
    assert [is_checkpointed(block) for block in blocks.values()] == [True, False] * 2 + [True]
    assert list(blocks.values()) == list(model), "the model contains the wrapped blocks"


def saved_bytes(model, x):
    """Return the bytes saved for the backward pass, without parameters."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(x)
    output.sum().backward()
    for parameter in model.parameters():
        kept.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(kept.values())


def test_full_mode_saves_only_block_inputs():
    x, plain, full = torch.randn(64, 4), layers(4), layers(4)
    checkpointed(full)
    assert saved_bytes(full, x) < saved_bytes(plain, x) / 2


@pytest.mark.parametrize(("mode", "recomputed"), [(None, 0), ("selective", 2), ("full", 4)])
def test_selective_mode_recomputes_every_other_product(mode, recomputed):
    counts = Counter()

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            counts[function] += 1
            return function(*args, **(kwargs or {}))

    four = [layer for _ in range(4) for layer in (nn.Linear(4, 4, bias=False), nn.Tanh())]
    model = nn.Sequential(nn.Sequential(*four))
    if mode:
        checkpointed(model, mode=mode)
    output = model(torch.randn(3, 4, requires_grad=True))
    with Count():
        output.sum().backward()
    backward_products = 8  # two products in the backward pass of each layer
    assert counts[torch.ops.aten.mm.default] == backward_products + recomputed


@pytest.mark.parametrize(
    ("mode", "attention", "products"), [("full", 1, 2), ("all_but_attention", 0, 2)]
)
def test_attention_alone_is_kept(mode, attention, products):
    class Attends(nn.Module):
        def __init__(self):
            super().__init__()
            self.enter = nn.Linear(8, 8, bias=False)
            self.leave = nn.Linear(8, 8, bias=False)
            self.scale = nn.Parameter(torch.ones(8))

        def forward(self, x):
            heads = self.enter(x).view(1, 6, 2, 4).transpose(1, 2)
            seen = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
            return torch.tanh(self.leave(seen.transpose(1, 2).reshape(6, 8))) * self.scale

    def run(mode):
        torch.manual_seed(0)
        model, counts = nn.Sequential(Attends()), Counter()

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                counts[function] += 1
                return function(*args, **(kwargs or {}))

        if mode:
            checkpointed(model, mode=mode)
        x = torch.randn(6, 8, requires_grad=True)
        output = model(x)
        with Count():
            output.square().sum().backward()
        return counts, [x.grad, *(parameter.grad for parameter in model.parameters())]

    plain, expected = run(None)
    counts, found = run(mode)
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert (plain[kernel], counts[kernel]) == (0, attention)
    product = torch.ops.aten.mm.default
    assert counts[product] == plain[product] + products
    for own, other in zip(found, expected, strict=True):
        assert torch.equal(own, other)


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankLayout(rank=0, size=1, group=dist.group.WORLD, device=torch.device("cpu"))
    dist.destroy_process_group()


def test_ddp_timers_stop_after_ten_steps(one_rank):
    """The timers wait for the device. By default DDP also uses them in every 100th step."""
    single = {"param_dtype": torch.float32, "ranks": one_rank, "init_fn": lambda *_: None}
    wrapped = Ddp(nn.Linear(2, 2), **single)
    for _ in range(101):
        wrapped.call(lambda model: model(torch.ones(1, 2)).sum()).backward()
    assert wrapped.root._get_ddp_logging_data()["iteration"] == 10


class Scaled(nn.Module):
    """A model with a parameter of no dimensions."""

    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(4, 4), nn.Parameter(torch.tensor(2.0))

    def reset_parameters(self):
        nn.init.constant_(self.scale, 2.0)

    def forward(self, x):
        return self.scale * self.inner(x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"state_dtype": "int8"},
        {"name": "sgd"},
        {"name": "adafactor"},
        {"name": "muon", "momentum": 0.95},
        {"name": "lion"},
        {"name": "schedule_free_adamw"},
    ],
    ids=str,
)
def test_scalars_are_trained_with_a_sharded_optimizer(one_rank, options):
    """As without sharding: they are updated, and their gradients are cleared."""
    results = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = Scaled()
        wrapped = Ddp(
            model,
            param_dtype=torch.float32,
            shard_optimizer=shards,
            ranks=one_rank,
            init_fn=lambda *_: None,
        )
        settings = schema.Optimizer(learning_rate=0.1, **options)
        made = make_optimizer(model, settings, optimized=wrapped.optimized, blocks=[model.inner])
        vars(made).update(grad_scale=None, found_inf=torch.zeros(()))
        norms = []
        for _ in range(3):
            wrapped.call(lambda model: model(torch.ones(2, 4)).square().sum()).backward()
            norms.append(wrapped.grad_norm().item())
            wrapped.before_step()
            made.step()
            wrapped.after_step()
            made.zero_grad(set_to_none=True)
            assert model.scale.grad is None
        results.append((norms, model.scale.item(), model.inner.weight.detach().clone()))
    (norms, scale, weight), (norms_sharded, scale_sharded, weight_sharded) = results
    assert norms_sharded == pytest.approx(norms)
    assert scale_sharded == pytest.approx(scale)
    assert abs(scale - 2.0) > 0.01
    torch.testing.assert_close(weight_sharded, weight)


def test_norms_of_large_gradients_are_exact_on_cpus():
    """torch adds squares one after the other: 9e-5 less for a matrix of this size, 3e-5 for half."""
    generator = torch.Generator().manual_seed(0)
    large = torch.randn(30522, 128, generator=generator)
    others = [torch.full((5,), 3.0), torch.tensor(2.0), torch.empty(0, 7)]
    exact = torch.cat([tensor.flatten() for tensor in [large, *others]]).double().norm()
    norm = joint_norm([large, *others])
    assert norm.dtype == torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=2e-7)
    halves = torch.stack([joint_norm([half]) for half in large.chunk(2)])
    assert halves.norm().item() == pytest.approx(joint_norm([large]).item(), rel=2e-7)


def test_fsdp_names_scalars_before_the_first_step():
    recipe = schema.Recipe(
        run=schema.Run(name="scalars", max_steps=1),
        model=schema.Model(builder=f"{__name__}:Scaled"),
        data=schema.Data(builder=f"{__name__}:Scaled"),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
    )
    message = "strategy.kind: fsdp cannot shard parameters without dimensions: scale; give each "
    with pytest.raises(RecipeError, match=message):
        prepare_model(recipe, device=torch.device("cpu"))


def test_fsdp_keeps_the_storage_of_the_roots_weights():
    """Checkpoints and averages refer to the weights before the first forward pass. The rows of the
    table, which is no unit, are padded on rank 1."""
    dist.init_process_group("fake", store=fake_store(), rank=1, world_size=2)
    try:
        with torch.device("meta"):
            model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4))
        wrapped = wrap(
            model,
            Parts({"1": model[1]}),
            strategy=schema.Strategy(kind="fsdp", mixed_precision=None),
            checkpointing=None,
            ranks=RankLayout(rank=1, size=2, group=dist.group.WORLD, device=torch.device("cpu")),
            init_fn=lambda model, *devices: random_weights(model, *devices, seed=3),
        )
        before = [local_part(parameter.detach()) for parameter in model.parameters()]
        values = [part.clone() for part in before]
        wrapped.call(lambda model: model(torch.zeros(1, dtype=torch.int64)))
        wrapped.reshard()
        for parameter, part, value in zip(model.parameters(), before, values, strict=True):
            assert local_part(parameter).data_ptr() == part.data_ptr()
            assert torch.equal(part, value)
    finally:
        dist.destroy_process_group()


# Activation offload. The copies stay in host memory and are recorded.


class RecordedOffload(ActivationOffload):
    device_type = "cpu"

    def __init__(self):
        super().__init__()
        self.events, self.buffers = [], 0

    def _host_memory(self, size):
        self.buffers += 1
        return torch.empty(size, dtype=torch.uint8)

    def _copy(self, source, target):
        target.copy_(source)
        self.events.append("copy")
        return len(self.events)

    def _wait(self, event):
        self.events.append(f"wait {event}")


@pytest.fixture
def offload(monkeypatch):
    recorded = RecordedOffload()
    monkeypatch.setattr(activation_checkpointing, "ActivationOffload", lambda: recorded)
    return recorded


def gradients_of(model, x):
    return torch.autograd.grad(model(x).square().sum(), list(model.parameters()))


def test_offloaded_inputs_return_one_block_ahead(offload):
    """All copies use one stream, so a wait for event n covers all earlier events."""
    model, x = layers(3), torch.randn(64, 4)
    expected = gradients_of(model, x)
    checkpointed(model, offload_to_cpu=True)
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload.events == [
        *("copy", "wait 1"),  # input of the first block; the second block waits and frees it
        *("copy", "wait 3", "copy"),  # event 5: the last input, which stays on the device
        *("wait 5", "copy"),  # backward pass of the last block; the second input is copied back
        *("wait 7", "copy", "wait 9"),
    ]
    assert offload.buffers == 3
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload.buffers == 3, "host memory is reused in the next micro-batch"
    gradients_of(model, torch.randn(128, 4))
    assert offload.buffers == 6, "a longer micro-batch needs larger buffers"
    gradients_of(model, x)
    assert offload.buffers == 6
    for _ in range(2):
        model(x)  # a forward pass without a backward pass must leave no inputs
    assert all(map(torch.equal, gradients_of(model, x), expected))
    assert offload._inputs == []
    events = len(offload.events)
    with torch.no_grad():
        model(x)
    assert len(offload.events) == events, "nothing is offloaded without gradients"


def test_shared_block_arguments_stay_on_the_device(offload):
    class Scaled(Block):
        def forward(self, x, scale, *, shift):  # type: ignore[override]
            return super().forward(x) * scale + shift

    model = nn.Sequential(*[Scaled(nn.LayerNorm(4)) for _ in range(2)])
    scale, x = torch.randn(4), torch.randn(8, 4)
    checkpointed(model, offload_to_cpu=True)
    for block in model:
        x = block(x, scale, shift=scale)
    x.sum().backward()
    assert offload.buffers == 2, "one buffer for the input of each block"


def test_gradients_are_summed_in_host_memory_after_the_next_reduction(monkeypatch):
    """A group's copies are waited for once the next group's have been started."""
    first, second = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    copied = []

    def gradients(group):
        copied.append(group)
        return [{"first": first, "second": second}[group]]

    monkeypatch.setattr(fsdp, "copied_gradients", gradients)
    sums = fsdp.HostSums()
    for number in range(3):
        second.grad = torch.tensor([1.0, 10.0**number])
        sums.after_reduction("second")
        assert copied == ["second", "first"] * number
        first.grad = torch.tensor([1.0, 10.0**number])
        sums.after_reduction("first")
        assert copied == ["second", "first"] * number + ["second"]
        assert second.grad is None
        sums.after_backward(last=number == 2)
        assert copied == ["second", "first"] * (number + 1)
    assert first.grad.tolist() == second.grad.tolist() == [3.0, 111.0]


def test_ddp_refuses_an_update_with_gradients_that_are_not_reduced(one_rank):
    """torch notices it in the next forward pass, after each rank has updated with its own."""

    def wrapped_model():
        model = nn.ModuleDict({"used": nn.Linear(4, 4), "rest": nn.Linear(4, 4)})
        return Ddp(model, param_dtype=torch.float32, ranks=one_rank, init_fn=lambda *_: None)

    def loss(model, names):
        outputs = [model[name](torch.ones(2, 4)).sum() for name in names]
        return torch.stack(outputs).sum()

    whole, factor = ("used", "rest"), torch.ones(())
    wrapped = wrapped_model()
    wrapped.accumulate([("used",), whole], loss, factor)
    wrapped.finish_gradients()
    wrapped.accumulate([whole, ("used",)], loss, factor)
    with pytest.raises(RecipeError, match="did not depend on all trained parameters, so gradients"):
        wrapped.finish_gradients()
    other = wrapped_model()
    other.accumulate([("used",)], loss, factor)
    with pytest.raises(RecipeError, match=r"parameters, such as rest\.weight, rest\.bias, so "):
        other.finish_gradients()
