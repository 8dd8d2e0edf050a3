"""LoRA on the weights of experts, compared with peft's target_parameters."""

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from launcher.checkpoint.export import open_exported_weights
from launcher.errors import RecipeError
from launcher.models.adapted import AdaptedExperts, adapted_weights, adapter_tensors
from launcher.models.build import build_model
from launcher.models.description import describe
from launcher.models.grouped_experts import low_rank_product
from launcher.models.initialization import random_weights
from launcher.models.lora import add_adapters
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe.schema import Lora, Model, Optimizer
from tests.unit.models.test_export import create_run, export, export_model
from tests.unit.models.test_load import CPU, logits, save
from tests.unit.models.test_lora import load, loss_of, recipe_with, through_peft

GATED = ("experts.down_proj", "experts.gate_up_proj")
SMALL = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1}
KINDS = {
    "qwen3_moe": (SMALL | {"num_experts": 4, "head_dim": 8, "mlp_only_layers": [0]}, GATED),
    # Transposed weights with biases; its sinks need eager attention
    "gpt_oss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, GATED),
    "mixtral": ({"num_local_experts": 3}, GATED),
    "deepseek_v3": (
        SMALL | ONE_GROUP | {"n_routed_experts": 4, "q_lora_rank": None, "kv_lora_rank": 8}
        | {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}, GATED),
    "glm4_moe": (SMALL | ONE_GROUP | {"n_routed_experts": 4, "head_dim": 8}, GATED),
    # Without a gate
    "nemotron_h": (
        SMALL | {"layers_block_type": ["mamba", "moe", "attention", "moe"], "n_routed_experts": 4}
        | {"n_group": 1, "topk_group": 1, "moe_shared_expert_intermediate_size": 16, "head_dim": 8}
        | {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
        | {"time_step_limit": [0.0, 100.0]},
        ("experts.down_proj", "experts.up_proj")),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Returns the folder of a small checkpoint of a kind."""
    made = {}

    def base(kind):
        if kind not in made:
            made[kind] = save(tmp_path_factory.mktemp(kind), model_type=kind, **KINDS[kind][0])
        return made[kind]

    return base


def adapter_of_peft(base, kind, folder, **options):
    """An adapter of linear layers and experts whose factors are all random, saved by peft."""
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    options = {"target_modules": ["q_proj"], "target_parameters": [*KINDS[kind][1]]} | options
    model = get_peft_model(plain, LoraConfig(r=3, lora_alpha=5, task_type="CAUSAL_LM", **options))
    torch.manual_seed(9)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(folder)
    return folder


def trained(model, steps=3):
    """Losses of steps of AdamW, and the gradients of the first."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2, weight_decay=0.0)
    losses, gradients = [], {}
    for _ in range(steps):
        loss = loss_of(model)
        loss.backward()
        losses.append(loss.item())
        gradients = gradients or {name: p.grad.clone() for name, p in parameters.items()}
        optimizer.step()
        optimizer.zero_grad()
    return losses, gradients


def in_files(model, gradients):
    """Gradients by peft's names, in the form of its files."""
    return {
        key: tensor.file_form(gradients[found])
        for key, tensor in adapter_tensors(model).items()
        for found in gradients
        if found.replace("base_layer.", "") == tensor.name
    }


@pytest.mark.parametrize(
    ("kind", "checkpointing"), [*((kind, False) for kind in KINDS), ("qwen3_moe", True)]
)
def test_training_and_exports_are_those_of_peft(bases, tmp_path, kind, checkpointing):
    """From the same adapter: losses, gradients, and both ways to merge what was trained."""
    base = bases(kind)
    adapter = adapter_of_peft(base, kind, tmp_path / "adapter", use_rslora=checkpointing)
    lora = recipe_with(base, f"lora.path={adapter}")
    assert lora.target_parameters == KINDS[kind][1]
    model, other = load(base, trained=False, **lora.__dict__), through_peft(base, adapter)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    (losses, gradients), (expected, theirs) = trained(model), trained(other)
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[0] - losses[-1] > 0.01
    theirs = {name.replace(".default.", "."): gradient for name, gradient in theirs.items()}
    found = in_files(model, gradients)
    assert found.keys() == theirs.keys()
    assert sum(".experts." in key for key in found) >= 4
    for key, gradient in found.items():
        assert (gradient - theirs[key]).norm() <= 1e-5 * theirs[key].norm(), key

    run = create_run(tmp_path, model)
    wanted = logits(other.eval())
    torch.testing.assert_close(logits(model.eval()), wanted, rtol=1e-4, atol=1e-5)
    again = through_peft(base, run / "hf").eval()
    torch.testing.assert_close(logits(again), wanted, rtol=1e-4, atol=1e-5)
    assert export(run, tmp_path / "merged", "--merged") == 0
    export_model(model, tmp_path / "own", merged=True)
    for out in (tmp_path / "merged", tmp_path / "own"):
        merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
        torch.testing.assert_close(logits(merged), wanted, rtol=1e-4, atol=1e-5)


def test_an_adapter_of_experts_alone_and_of_one_weight(bases, tmp_path):
    """peft wraps a module once for each weight, and names the wrappers by their number."""
    base = bases("qwen3_moe")
    for entries in (["experts.down_proj"], ["model.layers.1.mlp.experts.gate_up_proj"]):
        folder = adapter_of_peft(
            base, "qwen3_moe", tmp_path / entries[0], target_modules=[], target_parameters=entries
        )
        lora = recipe_with(base, f"lora.path={folder}")
        assert (lora.target_modules, lora.target_parameters) == ((), tuple(entries))
        model = load(base, trained=False, **lora.__dict__)
        wanted = logits(through_peft(base, folder).eval())
        torch.testing.assert_close(logits(model.eval()), wanted, rtol=1e-4, atol=1e-5)
        again = export_model(model, tmp_path / f"{entries[0]} again")
        before, after = (load_file(f / "adapter_model.safetensors") for f in (folder, again))
        assert before.keys() == after.keys()
        assert all(torch.equal(before[key], after[key]) for key in before)
        stored = open_exported_weights(again)
        torch.testing.assert_close(logits(stored.load()), wanted, rtol=1e-4, atol=1e-5)


def test_some_layers_by_a_pattern(bases, tmp_path):
    """peft knows no patterns of parameters: its file has the whole names."""
    base = bases("mixtral")
    model = load(base, target_parameters=("*.1.mlp.experts.*",), target_modules=("q_proj",))
    names = [f"model.layers.1.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    assert model.peft_config["default"].target_parameters == names
    other = through_peft(base, export_model(model, tmp_path / "hf"))
    assert torch.allclose(logits(model.eval()), logits(other.eval()), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_product_of_factors(dtype, rank):
    """Ranks whose rows are no multiple of 16 bytes, an expert without tokens, and gradients."""
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5])
    inputs, down, up = (
        torch.randn(shape, dtype=dtype, requires_grad=True)
        for shape in ((8, 16), (3, rank, 16), (3, 24, rank))
    )
    made = low_rank_product(inputs, down, up, counts.cumsum(0).int(), scale=0.5)
    experts = torch.arange(3).repeat_interleave(counts)
    wanted = torch.einsum("tri,ti->tr", down[experts], inputs)
    wanted = 0.5 * torch.einsum("tor,tr->to", up[experts], wanted)
    tolerance = (
        {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.05, "atol": 0.05}
    )
    torch.testing.assert_close(made, wanted, **tolerance)
    weights = torch.randn_like(made)
    found, expected = (
        torch.autograd.grad((product * weights).sum(), (inputs, down, up))
        for product in (made, wanted)
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance["rtol"], atol=10 * tolerance["atol"])


def test_forms_of_factors():
    down, up = torch.randn(4, 3, 8), torch.randn(4, 6, 3)
    weight = AdaptedExperts("mlp.experts", None, name="down_proj", wrapper="mlp.experts.base_layer")
    assert weight.weight == "mlp.experts.down_proj"
    expected = {
        "mlp.experts.base_layer.lora_A.weight": ("mlp.experts.lora_A_down_proj", down, (12, 8)),
        "mlp.experts.base_layer.lora_B.weight": ("mlp.experts.lora_B_down_proj", up, (6, 12)),
    }
    tensors = weight.tensors()
    assert [*tensors] == [f"base_model.model.{key}" for key in expected]
    for tensor, (name, factor, shape) in zip(tensors.values(), expected.values(), strict=True):
        assert tensor.name == name
        stored = tensor.file_form(factor)
        assert stored.shape == shape
        assert torch.equal(tensor.model_form(stored, 4), factor)
    assert stored[2, 1 * 4 + 3] == up[3, 2, 1]  # of B


def test_experts_in_nf4(tmp_path):
    """Adapters on weights in NF4 are those on the rounded weights."""
    wide = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 4, "head_dim": 16}
    wide |= {"num_experts_per_tok": 2}
    folder = save(tmp_path, model_type="qwen3_moe", **wide)
    found = []
    for options in ({"quantize": True}, {"rounded": True}):
        model = load(folder, target_modules=("q_proj",), target_parameters=GATED, **options)
        found.append(trained(model, steps=1))
    (losses, gradients), (expected, theirs) = found
    assert losses == pytest.approx(expected, rel=1e-6)
    assert any(".experts." in name for name in gradients)
    for name, gradient in gradients.items():
        assert (gradient - theirs[name]).norm() <= 1e-5 * theirs[name].norm(), name


def test_autocast(bases):
    """With ddp in 16 bits: float32 factors, frozen weights in bfloat16, sums in between."""
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load(bases("qwen3_moe"), target_parameters=GATED)
        for parameter in model.parameters():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = loss_of(model)
        loss.backward()
        found.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
    assert 0 < (found[0] - found[1]).norm() < 0.1 * found[0].norm()


@pytest.mark.slow
def test_compiled_blocks(bases):
    """Have the same losses and gradients, and are one graph each."""
    if transformers.__version__ == "5.17.0":
        pytest.skip("the backward pass of its loop over experts (float32 on CPUs) is not compiled")
    model, found = load(bases("mixtral"), target_parameters=GATED), []
    for compiled in (False, True):
        for block in describe(model).blocks.values() if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        loss = loss_of(model)
        loss.backward()
        gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        found.append((loss.item(), torch.cat(gradients)))
        model.zero_grad()
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-6)


