"""From torchtune's YAML. Read in the last version, of April 2026 (0.7)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from launcher.convert import parts, rows
from launcher.convert.conversion import Conversion, is_off
from launcher.convert.rows import DataSet
from launcher.errors import RecipeError

_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_LORA_LAYERS = {
    "q_proj": "q_proj",
    "k_proj": "k_proj",
    "v_proj": "v_proj",
    "output_proj": "o_proj",
}
"""Names of layers here, by torchtune's."""
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Layers of Phi-3 and Phi-4 that hold several of torchtune's."""
_MLP = ("gate_proj", "up_proj", "down_proj")
_HEADINGS = "there, a user's turn holds Alpaca's headings; here the instruction and its input alone"
DATA_SETS: dict[str, tuple[str, str, str | None, str]] = {
    "alpaca_dataset": ("instruct", "tatsu-lab/alpaca", "all", _HEADINGS),
    "alpaca_cleaned_dataset": ("instruct", "yahma/alpaca-cleaned", "all", _HEADINGS),
    "grammar_dataset": ("instruct", "liweili/c4_200m", None, "there with a prompt of its own"),
    "samsum_dataset": ("instruct", "Samsung/samsum", None, "there with a prompt of its own"),
    "slimorca_dataset": ("chat", "Open-Orca/SlimOrca-Dedup", None, ""),
    "stack_exchange_paired_dataset": (
        "preference",
        "lvwerra/stack-exchange-paired",
        None,
        "there with a prompt of its own",
    ),
    "the_cauldron_dataset": ("chat", "HuggingFaceM4/the_cauldron", None, ""),
    "gsm8k_sft": ("instruct", "openai/gsm8k/main", None, "there with a prompt of its own"),
    "gsm8k_dataset": ("instruct", "openai/gsm8k/main", None, "there with a prompt of its own"),
    "wikitext_dataset": ("text", "EleutherAI/wikitext_document_level", None, ""),
    "cnn_dailymail_articles_dataset": ("text", "ccdv/cnn_dailymail", None, ""),
}
"""By torchtune's builders of data sets: data.kind, hub id, data.loss_on, and what differs."""
_KINDS = {
    "instruct_dataset": "instruct",
    "chat_dataset": "chat",
    "preference_dataset": "preference",
    "text_completion_dataset": "text",
}


def is_torchtune(given: dict[str, Any]) -> bool:
    """Whether a config names components as torchtune does."""
    return any(isinstance(value, dict) and "_component_" in value for value in given.values())


def convert(c: Conversion) -> None:
    """Reads all keys."""
    c.given = _resolved(c.given, c.given)
    if "dataset" not in c.given or "optimizer" not in c.given:
        raise RecipeError("no training: dataset or optimizer is not given")
    c.move("output_dir", "run.dir")
    c.move("seed", "run.seed")
    _model(c)
    _length(c)
    _train(c)
    _tokenizer(c)
    parts.batch(c, micro="batch_size", accumulation="gradient_accumulation_steps", default=1)
    _loss(c)
    _optimizer(c)
    c.move("clip_grad_norm", "optimizer.max_grad_norm")
    if "optimizer.max_grad_norm" not in c.values:
        c.set("optimizer.max_grad_norm", None, c.names("clip_grad_norm"))
    dtype = str(c.get("dtype", default="bf16"))
    if dtype == "fp32":
        c.set("strategy.mixed_precision", None, "dtype")
    else:
        parts.precision(c, bf16=dtype == "bf16", fp16=dtype == "fp16", origin="dtype")
    if c.get("enable_activation_checkpointing"):
        mode = "selective" if c.get("ac_mode") == "selective" else "full"
        c.set("activation_checkpointing.mode", mode, "enable_activation_checkpointing")
        if mode == "selective":
            c.values["activation_checkpointing.mode"] = "full"
            c.set(
                "activation_checkpointing.every_n_blocks",
                c.get("ac_option", default=2),
                "ac_option",
            )
    if c.get("enable_activation_offloading"):
        c.set("activation_checkpointing.mode", "full", "enable_activation_offloading")
        c.set("activation_checkpointing.offload_to_cpu", True, "enable_activation_offloading")
    if (compiled := c.get("compile")) is not None:
        c.set("model.compile", "auto" if compiled else False, "compile")
    _strategy(c)
    every = c.get("log_every_n_steps")
    if isinstance(every, int):
        c.set("logging.every_steps", every, "log_every_n_steps")
    logger = c.get("metric_logger")
    if isinstance(logger, dict) and "WandB" in str(logger.get("_component_")):
        project = logger.get("project") or "torchtune"
        c.set("logging.wandb.project", project, "metric_logger")
    c.set("checkpoint.export", "at_end", "checkpointer")
    if c.get("resume_from_checkpoint"):
        c.lose("resume_from_checkpoint", "checkpoints of other tools cannot be resumed")
    c.skip("profile has steps and ranks", "profiler")
    c.skip("run.device finds the GPUs", "device", "cudnn_deterministic_mode", "low_cpu_ram")
    c.skip("speed and memory only", "memory_efficient_fsdp_wrap", "optimizer_in_bwd")
    c.skip("speed and memory only", "use_distributed_state_dict", "use_flex", "collate_fn")
    c.skip("checkpoint.every_steps", "save_every_n_steps", "save_every_n_epochs")
    c.skip("no part of the training", "name", "ref_checkpointer", "base_model_path")
    for name in ("grpo_samples", "reward_functions", "orchestration", "policy_model"):
        if name in c.given:
            c.lose(name, "reinforcement learning is not available; TRL and prime-rl have it")
            for other in ("reward", "value_", "ref_", "ppo_", "kl_coeff", "gamma", "lmbda"):
                c.lose_all(other, f"a part of {name}")
            for other in ("max_generated_tokens", "temperature", "stop_token_ids", "num_steps"):
                c.lose_all(other, f"a part of {name}")
            for other in (
                "min_response_length",
                "penalise_no_eos",
                "forward_batch_size",
                "whiten_",
            ):
                c.lose_all(other, f"a part of {name}")
            c.lose_all("enable_kv_cache", f"a part of {name}")


