"""From arguments of TRL, transformers' TrainingArguments and accelerate's config, as YAML or JSON.

Names and defaults were read in TRL 1.16 and transformers 5.23.
"""

from __future__ import annotations

from typing import Any

from launcher.convert import parts, rows
from launcher.convert.conversion import Conversion, is_off
from launcher.convert.rows import DataSet
from launcher.errors import RecipeError
from launcher.sources.finding import first_row
from launcher.sources.hub import is_hub_id
from launcher.sources.layouts import TOKEN_KINDS, guess

SIGNS = (
    *("model_name_or_path", "dataset_name", "per_device_train_batch_size", "num_train_epochs"),
    *("lr_scheduler_type", "use_peft", "compute_environment", "distributed_type", "report_to"),
)
"""Keys that this tool has; LLaMA-Factory shares some of them."""
_DPO_LOSSES = {
    "sigmoid": "dpo",
    "hinge": "hinge",
    "ipo": "ipo",
    "robust": "robust",
    "apo_zero": "apo_zero",
}
_SFT_LOSSES = ("nll", "chunked_nll")
_OF_TRAINERS = {
    "kto": ("desirable_weight", "undesirable_weight"),
    "dpo": ("precompute_ref_log_probs", "sync_ref_model", "ld_alpha", "use_weighting"),
    "reward": ("center_rewards_coefficient",),
    "rl": ("num_generations", "reward_funcs", "max_completion_length"),
    "sft": ("assistant_only_loss", "completion_only_loss", "dataset_text_field", "packing"),
}
"""Trainers, and keys that only they have."""


def convert(c: Conversion) -> None:
    """Reads all keys."""
    accelerate = "compute_environment" in c.given or "distributed_type" in c.given
    if accelerate and "model_name_or_path" not in c.given:
        raise RecipeError(
            "a config of accelerate, which names neither model nor data: give it with the arguments "
            "of the training, from=ARGUMENTS.yaml,ACCELERATE.yaml"
        )
    trainer = _trainer(c)
    parts.run_length(c, epochs="num_train_epochs", default_epochs=3)
    c.move("output_dir", "run.dir")
    c.move("seed", "run.seed", default=42)
    _model(c)
    _method(c, trainer)
    has_validation = _train(c, trainer)
    rows.sequence_length(c, "max_length" if "max_length" in c.given else "max_seq_length", 1024)
    rows.too_long(c, c.names("max_length", "max_seq_length"))
    if trainer in ("dpo", "kto") and not is_off(c.get("max_prompt_length")):
        what = "there, longer prompts are cut to this; here prompts are read whole"
        c.note("data.sequence_length", f"max_prompt_length: {what}")
        c.differs["max_prompt_length"] = what
    if c.get("truncation_mode", default="keep_start") != "keep_start":
        c.lose("truncation_mode", "a row that is cut keeps its start")
    if trainer == "sft":
        strategy = c.get("packing_strategy", default="bfd")
        packed = bool(c.get("packing"))
        rows.packing(c, on=packed, origin=c.names("packing"), isolated=strategy != "wrapped")
    parts.batch(
        c,
        micro="per_device_train_batch_size",
        accumulation="gradient_accumulation_steps",
        default=8,
    )
    defaults = {"sft": 2e-5, "dpo": 1e-6, "kto": 1e-6, "reward": 1e-4}
    if "learning_rate" not in c.given:
        c.set("optimizer.learning_rate", defaults.get(trainer, 5e-5))
        c.given["learning_rate"] = defaults.get(trainer, 5e-5)
        parts.optimizer(c, name="optim")
        del c.given["learning_rate"]
        c.origins["optimizer.learning_rate"] = "TRL's default"
    else:
        parts.optimizer(c, name="optim")
    parts.schedule(c, name="lr_scheduler_type", default="linear")
    _precision(c)
    parts.checkpointing(c, default=True)
    c.get("gradient_checkpointing")
    parts.attention(c, "attn_implementation")
    _adapter(c)
    parts.strategy(c)
    _parallelism(c)
    parts.saving(c)
    parts.evaluating(c, has_data=has_validation)
    parts.logging(c)
    if (compiled := c.get("torch_compile")) is not None:
        c.set("model.compile", "auto" if compiled else False, "torch_compile")
    c.move("dataloader_num_workers", "data.workers")
    c.move("dataset_num_proc", "data.processes")
    if c.get("use_liger_kernel") is not None:
        c.set("model.chunked_loss", True, "use_liger_kernel")
    if c.get("train_sampling_strategy") == "group_by_length" or c.get("group_by_length"):
        c.set("data.similar_lengths", True, c.names("train_sampling_strategy", "group_by_length"))
    c.get("train_sampling_strategy")
    _of_accelerate(c)
    if c.get("average_tokens_across_devices") is False:
        c.lose("average_tokens_across_devices", "the mean is over the tokens of all ranks")
    for name in ("dataset_kwargs", "optim_args"):
        if not is_off(c.get(name)):
            c.lose(name, f"{c.given[name]}: has no equal")
    c.skip("the seed is run.seed", "data_seed")
    c.skip("the losses of pairs are computed without dropout", "disable_dropout")
    c.skip("the recipe is all that a run reads", "accelerator_config", "project")


