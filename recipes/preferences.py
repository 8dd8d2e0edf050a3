"""Pairs of answers that differ in style only. Used by `make prefer`.

python recipes/preferences.py generate FOLDER       writes chats.jsonl (both styles), pairs.jsonl and test.jsonl
python recipes/preferences.py share MODEL FOLDER    share of sampled answers to test.jsonl that are sentences
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from answers import generate_answers  # of this folder

FIRST, SECOND, TEST = range(10, 100), range(1, 10), 81
"""Numbers of two digits plus numbers of one digit: 810 sums, of which TEST are the test set."""


def messages(first: int, second: int, *, sentence: bool) -> list[dict[str, str]]:
    """The question of a sum, and its answer as a sentence or as a number."""
    total = first + second
    answer = f"It is {total}." if sentence else str(total)
    asked = {"role": "user", "content": f"{first} + {second}"}
    return [asked, {"role": "assistant", "content": answer}]


def generate(folder: Path, *, seed: int = 1234) -> None:
    """Writes the files, deterministic for a seed. In pairs the sentence is chosen."""
    sums = [(first, second) for first in FIRST for second in SECOND]
    random.Random(seed).shuffle(sums)
    folder.mkdir(parents=True, exist_ok=True)
    test, train = sums[:TEST], sums[TEST:]
    both = [
        {"messages": messages(*each, sentence=sentence)}
        for each in train
        for sentence in (True, False)
    ]
    pairs, held_out = (
        [
            {"chosen": messages(*each, sentence=True), "rejected": messages(*each, sentence=False)}
            for each in part
        ]
        for part in (train, test)
    )
    for name, rows in (("chats", both), ("pairs", pairs), ("test", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    print(f"{folder}: {len(pairs)} pairs to train on, {TEST} others to test")


def share(model_folder: Path, folder: Path, *, examples: int = 4) -> tuple[float, float]:
    """Prints and returns the shares of sampled answers that are sentences, and that are correct."""
    lines = (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    answers = generate_answers(
        model_folder, [row["chosen"][:1] for row in rows], max_new_tokens=16, sample=True
    )
    for row, answer in list(zip(rows, answers, strict=True))[:examples]:
        print(f"  {row['chosen'][0]['content']:<8} {answer!r}")
    sentences = sum(answer.startswith("It is ") for answer in answers) / len(rows)
    allowed = [{row[name][1]["content"] for name in ("chosen", "rejected")} for row in rows]
    right = sum(answer in each for answer, each in zip(answers, allowed, strict=True)) / len(rows)
    print(
        f"{model_folder}: {sentences:.1%} of {len(rows)} answers are sentences, {right:.1%} right"
    )
    return sentences, right


def main(arguments: list[str]) -> int:
    """`generate FOLDER` or `share MODEL FOLDER`."""
    if arguments[:1] == ["generate"] and len(arguments) == 2:
        generate(Path(arguments[1]))
    elif arguments[:1] == ["share"] and len(arguments) == 3:
        share(Path(arguments[1]), Path(arguments[2]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
