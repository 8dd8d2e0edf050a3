"""The tables of names of transformers' families, compared with the installed transformers."""

import contextlib
import re

import pytest
import transformers
from packaging.version import Version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

from launcher.libraries import families
from launcher.libraries.families import LAYER_KINDS, UNKNOWN_LAYER, layer_kind, unpackable_layers
from launcher.models.tower_inputs import FORMS
from tests import REPOSITORY

of_read_version = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="the tables were read in 5.23"
)

TYPES = {
    *families.DECODERS,
    *families.NOT_ON_TEXT,
    *families.CARRY_A_STATE,
    *families.SELECT_TOKENS,
    *families.MASK_WITHOUT_DOCUMENTS,
    *families.WITHOUT_POSITIONS,
    *families.TEXT_POSITIONS_FIRST,
    *FORMS,
}


@of_read_version
def test_the_types_exist():
    """A family that is renamed or removed leaves a line that does nothing."""
    assert TYPES - CONFIG_MAPPING_NAMES.keys() == set()


def configs():
    for model_type in CONFIG_MAPPING_NAMES:
        with contextlib.suppress(Exception):  # some configs have no defaults
            yield (
                model_type,
                transformers.AutoConfig.for_model(model_type).get_text_config(decoder=True),
            )


@pytest.mark.slow
@of_read_version
def test_each_kind_and_key_is_that_of_a_config():
    kinds, keys = set(), set()
    for _, config in configs():
        keys |= vars(config).keys()
        keys |= type(config).attribute_map.keys()
        for key in (*families.LAYER_KEYS, "mlp_layer_types"):
            kinds |= set(getattr(config, key, None) or ())
    assert LAYER_KINDS.keys() - kinds == set()
    windows = {kind.window for kind in LAYER_KINDS.values() if kind.window}
    named = {*windows, *families.EXPERT_COUNTS, *families.EXPERTS_PER_TOKEN, "rope_parameters"}
    assert named - keys == set()


def test_layers_that_mix_documents():
    both = ["full_attention", "linear_attention"]
    assert unpackable_layers(both, recurrent=True) == set()
    assert unpackable_layers(both, recurrent=False) == {"linear_attention"}
    assert unpackable_layers(["indexed_attention", "moe"], recurrent=True) == {"indexed_attention"}
    assert layer_kind("of_next_year") is UNKNOWN_LAYER
    assert unpackable_layers(["of_next_year"], recurrent=True) == {"of_next_year"}


def test_no_other_module_names_a_type():
    """Strings that are compared with a model's type stand in the tables only, with what speaks for
    another place: forms of images, parts of transformers' two formats of rotary settings."""
    elsewhere = {
        "models/towers.py": "whose image tokens see each other, by the form of their images",
        "models/tower_inputs.py": "forms of images",
        "models/config_files.py": "the rotary settings of transformers 4",
    }
    names = sorted(TYPES | {f"{name}_text" for name in TYPES}, key=len)
    string = re.compile("|".join(rf'"{re.escape(name)}"' for name in names))
    package = REPOSITORY / "launcher"
    found = {
        str(file.relative_to(package))
        for folder in ("models", "data", "training", "strategies", "objectives", "optimizers")
        for file in (package / folder).glob("*.py")
        if string.search(file.read_text())
    }
    assert found <= elsewhere.keys()
