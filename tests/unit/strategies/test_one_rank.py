"""The strategy of one rank trains as FSDP and DDP do there, and moves fewer bytes."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.checkpoint.state import model_and_optimizer
from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.units import Unit
from launcher.models.initialization import random_weights
from launcher.models.names import clean_name
from launcher.optimizers.average import averages_in_place
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe import schema
from launcher.strategies.wrap import Parts, wrap
from tests.distributed.equivalence_worker import unsharded

BFLOAT16 = schema.MixedPrecision()
FLOAT16 = schema.MixedPrecision(param_dtype="float16")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)

    def forward(self, x):
        return x + self.linear(torch.tanh(self.frozen(self.norm(x))))


class Tied(nn.Module):
    """A model with tied weights, frozen ones, and a module that is never called."""

    def __init__(self, width=16, vocabulary=32, blocks=2):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.tower = nn.Linear(width, width).requires_grad_(False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.fixture
def ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankLayout(rank=0, size=1, group=dist.group.WORLD, device=torch.device("cpu"))
    dist.destroy_process_group()


def wrapped_model(ranks, kind, mixed, *, one_rank=True, checkpointing=None, **options):
    with torch.device("meta"):
        model = Tied(**options)
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    return wrap(
        model,
        Parts(blocks, [Unit((model.tower,), called=False)]),
        strategy=schema.Strategy(kind=kind, mixed_precision=mixed),
        checkpointing=checkpointing,
        one_rank=one_rank,
        ranks=ranks,
        init_fn=lambda model, *devices: random_weights(model, *devices, seed=3),
    )


def batch(seed, vocabulary=32):
    return torch.randint(vocabulary, (2, 12), generator=torch.Generator().manual_seed(seed))


def backward(wrapped, ids, *, last=True, scale=1.0):
    def cross_entropy(model):
        return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())

    with wrapped.micro_batch(last=last):
        loss = wrapped.call(cross_entropy)
        (loss * scale).backward()
    return loss.item()


def train(wrapped, *, micro_batches=2, steps=3, **settings):
    """Losses and norms, and the weights and the optimizer's state at the end."""
    settings = schema.Optimizer(learning_rate=0.05, **settings)
    blocks = list(wrapped.module.blocks)
    optimizer = make_optimizer(wrapped.module, settings, blocks=blocks)
    vars(optimizer).update(grad_scale=None, found_inf=torch.zeros(()))
    found = []
    for step, number in itertools.product(range(steps), range(micro_batches)):
        last = number == micro_batches - 1
        found.append(backward(wrapped, batch(2 * step + number), last=last))
        if last:
            found.append(wrapped.grad_norm().item())
            optimizer.step()
            wrapped.after_step()
            optimizer.zero_grad(set_to_none=True)
    tensors = model_and_optimizer(wrapped.module, optimizer)
    return found, {name: unsharded(tensor).clone() for name, tensor in tensors.items()}


OPTIMIZERS = [
    {},
    {"state_dtype": "int8"},
    {"name": "sgd"},
    {"name": "adafactor"},
    {"name": "muon", "momentum": 0.95},
    {"name": "lion"},
    {"name": "schedule_free_adamw"},
    {"ema": 0.9},
]


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=str)
def test_same_bits_as_fsdp(ranks, settings):
    """Losses, norms, weights and optimizer state, over steps of two micro-batches."""
    own = train(wrapped_model(ranks, "fsdp", BFLOAT16), **settings)
    fsdp = train(wrapped_model(ranks, "fsdp", BFLOAT16, one_rank=False), **settings)
    assert own[0] == fsdp[0]
    assert own[1].keys() == fsdp[1].keys()
    for name, tensor in own[1].items():
        assert torch.equal(tensor, fsdp[1][name]), name


@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("mixed", [BFLOAT16, FLOAT16, None], ids=["bfloat16", "float16", "float32"])
def test_same_bits_as_fsdp_with_activation_checkpointing(ranks, mixed, mode):
    checkpointing = schema.ActivationCheckpointing(mode=mode)
    own, fsdp = (
        train(wrapped_model(ranks, "fsdp", mixed, one_rank=one, checkpointing=checkpointing))
        for one in (True, False)
    )
    assert own[0] == fsdp[0]


