"""Loading checkpoints in every supported layout, and errors for invalid checkpoints."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn

from launcher.data.run_data import tokenizer_to_keep
from launcher.errors import RecipeError
from launcher.models.build import build_model
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.load import open_checkpoint, pretrained_weights, starting_weights
from launcher.models.micro_batch import MicroBatch
from launcher.models.predictions import cross_entropies
from launcher.models.safetensors_files import (
    StoredRows,
    StoredTensors,
    _sampled_blocks,
    open_folder,
)
from launcher.recipe import schema
from launcher.recipe.schema import Model
from launcher.training.model import prepare_model

CPU = torch.device("cpu")
FIELDS = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
FIELDS |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64}
IDS = torch.arange(24).view(2, 12)
CLASSIFIER = "AutoModelForSequenceClassification"


def save(
    folder,
    *,
    model_type="llama",
    auto="AutoModelForCausalLM",
    dtype=torch.float32,
    max_shard_size="5GB",
    **fields,
):
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(model_type, **(FIELDS | fields))
    model = getattr(transformers, auto).from_config(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def copy(saved, tmp_path):
    """A copy of the checkpoint, which a test may modify."""
    for file in saved.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder, tensors):
    """Replaces tensors of a checkpoint. None removes a tensor."""
    state = load_file(folder / "model.safetensors") | tensors
    state = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


def change_config(folder, **fields):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


def load(folder, *, seed=3, labels=None, **section):
    model = build_model(Model(path=str(folder), **section), sequence_length=16, labels=labels)
    found = open_checkpoint(Path(folder), model)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=seed)
    return model.eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def reference(folder, auto="AutoModelForCausalLM", **options):
    model = getattr(transformers, auto).from_pretrained(folder, dtype=torch.float32, **options)
    return logits(model.eval())


def load_error(folder, **section):
    with pytest.raises(RecipeError) as error:
        load(folder, **section)
    return str(error.value)


def test_all_tensor_mismatches_are_reported_together(copy):
    changes = {
        "model.norm.weight": None,
        "lm_head.weight": None,
        "model.layers.0.mlp.up_proj.weight": torch.zeros(5, 32),
        "model.layers.7.new": torch.zeros(1),
    }
    change(copy, changes)
    title, *problems = load_error(copy).splitlines()
    assert title.endswith("does not fit a LlamaForCausalLM with its config:")
    assert problems == [
        "lm_head.weight: missing in the checkpoint",
        "model.layers.0.mlp.up_proj.weight: is [5, 32] in the checkpoint, and [48, 32] in the model",
        "model.layers.7.new: in the checkpoint, but not in the model",
        "model.norm.weight: missing in the checkpoint",
    ]


def test_skipped_head_of_another_task_is_logged(copy, messages):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    change(copy, {"score.weight": torch.zeros(2, 32)} | frequencies)
    model = load(copy)
    assert messages() == ["note: in the checkpoint, but not in this model, skipped: score.weight"]
    assert torch.equal(logits(model), reference(copy))


def test_base_model_checkpoint_requires_a_tied_head(tmp_path):
    """Its names lack the prefix, and it has no head, which is an error unless the head is tied."""
    message = load_error(save(tmp_path, auto="AutoModel"))
    assert message.splitlines()[1:] == ["lm_head.weight: missing in the checkpoint"]
    save(tmp_path, auto="AutoModel", tie_word_embeddings=True)
    assert not any(name.startswith("model.") for name in load_file(tmp_path / "model.safetensors"))
    assert torch.equal(logits(load(tmp_path)), reference(tmp_path))
    change_config(tmp_path, num_hidden_layers=1)
    assert "layers.1.mlp.up_proj.weight: in the checkpoint, but not" in load_error(tmp_path)


def test_checkpoint_with_a_stored_tied_head(tmp_path, messages):
    """The checkpoint stores both tensors, only the head, or different values, which unties them."""
    save(tmp_path, tie_word_embeddings=True)
    embedding = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    for changes in ({}, {"model.embed_tokens.weight": None}):
        change(tmp_path, {"lm_head.weight": embedding.clone()} | changes)
        model = load(tmp_path)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(logits(model), reference(tmp_path))
    assert messages() == []
    changes = {"lm_head.weight": torch.randn(64, 32), "model.embed_tokens.weight": embedding}
    change(tmp_path, changes)
    model = load(tmp_path)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    assert not model.config.tie_word_embeddings
    assert "they are not tied" in messages()[0]
    assert torch.equal(logits(model), reference(tmp_path))


@pytest.mark.parametrize("untied", [False, True])
@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_freeze_applies_to_the_names_of_a_head_that_the_checkpoint_unties(
    tmp_path, name, untied, messages
):
    save(tmp_path, tie_word_embeddings=True)
    change(tmp_path, {"lm_head.weight": torch.randn(64, 32)} if untied else {})
    section = Model(path=str(tmp_path), freeze=(name,))
    model = build_model(section, sequence_length=16)
    starting_weights(section, model, seed=1)
    both = {"lm_head.weight", "model.embed_tokens.weight"}
    parameters = model.named_parameters(remove_duplicate=False)
    assert {key for key, p in parameters if not p.requires_grad} == ({name} if untied else both)
    (other,) = both - {name}
    note = f"note: model.freeze: {other} is frozen, too: the model ties it to {name}"
    assert (note in messages()) is not untied


LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4}
LATENT |= {"v_head_dim": 8, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 16, "first_k_dense_replace": 1, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {}),
        ("llama", {"dtype": torch.bfloat16, "max_shard_size": "10KB"}),
        ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
        ("deepseek_v3", LATENT),
        ("gpt_oss", {"num_local_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}),
        ("phi3", {"pad_token_id": 0}),
        ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ],
)
def test_logits_match_from_pretrained(tmp_path, model_type, fields):
    """Also if one tensor is combined from several stored ones, or if there are several files."""
    attention = "eager" if model_type == "gpt_oss" else "sdpa"
    save(tmp_path, model_type=model_type, **fields)
    assert (tmp_path / "model.safetensors.index.json").is_file() == ("max_shard_size" in fields)
    model = load(tmp_path, attention=attention)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(logits(model), reference(tmp_path, attn_implementation=attention))


def test_digest_of_weights_finds_other_values_and_ignores_the_files(tmp_path):
    """Of a large tensor, evenly spaced blocks are read: a fine-tuned model changes most values."""
    one, parts = (save(tmp_path / name, max_shard_size=size) for name, size in (("a", "5GB"), ("b", "20KB")))  # fmt: skip
    digest = open_folder(one).digest()
    assert open_folder(parts).digest() == digest
    small = load_file(one / "model.safetensors")["model.norm.weight"]
    change(one, {"model.norm.weight": small + torch.eye(1, 32)[0]})
    assert open_folder(one).digest() != digest
    assert _sampled_blocks(100, 200, 1) == [(100, 100)]
    assert _sampled_blocks(0, 4096 * 10, 1) == [(4096 * 9 // 2, 4096)]
    assert _sampled_blocks(0, 4096 * 9, 3) == [(0, 4096), (4096 * 4, 4096), (4096 * 8, 4096)]


def small_gemma3():
    text = FIELDS | {"head_dim": 8, "sliding_window": 8}
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 4, "image_size": 28, "patch_size": 14}
    tokens = {"image_token_index": 63, "boi_token_index": 62, "eoi_token_index": 61}
    sections = {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 1}
    return transformers.Gemma3Config(**sections, **tokens)


def save_gemma3_processor(folder):
    """A real processor, with a tokenizer of four words."""
    special = dict(zip(("eoi_token", "boi_token", "image_token"), range(61, 64), strict=True))
    words = {"what": 3, "is": 4, "this": 5, "?": 6} | {
        f"<{name}>": n for name, n in special.items()
    }
    words |= {"<pad>": 0, "<bos>": 1, "<eos>": 2}
    made = Tokenizer(models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        extra_special_tokens={name: f"<{name}>" for name in special},
        **{f"{name}_token": f"<{name}>" for name in ("pad", "bos", "eos")},
    )
    images = transformers.Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    transformers.Gemma3Processor(images, tokenizer, image_seq_length=1).save_pretrained(folder)
    images.save_pretrained(folder)  # transformers before 5 wrote a file of its own for this part


def seen_by_the_model(folder):
    """The inputs that the processor in a folder makes of an image and a text."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    assert isinstance(processor, transformers.Gemma3Processor)
    image = Image.fromarray(np.arange(40 * 30 * 3, dtype=np.uint8).reshape(40, 30, 3))
    return processor(images=image, text="<boi_token> what is this ?", return_tensors="pt")


