import functools

import pytest

from launcher.recipe.load import load_recipe


@pytest.fixture(scope="session")
def loader(tmp_path_factory):
    """Return a function that makes loaders. A loader loads one recipe text with overrides, once for
    all tests of a module."""
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "train.txt").write_text("text")

    def make(name, text):
        (folder / f"{name}.yaml").write_text(text)
        base = [f"recipe={folder}/{name}.yaml", f"data.train=[{folder}/train.txt]"]

        @functools.cache
        def load(*overrides, ranks=8):
            return load_recipe([*base, *overrides], ranks=ranks).recipe

        return load

    return make
