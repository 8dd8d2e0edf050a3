"""Sums as chat messages, a data set whose answers can be checked. Used by `make finetune`.

python recipes/arithmetic.py generate FOLDER          writes train.jsonl and test.jsonl, without common sums
python recipes/arithmetic.py accuracy MODEL FOLDER    share of test.jsonl that a model answers exactly
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

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


def accuracy(
    model_folder: Path, folder: Path, *, batch_size: int = 250, examples: int = 4
) -> float:
    """Prints and returns the share of test.jsonl that greedy decoding answers exactly."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from launcher.console import prepare_streams

    prepare_streams()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True).eval()
    rows = [
        json.loads(line)["messages"]
        for line in (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    answers: list[str] = []
    for start in range(0, len(rows), batch_size):
        asked = [messages[:-1] for messages in rows[start : start + batch_size]]
        inputs = tokenizer.apply_chat_template(
            asked,
            add_generation_prompt=True,
            padding=True,
            padding_side="left",
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            tokens = model.generate(
                **inputs, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.pad_token_id
            )
        answers += tokenizer.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    correct = [
        answer == messages[-1]["content"] for answer, messages in zip(answers, rows, strict=True)
    ]
    for messages, answer in list(zip(rows, answers, strict=True))[:examples]:
        print(
            f"  {messages[0]['content']:<8} {answer!r:<12}"
            + ("" if answer == messages[-1]["content"] else f" (it is {messages[-1]['content']})")
        )
    share = sum(correct) / len(rows)
    print(f"accuracy of {model_folder}: {share:.1%} of {len(rows)} questions")
    return share


def main(arguments: list[str]) -> int:
    """`generate FOLDER` or `accuracy MODEL FOLDER`."""
    if arguments[:1] == ["generate"] and len(arguments) == 2:
        generate(Path(arguments[1]))
    elif arguments[:1] == ["accuracy"] and len(arguments) == 3:
        accuracy(Path(arguments[1]), Path(arguments[2]))
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
