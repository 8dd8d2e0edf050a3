"""Keys of model.config that the config class of transformers does not have."""

import pytest

from launcher.errors import RecipeError
from launcher.models.config_keys import check_config_keys
from launcher.recipe.load import load_recipe
from tests.unit.small_recipe import SMALL, says


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("vocab_sise: 300", ":7: model.config.vocab_sise: unknown key; did you mean vocab_size?"),
        (
            "zzz: 300",
            ":7: model.config.zzz: unknown key; known here: architectures, ..., vocab_...",
        ),
        ("²: 1", ":7: model.config.²: unknown key; known here: ..."),
        (
            "model_type: lama",
            ":6: model.config.model_type: must be a model type of transformers; got lama; did ...",
        ),
        (
            "model_type: vit",
            ":6: model.config.model_type: vit is not available with model.task: causal_lm",
        ),
        # The config class does not declare head_dim, but the attention layer reads it
        ("model_type: qwen3_moe\n    head_dim: 32\n    head_dims: 32", ":8: ...head_dims: ..."),
        ("model_type: gpt2\n    hidden_size: 64\n    n_embed: 64", ":8: ...did you mean n_embd?"),
    ],
)
def test_unknown_keys_are_refused(folder, line, expected):
    replaced = "model_type: llama" if "model_type" in line else "vocab_size: 300"
    (folder / "x.yaml").write_text(SMALL.replace(replaced, line))
    with pytest.raises(RecipeError) as refused:
        check_config_keys(load_recipe(["recipe=x.yaml"], ranks=None))
    (problem,) = refused.value.problems
    assert says(f"x.yaml{expected}", problem)


def test_classifiers_need_a_class_of_their_own(folder):
    arguments = ["recipe=x.yaml", "data.kind=classification", "model.task=sequence_classification"]
    check_config_keys(load_recipe(arguments, ranks=None))
    loaded = load_recipe([*arguments, "model.config.model_type=vit"], ranks=None)
    what = (
        "model.config.model_type=vit: vit is not available with model.task: sequence_classification"
    )
    with pytest.raises(RecipeError, match=f"command line: {what}"):
        check_config_keys(loaded)
