"""Compares the values of converted recipes with those that the other tool would train with.

    python benchmarks/moved_values.py axolotl path/to/axolotl/examples
    python benchmarks/moved_values.py llamafactory path/to/LLaMA-Factory/examples --root path/to/LLaMA-Factory
    python benchmarks/moved_values.py torchtune path/to/torchtune/recipes/configs

Reads each config by itself, with the defaults of the tool and of transformers' TrainingArguments, and
not with the code of `launcher new from=FILE`. Prints each value that differs and is not named as lost
or different, and how many were compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from transformers import TrainingArguments

from launcher.convert.convert import convert_files
from launcher.errors import RecipeError

RANKS = 8
Values = dict[str, Any]
TRAINER: Values = {
    field.name: field.default
    for field in dataclasses.fields(TrainingArguments)
    if field.default is not dataclasses.MISSING
}
SHARED = (
    *("context_parallel_size", "sequence_parallel_degree", "tensor_parallel_size"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
"""Sizes whose ranks train on the same rows."""
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant"}
SCHEDULES |= {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}
SCHEDULES |= {"cosine_with_min_lr": "cosine"}


def main() -> None:
    """Reads the arguments and prints what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tool", choices=sorted(EXPECTED))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--root", type=Path, help="folder that the configs name files from")
    arguments = parser.parse_args()
    files = [file.resolve() for file in sorted(arguments.folder.rglob("*.y*ml"))]
    os.chdir(arguments.root or arguments.folder)
    configs = values = differing = 0
    for file in files:
        try:
            converted = convert_files([file], ranks=RANKS)
            read = yaml.safe_load(file.read_text(encoding="utf-8"))
            given = {name: value for name, value in read.items() if value is not None}
            expected = EXPECTED[arguments.tool](given)
        except (RecipeError, yaml.YAMLError, KeyError, TypeError):
            continue
        configs += 1
        recipe = flat(yaml.safe_load(converted.text))
        told = " ".join([*converted.lost.values(), *converted.differs.values()])
        for key, value in expected.items():
            values += 1
            found = recipe.get(key)
            if not same(found, value) and key not in told:
                differing += 1
                print(f"{file.relative_to(arguments.folder.resolve())}: {key}: {value} -> {found}")
    print(f"{configs} configs, {values} values, {differing} differ")


def flat(recipe: Values, path: str = "") -> Values:
    """The values of a recipe by dotted keys."""
    found: Values = {}
    for key, value in recipe.items():
        full = f"{path}{key}"
        if isinstance(value, dict) and full != "data.train":
            found |= flat(value, f"{full}.")
        else:
            found[full] = value
    return found


def same(found: object, expected: object) -> bool:
    """Whether two values are the same number, or equal."""
    try:
        return math.isclose(float(str(found)), float(str(expected)), rel_tol=1e-6)
    except ValueError:
        return found == expected


def of_trainer(given: Values, *, batch: int, epochs: float, schedule: str) -> Iterator[Any]:
    """What axolotl and LLaMA-Factory take from transformers' TrainingArguments."""
    groups = RANKS
    for name in SHARED:
        groups //= max(1, given.get(name) or 1)
    steps = given.get("max_steps") or -1
    if steps > 0:
        yield "run.max_steps", steps
    else:
        yield "run.epochs", epochs
    yield "batch.global_batch_size", batch * groups
    yield "optimizer.learning_rate", given.get("learning_rate", TRAINER["learning_rate"])
    yield "optimizer.weight_decay", given.get("weight_decay", TRAINER["weight_decay"])
    if SCHEDULES.get(schedule):
        yield "schedule.kind", SCHEDULES[schedule]
    yield "run.seed", given.get("seed", TRAINER["seed"])
    shown = schedule == "constant"
    if (warmup := given.get("warmup_steps")) and not shown and warmup >= 1:
        yield "schedule.warmup_steps", warmup
    elif (share := given.get("warmup_ratio")) and not shown:
        yield "schedule.warmup_ratio", share