@pytest.mark.parametrize("lora", [None, schema.Lora(rank=2)], ids=["whole", "lora"])
def test_text_training_of_a_multimodal_model_freezes_the_rest(tmp_path, lora, monkeypatch):
    """DDP would wait for gradients of the vision tower. The processor of the export makes the same
    inputs of an image, and the exported model computes with them."""
    base = tmp_path / "base"
    torch.manual_seed(0)
    transformers.Gemma3ForConditionalGeneration(small_gemma3()).save_pretrained(base)
    save_gemma3_processor(base)
    (base / "LICENSE.txt").write_text("terms")
    section = Model(path=str(base))
    recipe = schema.Recipe(
        run=schema.Run(name="gemma3", max_steps=1),
        model=section,
        data=schema.Data(kind="tokens", sequence_length=12),
        batch=schema.Batch(global_batch_size=2, micro_batch_size=2),
        strategy=schema.Strategy(kind="ddp", mixed_precision=None),
        lora=lora,
        checkpoint=schema.Checkpoint(export_merged=lora is not None),
    )
    prepared = prepare_model(recipe, device=CPU)
    model = prepared.model
    prepared.weights.init_fn(model, CPU, CPU)
    expected = transformers.Gemma3ForConditionalGeneration.from_pretrained(base)(IDS).logits
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-5, atol=1e-5)
    model(input_ids=IDS).logits.square().sum().backward()
    named = dict(model.named_parameters())
    assert {n for n, p in named.items() if p.requires_grad} == {
        n for n, p in named.items() if p.grad is not None
    }
    assert not any("vision" in name and ".lora_" in name for name in named)
    tokenizer = tokenizer_to_keep(recipe.data, recipe.model)
    out = tmp_path / "out"
    options = {"rank": 0, "device": CPU, "merged": lora is not None, "tokenizer": tokenizer}
    export_hugging_face(model, out, **options)
    companions = ("preprocessor_config.json", "processor_config.json", "LICENSE.txt")
    assert all((out / name).read_bytes() == (base / name).read_bytes() for name in companions)
    expected, inputs = seen_by_the_model(base), seen_by_the_model(out)
    assert expected.keys() == inputs.keys() >= {"pixel_values", "input_ids"}
    assert all(torch.equal(inputs[key], values) for key, values in expected.items())
    results = [
        transformers.Gemma3ForConditionalGeneration.from_pretrained(folder)(**inputs).logits
        for folder in (base, out)
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("model_type", "why"),
    [
        ("blip-2", "Blip2ForConditionalGeneration needs pixel_values in each forward pass"),
        ("paligemma", "its tokens of a text see the ones after them"),
        ("git", "its layers and its vision tower are one model"),
        ("udop", "it is an encoder-decoder"),
        ("diffusion_gemma", "it denoises blocks of tokens, and does not predict the next one"),
    ],
)
def test_models_that_text_alone_does_not_train_are_refused(model_type, why):
    message = f"^model.config: {model_type} cannot be trained on text alone: {why}$"
    with pytest.raises(RecipeError, match=message):
        build_model(Model(config={"model_type": model_type}), sequence_length=16)


