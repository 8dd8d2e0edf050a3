"""What README and the recipes' headers tell a user to type."""

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from launcher.cli import VERBS
from launcher.recipe.load import load_recipe

REPOSITORY = Path(__file__).resolve().parents[2]


def commands(text):
    """Commands of a text: the lines that start one, with their continuations, comment signs and prompts taken off."""
    lines = [re.sub(r"^\s*(#|\$)?\s*", "", line) for line in text.splitlines()]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [line for line in joined.splitlines() if re.match(r"(torchrun|launcher|python launcher|make) ", line)]


def arguments(command):
    words = shlex.split(command)
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else None
    recipe = next(index for index, word in enumerate(words) if word.startswith("recipe="))
    return words[recipe:], ranks


@pytest.mark.parametrize("recipe", sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")))
def test_what_a_recipe_says_to_type_is_a_good_recipe(recipe):
    found = [c for c in commands((REPOSITORY / f"recipes/{recipe}.yaml").read_text()) if c.startswith("torchrun")]
    assert found
    for command in found:
        words, ranks = arguments(command)
        assert words[0] == f"recipe={recipe}"
        load_recipe(words, ranks=ranks)


def test_what_the_readme_says_to_type():
    found = commands((REPOSITORY / "README.md").read_text())
    makefile = (REPOSITORY / "Makefile").read_text()
    assert len(found) >= 5
    for command in found:
        words = shlex.split(command)
        if words[0] == "make":
            assert f"\n{words[1]}:" in makefile
        elif words[0] == "launcher":
            assert words[1] in VERBS
            own = ("ranks=", "shrink=", "steps=")
            load_recipe([word for word in words[2:] if not word.startswith(own)], ranks=None)
        elif "my/data" not in command and "fast" not in command:
            words, ranks = arguments(command)
            load_recipe(words, ranks=ranks)


@pytest.mark.long
def test_a_wheel_brings_the_recipes(tmp_path):
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", tmp_path, REPOSITORY], check=True, timeout=120)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = "from launcher.recipe.load import load_recipe; print(load_recipe(['recipe=quickstart'], ranks=2).recipe.run.name)"
    result = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}); {code}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=True,
        timeout=60,
    )
    assert result.stdout.strip() == "quickstart"
