"""An export has every tensor of its source, in the dtype that it has there."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from launcher.checkpoint import verify
from launcher.checkpoint.export import open_checkpoint_weights
from launcher.cli.main import main
from launcher.models.build import build_model
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.initialization import random_weights
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.models.new_rows import grow_vocabulary
from launcher.models.precision import kept_in_float32
from launcher.recipe import schema
from launcher.recipe.schema import Lora, Model
from launcher.training.model import prepare_model, prepare_teacher
from tests import multimodal
from tests.unit.models.recurrent_families import FAMILIES
from tests.unit.models.recurrent_families import build as build_recurrent
from tests.unit.models.test_export import create_checkpoint, recipe_of
from tests.unit.models.test_load import CPU, FIELDS, LATENT, change, save

HALF = {"dtype": torch.bfloat16}
RECURRENT = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
RECURRENT |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
RECURRENT |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
TEXT = FIELDS | RECURRENT | {"mtp_num_hidden_layers": 1}
VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
VISION |= {"out_hidden_size": 32, "patch_size": 14, "num_position_embeddings": 16}
MTP = ("mtp.fc.weight", "mtp.layers.0.norm.weight")
SHARED = ("model.language_model.layers.2.self_attn.k_proj.weight",)
"""Keys of a layer that takes those of another one, which checkpoints of Gemma 4 have."""


def save_source(folder, kind):
    """A checkpoint in bfloat16 with tensors that its class does not have, some in float32."""
    if kind == "qwen3_5":
        config = transformers.AutoConfig.for_model(kind, text_config=TEXT, vision_config=VISION)
        torch.manual_seed(1)
        model = transformers.AutoModelForImageTextToText.from_config(config)
        model.to(torch.bfloat16).save_pretrained(folder)
        names = MTP
    elif kind == "deepseek_v3":
        save(folder, model_type=kind, num_nextn_predict_layers=1, **LATENT, **HALF)
        names = ("model.layers.2.eh_proj.weight", "model.layers.2.shared_head.norm.weight")
    elif kind in multimodal.MODELS:
        config = transformers.AutoConfig.for_model(kind, **multimodal.MODELS[kind])
        model = transformers.AutoModelForImageTextToText.from_config(config)
        model.to(torch.bfloat16).save_pretrained(folder)
        names = SHARED if kind == "gemma4" else ()
    elif kind in FAMILIES:
        model = build_recurrent(kind).to(torch.bfloat16)
        model.config.time_step_limit = (0.0, 1.0)  # transformers cannot read the infinity it writes
        model.save_pretrained(folder)
        names = MTP
    elif kind == "minimax_m2":
        sizes = {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8, "head_dim": 8}
        save(folder, model_type=kind, **sizes, **HALF)
        names = ()
    stored = load_file(folder / "model.safetensors")
    bias = "e_score_correction_bias"
    exact = {n: t.float() + 0.1234567 for n, t in stored.items() if n.endswith((bias, "A_log"))}
    made = {
        name: torch.randn(8, 8).to((torch.bfloat16, torch.float32)["norm" in name])
        for name in names
    }
    change(folder, exact | made)
    return folder


LONG = ["glm4v_moe", "mllama", "nemotron_h", "qwen3_next", "llama4"]


@pytest.fixture(
    params=[
        *("qwen3_5", "deepseek_v3", "minimax_m2", "gemma4"),
        *(pytest.param(kind, marks=pytest.mark.long) for kind in LONG),
    ]
)
def source(request, tmp_path):
    return save_source(tmp_path / "source", request.param)


def loaded(folder, *, lora=False):
    model = build_model(Model(path=str(folder)), sequence_length=16)
    found = open_checkpoint(folder, model)
    if lora:
        kept = kept_in_float32(model, torch.bfloat16, found)
        add_adapters(model, Lora(rank=2), base_dtype=torch.bfloat16, kept=kept, base=str(folder))
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=0)
    return model, found


@pytest.mark.parametrize("lora", [False, True])
def test_exports_are_whole_and_keep_dtypes(source, tmp_path, messages, lora):
    """MTP layers, router biases and the decay of recurrent states. Frozen weights are not rounded
    either."""
    model, found = loaded(source, lora=lora)
    options = {"rank": 0, "device": CPU, "dtype": found.stored.dtype(), "merged": lora}
    export_hugging_face(model, tmp_path / "out", source=found, **options)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name
    kind = source_type(source)
    if kind in ("qwen3_5", "deepseek_v3", "minimax_m2"):
        assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16, torch.float32}
    config = [json.loads((f / "config.json").read_text()) for f in (source, tmp_path / "out")]
    assert config[0]["architectures"] == config[1]["architectures"]
    notes = [m for m in messages() if "exports copy them unchanged" in m]
    what = "note: in the checkpoint, but not in this model, not trained: "
    assert notes == {
        "qwen3_5": [f"{what}mtp.fc, mtp.layers.0; exports copy them unchanged"],
        "deepseek_v3": [f"{what}model.layers.2; exports copy them unchanged"],
        "gemma4": [f"{what}model.language_model.layers.2; exports copy them unchanged"],
        "nemotron_h": [f"{what}mtp.fc, mtp.layers.0; exports copy them unchanged"],
        "qwen3_next": [f"{what}mtp.fc, mtp.layers.0; exports copy them unchanged"],
    }.get(kind, [])  # fmt: skip
    auto = transformers.AutoModelForCausalLM
    if kind in multimodal.MODELS:
        auto = transformers.AutoModelForImageTextToText
    _, loading = auto.from_pretrained(tmp_path / "out", output_loading_info=True)
    unexpected = {name for name in before if name.startswith("model.layers.2.")}
    assert loading["unexpected_keys"] == (unexpected if kind == "deepseek_v3" else set())
    assert not loading["missing_keys"]
    assert not loading["mismatched_keys"]


def source_type(folder):
    return json.loads((folder / "config.json").read_text())["model_type"]


def test_export_command_keeps_and_compares_them(tmp_path):
    source = save_source(tmp_path / "source", "deepseek_v3")
    model, _ = loaded(source)
    run, out = tmp_path / "run", tmp_path / "out"
    recipe = recipe_of(f"model.path={source}", "data.tokenizer=null", "data.kind=tokens")
    checkpoint = create_checkpoint(run, model, 10, recipe)
    (run / "recipe.yaml").write_text("run: {}\n")
    assert main(["export", str(run), f"out={out}"]) == 0
    before, after = (load_file(f / "model.safetensors") for f in (source, out))
    assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    stored = open_checkpoint_weights(checkpoint, trust_run=False)
    assert verify._compare_tensors(stored, out) == ([], torch.bfloat16)
    # Another dtype is that of most tensors
    shutil.copytree(out, run / "hf")
    shutil.rmtree(run / "checkpoints")
    assert main(["export", str(run), f"out={tmp_path}/half", "dtype=float16"]) == 0
    for name, tensor in load_file(tmp_path / "half/model.safetensors").items():
        was_exact = before[name].dtype == torch.float32
        assert tensor.dtype == (torch.float32 if was_exact else torch.float16), name
    exact, lost = "model.layers.1.mlp.gate.e_score_correction_bias", "model.layers.2.eh_proj.weight"
    change(out, {exact: before[exact].bfloat16(), lost: None})
    differences, _ = verify._compare_tensors(stored, out)
    assert differences == [
        f"{exact}: torch.bfloat16 instead of torch.float32",
        f"{lost}: missing",
    ]


@pytest.mark.parametrize(
    "kind",
    ["qwen3_5", *(pytest.param(k, marks=pytest.mark.long) for k in ("gemma4", "nemotron_h"))],
)
def test_export_command_writes_the_config_of_the_source(tmp_path, kind):
    """Byte for byte, from a checkpoint of a run, but for the keys that transformers 4 reads."""
    source = save_source(tmp_path / "source", kind)
    model, _ = loaded(source)
    run, out = tmp_path / "run", tmp_path / "out"
    recipe = recipe_of(f"model.path={source}", "data.tokenizer=null", "data.kind=tokens")
    create_checkpoint(run, model, 10, recipe)
    (run / "recipe.yaml").write_text("run: {}\n")
    assert main(["export", str(run), f"out={out}"]) == 0
    config = json.loads((out / "config.json").read_text())
    original = json.loads((source / "config.json").read_text())
    for section, own in (
        (config, original),
        (config.get("text_config", {}), original.get("text_config", {})),
    ):
        for key in {"torch_dtype", "rope_theta", "partial_rotary_factor"} - own.keys():
            section.pop(key, None)
    text = json.dumps(config, indent=2) + "\n"
    assert text == (source / "config.json").read_text()
    before, after = (load_file(f / "model.safetensors") for f in (source, out))
    assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_the_source_has_in_16_bits_stays_so(tmp_path):
    """Also biases of routers, which transformers keeps in float32 while a model is in memory."""
    source = save_source(tmp_path / "source", "deepseek_v3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    change(source, {bias: load_file(source / "model.safetensors")[bias].bfloat16()})
    model, found = loaded(source)
    options = {"rank": 0, "device": CPU, "source": found}
    for name, dtype in (("same", torch.bfloat16), ("other", torch.float16)):
        export_hugging_face(model, tmp_path / name, dtype=dtype, **options)
        exported = load_file(tmp_path / name / "model.safetensors")[bias]
        assert exported.dtype == (torch.bfloat16 if name == "same" else torch.float32)


def test_exports_of_a_classifier_leave_other_layers_out(tmp_path, messages):
    source = save_source(tmp_path / "source", "deepseek_v3")
    section = Model(path=str(source), task="sequence_classification", num_labels=2)
    found = open_checkpoint(source, build_model(section, sequence_length=16))
    assert found.copied == ()
    assert any(
        m.endswith("model.layers.2; exports of a classifier leave them out") for m in messages()
    )


def recipe_for(source, **sections):
    return schema.Recipe(
        run=schema.Run(name="x", max_steps=1),
        model=Model(path=str(source)),
        data=schema.Data(kind="tokens", sequence_length=12, packing=False),
        batch=schema.Batch(global_batch_size=2, micro_batch_size=2),
        strategy=schema.Strategy(kind="ddp"),
        **sections,
    )


def test_merged_exports_have_the_frozen_weights_of_a_float32_source(tmp_path):
    """The run holds them in bfloat16. The merged export was made of these."""
    source = save(tmp_path / "source", num_key_value_heads=2)
    lora = Lora(rank=2, target_modules=("q_proj",))
    prepared = prepare_model(recipe_for(source, lora=lora), device=CPU)
    model = prepared.model
    prepared.weights.init_fn(model, CPU, CPU)
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16
    options = {"rank": 0, "device": CPU, "merged": True, "source": prepared.weights.source}
    export_hugging_face(model, tmp_path / "out", **options)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("lora", [{}, {"dora": True}, {"quantize": "nf4"}])
def test_a_rank_that_writes_nothing_reads_no_source(tmp_path, lora, monkeypatch):
    """It takes part in all-gathers only, with zeros of the shapes of what is not gathered."""
    source = save(tmp_path / "source", hidden_size=64, intermediate_size=64)
    recipe = recipe_for(source, lora=Lora(rank=2, **lora))
    section = dataclasses.replace(recipe.model, new_tokens=("<call>",))
    data = dataclasses.replace(recipe.data, tokenizer="bytes")
    recipe = dataclasses.replace(recipe, model=section, data=data)
    prepared = prepare_model(recipe, device=CPU)
    prepared.weights.init_fn(prepared.model, CPU, CPU)
    monkeypatch.setattr(type(prepared.weights.source.stored), "read", None)
    options = {"device": CPU, "merged": True, "source": prepared.weights.source}
    export_hugging_face(prepared.model, tmp_path / "out", rank=1, **options)
    assert not (tmp_path / "out").exists()


def test_frozen_parameters_that_matter_stay_in_float32(tmp_path):
    """Of adapters' base models and of teachers: what the source has in float32 among 16 bits, and
    the decay of recurrent states from a source in float32."""
    mixed = save_source(tmp_path / "mixed", "qwen3_5")
    whole = save(tmp_path / "whole", model_type="qwen3_5_text", **RECURRENT)
    for source in (mixed, whole):
        lora = recipe_for(source, lora=Lora(rank=2))
        prepared = prepare_model(lora, device=CPU)
        frozen = {n: p for n, p in prepared.model.named_parameters() if not p.requires_grad}
        found = {n.rpartition(".")[2] for n, p in frozen.items() if p.dtype == torch.float32}
        assert found == {"A_log", "dt_bias"}, source
        prepared.weights.init_fn(prepared.model, CPU, CPU)
        stored = load_file(source / "model.safetensors")
        (name,) = (name for name in stored if name.endswith("layers.0.linear_attn.A_log"))
        assert torch.equal(prepared.model.get_parameter(name), stored[name])
    recipe = recipe_for(whole, distillation=schema.Distillation(teacher=str(whole), top_k=4))
    own = prepare_model(recipe, device=CPU)
    teacher = prepare_teacher(recipe, own, "", device=CPU).model
    dtypes = {name: p.dtype for name, p in teacher.named_parameters()}
    assert dtypes["model.layers.0.linear_attn.A_log"] == torch.float32
    assert dtypes["model.embed_tokens.weight"] == torch.bfloat16


def test_embeddings_of_copied_layers_get_rows_of_new_tokens(tmp_path, messages):
    """A server that loads them expects as many rows as the model has tokens."""
    source, new = save_source(tmp_path / "source", "deepseek_v3"), range(64, 67)
    head = "model.layers.2.shared_head.head.weight"
    change(source, {head: torch.arange(64 * 32).view(64, 32).to(torch.bfloat16)})
    model = build_model(Model(path=str(source)), sequence_length=16)
    grow_vocabulary(model, new)
    found = open_checkpoint(source, model, new_ids=new)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=0)
    options = {"rank": 0, "device": CPU, "dtype": torch.bfloat16}
    export_hugging_face(model, tmp_path / "out", source=found, **options)
    before, after = (load_file(f / "model.safetensors") for f in (source, tmp_path / "out"))
    assert after[head].shape == after["lm_head.weight"].shape == (67, 32)
    assert torch.equal(after[head][:64], before[head])
    mean = before[head].double().mean(0).to(torch.bfloat16)
    assert torch.equal(after[head][64:], mean.expand(3, -1))
    other = "model.layers.2.eh_proj.weight"
    assert torch.equal(after[other], before[other])
    note = f"note: rows of new tokens are the mean of the others: {head}"
    assert note in messages()


def test_random_weights_of_a_source_are_exported_with_its_config(tmp_path):
    source = save_source(tmp_path / "source", "deepseek_v3")
    model = build_model(Model(path=str(source), init="random"), sequence_length=16)
    random_weights(model, CPU, CPU, seed=1)
    export_hugging_face(model, tmp_path / "out", rank=0, device=CPU)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config.items() >= {"num_nextn_predict_layers": 1, "torch_dtype": "float32"}.items()
    assert not any("layers.2." in n for n in load_file(tmp_path / "out/model.safetensors"))
