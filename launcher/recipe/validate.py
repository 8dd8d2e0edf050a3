"""The rules that join several keys of a recipe.

A rule is a generator of problems: (dotted key, what is wrong with it). `combinations.py` has those
that are rows of a table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any, cast

from launcher.distributed.rank_layout import PARALLEL_SIZES, LayoutSizes, sizes_of
from launcher.recipe.adapter import ADAPTER_CONFIG
from launcher.recipe.combinations import Problems, combination_rules, kinds_of, value_of
from launcher.recipe.decode import KeyPath, Problem
from launcher.recipe.layouts import KINDS, TOKEN_KINDS
from launcher.recipe.model_config import change_problems, config_problems, of_text, size_problems
from launcher.recipe.objectives import OBJECTIVES, objective_of
from launcher.recipe.schema import WITHOUT_REFERENCE, Recipe
from launcher.recipe.section import AutoInt
from launcher.recipe.template_names import template_problem
from launcher.sources.hub import is_hub_id, is_model_id, no_such_name
from launcher.sources.location import is_of_system, matching, no_such

_TEMPLATE_VALUES = (
    "messages",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)


class _UnsoundError(Exception):
    """A rule reads a key without a sound value."""


class _Sound:
    """A section as rules see it: reading a key without a sound value ends the rule."""

    def __init__(self, section: Any, path: KeyPath, unsound: set[KeyPath]) -> None:
        self._section, self._path, self._unsound = section, path, unsound

    def __getattr__(self, name: str) -> Any:
        path, value = (*self._path, name), getattr(self._section, name)
        if path in self._unsound:
            raise _UnsoundError
        return _Sound(value, path, self._unsound) if dataclasses.is_dataclass(value) else value


def check(
    recipe: Recipe, *, ranks: int | None, unsound: set[KeyPath], files: bool = True
) -> list[Problem]:
    """Returns all broken rules.

    ranks: data-parallel ranks; None: not known yet. files: whether the data must exist.
    unsound: keys without a sound value. A rule that reads one is skipped.
    """
    sound = cast(Recipe, _Sound(recipe, (), unsound))
    rules = [
        *combination_rules(sound),
        *(rule(sound) for rule in (*_RULES, *(_FILE_RULES if files else ()))),
        *(rule(sound, ranks) for rule in _RANK_RULES),
    ]
    problems = []
    for rule in rules:
        with contextlib.suppress(_UnsoundError):
            for key, message in rule:
                path = tuple(key.split(".")) if isinstance(key, str) else key
                problems.append(Problem(path, message))
    return problems


def fits_ranks(recipe: Recipe, ranks: int) -> bool:
    """Whether a checked recipe can run on this number of data-parallel ranks."""
    return not any(True for rule in _RANK_RULES for _ in rule(recipe, ranks))


def _has_checkpoints(recipe: Recipe) -> bool:
    return any(Path(recipe.run.dir, "checkpoints").glob("step_*"))


def _resharding(recipe: Recipe) -> Problems:
    # True was the default of earlier versions, whose recipes name it with ddp, too
    if recipe.strategy.kind == "ddp" and recipe.strategy.reshard_after_forward is False:
        yield "strategy.reshard_after_forward", "needs strategy.kind=fsdp or auto"


def _kept_logits(recipe: Recipe) -> Problems:
    if recipe.model.keep_logits is True:
        if not recipe.model.chunked_loss:
            yield "model.keep_logits", "needs model.chunked_loss; set model.keep_logits=auto"
        if recipe.distillation is not None:
            what = "not available with distillation; set model.keep_logits=auto"
            yield "model.keep_logits", what


def _mixture(recipe: Recipe) -> Problems:
    train = recipe.data.train
    if not isinstance(train, dict):
        return
    sized = [name for name, source in train.items() if source.weight == "size"]
    for name in sized if len(sized) < len(train) else ():
        what = "size does not mix with the numbers of other sources; give each a number, or none"
        yield f"data.train.{name}.weight", what


def _streaming(recipe: Recipe) -> Problems:
    data, preference = recipe.data, recipe.preference
    if not data.streaming:
        return
    for source in data.sources().values():
        for name in source.train if isinstance(source.train, tuple) else ():
            if "[" in name and is_hub_id(name):
                yield "data.train", f"{name}: a slice is not available with data.streaming"
    what = "not available with data.streaming: a pass over all data before training computes what "
    what += "the loss compares with"
    if preference is not None and preference.loss not in WITHOUT_REFERENCE:
        yield "preference.loss", f"{what}; {' and '.join(WITHOUT_REFERENCE)} need none"
    for name in ("kto", "distillation"):
        if getattr(recipe, name) is not None:
            yield name, what


def _pretrained(recipe: Recipe) -> Problems:
    path = recipe.model.path
    if recipe.model.init == "pretrained" and path is None:
        yield "model.init", "pretrained needs model.path"
    lora = recipe.lora
    if lora is not None and lora.path is not None and recipe.model.init == "random":
        what = "not available with model.init: random: the adapter belongs to trained weights"
        yield "lora.path", what
    for key in ("model.path", "distillation.teacher"):
        path = value_of(recipe, key)
        if path is not None and not is_model_id(path) and not os.path.isfile(f"{path}/config.json"):
            if os.path.isfile(f"{path}/{ADAPTER_CONFIG}"):
                what = f"{path} is an adapter: lora.path continues it, with {key} as its base; or "
                yield key, f"{what}launcher export --merged writes a whole model"
                continue
            yield key, no_such_name("folder with a config.json", path)


def _adapter_targets(recipe: Recipe) -> Problems:
    lora = recipe.lora
    if lora is None:
        return
    if lora.target_modules == () and not lora.target_parameters:
        yield (
            "lora.target_modules",
            "must name a layer, unless lora.target_parameters names experts",
        )
    for key in ("dropout", "dora") if lora.target_parameters else ():
        if getattr(lora, key):
            what = "not available with lora.target_parameters: it cannot be computed for experts"
            yield f"lora.{key}", f"{what} without a whole weight of each"


def _attention(recipe: Recipe) -> Problems:
    attention, precision = recipe.model.attention, recipe.strategy.mixed_precision
    in_float32 = precision is None or precision.param_dtype == "float32"
    if "flash_attention" in attention and in_float32:
        what = "use sdpa, or strategy.mixed_precision with bfloat16"
        yield "model.attention", f"{attention} computes in 16 bits only; {what}"


def _classification(recipe: Recipe) -> Problems:
    model, data = recipe.model, recipe.data
    if data.builder is not None:
        return
    of_task = (rules for rules in OBJECTIVES if rules.task == model.task)
    if data.kind not in {kind for rules in of_task for kind in rules.kinds}:
        yield "data.kind", f"{data.kind} is not for model.task: {model.task}"
    labels = data.labels
    if labels is not None and model.num_labels not in (None, len(labels)):
        yield "model.num_labels", f"{model.num_labels}, but data.labels names {len(labels)}"
    if labels is not None and (len(labels) < 2 or len(set(labels)) < len(labels)):
        what = "must name two classes or more, each once"
        yield "data.labels", f"{what}; got {', '.join(labels)}"
    for name, source in data.train.items() if isinstance(data.train, dict) else ():
        kind = source.kind or data.kind
        if kind != data.kind and not {kind, data.kind} <= {*TOKEN_KINDS}:
            what = f"{kind} does not mix with data.kind {data.kind}: the losses differ"
            yield f"data.train.{name}.kind", what


def _masked_lm(recipe: Recipe) -> Problems:
    data = recipe.data
    if recipe.model.task != "masked_lm" or data.builder is not None:
        return
    if data.packing:
        what = "packed documents would see each other in attention to both sides"
        yield "data.packing", f"not available with model.task: masked_lm: {what}; set it to false"
    if (recipe.model.config or {}).get("is_decoder"):
        what = "must be false with model.task: masked_lm, so that tokens see the ones after them"
        yield "model.config.is_decoder", what
    if isinstance(data.train, dict):
        yield "data.train", "a mixture is not available with model.task: masked_lm; give a list"


def _section(recipe: Recipe) -> Problems:
    rules = objective_of(recipe)
    if rules.section and rules.required_key and getattr(recipe, rules.section) is None:
        yield "data.kind", f"needs the section {rules.section}, such as {rules.required_key}"


def _preference(recipe: Recipe) -> Problems:
    section = recipe.preference
    if section is not None and section.loss == "robust" and not section.label_smoothing:
        yield "preference.label_smoothing", "loss: robust needs a share above 0; else use dpo"


def _config(recipe: Recipe) -> Problems:
    find = config_problems if recipe.model.path is None else change_problems
    config = recipe.model.config
    for path, message in () if config is None else find(config):
        yield ("model", "config", *path), message


def _best_export(recipe: Recipe) -> Problems:
    checkpoint = recipe.checkpoint
    if checkpoint.export == "best" and not (checkpoint.keep_best and checkpoint.saves):
        what = "needs checkpoints of which the best is kept: checkpoint.keep_best=eval_loss"
        yield "checkpoint.export", what


def _whole_export(recipe: Recipe) -> Problems:
    model, checkpoint = recipe.model, recipe.checkpoint
    changed = model.path is not None and model.config
    if recipe.lora and changed and checkpoint.export and not checkpoint.export_merged:
        what = "must be true with model.config and model.path: an adapter has no config of a model"
        yield "checkpoint.export_merged", what


def _sizes(recipe: Recipe) -> Problems:
    config = recipe.model.config or {}
    if recipe.model.path is not None:  # sizes are those of its weights, and refused elsewhere
        return
    for key, message in size_problems(config):
        yield f"model.config.{key}", message
    start, text = of_text(config)
    size, key = text.get("vocab_size"), f"model.config.{start}vocab_size"
    tokenizer = recipe.data.tokenizer if recipe.data.builder is None else None
    if tokenizer == "bytes" and isinstance(size, int) and size > 0:
        sources = recipe.data.sources().values()
        asks = any(
            KINDS[source.kind].answers and source.prompt_format != "text" for source in sources
        )
        if size < 257:
            what = "the tokenizer `bytes` needs 257: 256 bytes and an end of document"
            yield key, f"{size} is too small; {what}"
        elif size < 260 and (asks or any(KINDS[source.kind].conversation for source in sources)):
            what = "the tokenizer `bytes` needs 260 for chats: three roles begin a turn"
            what += "; data.prompt_format=text trains prompts without them" if asks else ""
            yield key, f"{size} is too small; {what}"


def _new_tokens(recipe: Recipe) -> Problems:
    tokens, key = recipe.model.new_tokens or (), "model.new_tokens"
    if tokens and recipe.model.path is None and recipe.data.tokenizer is None:
        yield key, "needs a tokenizer: give data.tokenizer or model.path"
    for index, token in enumerate(tokens):
        what = ""
        if token != token.strip():
            what = "must not begin or end with white space"
        elif len(token) > 200:
            what = "must have at most 200 characters"
        elif token in tokens[:index]:
            what = "is given twice"
        if what:
            yield ("model", "new_tokens", index), f"{what}; got {token[:40]!r}"


def _micro_batch_tokens(recipe: Recipe) -> Problems:
    tokens, data = recipe.batch.micro_batch_tokens, recipe.data
    packed = data.packing and not data.joins_rows
    if tokens is not None and packed and KINDS[data.kind].loss_on != "class":
        what = "needs data.packing=false; packed sequences are all as long"
        yield "batch.micro_batch_tokens", what
    if data.similar_lengths and data.packing and data.kind != "classification":
        yield "data.similar_lengths", "needs data.packing=false; packed sequences are all as long"
    if tokens is not None and tokens < data.row_length:
        what = f"does not hold a sequence of {data.sequence_length} tokens (data.sequence_length)"
        if data.batch_unit == "pairs":
            what = f"does not hold a pair of {data.row_length} tokens (twice data.sequence_length)"
        yield "batch.micro_batch_tokens", f"{tokens} {what}"


def _profile(recipe: Recipe, ranks: int | None) -> Problems:
    profile, max_steps = recipe.profile, recipe.run.max_steps
    if profile is None:
        return
    largest = max(profile.ranks or (), default=0)
    if ranks is not None and largest >= ranks:
        yield "profile.ranks", f"there is no rank {largest} of {ranks}, which count from 0"
    first, last = profile.start_step, profile.start_step + profile.steps - 1
    if max_steps is not None and last > max_steps:
        yield "profile.steps", f"steps {first} to {last} go beyond run.max_steps {max_steps}"


def _metrics(recipe: Recipe) -> Problems:
    generate, keep_best = recipe.evaluation.generate, recipe.checkpoint.keep_best
    known = ["eval_loss", *(f"eval_{name}" for name in objective_of(recipe).scores)]
    if generate is not None:
        if KINDS[recipe.data.kind].loss_on != "answers":
            mixed = isinstance(recipe.data.train, dict)
            why = ", which is the kind of data.validation, too" if mixed else ""
            yield "evaluation.generate", f"needs data.kind=chat or instruct{why}"
        known += [f"eval_{metric.rpartition(':')[2]}" for metric in generate.metrics]
        length = recipe.data.sequence_length
        if generate.max_new_tokens >= length:
            what = f"leaves no room for a prompt in {length} tokens (data.sequence_length)"
            yield "evaluation.generate.max_new_tokens", f"{generate.max_new_tokens} {what}"
    if keep_best is not None and keep_best not in known:
        what = f"no such metric: {keep_best}; this run has {', '.join(known)}"
        yield "checkpoint.keep_best", what


def _nodes(recipe: Recipe) -> Problems:
    nodes = "1" if recipe.slurm is None else str(recipe.slurm.nodes)
    first, _, last = nodes.partition("-")
    if last and int(last) < int(first):
        yield "slurm.nodes", f"must be a number, or a range such as 2-4; got {nodes!r}"


def _resume(recipe: Recipe) -> Problems:
    resume = recipe.checkpoint.resume
    # A run with checkpoints of its own resumes from these: the named one may be gone by then
    if resume in ("auto", "never") or os.path.isdir(resume) or _has_checkpoints(recipe):
        return
    what = "give auto, never, or a checkpoint such as runs/NAME/checkpoints/step_00000500"
    yield "checkpoint.resume", f"{no_such('folder', resume)}; {what}"


def _batches(recipe: Recipe, ranks: int | None) -> Problems:
    size, micro = recipe.batch.global_batch_size, recipe.batch.micro_batch_size
    if micro is None:  # batches are formed by tokens: of any number of sequences
        return
    if isinstance(size, AutoInt):  # chosen to be one
        return
    unit = 1 if micro == "auto" else micro
    resume = recipe.checkpoint.resume
    resumes = _has_checkpoints(recipe) if resume == "auto" else resume != "never"
    if size % unit == 0 and resumes:
        return  # perhaps on another number of ranks: the last micro-batches may be smaller
    factors = [] if micro == "auto" else [f"{micro} (micro-batch)"]
    if ranks is not None:
        # Only the sizes that this is about: the others may be unsound
        keys = [each.key for each in PARALLEL_SIZES if each.same_sequences]
        given = {key: getattr(recipe.strategy, key) for key in keys}
        sizes = LayoutSizes(size=ranks, **given)
        unit *= sizes.data_parallel_size
        divisors = "".join(f" / {n} (strategy.{each.key})" for each, n in sizes.same_sequences)
        factors.append(f"{ranks} (ranks){divisors}")
    if size % unit:
        below = size // unit * unit
        advice = " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)
        product = " x ".join(factors) + (f" = {unit}" if len(factors) > 1 else "")
        yield "batch.global_batch_size", f"{size} is not a multiple of {product}; try {advice}"


def _groups(recipe: Recipe, ranks: int | None) -> Problems:
    if ranks is None:
        return
    sizes = sizes_of(recipe.strategy)
    if recipe.strategy.kind == "ddp":  # another rule refuses to replicate
        sizes["replicate"] = 1
    for key, what in LayoutSizes(size=ranks, **sizes).problems():
        yield f"strategy.{key}", what


def _context(recipe: Recipe, ranks: int | None) -> Problems:
    size, length = recipe.strategy.context_parallel_size, recipe.data.sequence_length
    if isinstance(length, AutoInt):  # chosen to be one
        return
    if length % size and (ranks or 0) % size == 0:  # else `_groups` refuses the size
        what = f"is not a multiple of {size} (strategy.context_parallel_size)"
        yield "data.sequence_length", f"{length} {what}; try {-(-length // size) * size}"


def _tokenizer(recipe: Recipe) -> Problems:
    name, template = recipe.data.tokenizer, recipe.data.chat_template
    if template is not None and (problem := template_problem(template)) is not None:
        yield "data.chat_template", problem
    if recipe.data.builder is not None or kinds_of(recipe) == {"tokens"} or name == "bytes":
        return
    what = "give `bytes`, a folder with a tokenizer, or a hub id `owner/name`"
    named = recipe.model.config is not None or recipe.model.builder is not None
    if name is None and recipe.model.path is None and named:  # a model that is missing is reported
        yield (
            "data.tokenizer",
            f"missing; a model.config or model.builder has none of its own: {what}",
        )
    if name is not None and not is_model_id(name) and not os.path.isdir(name):
        yield "data.tokenizer", f"{no_such_name('folder', name)}; {what}"


def _template_values(recipe: Recipe) -> Problems:
    for name in recipe.data.chat_template_kwargs or {}:
        if name in _TEMPLATE_VALUES or name.endswith("_token"):
            what = "is set by the launcher; give only values of the template's own"
            yield ("data", "chat_template_kwargs", name), what


def _data_files(recipe: Recipe) -> Problems:
    train, validation = recipe.data.train, recipe.data.validation
    if train is None and recipe.data.builder is None:
        yield "data.train", "missing; give data.train or data.builder"
    lists: dict[str, tuple[str, ...]] = {}
    if isinstance(train, dict):
        lists |= {f"data.train.{name}.files": source.files for name, source in train.items()}
    else:
        lists["data.train"] = train or ()
    if isinstance(validation, dict):
        lists |= {f"data.validation.{name}": files for name, files in validation.items()}
    else:
        lists["data.validation"] = validation or ()
    for key, patterns in lists.items():
        for index, pattern in enumerate(patterns):
            if is_of_system(pattern):
                yield (*key.split("."), index), f"{pattern} holds files of the system, not data"
                continue
            if not matching(pattern) and not is_hub_id(pattern):
                yield (*key.split("."), index), no_such_name("file or folder", pattern)


_RULES = (
    _mixture,
    _pretrained,
    _adapter_targets,
    _attention,
    _classification,
    _masked_lm,
    _section,
    _preference,
    _streaming,
    _config,
    _sizes,
    _best_export,
    _whole_export,
    _new_tokens,
    _template_values,
    _micro_batch_tokens,
    _metrics,
    _nodes,
    _resume,
    _resharding,
    _kept_logits,
)
_RANK_RULES = (_batches, _groups, _context, _profile)
_FILE_RULES = (_tokenizer, _data_files)
"""Rules that look for the files of the data. A plan does not need these files."""
