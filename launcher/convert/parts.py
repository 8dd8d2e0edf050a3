"""Conversions that several tools share: optimizer, schedule, precision, strategy, adapters, hub."""

from __future__ import annotations

import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

from launcher.convert.conversion import Conversion, is_off
from launcher.recipe.template_names import template_name

_ADAMW = "adamw adam adamw_torch adamw_torch_fused adamw_hf adamw_apex_fused adamw_torch_xla"
_ADAMW += " adamw_anyprecision optimi_adamw flash_adamw paged_adamw paged_adamw_32bit"
_INT8 = "adamw_8bit adamw_bnb_8bit adamw_torch_8bit ao_adamw_8bit paged_adamw_8bit ao_adamw_fp8"
_INT4 = "adamw_torch_4bit ao_adamw_4bit"
OPTIMIZERS: dict[str, tuple[dict[str, Any], str]] = {
    **dict.fromkeys(_ADAMW.split(), ({"optimizer.name": "adamw"}, "")),
    **dict.fromkeys(
        _INT8.split(), ({"optimizer.name": "adamw", "optimizer.state_dtype": "int8"}, "")
    ),
    **dict.fromkeys(
        _INT4.split(),
        (
            {"optimizer.name": "adamw", "optimizer.state_dtype": "int8"},
            "there are no states in 4 bits; those in 8 bits are more exact, and twice as large",
        ),
    ),
    "sgd": ({"optimizer.name": "sgd", "optimizer.momentum": 0.0}, ""),
    "adafactor": (
        {"optimizer.name": "adafactor"},
        "here the rate is relative to the size of a parameter; choose the learning rate anew",
    ),
    "muon": (
        {"optimizer.name": "muon"},
        "here matrices of the blocks only; adamw with the same learning rate for the rest",
    ),
}
"""By the other tools' names: keys of the recipe, and what differs."""

_TO_ZERO = {"schedule.min_ratio": 0.0}
SCHEDULES: dict[str, dict[str, Any]] = {
    "cosine": {"schedule.kind": "cosine", **_TO_ZERO},
    "linear": {"schedule.kind": "linear", **_TO_ZERO},
    "constant": {"schedule.kind": "constant"},
    "constant_with_warmup": {"schedule.kind": "constant"},
    "cosine_with_min_lr": {"schedule.kind": "cosine", **_TO_ZERO},
    "cosine_warmup_with_min_lr": {"schedule.kind": "cosine", **_TO_ZERO},
    "warmup_stable_decay": {"schedule.kind": "wsd", **_TO_ZERO},
}
"""By the other tools' names."""

OWN_TEMPLATE = (
    "here the tokenizer's own chat template; data.chat_template takes another, a name or a file"
)
_SAME_TEMPLATES = {
    "axolotl": "chatml deepseek_v3 gemma gemma3 llama3 mistral_v1 mistral_v2v3 mistral_v3_tekken "
    "mistral_v7_tekken phi_3 phi_35 qwen3 qwen_25",
    "LLaMA-Factory": "chatml deepseek3 gemma gemma2 gemma3 gemma3n llama2 llama3 ministral mistral "
    "mistral_small phi phi4 qwen qwen3 qwen3_nothink smollm yi zephyr",
}
"""The other tools' names of chat templates that have a name here, too."""
_NEAR_TEMPLATES = {
    ("axolotl", "mistral_v7_tekken"): "here without its default system prompt",
    ("axolotl", "phi_3"): "here without the bos_token in front",
    ("LLaMA-Factory", "zephyr"): "here with a line break after each turn, as the model has it, and "
    "without its default system prompt",
}
"""How those of them differ that do."""
_CROSS_ATTENTION = re.compile(r"llama-?3\.2-(11|90)b-vision|mllama")
"""Models that are refused with images."""
_NOT_WITH_IMAGES = (
    "strategy.context_parallel_size",
    "strategy.tensor_parallel_size",
    "strategy.expert_parallel_size",
    "data.streaming",
)
_SOUND = re.compile(r"voxtral|audio|qwen2\.5-omni|qwen3-omni|whisper")
_SHARED_SIZES = (
    *("context_parallel_size", "sequence_parallel_degree", "cp_size", "sp_size"),
    *("tensor_parallel_size", "tensor_model_parallel_size", "tp_size", "tensor_parallel_dim"),
    *("pipeline_parallel_size", "pipeline_model_parallel_size", "pp_size"),
)
_LAYERS = (
    *("q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "out_proj"),
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),
    *("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b"),
    *("query_key_value", "dense", "c_attn", "c_proj", "c_fc", "fc1", "fc2", "Wqkv", "Wi", "Wo"),
)
_PARTS = ("self_attn", "attn", "attention", "cross_attn", "linear_attn", "mlp", "feed_forward")
_BEFORE = (
    *("model.layers", "model.language_model.layers", "language_model.model.layers", "layers"),
    *("transformer.h", "gpt_neox.layers"),
)
_NUMBERS = {0, 1, 2, 7, 10, 25}
"""Names of linear layers of language models, and what stands before them; some layers' numbers."""
REFERENCE_POINT = "the reference point is 0 here; there it is estimated from other rows"
_FIRST_STEP = "the first step has a part of the peak here, and a rate of 0 there"


