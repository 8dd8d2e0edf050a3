"""Weights that adapters change: a kind of layer is one class, and no other module reads names."""

import ast
import copy
import re
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from launcher.checkpoint.export import export_folder
from launcher.errors import RecipeError
from launcher.libraries.private import checkpoint_wrapper
from launcher.models import adapted
from launcher.models.adapted import (
    AdaptedLinear,
    AdaptedWeight,
    AdapterTensor,
    adapted_weights,
    adapter_parameters,
    mark_adapted,
)
from launcher.models.build import build_model
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Lora, Model
from launcher.training.model import learning_rate_ratios
from tests import REPOSITORY
from tests.unit.models.test_export import export_model
from tests.unit.models.test_load import CPU, logits, reference, save

NAMES = r"lora_[AB]|lora_embedding_[AB]|lora_magnitude|\.lora_$|base_layer|new_rows|token_adapter"
DEFINED = {
    "adapted.py": None,
    "grouped_experts.py": {"lora_A_", "lora_B_"},  # of its own parameters
    "names.py": {"base_layer"},  # which `clean_name` leaves out
}


@pytest.mark.slow
def test_no_other_module_reads_names_of_adapters():
    found = {}
    for file in (REPOSITORY / "launcher").rglob("*.py"):
        nodes = [*ast.walk(ast.parse(file.read_text()))]
        # A text that is a statement of its own is documentation
        documentation = {node.value for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and node not in documentation:
                if isinstance(node.value, str) and re.search(NAMES, node.value):
                    found.setdefault(file.name, set()).add(node.value)
    found["adapted.py"] = None
    assert found == DEFINED


def test_the_weights_of_copies_and_of_wrapped_models_have_their_present_names():
    config = {"model_type": "llama", "num_hidden_layers": 3, "hidden_size": 16, "vocab_size": 32}
    config |= {"intermediate_size": 16, "num_attention_heads": 2, "num_key_value_heads": 2}
    model = build_model(Model(config=config), sequence_length=8)
    add_adapters(model, Lora(rank=2, target_modules=("q_proj",)), base_dtype=torch.float32)

    def names(model):
        return [each.weight for each in adapted_weights(model)]

    expected = [f"model.layers.{index}.self_attn.q_proj.weight" for index in range(3)]
    assert names(model) == expected
    assert names(model.model.layers[1]) == ["self_attn.q_proj.weight"]
    short = copy.deepcopy(model)
    del short.model.layers[1]
    short.model.layers[1] = checkpoint_wrapper(short.model.layers[1])
    assert names(short) == expected[:2]
    assert names(model) == expected
    kept = {module for module in short.modules() if module in {*model.modules()}}
    assert not kept & {each.module for each in adapted_weights(short)}
    assert all(type(each) is AdaptedLinear for each in adapted_weights(short))


@dataclass(frozen=True)
class AdaptedEmbedding(AdaptedWeight):
    """The weight of an embedding, (vocabulary, features), with factors of its own module: a kind of
    layer that the launcher does not have."""

    @classmethod
    def of(cls, layer, module):
        yield cls(layer, module, scale=2.0)

    @classmethod
    def in_file(cls, model, config, keys):
        for layer, module in adapted._layers(model, keys, ".lora_embedding_A"):
            yield cls(layer, module, adapted.scale_of(config))

    def tensors(self):
        key = f"base_model.model.{self.layer}.lora_embedding_"
        down, up = (AdapterTensor(f"{self.layer}.{name}", name == "up") for name in ("down", "up"))
        return {f"{key}A": down, f"{key}B": up}

    def draw(self):
        torch.nn.init.zeros_(self.module.down)
        torch.nn.init.normal_(self.module.up)

    def merged(self, weight, read):
        down, up = (read(key).float() for key in self.tensors())
        return weight.float() + self.scale * (up @ down).T


def embed(module, forward, ids):
    return forward(ids) + 2.0 * functional.embedding(ids, module.down.T) @ module.up.T


def add_to_embedding(model, base):
    """What stands in `add_adapters` for a kind of layer."""
    model.requires_grad_(False)
    layer = model.get_input_embeddings()
    vocabulary, features = layer.weight.shape
    layer.down = torch.nn.Parameter(torch.empty(4, vocabulary, device="meta"))
    layer.up = torch.nn.Parameter(torch.empty(features, 4, device="meta"))
    layer.forward = partial(embed, layer, layer.forward)
    mark_adapted(layer, AdaptedEmbedding)
    model.peft_config = {
        "default": LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["embed_tokens"],
            task_type="CAUSAL_LM",
            base_model_name_or_path=str(base),
        )
    }


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
def test_a_kind_of_layer_is_a_class_and_a_mark(tmp_path, monkeypatch, tied):
    """Drawn, trained at its rate, exported, merged, and read from a file without another line."""
    monkeypatch.setattr(adapted, "_KINDS", (*adapted._KINDS, AdaptedEmbedding))
    base = save(tmp_path / "base", tie_word_embeddings=tied)
    model = build_model(Model(path=str(base)), sequence_length=16)
    found = open_checkpoint(base, model)
    add_to_embedding(model, base)
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=3)
    names = {"model.embed_tokens.down", "model.embed_tokens.up"}
    assert adapter_parameters(model) == names
    assert {name for name, p in model.named_parameters() if p.requires_grad} == names
    torch.testing.assert_close(logits(model), reference(base))  # without effect

    recipe = load_recipe(["recipe=fsdp", "lora={b_ratio: 4}"], ranks=1).recipe
    assert learning_rate_ratios(model, recipe) == {"model.embed_tokens.up": 4.0}

    model.get_input_embeddings().down.data.normal_(std=0.1)
    wanted = logits(model)
    assert not torch.allclose(wanted, reference(base))
    adapter = export_model(model, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(base)
    torch.testing.assert_close(logits(PeftModel.from_pretrained(plain, adapter)), wanted)
    merged = export_model(model, tmp_path / "merged", merged=True)
    torch.testing.assert_close(reference(merged), wanted)
    export_folder(adapter, tmp_path / "later", dtype=None, merged=True)
    torch.testing.assert_close(reference(tmp_path / "later"), wanted)


def test_tensors_of_an_adapter_that_change_nothing_known_are_refused(tmp_path):
    base = save(tmp_path / "base")
    model = build_model(Model(path=str(base)), sequence_length=16)
    found = open_checkpoint(base, model)
    add_adapters(model, Lora(rank=2), base_dtype=torch.float32, base=str(base))
    pretrained_weights(model, CPU, CPU, checkpoint=found, seed=3)
    file = export_model(model, tmp_path / "adapter") / "adapter_model.safetensors"
    prefix, tensors = "base_model.model.model", load_file(file)
    for name in ("embed_tokens.lora_embedding_A", "layers.0.self_attn.q_proj.lora_B.bias"):
        save_file(tensors | {f"{prefix}.{name}": torch.ones(2)}, file)
        with pytest.raises(
            RecipeError, match=f"base has no model.{name}, which the adapter changes"
        ):
            export_folder(tmp_path / "adapter", tmp_path / "merged", dtype=None, merged=True)


def test_what_a_kind_lacks_is_refused():
    kind = AdaptedEmbedding("model.embed_tokens", None)
    with pytest.raises(RecipeError, match=r"adapter of model\.embed_tokens cannot be divided"):
        kind.divided(0)
    with pytest.raises(RecipeError, match=r"embed_tokens; set model\.chunked_loss=false"):
        kind.product(*[torch.zeros(1)] * 3)
    with pytest.raises(TypeError, match="abstract"):
        AdaptedWeight("model.embed_tokens", None)  # type: ignore[abstract]
