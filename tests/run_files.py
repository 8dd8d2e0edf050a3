"""Reads and writes the JSON files of runs and their data."""

import json
import random


def read_lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def write_lines(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_texts(file, *, seed):
    """Writes 200 documents of a few lengths."""
    generator = random.Random(seed)
    choices = generator.choices
    texts = ["".join(choices("abcdefghij ", k=generator.choice([5, 30, 80]))) for _ in range(200)]
    write_lines(file, [{"text": text} for text in texts])


def status(run_dir):
    return json.loads((run_dir / "status.json").read_text())