@pytest.mark.parametrize("model_type", ["voxtral", "qwen2_audio", "qwen2_5_omni"])
def test_models_of_sound_are_refused(model_type):
    message = f"{model_type} is neither a causal language model of transformers, nor one of images"
    with pytest.raises(RecipeError, match=message):
        build_model(Model(config={"model_type": model_type}), sequence_length=16)


SCALING = {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}


@pytest.mark.parametrize("packing", [True, False])
def test_longrope_matches_transformers_on_both_sides_of_its_limit(tmp_path, packing):
    """The model keeps the long frequencies when it first runs, also when that is a trial on meta."""
    limits = {"original_max_position_embeddings": 16, "max_position_embeddings": 64}
    save(tmp_path, model_type="phi3", pad_token_id=0, rope_scaling=SCALING, **limits)
    recipe = schema.Recipe(
        run=schema.Run(name="longrope", max_steps=1),
        model=Model(path=str(tmp_path)),
        data=schema.Data(kind="tokens", sequence_length=40, packing=packing),
        batch=schema.Batch(global_batch_size=1, micro_batch_size=1),
        strategy=schema.Strategy(kind="ddp", mixed_precision=None),
    )
    prepared = prepare_model(recipe, device=CPU)
    prepared.weights.init_fn(prepared.model, CPU, CPU)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    found, outputs = prepared.model.eval(), []
    for length in (12, 40, 16):
        ids = torch.arange(length)[None] % 64
        targets = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], dim=1)
        with torch.no_grad():
            expected = plain(ids, labels=ids).loss * (length - 1)
            loss = cross_entropies(found, MicroBatch({"input_ids": ids}, targets), "sum").value
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        outputs.append(found(input_ids=ids).logits[0, :12])
    short, long, again = outputs
    assert (short - long).abs().max() > 1e-3, "the long frequencies differ"
    torch.testing.assert_close(short, again, rtol=1e-5, atol=1e-5)


