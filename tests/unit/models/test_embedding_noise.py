"""Noise on embeddings in training."""

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook

from launcher.errors import RecipeError
from launcher.models.embedding_noise import add_noise
from launcher.training.sum_check import dropout_off
from tests.unit.models.test_tiled_mlp import small

IDS = torch.arange(14).view(2, 7)


def outputs(model):
    """Embeddings and logits with the same random numbers."""
    torch.manual_seed(3)
    embedded = model.get_input_embeddings()(IDS)
    torch.manual_seed(3)
    return embedded, model(input_ids=IDS, use_cache=False).logits


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2"])
def test_the_noise_is_that_of_transformers(kind):
    plain, ours, theirs = small(kind), small(kind), small(kind)
    add_noise(ours, 5.0)
    embedding = theirs.get_input_embeddings()
    embedding.neftune_noise_alpha = 5.0
    embedding.register_forward_hook(neftune_post_forward_hook)
    for found, expected in zip(outputs(ours), outputs(theirs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    noise = (outputs(ours)[0] - outputs(plain)[0]).abs().max().item()
    assert 0.95 * 0.3340766 < noise <= 0.3340766 * 1.0001  # 5 / sqrt(7 x 32)
    with dropout_off(ours):
        assert torch.equal(outputs(ours)[1], outputs(plain)[1])
    assert torch.equal(outputs(ours.eval())[1], outputs(plain.eval())[1])


def test_a_model_must_name_its_embedding():
    with pytest.raises(RecipeError, match=r"model.neftune_noise_alpha: Linear names no input"):
        add_noise(torch.nn.Linear(2, 2), 5.0)