def test_same_bits_as_ddp_in_float32(ranks):
    own, ddp = (train(wrapped_model(ranks, "ddp", None, one_rank=one)) for one in (True, False))
    assert own[0] == ddp[0]
    assert all(torch.equal(tensor, ddp[1][name]) for name, tensor in own[1].items())


def test_masters_are_in_place_outside_of_passes(ranks):
    """Checkpoints, exports and the optimizer see float32 masters, tied weights once; a pass sees
    copies, also after an error."""
    wrapped = wrapped_model(ranks, "fsdp", BFLOAT16)
    module, masters = wrapped.module, dict(wrapped.module.named_parameters())
    assert {parameter.dtype for parameter in masters.values()} == {torch.float32}
    with wrapped.forward_context():
        inside = dict(module.named_parameters())
        assert module.head.weight is module.embedding.weight
        wrapped.call(lambda model: model(batch(0)))
        with wrapped.forward_context():
            pass
        assert module.head.weight.dtype == torch.bfloat16
    assert inside.keys() == masters.keys()
    float32 = {name for name, parameter in inside.items() if parameter.dtype == torch.float32}
    assert float32 == {"tower.weight", "tower.bias"}
    with pytest.raises(ZeroDivisionError), wrapped.micro_batch(last=True):
        raise ZeroDivisionError
    assert dict(module.named_parameters()) == masters
    backward(wrapped, batch(0))
    gradients = {name for name, parameter in masters.items() if parameter.grad is not None}
    trained = {name for name, parameter in masters.items() if parameter.requires_grad}
    assert gradients == trained
    assert all(weight.grad is None for weight in inside.values()), "gradients of copies are freed"


def logits(wrapped):
    return wrapped.without_gradients(lambda model: model(batch(9)))


@pytest.mark.parametrize("settings", OPTIMIZERS, ids=str)
def test_passes_see_every_change_of_the_weights(ranks, settings):
    """Of an optimizer's step, a checkpoint that is loaded, and averages in place of weights. torch's
    fused optimizers do not increase the version counters of weights."""
    wrapped = wrapped_model(ranks, "fsdp", BFLOAT16)
    optimizer = make_optimizer(
        wrapped.module,
        schema.Optimizer(learning_rate=0.5, **{"ema": 0.5} | settings),
        blocks=list(wrapped.module.blocks),
    )
    vars(optimizer).update(grad_scale=None, found_inf=torch.zeros(()))

    def check():
        fresh = wrapped_model(ranks, "fsdp", BFLOAT16)
        fresh.module.load_state_dict(wrapped.module.state_dict())
        found = logits(wrapped)
        assert torch.equal(found, logits(fresh))
        return found

    seen = [check()]
    backward(wrapped, batch(1))
    seen.append(logits(wrapped))
    assert torch.equal(seen[1], seen[0]), "the optimizer has not stepped"
    optimizer.step()
    wrapped.after_step()
    optimizer.zero_grad(set_to_none=True)
    seen[1] = check()
    if settings.get("name") == "schedule_free_adamw":  # whose average is the weights of step 1
        backward(wrapped, batch(2))
        optimizer.step()
        wrapped.after_step()
        optimizer.zero_grad(set_to_none=True)
        seen[1] = check()
    with averages_in_place(optimizer):
        seen.append(check())
    assert torch.equal(check(), seen[1])
    with torch.no_grad():
        for parameter in wrapped.module.parameters():
            parameter.detach().copy_(torch.ones(()))
    seen.append(check())
    assert all(not torch.equal(a, b) for a, b in itertools.pairwise(seen))


def test_float16_gradients_overflow_to_infinity_and_are_skipped(ranks):
    wrapped = wrapped_model(ranks, "fsdp", FLOAT16)
    backward(wrapped, batch(0), scale=1e9)
    assert not torch.isfinite(wrapped.grad_norm())


def test_a_model_without_trained_weights(ranks):
    """A teacher: DDP refuses it."""
    wrapped = wrapped_model(ranks, "ddp", BFLOAT16)
    for parameter in wrapped.module.parameters():
        parameter.requires_grad_(False)
    assert logits(wrapped).dtype == torch.bfloat16
    assert "one rank" in wrapped.description()


