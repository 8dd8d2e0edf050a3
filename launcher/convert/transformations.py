"""What a row of a data file (`tools/*.yaml`) names to become of a key that a table cannot say.

A row names a function of VALUES as `as`: it gets the value of the keys and returns another one, or None
if it has recorded what is lost. A function of ROWS, as `by`, decides about the keys alone; it may take
other fields of the row. A function of LATER, as `then`, follows when the row has set its key.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from launcher.convert.conversion import Conversion, is_off
from launcher.recipe.template_names import template_name
from launcher.recipe.yaml_text import NotYamlError, parse_yaml
from launcher.sources.finding import first_row
from launcher.sources.hub import is_hub_id
from launcher.sources.layouts import TOKEN_KINDS, guess

Names = tuple[str, ...]
Function = TypeVar("Function", bound=Callable[..., Any])
VALUES: dict[str, Callable[..., Any]] = {}
ROWS: dict[str, Callable[..., Any]] = {}
LATER: dict[str, Callable[..., Any]] = {}
_FIRST_STEP = "the first step has a part of the peak here, and a rate of 0 there"
_OWN_TEMPLATE = (
    "here the tokenizer's own chat template; data.chat_template takes another, a name or a file"
)
_CROSS_ATTENTION = re.compile(r"llama-?3\.2-(11|90)b-vision|mllama")
"""Models that are refused with images."""
_SOUND = re.compile(r"voxtral|audio|qwen2\.5-omni|qwen3-omni|whisper")
_NOT_WITH_IMAGES = (
    "strategy.context_parallel_size",
    "strategy.tensor_parallel_size",
    "strategy.expert_parallel_size",
    "data.streaming",
)
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
_OFFLOADS = ("offload_param", "offload_optimizer")
_FUSED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
"""Layers of Phi-3 and Phi-4 that hold several of torchtune's."""


def _in(functions: dict[str, Callable[..., Any]]) -> Callable[[Function], Function]:
    """Adds a function to those that a row may name."""

    def add(function: Function) -> Function:
        functions[function.__name__] = function
        return function

    return add


@_in(VALUES)
def whole_number(c: Conversion, names: Names, value: Any) -> int:
    """Passes over the data, rounded; a part of a pass is lost."""
    if not _is_number(value):
        return 1
    whole = max(1, round(float(value)))
    if whole != float(value):
        c.lose(names[0], f"{value} passes; run.epochs is a whole number, and run.max_steps any")
    return whole


@_in(VALUES)
def share_of_peak(c: Conversion, _: Names, value: Any) -> float | None:
    """A learning rate as a share of the peak, `optimizer.learning_rate`."""
    peak = c.values.get("optimizer.learning_rate")
    return round(value / float(peak), 6) if isinstance(value, float) and peak else None


@_in(VALUES)
def twice_the_rank(c: Conversion, _: Names, value: Any) -> Any:
    """The value, or twice the rank of the adapters."""
    return value if value is not None else 2 * c.values["lora.rank"]


@_in(VALUES)
def only_one(_c: Conversion, _: Names, value: Any) -> Any:
    """The value of a list of one."""
    return value[0] if isinstance(value, list) and len(value) == 1 else value


@_in(VALUES)
def first(_c: Conversion, _: Names, value: Any) -> Any:
    """The first of a list, or of names with commas between them; None: of a value that is off."""
    value = value.split(",")[0].strip() if isinstance(value, str) else value
    value = value[0] if isinstance(value, list) and value else value
    return None if is_off(value) else value


@_in(VALUES)
def texts(_c: Conversion, _: Names, value: Any) -> list[str] | None:
    """A list of names, or names with commas between them; None: of a value that is off."""
    if is_off(value):
        return None
    listed = value if isinstance(value, list) else str(value).split(",")
    return [str(each).strip() for each in listed]


