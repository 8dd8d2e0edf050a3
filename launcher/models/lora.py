"""Low-rank adapters with peft: chooses the weights that get one, and adds them to a meta model."""

from __future__ import annotations

import fnmatch
import logging
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.models.adapted import (
    AdaptedExperts,
    AdaptedLinear,
    adapter_parameters,
    is_transposed,
    mark_adapted,
    scale_of,
    set_init,
)
from launcher.models.description import (
    describe,
    embeddings,
    has_no_head,
    is_classifier,
    parts_without_text,
)
from launcher.models.dora import Dora
from launcher.models.grouped_experts import add_factors, expert_weights
from launcher.models.names import clean_name
from launcher.models.new_rows import add_new_rows
from launcher.models.read_by_weight import read_by_weight
from launcher.models.ties import tied_names
from launcher.models.towers import is_of_projector, seen_by
from launcher.recipe.schema import Lora
from launcher.sources.hub import split_revision
from launcher.sources.layouts import nouns_of

logger = logging.getLogger(__name__)

ALL_LINEAR = "all-linear"
"""Entry of target_modules, as in peft."""
_MOST_PARAMETERS = 0.5
"""Share of the parameters from which on experts get adapters by default."""


def add_adapters(
    model: nn.Module,
    lora: Lora,
    *,
    base_dtype: torch.dtype,
    kept: Container[str] = (),
    base: str | None = None,
    new_ids: range = range(0),
) -> None:
    """Adds a float32 adapter to each target of a meta model: layers, and weights of experts. Freezes
    everything else but modules_to_save, a classifier's head, which has no pretrained weights, and the rows of the
    embeddings for `new_ids`, and stores it in `base_dtype`, but for the `kept` parameters, by clean
    name.

    `base` is the checkpoint that the adapters belong to, for peft. Raises RecipeError if
    target_modules names something other than a linear layer of the model, target_parameters
    something other than a weight of experts, or modules_to_save something that cannot be trained
    whole.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    saved = _saved_modules(model, lora)
    adapted = _expert_targets(model, lora, saved)
    targets, skipped = _targets(model, lora, saved, may_be_empty=bool(adapted))
    layers = _linear_layers(model, targets)
    if lora.dora:
        _refuse_dora(model, layers)
    if lora.init != "default":
        _refuse_init(model, lora, layers, adapted)
    revision = None
    if base is not None and Path(base).is_dir():
        base = str(Path(base).resolve())
    elif base is not None:
        base, revision = split_revision(base)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha,
        lora_dropout=lora.dropout,
        use_rslora=lora.rank_stabilized,
        use_dora=lora.dora,
        target_modules=targets,
        bias="none",
        task_type=_task_type(model),
        base_model_name_or_path=base,
        revision=revision,
        fan_in_fan_out=any(map(is_transposed, layers.values())),
    )
    if targets:
        try:
            inject_adapter_in_model(config, model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise RecipeError(f"lora.target_modules: peft refuses it: {error}") from None
    else:  # peft finds nothing to do
        model.peft_config = {"default": config}  # type: ignore[assignment]
    weights, scale = expert_weights(model), scale_of(config.to_dict())
    for weight in adapted:
        module, name = weights[weight]
        add_factors(module, name, rank=lora.rank, scale=scale)
        mark_adapted(module, AdaptedExperts)
    config.target_parameters = _shortened_parameters(model, adapted) or None
    config.modules_to_save = saved or None  # not before injection: peft would copy them
    config.trainable_token_indices = add_new_rows(model, new_ids, saved) or None
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            mark_adapted(layer, AdaptedLinear)
            set_init(layer, lora.init)
            layer.lora_variant = dict.fromkeys(layer.lora_variant, Dora)
    experts, adapters = [], adapter_parameters(model)
    for name, parameter in model.named_parameters():
        trained = clean_name(name) in adapters or _is_in(name, saved)
        parameter.requires_grad_(trained)
        if not trained and parameter.is_floating_point() and clean_name(name) not in kept:
            parameter.data = parameter.data.to(base_dtype)
        if ".experts." in name and parameter.ndim == 3 and not trained and name not in adapted:
            experts.append(name)
    _note_layers_without(model, lora, experts, skipped)


def _note_layers_without(
    model: nn.Module, lora: Lora, experts: list[str], skipped: list[str]
) -> None:
    """Logs which tensors and layers get no adapters."""
    if experts:
        can = experts[0] in expert_weights(model)
        add = "lora.target_parameters adds some" if can else "their class computes in another way"
        if can and (option := _unfit_for_experts(lora)):
            add = f"lora.{option} cannot be computed for them"
        logger.info(
            f"note: {len(experts)} weights of experts get no adapters, such as {experts[0]}; {add}"
        )
    if skipped:
        logger.info(
            f"note: {len(skipped)} linear layers get no adapters, to whose names peft gives another "
            f"meaning in this model, such as {skipped[0]}"
        )
    if odd := _odd_layers(model):
        name, module = next(iter(odd.items()))
        logger.info(
            "note: layers that compute more than a linear layer get no adapters: "
            f"{len(odd)} such as {name}, a {type(module).__name__}"
        )


def _is_in(name: str, modules: Collection[str]) -> bool:
    return name.startswith(tuple(f"{module}." for module in modules))


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer is a product with its weight, so that the output of an adapter can be added.
    A subclass with a forward method of its own, such as a router, is none; that of Falcon is."""
    kind = type(module)
    if isinstance(module, nn.Linear):
        return kind.forward is nn.Linear.forward or kind.__name__ == "FalconLinear"
    return is_transposed(module)