def axolotl(given: Values) -> Values:
    """Defaults of axolotl 0.19: `normalize_config`, and the builders of its trainers."""
    micro, steps = given.get("micro_batch_size") or 1, given.get("gradient_accumulation_steps")
    steps = steps or (given["batch_size"] // micro if given.get("batch_size") else 1)
    epochs = given.get("num_epochs") or 1
    schedule = given.get("lr_scheduler") or "cosine"
    found = dict(of_trainer(given, batch=micro * steps, epochs=epochs, schedule=schedule))
    found["data.sequence_length"] = given.get("sequence_len") or 512
    pairs = given.get("rl") or given.get("reward_model")
    if not pairs and "pretraining_dataset" not in given and not given.get("streaming"):
        packed = given.get("sample_packing") or given.get("max_packed_sequence_len")
        found["data.packing"] = "auto" if packed else False
    evaluates = given.get("test_datasets") or given.get("val_set_size")
    streams = "pretraining_dataset" in given or given.get("streaming")
    most = given.get("max_steps")
    for section, name, wanted in (
        ("checkpoint", "save", True),
        ("evaluation", "eval", evaluates and not streams),
    ):
        times = given.get(f"{name}s_per_epoch")
        if not wanted or (most and most > 0) or streams:
            continue
        if times:
            found[f"{section}.every_epochs"] = 1 / times
        elif (count := given.get(f"{name}_steps")) and count >= 1:
            found[f"{section}.every_steps"] = count
        elif section == "checkpoint" and not given.get("save_strategy"):
            found["checkpoint.every_epochs"] = 1.0
    if given.get("adapter") in ("lora", "qlora") and not given.get("lora_model_dir"):
        found["lora.rank"] = given.get("lora_r", 8)
        found["lora.alpha"] = given.get("lora_alpha", 16)
        found["lora.dropout"] = given.get("lora_dropout") or None
    # Several data sets are shuffled once, and read in that order
    merged = len(given.get("datasets") or ()) > 1 and given.get("shuffle_merged_datasets", True)
    found["data.shuffle"] = False if given.get("curriculum_sampling") and not merged else None
    return found


def llamafactory(given: Values) -> Values:
    """Defaults of LLaMA-Factory 0.9.5 (`hparams`), of the trainer of its first version."""
    micro: Any = given.get("per_device_train_batch_size", TRAINER["per_device_train_batch_size"])
    steps = given.get("gradient_accumulation_steps", TRAINER["gradient_accumulation_steps"])
    schedule = str(given.get("lr_scheduler_type", "linear"))
    if "train_dataset" in given:
        micro, passes = given.get("micro_batch_size", 1), given.get("num_train_epochs", 3)
        groups = RANKS // given.get("cp_size", 1)
        pairs = "dpo" in str(given.get("stage", given["train_dataset"]))
        return {
            "batch.global_batch_size": given.get("global_batch_size", micro * groups),
            "data.sequence_length": given.get("cutoff_len", 2048),
            "run.epochs": None if "max_steps" in given else passes,
            "run.max_steps": given.get("max_steps"),
            "data.packing": None if pairs else False,
        }
    epochs: Any = given.get("num_train_epochs", TRAINER["num_train_epochs"])
    found = dict(of_trainer(given, batch=micro * steps, epochs=epochs, schedule=schedule))
    found["data.sequence_length"] = given.get("cutoff_len", 2048)
    stage = given.get("stage", "sft")
    if stage in ("sft", "pt"):
        packed = given.get("packing", given.get("neat_packing") or stage == "pt")
        found["data.packing"] = "auto" if packed else False
    if given.get("finetuning_type", "lora") == "lora" and not given.get("adapter_name_or_path"):
        found["lora.rank"] = given.get("lora_rank", 8)
        found["lora.alpha"] = given.get("lora_alpha", 2 * found["lora.rank"])
        found["lora.dropout"] = given.get("lora_dropout") or None
    if stage == "dpo":
        found["preference.beta"] = given.get("pref_beta", 0.1)
    if stage == "kto":
        found["kto.beta"] = given.get("pref_beta", 0.1)
    if stage != "sft" or "," not in str(given.get("dataset", "")):
        found["data.limit"] = given.get("max_samples")
    if (count := given.get("save_steps")) and count >= 1:
        found["checkpoint.every_steps"] = count
    return found


def torchtune(given: Values) -> Values:
    """Defaults of torchtune 0.7: its recipes, and torch's optimizers."""
    micro, steps = given.get("batch_size", 1), given.get("gradient_accumulation_steps", 1)
    optimizer, model = given["optimizer"], given.get("model", {})
    groups = RANKS // max(1, given.get("tensor_parallel_dim") or 1)
    found = {
        "batch.global_batch_size": micro * steps * groups,
        "optimizer.learning_rate": optimizer.get("lr", 1e-3),
        "run.seed": given.get("seed"),
        "optimizer.max_grad_norm": given.get("clip_grad_norm"),
    }
    if "weight_decay" in optimizer:
        found["optimizer.weight_decay"] = optimizer["weight_decay"]
    if given.get("max_steps_per_epoch"):
        found["run.max_steps"] = given["max_steps_per_epoch"] * given.get("epochs", 1)
    else:
        found["run.epochs"] = given.get("epochs", 1)
    if isinstance(length := given.get("tokenizer", {}).get("max_seq_len"), int):
        found["data.sequence_length"] = length
    if "lora_rank" in model:
        found["lora.rank"] = model["lora_rank"]
        found["lora.alpha"] = model.get("lora_alpha", 16)
        found["lora.dropout"] = model.get("lora_dropout") or None
    shape = given.get("lr_scheduler", {})
    if "num_warmup_steps" in shape:
        found["schedule.warmup_steps"] = shape["num_warmup_steps"]
    if "cosine" not in str(shape):
        found["schedule.kind"] = "constant"
    data = given.get("dataset", {})
    preference = "DPO" in str(given.get("loss", {}))
    if isinstance(data, dict) and not preference:
        found["data.packing"] = "auto" if data.get("packed") else False
    return found


EXPECTED = {"axolotl": axolotl, "llamafactory": llamafactory, "torchtune": torchtune}

if __name__ == "__main__":
    main()