def _resolved(value: Any, whole: dict[str, Any], depth: int = 5) -> Any:
    """A value in which references to keys of the config, `${key}`, have their values."""
    if isinstance(value, dict):
        return {key: _resolved(inner, whole, depth) for key, inner in value.items()}
    if isinstance(value, list):
        return [_resolved(inner, whole, depth) for inner in value]
    if not isinstance(value, str) or depth == 0:
        return value
    alone = _REFERENCE.fullmatch(value)
    if alone is not None:
        return _resolved(_at(whole, alone[1]), whole, depth - 1)
    return _REFERENCE.sub(lambda match: str(_resolved(match[0], whole, depth - 1)), value)


def _at(whole: Any, key: str) -> Any:
    for part in key.split("."):
        whole = whole.get(part) if isinstance(whole, dict) else None
    return whole


def _component(c: Conversion, name: str) -> tuple[str, dict[str, Any]]:
    """The last name of a component, and its arguments."""
    given = c.get(name)
    if not isinstance(given, dict):
        return "", {}
    arguments = {key: value for key, value in given.items() if key != "_component_"}
    return str(given.get("_component_", "")).rpartition(".")[2], arguments


def _model(c: Conversion) -> None:
    epochs, steps = c.get("epochs", default=1), c.get("max_steps_per_epoch")
    if isinstance(steps, int) and isinstance(epochs, int):
        c.set("run.max_steps", steps * epochs, c.names("max_steps_per_epoch", "epochs"))
        c.differ(
            "run.max_steps", "there, epochs of fewer steps end before; here another one begins"
        )
    else:
        c.set("run.epochs", epochs, c.names("epochs"))
    builder, settings = _component(c, "model")
    _, weights = _component(c, "checkpointer")
    folder = str(weights.get("checkpoint_dir") or "").rstrip("/").removesuffix("/original")
    if folder:
        c.set("model.path", _downloaded(c, folder), "checkpointer")
    if "vision" in builder or "flamingo" in builder or "encoder_trainable" in settings:
        what = "this model attends to images in layers of its own, which is not trained here"
        c.lose("model", what)
    if builder.startswith(("lora", "qlora", "dora", "qdora")) or "lora_rank" in settings:
        _adapter(c, builder, settings)
    else:
        sizes = [key for key, value in settings.items() if value is not None]
        if sizes:
            c.lose("model", f"{', '.join(sizes)}: the model is that of checkpoint_dir")


def _downloaded(c: Conversion, folder: str) -> str:
    """The hub id that a folder was downloaded from, if it is not here and a comment says so."""
    if not Path(folder).is_dir():
        for name, options in re.findall(r"tune download (\S+)(.*)", c.comments):
            target = re.search(r"--output-dir (\S+)", options)
            default = f"/tmp/{name.rpartition('/')[2]}"
            if (target[1].rstrip("/") if target else default) == folder:
                return str(name)
    return folder