@_in(VALUES)
def layers(c: Conversion, names: Names, value: Any) -> list[str] | None:
    """Names of layers that a list, or a regular expression, stands for. Of an expression these are
    the usual names that it matches in each of the layers of a model, as peft matches them."""
    if isinstance(value, list) or value is None:
        return [str(target) for target in value] if value is not None else None
    text = str(value)
    if re.fullmatch(r"[\w.,\s-]+", text):
        return [part.strip() for part in text.split(",") if part.strip()] or None
    matched = _matched_layers(text)
    if not matched or any(numbers != _NUMBERS for numbers in matched.values()):
        why = "of some layers only" if matched else "that matches no usual name of a layer"
        what = f"{text} is a regular expression {why}; all linear layers are adapted"
        c.lose(names[0], what)
        return None
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


@_in(VALUES)
def tokens_of_file(c: Conversion, names: Names, value: Any) -> list[str] | None:
    """The keys of a YAML file: new tokens with their descriptions."""
    found = _yaml_of(c, str(value))
    if isinstance(found, dict):
        return list(found)
    if value is not None:
        c.lose(names[0], f"{value} cannot be read; name the tokens in model.new_tokens")
    return None


@_in(VALUES)
def added_tokens(c: Conversion, names: Names, value: Any) -> list[str] | None:
    """New tokens of axolotl: a list `tokens`, and `special_tokens.additional_special_tokens`. Those
    that replace the tokenizer's own are noted."""
    special = c.at("special_tokens")
    special = special if isinstance(special, dict) else {}
    listed = (c.at("tokens"), special.get("additional_special_tokens"))
    changed = (value if isinstance(value, dict) else {}) | special
    own = {key: changed[key] for key in ("bos_token", "eos_token") if changed.get(key)}
    if own:
        text = ", ".join(f"{key} {token}" for key, token in own.items())
        c.note("model.path", f"{c.tool}: {text}; here the tokenizer's own")
    new = [token for each in listed if isinstance(each, list) for token in each if token]
    return new or None


@_in(VALUES)
def model_changes(c: Conversion, names: Names, value: Any) -> dict[str, Any] | None:
    """Settings of the model's config, without that of a part of the loss."""
    if not isinstance(value, dict):
        return None
    changes = {key: inner for key, inner in value.items() if key != "output_router_logits"}
    if value and not changes:
        c.lose(names[0], "output_router_logits: the loss has no part for balanced routers")
    return changes or None


@_in(VALUES)
def downloaded(c: Conversion, _: Names, value: Any) -> str | None:
    """The hub id that a folder was downloaded from, if it is not here and a comment says so."""
    folder = str(value or "").rstrip("/").removesuffix("/original")
    if folder and not Path(folder).is_dir():
        for name, options in re.findall(r"tune download (\S+)(.*)", c.comments):
            target = re.search(r"--output-dir (\S+)", options)
            default = f"/tmp/{name.rpartition('/')[2]}"
            if (target[1].rstrip("/") if target else default) == folder:
                return str(name)
    return folder or None


@_in(VALUES)
def layers_of_component(c: Conversion, _: Names, _value: Any) -> list[str]:
    """Names of layers of torchtune's model, which has those of attention in a list and switches for the
    others, and those of Phi-3 and Phi-4, where one layer holds several of them."""
    found = [
        "o_proj" if name == "output_proj" else str(name)
        for name in c.at("model.lora_attn_modules") or []
    ]
    if c.at("model.apply_lora_to_mlp"):
        found += ["gate_proj", "up_proj", "down_proj"]
    if c.at("model.apply_lora_to_output"):
        found.append("lm_head")
    fused = _FUSED if re.search(r"phi[34]", str(c.at("model._component_"))) else {}
    return list(dict.fromkeys(fused.get(name, name) for name in found))


@_in(VALUES)
def component(_c: Conversion, _: Names, value: Any) -> str | None:
    """The last name of a component of torchtune."""
    return None if value is None else str(value).rpartition(".")[2]


