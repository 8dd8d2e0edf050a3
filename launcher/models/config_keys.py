"""The keys of `model.config`, compared with the config class of transformers."""

from __future__ import annotations

import dataclasses

from launcher.errors import RecipeError, suggestion
from launcher.libraries.families import MULTI_TOKEN, UNDECLARED_KEYS
from launcher.recipe.load import LoadedRecipe


def check_config_keys(loaded: LoadedRecipe) -> None:
    """Raises RecipeError for keys of model.config that transformers does not know: its classes
    accept any key silently. Imports only the class of the recipe's model type."""
    model = loaded.recipe.model
    if model.config is None or model.path is not None:  # changes: see config_overrides.py
        return
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    model_type = model.config["model_type"]
    if model_type not in CONFIG_MAPPING:
        near = suggestion(model_type, CONFIG_MAPPING) or "; llama, qwen3 and gpt2 are some"
        what = f"must be a model type of transformers; got {model_type}{near}"
        raise loaded.refuse(("model", "config", "model_type"), what)
    task = "sequence_classification" if model.classifies else model.task
    mappings = [f"MODEL_FOR_{task.upper()}_MAPPING_NAMES"]
    if task == "embedding":
        mappings = ["MODEL_MAPPING_NAMES"]
    if task == "causal_lm":  # some of these are refused when the model is built, with the reason
        mappings.append("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES")
    if not any(model_type in getattr(modeling_auto, mapping) for mapping in mappings):
        what = f"{model_type} is not available with model.task: {model.task}"
        raise loaded.refuse(("model", "config", "model_type"), what)
    config_class = CONFIG_MAPPING[model_type]
    declared = {field.name for field in dataclasses.fields(config_class)}
    known = declared | config_class.attribute_map.keys() | UNDECLARED_KEYS
    if (layers := MULTI_TOKEN.get(model_type)) is not None:
        known |= {layers.count}
    problems = []
    for key in model.config:
        if key not in known:
            near = suggestion(key, known) or f"; known here: {', '.join(sorted(declared))}"
            problems.append(str(loaded.refuse(("model", "config", key), f"unknown key{near}")))
    if problems:
        raise RecipeError(problems)
