"""Weights that forward passes use in float32, where others are in 16 bits."""

import warnings
from functools import partial

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.units import Unit
from launcher.libraries.private import fsdp_groups
from launcher.models.build import build_model
from launcher.models.description import describe, outer_units
from launcher.models.initialization import random_weights
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.models.micro_batch import MicroBatch
from launcher.models.names import clean_name
from launcher.models.nf4_layers import packable
from launcher.models.precision import computes_in_float32, kept_in_float32
from launcher.recipe import schema
from launcher.recipe.schema import Lora, Model
from launcher.strategies.wrap import Parts, wrap
from tests.distributed.equivalence_worker import unsharded
from tests.unit.models.recurrent_families import BASE, FAMILIES

BFLOAT16 = schema.MixedPrecision()
ERNIE = BASE | {"model_type": "ernie4_5_moe", "moe_num_experts": 8, "moe_k": 2}
ERNIE |= {"moe_intermediate_size": 32, "moe_layer_start_index": 0, "tie_word_embeddings": False}


class Mixer(nn.Module):
    """A weight of its own in float32, and one that is read, not called."""

    def __init__(self, width):
        super().__init__()
        self.A_log = nn.Parameter(torch.zeros(width))
        self.inner, self.read = nn.Linear(width, width), nn.Linear(width, 1, bias=False)

    def reset_parameters(self):
        nn.init.normal_(self.A_log)

    def forward(self, x):
        assert self.A_log.dtype == torch.float32, "not rounded"
        assert self.inner.weight.dtype == x.dtype
        assert self.read.weight.dtype == torch.float32
        decayed = self.inner(x) * (-self.A_log.exp()) + self.read.weight[0]
        return decayed.to(x.dtype).view_as(x)  # a view, as the experts of transformers return


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.mixer = nn.LayerNorm(width), Mixer(width)

    def forward(self, x):
        return x + self.mixer(self.norm(x))


class Decaying(nn.Module):
    """Keeps `A_log`, `read` and its last norm in float32."""

    _keep_in_fp32_modules_strict = ("read.", "last.")

    def __init__(self, width=16, vocabulary=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x.float()).to(self.head.weight.dtype))


@pytest.fixture
def ranks():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield RankLayout(rank=0, size=1, group=dist.group.WORLD, device=torch.device("cpu"))
    dist.destroy_process_group()


def wrapped_model(ranks, mixed=BFLOAT16, *, exact=True, checkpointing=None, one_rank=False, **keys):
    with torch.device("meta"):
        model = Decaying()
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    dtype = torch.float32 if mixed is None else getattr(torch, mixed.param_dtype)
    return wrap(
        model,
        Parts(
            blocks,
            [
                Unit((model.embedding,), used_in_backward=False),
                Unit((model.last, model.head), ends_forward=True),
            ],
            in_float32=computes_in_float32(model, dtype) if exact else (),
        ),
        strategy=schema.Strategy(kind="fsdp", mixed_precision=mixed, **keys),
        checkpointing=checkpointing,
        one_rank=one_rank,
        ranks=ranks,
        init_fn=lambda model, *devices: random_weights(model, *devices, seed=3),
    )


def cross_entropy(model, micro_batch):
    ids = micro_batch.inputs["ids"]
    return nn.functional.cross_entropy(model(ids).flatten(0, 1).float(), ids.flatten())


def train(wrapped, steps=3, micro_batches=2):
    """Losses, norms and weights."""
    parameters = list(wrapped.module.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.05)
    found = []
    for step in range(steps):
        for number in range(micro_batches):
            generator = torch.Generator().manual_seed(2 * step + number)
            ids = torch.randint(32, (2, 12), generator=generator)
            last = number == micro_batches - 1
            with wrapped.micro_batch(last=last):
                loss = wrapped.call(cross_entropy, MicroBatch({"ids": ids}))
                loss.backward()
            found.append(loss.item())
        found.append(wrapped.grad_norm().item())
        assert all(parameter.grad is not None for parameter in parameters)
        optimizer.step()
        optimizer.zero_grad()
    wrapped.reshard()
    named = wrapped.module.named_parameters()
    return found, {clean_name(name): unsharded(p.detach()).clone() for name, p in named}


FULL = schema.ActivationCheckpointing()
WAYS = {
    "checkpointing": {"checkpointing": FULL},
    "selective checkpointing": {"checkpointing": schema.ActivationCheckpointing(mode="selective")},
    "offload": {"cpu_offload": schema.CpuOffload(), "checkpointing": FULL},
    "sums of gradients": {"sync_every_micro_batch": False},
    "unsharded": {"reshard_after_forward": False, "reshard_after_backward": False},
    "one rank": {"one_rank": True},
}


def test_same_bits_in_every_way(ranks):
    losses, weights = train(wrapped_model(ranks))
    for way, options in WAYS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other, same = train(wrapped_model(ranks, **options))
        assert other == losses, way
        assert all(torch.equal(weight, same[name]) for name, weight in weights.items()), way


def test_groups_of_float32_weights(ranks):
    """One for each block that has such weights, and one for the root. Without them, or in float32,
    nothing changes."""
    groups = "embedding, blocks, norm and head", 1 + 2 + 1
    plain = wrapped_model(ranks, None, exact=False)
    assert len(fsdp_groups(plain.module)) == groups[1], groups[0]
    assert len(fsdp_groups(wrapped_model(ranks, None).module)) == groups[1]
    assert "gathered in float32, gradients" in wrapped_model(ranks, None).description()
    wrapped = wrapped_model(ranks)
    assert len(fsdp_groups(wrapped.module)) == groups[1] + 2 + 1
    assert "gathered in bfloat16 (6 weights in float32), gradients" in wrapped.description()


