"""Options of LoRA, compared with peft: DoRA, scales, targets, modules trained whole, trained adapters."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from launcher.checkpoint.export import open_exported_weights
from launcher.errors import RecipeError
from launcher.models import float8, nf4_layers
from launcher.models.adapter_files import adapter_loader
from launcher.models.build import build_model
from launcher.models.description import describe
from launcher.models.first_factors import pissa
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.objectives.preference import Preference
from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Lora, Model, Optimizer
from launcher.reliability.run_directory import RunFolder
from launcher.sources.adapter import other_base
from launcher.training.model import prepare_model
from tests.unit.models.test_export import (
    create_checkpoint,
    create_run,
    export,
    export_model,
    recipe_of,
)
from tests.unit.models.test_load import CPU, logits, save
from tests.unit.models.test_nf4 import WIDE, round_weights

IDS = torch.arange(32).view(2, 16) * 7 % 60


def load(folder, *, trained=True, quantize=False, rounded=False, **options):
    """A model with adapters of rank 4. If `trained`, everything that is trained has changed."""
    lora = Lora(**({"rank": 4, "alpha": 6.0} | options))
    model = build_model(Model(path=str(folder)), sequence_length=16)
    found = open_checkpoint(folder, model)
    add_adapters(model, lora, base_dtype=torch.float32, base=str(folder))
    if quantize:
        nf4_layers.quantize_blocks(describe(model).blocks)

    def fill(*arguments):
        pretrained_weights(*arguments, checkpoint=found, seed=3)
        if rounded:
            round_weights(arguments[0])

    path = None if lora.path is None else Path(lora.path)
    adapter_loader(fill, model, path)(model, CPU, CPU)
    torch.manual_seed(5)
    for name, parameter in model.named_parameters():
        if trained and parameter.requires_grad and ".lora_A." not in name:
            parameter.data += torch.randn_like(parameter) * 0.05
    return model.train()


def through_peft(base, adapter):
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return PeftModel.from_pretrained(plain, adapter, is_trainable=True).train()


def loss_of(model):
    values = model(input_ids=IDS).logits[:, :-1].flatten(0, 1)
    return torch.nn.functional.cross_entropy(values, IDS[:, 1:].flatten())


def gradients(model):
    """By the names of the model without adapters of peft."""
    found = {}
    for name, parameter in model.named_parameters():
        name = name.removeprefix("base_model.model.").replace(".modules_to_save.default.", ".")
        if parameter.grad is not None:
            found[name] = parameter.grad
    return found


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """A model with biases and one weight for both embeddings."""
    folder = tmp_path_factory.mktemp("qwen2")
    return save(folder, model_type="qwen2", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def falcon(tmp_path_factory):
    """A model whose linear layers are of a class of their own, without biases."""
    return save(tmp_path_factory.mktemp("falcon"), model_type="falcon")


WHOLE = {"modules_to_save": ("embed_tokens", "lm_head")}
OPTIONS = {
    "dora": ("base", {"dora": True}),
    "dora and all": ("base", {"dora": True, "rank_stabilized": True, **WHOLE}),
    "dora with biases": ("tied", {"dora": True, "modules_to_save": ("norm",)}),
    "falcon": ("falcon", {}),
    "tied": ("tied", {"modules_to_save": ("embed_tokens",)}),
    "all-linear": ("base", {"target_modules": ("all-linear",), "rank_stabilized": True}),
    "patterns": ("base", {"target_modules": ("model.layers.1.*_proj", "v_proj")}),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_training_and_exports_are_those_of_peft(request, tmp_path, case):
    """Loss, gradients, and both ways to merge: from the run, and from its adapter."""
    name, options = OPTIONS[case]
    folder = request.getfixturevalue(name)
    model = load(folder, **options)
    run = create_run(tmp_path, model)
    other = through_peft(folder, run / "hf")
    losses = loss_of(model), loss_of(other)
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    assert losses[0].item() != pytest.approx(loss_of(load(folder, trained=False)).item(), rel=1e-4)
    for loss in losses:
        loss.backward()
    found, expected = gradients(model), gradients(other)
    if case == "tied":  # peft unties what it trains whole
        expected["model.embed_tokens.weight"] += expected.pop("lm_head.weight")
    assert found.keys() == expected.keys()
    for key, gradient in found.items():
        assert (gradient - expected[key]).norm() <= 1e-5 * gradient.norm(), key
    expected = dict(other.merge_and_unload().named_parameters())
    assert export(run, tmp_path / "merged", "--merged") == 0
    export_model(model, tmp_path / "own", merged=True)
    for out in (tmp_path / "merged", tmp_path / "own"):
        merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        for key, parameter in merged.named_parameters():
            torch.testing.assert_close(parameter, expected[key], rtol=1e-6, atol=1e-6)
        stored = load_file(out / "model.safetensors")
        assert ("lm_head.weight" in stored) == (name == "base"), "tied weights stay tied"


def test_new_magnitudes_have_no_effect(base):
    assert torch.allclose(
        logits(load(base, trained=False, dora=True)),
        logits(load(base, trained=False)),
        atol=1e-5,
    )


def test_rows_of_zeros_stay_zeros_when_dora_is_merged(tmp_path):
    """Such as those of blocks that were added to a trained model."""
    folder = save(tmp_path / "base")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.down_proj.weight"
    tensors = load_file(file)
    tensors[name][3:] = 0
    save_file(tensors, file, metadata={"format": "pt"})
    model = load(folder, trained=False, dora=True)
    loss_of(model).backward()
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.data -= 0.1 * parameter.grad
    export_model(model, tmp_path / "merged", merged=True)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert not merged.get_parameter(name)[3:].any()
    assert torch.allclose(logits(model.eval()), logits(merged.eval()), atol=1e-5)


def test_dora_on_weights_in_nf4_is_that_of_the_rounded_weights(tmp_path):
    folder = save(tmp_path / "wide", **WIDE)
    found = []
    for options in ({"quantize": True}, {"rounded": True}):
        model = load(folder, dora=True, **options)
        loss = loss_of(model)
        loss.backward()
        found.append((loss.item(), torch.cat([g.flatten() for g in gradients(model).values()])))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-6)
    assert (found[0][1] - found[1][1]).norm() <= 1e-5 * found[1][1].norm()


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon"])
def test_learning_rate_of_b(base, name):
    """AdamW is compared with peft's LoRA+; the others with a step of a higher rate."""
    section = Optimizer(name=name, learning_rate=1e-3, weight_decay=0.1, momentum=0.5)

    def trained(rate, ratio, steps=3):
        model = load(base, dora=True)
        made = make_optimizer(
            model,
            Optimizer(**{**section.__dict__, "learning_rate": rate}),
            blocks=describe(model).blocks.values(),
            ratios={n: ratio for n, _ in model.named_parameters() if ".lora_B" in n},
        )
        made.grad_scale = None  # type: ignore[attr-defined]
        made.found_inf = torch.zeros(())  # type: ignore[attr-defined]
        for group in made.param_groups:
            group["lr"] = rate * group["ratio"]
        for _ in range(steps):
            loss_of(model).backward()
            made.step()
            made.zero_grad()
        return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}

    together, low, high = trained(1e-3, 8.0, 1), trained(1e-3, 1.0, 1), trained(8e-3, 1.0, 1)
    for key, value in together.items():
        assert torch.equal(value, (high if ".lora_B." in key else low)[key]), key
    if name != "adamw":
        return
    model = load(base, dora=True)
    theirs = create_loraplus_optimizer(
        model=model,
        optimizer_cls=torch.optim.AdamW,
        lr=1e-3,
        loraplus_lr_ratio=8.0,
        betas=section.betas,
        loraplus_weight_decay=0.1,
        weight_decay=0.1,
    )
    for group in theirs.param_groups:  # peft gives vectors the rate of B, and decays them
        group["params"] = [p for p in group["params"] if p.ndim > 1]
    theirs.add_param_group({"params": [p for p in model.parameters() if p.ndim == 1 and p.requires_grad],
                            "lr": 1e-3, "weight_decay": 0.0})  # fmt: skip
    for _ in range(3):
        loss_of(model).backward()
        theirs.step()
        theirs.zero_grad()
    ours = trained(1e-3, 8.0)
    for key, parameter in model.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(ours[key], parameter.detach(), rtol=1e-5, atol=1e-6)


