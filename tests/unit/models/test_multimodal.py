"""The text model of models of images and text is trained, with the class of the whole model."""

import dataclasses
from typing import Any

import pytest
import torch
import transformers

from launcher.checkpoint import verify
from launcher.diagnostics.selftest import shrunk
from launcher.errors import RecipeError
from launcher.models.description import parts_without_text
from launcher.models.documents import documents_at
from launcher.models.flops import token_flops
from launcher.models.head import computes_loss
from launcher.models.micro_batch import MicroBatch
from launcher.models.predictions import cross_entropies
from launcher.models.record import record_of
from launcher.planner.estimate import estimate_memory
from launcher.planner.profile import profile_of_shapes
from launcher.planner.trace import trace_step
from launcher.planner.work import Work
from launcher.recipe import schema
from launcher.training.model import prepare_model
from tests.multimodal import MODELS

CPU = torch.device("cpu")
DOCUMENTS = [[5, 9, 2], [16]]


def recipe_of(section, **sections):
    return schema.Recipe(
        run=schema.Run(name="images", max_steps=1),
        model=section,
        data=schema.Data(kind="tokens", sequence_length=16),
        batch=schema.Batch(global_batch_size=2, micro_batch_size=2),
        strategy=schema.Strategy(mixed_precision=None, reshard_after_forward=True),
        **sections,
    )


def random_model(kind):
    return schema.Model(config={"model_type": kind, **MODELS[kind]})


def packed(ids, prepared):
    """A micro-batch of rows that hold DOCUMENTS."""
    targets = torch.full_like(ids, -100)
    for row, sizes in enumerate(DOCUMENTS):
        start = 0
        for size in sizes:
            targets[row, start : start + size - 1] = ids[row, start + 1 : start + size]
            start += size
    positions = [torch.cat([torch.arange(size) for size in sizes]) for sizes in DOCUMENTS]
    inputs: dict[str, Any] = {"input_ids": ids, "position_ids": torch.stack(positions)}
    if record_of(prepared.model).recurrent:
        inputs["documents"] = documents_at(inputs["position_ids"].numpy())
    if record_of(prepared.model).document_masking == "varlen":
        bounds = torch.tensor([0, 5, 14, 16, 32], dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        inputs |= {"max_length_q": 16, "max_length_k": 16}
    return MicroBatch(inputs, targets)


@pytest.mark.parametrize(
    ("kind", "attention"), [*((kind, "auto") for kind in MODELS), ("qwen2_5_vl", "eager")]
)
def test_losses_and_gradients_of_text_are_those_of_transformers(tmp_path, kind, attention):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    config._attn_implementation = "eager"
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path)
    ids, expected = torch.randint(3, 60, (2, 16)), torch.zeros(())
    for row, sizes in zip(ids, DOCUMENTS, strict=True):
        for part in row[None].split(sizes, dim=1):
            loss = model(input_ids=part, labels=part).loss
            expected = expected + loss * (part.shape[1] - 1)
    expected.backward()

    section = schema.Model(path=str(tmp_path), attention=attention)
    prepared = prepare_model(recipe_of(section), device=CPU)
    own = prepared.model
    prepared.weights.init_fn(own, CPU, CPU)
    assert type(own) is type(model)
    assert computes_loss(prepared.model)
    assert record_of(prepared.model).document_masking == (
        "varlen" if attention == "auto" else "mask"
    )
    found = cross_entropies(own, packed(ids, prepared), "sum").value
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found.backward()
    gradients = {name: p.grad for name, p in own.named_parameters() if p.requires_grad}
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) is (name in gradients), name
        if parameter.grad is not None:
            difference = (gradients[name] - parameter.grad).abs().max()
            assert difference <= 1e-5 * parameter.grad.abs().max() + 1e-6, name


@pytest.mark.parametrize("kind", MODELS)
def test_exports_are_verified_without_an_end_of_text_in_the_config(kind):
    """The text config of qwen3_vl has no such field if nothing sets it."""
    fields: Any = MODELS[kind]
    text = {k: v for k, v in fields["text_config"].items() if k != "eos_token_id"}
    config = transformers.AutoConfig.for_model(kind, **fields | {"text_config": text})
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    facts = verify._facts(model, None)
    expected = getattr(config.get_text_config(), "eos_token_id", None)
    assert facts["config.json: eos_token_id"] == expected


def never_called(prepared):
    """The parameters of units that are never called."""
    modules = [m for unit in prepared.units if not unit.called for m in unit.modules]
    return [parameter for module in modules for parameter in module.parameters()]


