"""`launcher export --verify`: compares an exported folder with the checkpoint of the run.

A fresh process (`python -m launcher.checkpoint.verify`) loads the folder with transformers and peft
alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from launcher.checkpoint.export import Weights, open_checkpoint_weights
from launcher.data.setup import teach_ends
from launcher.errors import RecipeError
from launcher.models.build import class_count, is_classifier, vocabulary_size
from launcher.models.hugging_face_files import exported_tensors
from launcher.models.safetensors_files import ADAPTER, ADAPTER_CONFIG, open_files, open_folder
from launcher.recipe.schema import Recipe

_SHAPE = (2, 32)
"""Sequences, and tokens in each, for which logits are computed."""
_TOLERANCE, _TOLERANCE_16_BITS = 1e-3, 5e-2
"""Largest relative 2-norm of the logits' difference, for a float32 and for a 16-bit export. Weights
are compared exactly."""
_TEXTS = (
    "The quick brown fox.",
    "  two  spaces,\n\ttabs",
    "naïve 漢字 🙂 12",
    "def f(x):\n    {x}",
)


def verify_export(
    checkpoint: Path, out: Path, *, trust_run: bool, load_tokenizer: Callable[[Recipe], Any]
) -> list[str]:
    """Returns how an exported folder differs from a checkpoint, one line per difference.

    trust_run: see `open_checkpoint_weights`. load_tokenizer: returns the tokenizer that an export
    of the recipe has, or None.
    """
    weights = open_checkpoint_weights(checkpoint, trust_run=trust_run)
    teach_ends(weights.model, weights.recipe.data, model_path=weights.recipe.model.path)
    differences, dtype = _compare_tensors(weights, out)
    tokenizer, model = load_tokenizer(weights.recipe), weights.load()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocabulary_size(model) or 1, _SHAPE, generator=generator)
    wanted, facts = _logits(model, ids), _facts(model, tokenizer)
    classes = class_count(model) if is_classifier(model) else None
    trusted = weights.recipe.model.trust_remote_code
    del model, weights  # the fresh process needs as much memory
    request = {"out": str(out.resolve()), "ids": ids.tolist(), "classes": classes}
    request |= {"trusted": trusted, "tokenizer": tokenizer is not None}
    try:
        found, found_facts = _load_in_fresh_process(request)
    except subprocess.CalledProcessError as error:
        why = error.stderr.strip().rpartition("\n")[2]
        return [*differences, f"it cannot be loaded with transformers: {why}"]
    gap = torch.inf if found.shape != wanted.shape else float((found - wanted).norm())
    tolerance = _TOLERANCE if dtype == torch.float32 else _TOLERANCE_16_BITS
    if not gap <= tolerance * float(wanted.norm()):
        differences.append(f"logits: their distance is {gap:.3g}; their norm {wanted.norm():.3g}")
    for name, value in facts.items():
        if found_facts.get(name) != value:
            texts = (json.dumps(one, ensure_ascii=False) for one in (found_facts.get(name), value))
            there, here = (text if len(text) < 100 else f"{text[:100]}..." for text in texts)
            differences.append(f"{name}: {there} instead of {here}")
    return differences


def _compare_tensors(weights: Weights, out: Path) -> tuple[list[str], torch.dtype]:
    """One line for each tensor that differs, and the dtype of the export."""
    adapter = (out / ADAPTER_CONFIG).is_file()
    if adapter and weights.recipe.lora is None:
        raise RecipeError(f"export: {out} has an adapter, and the run trains none")
    stored = open_files([out / ADAPTER], key="export") if adapter else open_folder(out)
    differences, seen = [], set()
    for name, tensor in exported_tensors(weights.model, weights.read, merged=not adapter):
        seen.add(name)
        if name not in stored.tensors:
            differences.append(f"{name}: missing")
            continue
        found = stored.read(name)
        wanted = tensor.to(found.dtype)
        if found.shape != wanted.shape:
            differences.append(f"{name}: {list(found.shape)} instead of {list(wanted.shape)}")
        elif not torch.equal(found, wanted):
            gap = (found.double() - wanted.double()).abs().max()
            differences.append(f"{name}: other values, by up to {gap:.3g}")
    differences += [f"{name}: unexpected" for name in sorted(stored.tensors.keys() - seen)]
    return differences, stored.dtype()


@torch.no_grad()
def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Computes the logits row by row, so that a classifier needs no padding."""
    return torch.cat([model(input_ids=row[None]).logits.float() for row in ids])


def _facts(model: Any, tokenizer: Any) -> dict[str, Any]:
    """The settings that determine tokenization and the end of generation."""
    generation = getattr(model, "generation_config", None)
    facts: dict[str, Any] = {
        "config.json: eos_token_id": model.config.get_text_config(decoder=True).eos_token_id,
        "generation_config.json: eos_token_id": generation and generation.eos_token_id,
    }
    if tokenizer is not None:
        special = sorted(tokenizer.all_special_tokens)
        facts |= {
            "tokenizer: eos_token": tokenizer.eos_token,
            "tokenizer: pad_token": tokenizer.pad_token,
            "tokenizer: special tokens": special,
            "tokenizer: number of tokens": len(tokenizer),
            "chat template": tokenizer.chat_template,
        }
        for text in (*_TEXTS, "".join(special)):
            facts[f"tokenizer: ids of {text[:40]!r}"] = tokenizer(text)["input_ids"]
    return facts


def _load_in_fresh_process(request: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
    """The logits and the facts of an exported folder."""
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.NamedTemporaryFile(suffix=".pt") as answer:
        command = [sys.executable, "-P", "-m", "launcher.checkpoint.verify"]
        subprocess.run(
            [*command, json.dumps(request), answer.name],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": paths},
        )
        return torch.load(answer.name, weights_only=True)  # type: ignore[no-any-return]


def _main(request: dict[str, Any], answer: str) -> None:
    import transformers

    out, classes = request["out"], request["classes"]
    options = {"dtype": torch.float32, "trust_remote_code": request["trusted"]}
    task = "CausalLM" if classes is None else "SequenceClassification"
    auto = getattr(transformers, f"AutoModelFor{task}")
    if (Path(out) / ADAPTER_CONFIG).is_file():
        import peft

        base = peft.PeftConfig.from_pretrained(out).base_model_name_or_path
        options |= {} if classes is None else {"num_labels": classes}
        adapted = peft.PeftModel.from_pretrained(auto.from_pretrained(base, **options), out)
        model = adapted.base_model.model.eval()
        if (Path(out) / "generation_config.json").is_file():
            model.generation_config = transformers.GenerationConfig.from_pretrained(out)
    else:
        model = auto.from_pretrained(out, **options).eval()
    tokenizer = None
    if request["tokenizer"]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(out, local_files_only=True)
    torch.save((_logits(model, torch.tensor(request["ids"])), _facts(model, tokenizer)), answer)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]), sys.argv[2])