def _adapter(c: Conversion, builder: str, settings: dict[str, Any]) -> None:
    c.set("lora.rank", settings.get("lora_rank", 8), "model.lora_rank")
    c.set("lora.alpha", settings.get("lora_alpha", 16), "model.lora_alpha")
    if not is_off(dropout := settings.get("lora_dropout", 0.0)):
        c.set("lora.dropout", dropout, "model.lora_dropout")
    layers = [_LORA_LAYERS.get(name, name) for name in settings.get("lora_attn_modules", [])]
    if settings.get("apply_lora_to_mlp"):
        layers += _MLP
    if settings.get("apply_lora_to_output"):
        layers.append("lm_head")
    names = "model.lora_attn_modules, apply_lora_to_mlp"
    if re.search(r"phi[34]", builder):
        layers = list(dict.fromkeys(_FUSED.get(name, name) for name in layers))
        c.set("lora.target_modules", layers, names)
        if {*_FUSED.values()} & {*layers}:
            what = "layers that are one here have one adapter, which covers all parts of them"
            c.differ("lora.target_modules", what)
    else:
        c.set("lora.target_modules", layers, names, "names of transformers")
    if settings.get("use_dora") or "dora" in builder:
        c.set("lora.dora", True, "model.use_dora")
    if settings.get("quantize_base") or builder.startswith(("qlora", "qdora")):
        c.set("lora.quantize", "nf4", "model")


def _length(c: Conversion) -> None:
    _, tokenizer = _component(c, "tokenizer")
    length = tokenizer.get("max_seq_len")
    if isinstance(length, int) and length > 1:
        c.set("data.sequence_length", length, "tokenizer.max_seq_len")
    else:
        c.set("data.sequence_length", 2048, "tokenizer.max_seq_len")
        note = "no limit there; here rows that are longer are dropped, or cut with data.overlong"
        c.differ("data.sequence_length", note)


def _tokenizer(c: Conversion) -> None:
    _, tokenizer = _component(c, "tokenizer")
    if not is_off(template := tokenizer.get("prompt_template")):
        if str(template).endswith(".ChatMLTemplate"):
            c.set("data.chat_template", "chatml", "tokenizer")
        else:
            c.lose("tokenizer", f"prompt_template: {template}; {parts.OWN_TEMPLATE}")


def _train(c: Conversion) -> None:
    given = c.given.get("dataset")
    c.get("dataset")
    entries = given if isinstance(given, list) else [given]
    sets = [each for entry in entries if (each := _data_set(c, "dataset", entry)) is not None]
    rows.set_train(c, sets, "dataset")
    _, tokenizer = _component(c, "tokenizer")
    if isinstance(tokenizer.get("max_seq_len"), int):
        rows.too_long(c, "tokenizer.max_seq_len")
    if "data.train" in c.values and not any(each.kind for each in sets):
        c.note("data.train", "data.kind by the columns of the rows")
    packed = any(isinstance(entry, dict) and entry.get("packed") for entry in entries)
    if c.values.get("data.kind") not in ("preference", "unpaired"):
        rows.packing(c, on=packed, origin="dataset")
    if c.get("shuffle") is False:
        c.set("data.shuffle", False, "shuffle")
    if c.get("dataset_val") is not None:
        found = _data_set(c, "dataset_val", c.given["dataset_val"])
        every = c.get("run_val_every_n_steps")
        if found is not None and every is not None:
            c.set("data.validation", [found.file], "dataset_val")
            c.set("evaluation.every_steps", every, "run_val_every_n_steps")
        elif found is not None:
            c.skip("no evaluation without run_val_every_n_steps", "dataset_val")
    c.skip("evaluation has the batches of training", "batch_size_val", "run_val_every_n_steps")
    _, loader = _component(c, "dataloader")
    if loader:
        c.skip("data.workers", "dataloader")


def _data_set(c: Conversion, name: str, entry: Any) -> DataSet | None:
    if not isinstance(entry, dict):
        return None
    builder = str(entry.get("_component_", "")).rpartition(".")[2]
    kind, source, loss_on, note = DATA_SETS.get(builder, (_KINDS.get(builder), "", None, ""))
    path, files = entry.get("source") or source, entry.get("data_files")
    if kind is None:
        c.lose(name, f"{builder} is not known here; name files and columns in data")
        if not path:
            return None
    if path in ("json", "csv", "text", "parquet") and files:
        path = files[0] if isinstance(files, list) else str(files)
    if not is_off(folder := entry.get("data_dir")):
        what = f"data_dir: {folder}: a folder of {path}: download it, and name it in data.train"
        c.lose(name, what)
    if not is_off(entry.get("partition")):
        c.lose(name, f"partition: {entry['partition']}")
    subset = entry.get("subset") or entry.get("name")
    file = parts.hub_data(c, name, str(path), subset, entry.get("split"))
    if file is None:
        return None
    inputs = entry.get("train_on_input")
    if inputs is not None:
        loss_on = "all" if inputs else "assistant"
    settings: dict[str, Any] = {}
    columns = entry.get("column_map")
    if isinstance(columns, dict) and columns:
        roles = {"input": "instruction", "output": "response", "conversations": "messages"}
        settings["columns"] = {roles.get(role, role): column for role, column in columns.items()}
    if kind == "instruct":
        settings["prompt_format"] = "chat"
    if kind == "text" and entry.get("column") not in (None, "text"):
        settings["text_column"] = entry["column"]
    if not is_off(entry.get("new_system_prompt")):
        c.set("data.system", entry["new_system_prompt"], f"{name}.new_system_prompt")
    return DataSet(file, name, kind, settings, [note] if note else [], loss_on)


