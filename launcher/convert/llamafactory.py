"""From LLaMA-Factory's YAML, of both of its trainers. Read in the version of August 2026 (0.9.5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from launcher.convert import parts, rows
from launcher.convert.conversion import Conversion, is_off
from launcher.convert.rows import DataSet
from launcher.errors import RecipeError
from launcher.recipe.yaml_text import NotYamlError, parse_yaml

SIGNS = (
    *("stage", "finetuning_type", "template", "cutoff_len", "dataset_dir", "lora_target"),
    *("plot_loss", "model_class", "dist_config", "train_dataset", "quantization_bit", "pref_beta"),
)
"""Keys that only this tool has, or most of which it has."""
_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_ROLES = {
    "prompt": "instruction",
    "query": "input",
    "response": "response",
    "history": "history",
    "messages": "messages",
    "system": "system",
    "tools": "tools",
    "chosen": "chosen",
    "rejected": "rejected",
    "kto_tag": "label",
    "images": "images",
}
"""Roles of columns here, by those of dataset_info.json."""
_COLUMNS = {"instruction": "instruction", "input": "input", "response": "output"}
"""Columns that dataset_info.json need not name."""
_SHAREGPT_ROLES = ("from", "role", "value", "content")
_PIXELS = 768 * 768
"""Of the largest image, by default."""
_BATCHING = {"normal": (False, ""), "dynamic_batching": (False, ""), "padding_free": (True, "")}


def convert(c: Conversion) -> None:
    """Reads all keys."""
    if "model_class" in c.given or "dist_config" in c.given or "train_dataset" in c.given:
        _second_trainer(c)
    elif c.get("do_train", "dataset", "stage") is None:
        raise RecipeError(
            "no training: neither dataset nor stage is given (merging, inference and export are "
            "`launcher export` and `launcher chat` here)"
        )
    else:
        _first_trainer(c)
    c.move("seed", "run.seed", default=42)
    c.move("output_dir", "run.dir")
    parts.saving(c)
    parts.logging(c)
    parts.parallel_sizes(c)
    c.skip("the launcher's own limits find a rank that hangs", "ddp_timeout")
    c.skip(
        "only for generating", "sample_backend", "max_new_tokens", "infer_backend", "infer_dtype"
    )
    c.skip("the command has the options gpus and nodes", "ray_num_workers", "placement_strategy")
    c.skip("the export is a Hugging Face folder", "export_hf_on_finish")
    if c.get("use_kt"):
        c.lose("use_kt", "experts on CPUs are not available; lora.quantize=nf4 needs less memory")
        c.skip("a part of use_kt", "kt_config", "kt_cpu_activation", "kt_weight_path")
        c.skip("a part of use_kt", "kt_non_expert_weight_path", "kt_use_lora_experts")
    _pictures(c)


def _first_trainer(c: Conversion) -> None:
    stage = str(c.get("stage", default="sft"))
    if stage == "ppo":
        c.lose("stage", "ppo: reinforcement learning is not available; TRL and prime-rl have it")
    parts.run_length(c, epochs="num_train_epochs", default_epochs=3)
    c.move("model_name_or_path", "model.path")
    revision = c.get("model_revision", default="main")
    if revision != "main" and "model.path" in c.values:
        c.values["model.path"] += f"@{revision}"
    if c.get("train_from_scratch"):
        c.set("model.init", "random", "train_from_scratch")
    _method(c, stage)
    _train(c, stage)
    rows.sequence_length(c, "cutoff_len", 2048)
    rows.too_long(c, c.names("cutoff_len"))
    packed, neat = c.get("packing"), c.get("neat_packing")
    on = bool(packed or neat or (packed is None and stage == "pt"))
    if stage in ("pt", "sft"):
        names = c.names("packing", "neat_packing")
        rows.packing(c, on=on, origin=names, isolated=bool(neat) or stage == "pt")
    _template(c, stage)
    parts.batch(
        c,
        micro="per_device_train_batch_size",
        accumulation="gradient_accumulation_steps",
        default=8,
    )
    _optimizer(c)
    parts.schedule(c, name="lr_scheduler_type", default="linear")
    mixed = str(c.get("mixed_precision", default=""))
    bf16, fp16 = c.get("bf16") or "bf16" in mixed or None, c.get("fp16") or "fp16" in mixed
    if c.given.get("bf16") is False:
        bf16 = False
    pure = c.get("pure_bf16")
    parts.precision(
        c,
        bf16=bf16 or pure or (bf16 is None and not fp16),
        fp16=fp16,
        origin=c.names("bf16", "fp16", "pure_bf16", "mixed_precision"),
    )
    off = c.get("disable_gradient_checkpointing")
    if off:
        c.skip("no activation checkpointing, as here", "disable_gradient_checkpointing")
    else:
        c.set(
            "activation_checkpointing.mode",
            "full",
            c.names("gradient_checkpointing", "disable_gradient_checkpointing"),
        )
        c.get("gradient_checkpointing")
    parts.attention(c, "flash_attn")
    _adapter(c)
    parts.strategy(c)
    parts.evaluating(c, has_data=_validation(c))
    c.get("max_samples")


def _method(c: Conversion, stage: str) -> None:
    beta = c.get("pref_beta", default=0.1)
    if stage == "rm":
        c.set("model.task", "reward", "stage")
    elif stage == "kto":
        c.set("kto.beta", beta, c.names("pref_beta") or "stage")
        c.differ("kto.beta", parts.REFERENCE_POINT)
        c.move("kto_chosen_weight", "kto.desirable_weight")
        c.move("kto_rejected_weight", "kto.undesirable_weight")
    elif stage == "dpo":
        loss = str(c.get("pref_loss", default="sigmoid"))
        if loss not in _LOSSES:
            c.lose("pref_loss", f"{loss} is not available; dpo takes its place")
        c.set("preference.loss", _LOSSES.get(loss, "dpo"), c.names("pref_loss") or "stage")
        c.set("preference.beta", beta, c.names("pref_beta"))
        if loss == "simpo":
            c.move("simpo_gamma", "preference.margin", default=0.5)
        if not is_off(c.get("dpo_label_smoothing")):
            c.lose("dpo_label_smoothing", "smoothed labels need preference.loss=robust")


def _train(c: Conversion, stage: str) -> None:
    kinds = {"pt": "text", "dpo": "preference", "rm": "preference", "kto": "unpaired"}
    kind = kinds.get(stage)
    sets = _data_sets(c, "dataset", kind)
    most = c.get("max_samples")
    for each in sets if isinstance(most, int) else ():
        each.settings["limit"] = min(most, each.settings.get("limit") or most)
    rows.set_train(c, sets, c.names("dataset") or "dataset")
    if c.get("train_on_prompt") and kind is None and "data.kind" in c.values:
        c.set("data.loss_on", "all", "train_on_prompt")
    elif c.get("mask_history") and kind is None and "data.kind" in c.values:
        c.set("data.loss_on", "last", "mask_history")
    c.get("train_on_prompt", "mask_history")
    if c.get("streaming"):
        c.set("data.streaming", True, "streaming")
        c.skip("data.shuffle shuffles each shard of a stream whole", "buffer_size")
    if c.get("disable_shuffling"):
        c.set("data.shuffle", False, "disable_shuffling")
    if (processes := c.get("preprocessing_num_workers")) is not None:
        c.set("data.processes", processes, "preprocessing_num_workers")
    c.move("dataloader_num_workers", "data.workers")


def _data_sets(c: Conversion, name: str, kind: str | None) -> list[DataSet]:
    given = c.get(name)
    folder = str(c.get("dataset_dir", default="data"))
    names = given.split(",") if isinstance(given, str) else given or []
    folder = folder.removeprefix("REMOTE:") if folder.startswith("REMOTE:") else folder
    known = _dataset_info(c, folder)
    sets = []
    for word in (str(each).strip() for each in names):
        entry = known.get(word)
        if isinstance(entry, dict):
            found = _described(c, name, word, entry, folder, kind)
            sets += [found] if found is not None else []
        else:
            what = f"{word}: what it is stands in {folder}/dataset_info.json, which is not here"
            c.lose(name, f"{what}; name its file in data.train")
            sets.append(DataSet(f"{folder}/{word}.json", name, kind))
    return sets


def _dataset_info(c: Conversion, folder: str) -> dict[str, Any]:
    """dataset_info.json of the config's checkout or of the current folder; empty: it is not here."""
    for above in (Path(), c.folder, *c.folder.parents):
        file = above / folder / "dataset_info.json"
        if file.is_file():
            try:
                found = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                return {}
            return found if isinstance(found, dict) else {}
    return {}


