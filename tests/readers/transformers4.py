"""Reads folders with the transformers that is first on the path: transformers4.py REQUEST.json,
which names {folders, texts, ids, logits}. A folder is a model's, or [adapter, base]. Writes the
logits at the last of the ids for each folder to the file `logits`, and prints JSON: the version, and
for each folder the ids of the texts."""

import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(folder: str, base: str | None, tokens: int) -> torch.nn.Module:
    options = {"torch_dtype": torch.float32, "trust_remote_code": False}
    model = AutoModelForCausalLM.from_pretrained(base or folder, **options)
    if base is not None:
        import peft

        if tokens > model.config.vocab_size:
            model.resize_token_embeddings(tokens)
        model = peft.PeftModel.from_pretrained(model, folder)
    return model.eval()  # type: ignore[no-any-return]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    logits, found = [], []
    for each in request["folders"]:
        folder, base = (each, None) if isinstance(each, str) else each
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
        model = load(folder, base, len(tokenizer))
        with torch.no_grad():
            logits.append(model(torch.tensor([request["ids"]])).logits[0, -1].clone())
        texts = request["texts"]
        found.append([tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    torch.save(logits, request["logits"])
    print(json.dumps({"version": transformers.__version__, "ids": found}))


if __name__ == "__main__":
    main()
