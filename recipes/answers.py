"""What a model of a folder answers: for the scripts of this folder that show it before and after training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Messages = list[dict[str, str]]


def generate_answers(
    model_folder: Path,
    conversations: list[Messages],
    *,
    max_new_tokens: int,
    sample: bool = False,
    batch_size: int = 250,
) -> list[str]:
    """The next answer of each conversation, by greedy decoding or sampled with seed 0."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    from launcher.console import hide_irrelevant_warnings

    hide_irrelevant_warnings()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer: Any = AutoTokenizer.from_pretrained(model_folder, local_files_only=True)
    tokenizer.padding_side = "left"  # as an argument of apply_chat_template it has no effect
    model = AutoModelForCausalLM.from_pretrained(model_folder, local_files_only=True).eval()
    torch.manual_seed(0)
    answers: list[str] = []
    for start in range(0, len(conversations), batch_size):
        inputs = tokenizer.apply_chat_template(
            conversations[start : start + batch_size],
            add_generation_prompt=True,
            padding=True,
            return_dict=True,
            return_tensors="pt",
        )
        with torch.inference_mode():
            tokens = model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=sample,
                pad_token_id=tokenizer.pad_token_id,
            )
        answers += tokenizer.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
    return answers


def accuracy(
    model_folder: Path,
    folder: Path,
    *,
    max_new_tokens: int,
    examples: int = 4,
    batch_size: int = 250,
) -> float:
    """Prints and returns the share of the chats in test.jsonl whose answer the model gives exactly."""
    lines = (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line)["messages"] for line in lines]
    expected = [messages[-1]["content"] for messages in rows]
    asked = [messages[:-1] for messages in rows]
    answers = generate_answers(
        model_folder, asked, max_new_tokens=max_new_tokens, batch_size=batch_size
    )
    for messages, answer, right in list(zip(asked, answers, expected, strict=True))[:examples]:
        note = "" if answer == right else f" (it is {right})"
        print(f"  {messages[0]['content']:<8} {answer!r:<12}{note}")
    share = sum(map(str.__eq__, answers, expected)) / len(rows)
    print(f"accuracy of {model_folder}: {share:.1%} of {len(rows)} questions")
    return share