def _described(
    c: Conversion, name: str, word: str, entry: dict[str, Any], folder: str, kind: str | None
) -> DataSet | None:
    """A data set that dataset_info.json describes."""
    if entry.get("hf_hub_url"):
        path = str(entry["hf_hub_url"])
        subset = entry.get("subset")
        file = parts.hub_data(c, f"{name}: {word}", path, subset, entry.get("split"))
    elif entry.get("file_name"):
        file = f"{folder}/{entry['file_name']}"
        here = [above / file for above in (Path(), c.folder, *c.folder.parents)]
        file = str(next((each for each in here if each.exists()), Path(file)))
    else:
        c.lose(f"{name}: {word}", "neither a file nor of the hub: copy the data first")
        return None
    if file is None:
        return None
    columns = entry.get("columns")
    columns = dict(columns) if isinstance(columns, dict) else {}
    conversation = entry.get("formatting") == "sharegpt"
    for role in ("videos", "audios"):
        if columns.pop(role, None):
            c.lose(f"{name}: {word}", "video and audio are not trained on")
    if images := columns.get("images"):
        c.shows_images = c.shows_images or f"{name}: {word}"
        if images in ("images", "image"):
            del columns["images"]
    if kind == "text":
        column = columns.get("prompt", "text")
        settings: dict[str, Any] = {"text_column": None if column == "text" else column}
    elif conversation:
        column = columns.pop("messages", "conversations")
        usual = column in ("messages", "conversations")
        settings = {"messages_column": None if usual else column}
        named = {_ROLES[role]: name for role, name in columns.items() if role in _ROLES}
        named = {role: name for role, name in named.items() if role != name}
        settings["columns"] = named or None
        _tags(c, f"{name}: {word}", entry)
    else:
        named = {_ROLES[role]: name for role, name in columns.items() if role in _ROLES}
        named = {role: name for role, name in named.items() if name != _COLUMNS.get(role)}
        settings = {"columns": named or None}
        if kind is None:
            settings["prompt_format"] = "chat"
    usual_kind = "chat" if conversation else "instruct"
    samples = entry.get("num_samples")
    if samples is not None:
        settings["limit"] = samples
    return DataSet(file, name, kind or usual_kind, settings)