def _loss(c: Conversion) -> None:
    loss, settings = _component(c, "loss")
    if "PPO" in loss or "GRPO" in loss:
        c.lose("loss", f"{loss}: reinforcement learning is not available; TRL and prime-rl have it")
    elif "DPO" in loss or "RSO" in loss or "SimPO" in loss:
        name = {"DPOLoss": "dpo", "RSOLoss": "hinge"}.get(loss)
        if name is None:
            c.lose("loss", f"{loss} is not available; dpo takes its place")
        c.set("preference.loss", name or "dpo", "loss")
        c.set("preference.beta", settings.get("beta", 0.1), "loss")
        if not is_off(settings.get("label_smoothing")):
            c.lose("loss", "label_smoothing needs preference.loss=robust")
    _, teacher = _component(c, "teacher_checkpointer")
    if teacher:
        folder = str(teacher.get("checkpoint_dir")).rstrip("/")
        c.set("distillation.teacher", _downloaded(c, folder), "teacher_checkpointer")
        note = "here with the teacher's 64 most probable tokens (distillation.top_k)"
        c.set("distillation.weight", c.get("kd_ratio", default=0.5), c.names("kd_ratio"), note)
        c.get("teacher_model", "kd_loss")
    if "preference.loss" not in c.values:
        c.skip("the loss of a token is cross-entropy", "loss")


def _optimizer(c: Conversion) -> None:
    builder, settings = _component(c, "optimizer")
    names = {"AdamW8bit": "int8", "PagedAdamW8bit": "int8"}
    known = builder in ("AdamW", "Adam", "PagedAdamW", *names)
    if builder == "SGD":
        c.set("optimizer.name", "sgd", "optimizer")
        c.set("optimizer.momentum", settings.get("momentum", 0.0), "optimizer.momentum")
    else:
        if not known:
            c.lose("optimizer", f"{builder} is not available; adamw takes its place")
        c.set("optimizer.name", "adamw", "optimizer")
        c.set("optimizer.betas", settings.get("betas", [0.9, 0.999]), "optimizer")
        if builder in names:
            c.set("optimizer.state_dtype", names[builder], "optimizer")
    c.set("optimizer.learning_rate", settings.get("lr", 1e-3), "optimizer.lr")
    decay = 0.0 if builder in ("Adam", "SGD") else 0.01  # of torch, and of bitsandbytes
    origin = "optimizer.weight_decay" if "weight_decay" in settings else ""
    c.set("optimizer.weight_decay", settings.get("weight_decay", decay), origin)
    shape, steps = _component(c, "lr_scheduler")
    if not shape:
        c.set("schedule.kind", "constant", "")
        c.set("schedule.warmup_steps", 0, "")
        return
    if "cosine" not in shape:
        c.lose("lr_scheduler", f"{shape} is not available; cosine takes its place")
    c.set("schedule.kind", "cosine", "lr_scheduler")
    c.set("schedule.min_ratio", 0.0, "lr_scheduler")
    c.set(
        "schedule.warmup_steps", steps.get("num_warmup_steps", 0), "lr_scheduler.num_warmup_steps"
    )
    if not is_off(cycles := steps.get("num_cycles")) and cycles != 0.5:
        c.lose("lr_scheduler", f"num_cycles: {cycles}; the cosine falls once")


def _strategy(c: Conversion) -> None:
    note = "one GPU or FSDP there; the losses are the same with each strategy"
    c.set("strategy.kind", "auto" if c.ranks == 1 else "fsdp", "", note)
    offload = c.get("fsdp_cpu_offload")
    nested = c.get("fsdp")
    if offload or (isinstance(nested, dict) and nested.get("cpu_offload")):
        c.set("strategy.kind", "fsdp", c.names("fsdp_cpu_offload", "fsdp"))
        c.set("strategy.cpu_offload.what", "all", c.names("fsdp_cpu_offload", "fsdp"))
    size = c.get("tensor_parallel_dim")
    if isinstance(size, int) and size > 1:
        c.set("strategy.tensor_parallel_size", size, "tensor_parallel_dim")
        c.set("strategy.kind", "fsdp", "tensor_parallel_dim")
    c.skip("layers are divided as the model's plan says", "tensor_parallel_plan")
    c.skip("all ranks shard the model", "data_parallel_shard_dim")
    copies = c.get("data_parallel_replicate_dim")
    if isinstance(copies, int) and copies > 1:
        c.set("strategy.replicate", copies, "data_parallel_replicate_dim")
