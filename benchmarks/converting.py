"""Converts all configs in a checkout of another tool, as `launcher new from=FILE` does, and counts.

    python benchmarks/converting.py path/to/axolotl/examples
    python benchmarks/converting.py path/to/LLaMA-Factory/examples --root path/to/LLaMA-Factory

Prints the share of keys that have an equal, are not needed or are lost, the share of files that are
converted without loss, and what is lost most often. Each recipe is checked as `launcher show` checks
it, but for models and files of data that are not on this machine. docs/engineering/converting.md has the figures.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections import Counter
from pathlib import Path

from launcher.convert.convert import Converted, convert_files
from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe

RANKS = 8
NO_TRAINING = (
    "no training:",
    "no config of axolotl",
    "a config of accelerate",
)
"""Beginnings of messages about files that are no configs of a training."""


def main() -> None:
    """Reads the arguments and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, help="folder that the configs name files from")
    parser.add_argument("--verbose", action="store_true", help="name each file")
    arguments = parser.parse_args()
    files = [file.resolve() for file in sorted(arguments.folder.rglob("*.y*ml"))]
    os.chdir(arguments.root or arguments.folder)
    keys: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    for file in files:
        kind, converted = convert(file)
        kinds[kind] += 1
        if arguments.verbose:
            print(f"{kind}: {file}")
        if converted is not None:
            names = {name.partition(".")[0].partition(":")[0] for name in converted.lost}
            keys += Counter(
                equal=len(converted.moved), needless=len(converted.needless), lost=len(names)
            )
            lost.update(f"{name}: {what}"[:90] for name, what in converted.lost.items())
    whole = sum(keys.values()) or 1
    print(", ".join(f"{count} {kind}" for kind, count in kinds.most_common()))
    shares = (f"{count} {name} ({count / whole:.1%})" for name, count in keys.most_common())
    print(f"keys: {', '.join(shares)}")
    for line, count in lost.most_common(20):
        print(f"{count:4} {line}")


def convert(file: Path) -> tuple[str, Converted | None]:
    """What becomes of a file, in a word, and its recipe."""
    try:
        converted = convert_files([file], ranks=RANKS)
    except RecipeError as error:
        message = str(error).partition(": ")[2]
        return ("no training" if message.startswith(NO_TRAINING) else "refused"), None
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder, "recipe.yaml")
        recipe.write_text(converted.text, encoding="utf-8")
        try:
            load_recipe([f"recipe={recipe}"], ranks=RANKS)
        except RecipeError as error:
            absent = all("no such" in problem for problem in error.problems)
            return ("names files that are not here" if absent else f"WRONG {error}"), converted
    return ("with loss" if converted.lost else "without loss"), converted


if __name__ == "__main__":
    main()