def _tags(c: Conversion, name: str, entry: dict[str, Any]) -> None:
    tags = entry.get("tags")
    for key in ("role_tag", "content_tag"):
        tag = tags.get(key) if isinstance(tags, dict) else None
        if tag is not None and tag not in _SHAREGPT_ROLES:
            c.lose(name, f"messages with {tag}: write role and content")


def _template(c: Conversion, stage: str) -> None:
    template = c.get("template")
    if template is not None and stage != "pt":
        parts.template(c, "template")
    if c.values.get("data.kind") in ("chat", "instruct") and stage != "pt":
        what = "what follows the end of an answer in the template, such as a line break, has loss there"
        c.differ("data.kind", what)
    thinking = c.get("enable_thinking")
    if thinking is False and stage != "pt":
        c.set("data.chat_template_kwargs", {"enable_thinking": False}, "enable_thinking")
    if not is_off(system := c.get("default_system")) and stage != "pt":
        c.set("data.system", system, "default_system")
    if not is_off(c.get("tool_format")):
        c.skip("the chat template writes tools", "tool_format")
    tokens = c.get("add_special_tokens", "add_tokens", "new_special_tokens_config")
    if isinstance(tokens, str) and not is_off(c.names("add_special_tokens", "add_tokens")):
        names = [token.strip() for token in tokens.split(",")]
        c.set("model.new_tokens", names, c.names("add_special_tokens", "add_tokens"))
    elif isinstance(tokens, str):
        _tokens_of_file(c, tokens)
    c.skip("new rows start as the mean of the others", "init_special_tokens")


