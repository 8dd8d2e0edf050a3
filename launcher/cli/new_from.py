"""`launcher new from=FILE`: a recipe from a config of another tool."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.errors import EXIT_DONE, EXIT_NO


def new_from(
    files: str,
    *,
    ranks: int,
    overrides: Sequence[str],
    model: str | None,
    data: str | None,
    method: str,
    out: Path | None,
) -> int:
    """Writes the recipe, and what is lost to standard error. Raises RecipeError.

    files: paths with commas between them. ranks: data-parallel ranks. out: None: standard
    output. Returns the exit status: 3 if something that changes the training is lost, or the recipe
    cannot train.
    """
    from launcher.convert.convert import convert_files

    converted = convert_files(
        [Path(name.strip()) for name in files.split(",") if name.strip()],
        ranks=ranks,
        overrides=overrides,
        model=model,
        data=data,
        method=method,
    )
    write_text(converted.text, out)
    lines = [
        *_group(
            f"changes the training, and has no equal here (of {converted.tool}):", converted.lost
        ),
        *_group("kept, but trains a bit differently:", converted.differs),
        *_needless(converted.needless),
        *(f"not on this machine: {what}" for what in converted.absent),
    ]
    if lines:
        print("\n".join(lines), file=sys.stderr)
    return EXIT_NO if converted.lost else EXIT_DONE


def write_text(text: str, out: Path | None) -> None:
    """Writes a recipe to a file, or to standard output."""
    if out is None:
        print(text, end="")
        return
    out.write_text(text, encoding="utf-8")


def _group(title: str, entries: dict[str, str]) -> Iterator[str]:
    if entries:
        yield title
    for name, what in entries.items():
        yield f"  {name}: {what}"


def _needless(needless: dict[str, str]) -> Iterator[str]:
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, why in needless.items():
        by_reason[why].append(name)
    if by_reason:
        yield "not needed, the training is the same without it:"
    for why, names in by_reason.items():
        yield f"  {', '.join(names)}: {why}"
