"""What a checkpoint's folder may look like, and everything that can be wrong with one."""

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.models.export import export_hugging_face
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.recipe.schema import Model

CPU = torch.device("cpu")
FIELDS = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
}
IDS = torch.arange(24).view(2, 12)


def save(
    folder,
    *,
    model_type="llama",
    auto="AutoModelForCausalLM",
    seed=1,
    dtype=torch.float32,
    **fields,
):
    import transformers

    torch.manual_seed(seed)
    shards = {"max_shard_size": fields.pop("max_shard_size")} if "max_shard_size" in fields else {}
    config = transformers.AutoConfig.for_model(model_type, **(FIELDS | fields))
    model = getattr(transformers, auto).from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, **shards)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(saved, tmp_path):
    """A folder of its own, to be broken."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder, **tensors):
    """Replaces tensors of a checkpoint; None takes one away. `__` stands for a dot."""
    state = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        name = name.replace("__", ".")
        state.pop(name, None)
        if tensor is not None:
            state[name] = tensor
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def load(folder, **section):
    model = build_model(Model(path=str(folder), **section), sequence_length=16)
    found = open_checkpoint(Path(folder), model)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=3)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def reference(folder, auto="AutoModelForCausalLM"):
    import transformers

    return logits(getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32).eval())


def refusal(folder, **section):
    with pytest.raises(RecipeError) as error:
        load(folder, **section)
    return str(error.value)


def test_logits_are_from_pretraineds(saved):
    assert torch.equal(logits(load(saved)), reference(saved))


def test_all_mistakes_are_reported_at_once(copy):
    change(
        copy,
        model__norm__weight=None,
        model__layers__0__mlp__up_proj__weight=torch.zeros(5, 32),
        model__layers__7__new=torch.zeros(1),
    )
    change(copy, lm_head__weight=None)
    message = refusal(copy)
    assert "does not fit a LlamaForCausalLM with its config" in message
    assert "model.norm.weight: missing in the checkpoint" in message
    assert "lm_head.weight: missing in the checkpoint" in message
    assert (
        "model.layers.0.mlp.up_proj.weight: is [5, 32] in the checkpoint, and [48, 32] in the model"
        in message
    )
    assert "model.layers.7.new: in the checkpoint, but not in the model" in message
    assert len(message.splitlines()) == 5


def test_another_tasks_head_is_logged(copy, messages):
    change(
        copy,
        score__weight=torch.zeros(2, 32),
        model__layers__0__self_attn__rotary_emb__inv_freq=torch.zeros(4),
    )
    model = load(copy)
    assert messages() == ["note: in the checkpoint, but not in this model, skipped: score.weight"]
    assert torch.equal(logits(model), reference(copy))


def test_a_base_models_checkpoint_has_no_head_to_predict_with(tmp_path):
    message = refusal(save(tmp_path, auto="AutoModel"))
    assert message.splitlines()[1:] == ["lm_head.weight: missing in the checkpoint"]


def test_a_base_models_names_lack_its_prefix(tmp_path):
    save(tmp_path, auto="AutoModel", tie_word_embeddings=True)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(load(tmp_path)), reference(tmp_path))


def test_a_layer_more_in_a_base_models_checkpoint_is_not_taken_for_a_head(tmp_path):
    save(tmp_path, auto="AutoModel", tie_word_embeddings=True, num_hidden_layers=3)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    assert "layers.2.mlp.up_proj.weight: in the checkpoint, but not in the model" in refusal(
        tmp_path
    )


def test_a_tied_head_that_is_stored_twice(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone())
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), reference(tmp_path))


def test_a_tied_head_alone_is_enough(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    change(tmp_path, lm_head__weight=embedding.clone(), model__embed_tokens__weight=None)
    assert torch.equal(logits(load(tmp_path)), reference(tmp_path))


def test_a_different_tied_head_is_untied(tmp_path, messages):
    save(tmp_path, tie_word_embeddings=True)
    change(tmp_path, lm_head__weight=torch.randn(64, 32))
    model = load(tmp_path)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings
    assert "they are not tied" in messages()[0]
    assert torch.equal(logits(model), reference(tmp_path))


def test_bfloat16_becomes_float32(tmp_path):
    save(tmp_path, dtype=torch.bfloat16, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    model = load(tmp_path)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model), reference(tmp_path))


LATENT = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
        (
            "deepseek_v3",
            LATENT
            | {
                "n_routed_experts": 4,
                "n_group": 2,
                "topk_group": 1,
                "moe_intermediate_size": 16,
                "first_k_dense_replace": 1,
            }
            | {"num_experts_per_tok": 2},
        ),
        (
            "gpt_oss",
            {
                "num_local_experts": 2,
                "num_experts_per_tok": 1,
                "head_dim": 8,
                "num_key_value_heads": 2,
            },
        ),
        ("phi3", {"pad_token_id": 0}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_a_tensor_made_of_several_stored_ones(tmp_path, model_type, fields):
    attention = "eager" if model_type == "gpt_oss" else "sdpa"
    save(tmp_path, model_type=model_type, **fields)
    model = load(tmp_path, attention=attention)
    import transformers

    other = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation=attention
    ).eval()
    assert torch.equal(logits(model), logits(other))


def test_an_expert_that_is_missing_is_named(tmp_path):
    save(tmp_path, model_type="mixtral", num_local_experts=3, num_experts_per_tok=2)
    names = [name for name in load_file(tmp_path / "model.safetensors") if ".experts.1.w1" in name]
    change(tmp_path, **{names[0].replace(".", "__"): None})
    assert "experts.gate_up_proj" in refusal(tmp_path)


def test_pickled_weights_are_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    message = refusal(copy)
    assert "has no safetensors, only pickled weights" in message
    assert "save_pretrained" in message


def test_no_weights(copy):
    (copy / "model.safetensors").unlink()
    assert "set model.init: random" in refusal(copy)
    model = build_model(Model(path=str(copy), init="random"), sequence_length=16)
    assert model.config.hidden_size == 32


def test_an_adapter_is_no_model(copy):
    (copy / "model.safetensors").rename(copy / "adapter_model.safetensors")
    (copy / "adapter_config.json").write_text("{}")
    assert "merged=true" in refusal(copy)


def test_a_download_that_is_not_complete(copy):
    whole = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(whole[:-100])
    assert "is damaged" in refusal(copy)
    (copy / "model.safetensors").write_bytes(whole[:5])
    assert "is damaged, or no safetensors file" in refusal(copy)
    (copy / "model.safetensors").write_bytes(b"<html>not found</html>")
    assert "is damaged, or no safetensors file" in refusal(copy)


def test_a_file_that_the_index_names_is_not_there(tmp_path):
    save(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert f"lacks {lost.name}, which its index names" in refusal(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    assert "has no weight_map" in refusal(tmp_path)


def test_quantized_weights_are_refused(copy):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    assert "quantized weights cannot be trained" in refusal(copy)


def test_code_of_a_checkpoint_is_not_run(copy):
    config = json.loads((copy / "config.json").read_text()) | {"model_type": "mine"}
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "mine.py").write_text("raise SystemExit('was run')")
    assert "set model.trust_remote_code: true" in refusal(copy)


MINE = """
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class Config(PreTrainedConfig):
    model_type = "mine"
    hidden_size = 8