def _tokens_of_file(c: Conversion, name: str) -> None:
    for folder in (Path(), c.folder, *c.folder.parents):
        if (folder / name).is_file():
            try:
                found, _ = parse_yaml((folder / name).read_text(encoding="utf-8"))
            except NotYamlError:
                break
            if isinstance(found, dict):
                note = "new rows start as the mean of the others, not by their descriptions"
                c.set("model.new_tokens", list(found), "new_special_tokens_config", note)
                return
    c.lose(
        "new_special_tokens_config", f"{name} cannot be read; name the tokens in model.new_tokens"
    )


def _optimizer(c: Conversion) -> None:
    parts.optimizer(c, name="optim")
    if c.get("use_muon"):
        keys, note = parts.OPTIMIZERS["muon"]
        c.set("optimizer.name", keys["optimizer.name"], "use_muon", note)
    for name in ("use_galore", "use_apollo", "use_badam", "use_adam_mini"):
        if c.get(name):
            word = name.removeprefix("use_")
            c.lose(name, f"{word} is not available; adamw takes its place")
            parts_of_it = [key for key in c.given if key.startswith(f"{word}_")]
            c.skip(f"a part of {name}", *parts_of_it)
    for name in ("use_dft_loss", "use_asft_loss", "use_eaft_loss"):
        if c.get(name):
            c.lose(name, "the loss is cross-entropy; objective.loss names one of yours")
            prefix = name.removeprefix("use_").removesuffix("loss")
            c.skip(f"a part of {name}", *[key for key in c.given if key.startswith(prefix)])
    if c.get("use_llama_pro"):
        c.lose("use_llama_pro", "added blocks are not available")


def _adapter(c: Conversion) -> None:
    kind = str(c.get("finetuning_type", default="lora"))
    bits = c.get("quantization_bit")
    method = str(c.get("quantization_method", default="bnb")).lower()
    if kind in ("freeze", "oft"):
        what = "model.freeze names what is not trained" if kind == "freeze" else "use lora or dora"
        c.lose("finetuning_type", f"{kind} is not available; {what}")
        c.skip(f"a part of {kind}", *[key for key in c.given if key.startswith(f"{kind}_")])
    if kind == "lora":
        targets = c.get("lora_target", default="all")
        parts.adapter(
            c,
            rank=8,
            alpha=None,
            dropout=0.0,
            targets=None if targets == "all" else targets,
            target_names=("lora_target",),
        )
        parts.quantization(c, four=bits == 4, eight=bits == 8, origin="quantization_bit")
        if bits is not None and method != "bnb":
            c.lose("quantization_method", f"{method} is not available; lora.quantize is nf4")
        if bits not in (None, 4, 8):
            c.lose("quantization_bit", f"{bits} bits are not available; lora.quantize is nf4")
        if c.get("quantization_type", default="nf4") != "nf4":
            c.lose("quantization_type", "lora.quantize is nf4")
        for name in ("pissa_init", "use_galore"):
            if c.get(name):
                c.lose(name, "adapters start as peft's usual ones")
                prefix = name.partition("_")[0] + "_"
                c.skip(f"a part of {name}", *[key for key in c.given if key.startswith(prefix)])
    c.get("create_new_adapter")


