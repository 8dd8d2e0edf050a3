"""Writes pairs for a search of code: what a function of Python's standard library does, and its source.

    python recipes/docstrings.py FOLDER

FOLDER/train.jsonl and FOLDER/validation.jsonl have rows with a query, the first sentence of a docstring,
and a positive, the function without it. Validation rows are of modules that training does not see.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

LONGEST = 400
"""Characters of a function that are kept."""
ROWS = {"train": 1600, "validation": 200}


def pairs(module: Path) -> Iterator[dict[str, str]]:
    """The rows of a module."""
    try:
        tree = ast.parse(module.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):  # modules of tests that are broken on purpose
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
        query = docstring.partition(". ")[0].rstrip(".")
        if len(query.split()) < 4 or ">>>" in query:
            continue
        node.body = node.body[1:]
        yield {"query": query, "positive": ast.unparse(node)[:LONGEST]}


def _digest(row: dict[str, str]) -> bytes:
    return hashlib.sha256(row["query"].encode()).digest()


def main(folder: Path) -> None:
    """Writes both files."""
    folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, dict[str, dict[str, str]]] = {"train": {}, "validation": {}}
    library = Path(sysconfig.get_path("stdlib"))
    modules = [
        m for m in sorted(library.rglob("*.py")) if not {"site-packages", "test"} & {*m.parts}
    ]
    for module in modules:
        name = str(module.relative_to(library))
        held_out = hashlib.sha256(name.encode()).digest()[0] < 32  # an eighth
        for row in pairs(module):
            rows["validation" if held_out else "train"].setdefault(row["query"], row)
    for query in rows["train"].keys() & rows["validation"].keys():
        del rows["train"][query]
    for name, all_rows in rows.items():
        found = sorted(all_rows.values(), key=_digest)[: ROWS[name]]
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in found), encoding="utf-8")
        print(f"{file}: {len(found):,} pairs")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
