"""Which models compute losses in their head: those whose class does nothing else with its output."""

import pytest
import torch
import transformers

from launcher.models.description import embeddings
from launcher.models.head import Head, logits_transform
from launcher.models.micro_batch import MicroBatch
from launcher.models.predictions import cross_entropies
from launcher.models.record import record_of
from tests.image_models import make_model

AROUND_THE_DECODER = {
    "Florence2ForConditionalGeneration": "Florence2Config",
    "Gemma4ForConditionalGeneration": "Gemma4Config",
    "PaliGemmaForConditionalGeneration": "PaliGemmaConfig",
}
"""Models of images and text whose class calls the whole base model, and reads more of its outputs than
its decoder returns."""


@pytest.mark.parametrize("name", AROUND_THE_DECODER)
def test_models_that_call_their_base_model_have_a_head(name):
    config = getattr(transformers, AROUND_THE_DECODER[name])()
    text = config.get_text_config(decoder=True)
    text.num_hidden_layers = 2
    if getattr(text, "layer_types", None):
        text.layer_types = text.layer_types[:2]
    with torch.device("meta"):
        model = getattr(transformers, name)(config)
    assert logits_transform(model) is not None


@pytest.mark.parametrize("family", ["gemma4", "llava", "qwen2_5_vl"])
def test_losses_of_the_head_are_those_of_whole_logits(tmp_path, family):
    make_model(tmp_path, family)
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path)
    loaded.eval()
    with torch.device("meta"):
        shapes = type(loaded)(loaded.config)
    transform = logits_transform(shapes)
    assert transform is not None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, 250, (2, 9), generator=generator)
    inputs = {"input_ids": ids}
    if family == "gemma4":  # its mask of images wants to know that there are none
        inputs["mm_token_type_ids"] = torch.zeros_like(ids)
    micro_batch = MicroBatch(inputs, targets=torch.roll(ids, -1, 1))
    whole = cross_entropies(loaded, micro_batch, "sum").value
    record_of(loaded).head = Head(embeddings(loaded)[1], transform)
    asked = cross_entropies(loaded, micro_batch, "sum").value
    torch.testing.assert_close(asked, whole)