def _validation(c: Conversion) -> bool:
    if not is_off(c.get("eval_dataset")):
        kind = c.values.get("data.kind")
        found = [each.file for each in _data_sets(c, "eval_dataset", kind)]
        if found:
            c.set("data.validation", found, "eval_dataset")
            return True
    return rows.validation(c, "val_size")


def _pictures(c: Conversion) -> None:
    switches = ("freeze_vision_tower", "freeze_multi_modal_projector")
    tower, projector = (c.get(name, default=True) for name in switches)
    if c.shows_images:
        train = "all" if not tower else "none" if projector else "projector"
        pixels = c.get("image_max_pixels", default=_PIXELS)
        origin = c.names(*switches)
        parts.pictures(c, c.shows_images, train=train, origin=origin, pixels=pixels)
        if not tower and projector and "freeze_multi_modal_projector" in c.given:
            c.note("images.train", "here the projector is trained with the tower")
        if (folder := c.get("media_dir")) is not None and "images.train" in c.values:
            c.set("images.folder", str(folder), "media_dir")
        why = "the processor of the model says it"
        c.skip(why, "crop_to_patches", "image_do_pan_and_scan", "image_min_pixels")
        if not is_off(c.get("freeze_language_model")):
            c.lose("freeze_language_model", "model.freeze names what is not trained, by patterns")
    else:
        c.skip("no data set has images", *switches, "image_max_pixels", "image_min_pixels")
        c.skip("no data set has images", "media_dir", "crop_to_patches", "image_do_pan_and_scan")
        if not is_off(c.get("freeze_language_model")):
            c.lose("freeze_language_model", "only the text model is trained")
    why = "video and audio are not trained on"
    c.skip(why, "video_max_pixels", "video_min_pixels", "video_fps", "video_maxlen")
    c.skip(why, "use_audio_in_video", "audio_sampling_rate")


def _second_trainer(c: Conversion) -> None:
    """The trainer whose configs name `model` and `train_dataset`."""
    if is_off(c.get("train_dataset")):
        raise RecipeError("no training: train_dataset is not given")
    c.move("model", "model.path")
    c.skip("the model's config says it", "model_class", "init_config", "kernel_config")
    template = c.get("template")
    stage = "dpo" if str(c.get("stage", default="")) == "dpo" or "pref_beta" in c.given else "sft"
    if "dpo" in str(c.given["train_dataset"]):
        stage = "dpo"
    _files_of_second_trainer(c, stage)
    if stage == "dpo":
        c.set("preference.loss", "dpo", c.names("stage") or "train_dataset")
        c.set("preference.beta", c.get("pref_beta", default=0.1), c.names("pref_beta"))
    if template is not None:
        parts.template(c, "template")
    parts.run_length(c, epochs="num_train_epochs", default_epochs=3)
    rows.sequence_length(c, "cutoff_len", 2048)
    rows.too_long(c, c.names("cutoff_len"))
    if stage == "sft":
        strategy = str(c.get("batching_strategy", default="normal"))
        rows.packing(c, on=False, origin=c.names("batching_strategy"))
        if "padding_free" in strategy:
            note = "rows count as there, and are padded here: slower, with the same losses"
            c.note("data.packing", note)
    c.get("batching_strategy")
    micro = c.get("micro_batch_size", default=1)
    whole = c.get("global_batch_size")
    if isinstance(whole, int):
        c.set("batch.global_batch_size", whole, "global_batch_size")
        c.set("batch.micro_batch_size", micro, c.names("micro_batch_size"))
    else:
        parts.batch(
            c, micro="micro_batch_size", accumulation="gradient_accumulation_steps", default=1
        )
    settings = c.get("optim_config")
    if isinstance(settings, dict):
        parts.optimizer(c, name="optim_config", value=settings.get("name"))
        c.set("optimizer.weight_decay", settings.get("wd", 0.0), "optim_config")
        if "momentum" in settings and c.values["optimizer.name"] in ("muon", "sgd"):
            c.set("optimizer.momentum", settings["momentum"], "optim_config")
    else:
        parts.optimizer(c, name="optim")
    parts.schedule(c, name="lr_scheduler_type", default="constant")
    mixed = c.get("bf16", "mixed_precision", default=True)
    parts.precision(c, bf16=mixed, fp16=False, origin=c.names("bf16", "mixed_precision"))
    parts.checkpointing(c, default=True)
    parts.attention(c, "flash_attn")
    peft = c.get("peft_config")
    if isinstance(peft, dict):
        _adapter_of_second_trainer(c, peft)
    distribution = c.get("dist_config")
    if isinstance(distribution, dict) and distribution.get("name") == "deepspeed":
        c.given["deepspeed"] = distribution.get("config_file")
        parts.strategy(c)
    else:
        c.set("strategy.kind", "fsdp", "dist_config")
        if isinstance(distribution, dict) and not is_off(size := distribution.get("ep_size")):
            c.set("strategy.expert_parallel_size", size, "dist_config")
    if isinstance(size := c.get("cp_size"), int) and size > 1:
        c.set("strategy.context_parallel_size", size, "cp_size")