@_in(VALUES)
def data_sets_by_name(c: Conversion, names: Names, value: Any) -> list[dict[str, Any]] | None:
    """Names of data sets as entries of LLaMA-Factory's dataset_info.json, which is searched in the
    config's checkout and in the current folder."""
    if is_off(value):
        return None
    folder = str(c.get("dataset_dir", default="data")).removeprefix("REMOTE:")
    info = c.file(f"{folder}/dataset_info.json")
    known: Any = {} if info is None else _json_of(info)
    most = c.get("max_samples") if names[0] == "dataset" else None
    found = []
    for word in (
        str(each).strip() for each in (value.split(",") if isinstance(value, str) else value)
    ):
        entry = known.get(word) if isinstance(known, dict) else None
        if not isinstance(entry, dict):
            what = f"{word}: what it is stands in {folder}/dataset_info.json, which is not here"
            c.lose(names[0], f"{what}; name its file in data.train")
            entry = {"file": f"{folder}/{word}.json", "unknown": True}
        elif not entry.get("hf_hub_url") and not entry.get("file_name"):
            c.lose(f"{names[0]}: {word}", "neither a file nor of the hub: copy the data first")
            continue
        elif not entry.get("hf_hub_url"):
            file = f"{folder}/{entry['file_name']}"
            entry = {**entry, "file": str(c.file(file) or file)}
        if isinstance(most, int):
            entry = {**entry, "num_samples": min(most, entry.get("num_samples") or most)}
        found.append({**entry, "label": word})
    return found


@_in(VALUES)
def data_sets_of_arguments(c: Conversion, _: Names, value: Any) -> list[Any]:
    """TRL's `dataset_name` with its config and split, and the list `datasets`."""
    mixture = c.at("datasets")
    found: list[Any] = (
        [dict(each, label="") for each in mixture if isinstance(each, dict)]
        if isinstance(mixture, list)
        else []
    )
    config, split = c.get("dataset_config"), c.get("dataset_train_split")
    if (path := c.at("dataset_name")) is not None:
        found.insert(0, {"path": str(path), "name": config, "split": split, "label": ""})
    return found


@_in(VALUES)
def data_sets_of_file(c: Conversion, names: Names, value: Any) -> list[dict[str, Any]]:
    """The data sets that a YAML file describes, as LLaMA-Factory's second trainer reads it."""
    name = str(value)
    if Path(name).suffix not in (".yaml", ".yml"):
        return [{"path": name, "label": ""}]
    found = _yaml_of(c, name)
    if found is None:
        what = f"{name}: the description of the data is not here; name the files in data.train"
        c.lose(names[0], what)
        return [{"file": name, "label": ""}]
    entries = (
        [entry for entry in found.values() if isinstance(entry, dict)]
        if isinstance(found, dict)
        else []
    )
    paths = [str(entry.get("path", "")) for entry in entries]
    here = [
        next(
            (f / p for f in (Path(), c.folder, *c.folder.parents) if (f / name).is_file()), Path(p)
        )
        for p in paths
    ]
    return [
        {**entry, "path": str(path) if path.exists() else name, "label": ""}
        for entry, path, name in zip(entries, here, paths, strict=True)
    ]


@_in(ROWS)
def revision(c: Conversion, names: Names) -> None:
    """The revision of the model, behind its name."""
    value = c.get(*names)
    if not is_off(value) and value != "main" and "model.path" in c.values:
        origin = f"{c.origin('model.path')}, {names[0]}"
        c.set("model.path", f"{c.values['model.path']}@{value}", origin)


@_in(ROWS)
def steps_of_epochs(c: Conversion, names: Names) -> None:
    """run.max_steps from torchtune's steps of an epoch and epochs; without the former, run.epochs."""
    steps, epochs = c.get(names[0]), c.get(names[1], default=1)
    if isinstance(steps, int) and isinstance(epochs, int):
        c.set("run.max_steps", steps * epochs, c.names(*names))
        c.differ(
            "run.max_steps", "there, epochs of fewer steps end before; here another one begins"
        )
    else:
        c.set("run.epochs", epochs, c.names(names[1]))


