"""Sums as chat messages, a data set whose answers can be checked. Used by `make finetune`.

python recipes/arithmetic.py generate FOLDER          writes train.jsonl and test.jsonl, without common sums
python recipes/arithmetic.py accuracy MODEL FOLDER    share of test.jsonl that a model answers exactly
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from answers import accuracy  # of this folder

FIRST, SECOND, TEST = range(10, 100), range(1, 10), 81
"""Numbers of two digits plus numbers of one digit: 810 sums, of which TEST are the test set."""


def question(first: int, second: int) -> str:
    """The user message of a sum."""
    return f"{first} + {second}"


def generate(folder: Path, *, seed: int = 1234) -> None:
    """Writes train.jsonl and test.jsonl, one conversation per row, deterministic for a seed."""
    pairs = [(first, second) for first in FIRST for second in SECOND]
    random.Random(seed).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("test", pairs[:TEST]), ("train", pairs[TEST:])):
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as rows:
            for first, second in part:
                asked, answer = (
                    {"role": "user", "content": question(first, second)},
                    {"role": "assistant", "content": str(first + second)},
                )
                rows.write(json.dumps({"messages": [asked, answer]}) + "\n")
    print(f"{folder}: {len(pairs) - TEST:,} sums to train on, {TEST:,} others to test")


def main(arguments: list[str]) -> int:
    """`generate FOLDER` or `accuracy MODEL FOLDER`."""
    if arguments[:1] == ["generate"] and len(arguments) == 2:
        generate(Path(arguments[1]))
    elif arguments[:1] == ["accuracy"] and len(arguments) == 3:
        accuracy(Path(arguments[1]), Path(arguments[2]), max_new_tokens=8)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