class MovedBytes(TorchDispatchMode):
    """Adds up the bytes that all operators but views read and write."""

    def __init__(self):
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        views = any(
            each.alias_info and not each.alias_info.is_write for each in func._schema.returns
        )
        if not views and func is not torch.ops.aten.detach.default:
            every = [x for x in tree_leaves((args, kwargs, out)) if isinstance(x, torch.Tensor)]
            local = [unsharded(tensor) for tensor in every]
            self.total += sum({x.data_ptr(): x.nbytes for x in local}.values())
            name = func.overloadpacket.__name__
            if name.endswith("_") and "copy" not in name and isinstance(args[0], torch.Tensor):
                self.total += local[0].nbytes  # read and written
        return out


def moved(run, *arguments, **options):
    with MovedBytes() as bytes_of:
        run(*arguments, **options)
    return bytes_of.total


def test_bytes_that_copies_of_weights_and_gradients_move(ranks):
    """For a trained parameter: 12 in the first micro-batch of a step (6 each to cast the weight and
    the gradient), 10 in later ones (to add the gradient); under FSDP, which gathers weights twice,
    more than 30. What a model in bfloat16 moves without a strategy does not count."""
    options = {"width": 256, "vocabulary": 512, "blocks": 2}
    plain = Tied(**options).bfloat16()
    trained = sum(p.numel() for p in plain.parameters() if p.requires_grad)
    ids = batch(0)[:1, :1]

    def compute():
        nn.functional.cross_entropy(plain(ids).flatten(0, 1).float(), ids.flatten()).backward()
        plain.zero_grad()

    compute()
    without = moved(compute)
    found = {}
    for one in (True, False):
        wrapped = wrapped_model(ranks, "fsdp", BFLOAT16, one_rank=one, **options)
        optimizer = make_optimizer(wrapped.module, schema.Optimizer())
        vars(optimizer).update(grad_scale=None, found_inf=torch.zeros(()))
        for last in (False, True):
            backward(wrapped, ids, last=last)
        optimizer.step()
        wrapped.after_step()
        optimizer.zero_grad(set_to_none=True)
        bytes_of = [moved(backward, wrapped, ids, last=last) for last in (False, True)]
        found[one] = [(each - without) / trained for each in bytes_of]
    print("bytes of one rank and of fsdp:", found)
    assert found[True] == pytest.approx([12, 10], abs=0.5)
    assert min(found[False]) > 30


@pytest.mark.parametrize("mixed", [BFLOAT16, None], ids=["bfloat16", "float32"])
def test_frozen_weights_are_copied_once(ranks, mixed):
    wrapped = wrapped_model(ranks, "fsdp", mixed)
    backward(wrapped, batch(0))
    addresses = [copy.data_ptr() for copy in wrapped.copies]
    for seed in (1, 2):
        backward(wrapped, batch(seed))
    assert [copy.data_ptr() for copy in wrapped.copies] == addresses
    names = {clean_name(name) for name, p in wrapped.module.named_parameters()}
    assert len(wrapped.copies) == (0 if mixed is None else len(names) - 2), "without the tower"


def test_one_rank_takes_the_place_of_a_strategy():
    recipe = schema.Recipe(
        run=schema.Run(name="one", max_steps=1),
        model=schema.Model(config={"model_type": "llama"}),
        data=schema.Data(train=["x.txt"]),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
    )

    def used(ranks=1, **changes):
        changed = {"strategy": schema.Strategy(**changes.pop("strategy", {})), **changes}
        return schema.replace(recipe, **changed).uses_one_rank(ranks)

    keeps = {"reshard_after_forward": False}
    assert used(strategy=keeps)
    assert not used(2, strategy=keeps)
    assert not used(strategy={"reshard_after_forward": True})
    assert not used(strategy=keeps | {"cpu_offload": schema.CpuOffload()})
    assert used(strategy=keeps | {"cpu_offload": schema.CpuOffload(what="optimizer")})
    assert used(strategy={"mixed_precision": None, "reshard_after_forward": True})
    assert used(lora=schema.Lora())
    assert used(strategy={"kind": "ddp"})
    own = schema.Model(builder="own:model")
    assert not used(strategy={"kind": "ddp"}, model=own), "it may need autocast"
    assert used(strategy={"kind": "ddp", "mixed_precision": None}, model=own)
    assert used(strategy=keeps, model=own), "FSDP casts weights, too"