def run_length(c: Conversion, *, epochs: str, default_epochs: float = 3) -> None:
    """run.epochs or run.max_steps. epochs: the tool's name for epochs."""
    steps, passes = c.get("max_steps"), c.get(epochs, default=default_epochs)
    if isinstance(steps, int) and steps > 0:
        note = f"{epochs} has no effect there either" if epochs in c.given else ""
        c.set("run.max_steps", steps, "max_steps", note)
        return
    whole = max(1, round(float(passes))) if _is_number(passes) else 1
    c.set("run.epochs", whole, epochs if epochs in c.given else "")
    if _is_number(passes) and whole != float(passes):
        c.lose(epochs, f"{passes} passes; run.epochs is a whole number, and run.max_steps any")


def batch(c: Conversion, *, micro: str, accumulation: str, default: int) -> None:
    """Both batch sizes, from the sizes per device, accumulation and the number of ranks."""
    size, steps = c.get(micro, default=default), c.get(accumulation, default=1)
    size = size if isinstance(size, int) and size > 0 else default
    steps = steps if isinstance(steps, int) and steps > 0 else 1
    origin = c.names(micro, accumulation)
    ranks = c.ranks // _ranks_of_a_sequence(c) or 1
    groups = "GPUs" if ranks == c.ranks else "groups of GPUs that share sequences"
    c.set(
        "batch.global_batch_size",
        size * steps * ranks,
        origin,
        f"{size} ({_unit(c)} of a GPU) x {steps} (accumulation) x {ranks} ({groups}); here it stays "
        "the same on any number of GPUs",
    )
    c.set("batch.micro_batch_size", size, micro if micro in c.given else "")


def _unit(c: Conversion) -> str:
    units = {"preference": "pairs", "unpaired": "answers"}
    return units.get(str(c.values.get("data.kind")), "sequences")


def _ranks_of_a_sequence(c: Conversion) -> int:
    """The product of the parallel sizes whose ranks train on the same sequences."""
    nested = c.given.get("parallelism_config")
    sizes = dict(nested) if isinstance(nested, dict) else {}
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in sizes.items()}
    sizes |= {name: c.given[name] for name in c.given if name in _SHARED_SIZES}
    found = [size for name, size in sizes.items() if name in _SHARED_SIZES]
    return math.prod(size for size in found if isinstance(size, int) and size > 0)