@_in(ROWS)
def batch(c: Conversion, names: Names, default: int) -> None:
    """Both batch sizes, from the number of ranks and three keys: the size per device, accumulation and,
    in place of it, the size per device and step."""
    micro, accumulation, *whole = names
    size, steps = c.get(micro), c.get(accumulation)
    size = size if isinstance(size, int) and size > 0 else default
    origin = c.names(micro, accumulation)
    if whole and isinstance(sum_of_all := c.get(*whole), int) and steps is None:
        steps, origin = sum_of_all // size, c.names(*whole)
    elif whole:
        c.skip("it follows from the other sizes", *whole)
    steps = steps if isinstance(steps, int) and steps > 0 else 1
    ranks = c.ranks // _ranks_of_a_sequence(c) or 1
    groups = "GPUs" if ranks == c.ranks else "groups of GPUs that share sequences"
    units = {"preference": "pairs", "unpaired": "answers"}
    unit = units.get(str(c.values.get("data.kind")), "sequences")
    c.set("batch.micro_batch_size", size, c.names(micro))
    if "batch.global_batch_size" in c.values:
        return
    c.set(
        "batch.global_batch_size",
        size * steps * ranks,
        origin,
        f"{size} ({unit} of a GPU) x {steps} (accumulation) x {ranks} ({groups}); here it stays "
        "the same on any number of GPUs",
    )


def _ranks_of_a_sequence(c: Conversion) -> int:
    """The product of the parallel sizes whose ranks train on the same sequences."""
    nested = c.given.get("parallelism_config")
    sizes = dict(nested) if isinstance(nested, dict) else {}
    sizes = {name.removeprefix("parallelism_config_"): size for name, size in sizes.items()}
    sizes |= {name: c.given[name] for name in c.given if name in _SHARED_SIZES}
    found = [size for name, size in sizes.items() if name in _SHARED_SIZES]
    return math.prod(size for size in found if isinstance(size, int) and size > 0)


@_in(ROWS)
def betas(c: Conversion, names: Names) -> None:
    """Both betas of adamw, each of which is a key."""
    c.set(
        "optimizer.betas",
        [c.get(names[0], default=0.9), c.get(names[1], default=0.999)],
        c.names(*names),
    )


@_in(ROWS)
def warmup(c: Conversion, names: Names) -> None:
    """The warm-up, as steps or as a share of the run: the first key is one of them, by its size."""
    steps, share = c.get(names[0]), c.get(names[1])
    origin = names[0] if steps else names[1]
    if _is_number(steps) and float(steps) >= 1:
        c.set("schedule.warmup_steps", int(steps), origin, _FIRST_STEP)
    elif _is_number(value := steps or share) and float(value) > 0:
        c.set("schedule.warmup_ratio", float(value), origin, _FIRST_STEP)
    else:
        c.set("schedule.warmup_steps", 0, c.names(*names))


@_in(ROWS)
def deepspeed_settings(c: Conversion, names: Names) -> None:
    """Makes keys of a section of DeepSpeed's settings, which are in the config or in a file: stage,
    offload_param and offload_optimizer. Where the file is not here, its name says them."""
    given = c.get(*names)
    section = next((name for name in names if c.at(name) is not None), names[0]).partition(".")[0]
    if is_off(given):
        return
    file = None if isinstance(given, dict) else c.file(str(given))
    read = _json_of(file) if file is not None and file.is_file() else given
    if isinstance(read, dict):
        zero = read.get("zero_optimization", read)
        zero = zero if isinstance(zero, dict) else read
        found = {name: zero.get(name, zero.get(f"{name}_device")) for name in _OFFLOADS}
        found = {n: v.get("device", "cpu") if isinstance(v, dict) else v for n, v in found.items()}
        c.given[section] = {"stage": zero.get("stage", zero.get("zero_stage", 0)), **found}
        return
    name = Path(str(given)).name.lower()
    stage = re.search(r"(?:zero|z)[-_]?([0-3])", name)
    found = dict.fromkeys(_OFFLOADS, "cpu" if "offload" in name else None)
    if stage is not None and stage[1] == "2":
        found["offload_param"] = None
    c.given[section] = {"stage": int(stage[1]) if stage else 3, **found}