def _odd_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Layers of the text model that are derived from nn.Linear and compute something else."""
    unused = {name.rpartition(".")[0] for name in parts_without_text(model)}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not _is_linear(module) and name not in unused
    }


def _last_parts(names: Iterable[str]) -> list[str]:
    return sorted({name.rpartition(".")[2] for name in names})


def _matches(name: str, target: str) -> bool:
    """Whether the name of a module is a target: it ends in it, or matches it as a pattern."""
    if any(character in target for character in "*?["):
        return fnmatch.fnmatchcase(name, target)
    return f".{name}".endswith(f".{target}")


def _linear_layers(model: nn.Module, targets: Iterable[str]) -> dict[str, nn.Module]:
    """The linear layers that are targets, by name."""
    targets = list(targets)
    return {
        name: module
        for name, module in model.named_modules()
        if _is_linear(module) and any(_matches(name, target) for target in targets)
    }


def _targets(
    model: nn.Module, lora: Lora, saved: list[str], *, may_be_empty: bool
) -> tuple[list[str], list[str]]:
    """peft's target_modules; and layers that get no adapter because peft gives their names to
    experts. Neither has layers in the `saved` modules. may_be_empty: no target is not an error,
    because experts get adapters."""
    layers = [name for name, module in model.named_modules() if _is_linear(module)]
    within = tuple(f"{module}." for module in saved)
    unused = {name.rpartition(".")[0] for name in parts_without_text(model)}
    layers = [name for name in layers if name not in unused]
    free = [name for name in layers if not f"{name}.".startswith(within)]
    if lora.target_modules is None:
        blocks = tuple(f"{block}." for block in describe(model).blocks)
        wanted = [name for name in layers if name.startswith(blocks)]
    elif lora.target_modules == (ALL_LINEAR,):
        head = embeddings(model)[1]
        wanted = [name for name in layers if model.get_submodule(name) is not head]
    else:
        return _named_targets(model, lora.target_modules, free, unused), []
    inside = [name for name in wanted if name in free]
    if wanted and not inside and lora.modules_to_save:
        raise RecipeError(
            f"lora.modules_to_save: {', '.join(lora.modules_to_save)}: this trains whole all layers "
            "that could get an adapter; name fewer modules, or set lora=null to train all weights"
        )
    readers = read_by_weight(model)
    if read := [name for name in inside if model.get_submodule(name) in readers]:
        logger.info(
            f"note: {len(read)} linear layers get no adapters, such as {read[0]}: "
            f"{readers[model.get_submodule(read[0])]} gives their weights to kernels"
        )
        inside = [name for name in inside if name not in read]
    taken = _taken_by_experts(model, inside)
    skipped = [name for name in inside if name.rpartition(".")[2] in taken]
    inside = [name for name in inside if name not in skipped]
    if not inside and not may_be_empty:
        raise RecipeError(
            f"lora.target_modules: missing; {type(model).__name__} has no linear layers in its "
            f"blocks to choose: name some of {', '.join(_last_parts(layers))}"
        )
    return _shortened(model, inside), skipped


def _named_targets(
    model: nn.Module, targets: Sequence[str], free: list[str], unused: Container[str]
) -> list[str]:
    """peft's target_modules for those of a recipe, without layers that are `unused`. Raises
    RecipeError if one of them is not a `free` linear layer."""
    available, problems = ", ".join(_last_parts(free)), []
    taken, chosen = _taken_by_experts(model, free), list[str]()
    readers = read_by_weight(model)
    for target in targets:
        everywhere = list(_linear_layers(model, [target]))
        matched = [name for name in everywhere if name not in unused]
        chosen += [name for name in matched if name not in chosen]
        if target == ALL_LINEAR:
            problems.append(f"{ALL_LINEAR} stands alone: leave out the others")
        elif everywhere and not matched:
            what = f"{everywhere[0]} is in a part that text does not use"
            if kinds := seen_by(model):
                what = (
                    f"{everywhere[0]} is not in the text model, whose layers alone get adapters; "
                )
                what += f"lora.modules_to_save trains the projector of {nouns_of(kinds)} whole"
            problems.append(f"{target}: {what}; available: {available}")
        elif odd := [name for name in _odd_layers(model) if not matched and _matches(name, target)]:
            kind = type(model.get_submodule(odd[0])).__name__
            what = f"{odd[0]} is a {kind}, which computes more than a linear layer"
            problems.append(f"{target}: {what} and gets no adapter; available: {available}")
        elif not matched:
            what = "matches no" if set("*?[") & set(target) else "is not a"
            problems.append(f"{target} {what} linear layer of the model; available: {available}")
        elif whole := [name for name in matched if name not in free]:
            problems.append(f"{target}: {whole[0]} is trained whole, by lora.modules_to_save")
        elif read := [name for name in matched if model.get_submodule(name) in readers]:
            reader = readers[model.get_submodule(read[0])]
            problems.append(
                f"{target}: {reader} gives the weight of {read[0]} to kernels, which would pass an "
                "adapter by; name other layers"
            )
        elif others := taken & {*_last_parts(matched)}:
            problems.append(
                f"{target}: peft takes {', '.join(sorted(others))} for names of this model's "
                "experts; name other layers, and experts in lora.target_parameters"
            )
    if problems:
        raise RecipeError([f"lora.target_modules: {problem}" for problem in problems])
    if len(chosen) == _matched_by(model, targets) and not set("*?[") & set("".join(targets)):
        return list(targets)
    return _shortened(model, chosen)


def _expert_targets(model: nn.Module, lora: Lora, saved: list[str]) -> list[str]:
    """The weights of experts that get an adapter, by clean name. Raises RecipeError if
    target_parameters names something else, or if an option is not available for them."""
    within, unused = tuple(f"{module}." for module in saved), {*parts_without_text(model)}
    weights = [
        name for name in expert_weights(model) if not name.startswith(within) and name not in unused
    ]
    unfit = _unfit_for_experts(lora)
    if lora.target_parameters is not None:  # a rule of recipes refuses what is unfit for them
        return _named_parameters(weights, lora.target_parameters)
    if lora.target_modules is None:
        return _default_experts(model, weights, unfit)
    if lora.target_modules != (ALL_LINEAR,):
        return []
    if weights and unfit:
        what = (
            f"not available with experts, which target_modules: {ALL_LINEAR} includes: it cannot "
        )
        what += "be computed for experts without a whole weight of each; turn it off, or set "
        raise RecipeError(f"lora.{unfit}: {what}lora.target_parameters=[]")
    return weights


def _unfit_for_experts(lora: Lora) -> str | None:
    """The option of a recipe that cannot be computed for adapters of experts."""
    return "dropout" if lora.dropout else "dora" if lora.dora else None


def _named_parameters(weights: Sequence[str], entries: Iterable[str]) -> list[str]:
    """The weights of experts that entries of target_parameters name."""
    found, problems = list[str](), []
    for entry in entries:
        matched = [name for name in weights if _matches(name, entry)]
        found += [name for name in matched if name not in found]
        if not matched:
            available = sorted({".".join(name.split(".")[-2:]) for name in weights})
            what = f"no weight of experts is named {entry}"
            names = ", ".join(available) or "none that an adapter can be computed for"
            problems.append(f"lora.target_parameters: {what}; available: {names}")
    if problems:
        raise RecipeError(problems)
    return [name for name in weights if name in found]


def _default_experts(model: nn.Module, weights: list[str], unfit: str | None) -> list[str]:
    """The weights of experts, if they hold most parameters of the text model and the option `unfit`
    is off; logs which get adapters."""
    unused = {*parts_without_text(model)}
    sizes = {clean_name(n): p.numel() for n, p in model.named_parameters() if n not in unused}
    share = sum(sizes[name] for name in weights) / max(1, sum(sizes.values()))
    if share <= _MOST_PARAMETERS:
        return []
    text = f"note: experts hold {share:.0%} of the parameters"
    if unfit is not None:
        logger.info(f"{text} and get no adapters, which lora.{unfit} cannot be computed for")
        return []
    logger.info(
        f"{text} and get adapters: {len(weights)} weights such as {weights[0]}; "
        "lora.target_parameters=[] leaves them out"
    )
    return weights


def _shortened_parameters(model: nn.Module, weights: Collection[str]) -> list[str]:
    """peft's target_parameters for these weights: the last two parts of their names if no other
    parameter has them, else the names."""
    short = sorted({".".join(name.split(".")[-2:]) for name in weights})
    names = (clean_name(name) for name, _ in model.named_parameters())
    matched = sum(any(_matches(name, entry) for entry in short) for name in names)
    return short if matched == len(weights) else [*weights]


def _shortened(model: nn.Module, layers: list[str]) -> list[str]:
    """The last parts of the names of layers if other modules do not have them, else the names."""
    short = _last_parts(layers)
    return layers if _matched_by(model, short) > len(layers) else short


def _matched_by(model: nn.Module, targets: Collection[str]) -> int:
    """The number of modules that peft would give adapters for these ends of names."""
    return sum(any(_matches(name, t) for t in targets) for name, _ in model.named_modules())


def _taken_by_experts(model: nn.Module, layers: Iterable[str]) -> set[str]:
    """Last parts of names that peft (0.19 and newer) takes for the names that experts had in
    transformers 4, of mixtures that also have such layers without experts (DeepSeek-V3).
    It gives adapters to the experts, and none to the layers."""
    from peft import LoraConfig

    names = _last_parts(layers)
    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:
        return set()
    config = LoraConfig(target_modules=names)
    convert_peft_config_for_transformers(config, model, None)
    return {*names}.difference(config.target_modules or ())


def _task_type(model: nn.Module) -> str:
    """peft's name for what the model does."""
    if has_no_head(model):
        return "FEATURE_EXTRACTION"
    return "SEQ_CLS" if is_classifier(model) else "CAUSAL_LM"