def optimizer(c: Conversion, *, name: str, value: object = None) -> None:
    """The optimizer and its settings, with transformers' defaults. name: the tool's key. value: its
    optimizer, if that is a part of the key's value."""
    given = str(value or c.get(name, default="adamw_torch_fused")).lower()
    origin = name if name in c.given else ""
    keys, note = OPTIMIZERS.get(given, ({"optimizer.name": "adamw"}, ""))
    if given not in OPTIMIZERS:
        c.lose(
            name, f"{given} is not available; adamw takes its place, with the same learning rate"
        )
    for key, value in keys.items():
        c.set(key, value, origin, note if key == "optimizer.name" else "")
    c.move("learning_rate", "optimizer.learning_rate", default=5e-5)
    c.move("weight_decay", "optimizer.weight_decay", default=0.0)
    c.move("max_grad_norm", "optimizer.max_grad_norm")
    if is_off(c.given.get("max_grad_norm")) and "max_grad_norm" in c.given:
        c.set("optimizer.max_grad_norm", None, "max_grad_norm")
    betas = [c.get("adam_beta1", default=0.9), c.get("adam_beta2", default=0.999)]
    if keys["optimizer.name"] in ("adamw", "muon"):
        c.set("optimizer.betas", betas, c.names("adam_beta1", "adam_beta2"))
        for key in ("adam_epsilon", "adam_eps"):
            c.move(key, "optimizer.eps")


def schedule(c: Conversion, *, name: str, default: str) -> None:
    """The schedule and its warm-up, which transformers gives as steps or as a share of the run."""
    kind = str(c.get(name, default=default)).lower()
    keys = SCHEDULES.get(kind, {"schedule.kind": "cosine", **_TO_ZERO})
    if kind not in SCHEDULES:
        c.lose(name, f"{kind} is not available; cosine takes its place")
    for key, value in keys.items():
        c.set(key, value, name if name in c.given else "")
    settings = c.get("lr_scheduler_kwargs")
    settings = settings if isinstance(settings, dict) else {}
    ratio = settings.get("min_lr_rate")
    if ratio is not None:
        c.set("schedule.min_ratio", ratio, "lr_scheduler_kwargs")
    elif isinstance(least := settings.get("min_lr"), float) and c.values["optimizer.learning_rate"]:
        c.set(
            "schedule.min_ratio", least / c.values["optimizer.learning_rate"], "lr_scheduler_kwargs"
        )
    decay = settings.get("num_decay_steps")
    if decay is not None and keys["schedule.kind"] == "wsd":
        c.set("schedule.decay_steps", decay, "lr_scheduler_kwargs")
    for other in {*settings} - {"min_lr", "min_lr_rate", "num_decay_steps"}:
        c.lose("lr_scheduler_kwargs", f"{other}: {settings[other]} has no equal")
    steps, share = c.get("warmup_steps"), c.get("warmup_ratio")
    origin = "warmup_steps" if steps else "warmup_ratio"
    if kind == "constant" and kind in SCHEDULES:  # transformers ignores the warm-up
        c.set("schedule.warmup_steps", 0, c.names("warmup_steps", "warmup_ratio") or name)
    elif _is_number(steps) and float(steps) >= 1:
        c.set("schedule.warmup_steps", int(steps), origin, _FIRST_STEP)
    elif _is_number(value := steps or share) and float(value) > 0:
        c.set("schedule.warmup_ratio", float(value), origin, _FIRST_STEP)
    else:
        c.set("schedule.warmup_steps", 0, c.names("warmup_steps", "warmup_ratio"))


def precision(c: Conversion, *, bf16: object, fp16: object, origin: str) -> None:
    """The dtype of compute."""
    if fp16 and not bf16:
        c.set("strategy.mixed_precision.param_dtype", "float16", origin)
    elif bf16:
        c.set(
            "strategy.mixed_precision.param_dtype",
            "bfloat16",
            origin,
            "weights that are trained, their gradients and the optimizer's states are float32 here",
        )
    else:
        c.set("strategy.mixed_precision", None, origin)
    eight = c.get("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")
    if not is_off(eight):
        note = "here a scale for each row"
        c.set("strategy.mixed_precision.float8", "rowwise", "fp8", note)
    fast = c.get("tf32")
    if fast is not None:
        c.set("run.float32_matmul", "high" if fast else "highest", "tf32")


