"""The rules that join several keys of a recipe.

Most are rows of a table: a key needs another one, or does not go with it (`NEEDS`). The others are
functions. A function yields what breaks its rules: the key, the name of the rule, and what to say.
A key and a name, as in `data.labels/needs-data.kind`, stay the same when the words change.

The rules read the recipe alone. Of a path that the recipe names, they ask whether it exists.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args
from urllib.parse import urlsplit

from launcher.distributed.rank_layout import PARALLEL_SIZES, LayoutSizes, sizes_of
from launcher.libraries.extras import missing_extra
from launcher.recipe.data_sets import named_models
from launcher.recipe.decode import KeyPath, Problem, default_of, plain_value, value_of
from launcher.recipe.model_config import change_problems, config_problems, of_text, size_problems
from launcher.recipe.objectives import OBJECTIVES, objective_of
from launcher.recipe.schema import WITHOUT_REFERENCE, Data, MessagePart, Recipe, Source
from launcher.recipe.section import AutoInt
from launcher.recipe.template_names import PAIR_TEMPLATES, template_problem
from launcher.sources.adapter import ADAPTER_CONFIG
from launcher.sources.hub import is_fetched, is_hub_id, no_such_name
from launcher.sources.layouts import (
    ATTACHMENTS,
    EXPLICIT_ONLY,
    KEYS,
    KINDS,
    NAMES,
    TOKEN_KINDS,
    RowKind,
    kinds_where,
    named_columns,
    role_of,
    roles_of,
)
from launcher.sources.location import is_in_store, is_of_system, matching, no_such
from launcher.sources.store_names import READ_ONLY, WEB, problem_of, refusal, scheme_of

Problems = Iterator[tuple[str | KeyPath, str, str]]
"""For each broken rule a dotted key or a path of keys, the name of the rule, and what to say."""


class Needs(NamedTuple):
    """A rule about one or several keys, and another one."""

    keys: str
    """The rule holds for each of these keys that has another value than its default. `key=value`: if
    it has this value. `key+other`: if both are given."""
    other: str
    """Another key, or several."""
    needed: bool | str
    """True: one of the others must be given. False: none of them. A text: the values of the other,
    one of which it must have."""
    instead: str = ""
    """What to do instead, at the end of the message."""


def _kinds_with(role: str) -> str:
    return " ".join(kind for kind in KINDS if role in roles_of(kind))


def _kinds(holds: Callable[[RowKind], object]) -> str:
    return " ".join(kinds_where(holds))


def _of_attachments(section: str) -> tuple[Needs, ...]:
    whole = "; lora.modules_to_save names modules that are trained whole"
    return (
        Needs(section, "model.path", True),
        Needs(section, "model.builder data.builder distillation", False),
        Needs(section, "data.tokenizer", False),
        Needs(section, "model.task", "causal_lm"),
        Needs(section, "data.kind", _kinds(lambda kind: kind.templated)),
        Needs(section, "data.prompt_format", "auto chat"),
        Needs(f"{section}.train", "lora", False, whole),
        Needs(f"{section}.learning_rate_ratio", f"{section}.train", "projector all"),
    )


_FLOAT8 = "strategy.mixed_precision.float8"
_SCHEDULE_FREE = "optimizer.name=schedule_free_adamw"
_OFFLOADED_STATE = "strategy.cpu_offload.what strategy.cpu_offload.optimizer_path"
_CONTEXT = "strategy.context_parallel_size"
_RING = "strategy.context_parallel_ring"
_EXPERT = "strategy.expert_parallel_size"
_TENSOR = "strategy.tensor_parallel_size"
_PIPELINE = "strategy.pipeline_parallel_size"
_TEMPLATED = _kinds(lambda kind: kind.templated)
_OF_TOKENS = " ".join(TOKEN_KINDS)
_NOT_MASKED = "causal_lm sequence_classification reward embedding reranker"
_RETRIEVAL = _kinds(lambda kind: kind.learned == "texts")
_NOT_RETRIEVAL = "causal_lm sequence_classification reward masked_lm"
_SAVES = "checkpoint.every_steps checkpoint.every_epochs"
_EVALUATES = "data.validation data.validation_split"
NEEDS: tuple[Needs, ...] = (
    # Model
    Needs("model.arguments", "model.builder", True),
    Needs(
        "model.task model.num_labels model.attention model.init lora.quantize model.new_tokens",
        "model.builder",
        False,
    ),
    Needs("model.trust_remote_code lora.path model.init=pretrained", "model.path", True),
    Needs("model.freeze", "lora", False),
    Needs("model.mlp_tile", "model.builder", False),
    Needs("model.mlp_tile", _TENSOR, "1", "; with parts of layers its activations are divided"),
    Needs("model.mlp_tile", _FLOAT8, False),
    Needs("model.qat", f"model.builder model.compile lora distillation {_FLOAT8}", False),
    Needs("model.qat", _TENSOR, "1", "; use fsdp"),
    Needs("model.neftune_noise_alpha", "model.builder", False),
    Needs("model.neftune_noise_alpha", "preference kto", False, ": a reference has no noise"),
    Needs(
        "model.neftune_noise_alpha",
        _TENSOR,
        "1",
        "; tensor parallel ranks must draw the same noise",
    ),
    Needs("model.neftune_noise_alpha", _CONTEXT, "1", "; a rank has a part of the row"),
    Needs("model.router_bias_update_rate", "lora", False, ": an adapter does not hold the biases"),
    Needs("model.router_bias_update_rate", "model.builder", False),
    Needs("model.mtp", "model.builder data.builder distillation lora.quantize", False),
    Needs("model.mtp", " ".join(ATTACHMENTS.values()), False),
    Needs("model.mtp", "evaluation.generate", False, "; measure answers in a run without it"),
    Needs("model.mtp", "model.task", "causal_lm"),
    Needs("model.mtp", "data.kind", _OF_TOKENS),
    Needs("model.mtp", "model.chunked_loss", True),
    *(Needs("model.mtp", size, "1") for size in (_EXPERT, _TENSOR, _PIPELINE)),
    Needs("model.mtp.only", "model.mtp.train", True),
    Needs("model.mtp.only", "lora model.freeze model.router_bias_update_rate", False),
    Needs("model.num_labels", "model.task", "sequence_classification"),
    Needs("model.keep_logits=true", "model.chunked_loss", True, "; set model.keep_logits=auto"),
    Needs("model.keep_logits=true", "distillation", False, "; set model.keep_logits=auto"),
    Needs("model.new_tokens", "lora.path", False),
    Needs("lora.init", "lora.path lora.dora lora.quantize", False, "; set lora.init=default"),
    Needs("model.init=random", "lora.path", False, ": the adapter belongs to trained weights"),
    Needs("lora.quantize", "model.compile", False),
    Needs(
        "lora.dropout lora.dora",
        "lora.target_parameters",
        False,
        ": it cannot be computed for experts without a whole weight of each",
    ),
    *(rule for section in ATTACHMENTS.values() for rule in _of_attachments(section)),
    # Data
    Needs("data.arguments", "data.builder", True),
    Needs(
        "data.train data.validation data.streaming data.text_column data.overlong data.columns "
        "data.ignore_columns data.validation_split data.limit data.similar_lengths "
        "batch.micro_batch_tokens",
        "data.builder",
        False,
    ),
    Needs("run.epochs evaluation.every_epochs checkpoint.every_epochs", "data.streaming", False),
    Needs("data.shard_size", "data.streaming", True),
    *(Needs(f"data.{key}", "data.kind", _kinds_with(role)) for role, key in KEYS.items()),
    Needs("data.labels", "data.kind", _kinds(lambda kind: kind.learned == "class")),
    Needs("data.token_dtype data.end_token", "data.kind", "tokens"),
    Needs(
        "data.chat_template data.chat_template_kwargs data.date data.system",
        "data.kind",
        _TEMPLATED,
    ),
    Needs("data.loss_on", "data.kind", _kinds(lambda kind: kind.learned == "answers")),
    Needs("data.message_weights data.loss_weights", "data.kind", "chat"),
    Needs("data.message_weights data.loss_weights", "data.loss_on", "assistant last"),
    Needs("data.prompt_format", "data.kind", _kinds(lambda kind: kind.answers)),
    Needs("data.margin_column", "model.task", "reward"),
    Needs("data.mask_probability", "model.task", "masked_lm"),
    Needs("lora data.weights_column", "model.task", _NOT_MASKED),
    # Objectives
    Needs("objective", "model.task", "causal_lm masked_lm"),
    Needs("preference kto distillation", "model.task", "causal_lm"),
    Needs("objective distillation", "data.kind", _OF_TOKENS),
    Needs("preference", "data.kind", "preference"),
    Needs("kto", "data.kind", "unpaired"),
    Needs("objective preference kto distillation", "data.builder", False),
    Needs("preference kto distillation", "model.builder", False),
    Needs("objective", "distillation", False),
    Needs("embedding model.bidirectional", "model.task", "embedding"),
    Needs("data.documents data.query_prompt data.document_prompt", "data.kind", _RETRIEVAL),
    Needs("reranker data.pair_template", "data.kind", "reranking"),
    Needs("reranker", "model.task", "reranker causal_lm"),
    Needs("reranker.positive_answer reranker.negative_answer", "model.task", "causal_lm"),
    Needs("reranker", "preference kto distillation objective", False),
    Needs("data.document_prompt", "data.kind", "retrieval"),
    Needs("data.streaming data.builder model.builder", "reranker", False),
    Needs("embedding.triplet_margin", "embedding.loss", "triplet"),
    Needs("embedding.false_negative_margin", "embedding.loss", "infonce"),
    Needs("embedding.temperature", "embedding.loss", "infonce cosent kl"),
    Needs("data.streaming data.builder model.builder", "model.task", _NOT_RETRIEVAL),
    Needs(
        "model.neftune_noise_alpha model.router_balance=micro_batch", "model.task", _NOT_RETRIEVAL
    ),
    Needs("kto", "preference distillation objective", False),
    Needs("lora.dropout", "preference kto", False),
    Needs("preference.label_smoothing", "preference.loss", "robust"),
    Needs("preference.loss=robust", "preference.label_smoothing", True, " above 0; else use dpo"),
    Needs("preference.margin", "preference.loss", "simpo"),
    Needs("distillation", "model.new_tokens", False),
    Needs("distillation", "model.chunked_loss", True),
    Needs(
        "data.mixture_unit=rows data.mixture_unit=tokens data.mixture_stages", "data.builder", False
    ),
    Needs("distillation.teacher_column", "distillation.teachers", True),
    Needs("distillation.rounds", "distillation.answers", "student endpoint folder"),
    Needs("distillation.answers", "data.kind", _kinds(lambda kind: kind.learned == "answers")),
    Needs("distillation.answers", "data.loss_on", "assistant last"),
    Needs("distillation.answers", "data.weights_column data.message_weights", False),
    Needs("distillation.answers", "run.on_divergence", "stop"),
    Needs(
        "distillation.answer_temperature distillation.max_new_tokens",
        "distillation.answers",
        "student endpoint",
    ),
    *(
        rule
        for source in ("endpoint", "folder")
        for rule in (
            Needs(f"distillation.answers={source}", f"distillation.{source}", True),
            Needs(f"distillation.{source}", "distillation.answers", source),
        )
    ),
    Needs("distillation.endpoint_model", "distillation.answers", "endpoint"),
    # Strategy
    Needs(
        "strategy.cpu_offload strategy.replicate strategy.reshard_after_backward "
        "strategy.mixed_precision.reduce_dtype strategy.reshard_after_forward=false",
        "strategy.kind",
        "fsdp auto",
    ),
    Needs("strategy.shard_optimizer", "strategy.kind", "ddp auto"),
    Needs(_FLOAT8, "strategy.mixed_precision.param_dtype", "bfloat16"),
    Needs(_FLOAT8, "lora", False, "; its base weights are frozen, or in NF4"),
    Needs(_OFFLOADED_STATE, "optimizer.name", "adamw sgd lion"),
    Needs(_OFFLOADED_STATE, "optimizer.momentum", True),
    Needs(_OFFLOADED_STATE, "optimizer.ema", False),
    Needs("activation_checkpointing.budget", "activation_checkpointing.mode", "selective"),
    Needs("activation_checkpointing.budget", "activation_checkpointing.every_n_blocks", "1"),
    Needs("activation_checkpointing.budget", "model.builder data.builder", False),
    # Sizes of groups that compute a model in parallel
    Needs(f"{_CONTEXT} {_TENSOR}", "model.builder data.builder", False),
    Needs(_PIPELINE, "strategy.kind", "fsdp auto"),
    Needs(_PIPELINE, "model.builder data.builder", False),
    Needs(_PIPELINE, "model.task", "causal_lm"),
    Needs(_PIPELINE, "model.chunked_loss", True),
    Needs("batch.micro_batch_tokens activation_checkpointing.budget", _PIPELINE, "1"),
    Needs(_CONTEXT, "data.kind", _OF_TOKENS),
    Needs(_CONTEXT, "model.task", "causal_lm"),
    Needs(f"{_EXPERT} {_TENSOR}", "strategy.kind", "fsdp auto"),
    Needs(_EXPERT, "optimizer.name", "adamw sgd muon lion schedule_free_adamw"),
    Needs(_TENSOR, "optimizer.name", "adamw sgd lion schedule_free_adamw"),
    Needs(_TENSOR, "optimizer.state_dtype", "float32"),
    Needs(_TENSOR, _EXPERT, "1", f"; for a mixture of experts use {_EXPERT} alone"),
    Needs(_TENSOR, "model.task", "causal_lm sequence_classification"),
    Needs(_TENSOR, "lora.dora", False, f"; FSDP, {_CONTEXT} and {_EXPERT} are"),
    Needs("distillation", _CONTEXT, "1"),
    Needs("distillation activation_checkpointing.budget", _EXPERT, "1"),
    Needs(f"distillation activation_checkpointing.budget {_FLOAT8}", _TENSOR, "1"),
    Needs("lora.init", _TENSOR, "1"),
    Needs("lora.init", _EXPERT, "1"),
    Needs("model.new_tokens+lora", _TENSOR, "1", " with lora"),
    # Optimizer and schedule
    Needs("optimizer.betas", "optimizer.name", "adamw muon lion schedule_free_adamw"),
    Needs("optimizer.eps", "optimizer.name", "adamw muon schedule_free_adamw"),
    Needs("optimizer.state_dtype", "optimizer.name", "adamw muon"),
    Needs(_SCHEDULE_FREE, "schedule.kind", "constant", ", which is what its average is for"),
    Needs(_SCHEDULE_FREE, "optimizer.ema", False, ": it has an average of its own"),
    Needs(_SCHEDULE_FREE, "strategy.shard_optimizer", False, "; use strategy.kind=fsdp"),
    Needs("optimizer.momentum", "optimizer.name", "sgd muon"),
    Needs("optimizer.layer_decay", " ".join(ATTACHMENTS.values()), False, "; use optimizer.groups"),
    Needs("optimizer.ema run.on_divergence", _SAVES, True),
    Needs("schedule.decay_steps", "schedule.kind", "wsd"),
    Needs(
        "schedule.warmup_steps",
        "schedule.warmup_ratio",
        False,
        "; set schedule.warmup_ratio=null, or schedule.warmup_steps=100, its default",
    ),
    # Evaluation and checkpoints
    Needs("evaluation.ema", "optimizer.ema", True),
    Needs("evaluation.ema", "strategy.shard_optimizer", False),
    Needs(
        "evaluation.at_start evaluation.stop_after checkpoint.keep_best",
        f"{_EVALUATES} data.builder",
        True,
    ),
    Needs("evaluation.generate", _EVALUATES, True),
    Needs("evaluation.generate", "data.builder model.builder", False),
    Needs("evaluation.generate", "data.loss_on", "assistant last"),
    *(
        Needs(
            f"{name}.every_steps",
            f"{name}.every_epochs",
            False,
            f"; set one of them to null: {name}.every_epochs=null or {name}.every_steps=null",
        )
        for name in ("evaluation", "checkpoint")
    ),
    Needs("checkpoint.export_dtype checkpoint.export_merged", "checkpoint.export", "at_end best"),
    Needs("checkpoint.export=best", "checkpoint.keep_best", True, ", such as eval_loss"),
    Needs("checkpoint.export=best", _SAVES, True),
    Needs("checkpoint.copy_to", _SAVES, True),
    Needs("checkpoint.copy_bandwidth", "checkpoint.copy_to", True),
    Needs("checkpoint.export_merged", "lora", True),
    Needs("checkpoint.export_base", "lora.quantize", True),
    Needs("checkpoint.export_base", "checkpoint.export_merged", True),
)
ALTERNATIVES = (
    ("run.max_steps", "run.epochs"),
    ("batch.micro_batch_size", "batch.micro_batch_tokens"),
)
"""Keys of which exactly one must be given. An argument replaces the one in the file."""
_ONE_OF = (*ALTERNATIVES, ("model.path", "model.config", "model.builder"))
"""Keys of which exactly one must be given."""


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
        *(_needs(sound, key, rule) for rule in NEEDS for key in rule.keys.split()),
        *(_one_of(sound, alternatives) for alternatives in _ONE_OF),
        *(_installed(sound, key) for key in _EXTRAS),
        *(rule(sound) for rule in (*_RULES, *(_FILE_RULES if files else ()))),
        *(rule(sound, ranks) for rule in _RANK_RULES),
    ]
    problems = []
    for rule in rules:
        with contextlib.suppress(_UnsoundError):
            for key, name, message in rule:
                path = tuple(key.split(".")) if isinstance(key, str) else key
                problems.append(Problem(path, name, message))
    return problems


def fits_ranks(recipe: Recipe, ranks: int) -> bool:
    """Whether a checked recipe can run on this number of data-parallel ranks."""
    return not any(True for rule in _RANK_RULES for _ in rule(recipe, ranks))


def excluded_by(recipe: Recipe, key: str, value: str) -> str | None:
    """Another key of a recipe that does not go with this value of a key, which is not off; None: the
    table has no rule against it."""
    for rule in NEEDS:
        if key in rule.other.split() and rule.needed is not True:
            if rule.needed is False or value not in rule.needed.split():
                for other in rule.keys.split():
                    if _is_given(recipe, other):
                        return other
    return None


def kind_by_keys(plain: Mapping[str, Any], kinds: Sequence[str]) -> str:
    """data.kind where the data cannot be seen: the first of `kinds` with which the keys of a recipe,
    which is not decoded yet, may stand."""
    for rule in NEEDS:
        if rule.other != "data.kind" or not isinstance(rule.needed, str):
            continue
        fitting = [kind for kind in kinds if kind in rule.needed.split()]
        given = (
            plain_value(plain, key) not in (None, default_of(key)) for key in rule.keys.split()
        )
        if fitting and any(given):
            kinds = fitting
    return kinds[0]


def _is_given(recipe: Recipe, key: str) -> bool:
    """Whether the keys of a row of `NEEDS` are as the row says."""
    if "+" in key:
        return all(value_of(recipe, each) for each in key.split("+"))
    name, _, wanted = key.partition("=")
    value = value_of(recipe, name)
    return str(value).lower() == wanted if wanted else value not in (None, default_of(name))


def _needs(recipe: Recipe, key: str, rule: Needs) -> Problems:
    if not _is_given(recipe, key):
        return
    others, first = rule.other.split(), key.partition("=")[0].partition("+")[0]
    if isinstance(rule.needed, str):
        values = kinds_of(recipe) if others == ["data.kind"] else {str(value_of(recipe, others[0]))}
        if not values & {*rule.needed.split()}:
            wanted = " or ".join(rule.needed.split())
            what = f"needs {others[0]}={wanted}{rule.instead}"
            yield first, f"needs-{others[0]}", what
        return
    given = [name for name in others if value_of(recipe, name)]
    if rule.needed and not given:
        yield first, f"needs-{others[0]}", f"needs {' or '.join(others)}{rule.instead}"
    if given and not rule.needed:
        what = f"not available with {' and '.join(given)}{rule.instead}"
        yield first, f"not-with-{given[0]}", what


def _one_of(recipe: Recipe, keys: Sequence[str]) -> Problems:
    given = [key for key in keys if value_of(recipe, key) is not None]
    if not given:
        yield keys[0], "missing", f"missing; give {' or '.join(keys)}"
    if given[:2] == ["model.path", "model.config"]:
        del given[0]  # changes to the config of the checkpoint
    for key in given[1:]:
        what = f"{given[0]} is given too; set one to null: {given[0]}=null or {key}=null"
        yield key, f"not-with-{given[0]}", what


_EXTRAS = {
    "lora": "peft",
    "model.qat": "torchao",
    "images": "PIL",
    "videos": "av",
    "logging.tensorboard": "tensorboard",
}
"""Keys that need a module of an extra."""


def _installed(recipe: Recipe, key: str) -> Problems:
    if value_of(recipe, key) and (missing := missing_extra(_EXTRAS[key])) is not None:
        yield key, "not-installed", missing


# Model


def _paths_of_models(recipe: Recipe) -> Problems:
    paths = [("model.path", recipe.model.path)]
    if recipe.distillation is not None:
        teachers = recipe.distillation.paths().items()
        paths += [(recipe.distillation.key_of(name), path) for name, path in teachers]
    for key, path in paths:
        if path is not None and not is_fetched(path) and not os.path.isfile(f"{path}/config.json"):
            if os.path.isfile(f"{path}/{ADAPTER_CONFIG}"):
                what = f"{path} is an adapter: lora.path continues it, with {key} as its base; or "
                yield key, "is-adapter", f"{what}launcher export --merged writes a whole model"
            else:
                yield key, "no-such-path", no_such_name("folder with a config.json", path)


def _adapter_targets(recipe: Recipe) -> Problems:
    lora = recipe.lora
    if lora is not None and lora.target_modules == () and not lora.target_parameters:
        what = "must name a layer, unless lora.target_parameters names experts"
        yield "lora.target_modules", "empty", what


def _attention(recipe: Recipe) -> Problems:
    attention, precision = recipe.model.attention, recipe.strategy.mixed_precision
    if "flash_attention" in attention and (precision is None or precision.param_dtype == "float32"):
        what = "use sdpa, or strategy.mixed_precision with bfloat16"
        what = f"{attention} computes in 16 bits only; {what}"
        yield "model.attention", "needs-16-bits", what


def _config(recipe: Recipe) -> Problems:
    model = recipe.model
    find = config_problems if model.path is None else change_problems
    for path, name, message in () if model.config is None else find(model.config):
        yield ("model", "config", *path), name, message
    if model.task == "masked_lm" and (model.config or {}).get("is_decoder"):
        what = "must be false with model.task: masked_lm, so that tokens see the ones after them"
        yield "model.config.is_decoder", "not-with-model.task", what


def _sizes(recipe: Recipe) -> Problems:
    config = recipe.model.config or {}
    if recipe.model.path is not None:  # sizes are those of its weights, and refused elsewhere
        return
    for path, name, message in size_problems(config):
        yield ("model", "config", *path), name, message
    start, text = of_text(config)
    size, key = text.get("vocab_size"), f"model.config.{start}vocab_size"
    tokenizer = recipe.data.tokenizer if recipe.data.builder is None else None
    if tokenizer == "bytes" and isinstance(size, int) and size > 0:
        sources = recipe.data.sources().values()
        asks = any(
            KINDS[source.kind].answers and source.prompt_format != "text" for source in sources
        )
        what = ""
        if size < 257:
            what = "257: 256 bytes and an end of document"
        elif size < 260 and (asks or any(KINDS[source.kind].conversation for source in sources)):
            what = "260 for chats: three roles begin a turn"
            what += "; data.prompt_format=text trains prompts without them" if asks else ""
        if what:
            what = f"{size} is too small; the tokenizer `bytes` needs {what}"
            yield key, "too-small-for-bytes", what


def _new_tokens(recipe: Recipe) -> Problems:
    tokens, key = recipe.model.new_tokens or (), "model.new_tokens"
    if tokens and recipe.model.path is None and recipe.data.tokenizer is None:
        what = "needs a tokenizer: give data.tokenizer or model.path"
        yield key, "needs-data.tokenizer", what
    for index, token in enumerate(tokens):
        name = what = ""
        if token != token.strip():
            name, what = "white-space", "must not begin or end with white space"
        elif len(token) > 200:
            name, what = "too-long", "must have at most 200 characters"
        elif token in tokens[:index]:
            name, what = "twice", "is given twice"
        if what:
            yield ("model", "new_tokens", index), name, f"{what}; got {token[:40]!r}"


# Data


def _sections(recipe: Recipe) -> Iterator[tuple[KeyPath, Data | Source, str]]:
    """Section `data` and those of the sources of a mixture: the path, the keys and the kind of
    each."""
    yield ("data",), recipe.data, recipe.data.kind
    if isinstance(recipe.data.train, dict):
        for name, source in recipe.data.train.items():
            yield ("data", "train", name), source, source.kind or recipe.data.kind


def kinds_of(recipe: Recipe) -> set[str]:
    """The kinds of the training data: a mixture may have several."""
    return {kind for _, _, kind in _sections(recipe)}


def _label_smoothing(recipe: Recipe) -> Problems:
    objective = recipe.objective
    if objective is None or objective.own:
        return
    arguments = objective.arguments or {}
    amount, where = arguments.get("amount"), ("objective", "arguments")
    if "amount" not in arguments:
        what = (
            f"missing; give objective.arguments.amount, such as {{amount: 0.1}} ({objective.loss})"
        )
        yield where, "missing", what
    elif type(amount) is not float or not 0 < amount < 1:
        what = f"must be a number above 0 and below 1; got {amount!r}"
        yield (*where, "amount"), "range", what
    for name in arguments.keys() - {"amount"}:
        yield (*where, name), "unknown", f"no argument of {objective.loss}, which has amount"


def _streaming(recipe: Recipe) -> Problems:
    data, preference = recipe.data, recipe.preference
    if not data.streaming:
        return
    for source in data.sources().values():
        for name in source.train if isinstance(source.train, tuple) else ():
            if "[" in name and is_hub_id(name):
                what = f"{name}: a slice is not available with data.streaming"
                yield "data.train", "slice-of-stream", what
    what = (
        "not available with data.streaming: a pass over all data before training computes what the "
        "loss compares with"
    )
    if preference is not None and preference.loss not in WITHOUT_REFERENCE:
        hint = f"{what}; {' and '.join(WITHOUT_REFERENCE)} need none"
        yield "preference.loss", "pass-not-with-data.streaming", hint
    for name in ("kto", "distillation"):
        if getattr(recipe, name) is not None:
            yield name, "pass-not-with-data.streaming", what


def _teachers(recipe: Recipe) -> Problems:
    settings, train = recipe.distillation, recipe.data.train
    if settings is None:
        return
    if (settings.teacher is None) == (settings.teachers is None):
        what = "needs one teacher, or several by name in distillation.teachers, not both"
        yield "distillation.teacher", "one-of", what
        return
    column = settings.teacher_column
    if settings.answers != "data" and column in ("sample", "answer", "input_ids", "labels"):
        what = f"the rows of rounds have a column {column}; give the teachers another one"
        yield "distillation.teacher_column", "of-rounds", what
    if settings.teachers is None or column is not None:
        return
    names = ", ".join(settings.teachers)
    if not isinstance(train, dict):
        what = "needs distillation.teacher_column, which names the teacher of each row, or a mixture in "
        yield "distillation.teachers", "needs-teacher_column", f"{what}data.train of {names}"
        return
    for name in train:
        if name not in settings.teachers:
            what = f"has no teacher in distillation.teachers ({names}); give one to each source"
            yield f"data.train.{name}", "no-teacher", what
    for name in settings.teachers:
        if name not in train:
            what = f"is no source of data.train ({', '.join(train)}); leave it out"
            yield f"distillation.teachers.{name}", "no-source", what


def _rounds(recipe: Recipe) -> Problems:
    settings, data = recipe.distillation, recipe.data
    if settings is None or settings.answers == "data":
        return
    key = "distillation.answers"
    if data.packing:
        what = "needs data.packing=false: how many tokens a row has is known after it is answered"
        yield key, "needs-data.packing", what
    if isinstance(data.train, dict):
        what = "not available with a mixture in data.train; give a list"
        yield key, "not-with-data.train", what
    if (url := settings.endpoint) is not None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            what = "must be a URL, such as http://localhost:8000/v1"
            yield "distillation.endpoint", "no-url", what
        elif parts.username or parts.password or parts.query:
            what = "the run records it, so it may hold no secret; set OPENAI_API_KEY instead"
            yield "distillation.endpoint", "secret", what


def _mixture(recipe: Recipe) -> Problems:
    train = recipe.data.train
    if not isinstance(train, dict):
        for key in ("mixture_unit", "mixture_stages"):
            if getattr(recipe.data, key) not in ("sequences", None):
                what = "needs a mixture in data.train: {NAME: {files: [...], weight: 1}, ...}"
                yield f"data.{key}", "needs-mixture", what
        return
    if recipe.model.task == "masked_lm" and recipe.data.builder is None:
        what = "a mixture is not available with model.task: masked_lm; give a list"
        yield "data.train", "mixture-not-with-model.task", what
    sized = [name for name, source in train.items() if source.weight == "size"]
    for name in sized if len(sized) < len(train) else ():
        what = "size does not mix with the numbers of other sources; give each a number, or none"
        yield f"data.train.{name}.weight", "mixed-weights", what
    limited = [f"data.train.{name}.max_epochs" for name, one in train.items() if one.max_epochs]
    if recipe.data.mixture_unit != "sequences":
        limited.append("data.mixture_unit")
    if recipe.data.mixture_stages is not None:
        limited.append("data.mixture_stages")
    for key in limited:
        if sized:
            yield key, "needs-weights", "needs a weight, a number, for each source of data.train"
        if recipe.data.streaming:
            what = "not available with data.streaming, where the size of the data is not known"
            yield key, "not-with-data.streaming", what
    weighted = [name for name, source in train.items() if source.loss_weight not in (None, 1)]
    if weighted and recipe.data.kind not in TOKEN_KINDS:
        what = f"needs losses of tokens (data.kind: {', '.join(TOKEN_KINDS)})"
        yield f"data.train.{weighted[0]}.loss_weight", "needs-data.kind", what
    elif weighted and recipe.data.streaming:
        what = "not available with data.streaming"
        yield f"data.train.{weighted[0]}.loss_weight", "not-with-data.streaming", what
    before = 0
    for number, stage in enumerate(recipe.data.mixture_stages or ()):
        key = f"data.mixture_stages.{number}"
        if stage.until_step <= before:
            what = f"must be larger than that of the stage before, {before:,}"
            yield f"{key}.until_step", "order", what
        before = stage.until_step
        if stage.weights.keys() != train.keys():
            what = f"must name the sources of data.train, all of them: {', '.join(train)}"
            yield f"{key}.weights", "other-sources", what
        elif not any(stage.weights.values()):
            yield f"{key}.weights", "no-source", "one of them must be above 0"


def _kinds_of_rows(recipe: Recipe) -> Problems:
    model, data = recipe.model, recipe.data
    if data.builder is not None:
        return
    of_task = (rules for rules in OBJECTIVES if rules.task == model.task)
    if data.kind not in {kind for rules in of_task for kind in rules.kinds}:
        what = f"{data.kind} is not for model.task: {model.task}"
        yield "data.kind", "not-for-model.task", what
    rules = objective_of(recipe)
    if rules.section and rules.required_key and getattr(recipe, rules.section) is None:
        what = f"needs the section {rules.section}, such as {rules.required_key}"
        yield "data.kind", f"needs-{rules.section}", what
    for path, _, kind in _sections(recipe):
        if kind != data.kind and not {kind, data.kind} <= {*TOKEN_KINDS}:
            what = f"{kind} does not mix with data.kind {data.kind}: the losses differ"
            yield (*path, "kind"), "mixed-losses", what


def _labels(recipe: Recipe) -> Problems:
    labels, classes = recipe.data.labels, recipe.model.num_labels
    if recipe.data.builder is not None:
        return
    if labels is not None and classes not in (None, len(labels)):
        what = f"{classes}, but data.labels names {len(labels)}"
        yield "model.num_labels", "not-as-data.labels", what
    if labels is not None and (len(labels) < 2 or len(set(labels)) < len(labels)):
        what = f"must name two classes or more, each once; got {', '.join(labels)}"
        yield "data.labels", "two-classes", what


def _columns(recipe: Recipe) -> Problems:
    """The names of columns of section `data` and of sources: of roles that rows of the kind have, and
    each role and each column once. An answer would be trained on itself."""
    for path, section, kind in _sections(recipe):
        is_source = len(path) > 1
        kinds = {kind} if is_source else kinds_of(recipe)
        used: dict[str, str] = {}
        for name in section.columns or ():
            role, where = role_of(name), (*path, "columns", name)
            if role is None:
                known = [role for role in NAMES if role not in EXPLICIT_ONLY]
                what = f"no column of a row is called so; known here: {', '.join(known)}"
                if name in EXPLICIT_ONLY:
                    what = f"has a key of its own: data.{KEYS[name]}"
                yield where, "no-such-role", what
                continue
            able, key = _kinds_with(role).split(), KEYS.get(role, "")
            if not kinds & {*able}:
                yield where, "needs-data.kind", f"needs data.kind={' or '.join(able)}"
            if role in used:
                what = f"is another name for {used[role]}; give one of them"
                yield where, "role-twice", what
            elif key and getattr(section, key) not in (None, default_of(f"data.{key}")):
                what = f"{'.'.join(map(str, path))}.{key} is given too; give one of them"
                yield where, "role-twice", what
            used[role] = name
        keys: dict[str, KeyPath] = {}
        values = {key: getattr(section, key, None) for key in (*KEYS.values(), "columns")}
        for role, column in named_columns(values).items():
            where = (*path, "columns", used[role]) if role in used else (*path, KEYS[role])
            if is_source and role not in used and kind not in _kinds_with(role).split():
                able = _kinds_with(role).split()
                yield where, "needs-kind", f"needs kind={' or '.join(able)}"
            if column in keys:
                other = ".".join(map(str, keys[column]))
                what = f"{column!r} is the column of {other} too; a column has one role"
                yield where, "column-twice", what
            keys.setdefault(column, where)


def _overlong(recipe: Recipe) -> Problems:
    for path, section, kind in _sections(recipe):
        if KINDS[kind].learned == "whole answers" and section.overlong == "cut":
            what = f"not for kind {kind}, whose answers must be whole; use drop"
            yield (*path, "overlong"), "not-for-kind", what
        if KINDS[kind].is_cut_by_tokenizer and section.overlong in ("drop", "error"):
            yield (*path, "overlong"), "not-for-kind", f"not for kind {kind}, whose texts are cut"


def _packed_lengths(recipe: Recipe) -> Problems:
    tokens, data = recipe.batch.micro_batch_tokens, recipe.data
    packed = data.packing and KINDS[data.kind].learned != "class"
    if tokens is not None and data.batch_unit == "queries" and not data.packing:
        what = "needs data.packing=true for kind retrieval, whose rows are texts of several queries"
        yield "batch.micro_batch_tokens", "needs-data.packing", what
    for key, given in (
        ("batch.micro_batch_tokens", tokens is not None and not data.joins_rows),
        ("data.similar_lengths", data.similar_lengths),
    ):
        if given and packed:
            what = "needs data.packing=false; packed sequences are all as long"
            yield key, "needs-data.packing", what


def _micro_batch_tokens(recipe: Recipe) -> Problems:
    tokens, data = recipe.batch.micro_batch_tokens, recipe.data
    if tokens is not None and tokens < data.row_length:
        what = f"a sequence of {data.sequence_length} tokens (data.sequence_length)"
        if data.batch_unit == "pairs":
            what = f"a pair of {data.row_length} tokens (twice data.sequence_length)"
        elif data.batch_unit == "queries":
            what = f"a query with {data.documents} documents (data.documents), {data.row_length} tokens"
        yield "batch.micro_batch_tokens", "too-small", f"{tokens} does not hold {what}"


_TEMPLATE_VALUES = (
    "messages",
    "conversations",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "return_assistant_tokens_mask",
)


def _template_values(recipe: Recipe) -> Problems:
    for name in recipe.data.chat_template_kwargs or {}:
        if name in _TEMPLATE_VALUES or name.endswith("_token"):
            what = "is set by the launcher; give only values of the template's own"
            yield ("data", "chat_template_kwargs", name), "set-by-launcher", what


def _pair_template(recipe: Recipe) -> Problems:
    template = recipe.data.pair_template
    if template is None or template in PAIR_TEMPLATES:
        return
    if missing := [name for name in ("{query}", "{document}") if template.count(name) != 1]:
        what = f"must have {' and '.join(missing)} once, in whose place the texts are written; or be a "
        what += f"name: {', '.join(PAIR_TEMPLATES)}"
        yield "data.pair_template", "lacks-a-part", what


def _part_weights(recipe: Recipe) -> Problems:
    weights = recipe.data.loss_weights or {}
    if not any(weights.get(part, 1.0) for part in get_args(MessagePart)):
        yield "data.loss_weights", "all-zero", "one weight must be above 0, or no token has loss"


def _empty_template(recipe: Recipe) -> Problems:
    template = recipe.data.chat_template
    if template is not None and os.path.isfile(template) and not os.path.getsize(template):
        yield "data.chat_template", "empty-file", f"the file {template} is empty"


# Optimizer, evaluation, checkpoints, Slurm


def _groups_of_parameters(recipe: Recipe) -> Problems:
    for index, group in enumerate(recipe.optimizer.groups or ()):
        if group.learning_rate_ratio == 1 and group.weight_decay is None:
            what = "changes nothing; give learning_rate_ratio or weight_decay"
            yield ("optimizer", "groups", index), "no-change", what


def _one_tower(recipe: Recipe) -> Problems:
    images, videos = recipe.images, recipe.videos
    for key in ("train", "learning_rate_ratio") if images and videos else ():
        first, second = getattr(images, key), getattr(videos, key)
        if first != second:
            what = f"images and videos have one tower, and images.{key} is {first}"
            yield f"videos.{key}", "one-tower", f"{what}; give both the same value"


def _metrics(recipe: Recipe) -> Problems:
    generate, keep_best = recipe.evaluation.generate, recipe.checkpoint.keep_best
    known = ["eval_loss", *(f"eval_{name}" for name in objective_of(recipe).scores)]
    if recipe.model.mtp is not None:
        known.append("eval_mtp_accuracy_1")
    if generate is not None:
        if KINDS[recipe.data.kind].learned != "answers":
            mixed = isinstance(recipe.data.train, dict)
            why = ", which is the kind of data.validation, too" if mixed else ""
            what = f"needs data.kind=chat or instruct{why}"
            yield "evaluation.generate", "needs-data.kind", what
        known += [f"eval_{metric.rpartition(':')[2]}" for metric in generate.metrics]
        length = recipe.data.sequence_length
        if generate.max_new_tokens >= length:
            what = f"leaves no room for a prompt in {length} tokens (data.sequence_length)"
            what = f"{generate.max_new_tokens} {what}"
            yield "evaluation.generate.max_new_tokens", "too-large", what
    if keep_best is not None and keep_best not in known:
        what = f"no such metric: {keep_best}; this run has {', '.join(known)}"
        yield "checkpoint.keep_best", "no-such-metric", what


def _whole_export(recipe: Recipe) -> Problems:
    model, checkpoint = recipe.model, recipe.checkpoint
    changed = model.path is not None and model.config
    if recipe.lora and changed and checkpoint.export and not checkpoint.export_merged:
        what = "must be true with model.config and model.path: an adapter has no config of a model"
        yield "checkpoint.export_merged", "needed-with-model.config", what
    if recipe.lora and recipe.model.mtp and checkpoint.export and not checkpoint.export_merged:
        what = "must be true with model.mtp: an adapter does not hold layers that are trained whole"
        yield "checkpoint.export_merged", "needed-with-model.mtp", what
    init = "default" if recipe.lora is None else recipe.lora.init
    if init != "default" and checkpoint.export and not checkpoint.export_merged:
        what = (
            f"must be true with lora.init={init}: the adapter belongs to frozen weights that are "
        )
        yield "checkpoint.export_merged", "needed-with-lora.init", f"{what}not those of the model"


def _nodes(recipe: Recipe) -> Problems:
    nodes = "1" if recipe.slurm is None else str(recipe.slurm.nodes)
    first, _, last = nodes.partition("-")
    if last and int(last) < int(first):
        what = f"must be a number, or a range such as 2-4; got {nodes!r}"
        yield "slurm.nodes", "form", what
    train_nodes = None if recipe.slurm is None else recipe.slurm.train_nodes
    if train_nodes is not None and train_nodes > int(first):
        what = (
            f"must be at most {first}, as slurm.nodes={nodes} may give no more; got {train_nodes}"
        )
        yield "slurm.train_nodes", "too-large", what


def _has_checkpoints(recipe: Recipe) -> bool:
    return any(Path(recipe.run.dir, "checkpoints").glob("step_*"))


def _resume(recipe: Recipe) -> Problems:
    resume = recipe.checkpoint.resume
    # A run with checkpoints of its own resumes from these: the named one may be gone by then
    if resume in ("auto", "never") or os.path.isdir(resume) or _has_checkpoints(recipe):
        return
    what = "give auto, never, or a checkpoint such as runs/NAME/checkpoints/step_00000500"
    yield "checkpoint.resume", "no-such-path", f"{no_such('folder', resume)}; {what}"


# Ranks


def _batches(recipe: Recipe, ranks: int | None) -> Problems:
    size, micro = recipe.batch.global_batch_size, recipe.batch.micro_batch_size
    if micro is None:  # batches are formed by tokens: of any number of sequences
        return
    if isinstance(size, AutoInt):  # chosen to be one
        return
    unit = 1 if micro == "auto" else micro
    resume = recipe.checkpoint.resume
    resumes = _has_checkpoints(recipe) if resume == "auto" else resume != "never"
    resumes = resumes or recipe.checkpoint.copy_to is not None  # where there may be checkpoints
    if size % unit == 0 and resumes:
        return  # perhaps on another number of ranks: the last micro-batches may be smaller
    factors = [] if micro == "auto" else [f"{micro} (micro-batch)"]
    if ranks is not None:
        # Only the sizes that this is about: the others may be unsound
        keys = [each.key for each in PARALLEL_SIZES if each.same_sequences]
        given = {key: getattr(recipe.strategy, key) for key in keys}
        sizes = LayoutSizes(size=ranks, **given)
        if any(sizes.problems()):  # `_groups` refuses them
            return
        unit *= sizes.data_parallel_size
        divisors = "".join(f" / {n} (strategy.{each.key})" for each, n in sizes.same_sequences)
        factors.append(f"{ranks} (ranks){divisors}")
    if size % unit:
        below = size // unit * unit
        advice = " or ".join(str(multiple) for multiple in (below, below + unit) if multiple)
        product = " x ".join(factors) + (f" = {unit}" if len(factors) > 1 else "")
        what = f"{size} is not a multiple of {product}; try {advice}"
        yield "batch.global_batch_size", "not-a-multiple", what


def _groups(recipe: Recipe, ranks: int | None) -> Problems:
    if ranks is None:
        return
    sizes = sizes_of(recipe.strategy)
    if recipe.strategy.kind == "ddp":  # another rule refuses to replicate
        sizes["replicate"] = 1
    for key, what in LayoutSizes(size=ranks, **sizes).problems():
        yield f"strategy.{key}", "does-not-divide-ranks", what


def _context(recipe: Recipe, ranks: int | None) -> Problems:
    size, length = recipe.strategy.context_parallel_size, recipe.data.sequence_length
    ring = recipe.strategy.context_parallel_ring
    if ring is not None and ring > 1 == size:
        yield _RING, f"needs-{_CONTEXT}", f"needs {_CONTEXT} above 1"
    elif ring is not None and size % ring:
        divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        what = f"{ring} does not divide {size} ({_CONTEXT}); try one of {divisors}"
        yield _RING, "does-not-divide", what
    if isinstance(length, AutoInt):  # chosen to be one
        return
    if length % size and (ranks or 0) % size == 0:  # else `_groups` refuses the size
        what = f"is not a multiple of {size} ({_CONTEXT}); try {-(-length // size) * size}"
        yield "data.sequence_length", "not-a-multiple", f"{length} {what}"


def _profile(recipe: Recipe, ranks: int | None) -> Problems:
    profile, max_steps = recipe.profile, recipe.run.max_steps
    if profile is None:
        return
    largest = max(profile.ranks or (), default=0)
    if ranks is not None and largest >= ranks:
        what = f"there is no rank {largest} of {ranks}, which count from 0"
        yield "profile.ranks", "no-such-rank", what
    first, last = profile.start_step, profile.start_step + profile.steps - 1
    if max_steps is not None and last > max_steps:
        what = f"steps {first} to {last} go beyond run.max_steps {max_steps}"
        yield "profile.steps", "beyond-run.max_steps", what


# Files of the data, which a plan does not need


def _tokenizer(recipe: Recipe) -> Problems:
    name, template = recipe.data.tokenizer, recipe.data.chat_template
    if template is not None and (problem := template_problem(template)) is not None:
        yield "data.chat_template", "no-such-path", problem
    if recipe.data.builder is not None or kinds_of(recipe) == {"tokens"} or name == "bytes":
        return
    what = "give `bytes`, a folder with a tokenizer, or a hub id `owner/name`"
    named = recipe.model.config is not None or recipe.model.builder is not None
    if name is None and recipe.model.path is None and named:  # a model that is missing is reported
        what = f"missing; a model.config or model.builder has none of its own: {what}"
        yield "data.tokenizer", "missing", what
    if name is not None and not is_fetched(name) and not os.path.isdir(name):
        yield "data.tokenizer", "no-such-path", f"{no_such_name('folder', name)}; {what}"


def _data_files(recipe: Recipe) -> Problems:
    if recipe.data.train is None and recipe.data.builder is None:
        yield "data.train", "missing", "missing; give data.train or data.builder"
    for key, name in _other_names(recipe):
        if is_in_store(name) and problem_of(name) is None and (missing := refusal(name)):
            yield key, "not-installed", missing
    for where, pattern in _patterns(recipe):
        if is_in_store(pattern):  # which one rank asks for its objects, once the data is opened
            missing = None if problem_of(pattern) else refusal(pattern)
            if missing is not None:
                yield where, "not-installed", missing
        elif is_of_system(pattern):
            yield where, "file-of-system", f"{pattern} holds files of the system, not data"
        elif not matching(pattern) and not is_hub_id(pattern):
            yield where, "no-such-path", no_such_name("file or folder", pattern)


def _stores(recipe: Recipe) -> Problems:
    for where, pattern in _patterns(recipe):
        if is_in_store(pattern) and (problem := problem_of(pattern)) is not None:
            yield where, "store", problem
    for key, name in _other_names(recipe):  # models are not read from web servers
        problem = problem_of(name) if scheme_of(name) not in (None, *WEB) else None
        if problem is not None:
            yield key, "store", problem
    if recipe.checkpoint.copy_to is not None:
        yield from _copy_to(recipe.checkpoint.copy_to, recipe)


def _copy_to(copy: str, recipe: Recipe) -> Problems:
    """What is wrong with a folder for copies, beside its name."""
    if not is_in_store(copy):
        own, folder = (os.path.realpath(path) for path in (recipe.run.dir, copy))
        if os.path.commonpath([own, folder]) in (own, folder):
            what = f"must not overlap with run.dir ({recipe.run.dir}); give a folder elsewhere"
            yield "checkpoint.copy_to", "copy-in-run", what
    elif problem_of(copy) is not None:
        return
    elif copy.partition("://")[0] in READ_ONLY:
        what = "is only read; give s3://, gs:// or az://BUCKET/FOLDER, or a path"
        yield "checkpoint.copy_to", "store", what
    elif {"", ".", ".."} & {*copy.rstrip("/").split("/")[3:]}:
        yield "checkpoint.copy_to", "store", "give the folder without //, /./ and /../"
    elif any(mark in copy for mark in "*?["):
        yield "checkpoint.copy_to", "store", "give one folder, not a pattern"
    elif copy.rstrip("/").count("/") < 3:
        what = f"give a folder of the run's own, such as {copy.rstrip('/')}/{recipe.run.name}"
        yield "checkpoint.copy_to", "store", what


def _other_names(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """The names of folders that may be in stores, beside the data, and their keys."""
    yield from ((key, name) for key, name, _ in named_models(recipe))
    if recipe.checkpoint.copy_to is not None:
        yield "checkpoint.copy_to", recipe.checkpoint.copy_to


def _patterns(recipe: Recipe) -> Iterator[tuple[KeyPath, str]]:
    """The names of files of data, and their keys."""
    train, validation = recipe.data.train, recipe.data.validation
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
            yield (*key.split("."), index), pattern


def _pipeline_schedule(recipe: Recipe) -> Problems:
    strategy = recipe.strategy
    if strategy.pipeline_schedule != "1f1b" and strategy.pipeline_parallel_size == 1:
        yield "strategy.pipeline_schedule", f"needs-{_PIPELINE}", f"needs {_PIPELINE} above 1"
    if strategy.pipeline_blocks is None:
        return
    key, count = "strategy.pipeline_blocks", len(strategy.pipeline_blocks)
    if strategy.pipeline_parallel_size == 1:
        yield key, f"needs-{_PIPELINE}", f"needs {_PIPELINE} above 1"
    elif count != (stages := strategy.pipeline_parallel_size * strategy.stages_of_rank):
        yield (
            key,
            "one-for-each-stage",
            f"has {count} numbers for {stages} stages; give one for each",
        )


_RULES = (
    _pipeline_schedule,
    _paths_of_models,
    _adapter_targets,
    _attention,
    _config,
    _sizes,
    _new_tokens,
    _teachers,
    _rounds,
    _mixture,
    _label_smoothing,
    _streaming,
    _kinds_of_rows,
    _labels,
    _columns,
    _overlong,
    _packed_lengths,
    _micro_batch_tokens,
    _template_values,
    _pair_template,
    _part_weights,
    _empty_template,
    _groups_of_parameters,
    _one_tower,
    _metrics,
    _whole_export,
    _nodes,
    _resume,
    _stores,
)
_RANK_RULES = (_batches, _groups, _context, _profile)
_FILE_RULES = (_tokenizer, _data_files)
"""Rules that look for the files of the data. A plan does not need these files."""
