"""Keys of model.config that the config class of transformers does not have."""

import pytest

from launcher.errors import RecipeError
from launcher.models.config_keys import check_config_keys
from launcher.recipe.load import load_recipe
from tests.unit.small_recipe import SMALL


@pytest.mark.parametrize(
    "line",
    [
        "vocab_sise: 300",
        "zzz: 300",
        "²: 1",
        "model_type: lama",
        "model_type: vit",
        # The config class does not declare head_dim, but the attention layer reads it
        "model_type: qwen3_moe\n    head_dim: 32\n    head_dims: 32",
        "model_type: gpt2\n    hidden_size: 64\n    n_embed: 64",
    ],
)
def test_unknown_keys_are_refused(folder, words, line):
    replaced = "model_type: llama" if "model_type" in line else "vocab_size: 300"
    (folder / "x.yaml").write_text(SMALL.replace(replaced, line))
    with words.refused(ascii(line)):
        check_config_keys(load_recipe(["recipe=x.yaml"], ranks=None))


def test_classifiers_need_a_class_of_their_own(folder):
    arguments = ["recipe=x.yaml", "data.kind=classification", "model.task=sequence_classification"]
    check_config_keys(load_recipe(arguments, ranks=None))
    loaded = load_recipe([*arguments, "model.config.model_type=vit"], ranks=None)
    what = (
        "model.config.model_type=vit: vit is not available with model.task: sequence_classification"
    )
    with pytest.raises(RecipeError, match=f"command line: {what}"):
        check_config_keys(loaded)
