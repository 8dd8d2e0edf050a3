"""All models of images and text of transformers: what text alone trains, and what is refused."""

import re

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from launcher.errors import RecipeError
from launcher.libraries.private import attention_implementation
from launcher.models.attention import isolate_documents
from launcher.models.build import build_model
from launcher.models.description import describe, parts_without_text
from launcher.models.documents import documents_at
from launcher.models.initialization import random_weights
from launcher.models.recurrent import separate_documents
from launcher.recipe.model_config import why_not_packed
from launcher.recipe.schema import Model
from tests.unit.models.image_text_types import small_config

CPU = torch.device("cpu")
DOCUMENTS = [5, 9, 2]
REFUSED = {
    "blip": "BlipForConditionalGeneration needs pixel_values in each forward pass",
    "blip-2": "Blip2ForConditionalGeneration needs pixel_values in each forward pass",
    "chameleon": "is not a causal language model",
    "diffusion_gemma": "it denoises blocks of tokens",
    "ernie4_5_vl_moe": "its layers have experts of images",
    "evolla": "evolla is an encoder",
    "florence2": "it is an encoder-decoder",
    "git": "its layers and its vision tower are one model",
    "idefics": "is not a causal language model",
    "instructblip": "needs pixel_values, qformer_input_ids in each forward pass",
    "instructblipvideo": "needs pixel_values, qformer_input_ids in each forward pass",
    "kosmos-2": "it needs an image in each forward pass",
    "mistral4": "is not a causal language model",
    "paligemma": "its tokens of a text see the ones after them",
    "pi0": "is not a causal language model",
    "pix2struct": "it is an encoder-decoder",
    "pp_formulanet": "it is an encoder-decoder",
    "t5gemma2": "it is an encoder-decoder",
    "udop": "it is an encoder-decoder",
    "vision-encoder-decoder": "it is an encoder-decoder",
}
NOT_PACKED = {"minimax_m3_vl", "unlimited_ocr"}
UNTRIED = {
    # No small config was found
    *("dots3_note", "glm5_next", "granite4_vision", "inkling2", "mistral_large4", "muse_spark"),
    "qwen4_exp",
    # They need timm or scipy, which are not installed
    *("fast_vlm", "gemma3n", "inkling_mm_model", "perception_lm"),
}
TRIED = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - UNTRIED)


def build(model_type):
    """The model on meta. Florence-2 and some others have no small config, and need none."""
    fields = {} if model_type in REFUSED else small_config(model_type)
    return build_model(Model(config={"model_type": model_type} | fields), sequence_length=16)


def logits(model, ids, positions, bounds):
    """The logits of rows with these positions and bounds of documents."""
    inputs = {"position_ids": positions}
    if hasattr(model, "separated"):
        inputs["documents"] = documents_at(positions.numpy())
    if attention_implementation(model) == "launcher_varlen":
        starts = torch.tensor(bounds, dtype=torch.int32)
        inputs |= {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts}
        inputs |= {"max_length_q": ids.shape[1], "max_length_k": ids.shape[1]}
    return model(input_ids=ids, use_cache=False, **inputs).logits


def text_logits(model, ids):
    """The logits of a row that is one document."""
    return logits(model, ids, torch.arange(ids.shape[1])[None], [0, ids.shape[1]])


@pytest.mark.long
@pytest.mark.parametrize("model_type", TRIED)
def test_text_alone_trains_the_text_model_with_packed_rows(model_type):
    if model_type in REFUSED:
        with pytest.raises(RecipeError, match=re.escape(REFUSED[model_type])):
            build(model_type)
        return
    model = build(model_type)
    assert describe(model).blocks
    unused = set(parts_without_text(model))
    packs = why_not_packed({"model_type": model_type} | small_config(model_type)) is None
    assert packs is (model_type not in NOT_PACKED)
    if packs:
        if separate_documents(model, CPU):
            model.separated = True
        options = {"device": CPU, "compute_dtype": torch.float32}
        isolate_documents(model, sequence_length=16, **options)
    random_weights(model, CPU, CPU, seed=1)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    model.eval()
    ids = torch.randint(3, 50, (1, 16), generator=generator)
    whole = text_logits(model, ids)
    whole.square().mean().backward()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name, p in trained.items() if p.grad is None} == unused & trained.keys()
    with torch.no_grad():
        other = ids.clone()
        other[0, -1] = ids[0, -1] % 40 + 5
        scale = whole.abs().max()
        change = (text_logits(model, other) - whole).abs()
        assert change[:, :-1].max() <= 1e-5 * scale < change[:, -1].max()  # causal
        if packs:
            positions = torch.cat([torch.arange(size) for size in DOCUMENTS])[None]
            packed = logits(model, ids, positions, [0, 5, 14, 16])
            alone = [text_logits(model, part) for part in ids.split(DOCUMENTS, dim=1)]
            assert (packed - torch.cat(alone, dim=1)).abs().max() <= 1e-5 * scale