@pytest.mark.parametrize("kind", MODELS)
def test_the_rest_of_the_model_is_held_and_not_gathered(kind):
    recipe = recipe_of(random_model(kind))
    prepared = prepare_model(recipe, device=CPU)
    unused = {id(p) for p in never_called(prepared)}
    names = parts_without_text(prepared.model)
    assert {id(prepared.model.get_parameter(name)) for name in names} == unused
    layers = {"gemma4": 4}.get(kind, 2)
    assert len(prepared.description.blocks) == layers
    assert all(
        "Vision" not in type(block).__name__ for block in prepared.description.blocks.values()
    )
    profile = profile_of_shapes(prepared, recipe, device="cpu")
    total = sum(parameter.numel() for parameter in prepared.model.parameters())
    assert profile.unused.count + profile.parameters == total
    assert profile.hidden == 32
    without = dataclasses.replace(
        profile, unused=dataclasses.replace(profile.unused, parameters=())
    )
    larger, smaller = (estimate_memory(Work(p, recipe, ranks=2)) for p in (profile, without))
    assert larger.peak.total - smaller.peak.total == 4 * profile.unused.count // 2
    assert larger.peak.components.gathered == smaller.peak.components.gathered
    flops = token_flops(prepared.model).at(16)
    assert 0 < flops <= 6.0 * profile.parameters + 12 * layers * 64 * 16


@pytest.mark.slow
def test_a_trace_shards_the_rest_and_does_not_gather_it():
    """Also with gradients that are kept in the dtype of the reduction until the last micro-batch:
    FSDP then looks at those of each parameter."""
    recipe = recipe_of(random_model("qwen3_vl"))
    strategy = schema.Strategy(sync_every_micro_batch=False, reshard_after_forward=True)
    recipe = dataclasses.replace(recipe, strategy=strategy)
    traced = trace_step(recipe, ranks=2, device="cpu", micro_batches=2)
    held = sum(p.numel() for p in never_called(prepare_model(recipe, device=CPU)))
    total = sum(p.numel() for p in prepare_model(recipe, device=CPU).model.parameters())
    assert traced.held.parameters == pytest.approx(4 * total / 2, rel=0.02)
    assert traced.peak.components.gathered <= 4 * (total - held)


@pytest.mark.parametrize("targets", [None, ("all-linear",), ("q_proj", "o_proj"), ("*.*proj",)])
@pytest.mark.parametrize("kind", ["gemma3", "mistral3", "llama4"])
def test_adapters_are_in_the_text_model_alone(kind, targets):
    lora = schema.Lora(rank=2, target_modules=targets)
    prepared = prepare_model(recipe_of(random_model(kind), lora=lora), device=CPU)
    adapted = [name for name, _ in prepared.model.named_parameters() if ".lora_A." in name]
    assert adapted
    assert all("language_model" in name for name in adapted)


@pytest.mark.parametrize("targets", [None, ("all-linear",), ("*",)])
def test_routers_that_are_derived_from_linear_layers_get_no_adapters(targets, messages):
    lora = schema.Lora(rank=2, target_modules=targets)
    prepared = prepare_model(recipe_of(random_model("llama4"), lora=lora), device=CPU)
    model = prepared.model
    router = "language_model.model.layers.0.feed_forward.router"
    what = "note: layers that compute more than a linear layer get no adapters"
    assert f"{what}: 2 such as {router}, a Llama4Router" in messages()
    assert not any("router" in name and ".lora_" in name for name, _ in model.named_parameters())
    prepared.weights.init_fn(model, CPU, CPU)
    ids = torch.randint(3, 60, (2, 16))
    cross_entropies(model, packed(ids, prepared), "sum").value.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert all(grad.any() for name, grad in trained.items() if ".lora_B." in name)


@pytest.mark.parametrize("target", ["router", "*.router"])
def test_an_adapter_of_a_router_is_refused(target):
    lora = schema.Lora(target_modules=("q_proj", target))
    with pytest.raises(RecipeError) as error:
        prepare_model(recipe_of(random_model("llama4"), lora=lora), device=CPU)
    assert error.value.problems == [
        f"lora.target_modules: {target}: language_model.model.layers.0.feed_forward.router is a "
        "Llama4Router, which computes more than a linear layer and gets no adapter; available: "
        "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"
    ]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"target_modules": ("patch_conv", "fc1")}, "fc1: .*vision.* is in a part that text does"),
        ({"target_modules": ("*vision*",)}, "vision.* is in a part that text does not use"),
        ({"modules_to_save": ("multi_modal_projector",)}, "projector has weights that text does"),
        ({"modules_to_save": ("model",)}, "model has weights that text does not use"),
    ],
)
def test_adapters_of_the_rest_are_refused(keys, message):
    with pytest.raises(RecipeError, match=message):
        prepare_model(recipe_of(random_model("gemma3"), lora=schema.Lora(**keys)), device=CPU)


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl"])
def test_a_selftest_shrinks_the_text_model(tmp_path, kind):
    config = transformers.AutoConfig.for_model(kind, **MODELS[kind])
    config.text_config.num_hidden_layers = 12
    config.text_config.layer_types = ["full_attention"] * 12
    config.save_pretrained(tmp_path)
    changes = {"text_config": {"attention_dropout": 0.1}}
    for changed in (None, changes):
        small = shrunk(schema.Model(path=str(tmp_path), config=changed))
        prepared = prepare_model(recipe_of(small), device=CPU)
        assert len(prepared.description.blocks) == 2
        assert prepared.model.config.text_config.hidden_size == 64
        assert record_of(prepared.model).document_masking == "varlen"