def checkpointing(c: Conversion, *, default: bool = False) -> None:
    """Activation checkpointing of transformers."""
    given = c.get("gradient_checkpointing", "activation_checkpointing", default=default)
    origin = c.names("gradient_checkpointing", "activation_checkpointing")
    offload = c.get("activation_offloading")
    if not is_off(given) or not is_off(offload):
        c.set("activation_checkpointing.mode", "full", origin or c.names("activation_offloading"))
        if "offload" in str(given) or not is_off(offload):
            names = c.names("activation_offloading") or origin
            c.set("activation_checkpointing.offload_to_cpu", True, names)


def strategy(c: Conversion) -> None:
    """DDP, FSDP and DeepSpeed, in the keys of transformers and of accelerate's config."""
    sharding = c.get("fsdp_config")
    sharding = dict(sharding) if isinstance(sharding, dict) else {}
    flat = [name for name in c.given if name.startswith("fsdp_") and name != "fsdp_config"]
    sharding |= {name: c.get(name) for name in flat}
    sharding = {name.removeprefix("fsdp_"): value for name, value in sharding.items()}
    deepspeed = _deepspeed(c)
    distributed = str(c.get("distributed_type", default="")).upper()
    words = c.get("fsdp")
    words = words.split() if isinstance(words, str) else words
    words = [str(word).lower() for word in words] if isinstance(words, list) else []
    origin = c.names("deepspeed", "deepspeed_config", "fsdp", "fsdp_config", "dist_config", *flat)
    c.get("fsdp", "deepspeed", "deepspeed_config", "distributed_type")
    if deepspeed is not None:
        _zero(c, deepspeed, origin)
    elif words or sharding or distributed == "FSDP":
        _fsdp(c, sharding, words, origin or c.names("distributed_type"))
    else:
        note = "DDP there; the losses are the same with each strategy, and auto takes what fits"
        c.set("strategy.kind", "auto", c.names("distributed_type"), note)


def _fsdp(c: Conversion, sharding: dict[str, Any], words: list[str], origin: str) -> None:
    kind = str(sharding.get("sharding_strategy") or sharding.get("reshard_after_forward") or "")
    kind = (kind or " ".join(words)).lower()
    c.set("strategy.kind", "ddp" if "no_shard" in kind else "fsdp", origin)
    if kind in ("false", "shard_grad_op", "2") or "shard_grad_op" in words:
        c.set("strategy.reshard_after_forward", False, origin)
    if "hybrid" in kind:
        c.note("strategy.kind", "hybrid sharding: set strategy.replicate to the number of nodes")
    if sharding.get("offload_params") or "offload" in words:
        c.set("strategy.cpu_offload.what", "all", origin)
    if sharding.get("activation_checkpointing"):
        c.set("activation_checkpointing.mode", "full", origin)


def _zero(c: Conversion, config: dict[str, Any], origin: str) -> None:
    zero = config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else config
    stage = zero.get("stage", zero.get("zero_stage", 0))
    parameters = zero.get("offload_param", zero.get("offload_param_device"))
    states = zero.get("offload_optimizer", zero.get("offload_optimizer_device"))
    parameters, states = (
        each.get("device", "cpu") if isinstance(each, dict) else each
        for each in (parameters, states)
    )
    if stage in (0, 1):
        c.set("strategy.kind", "ddp", origin, f"ZeRO-{stage}")
        if stage == 1 and c.ranks > 1:
            c.set("strategy.shard_optimizer", True, origin)
    else:
        c.set("strategy.kind", "fsdp", origin, f"ZeRO-{stage}")
        if stage == 2:
            c.set("strategy.reshard_after_forward", False, origin)
    if not is_off(parameters):
        c.set("strategy.kind", "fsdp", origin)
        c.set("strategy.cpu_offload.what", "all", origin)
    elif not is_off(states):
        c.set("strategy.kind", "fsdp", origin)
        c.set("strategy.cpu_offload.what", "optimizer", origin)


