"""From axolotl's YAML. Its names and defaults were read in the version of July 2026 (0.19)."""

from __future__ import annotations

from typing import Any

from launcher.convert import parts, rows
from launcher.convert.conversion import Conversion, is_off
from launcher.convert.rows import DataSet

SIGNS = (
    *("base_model", "datasets", "pretraining_dataset", "micro_batch_size"),
    *("sequence_len", "num_epochs", "val_set_size", "adapter"),
)
"""Keys that only this tool has, or most of which it has."""
_REINFORCED = ("grpo", "gdpo", "ebft")
_LOSSES = {"dpo": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo"}
_DPO_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo", "robust": "robust"}
_DPO_LOSSES |= {"apo_zero": "apo_zero"}
_SPEED_PLUGINS = ("cut_cross_entropy", "liger", "kernels", "expert_parallel")
_HEADINGS = "Alpaca's headings without the sentence that axolotl writes before them"
_OF_DATA_SETS = (
    *("path", "data_files", "name", "split", "type", "revision", "ds_type", "trust_remote_code"),
    *("field", "text_column", "field_messages", "field_chosen", "field_rejected", "shards_idx"),
    *("message_property_mappings", "message_field_role", "message_field_content"),
    *("roles_to_train", "train_on_eos", "drop_system_message", "preprocess_shards"),
    *("shards", "message_field_training", "message_field_training_detail", "skip"),
    *("template_thinking_key", "split_thinking"),
)
"""Keys of a data set that are read, or change nothing."""
_USUAL = {
    "field_thinking": ("reasoning_content", "reasoning", "thinking"),
    "field_tools": ("tools", "functions"),
    "chat_template": ("tokenizer_default",),
    "train_on_eot": ("turn",),
}
"""Keys of a data set whose usual values are understood."""
_ROLES = ("system", "user", "human", "assistant", "gpt", "model", "chatbot", "tool", "observation")
_OTHER_SPEAKERS = {"role", "from", "speaker"}
_OTHER_TEXTS = {"content", "value", "parts", "text"}


def convert(c: Conversion) -> None:
    """Reads all keys."""
    parts.run_length(c, epochs="num_epochs", default_epochs=1)
    c.move("output_dir", "run.dir")
    _seed(c)
    c.move("base_model", "model.path")
    if not is_off(revision := c.get("revision_of_model")) and "model.path" in c.values:
        path = f"{c.values['model.path']}@{revision}"
        c.set("model.path", path, "base_model, revision_of_model")
    _watchdog(c)
    method = _method(c)
    _train(c, method)
    has_validation = _validation(c)
    rows.sequence_length(c, "sequence_len", 512)
    strategy = c.get("excess_length_strategy")
    if strategy is not None and "data.kind" in c.values:
        words = {"truncate": "cut", "raise": "error"}
        c.set("data.overlong", words.get(strategy, "drop"), "excess_length_strategy")
    _packing(c)
    _template(c)
    _tokens(c)
    _batch(c)
    parts.optimizer(c, name="optimizer")
    if not is_off(arguments := c.get("optim_args")):
        c.lose("optim_args", f"{arguments}")
    _schedule(c)
    c.get("bf16", "bfloat16", "fp16", "float16", "float32", "torch_dtype")
    parts.precision(
        c,
        bf16=c.given.get("bf16", c.given.get("bfloat16", not c.given.get("fp16"))),
        fp16=c.given.get("fp16", c.given.get("float16")),
        origin=c.names("bf16", "bfloat16", "fp16", "float16", "float32", "torch_dtype"),
    )
    parts.checkpointing(c)
    if not is_off(c.get("selective_checkpointing")):
        c.set("activation_checkpointing.mode", "selective", "selective_checkpointing")
    parts.attention(
        c,
        "attn_implementation",
        "sdp_attention",
        "eager_attention",
        "flash_attention",
        "flex_attention",
        "xformers_attention",
    )
    _adapter(c)
    parts.strategy(c)
    parts.parallel_sizes(c)
    parts.saving(c, loads_best=_loads_best(c))
    parts.evaluating(c, has_data=has_validation)
    parts.logging(c)
    _plugins(c)
    compiled = c.get("torch_compile")
    if compiled is not None:
        c.set("model.compile", "auto" if compiled else False, "torch_compile")
    if "use_kernels" in c.given:
        c.skip("speed only", "use_kernels")
    changes = c.get("model_config", "overrides_of_model_config")
    if isinstance(changes, dict):
        changes = {key: value for key, value in changes.items() if key != "output_router_logits"}
        if changes:
            c.set("model.config", changes, "model_config")
        elif c.given["model_config"]:
            c.lose(
                "model_config", "output_router_logits: the loss has no part for balanced routers"
            )
    c.skip("the recipe is all that a run reads", "env", "accelerator_config", "torchdistx_path")
    c.skip("no part of the training", "gptq_groupsize", "gptq_model_v1", "gptq_disable_exllama")
    c.skip("only for reading the config", "base_model_config", "base_model_ignore_patterns")
    c.skip("the loss is cross-entropy", "eval_causal_lm_metrics", "do_causal_lm_eval")
    c.skip("no part of the training", "eval_max_new_tokens", "max_memory", "gpu_memory_limit")
    c.skip("their sums are those of all sequences", "sample_packing_seq_len_multiplier")
    if c.get("processor_type") is not None:
        _pictures(c)
    c.skip("no data set has images", "freeze_mm_modules")
    if c.get("use_eaft"):
        c.lose_all("use_eaft", "the loss is cross-entropy; objective.loss names one of yours")
        c.lose_all("eaft_", "a part of use_eaft")
    for name in ("lisa_", "relora", "jagged_restart_"):
        c.lose_all(name, "restarts and chosen layers are not available")
    if not is_off(process := c.get("dataset_processes", "dataset_num_proc")):
        c.set("data.processes", process, c.names("dataset_processes", "dataset_num_proc"))
    _order(c)


def _loads_best(c: Conversion) -> bool:
    """Whether the best checkpoint is loaded at the end where the config does not say it: if every
    checkpoint has an evaluation."""
    epochs, times = c.given.get("num_epochs", 1), []
    for steps, per_epoch in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        count = c.given.get(per_epoch)
        time = 1.0 / (count * epochs) if count else c.given.get(steps)
        times.append(time if isinstance(time, int | float) else 0)
    return bool(times[0] and times[1]) and times[0] % times[1] == 0


def _batch(c: Conversion) -> None:
    """batch_size is that of a GPU and step, in place of accumulation."""
    whole, micro = c.get("batch_size"), c.get("micro_batch_size", default=1)
    if isinstance(whole, int) and isinstance(micro, int) and "batch_size" in c.given:
        if "gradient_accumulation_steps" not in c.given:
            c.given["gradient_accumulation_steps"] = max(1, whole // max(1, micro))
            parts.batch(
                c, micro="micro_batch_size", accumulation="gradient_accumulation_steps", default=1
            )
            del c.given["gradient_accumulation_steps"]
            c.origins["batch.global_batch_size"] = f"{c.tool}: {c.names('batch_size')}"
            return
    c.skip("it follows from the other sizes", "batch_size")
    parts.batch(c, micro="micro_batch_size", accumulation="gradient_accumulation_steps", default=1)


def _order(c: Conversion) -> None:
    """Rows are drawn at random, whether the files are shuffled before or not; only with
    curriculum_sampling they come in the order of the files, which are shuffled if there are several."""
    merged = c.get("shuffle_merged_datasets", default=True)
    several = len(c.given.get("datasets") or ()) > 1
    if c.get("curriculum_sampling"):
        if several and merged:
            c.skip("files that are shuffled before: the order is random", "curriculum_sampling")
        else:
            c.set("data.shuffle", False, c.names("curriculum_sampling", "shuffle_merged_datasets"))
    c.skip("rows are drawn at random anyway", "shuffle_merged_datasets")


def _pictures(c: Conversion) -> None:
    frozen = c.get("freeze_mm_modules")
    origin = c.names("freeze_mm_modules")
    # Adapters that the config gives to layers of the text model only
    adapted = "lora.target_modules" in c.values
    train = "none" if frozen or adapted else "all"
    settings = c.get("processor_kwargs")
    settings = dict(settings) if isinstance(settings, dict) else {}
    pixels = settings.pop("max_pixels", None)
    sound = "voxtral" in str(c.given["processor_type"]).lower()
    if sound:
        c.lose("processor_type", "video and audio are not trained on")
        return
    parts.pictures(c, "processor_type", train=train, origin=origin, pixels=pixels)
    if settings:
        c.lose("processor_kwargs", "preprocessor_config.json of the model says it")
    if not is_off(c.get("image_size")):
        c.lose("image_size", "the processor of the model scales images, and images.max_pixels")
    c.get("image_resize_algorithm")


def _seed(c: Conversion) -> None:
    c.move("seed", "run.seed", default=42)


def _watchdog(c: Conversion) -> None:
    limit = c.get("loss_watchdog_threshold")
    c.get("loss_watchdog_patience")
    if limit is not None:
        c.skip(
            "run.max_loss_ratio stops at a multiple of the recent losses, not at a fixed loss",
            "loss_watchdog_threshold",
            "loss_watchdog_patience",
        )


def _method(c: Conversion) -> str:
    """sft, pretrain, preference, kto, reward or other; sets the section of the loss."""
    method = str(c.get("rl", default="") or c.method or "").lower()
    beta = c.get("rl_beta", "dpo_beta", "orpo_alpha", "kto_beta")
    origin = c.names("rl_beta", "dpo_beta", "orpo_alpha", "kto_beta")
    if c.get("reward_model"):
        c.set("model.task", "reward", "reward_model")
        c.skip("one label: model.task is reward", "num_labels")
        return "preference"
    if c.get("process_reward_model"):
        c.lose("process_reward_model", "rewards of single steps are not available")
        c.get("num_labels")
        return "sft"
    if method in _REINFORCED:
        c.lose("rl", f"{method}: reinforcement learning is not available; TRL and prime-rl have it")
        c.get("trl", "ebft", "vllm")
        c.lost |= {name: "a part of rl" for name in ("trl", "ebft", "vllm") if name in c.given}
        return "other"
    if method == "kto":
        c.set("kto.beta", beta if beta is not None else 0.1, origin or "rl")
        c.move("kto_desirable_weight", "kto.desirable_weight")
        c.move("kto_undesirable_weight", "kto.undesirable_weight")
        c.differ("kto.beta", parts.REFERENCE_POINT)
        return "kto"
    if method in _LOSSES:
        c.set("preference.loss", _LOSSES[method], "rl")
        given = c.get("dpo_loss_type")
        given = given[0] if isinstance(given, list) and given else given
        if given is not None:
            loss = _DPO_LOSSES.get(str(given))
            if loss is None:
                c.lose("dpo_loss_type", f"{given} is not available; dpo takes its place")
            else:
                c.set("preference.loss", loss, "dpo_loss_type")
        c.set("preference.beta", beta if beta is not None else 0.1, origin)
        if method == "simpo":
            c.move("simpo_gamma", "preference.margin", default=0.5)
            share = c.get("cpo_alpha", default=1.0)
            if share:
                what = (
                    f"the loss of the chosen answer, times {share}, is not added to that of SimPO"
                )
                c.lose("cpo_alpha" if "cpo_alpha" in c.given else "rl", what)
        if not is_off(smoothing := c.get("dpo_label_smoothing")):
            if c.values["preference.loss"] == "robust":
                c.set("preference.label_smoothing", smoothing, "dpo_label_smoothing")
            else:
                c.lose("dpo_label_smoothing", "smoothed labels need preference.loss=robust")
        return "preference"
    if method:
        c.lose("rl", f"{method} is not available")
    return "pretrain" if "pretraining_dataset" in c.given else "sft"


def _train(c: Conversion, method: str) -> None:
    name = "datasets" if "datasets" in c.given else "pretraining_dataset"
    given = c.get(name)
    entries = given if isinstance(given, list) else [given]
    sets = []
    for entry in entries:
        if isinstance(entry, str):
            entry = {"path": entry}
        if isinstance(entry, dict):
            sets += _data_set(c, name, entry, method)
    rows.set_train(c, sets, name)
    everything = c.get("train_on_inputs")
    if everything is not None and c.values.get("data.kind") in ("chat", "instruct"):
        c.set("data.loss_on", "all" if everything else "assistant", "train_on_inputs")
    elif everything is not None:
        c.skip("loss is on what data.kind says", "train_on_inputs")
    if c.get("streaming") or name == "pretraining_dataset":
        c.set("data.streaming", True, c.names("streaming", "pretraining_dataset"))
        c.skip("documents fill sequences", "pretraining_sample_concatenation")
        c.skip(
            "documents are kept apart", "pretrain_multipack_attn", "pretrain_multipack_buffer_size"
        )


def _data_set(c: Conversion, name: str, entry: dict[str, Any], method: str) -> list[DataSet]:
    path, files = entry.get("path"), entry.get("data_files")
    files = [files] if isinstance(files, str) else files
    given = str(path or "")
    if given in ("json", "csv", "parquet", "text", "arrow") and files:
        names = [str(file) for file in files]
    else:
        names = [given]
        if files:
            c.lose(f"{name}.data_files", f"single files of {path}: download them, and name them")
    if entry.get("revision"):
        names = [f"{each}@{entry['revision']}" for each in names]
    found = [
        parts.hub_data(c, f"{name}.path", each, entry.get("name"), entry.get("split"))
        for each in names
    ]
    kind, settings, notes = _kind(c, name, entry, method)
    roles = entry.get("roles_to_train")
    loss_on = None
    if roles is not None and set(roles) != {"assistant"}:
        c.lose(f"{name}.roles_to_train", f"{roles}: loss is on the assistant, or on all")
    ends = entry.get("train_on_eos")
    if ends not in (None, "turn"):
        c.lose(f"{name}.train_on_eos", f"{ends}: each answer is learned with its end")
    for key in ("shards", "message_field_training", "message_field_training_detail", "skip"):
        if not is_off(entry.get(key)):
            c.lose(f"{name}.{key}", "not available")
    for key, value in entry.items():
        if is_off(value) or key in _OF_DATA_SETS or value in _USUAL.get(key, ()):
            continue
        sources = [each for names in value.values() for each in names] if key == "roles" else [key]
        if key != "roles" or not {*sources} <= {*_ROLES}:
            c.lose(f"{name}.{key}", f"{value}: has no equal")
    if entry.get("drop_system_message"):
        c.lose(f"{name}.drop_system_message", "system prompts of the rows are trained with")
    return [
        DataSet(each, f"{name}.type" if "type" in entry else name, kind, settings, notes, loss_on)
        for each in found
        if each is not None
    ]


def _kind(
    c: Conversion, name: str, entry: dict[str, Any], method: str
) -> tuple[str | None, dict[str, Any], list[str]]:
    """data.kind, keys of data and notes of a data set, by axolotl's type of it."""
    given = entry.get("type")
    if isinstance(given, dict):
        return _own_format(c, name, given, method)
    word = str(given or "").lower()
    style = word.partition(":")[2]
    word = word.partition(":")[0]
    messages = entry.get("field_messages")
    if method in ("preference", "kto"):
        return _pairs(entry, method, word)
    if word.startswith(("chat_template", "sharegpt", "pygmalion")) or messages:
        settings = _messages(c, name, entry)
        return "chat", settings, []
    if word in ("completion", "pretrain") or (method == "pretrain" and not word):
        column = entry.get("field") or entry.get("text_column")
        column = None if column == "text" else column
        return "text", {"text_column": column}, []
    if word.startswith(("alpaca", "gpteacher", "oasst", "reflection", "jeopardy", "explainchoice")):
        if style or word.startswith("alpaca_chat"):
            what = f"{given}: a prompt format of its own; the tokenizer's chat template takes its place"
            c.lose(f"{name}.type", what)
            return "instruct", {"prompt_format": "chat"}, []
        return "instruct", {"prompt_format": "text"}, [_HEADINGS]
    if not word:
        return None, {}, []
    c.lose(f"{name}.type", f"{given} is not known here; the columns of the rows decide")
    return None, {}, []


def _messages(c: Conversion, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The column of a conversation. Its usual names and those of its parts are known here."""
    usual = ("messages", "conversations", "conversation")
    column = entry.get("field_messages") or ("conversations" if "sharegpt" in str(entry) else None)
    mapping = entry.get("message_property_mappings")
    mapping = mapping if isinstance(mapping, dict) else {}
    role = entry.get("message_field_role") or mapping.get("role", "role")
    content = entry.get("message_field_content") or mapping.get("content", "content")
    if role not in _OTHER_SPEAKERS or content not in _OTHER_TEXTS:
        what = f"messages with {role} and {content}: write role and content"
        c.lose(f"{name}.message_property_mappings", what)
    return {"messages_column": None if column in usual else column}


def _own_format(
    c: Conversion, name: str, given: dict[str, Any], method: str
) -> tuple[str | None, dict[str, Any], list[str]]:
    """A type that names columns and a format."""
    roles = {
        "field_instruction": "instruction",
        "field_input": "input",
        "field_output": "response",
        "field_system": "system",
        "field_prompt": "prompt",
        "field_chosen": "chosen",
        "field_rejected": "rejected",
        "field_completion": "response",
        "field_label": "label",
    }
    columns = {role: given[key] for key, role in roles.items() if given.get(key)}
    formats = [key for key in given if "format" in key or key == "system_prompt"]
    formats = [key for key in formats if not is_off(given[key])]
    if formats:
        what = (
            f"{', '.join(formats)}: a prompt format of its own; the chat template takes its place"
        )
        c.lose(f"{name}.type", what)
    kind = {"preference": "preference", "kto": "unpaired"}.get(method, "instruct")
    return kind, {"columns": columns or None}, []


def _pairs(
    entry: dict[str, Any], method: str, word: str
) -> tuple[str | None, dict[str, Any], list[str]]:
    settings = {}
    for field in ("chosen", "rejected"):
        column = entry.get(f"field_{field}")
        if column not in (None, field):
            settings[f"{field}_column"] = column
    messages = entry.get("field_messages")
    if messages not in (None, "messages", "conversations", "conversation"):
        settings["messages_column"] = messages
    template = word.partition(".")[0]
    notes = []
    if template not in ("chat_template", "bradley_terry", ""):
        notes.append(f"prompts in the format of the tokenizer's chat template, not in {template}")
    return {"kto": "unpaired"}.get(method, "preference"), settings, notes


def _validation(c: Conversion) -> bool:
    tests = c.get("test_datasets")
    if isinstance(tests, list) and tests:
        names = []
        for entry in tests:
            if isinstance(entry, dict):
                path = str(entry.get("path", ""))
                split = entry.get("split")
                names.append(parts.hub_data(c, "test_datasets", path, entry.get("name"), split))
        found = [name for name in names if name is not None]
        if found:
            c.set("data.validation", found, "test_datasets")
            return True
    return rows.validation(c, "val_set_size")


def _packing(c: Conversion) -> None:
    packed = c.get("sample_packing", "max_packed_sequence_len")
    if "data.streaming" in c.values or c.values.get("data.kind") in ("preference", "unpaired"):
        c.skip("it follows from data.kind", "sample_packing")
        return
    rows.packing(c, on=bool(packed), origin=c.names("sample_packing", "max_packed_sequence_len"))
    if packed is False or "sample_packing" not in c.given:
        if c.get("group_by_length"):
            c.set("data.similar_lengths", True, "group_by_length")
    c.get("group_by_length")
    c.skip("which rows share a sequence", "sample_packing_sequentially")


def _template(c: Conversion) -> None:
    template, text = c.get("chat_template"), c.get("chat_template_jinja")
    templated = c.values.get("data.kind") in ("chat", "preference", "unpaired")
    if isinstance(text, str) and text.endswith((".jinja", ".jinja2", ".j2")):
        c.set("data.chat_template", text, "chat_template_jinja")
    elif text is not None:
        c.lose("chat_template_jinja", "write it into a file, and name that in data.chat_template")
    elif template is not None and not str(template).startswith("tokenizer_default"):
        if templated and template != "jinja":
            parts.template(c, "chat_template")
        else:
            c.skip("rows are no conversations", "chat_template")
    values = c.get("chat_template_kwargs")
    if isinstance(values, dict) and templated:
        c.set("data.chat_template_kwargs", values, "chat_template_kwargs")
    if not is_off(system := c.get("default_system_message")) and templated:
        c.set("data.system", system, "default_system_message")
    c.move("tokenizer_config", "data.tokenizer")


def _tokens(c: Conversion) -> None:
    tokens, special = c.get("tokens"), c.get("special_tokens")
    new = [token for token in tokens if token] if isinstance(tokens, list) else []
    special = special if isinstance(special, dict) else {}
    more = special.get("additional_special_tokens")
    new += more if isinstance(more, list) else []
    if new:
        c.set("model.new_tokens", new, c.names("tokens", "special_tokens"))
        c.note(
            "model.new_tokens", "tokens that the tokenizer has already are no new ones: remove them"
        )
    if isinstance(tokens, dict):
        special = tokens | special
    changed = {key: special[key] for key in ("bos_token", "eos_token") if special.get(key)}
    if changed:
        text = ", ".join(f"{key} {token}" for key, token in changed.items())
        c.note("model.path", f"axolotl: {text}; here the tokenizer's own")


def _schedule(c: Conversion) -> None:
    parts.schedule(c, name="lr_scheduler", default="cosine")
    if "warmup_steps" not in c.given and "warmup_ratio" not in c.given:
        c.values.pop("schedule.warmup_steps", None)
        c.set("schedule.warmup_ratio", 0.03)
        c.differ("schedule.warmup_ratio", "there at most 100 steps")
    least = c.get("cosine_min_lr_ratio")
    if least is not None and c.values["schedule.kind"] == "cosine":
        c.set("schedule.min_ratio", least, "cosine_min_lr_ratio")
    if not is_off(c.get("cosine_constant_lr_ratio")):
        c.lose("cosine_constant_lr_ratio", "the cosine ends with the last step")
    if not is_off(c.get("lr_quadratic_warmup")):
        c.lose("lr_quadratic_warmup", "the warm-up is linear")
    least_rate = c.get("eta_min")
    if isinstance(least_rate, float) and c.values["optimizer.learning_rate"]:
        share = least_rate / float(c.values["optimizer.learning_rate"])
        c.set("schedule.min_ratio", round(share, 6), "eta_min")


def _adapter(c: Conversion) -> None:
    kind = str(c.get("adapter", default="") or "").lower()
    four, eight = c.get("load_in_4bit"), c.get("load_in_8bit")
    whole = ("lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "lora_target_linear")
    if kind not in ("lora", "qlora"):
        if kind:
            c.lose("adapter", f"{kind} is not available")
        c.skip("no adapter is trained", *whole, "lora_model_dir", "lora_modules_to_save")
        if four or eight:
            c.skip("weights that are trained are not quantized", "load_in_4bit", "load_in_8bit")
        return
    if c.get("gptq"):
        c.lose("gptq", "weights in GPTQ are not available; give the model that they were made of")
    targets, linear = c.get("lora_target_modules"), c.get("lora_target_linear")
    parts.adapter(
        c,
        rank=8,
        alpha=16,
        dropout=0.0,
        targets=None if linear or is_off(targets) else targets,
        target_names=("lora_target_modules", "lora_target_linear"),
    )
    experts = c.values.get("lora.target_parameters")
    if experts is not None and "lora.target_modules" not in c.values:
        c.set("lora.target_modules", [], "lora_target_modules")
    if isinstance(experts, str):
        c.values["lora.target_parameters"] = [experts]
    parts.quantization(
        c,
        four=four or kind == "qlora",
        eight=eight,
        origin=c.names("load_in_4bit" if four else "load_in_8bit") or "adapter",
    )
    settings = c.get("peft")
    if isinstance(settings, dict) and settings.get("loftq_config"):
        c.lose("peft", "LoftQ's initial weights are not available")


def _plugins(c: Conversion) -> None:
    plugins = c.get("plugins")
    for plugin in plugins if isinstance(plugins, list) else []:
        module = str(plugin).split(".")[-2] if "." in str(plugin) else str(plugin)
        if module in _SPEED_PLUGINS:
            continue
        if module == "swanlab":
            c.skip("metrics go to metrics.jsonl, wandb or TensorBoard", "plugins")
        else:
            c.lose("plugins", f"{module} is not available")
    if plugins and "plugins" not in c.lost:
        c.skip("speed and memory only", "plugins")
    for name in ("diffusion", "llmcompressor"):
        if name in c.given:
            c.lose(name, "the plugin is not available")
    fused = c.names(
        "cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy"
    )
    if fused:
        c.get("cut_cross_entropy", "liger_fused_linear_cross_entropy", "chunked_cross_entropy")
        c.set("model.chunked_loss", True, fused)