MIXTURES = {
    "deepseek_v3": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
                    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16, "q_lora_rank": None,
                    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", MIXTURES)
def test_layers_beside_experts_without_adapters(tmp_path, kind, messages):
    """In one of these, peft takes names of layers beside experts for those of experts. What the log
    says is true, peft loads the adapter, and it can be merged."""
    folder = save(tmp_path / "base", model_type=kind, **MIXTURES[kind])
    model = load(folder, target_parameters=())
    adapted = {name for name, p in model.named_parameters() if p.requires_grad}
    assert adapted
    taken = kind == "deepseek_v3"
    assert any("up_proj." in name for name in adapted) is not taken
    assert not any(".experts." in name for name in adapted)
    message, *more = messages()
    block = 1 if taken else 0
    assert message == (
        f"note: {4 - 2 * taken} weights of experts get no adapters, such as "
        f"model.layers.{block}.mlp.experts.gate_up_proj; lora.target_parameters adds some"
    )
    skipped = (
        "note: 6 linear layers get no adapters, to whose names peft gives another meaning in this"
    )
    assert more == [f"{skipped} model, such as model.layers.0.mlp.gate_proj"] * taken
    run = create_run(tmp_path, model)
    other = through_peft(folder, run / "hf")
    assert torch.allclose(logits(model.eval()), logits(other.eval()), atol=1e-5)
    assert export(run, tmp_path / "merged", "--merged") == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert torch.allclose(logits(model), logits(merged.eval()), atol=1e-5)
    if taken:
        with pytest.raises(RecipeError, match=r"lora.target_modules: up_proj: peft takes up_proj"):
            load(folder, target_modules=("q_proj", "up_proj"))


REFUSED = [
    ({"modules_to_save": ("embed", "lm_head")}, "lora.modules_to_save: embed is not a module of the model; those "
     "outside of its blocks: embed_tokens, lm_head, norm"),
    ({"modules_to_save": ("mlp",), "target_modules": ("q_proj", "up_proj")},
     "lora.target_modules: up_proj: model.layers.0.mlp.up_proj is trained whole, by lora.modules_to_save"),
    *[({"modules_to_save": names, **targets}, f"lora.modules_to_save: {', '.join(names)}: this trains whole all layers that "
       "could get an adapter; name fewer modules, or set lora=null to train all weights")
      for names in (("model",), ("*",), ("layers", "norm"))
      for targets in ({}, {"target_modules": ("all-linear",)})],
    ({"target_modules": ("all-linear", "q_proj")}, "lora.target_modules: all-linear stands alone: leave out the others"),
    ({"target_modules": ("*.query",)}, "lora.target_modules: *.query matches no linear layer of the model; available: "
     "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj"),
    ({"target_modules": ("lm_head",), "dora": True}, "lora.dora: not available for lm_head, which is the output layer; "
     "name other layers in lora.target_modules, or set lora.dora=false"),
]  # fmt: skip


@pytest.mark.parametrize(("lora", "problem"), REFUSED)
def test_refused_layers(base, lora, problem):
    with pytest.raises(RecipeError) as error:
        load(base, **lora)
    assert error.value.problems == [problem]


def test_layers_that_cannot_have_dora_or_be_trained_whole(tmp_path):
    folder = save(tmp_path / "gpt2", model_type="gpt2", n_positions=64)
    with pytest.raises(RecipeError, match=r"lora.dora: not available for .*, which is a Conv1D"):
        load(folder, dora=True)
    wide = save(tmp_path / "wide", **WIDE)
    with pytest.raises(
        RecipeError, match=r"lora.modules_to_save: not available with lora.quantize"
    ):
        load(wide, quantize=True, modules_to_save=("down_proj",))


@pytest.fixture(scope="module", params=["ours", "peft's"])
def adapter(request, base, tmp_path_factory):
    """A trained adapter with DoRA and an output layer that was trained whole."""
    folder = tmp_path_factory.mktemp("adapter")
    if request.param == "ours":
        options = {"target_modules": ("q_proj", "down_proj"), "modules_to_save": ("lm_head",)}
        return export_model(load(base, rank=3, dora=True, **options), folder / "hf")
    config = LoraConfig(
        r=3,
        lora_alpha=6,
        use_dora=True,
        target_modules=["q_proj", "down_proj"],
        modules_to_save=["lm_head"],
        task_type="CAUSAL_LM",
    )
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(plain, config)
    torch.manual_seed(9)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(folder / "hf")
    return folder / "hf"


def full_recipe(base, *overrides):
    words = ("recipe=fsdp", "model.config=null", f"model.path={base}", *overrides)
    return load_recipe(words, ranks=1, files=False).recipe


def recipe_with(base, *overrides):
    return full_recipe(base, *overrides).lora


def test_a_trained_adapter_is_continued(base, adapter):
    lora = recipe_with(base, f"lora.path={adapter}", "lora.b_ratio=4")
    saved = ("lm_head",)
    assert lora == Lora(path=str(adapter), rank=3, alpha=6.0, dora=True, b_ratio=4.0,
                        target_modules=("down_proj", "q_proj"), target_parameters=(),
                        modules_to_save=saved)  # fmt: skip
    model = load(base, trained=False, **lora.__dict__)
    assert torch.allclose(logits(model), logits(through_peft(base, adapter)), atol=1e-5)
    assert not torch.allclose(logits(model), logits(load(base, trained=False)), atol=1e-2)


@pytest.mark.parametrize("name", ["base", "tied"])
def test_an_adapter_of_the_output_layer_is_continued(request, tmp_path, name):
    """peft's file also has the frozen weight of the layer."""
    folder = request.getfixturevalue(name)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=3, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    model = get_peft_model(plain, config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * 0.05
    model.save_pretrained(tmp_path)
    file, copy = (
        tmp_path / "adapter_model.safetensors",
        "base_model.model.lm_head.base_layer.weight",
    )
    tensors = load_file(file)
    assert copy in tensors
    lora = recipe_with(folder, f"lora.path={tmp_path}").__dict__
    expected = logits(through_peft(folder, tmp_path))
    for stored in (tensors, tensors | {copy: tensors[copy].bfloat16()}):
        save_file(stored, file)
        assert torch.allclose(logits(load(folder, trained=False, **lora)), expected, atol=1e-5)
    save_file(tensors, file)
    exported = open_exported_weights(tmp_path)
    merged = model.merge_and_unload().state_dict()["lm_head.weight"]
    assert torch.allclose(exported.read("lm_head.weight"), merged, atol=1e-6)
    save_file(tensors | {copy: tensors[copy] + 0.1}, file)
    with pytest.raises(RecipeError, match=rf"^lora.path: {copy}: the adapter holds a copy of this"):
        load(folder, trained=False, **lora)
    save_file(tensors | {copy: tensors[copy][:3]}, file)
    with pytest.raises(RecipeError, match=r"lm_head.base_layer.weight: \(3, 32\) in the adapter"):
        load(folder, trained=False, **lora)


def test_an_adapter_of_another_model_is_noted(base, adapter, tmp_path, messages, monkeypatch):
    """Names may be relative, also to another folder, or those of the hub."""
    shutil.copytree(adapter, tmp_path / "adapter")
    (tmp_path / "link").symlink_to(base)
    other = save(tmp_path / "other")
    monkeypatch.chdir(base.parent)
    recipe = full_recipe(base, f"lora.path={tmp_path / 'adapter'}", "data.sequence_length=16")
    file = tmp_path / "adapter/adapter_config.json"
    config = json.loads(file.read_text())
    same = (str(base), base.name, f"./{base.name}/", str(tmp_path / "link"), None)
    same += (f"{base.parent.name}/{base.name}",)
    for name in (*same, str(other), "owner/another"):
        file.write_text(json.dumps(config | {"base_model_name_or_path": name}))
        prepare_model(recipe, device=CPU)
        expected = f"note: lora.path: the adapter in {file.parent} was trained on {name} "
        expected += f"(base_model_name_or_path); model.path is {base}"
        assert (expected in messages()) is (name not in same), name
    cached = Path("hub/models--owner--name/snapshots/0")
    file.write_text(json.dumps(config | {"base_model_name_or_path": "owner/name"}))
    assert other_base(file.parent, str(cached)) is None
    assert other_base(file.parent, "owner/name") is None
    assert other_base(file.parent, "owner/name-instruct") == "owner/name"


def test_an_adapter_needs_the_weights_that_it_was_trained_on(base, adapter):
    with pytest.raises(RecipeError, match=r"model.init=random: not available with lora.path"):
        recipe_with(base, f"lora.path={adapter}", "model.init=random")


def test_the_reference_is_that_of_adapter_and_quantization(base, adapter, tmp_path):
    """Of RUN_DIR/reference.safetensors: a start that was killed before its first checkpoint leaves
    one, and the next start may have another section lora."""
    other, scaled = tmp_path / "other", tmp_path / "scaled"
    for folder in (other, scaled):
        shutil.copytree(adapter, folder)
    tensors = load_file(adapter / "adapter_model.safetensors")
    save_file(
        {key: 2 * value for key, value in tensors.items()}, other / "adapter_model.safetensors"
    )
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"lora_alpha": 9}
    (scaled / "adapter_config.json").write_text(json.dumps(config))
    words = [["lora.rank=3"], ["lora.quantize=nf4"]]
    words += [[f"lora.path={folder}"] for folder in (adapter, other, scaled)]
    files: list[Any] = []
    for some in words:
        recipe = full_recipe(base, "model.compile=false", *some)
        files.append(Preference().kept_file(tmp_path, recipe))
    values = {"pairs": np.ones((3, 2), dtype=np.float32)}
    for file in files:
        file.write(values)
        assert [other.read() != {} for other in files] == [other is file for other in files]


def test_a_run_that_exported_a_merged_model_is_merged_from_its_checkpoint(base, tmp_path, capsys):
    model, run = load(base), tmp_path / "run"
    run.mkdir()
    export_model(load(base, trained=False), run / "hf", merged=True)
    for step, section in ((20, "lora={rank: 4, alpha: 6}"), (30, "lora=null")):
        create_checkpoint(run, model, step, recipe_of(f"model.path={base}", section))
        RunFolder(run).note("finished", step=step, exported=True)
        status = export(run, tmp_path / str(step), "--merged")
        assert status == (0 if step == 20 else 2), capsys.readouterr().err
    assert "--merged: the run has no adapter to merge" in capsys.readouterr().err
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "20", dtype=torch.float32)
    assert torch.allclose(logits(model.eval()), logits(merged.eval()), atol=1e-5)