def _trainer(c: Conversion) -> str:
    if c.method in ("dpo", "kto"):
        return c.method
    losses = c.given.get("loss_type")
    losses = losses if isinstance(losses, list) else [losses]
    for trainer, names in _OF_TRAINERS.items():
        if any(name in c.given for name in names):
            return trainer
    if "beta" in c.given or any(loss in _DPO_LOSSES for loss in losses):
        return "dpo"
    return "sft"


def _model(c: Conversion) -> None:
    c.move("model_name_or_path", "model.path")
    revision = c.get("model_revision", default="main")
    if revision != "main" and "model.path" in c.values:
        c.values["model.path"] += f"@{revision}"
    settings = c.get("model_init_kwargs")
    if not is_off(settings):
        c.lose("model_init_kwargs", f"{settings}: model.config has the model's own settings")
    if not is_off(c.get("eos_token")):
        c.note("model.path", f"TRL: eos_token {c.given['eos_token']}; here the tokenizer's own")
    c.skip("padding carries no loss", "pad_token", "eos_token")


def _method(c: Conversion, trainer: str) -> None:
    if trainer == "rl":
        what = "reinforcement learning is not available; keep TRL for it"
        for name in _OF_TRAINERS["rl"]:
            if name in c.given:
                c.lose(name, what)
    elif trainer == "kto":
        c.set("kto.beta", c.get("beta", default=0.1), c.names("beta"))
        if c.get("loss_type") != "apo_zero_unpaired":
            c.differ("kto.beta", parts.REFERENCE_POINT)
        c.move("desirable_weight", "kto.desirable_weight")
        c.move("undesirable_weight", "kto.undesirable_weight")
    elif trainer == "dpo":
        loss = c.get("loss_type", default="sigmoid")
        loss = loss[0] if isinstance(loss, list) and len(loss) == 1 else loss
        known = _DPO_LOSSES.get(str(loss))
        if known is None:
            c.lose("loss_type", f"{loss} is not available; dpo takes its place")
        c.set("preference.loss", known or "dpo", c.names("loss_type"))
        c.set("preference.beta", c.get("beta", default=0.1), c.names("beta"))
        if not is_off(smoothing := c.get("label_smoothing")):
            if known == "robust":
                c.set("preference.label_smoothing", smoothing, "label_smoothing")
            else:
                c.lose("label_smoothing", "smoothed labels need preference.loss=robust")
    elif trainer == "reward":
        c.set("model.task", "reward", "")
    elif (loss := c.get("loss_type")) is not None:
        if loss in _SFT_LOSSES:
            c.skip("the loss is cross-entropy", "loss_type")
        else:
            c.lose("loss_type", f"{loss} is not available; the loss is cross-entropy")


def _train(c: Conversion, trainer: str) -> bool:
    """data.train and what goes with it. Returns whether there is data for evaluation."""
    kinds = {"dpo": "preference", "reward": "preference", "kto": "unpaired"}
    kind = kinds.get(trainer)
    config, split = c.get("dataset_config"), c.get("dataset_train_split", default="train")
    entries: list[tuple[str, Any, Any]] = []
    if (path := c.get("dataset_name")) is not None:
        entries.append((str(path), config, split))
    mixture = c.get("datasets")
    entries += [
        (str(entry.get("path")), entry.get("name"), entry.get("split"))
        for entry in (mixture if isinstance(mixture, list) else [])
        if isinstance(entry, dict)
    ]
    sets, known = [], kind
    for path, name, part in entries:
        file = parts.hub_data(c, "dataset_name", path, name, part)
        if file is None:
            continue
        if kind is None and (row := first_row([file])) is not None:
            layout = guess(row[1], {}, kinds=TOKEN_KINDS)
            known = layout.layout.kind if layout is not None else None
        sets.append(DataSet(file, "dataset_name", known))
    origin = c.names("dataset_name", "dataset_config", "dataset_train_split", "datasets")
    rows.set_train(c, sets, origin or "dataset_name")
    column = c.get("dataset_text_field")
    if column not in (None, "text"):
        c.set("data.text_column", column, "dataset_text_field")
    if trainer == "sft" and sets:
        _loss_on(c, known)
    if c.get("streaming", "dataset_streaming"):
        c.set("data.streaming", True, c.names("streaming", "dataset_streaming"))
    if not is_off(template := c.get("chat_template_path")):
        if str(template).endswith((".jinja", ".jinja2")):
            c.set("data.chat_template", template, "chat_template_path")
        else:
            c.lose("chat_template_path", f"{template}: {parts.OWN_TEMPLATE}")
    if not is_off(share := c.get("test_split_size")):
        c.set("data.validation_split", share, "test_split_size")
        return True
    test = c.get("dataset_test_split")
    if str(c.given.get("eval_strategy", "no")).lower() != "no" and entries:
        path, name, _ = entries[0]
        if not is_hub_id(path):
            what = f"{path} has no split {test or 'test'}: name files in data.validation, or set "
            c.lose("eval_strategy", f"{what}data.validation_split")
            return False
        found = parts.hub_data(c, "dataset_test_split", path, name, test or "test")
        if found is not None:
            c.set("data.validation", [found], "dataset_test_split")
            return True
    return False