def _deepspeed(c: Conversion) -> dict[str, Any] | None:
    """The settings of DeepSpeed; where its file is not here, by the file's name."""
    given = c.get("deepspeed", "deepspeed_config")
    if isinstance(given, dict) or is_off(given):
        return given or None
    for folder in (Path(), c.folder, *c.folder.parents):
        file = folder / str(given)
        if file.is_file():
            try:
                config = json.loads(file.read_text(encoding="utf-8"))
            except ValueError:
                break
            return config if isinstance(config, dict) else {}
    name = Path(str(given)).name.lower()
    stage = re.search(r"(?:zero|z)[-_]?([0-3])", name)
    offload = "cpu" if "offload" in name else None
    only_states = offload is not None and stage is not None and stage[1] == "2"
    return {
        "stage": int(stage[1]) if stage else 3,
        "offload_param": None if only_states else offload,
        "offload_optimizer": offload,
    }


def parallel_sizes(c: Conversion) -> None:
    """Context, tensor and expert parallelism, and copies."""
    sizes = {
        "strategy.context_parallel_size": ("context_parallel_size", "sequence_parallel_degree"),
        "strategy.tensor_parallel_size": ("tensor_parallel_size", "tensor_model_parallel_size"),
        "strategy.expert_parallel_size": ("expert_parallel_size", "expert_model_parallel_size"),
        "strategy.replicate": ("dp_replicate_size",),
    }
    for key, names in sizes.items():
        size = c.get(*names)
        if isinstance(size, int) and size > 1:
            c.set(key, size, c.names(*names))
            c.set("strategy.kind", "fsdp", c.names(*names))
    c.skip("all ranks that are left shard the model", "dp_shard_size", "heads_k_stride", "cp_mode")


def attention(c: Conversion, *names: str) -> None:
    """The kernels of attention, which do not change what is trained."""
    given = c.get(*names)
    if given is None:
        return
    name = str(given).lower()
    exact = {"sdpa": "sdpa", "eager": "eager"}.get(name)
    if exact is not None:
        c.set("model.attention", exact, c.names(*names))
    else:
        c.skip("attention: torch chooses among its kernels; model.attention names another", *names)


def adapter(
    c: Conversion,
    *,
    rank: int,
    alpha: float | None,
    dropout: float,
    targets: object,
    target_names: tuple[str, ...],
) -> None:
    """Keys of LoRA. Values are defaults of the tool; targets: names, or None for all linear layers."""
    size = c.get("lora_r", "lora_rank", "r", default=rank)
    path = c.get("lora_model_dir", "adapter_name_or_path")
    origin = c.names("lora_r", "lora_rank", "r")
    factor = c.get("lora_alpha", default=alpha if alpha is not None else 2 * size)
    drop = c.get("lora_dropout", default=dropout)
    if not is_off(path):
        first = str(path).split(",")[0].strip()
        note = "rank, alpha and targets are those of the adapter"
        c.set("lora.path", first, c.names("lora_model_dir", "adapter_name_or_path"), note)
        c.skip("they are those of the adapter", "lora_r", "lora_rank", "r", "lora_alpha")
        c.skip("they are those of the adapter", *target_names)
    else:
        c.set("lora.rank", size, origin)
        c.set("lora.alpha", factor, c.names("lora_alpha"))
        if targets is not None:
            names = _layer_names(c, targets, target_names)
            if names:
                c.set("lora.target_modules", names, c.names(*target_names))
        elif c.names(*target_names):
            c.set(
                "lora.target_modules",
                None,
                c.names(*target_names),
                "all linear layers of the blocks; of experts too, where they hold most parameters",
            )
        c.move("lora_target_parameters", "lora.target_parameters")
        for name in ("use_rslora", "peft_use_rslora"):
            c.move(name, "lora.rank_stabilized")
        for name in ("use_dora", "peft_use_dora"):
            c.move(name, "lora.dora")
        saved = c.get("lora_modules_to_save", "additional_target")
        if not is_off(saved):
            saved = saved.split(",") if isinstance(saved, str) else saved
            c.set(
                "lora.modules_to_save",
                [str(name).strip() for name in saved],
                c.names("lora_modules_to_save", "additional_target"),
            )
    if drop:
        c.set("lora.dropout", drop, c.names("lora_dropout"))
    c.move("loraplus_lr_ratio", "lora.b_ratio")
    c.skip("the rate of embeddings is that of all else", "loraplus_lr_embedding")