def test_keys_that_contradict_the_adapter_are_refused(base, adapter):
    words = [
        "lora.rank=16",
        "lora.alpha=6",
        "lora.target_modules=[q_proj, down_proj]",
        "lora.dora=false",
    ]
    with pytest.raises(RecipeError) as error:
        recipe_with(base, f"lora.path={adapter}", *words)
    assert error.value.problems == [
        f"command line: lora.rank=16: 16, but the adapter in {adapter} has 3; leave the key out",
        f"command line: lora.dora=false: false, but the adapter in {adapter} has true; leave the key out",
    ]


DAMAGE = [
    ({"peft_type": "IA3"}, "peft_type"),
    ({"bias": "all", "rank_pattern": {"q_proj": 8}}, "bias"),
    ({"init_lora_weights": "pissa"}, "init"),
    ({"target_modules": ".*q_proj"}, "pattern"),
    ({"target_modules": [["q_proj"]]}, "names"),
    ({"r": "many"}, "text"),
    ({"r": -4}, "negative"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "rule"), DAMAGE)
def test_adapters_that_cannot_be_continued(base, adapter, tmp_path, words, change, rule):
    config = json.loads((adapter / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with words.refused(rule):
        recipe_with(base, f"lora.path={tmp_path}")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"target_modules": ["embed_tokens"]},
            "target_modules: embed_tokens is not a linear layer ",
        ),
        ({"modules_to_save": ["heads"]}, "modules_to_save: heads is not a module of the model; "),
    ],
)
def test_layers_of_an_adapter_that_the_model_lacks_are_named_by_its_file(
    base, adapter, tmp_path, change, problem
):
    config = json.loads((adapter / "adapter_config.json").read_text()) | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    recipe = full_recipe(base, f"lora.path={tmp_path}", "data.sequence_length=16")
    with pytest.raises(RecipeError) as error:
        prepare_model(recipe, device=CPU)
    (found,) = error.value.problems
    assert found.startswith(f"lora.path: {tmp_path / 'adapter_config.json'}: {problem}")
    assert found.endswith("; merge the adapter with peft, and train from the merged model")