@_in(ROWS)
def chat_template(
    c: Conversion, names: Names, same: Sequence[str], near: Mapping[str, str] | None = None
) -> None:
    """The name of a chat template. With images, and for names that are not known here, the tokenizer's
    own is used, which is the same format if the model has the name's family and number.

    same: the tool's names that have a name here, too. near: how those of them differ that do."""
    key, name = names[0], str(c.get(*names))
    shows_images = c.shows_images or "processor_type" in c.given
    known = template_name(name) if name in same else None
    if known is not None and not shows_images and "data.kind" not in c.values:
        what = f"{key}: {name}; add chat_template: {known} to this section, with the data"
        c.note("data.train", f"{c.tool}: {what}")
        return
    if known is not None and not shows_images:
        c.set("data.chat_template", known, key)
        if name in (near or {}):
            c.differ("data.chat_template", (near or {})[name])
        return
    family = re.match(r"([a-z]+)[_-]?(\d?)", name.lower())
    model = str(c.values.get("model.path", "")).lower()
    found = re.findall(rf"{family[1]}[a-z]*[-_]?v?(\d?)", model) if family is not None else []
    numbers = [number for number in found if number]
    if family and found and (not family[2] or not numbers or family[2] in numbers):
        c.note("data.kind", f"{c.tool}: {key}: {name}; {_OWN_TEMPLATE}")
    else:
        c.lose(key, f"{name}: {_OWN_TEMPLATE}")


@_in(ROWS)
def source(
    c: Conversion,
    names: Names,
    *,
    files: str = "data_files",
    subset: str = "subset, name",
    split: str = "split",
    revision: str = "revision",
    folder: str = "",
) -> None:
    """The files of an entry of data sets, from the names of its keys: a file or folder as it is, or
    `owner/name/config:split` of the hub."""
    path, listed = c.get(*names) or c.values.get("data.train"), c.get(files)
    listed = [listed] if isinstance(listed, str) else listed
    paths = [str(path or "")]
    if paths[0] in ("json", "csv", "parquet", "text", "arrow") and listed:
        paths = [str(file) for file in listed]
    elif listed:
        c.lose(files, f"single files of {path}: download them, and name them")
    if not is_off(at := c.get(revision)):
        paths = [f"{each}@{at}" for each in paths]
    config, part = c.get(*subset.split(", ")), c.get(split)
    c.values.pop("data.train", None)
    if folder and not is_off(inner := c.get(folder)):
        c.lose(folder, f"{inner}: a folder of {path}: download it, and name it in data.train")
    found = [hub_data(c, names[0], each, config, part) for each in paths if path]
    if any(found):
        c.set("data.train", [each for each in found if each is not None], names[0])


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


@_in(ROWS)
def kind_of_first_row(c: Conversion, _: Names) -> None:
    """data.kind by the columns of the first row, where the files are here."""
    files = c.values.get("data.train")
    row = first_row(files) if files and "data.kind" not in c.values else None
    layout = guess(row[1], {}, kinds=TOKEN_KINDS) if row is not None else None
    if layout is not None:
        c.set("data.kind", layout.layout.kind)


@_in(ROWS)
def columns(
    c: Conversion,
    names: Names,
    roles: Mapping[str, str],
    usual: Mapping[str, str] | None = None,
    kind: str | None = None,
) -> None:
    """Columns of rows by their roles. roles: ours by the tool's. usual: columns that need no name.
    kind: data.kind, where it is not known yet."""
    if kind is not None and "data.kind" not in c.values:
        c.set("data.kind", kind, names[0])
    given = c.get(*names)
    given = given if isinstance(given, dict) else {}
    if given.get("images"):
        c.shows_images = names[0]
    named = {roles[role]: name for role, name in given.items() if role in roles and name}
    usual = usual or {}
    named = {k: name for k, name in named.items() if name not in usual.get(k, "").split(", ")}
    if named:
        c.set("data.columns", named, names[0])