def test_missing_expert_is_named(tmp_path):
    save(tmp_path, model_type="mixtral", num_local_experts=3, num_experts_per_tok=2)
    names = load_file(tmp_path / "model.safetensors")
    change(tmp_path, {next(name for name in names if ".experts.1.w1" in name): None})
    assert "experts.gate_up_proj" in load_error(tmp_path)


def test_checkpoint_without_weights_is_refused(copy):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    message = load_error(copy)
    for advice in ("model.init=random", "--merged", "Pickled weights", "save_pretrained"):
        assert advice in message
    model = build_model(Model(path=str(copy), init="random"), sequence_length=16)
    assert model.config.hidden_size == 32


def test_damaged_files_are_refused(copy):
    whole = (copy / "model.safetensors").read_bytes()
    for content in (whole[:-100], whole[:5], b"<html>not found</html>"):
        (copy / "model.safetensors").write_bytes(content)
        assert "is damaged, or no safetensors file" in load_error(copy)


def test_missing_file_of_the_index_is_named(tmp_path):
    save(tmp_path, max_shard_size="20KB")
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    assert f"lacks {lost.name}, which its index names" in load_error(tmp_path)
    for text in ("[]", '{"weight_map": {"a": ["b"]}}', '{"weight_map": [1]}', "[" * 20_000):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        assert "has no weight_map" in load_error(tmp_path)