@pytest.mark.parametrize("text", [None, "{", "[]", "null", '"a"'])
def test_a_folder_without_a_sound_adapter(base, tmp_path, text):
    if text is not None:
        (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(
        RecipeError, match=r"^command line: lora.path=.*: .*(no such folder|damaged)"
    ):
        recipe_with(base, f"lora.path={tmp_path}")


def test_tensors_that_do_not_fit_are_all_named(base, adapter, tmp_path):
    lora = recipe_with(base, f"lora.path={adapter}")
    tensors = load_file(adapter / "adapter_model.safetensors")
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    lost = tensors.pop(f"{prefix}.lora_A.weight")
    tensors[f"{prefix}.lora_C.weight"] = lost
    tensors["base_model.model.lm_head.weight"] = torch.zeros(5, 32)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    with pytest.raises(RecipeError) as error:
        load(base, **{**lora.__dict__, "path": tmp_path})
    assert error.value.problems[1:] == [
        "base_model.model.lm_head.weight: (5, 32) in the adapter, (64, 32) in the model",
        f"{prefix}.lora_A.weight: missing in the adapter, (3, 32) in the model",
        f"{prefix}.lora_C.weight: (3, 32) in the adapter, not in the model",
    ]
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(RecipeError, match=r"^lora.path: .* has no adapter_model.safetensors$"):
        load(base, **{**lora.__dict__, "path": tmp_path})


def test_unequal_copies_of_a_tied_weight_are_refused(tied, tmp_path):
    options = {"modules_to_save": ("embed_tokens",)}
    folder = export_model(load(tied, **options), tmp_path / "hf")
    load(tied, path=folder, **options)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.weight"] += 1
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(RecipeError, match=r"differ, and the model ties them"):
        load(tied, path=folder, **options)


@pytest.mark.parametrize(
    ("kind", "layers"),
    [
        ("mamba", ("dt_proj", "out_proj", "x_proj")),
        ("mamba2", ("out_proj",)),
        ("bamba", ("out_proj",)),
        ("jamba", ("dt_proj",)),
        ("nemotron_h", ("out_proj",)),
    ],
)
@pytest.mark.parametrize("targets", [None, ("all-linear",)])
def test_layers_whose_weights_kernels_read_get_no_adapter(kind, layers, targets, messages):
    """peft refuses out_proj for some of these types, and would pass the others by on GPUs."""
    config = {"model_type": kind, "num_hidden_layers": 8, "vocab_size": 64}
    if kind == "nemotron_h":
        config = {"model_type": kind, "layers_block_type": ["mamba", "attention"], "vocab_size": 64}
    model = build_model(Model(config=config), sequence_length=16)
    names = {name for name, _ in model.named_modules() if name.endswith(layers)}
    blocks, read = describe(model).blocks, {model.get_submodule(name) for name in names}
    assert not read & {module for module, _ in nf4_layers.packable(blocks)}
    assert read <= {
        module for block in blocks.values() for module in float8.spared_linears(block, model)
    }
    add_adapters(model, Lora(rank=4, target_modules=targets), base_dtype=torch.float32)
    adapted = {
        name.partition(".lora_")[0] for name, _ in model.named_parameters() if ".lora_" in name
    }
    assert adapted
    assert names
    assert not adapted & names
    assert any("Mixer gives their weights to kernels" in message for message in messages())
    for name in layers:
        named = build_model(Model(config=config), sequence_length=16)
        with pytest.raises(
            RecipeError, match=rf"{name}: .*Mixer gives the weight of .* to kernels"
        ):
            add_adapters(named, Lora(rank=4, target_modules=(name,)), base_dtype=torch.float32)


INITS = {
    "pissa": ("base", "pissa", {}),
    "olora": ("base", "olora", {}),
    "pissa, biases": ("tied", "pissa", {"rank_stabilized": True}),
    "olora, biases": ("tied", "olora", {"rank_stabilized": True}),
}


@pytest.mark.parametrize("case", INITS)
def test_first_values_and_frozen_weights_are_those_of_peft(request, tmp_path, case):
    """And the model begins as it was, and a trained one is merged as peft does: from the run, and from
    its checkpoint, which has the adapter only."""
    name, init, options = INITS[case]
    folder = request.getfixturevalue(name)
    ours = load(folder, trained=False, init=init, **options)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=options.get("rank_stabilized", False),
        target_modules="all-linear",
        init_lora_weights=init,
    )
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config
    ).base_model.model
    values, expected = dict(ours.named_parameters()), dict(theirs.named_parameters())
    assert values.keys() == expected.keys()
    # peft's singular vectors, in float32, have errors of 2e-5
    close = partial(torch.testing.assert_close, rtol=1e-6, atol=5e-5 if init == "pissa" else 1e-6)
    for key in values:
        if ".lora_A." in key:  # a row of A and its column of B have any sign in a singular vector
            up = key.replace("lora_A", "lora_B")
            signs = (
                (values[key] * expected[key]).sum(1).sign() if init == "pissa" else torch.ones(4)
            )
            close(values[key], signs[:, None] * expected[key])
            close(values[up], signs * expected[up])
        elif ".lora_B." not in key:
            close(values[key], expected[key])
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(logits(ours), logits(plain), rtol=1e-5, atol=1e-5)

    model = load(folder, init=init, **options)
    recipe = recipe_of(
        f"model.path={folder}",
        f"lora={{rank: 4, alpha: 6, init: {init}, rank_stabilized: {options != {}}}}".lower(),
        "strategy={mixed_precision: null}",
        "checkpoint.export_merged=true",
    )
    run = tmp_path / "run"
    run.mkdir()
    create_checkpoint(run, model, 20, recipe)
    RunFolder(run).note("finished", step=20, exported=True)
    assert export(run, tmp_path / "adapter") == 2
    assert export(run, tmp_path / "merged", "--merged") == 0
    export_model(model, tmp_path / "own", merged=True)
    for out in (tmp_path / "merged", tmp_path / "own"):
        merged = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        torch.testing.assert_close(logits(merged), logits(model.eval()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(6, 9), (9, 6)])