def _layer_names(c: Conversion, targets: object, names: tuple[str, ...]) -> list[str]:
    """Names of layers that a list, or a regular expression, stands for. Of an expression these are
    the usual names that it matches in each of the layers of a model, as peft matches them."""
    if isinstance(targets, list):
        return [str(target) for target in targets]
    text = str(targets)
    if re.fullmatch(r"[\w.,\s-]+", text):
        return [part.strip() for part in text.split(",") if part.strip()]
    matched = _matched_layers(text)
    if not matched or any(numbers != _NUMBERS for numbers in matched.values()):
        why = "of some layers only" if matched else "that matches no usual name of a layer"
        what = f"{text} is a regular expression {why}; all linear layers are adapted"
        c.lose(c.names(*names) or "lora_target", what)
        return []
    note = (
        "the layers that the regular expression matches; only those of the text model are adapted"
    )
    c.note("lora.target_modules", note)
    return list(matched)


def _matched_layers(text: str) -> dict[str, set[int]]:
    """For each usual name that a regular expression matches, the numbers of its layers."""
    try:
        expression = re.compile(text)
    except re.error:
        return {}
    found: dict[str, set[int]] = {}
    for name, number, part, before in itertools.product(_LAYERS, _NUMBERS, _PARTS, _BEFORE):
        if expression.fullmatch(f"{before}.{number}.{part}.{name}"):
            found.setdefault(name, set()).add(number)
    return found


def quantization(c: Conversion, *, four: object, eight: object, origin: str) -> None:
    """Base weights in 4 bits; those in 8 bits stay in 16."""
    if four:
        c.set("lora.quantize", "nf4", origin)
    elif eight:
        if "lora.rank" not in c.values:
            c.lose(origin, "weights in 8 bits are not available")
        else:
            what = "the base weights are in bfloat16 here: more memory, nothing is rounded"
            c.differ("lora.rank", what)


def template(c: Conversion, key: str) -> None:
    """The name of a chat template. With images, and for names that are not known here, the tokenizer's
    own is used, which is the same format if the model has the name's family and number."""
    name = str(c.given[key])
    shows_images = c.shows_images or "processor_type" in c.given
    known = template_name(name) if name in _SAME_TEMPLATES[c.tool].split() else None
    if known is not None and not shows_images and "data.kind" not in c.values:
        what = f"{key}: {name}; add chat_template: {known} to this section, with the data"
        c.note("data.train", f"{c.tool}: {what}")
        return
    if known is not None and not shows_images:
        c.set("data.chat_template", known, key)
        if (difference := _NEAR_TEMPLATES.get((c.tool, name))) is not None:
            c.differ("data.chat_template", difference)
        return
    family = re.match(r"([a-z]+)[_-]?(\d?)", name.lower())
    model = str(c.values.get("model.path", "")).lower()
    found = re.findall(rf"{family[1]}[a-z]*[-_]?v?(\d?)", model) if family is not None else []
    numbers = [number for number in found if number]
    if family and found and (not family[2] or not numbers or family[2] in numbers):
        c.note("data.kind", f"{c.tool}: {key}: {name}; {OWN_TEMPLATE}")
    else:
        c.lose(key, f"{name}: {OWN_TEMPLATE}")


def hub_data(
    c: Conversion, name: str, path: str, config: object = None, split: object = None
) -> str | None:
    """A file or folder as it is, or `owner/name/config:split` of the hub; None: it cannot be named.

    name: the tool's key, for what is lost.
    """
    if "://" in path:
        c.lose(name, f"{path}: remote storage is not read; copy the data first")
        return None
    local = (Path(path), c.folder / path)
    is_file = any(each.exists() for each in local) or path.startswith(("/", "./", "../", "~"))
    if is_file or Path(path).suffix in (".json", ".jsonl", ".parquet", ".csv", ".txt", ".arrow"):
        if split not in (None, "train"):
            c.lose(name, f"split {split} of a file; data.limit takes the first rows")
        found = next((each for each in local if each.exists()), local[0])
        return str(found)
    if path.count("/") == 2 and is_off(config):
        path, _, config = path.rpartition("/")
    if path.count("/") != 1:
        c.lose(
            name, f"{path}: neither a file here nor a name of the hub with its owner, owner/name"
        )
        return None
    text = path if is_off(config) else f"{path}/{config}"
    text = re.sub(r"[^\w./@+-]", "_", text)
    return text if is_off(split) or split == "train" else f"{text}:{split}"