def _files_of_second_trainer(c: Conversion, stage: str) -> None:
    name = str(c.given["train_dataset"])
    kind = "preference" if stage == "dpo" else "chat"
    for folder in (Path(), c.folder, *c.folder.parents):
        if Path(name).suffix in (".yaml", ".yml") and (folder / name).is_file():
            try:
                found, _ = parse_yaml((folder / name).read_text(encoding="utf-8"))
            except NotYamlError:
                break
            sets = []
            for entry in found.values() if isinstance(found, dict) else ():
                if not isinstance(entry, dict):
                    continue
                path = str(entry.get("path", ""))
                if (folder / path).exists():
                    path = str(folder / path)
                file = parts.hub_data(c, "train_dataset", path, None, entry.get("split"))
                alpaca = entry.get("converter") == "alpaca"
                own = "instruct" if alpaca and stage != "dpo" else kind
                settings: dict[str, Any] = {"limit": entry.get("size")}
                if own == "instruct":
                    settings["prompt_format"] = "chat"
                if file is not None:
                    sets.append(DataSet(file, "train_dataset", own, settings))
            rows.set_train(c, sets, "train_dataset")
            return
    if Path(name).suffix in (".yaml", ".yml"):
        what = f"{name}: the description of the data is not here; name the files in data.train"
        c.lose("train_dataset", what)
        c.set("data.train", [name], "train_dataset")
        c.set("data.kind", kind, "train_dataset")
        return
    file = parts.hub_data(c, "train_dataset", name)
    if file is not None:
        rows.set_train(c, [DataSet(file, "train_dataset", kind)], "train_dataset")


def _adapter_of_second_trainer(c: Conversion, peft: dict[str, Any]) -> None:
    kind = peft.get("name")
    quantized = c.get("quant_config")
    if kind != "lora":
        what = "model.freeze names what is not trained"
        c.lose("peft_config", f"{kind} is not available; {what}")
        return
    c.set("lora.rank", peft.get("r", 8), "peft_config")
    c.set("lora.alpha", peft.get("lora_alpha", 16), "peft_config")
    if not is_off(dropout := peft.get("lora_dropout")):
        c.set("lora.dropout", dropout, "peft_config")
    targets = peft.get("target_modules")
    if isinstance(targets, list):
        c.set("lora.target_modules", targets, "peft_config")
    if isinstance(quantized, dict) and quantized.get("quantization_bit") == 4:
        c.set("lora.quantize", "nf4", "quant_config")
    elif not is_off(quantized):
        c.lose("quant_config", f"{quantized}: lora.quantize is nf4")