@_in(ROWS)
def speakers(c: Conversion, names: Names, usual: Sequence[str]) -> None:
    """axolotl's roles of the speakers of messages. usual: the speakers that are known here."""
    given = c.get(*names)
    listed = given.values() if isinstance(given, dict) else [given]
    if given and not {each for words in listed for each in words or ()} <= {*usual}:
        c.lose(names[0], f"{given}: has no equal")


@_in(ROWS)
def split_of_data(c: Conversion, names: Names) -> None:
    """The split for evaluation of TRL's first data set, if there are evaluations."""
    given = c.get(*names)
    mixture = c.at("datasets")
    path, config = c.at("dataset_name"), c.at("dataset_config")
    if path is None and isinstance(mixture, list) and mixture and isinstance(mixture[0], dict):
        path, config = mixture[0].get("path"), mixture[0].get("name")
    if path is None or str(c.at("eval_strategy") or "no").lower() == "no":
        return
    if not is_hub_id(str(path)):
        what = f"{path} has no split {given or 'test'}: name files in data.validation, or set "
        c.lose("eval_strategy", f"{what}data.validation_split")
        return
    found = hub_data(c, names[0], str(path), config, given or "test")
    if found is not None:
        c.set("data.validation", [found], names[0])


@_in(ROWS)
def held_out(c: Conversion, names: Names) -> None:
    """The held-out part of the training data, as a share."""
    size = c.get(*names)
    if not isinstance(size, int | float) or isinstance(size, bool) or size <= 0:
        return
    share = size < 1
    c.set("data.validation_split", size if share else 0.02, names[0])
    what = (
        "other rows than there are held out"
        if share
        else f"{size} rows there; here a share of the rows"
    )
    c.differ("data.validation_split", what)


@_in(ROWS)
def checkpoints(c: Conversion, names: Names) -> None:
    """The times of checkpoints, by the steps, the policy and the number of an epoch."""
    if not _regularly(c, "checkpoint", names):
        c.skip("checkpoints are for a resume; one comes at the end", *names)


@_in(ROWS)
def evaluations(c: Conversion, names: Names, at_start: bool = False) -> None:
    """The times of evaluations, as those of checkpoints. at_start: the tool also begins with one."""
    if not c.evaluates:
        c.skip("there are no data for evaluations", *names)
    elif not _regularly(c, "evaluation", names):
        c.set("evaluation.every_steps", None, c.names(*names), "one evaluation comes at the end")
    elif at_start:
        c.set("evaluation.at_start", True)


def _regularly(c: Conversion, section: str, names: Names) -> bool:
    """Sets every_steps or every_epochs of a section from the tool's keys: steps, or below 1 a share of
    the run; epoch, steps or no; and times per epoch. Returns whether it comes at all."""
    steps = next(name for name in names if name.endswith("_steps"))
    per_epoch = [name for name in names if name.endswith("_per_epoch")]
    policies = [name for name in names if name != steps and name not in per_epoch]
    number, times = c.get(steps), c.get(*per_epoch)
    policy = str(c.get(*policies, default="")).lower()
    most, epochs = c.values.get("run.max_steps"), c.values.get("run.epochs")
    if _is_number(times) and float(times) > 0:
        if isinstance(most, int):  # axolotl divides the steps of the run by its epochs
            passes = float(c.given.get("num_epochs", 1))
            every = math.ceil(most / (float(times) * passes))
            c.set(f"{section}.every_steps", every, per_epoch[0])
        else:
            c.set(f"{section}.every_epochs", 1 / float(times), per_epoch[0])
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


@_in(VALUES)
def where_each_checkpoint_is_evaluated(c: Conversion, _: Names, value: Any) -> Any:
    """The value; of none, whether axolotl has an evaluation for each of its checkpoints."""
    epochs, times = c.given.get("num_epochs", 1), []
    for steps, per_epoch in (("save_steps", "saves_per_epoch"), ("eval_steps", "evals_per_epoch")):
        count = c.given.get(per_epoch)
        time = 1.0 / (count * epochs) if count else c.given.get(steps)
        times.append(time if isinstance(time, int | float) else 0)
    each = bool(times[0] and times[1]) and times[0] % times[1] == 0
    return each if value is None else value