def _saved_modules(model: nn.Module, lora: Lora) -> list[str]:
    """Names of modules that are trained whole: a classifier's modules outside its base model, and
    those of modules_to_save with what shares their weights. Raises RecipeError if there is no such
    module, or if one shares a weight with a target of an adapter."""
    modules = {name: module for name, module in model.named_modules() if [*module.parameters()]}
    saved, problems = [], []
    if is_classifier(model):
        outside = (name for name, _ in model.named_children() if name != model.base_model_prefix)
        saved = [name for name in outside if name in modules]
    blocks = tuple(f"{block}." for block in describe(model).blocks)
    unused, kinds = parts_without_text(model), seen_by(model)
    for entry in lora.modules_to_save or ():
        found = [name for name in modules if name and _matches(name, entry)]
        saved += [name for name in found if name not in saved]
        rest = [other for other in unused if other.startswith(tuple(f"{name}." for name in found))]
        rest = [other for other in rest if not is_of_projector(other, kinds)]
        if rest:
            what = f"{entry}: {found[0]} has weights that text does not use"
            if kinds:
                nouns = nouns_of(kinds)
                what = (
                    f"{entry}: {found[0]} is not only the projector of {nouns}, and of the parts "
                )
                what += "beside the text model lora trains no other"
            problems.append(f"lora.modules_to_save: {what}")
        if not found:
            outer = (name for name in _may_be_saved(model) if not name.startswith(blocks))
            names = ", ".join(_last_parts(outer))
            what = f"{entry} is not a module of the model; those outside of its blocks: {names}"
            problems.append(f"lora.modules_to_save: {what}")
    if problems:
        raise RecipeError(problems)
    for tied in tied_names(model):
        if any(_is_in(name, saved) for name in tied):
            saved += [n.rpartition(".")[0] for n in tied if not _is_in(n, saved)]
    return saved