def _loss_on(c: Conversion, kind: str | None) -> None:
    """TRL trains on all tokens of messages, and on the completion of a prompt."""
    answers, completion = c.get("assistant_only_loss"), c.get("completion_only_loss")
    if kind == "chat":
        c.set("data.loss_on", "assistant" if answers else "all", c.names("assistant_only_loss"))
    elif kind == "instruct":
        part = "all" if completion is False else "assistant"
        c.set("data.loss_on", part, c.names("completion_only_loss"))
    elif kind is None:
        note = "data.kind by the columns of the rows"
        if not answers:
            note += "; with rows of messages, TRL trains on all tokens: add data.loss_on=all"
        c.note("data.train", note)


def _precision(c: Conversion) -> None:
    mixed = str(c.get("mixed_precision", default="")).lower()
    fp16 = c.get("fp16") or mixed == "fp16"
    bf16 = c.get("bf16", default=not fp16 and mixed in ("", "bf16"))
    c.get("dtype", "torch_dtype")
    origin = c.names("bf16", "fp16", "mixed_precision", "dtype", "torch_dtype")
    parts.precision(c, bf16=bf16, fp16=fp16, origin=origin)


def _adapter(c: Conversion) -> None:
    four, eight = c.get("load_in_4bit"), c.get("load_in_8bit")
    whole = (
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_modules",
        "use_rslora",
        "use_dora",
    )
    if not c.get("use_peft"):
        c.skip("no adapter is trained without use_peft", *whole)
        return
    targets = c.get("lora_target_modules")
    targets = None if targets in ("all-linear", ["all-linear"]) else targets
    parts.adapter(
        c,
        rank=16,
        alpha=32,
        dropout=0.05,
        targets=targets,
        target_names=("lora_target_modules",),
    )
    if "lora_target_modules" not in c.given and "lora.path" not in c.values:
        note = "peft's choice for Llama, Mistral, Qwen and Gemma; it is another one for some models"
        c.set("lora.target_modules", ["q_proj", "v_proj"], "", note)
    origin = c.names("load_in_4bit" if four else "load_in_8bit")
    parts.quantization(c, four=four, eight=eight, origin=origin)
    if c.get("bnb_4bit_quant_type", default="nf4") != "nf4":
        c.lose("bnb_4bit_quant_type", "lora.quantize is nf4")
    c.skip("speed and memory only", "bnb_4bit_quant_storage")


def _parallelism(c: Conversion) -> None:
    given = c.get("parallelism_config")
    keys = {"cp_size": "context", "sp_size": "context", "tp_size": "tensor"}
    for name, value in given.items() if isinstance(given, dict) else ():
        short = name.removeprefix("parallelism_config_")
        if short in keys and isinstance(value, int) and value > 1:
            c.set(f"strategy.{keys[short]}_parallel_size", value, "parallelism_config")
            c.set("strategy.kind", "fsdp", "parallelism_config")
        elif short == "dp_replicate_size" and isinstance(value, int) and value > 1:
            c.set("strategy.replicate", value, "parallelism_config")


def _of_accelerate(c: Conversion) -> None:
    c.skip(
        "the command has the options gpus and nodes",
        *("num_processes", "num_machines", "machine_rank", "main_process_ip", "gpu_ids"),
        *("main_process_port", "rdzv_backend", "same_network", "compute_environment"),
        *("main_training_function", "enable_cpu_affinity", "use_cpu", "tpu_env"),
        *("tpu_use_cluster", "tpu_use_sudo", "downcast_bf16", "tpu_name", "tpu_zone"),
    )