def _regularly(
    c: Conversion, section: str, steps: str, policies: tuple[str, ...], per_epoch: str
) -> bool:
    """Sets every_steps or every_epochs of a section from the names of the tool's keys: steps, or below
    1 a share of the run; epoch, steps or no; and times per epoch. Returns whether it comes at all."""
    number, times = c.get(steps), c.get(per_epoch)
    policy = str(c.get(*policies, default="")).lower()
    most, epochs = c.values.get("run.max_steps"), c.values.get("run.epochs")
    if _is_number(times) and float(times) > 0:
        if isinstance(most, int):  # axolotl divides the steps of the run by its epochs
            passes = float(c.given.get("num_epochs", 1))
            every = math.ceil(most / (float(times) * passes))
            c.set(f"{section}.every_steps", every, per_epoch)
        else:
            c.set(f"{section}.every_epochs", 1 / float(times), per_epoch)
    elif policy == "epoch" and "data.streaming" in c.values:
        return False
    elif policy == "epoch":
        c.set(f"{section}.every_epochs", 1.0, c.names(*policies))
    elif policy == "no":
        return False
    elif _is_number(number) and float(number) >= 1:
        c.set(f"{section}.every_steps", int(float(number)), steps)
    elif _is_number(number) and float(number) > 0:
        if isinstance(most, int):
            c.set(f"{section}.every_steps", math.ceil(most * float(number)), steps)
        else:
            c.set(f"{section}.every_epochs", float(number) * (epochs or 1), steps)
    else:
        return False
    return True


def saving(c: Conversion, *, loads_best: bool = False) -> None:
    """Checkpoints of transformers' trainer. loads_best: whether it loads the best one at the end, where
    the config does not say it."""
    given = c.names("save_steps", "save_strategy", "saves_per_epoch")
    if c.tool == "axolotl" and not given and "data.streaming" not in c.values:
        c.set("checkpoint.every_epochs", 1.0)
    elif not _regularly(c, "checkpoint", "save_steps", ("save_strategy",), "saves_per_epoch"):
        why = "checkpoints are for a resume; one comes at the end"
        c.skip(why, "save_strategy", "saves_per_epoch", "save_steps")
    if isinstance(limit := c.get("save_total_limit"), int) and limit > 0:
        c.set("checkpoint.keep_last", limit, "save_total_limit")
    best = c.get("load_best_model_at_end", default=loads_best)
    metric = c.get("metric_for_best_model")
    c.get("greater_is_better")
    c.set("checkpoint.export", "at_end", c.names("output_dir"))
    evaluates = "data.validation" in c.values or "data.validation_split" in c.values
    if evaluates and not (is_off(best) and is_off(metric)):
        names = c.names("load_best_model_at_end", "metric_for_best_model")
        c.set("checkpoint.keep_best", "eval_loss", names)
        if metric not in (None, "loss", "eval_loss"):
            c.lose("metric_for_best_model", f"{metric}: the best checkpoint is that of eval_loss")
        if not is_off(best):
            c.set("checkpoint.export", "best", c.names("load_best_model_at_end"))
    else:
        why = "there are no data for evaluations"
        c.skip(why, "load_best_model_at_end", "metric_for_best_model")
    resume = c.get("resume_from_checkpoint")
    if isinstance(resume, str) and resume.lower() not in ("true", "false"):
        c.lose("resume_from_checkpoint", "checkpoints of other tools cannot be resumed")
    else:
        c.skip("the same command resumes", "resume_from_checkpoint", "auto_resume_from_checkpoints")