def test_new_adapters_have_no_effect(bases):
    """A is drawn as a linear layer's weight is, by its name and place alone; B is zero."""
    base = bases("nemotron_h")
    model = load(base, trained=False, target_parameters=KINDS["nemotron_h"][1])
    torch.testing.assert_close(
        logits(model.eval()), logits(load(base, trained=False, target_parameters=()).eval())
    )
    drawn = {name: p for name, p in model.named_parameters() if ".experts.lora_" in name}
    assert len(drawn) == 8
    for name, factor in drawn.items():
        bound = factor.shape[-1] ** -0.5
        assert factor.abs().max() <= bound * (".lora_A_" in name)
        if ".lora_A_" in name:
            assert factor.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    values = [p for name, p in drawn.items() if name.endswith("lora_A_up_proj")]
    assert not torch.equal(*values)


def test_random_models(messages):
    """Without a checkpoint all weights are drawn, and the experts of a config count."""
    config = {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 3}
    config |= {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    model = build_model(Model(config=config), sequence_length=16)
    add_adapters(model, Lora(rank=4), base_dtype=torch.bfloat16)
    random_weights(model, CPU, CPU, seed=1)
    dtypes = {name.rpartition(".")[2]: p.dtype for name, p in model.named_parameters()}
    assert dtypes["lora_A_down_proj"] == dtypes["lora_B_gate_up_proj"] == torch.float32
    assert dtypes["down_proj"] == torch.bfloat16


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_learning_rate_of_b(bases, name):
    model = load(bases("mixtral"), target_parameters=GATED)
    section = Optimizer(name=name, momentum=0.9, weight_decay=0.1)
    blocks = describe(model).blocks.values()
    of_b = {name: 8.0 for name, _ in model.named_parameters() if ".lora_B" in name}
    made = make_optimizer(model, section, ratios=of_b, blocks=blocks)
    ratios = {id(p): group["ratio"] for group in made.param_groups for p in group["params"]}
    assert all(group["weight_decay"] == 0.1 for group in made.param_groups)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert ratios[id(parameter)] == (8.0 if ".lora_B" in key else 1.0), key


DEFAULTS = [
    ({}, 4, "get adapters: 4 weights such as model.layers.0.mlp.experts.gate_up_proj; "
     "lora.target_parameters=[] leaves them out"),
    ({"target_modules": ("all-linear",)}, 4, None),
    ({"target_modules": ("q_proj",)}, 0, "note: 4 weights of experts get no adapters, such as "
     "model.layers.0.mlp.experts.gate_up_proj; lora.target_parameters adds some"),
    ({"target_parameters": ()}, 0, "note: 4 weights of experts get no adapters, such as "
     "model.layers.0.mlp.experts.gate_up_proj; lora.target_parameters adds some"),
    ({"dropout": 0.1}, 0, "of the parameters and get no adapters, which lora.dropout cannot be computed for"),
    ({"dora": True}, 0, "of the parameters and get no adapters, which lora.dora cannot be computed for"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "count", "message"), DEFAULTS)
def test_defaults_of_a_model_with_most_parameters_in_experts(
    bases, options, count, message, messages
):
    model = load(bases("mixtral"), trained=False, **options)
    adapted = [name for name, _ in model.named_parameters() if ".lora_A_" in name]
    assert len(adapted) == count
    found = [text for text in messages() if "experts" in text]
    assert message is None or any(message in text for text in found), found
    assert message is not None or not found


def test_default_of_a_model_with_few_parameters_in_experts(tmp_path):
    folder = save(tmp_path, model_type="mixtral", num_local_experts=2, vocab_size=2000)
    model = load(folder, trained=False)
    assert not any(isinstance(each, AdaptedExperts) for each in adapted_weights(model))


REFUSED = [
    ({"target_parameters": ("experts.up_proj", "q_proj.weight", "experts.down_proj")},
     "no-such-weights"),
    ({"target_modules": ("all-linear",), "dropout": 0.1},
     "dropout"),
    ({"target_modules": ("all-linear",), "dora": True},
     "dora"),
    ({"target_parameters": ("experts.down_proj",), "modules_to_save": ("mlp",)},
     "trained-whole"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "rule"), REFUSED)
def test_refused_targets(bases, words, options, rule):
    with words.refused(rule):
        load(bases("mixtral"), **options)


def test_an_adapter_without_experts_is_continued_without_them(bases, tmp_path):
    """Although the default would add some."""
    base = bases("qwen3_moe")
    folder = adapter_of_peft(base, "qwen3_moe", tmp_path, target_parameters=None)
    lora = recipe_with(base, f"lora.path={folder}")
    assert lora.target_parameters == ()
    load(base, **lora.__dict__)
    with pytest.raises(
        RecipeError, match=r"target_parameters=.*: .*the adapter in .* has \[\]; leave"
    ):
        recipe_with(base, f"lora.path={folder}", "lora.target_parameters=[experts.down_proj]")