def test_parameters_of_a_block_itself_stay_in_its_group(ranks):
    """FSDP gathers before calls of modules, and has one group for a module."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.D, self.linear = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

        def forward(self, x):
            return self.linear(x) * self.D

    with torch.device("meta"):
        model = nn.Sequential(Own(), Own())
    wrapped = wrap(
        model,
        Parts(dict(model.named_children()), in_float32=computes_in_float32(model, torch.bfloat16)),
        strategy=schema.Strategy(kind="fsdp"),
        checkpointing=None,
        ranks=ranks,
        init_fn=lambda model, *devices: model.to_empty(device=devices[0]),
    )
    assert len(fsdp_groups(model)) == 2
    assert "(" not in wrapped.description().partition("gathered")[2]


def meta_model(config, **section):
    return build_model(Model(config=config, **section), sequence_length=16)


@pytest.mark.parametrize(
    ("config", "last_names"),
    [
        ({"model_type": "qwen3_5_text"} | FAMILIES["qwen3_5_text"], {"A_log", "dt_bias"}),
        ({"model_type": "nemotron_h"} | FAMILIES["nemotron_h"], {"A_log", "dt_bias", "D"}),
        (ERNIE, {"gate.weight", "e_score_correction_bias"}),
        ({"model_type": "llama"} | BASE, set()),
    ],
    ids=["qwen3_5_text", "nemotron_h", "ernie4_5_moe", "llama"],
)
def test_weights_of_models(config, last_names):
    model = meta_model(config)
    assert not computes_in_float32(model, torch.float32)
    exact = {id(parameter) for parameter in computes_in_float32(model, torch.bfloat16)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in exact}
    found = {last for name in names for last in last_names if name.endswith(f".{last}")}
    assert found == last_names
    assert all(any(name.endswith(last) for last in last_names) for name in names)


def test_adapters_are_not_computed_in_float32():
    """peft casts their inputs to their dtype. The weights that they adapt are."""
    model = meta_model({"model_type": "nemotron_h"} | FAMILIES["nemotron_h"])
    model._keep_in_fp32_modules_strict = {"in_proj", "q_proj"}
    kept = kept_in_float32(model, torch.bfloat16, None)
    blocks = describe(model).blocks
    lora = Lora(rank=2, target_modules=["in_proj", "q_proj", "k_proj"])
    add_adapters(model, lora, base_dtype=torch.bfloat16, kept=kept, base=None)
    exact = {id(parameter) for parameter in computes_in_float32(model, torch.bfloat16)}
    names = {name for name, parameter in model.named_parameters() if id(parameter) in exact}
    assert {name for name in names if "_proj" in name} == {
        name
        for name, _ in model.named_parameters()
        if name.endswith(("in_proj.base_layer.weight", "q_proj.base_layer.weight"))
    }
    # Nor are they in NF4
    model = meta_model({"model_type": "llama"} | BASE | {"hidden_size": 64})
    model._keep_in_fp32_modules_strict = {"q_proj"}
    packed = packable(describe(model).blocks, kept_in_float32(model, torch.bfloat16, None))
    assert all(module is not model.model.layers[0].self_attn.q_proj for module, _ in packed)
    assert blocks


def chosen_experts(model):
    """A list that a forward pass fills with the experts that each router chooses."""
    chosen = []
    for name, module in model.named_modules():
        if name.endswith(".gate"):
            module.register_forward_hook(lambda module, args, out: chosen.append(out[2].sort()[0]))
    return chosen


@pytest.mark.parametrize("one_rank", [False, True])
def test_experts_are_chosen_as_in_transformers(ranks, tmp_path, one_rank):
    """Ernie 4.5's biases of routers are large, and differ by less than bfloat16 can show."""
    config = transformers.AutoConfig.for_model(**ERNIE)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "e_score_correction_bias" in name:
                parameter.copy_(6.8 + 0.26 * torch.rand(parameter.shape))
    exact = ("gate.weight", "e_score_correction_bias")
    weights = model.state_dict().items()
    model.save_pretrained(
        tmp_path, state_dict={n: w if n.endswith(exact) else w.bfloat16() for n, w in weights}
    )
    ids = torch.randint(3, 96, (8, 64), generator=torch.Generator().manual_seed(1))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    expected = chosen_experts(plain)
    with torch.no_grad():
        plain.eval()(ids)

    model = build_model(Model(path=str(tmp_path)), sequence_length=16)
    blocks, checkpoint = describe(model).blocks, open_checkpoint(tmp_path, model)
    wrapped = wrap(
        model,
        Parts(
            blocks,
            outer_units(model, blocks),
            in_float32=computes_in_float32(model, torch.bfloat16),
        ),
        strategy=schema.Strategy(kind="fsdp"),
        checkpointing=None,
        one_rank=one_rank,
        ranks=ranks,
        init_fn=partial(pretrained_weights, checkpoint=checkpoint, seed=5),
    )
    found = chosen_experts(wrapped.module)
    with wrapped.evaluating():
        wrapped.without_gradients(lambda model: model(ids, use_cache=False))
    assert len(found) == len(expected) == 2
    same = [(a == b).float().mean().item() for a, b in zip(found, expected, strict=True)]
    assert min(same) > 0.99, same  # with rounded biases: 0.93