def _may_be_saved(model: nn.Module) -> Iterator[str]:
    """Names of modules that modules_to_save may name: those of text with weights of their own, and
    with attachments the outermost ones of the projector."""
    unused, inside, kinds = {*parts_without_text(model)}, "\0", seen_by(model)
    for name, module in model.named_modules():
        within = {f"{name}.{weight}" for weight, _ in module.named_parameters()}
        own = {f"{name}.{weight}" for weight, _ in module.named_parameters(recurse=False)}
        if own and not own & unused:
            yield name
        elif not kinds or name.startswith(inside):
            continue
        elif within and within <= unused and all(is_of_projector(n, kinds) for n in within):
            yield name
            inside = f"{name}."


def _refuse_dora(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    head = embeddings(model)[1]
    for name, module in layers.items():
        if is_transposed(module) or module is head:
            kind = "the output layer" if module is head else f"a {type(module).__name__}"
            raise RecipeError(
                f"lora.dora: not available for {name}, which is {kind}; name other layers in "
                "lora.target_modules, or set lora.dora=false"
            )


def _refuse_init(
    model: nn.Module, lora: Lora, layers: Mapping[str, nn.Module], experts: Sequence[str]
) -> None:
    """Raises RecipeError if first values of adapters cannot be a part of the weights (lora.init)."""
    if experts:
        what = f"not available for experts, such as {experts[0]}; set lora.target_parameters=[]"
        raise RecipeError(f"lora.init: {what}")
    tied = {name for group in tied_names(model) for name in group}
    for name, module in layers.items():
        if f"{name}.weight" in tied:
            what = f"not available for {name}, whose weight is that of another module, too"
            raise RecipeError(f"lora.init: {what}; name other layers in lora.target_modules")
        size = min(module.get_parameter("weight").shape)
        if lora.rank > size:
            what = f"{lora.rank} is more than {size}, the rank that {name} can have"
            raise RecipeError(f"lora.rank: {what} (lora.init={lora.init})")
