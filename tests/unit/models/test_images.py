"""The image tower in training: what is trained, what runs without images, masks of packed rows."""

import pytest
import torch
import transformers

from launcher.data.image_processor import load_processor
from launcher.errors import RecipeError
from launcher.libraries.private import attention_implementation
from launcher.models.applied import applied
from launcher.models.attention import VARLEN, drop_causal_mask, isolate_documents
from launcher.models.build import build_model, parts_without_text
from launcher.models.changes import adapt
from launcher.models.images import packed_masks, tower_blocks, unused_modules, use_images
from launcher.recipe.schema import Lora, Model
from tests import multimodal
from tests.image_models import make_model, skip_without_packages

CPU = torch.device("cpu")
FOUR = ("qwen2_5_vl", "gemma3", "idefics3", "llava")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {family: make_model(root / family, family) for family in FOUR}


def prepared(folder, train="all"):
    skip_without_packages(folder.name)
    blank = load_processor(str(folder), None).blank_batch
    model = build_model(Model(path=str(folder)), sequence_length=64)
    use_images(model, train, {name: torch.from_numpy(array) for name, array in blank.items()})
    return model


def with_weights(folder, train="all"):
    model = prepared(folder, train)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(dict(loaded.state_dict()), assign=True)
    for name, parameter in prepared(folder, train).named_parameters():
        model.get_parameter(name).requires_grad_(parameter.requires_grad)
    for name, buffer in loaded.named_buffers():
        parent, _, last = name.rpartition(".")
        model.get_submodule(parent)._buffers[last] = buffer
    return model


@pytest.mark.parametrize("family", FOUR)
def test_text_alone_gives_every_trained_parameter_a_gradient(models, family):
    """DDP waits for it."""
    folder = models[family]
    model = with_weights(folder)
    blank = load_processor(str(folder), None).blank_batch
    ids = torch.tensor([[257, 65, 66, 67]])
    inputs = {name: torch.from_numpy(array) for name, array in blank.items()}
    tower = applied(model).images
    if tower.token_types:
        inputs[tower.token_types] = torch.zeros_like(ids)
    model.train()
    plain = model(input_ids=ids, use_cache=False, **(
        {tower.token_types: inputs[tower.token_types]} if tower.token_types else {}
    )).logits  # fmt: skip
    logits = model(input_ids=ids, images=0, use_cache=False, **inputs).logits
    assert torch.equal(logits, plain)
    logits.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    without = {name for name in trained if model.get_parameter(name).grad is None}
    assert without == set()
    of_tower = set(parts_without_text(model))
    assert all(not model.get_parameter(name).grad.any() for name in trained & of_tower)
    assert trained & of_tower
    assert not model.base_model.get_input_embeddings()._forward_hooks


@pytest.mark.parametrize("family", FOUR)
def test_what_is_trained(models, family):
    parts = {"none": set(), "projector": set(), "all": set()}
    for train, found in parts.items():
        model = prepared(models[family], train)
        of_tower = set(parts_without_text(model))
        found.update(n for n in of_tower if model.get_parameter(n).requires_grad)
        rest = [p for n, p in model.named_parameters() if n not in of_tower]
        assert all(parameter.requires_grad for parameter in rest)
    assert not parts["none"]
    assert parts["projector"] < parts["all"]
    words = ("merger", "projector", "connector")
    assert all(any(word in name for word in words) for name in parts["projector"])


@pytest.mark.parametrize(
    ("family", "projector", "tower"),
    [("qwen2_5_vl", "merger", "visual"), ("gemma3", "multi_modal_projector", "vision_tower")],
)
def test_lora_trains_a_projector_whole_and_no_tower(models, family, projector, tower):
    model = prepared(models[family], "none")
    lora = Lora(rank=2, modules_to_save=(projector,))
    adapt(model, lora, base_dtype=torch.float32, base=None, new_ids=range(0))
    of_tower = parts_without_text(model)
    trained = [name for name in of_tower if model.get_parameter(name).requires_grad]
    assert trained
    assert all(f".{projector}." in name for name in trained)
    whole, fresh = Lora(rank=2, modules_to_save=(tower,)), prepared(models[family], "none")
    with pytest.raises(RecipeError, match=rf"{tower}: .*{tower} is not only the projector of"):
        adapt(fresh, whole, base_dtype=torch.float32, base=None, new_ids=range(0))