def evaluating(c: Conversion, *, has_data: bool) -> None:
    """Evaluations of transformers' trainer."""
    policies = ("eval_strategy", "evaluation_strategy")
    names = (*policies, "evals_per_epoch", "eval_delay", "eval_steps")
    if not has_data:
        c.skip("there are no data for evaluations", *names)
    elif _regularly(c, "evaluation", "eval_steps", policies, "evals_per_epoch"):
        if c.tool == "axolotl":
            c.set("evaluation.at_start", True)
        if not is_off(c.get("eval_delay")):
            c.lose("eval_delay", "evaluations begin with the first part of the run")
    else:
        c.set("evaluation.every_steps", None, c.names(*names), "one evaluation comes at the end")
    patience = c.get("early_stopping_patience", "early_stopping_steps")
    origin = c.names("early_stopping_patience", "early_stopping_steps")
    if has_data and not is_off(patience):
        c.set("evaluation.stop_after", patience, origin)
    else:
        c.skip("there are no data for evaluations", *origin.split(", "))
    c.skip("the micro-batch of training", "per_device_eval_batch_size", "eval_batch_size")
    c.get("dataloader_drop_last")
    c.skip("evaluation sees the batches of validation data", "eval_accumulation_steps")


def logging(c: Conversion) -> None:
    """wandb and TensorBoard. Other places are named with the rest."""
    steps = c.get("logging_steps")
    if isinstance(steps, int) and steps > 0:
        c.set("logging.every_steps", steps, "logging_steps")
    places = c.get("report_to")
    places = [places] if isinstance(places, str) else places or []
    project, wanted = c.get("wandb_project"), c.get("use_wandb")
    c.get("wandb_entity", "wandb_mode", "run_name", "wandb_name")
    if project or wanted or "wandb" in places:
        origin = c.names("wandb_project", "use_wandb", "report_to")
        c.set("logging.wandb.project", project or "launcher", origin)
        c.move("wandb_entity", "logging.wandb.entity")
        if c.get("wandb_mode") == "offline":
            c.set("logging.wandb.mode", "offline", "wandb_mode")
    if c.get("use_tensorboard") or "tensorboard" in places:
        c.set("logging.tensorboard", True, c.names("use_tensorboard", "report_to"))
    elif places and "report_to" not in str(c.origins.get("logging.wandb.project")):
        c.skip("metrics go to metrics.jsonl, wandb or TensorBoard", "report_to")


def pictures(
    c: Conversion, name: str, *, train: str, origin: str = "", pixels: object = None
) -> None:
    """The section `images`, after adapters. name: the tool's key that shows that rows have images.

    train: what the tool trains beside the text model, as images.train. origin: the keys that say it.
    pixels: the pixels of the largest image, of the key image_max_pixels if it is given.
    """
    model = str(c.values.get("model.path", "")).lower()
    if _CROSS_ATTENTION.search(model):
        c.lose(name, "this model attends to images in layers of its own, which is not trained here")
        return
    if _SOUND.search(model):
        c.lose(name, "video and audio are not trained on")
        return
    c.set("images.train", train, origin or name)
    for key in _NOT_WITH_IMAGES:
        if key in c.values:
            lost = c.origins[key].partition(": ")[2].partition(",")[0] or key
            c.lose(lost, f"{key}: {c.values.pop(key)}: not available with images")
    if "lora.rank" in c.values or "lora.path" in c.values:
        c.set("images.train", "none", origin or name)
        note = "adapters are in the text model only; lora.modules_to_save names the projector, to "
        c.note("images.train", f"{note}train it whole")
        if train != "none":
            c.lose(origin or name, "the image tower and its projector get no adapters")
    if isinstance(pixels, int) and "qwen" in model:
        note = "the limit of the processor, and of the exported one"
        c.set("images.max_pixels", pixels, c.names("image_max_pixels"), note)
    else:
        c.skip("the processor of this model scales images to its own size", "image_max_pixels")


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        float(str(value))
    except ValueError:
        return False
    return True