class Mine(PreTrainedModel):
    config_class = Config

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(64, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 64)
        self.post_init()

    def forward(self, input_ids):
        return CausalLMOutput(logits=self.head(self.embedding(input_ids)))
"""


def test_trusted_code_of_a_checkpoint_is_run_and_exported(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM, dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("sys.path", list(sys.path))
    base = tmp_path / "mine"
    base.mkdir()
    config = {
        "model_type": "mine",
        "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"},
    }
    (base / "config.json").write_text(json.dumps(config))
    (base / "mine.py").write_text(MINE)
    state = {
        "embedding.weight": torch.randn(64, 8),
        "head.weight": torch.randn(64, 8),
        "head.bias": torch.randn(64),
    }
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    model = load(base, trust_remote_code=True, attention="eager")
    assert torch.equal(
        logits(model),
        nn.functional.linear(
            state["embedding.weight"][IDS], state["head.weight"], state["head.bias"]
        ),
    )
    export_hugging_face(model, tmp_path / "out", rank=0, device=CPU)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert torch.equal(logits(again), logits(model))


def test_an_encoder_predicts_no_next_token(tmp_path):
    save(tmp_path, model_type="bert", auto="AutoModelForMaskedLM")
    assert "bert is an encoder" in refusal(tmp_path)


def test_a_model_type_without_such_a_task(tmp_path):
    from transformers import T5Config

    T5Config(vocab_size=64, d_model=16, d_ff=16, num_layers=1, num_heads=2).save_pretrained(
        tmp_path
    )
    assert "give a causal language model" in refusal(tmp_path)


def test_a_config_that_cannot_be_read(copy):
    (copy / "config.json").write_text("{")
    assert refusal(copy).startswith("model.path: transformers refuses it")


def test_longer_than_the_positions(saved):
    with pytest.raises(
        RecipeError,
        match=r"data.sequence_length: 65 is more than the 64 positions of the model; shorten it$",
    ):
        build_model(Model(path=str(saved)), sequence_length=65)


def test_a_classifiers_new_head_is_drawn_from_the_seed(saved, messages):
    section = Model(path=str(saved), task="sequence_classification")

    def loaded(seed):
        model = build_model(section, sequence_length=16, labels=["bad", "good", "other"])
        found = open_checkpoint(saved, model)
        pretrained_weights(model, CPU, CPU, checkpoint=found, seed=seed)
        return model

    first, again, other = loaded(1), loaded(1), loaded(2)
    assert "note: not in the checkpoint, initialized: score.weight" in messages()
    assert first.config.id2label == {0: "bad", 1: "good", 2: "other"}
    assert first.config.pad_token_id == first.config.eos_token_id == 2
    assert first(IDS).logits.shape == (2, 3)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert torch.equal(first.model.norm.weight, other.model.norm.weight)


def test_a_checkpoint_with_another_number_of_classes(tmp_path):
    save(tmp_path, auto="AutoModelForSequenceClassification", num_labels=3, pad_token_id=0)
    assert torch.equal(
        logits(load(tmp_path, task="sequence_classification")),
        reference(tmp_path, "AutoModelForSequenceClassification"),
    )
    assert "score.weight: is [3, 32] in the checkpoint, and [4, 32] in the model" in refusal(
        tmp_path, task="sequence_classification", num_labels=4
    )