def test_layers_that_features_do_not_depend_on_are_frozen(models):
    """LLaVA reads the last but one layer of its tower."""
    model = prepared(models["llava"])
    frozen = {n for n in parts_without_text(model) if not model.get_parameter(n).requires_grad}
    assert any("layers.1." in name for name in frozen)
    assert not any("layers.0." in name for name in frozen)


@pytest.mark.parametrize(
    ("family", "count"), [("qwen2_5_vl", 2), ("gemma3", 2), ("idefics3", 2), ("llava", 2)]
)
def test_blocks_of_towers(models, family, count):
    model = prepared(models[family])
    blocks = tower_blocks(model)
    assert len(blocks) == count
    assert len({type(block) for block in blocks.values()}) == 1
    assert unused_modules(model) == ()
    bare = build_model(Model(path=str(models[family])), sequence_length=64)
    assert tower_blocks(bare) == {}
    assert unused_modules(bare)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "llava"])
def test_attention_of_the_tower_is_not_causal(models, family):
    """Attention of packed rows is causal: in the tower it would change what the model sees."""
    for change in ("isolate", "drop"):
        model = prepared(models[family])
        if change == "isolate":
            isolate_documents(model, sequence_length=64, device=CPU, compute_dtype=torch.float32)
        else:
            drop_causal_mask(model)
        assert attention_implementation(model) == VARLEN
        assert model.config.vision_config._attn_implementation == "sdpa"


def test_packed_masks_are_those_of_single_documents():
    """Here transformers 5.23 has six wrong entries in the mask of sliding layers."""
    from transformers.models.gemma3 import modeling_gemma3

    text = transformers.AutoConfig.for_model("gemma3_text", sliding_window=6)
    text._attn_implementation = "sdpa"
    types = [torch.tensor([0, 0, 1, 1, 1, 1, 0, 0]), torch.tensor([0, 1, 1, 1, 1, 0, 0, 0, 0, 0])]
    positions = [torch.arange(len(one)) for one in types]

    def alone(of, at):
        masks = modeling_gemma3.create_masks_for_vision_model(
            text,
            torch.zeros(1, len(of), 32),
            None,
            None,
            at[None],
            modeling_gemma3.get_block_sequence_ids_for_mask(of[None]),
        )
        causal = torch.ones(len(of), len(of)).tril().bool()
        return {k: causal if m is None else m[0, 0] for k, m in masks.items()}

    single = [alone(*document) for document in zip(types, positions, strict=True)]
    made = packed_masks(torch.cat(types)[None], torch.cat(positions)[None], 6)
    for kind in ("full_attention", "sliding_attention"):
        wanted = torch.block_diag(*(document[kind].int() for document in single)).bool()
        assert torch.equal(made[kind][0, 0], wanted), kind
    causal = packed_masks(
        torch.cat(types)[None], torch.cat(positions)[None], 6, both_ways=("sliding_attention",)
    )
    assert torch.equal(causal["sliding_attention"], made["sliding_attention"])
    same = torch.block_diag(torch.ones(8, 8), torch.ones(10, 10)).bool()
    assert torch.equal(causal["full_attention"][0, 0], same & torch.ones(18, 18).tril().bool())


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "llama"} | multimodal.TEXT, "LlamaForCausalLM takes no images"),
        ({"model_type": "mllama"} | multimodal.MODELS["mllama"], "attends to images in layers"),
    ],
)
def test_models_that_are_refused(config, problem):
    model = build_model(Model(config=config), sequence_length=16)
    with pytest.raises(RecipeError, match=problem):
        use_images(model, "none", {})