def test_an_index_may_name_a_tied_head_that_no_file_holds(tmp_path):
    save(tmp_path, max_shard_size="20KB", tie_word_embeddings=True)
    index = tmp_path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    file = content["weight_map"]["model.norm.weight"]
    content["weight_map"]["lm_head.weight"] = file
    index.write_text(json.dumps(content))
    model = load(tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(logits(model), reference(tmp_path))
    change_config(tmp_path, tie_word_embeddings=False)
    assert "lacks lm_head.weight, which its index names" in load_error(tmp_path)
    change_config(tmp_path, tie_word_embeddings=True)
    content["weight_map"]["model.layers.0.lost.weight"] = file
    index.write_text(json.dumps(content))
    assert "lacks model.layers.0.lost.weight, which" in load_error(tmp_path)


def test_unsupported_configs_are_refused(copy):
    (copy / "mine.py").write_text("raise SystemExit('was run')")
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"}
    change_config(copy, quantization_config={"quant_method": "fp8"})
    assert "fp8: no weight has scales" in load_error(copy)
    change_config(copy, model_type="mine", auto_map=code)
    assert "set model.trust_remote_code=true" in load_error(copy)
    (copy / "config.json").write_text("{")
    assert load_error(copy).startswith("model.path: transformers refuses it")


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


def test_trusted_remote_code_is_run_and_exported(tmp_path, monkeypatch):
    cache = str(tmp_path / "modules")
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", cache)
    monkeypatch.setattr("sys.path", list(sys.path))
    base = tmp_path / "mine"
    base.mkdir()
    code = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Mine"}
    (base / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": code}))
    (base / "mine.py").write_text(MINE)
    shapes = {"embedding.weight": (64, 8), "head.weight": (64, 8), "head.bias": (64,)}
    state = {name: torch.randn(shape) for name, shape in shapes.items()}
    save_file(state, base / "model.safetensors", metadata={"format": "pt"})
    model = load(base, trust_remote_code=True, attention="eager")
    embedding, weight, bias = state.values()
    assert torch.equal(logits(model), nn.functional.linear(embedding[IDS], weight, bias))
    export_hugging_face(model, tmp_path / "out", rank=0, device=CPU)
    assert torch.equal(reference(tmp_path / "out", trust_remote_code=True), logits(model))


def test_non_causal_models_are_refused(tmp_path):
    save(tmp_path, model_type="bert", auto="AutoModelForMaskedLM")
    assert "bert is an encoder" in load_error(tmp_path)
    transformers.T5Config(vocab_size=64, d_model=16, num_layers=1).save_pretrained(tmp_path)
    assert "give a causal language model" in load_error(tmp_path)


def test_sequence_length_beyond_positions_is_refused(saved):
    message = "data.sequence_length: 65 is more than the 64 positions of the model; shorten it$"
    with pytest.raises(RecipeError, match=message):
        build_model(Model(path=str(saved)), sequence_length=65)


@pytest.mark.parametrize("model_type", ["roberta", "esm", "mpnet"])
def test_positions_that_start_after_padding_shorten_a_sequence(model_type):
    config = FIELDS | {"model_type": model_type, "pad_token_id": 1}
    section = Model(config=config, task="sequence_classification", num_labels=2)
    assert build_model(section, sequence_length=62)
    message = "63 is more than the 62 positions .*max_position_embeddings=65"
    with pytest.raises(RecipeError, match=message):
        build_model(section, sequence_length=63)


def test_classifier_without_padding_and_end_is_refused(saved, copy):
    task = {"task": "sequence_classification", "num_labels": 2}
    config = FIELDS | {"model_type": "llama", "eos_token_id": None, "pad_token_id": -1}
    with pytest.raises(RecipeError, match=r"^model.config.pad_token_id: missing, .* from 0 to 63$"):
        build_model(Model(config=config, **task), sequence_length=16)
    change_config(copy, eos_token_id=None, pad_token_id=None)
    message = f"^model.path: pad_token_id in {copy / 'config.json'}: missing"
    with pytest.raises(RecipeError, match=message):
        build_model(Model(path=str(copy), **task), sequence_length=16)
    assert build_model(Model(path=str(saved), **task), sequence_length=16)


def test_new_classifier_head_depends_on_the_seed(saved, messages):
    classes = {"task": "sequence_classification", "labels": ["bad", "good", "other"]}
    first, again, other = (load(saved, seed=seed, **classes) for seed in (1, 1, 2))
    assert "note: not in the checkpoint, initialized: score.weight" in messages()
    assert first.config.id2label == {0: "bad", 1: "good", 2: "other"}
    assert first.config.pad_token_id == first.config.eos_token_id == 2
    assert first(IDS).logits.shape == (2, 3)
    assert torch.equal(first.score.weight, again.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    assert torch.equal(first.model.norm.weight, other.model.norm.weight)


def test_checkpoint_with_another_class_count_is_refused(tmp_path):
    save(tmp_path, auto=CLASSIFIER, num_labels=3, pad_token_id=0)
    classifier = load(tmp_path, task="sequence_classification")
    assert torch.equal(logits(classifier), reference(tmp_path, CLASSIFIER))
    message = load_error(tmp_path, task="sequence_classification", num_labels=4)
    assert "score.weight: is [3, 32] in the checkpoint, and [4, 32] in the model" in message


def test_parts_of_a_tensor_are_joined_in_the_order_of_their_rows(tmp_path):
    """With expert or tensor parallelism that is not the order of the ranks."""
    whole, parts = torch.arange(24.0).view(8, 3), []
    for rank, first in enumerate((0, 4, 2, 6)):
        file = tmp_path / f"rank_{rank}.safetensors"
        save_file({"w": whole[first : first + 2].clone()}, file)
        parts.append(StoredRows(file, first, 2))
    stored = StoredTensors({"w": parts}, {"w": whole.to("meta")})
    assert torch.equal(stored.read("w"), whole)