@_in(ROWS)
def images(c: Conversion, names: Names, largest: int | None = None) -> None:
    """The section `images`, after adapters and after a row that sets images.train to what the tool
    trains beside the text model. largest: the tool's pixels of the largest image."""
    name = c.shows_images or names[0]
    model = f"{c.values.get('model.path', '')} {c.at('processor_type') or ''}".lower()
    refused = {
        "this model attends to images in layers of its own, which is not trained here": _CROSS_ATTENTION,
        "audio is not trained on": _SOUND,
    }
    c.get(*names)
    train, origin = c.values.pop("images.train", None), c.origin("images.train") or name
    for what, models in refused.items():
        if models.search(model):
            c.lose(name, what)
            return
    c.set("images.train", train, origin)
    for key in _NOT_WITH_IMAGES:
        if key in c.values:
            lost = c.origin(key).partition(",")[0] or key
            c.lose(lost, f"{key}: {c.values.pop(key)}: not available with images")
    if "lora.rank" in c.values or "lora.path" in c.values:
        c.set("images.train", "none", origin)
        note = "adapters are in the text model only; lora.modules_to_save names the projector, to "
        c.note("images.train", f"{note}train it whole")
        if train != "none":
            c.lose(origin, "the image tower and its projector get no adapters")
    pixels = c.get("image_max_pixels", "processor_kwargs.max_pixels", default=largest)
    if isinstance(pixels, int) and "qwen" in model:
        note = "the limit of the processor, and of the exported one"
        c.set("images.max_pixels", pixels, c.names("image_max_pixels"), note)
    else:
        c.skip("the processor of this model scales images to its own size", "image_max_pixels")


@_in(ROWS)
def plugins(c: Conversion, names: Names, speed_only: Sequence[str]) -> None:
    """axolotl's plugins by the names of their modules. speed_only: those that only save time and memory."""
    given = c.get(*names)
    for plugin in given if isinstance(given, list) else []:
        module = str(plugin).split(".")[-2] if "." in str(plugin) else str(plugin)
        if module == "swanlab":
            c.skip("metrics go to metrics.jsonl, wandb or TensorBoard", *names)
        elif module not in speed_only:
            c.lose(names[0], f"{module} is not available")
    if given and names[0] not in c.lost:
        c.skip("speed and memory only", *names)


@_in(ROWS)
def rest_of_section(c: Conversion, names: Names, known: Sequence[str], lost: str) -> None:
    """Settings of a section that no row knows. lost: what to say of them after their names."""
    given = c.get(*names)
    rest = (
        [key for key in given if given[key] is not None and key not in known]
        if isinstance(given, dict)
        else []
    )
    if rest:
        c.lose(names[0], f"{', '.join(rest)}: {lost}")


@_in(LATER)
def cut_rows(c: Conversion, origin: str) -> None:
    """What becomes of rows that are too long, which the tool cuts: after data.kind and the length."""
    kind = c.values.get("data.kind")
    if kind in ("chat", "instruct"):
        c.set("data.overlong", "cut", origin, "there, too long rows are cut")
    elif kind in ("preference", "unpaired"):
        unit = "pairs with such an answer" if kind == "preference" else "such answers"
        what = f"there, too long answers are cut; here {unit} are dropped"
        c.differ("data.sequence_length", what)


def _json_of(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return None


def _yaml_of(c: Conversion, name: str) -> Any:
    file = c.file(name)
    try:
        return None if file is None else parse_yaml(file.read_text(encoding="utf-8"))[0]
    except (NotYamlError, OSError):
        return None


def _is_number(value: object) -> bool:
    if isinstance(value, bool):
        return False
    try:
        float(str(value))
    except ValueError:
        return False
    return True
