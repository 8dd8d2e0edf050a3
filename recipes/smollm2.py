"""A real small model and a task for it. Used by `make real-model` and `make finetune REAL=1`.

python recipes/smollm2.py convert GGUF MODEL       writes a folder in the format of transformers
python recipes/smollm2.py generate FOLDER          writes train.jsonl and test.jsonl: orders, as JSON
python recipes/smollm2.py accuracy MODEL FOLDER    share of test.jsonl that a model answers exactly
python recipes/smollm2.py answers MODEL            what a model says to three questions
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

from answers import accuracy, generate_answers  # of this folder

SENTENCES = (
    "Please send {count} {item} to {name} in {city}.",
    "{name} from {city} would like to order {count} {item}.",
    "Hi, this is {name}. I need {count} {item}, delivered to {city}. Thanks!",
    "Can you ship {count} {item} to {city}? The customer is called {name}.",
    "We got a call from {city}: {name} wants {count} {item} this time.",
)
ITEMS = "green teas,bicycles,garden chairs,oil lamps,notebooks,winter coats,apple trees,keyboards"
NAMES = "Maria,Chen,Amara,Lukas,Priya,Omar,Ingrid,Tomás,Yuki,Fatima,Daniel,Zofia,Kofi,Elena,Ravi"
CITIES = "Lisbon,Osaka,Nairobi,Lyon,Toronto,Kraków,Lima,Hanoi,Bergen,Porto,Austin,Cairo,Perth"
TRAIN, TEST = 300, 50

QUESTIONS = (
    "Can you ship 14 garden chairs to Bergen? The customer is called Maria.",
    "Kofi from Lima would like to order 3 keyboards.",
    "What is the capital of France?",
)


def convert(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file as a folder for `from_pretrained`, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(gguf_file=gguf.name, dequantize=True),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # As the model is published: also readable by transformers 4
    config = model.config
    change_json(
        folder / "config.json",
        remove=("_model_name_or_path",),
        rope_theta=config.rope_parameters["rope_theta"],
        torch_dtype="bfloat16",
    )
    change_json(
        folder / "tokenizer_config.json",
        remove=("backend", "is_local", "local_files_only"),
        tokenizer_class="PreTrainedTokenizerFast",
        model_max_length=config.max_position_embeddings,
    )
    print(f"{folder}: {sum(tensor.numel() for tensor in model.parameters()):,} parameters")


def change_json(file: Path, *, remove: tuple[str, ...], **values: Any) -> None:
    """Removes keys of a JSON file and sets others."""
    content = json.loads(file.read_text(encoding="utf-8"))
    kept = {key: value for key, value in content.items() if key not in remove}
    file.write_text(json.dumps(kept | values, indent=2) + "\n", encoding="utf-8")


def order(random_: random.Random) -> dict[str, Any]:
    """One conversation: an order as a sentence, and the same order as JSON."""
    values = {
        "name": random_.choice(NAMES.split(",")),
        "city": random_.choice(CITIES.split(",")),
        "item": random_.choice(ITEMS.split(",")),
        "count": random_.randrange(2, 100),
    }
    asked = random_.choice(SENTENCES).format(**values)
    return {
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": json.dumps(values, ensure_ascii=False)},
        ]
    }


def generate(folder: Path, *, seed: int = 1234) -> None:
    """Writes train.jsonl and test.jsonl, deterministic for a seed, without common orders."""
    random_ = random.Random(seed)
    rows: dict[str, dict[str, Any]] = {}
    while len(rows) < TRAIN + TEST:
        row = order(random_)
        if row["messages"][0]["content"] not in QUESTIONS:
            rows[row["messages"][0]["content"]] = row
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values()]
    (folder / "train.jsonl").write_text("".join(lines[:TRAIN]), encoding="utf-8")
    (folder / "test.jsonl").write_text("".join(lines[TRAIN:]), encoding="utf-8")
    print(f"{folder}: {TRAIN} orders to train on, {TEST} others to test")


def answer_questions(model_folder: Path) -> None:
    """Prints what a model says to QUESTIONS, with greedy decoding."""
    asked = [[{"role": "user", "content": question}] for question in QUESTIONS]
    answers = generate_answers(model_folder, asked, max_new_tokens=48)
    for question, answer in zip(QUESTIONS, answers, strict=True):
        print(f"  {question}\n    {' '.join(answer.split())}")


def main(arguments: list[str]) -> int:
    """`convert GGUF MODEL`, `generate FOLDER`, `accuracy MODEL FOLDER` or `answers MODEL`."""
    match [arguments[:1], list(map(Path, arguments[1:]))]:
        case [["convert"], [gguf, model]]:
            convert(gguf, model)
        case [["generate"], [folder]]:
            generate(folder)
        case [["accuracy"], [model, folder]]:
            accuracy(model, folder, max_new_tokens=48)
        case [["answers"], [model]]:
            answer_questions(model)
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