def test_pissa_is_the_part_of_the_largest_singular_values(shape):
    """peft's formulas in float64, and a value of them."""
    weight = torch.arange(54.0).square().sin().view(shape)
    down, up = pissa(weight, 2, 1.5)
    left, sizes, right = torch.linalg.svd(weight.double(), full_matrices=False)
    root = (sizes[:2] / 1.5).sqrt()
    signs = (left[:, :2] * up).sum(0).sign()
    for found, expected in ((up, left[:, :2] * root * signs), (down.T, right[:2].T * root * signs)):
        torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert (up @ down)[0, 0].item() == pytest.approx(
        {(6, 9): -0.1066302, (9, 6): -0.0906265}[shape], abs=1e-6
    )


@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_first_values_of_weights_in_sixteen_bits(base, tmp_path, init):
    """The frozen weights are rounded, and a merged export has what the run computed with."""
    lora = Lora(rank=4, alpha=6.0, init=init)
    model = build_model(Model(path=str(base)), sequence_length=16)
    found = open_checkpoint(base, model)
    add_adapters(model, lora, base_dtype=torch.bfloat16, base=str(base))
    adapter_loader(
        lambda *arguments: pretrained_weights(*arguments, checkpoint=found, seed=3), model, None
    )(model, CPU, CPU)
    run = tmp_path / "run"
    run.mkdir()
    recipe = recipe_of(
        f"model.path={base}",
        f"lora={{rank: 4, alpha: 6, init: {init}}}",
        "strategy={mixed_precision: {param_dtype: bfloat16}}",
        "checkpoint.export_merged=true",
    )
    create_checkpoint(run, model, 20, recipe)
    RunFolder(run).note("finished", step=20, exported=True)
    assert export(run, tmp_path / "merged", "--merged") == 0
    export_model(model, tmp_path / "own", merged=True, source=found)
    layer = model.model.layers[0].mlp.up_proj
    weight = layer.base_layer.weight.float()
    weight = weight + 1.5 * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    key = "model.layers.0.mlp.up_proj.weight"
    for out in ("merged", "own"):
        stored = load_file(tmp_path / out / "model.safetensors")[key]
        torch.testing.assert_close(stored.float(), weight, rtol=1e-6, atol=1e-6)


def test_layers_whose_weights_cannot_give_first_values(base, tied):
    for folder, options, problem in (
        (tied, {"target_modules": ("lm_head",)}, "lora.init: not available for lm_head, whose"),
        (base, {"rank": 100}, "lora.rank: 100 is more than"),
    ):
        with pytest.raises(RecipeError, match=problem):
            load(folder, init="pissa", **options)
