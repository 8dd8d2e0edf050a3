"""The towers of a model whose rows have attachments beside text.

The features of a tower take the place of the embeddings of the tokens of attachments. This module
runs the towers on every rank in every micro-batch, puts their features there without waiting for the
device, and makes the masks of packed rows in which an attachment attends to itself in both directions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries.private import block_classes, replace_deepstack
from launcher.models.description import modules_without_text, parts_without_text, text_config
from launcher.models.record import record_of
from launcher.models.tower_inputs import (
    TOWERS,
    PatchGrid,
    TowerForm,
    TowerInputs,
    TowerOperations,
    form_of,
    is_of_tower,
    normalized,
    tower_kind,
)
from launcher.sources.layouts import ATTACHMENTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Trained = Literal["none", "projector", "all"]
_PROJECTORS = ("projector", "merger", "connector", "embed_vision")
"""Parts of the names of the modules between a tower and the text model."""
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of models that say which tokens are those of attachments."""
_FEATURES = ("pooler_output", "deepstack_features")
"""The outputs of a tower that models put in the place of the embeddings of attachments."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def use_towers(
    model: PreTrainedModel,
    train: Mapping[str, Trained],
    blank: Mapping[str, Mapping[str, torch.Tensor]] = MappingProxyType({}),
) -> None:
    """Changes a meta model so that it trains on rows with attachments, and freezes what is not trained
    of the parts that text does not use. train: what is trained for each kind that rows have. blank: the
    arguments of the model for an attachment of a kind; only read if something is trained, and if the
    form of the kind is not known. Raises RecipeError if the model takes no attachments of a kind, or in
    a way that is not known."""
    name = type(model).__name__
    unused = parts_without_text(model)
    # What model.freeze names stays frozen
    free = [name for name in unused if model.get_parameter(name).requires_grad]
    trained = set[str]()
    for kind, how in train.items():
        section = ATTACHMENTS[kind]
        if getattr(text_config(model), "cross_attention_layers", None):
            what = f"{name} attends to {section} in layers of their own, which is not supported"
            raise RecipeError(f"{section}: {what}")
        if not takes_attachments(model, kind):
            what = f"{name} takes no {section}; remove the section, or give a model that does"
            if hasattr(model.base_model, tower_kind(model.config, kind).features):
                known = ", ".join(TOWERS[kind].families or ())
                what = f"rows with {section} are not supported for {name}, but for {known}"
            raise RecipeError(f"{section}: {what}")
        of_kind = {name for name in free if _is_trained(name, kind, how)}
        if of_kind:
            of_kind -= _without_gradient(model, kind, blank.get(kind, {}))
        if how != "none" and not of_kind:
            raise RecipeError(f"{section}.train: {how}: {name} has no parameters of that kind")
        trained |= of_kind
    for parameter in unused:
        model.get_parameter(parameter).requires_grad_(parameter in trained)
    record_of(model).towers = Towers(model, train)


def takes_attachments(model: nn.Module, kind: str) -> bool:
    """Whether a model takes attachments of a kind, in a way that is known."""
    config = getattr(model, "config", None)
    if config is None:
        return False
    about = tower_kind(config, kind)
    known = about.families is None or config.model_type in about.families
    return known and hasattr(model.base_model, about.features)


def _without_gradient(
    model: PreTrainedModel, kind: str, blank: Mapping[str, torch.Tensor]
) -> set[str]:
    """The parameters of a tower that its features do not depend on, such as the layers after
    `vision_feature_layer` (LLaVA): DDP would wait for their gradients."""
    tower, form = copy.deepcopy(model.base_model), form_of(model.config, kind)
    names = {name for name, _ in tower.named_parameters()}
    arguments = dict(blank)
    if form is not None:
        smallest = form.largest(form.least_tokens)
        assert smallest is not None
        arguments = form.arguments(smallest[2])
    # Only integers, such as sizes, are read
    for name in [name for name in arguments if name.startswith("pixel_values")]:
        arguments[name] = torch.empty(arguments[name].shape, device="meta")
    try:
        if form is not None:
            features = form.features(tower, arguments)
        else:
            run = getattr(tower, tower_kind(model.config, kind).features)
            features = vars(run(**arguments, return_dict=True))
        torch.autograd.backward(_sum_of_features(features))
    except (
        Exception
    ):  # a model that cannot run on meta; of those that are known, all parts are used
        return set()
    used = {name for name, parameter in tower.named_parameters() if parameter.grad is not None}
    base = f"{model.base_model_prefix}."
    return {base + name for name in names - used}


def _is_trained(name: str, kind: str, train: Trained) -> bool:
    if train == "none" or not is_of_tower(name, [kind]):
        return False
    return train == "all" or is_of_projector(name, [kind])


def is_of_projector(name: str, kinds: Collection[str]) -> bool:
    """Whether a parameter that text does not use is between a tower for one of these kinds of
    attachments and the text model."""
    return is_of_tower(name, kinds) and any(part in name for part in _PROJECTORS)


def token_types(model: nn.Module) -> str | None:
    """The argument of a model that says which tokens are attachments; None: it has none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _TOKEN_TYPES if name in parameters), None)


def features_of(model: Any, kind: str, arrays: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The features of the attachments in the processor's arrays, by transformers' own method of the
    model."""
    run = getattr(model.base_model, tower_kind(model.config, kind).features)
    found = run(**arrays, return_dict=True).pooler_output
    return [found] if isinstance(found, torch.Tensor) else list(found)


def unused_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    """The outermost modules that are never called: those that text does not use, or with attachments
    those that neither uses."""
    names = {module: name for name, module in model.named_modules()}
    modules = modules_without_text(model)
    return tuple(m for m in modules if not is_of_tower(names[m], seen_by(model)))


def seen_by(model: nn.Module) -> Collection[str]:
    """The kinds of attachments that rows of the changed model have."""
    towers: Towers | None = record_of(model).towers
    return () if towers is None else towers.kinds


def tower_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of the towers, by name; empty if rows are text."""
    return _blocks(model, seen_by(model))


def _blocks(model: nn.Module, kinds: Collection[str]) -> dict[str, nn.Module]:
    """The repeated blocks of the towers for these kinds of attachments."""
    names = {module: name for name, module in model.named_modules()}
    towers = [m for m in modules_without_text(model) if is_of_tower(names[m], kinds)]
    inside = {module for tower in towers for module in tower.modules()}
    classes = {name for module in inside for name in block_classes(module)}
    blocks: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        # Some name a part of the block (Idefics3), or a head, which is not repeated (SigLIP)
        repeated = isinstance(model.get_submodule(name.rpartition(".")[0]), nn.ModuleList)
        nested = any(name.startswith(f"{outer}.") for outer in blocks)
        if repeated and module in inside and not nested:
            if any(type(part).__name__ in classes for part in module.modules()):
                blocks[name] = module
    return blocks


def _both_ways(model: PreTrainedModel) -> frozenset[str]:
    """The kinds of layers in which the tokens of an attachment see those after them."""
    text = text_config(model)
    if text.model_type == "gemma3_text":
        return frozenset((_FULL, _SLIDING))
    vision = getattr(text, "use_bidirectional_attention", None) == "vision"
    return frozenset((_SLIDING,)) if text.model_type == "gemma4_text" and vision else frozenset()


def _tower_inputs(model: PreTrainedModel, kind: str) -> TowerInputs | None:
    """How the host makes the inputs of a tower; None: of this family it is not known, and
    transformers' own forward method runs the tower."""
    form = form_of(model.config, kind)
    if form is None:
        return None
    token = getattr(model.config, tower_kind(model.config, kind).token)
    return TowerInputs(token, form, _operations(model, form, kind))


def _operations(model: PreTrainedModel, form: TowerForm, kind: str) -> TowerOperations:
    """Of embeddings of positions, which are looked up, there are none."""
    config, blocks = getattr(model.config, TOWERS[kind].config), _blocks(model, [kind])
    width = getattr(config, "embed_dim", None) or config.hidden_size  # Qwen2-VL's hidden_size: text
    attended = width
    if (head := getattr(config, "head_dim", None)) is not None:
        attended = head * config.num_attention_heads
    windows = 0
    if isinstance(form, PatchGrid) and form.window is not None:
        windows = len(blocks) - len(config.fullatt_block_indexes)
    patch, token = 2.0 * form.patch_values * width, 0.0
    for name in parts_without_text(model):
        parameter = model.get_parameter(name)
        if not is_of_tower(name, [kind]) or parameter.ndim < 2:
            continue
        if is_of_projector(name, [kind]):
            token += 2.0 * parameter.numel()
        elif any(name.startswith(f"{block}.") for block in blocks):
            patch += 2.0 * parameter.numel()
    trained = any(p.requires_grad for block in blocks.values() for p in block.parameters())
    return TowerOperations(
        patch=patch,
        token=token,
        whole=4.0 * attended * (len(blocks) - windows),
        window=4.0 * attended * windows,
        passes=3 if trained else 1,
    )


class Tower:
    """The tower for a kind of attachments."""

    def __init__(self, model: PreTrainedModel, kind: str) -> None:
        self._base: Any = model.base_model
        self._method = tower_kind(model.config, kind).features
        own = inspect.signature(getattr(self._base, self._method)).parameters
        self.takes = frozenset(own) - {"kwargs", "return_dict"}
        """The arrays of a processor that it takes."""
        self.inputs = _tower_inputs(model, kind)
        """How the host makes its inputs; None: transformers' forward method does."""
        self.all: Sequence[Tower] = (self,)
        """The towers of the model."""
        self._kept: list[Any] | None = None
        """The features within `kept`, once they are computed."""

    @contextmanager
    def kept(self) -> Iterator[None]:
        """See `features_kept`."""
        run = getattr(self._base, self._method)
        self._kept = []
        replaced = self.inputs is None  # transformers' own forward method calls it
        if replaced:
            setattr(
                self._base,
                self._method,
                lambda *args, **options: self._once(lambda: run(*args, **options)),
            )
        try:
            yield
        finally:
            self._kept = None
            if replaced:
                delattr(self._base, self._method)  # the method of its class stays

    def _once(self, run: Callable[[], Any]) -> Any:
        """The features that `run` returns; within `kept` those of the first call."""
        kept = self._kept
        if kept:
            return kept[0]
        # `run` may call the methods that `kept` replaces: that of videos calls the one of images
        before = [tower._kept for tower in self.all]
        for tower in self.all:
            tower._kept = None
        try:
            features = run()
        finally:
            for tower, own in zip(self.all, before, strict=True):
                tower._kept = own
        if kept is not None:
            kept.append(features)
        return features

    def features(
        self, tower: Mapping[str, Any] | None, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The outputs of the tower for what the host has made; None: for the processor's arrays."""

        def run() -> Mapping[str, Any]:
            if self.inputs is not None and tower is not None:
                return self.inputs.form.features(self._base, normalized(tower))
            # Some outputs have features that are not among their items (transformers 5.17)
            made: dict[str, Any] = vars(
                getattr(self._base, self._method)(**arguments, return_dict=True)
            )
            return made

        features: Mapping[str, Any] = self._once(run)
        return features


class Towers:
    """Replaces the forward method of a model's base, so that its towers run in every micro-batch.

    FSDP gathers weights and reduces gradients in a tower, and DDP waits for the gradients of its
    parameters. So a rank whose micro-batch has no attachment must compute the tower, too. There the
    tower sees a blank one, whose features are added to the embeddings times 0.

    transformers finds the tokens on the device, and waits to compare their number with that of
    the features. Here the host knows where they are (`TowerInputs`).
    """

    def __init__(self, model: PreTrainedModel, kinds: Iterable[str]) -> None:
        base: Any = model.base_model
        self.kinds = {kind: Tower(model, kind) for kind in kinds}
        for tower in self.kinds.values():
            tower.all = tuple(self.kinds.values())
        self.grid = hasattr(base, "get_rope_index")
        """Whether tokens of attachments have positions of time, height and width."""
        self.both_ways = _both_ways(model)
        """The kinds of layers in which the tokens of an attachment see those after them."""
        types = token_types(base)
        # Those with positions of a grid read the types only for these, which the launcher makes
        needed = bool(self.both_ways) or not (self.grid or types == "mm_token_type_ids")
        self.token_types = types if needed else None
        """The argument that says which tokens are attachments, if masks are made of it."""
        levels = getattr(
            getattr(model.config, "vision_config", None), "deepstack_visual_indexes", None
        )
        self.deeper = len(levels or ())
        """The number of blocks of text behind which features of images are added."""
        self.elsewhere: Callable[[], bool] = lambda: False
        """Whether another stage of a pipeline has the towers."""
        window = getattr(text_config(model), "sliding_window", None)
        self._window = window if isinstance(window, int) else None
        self._base, self._forward = base, base.forward
        base.forward = self._forward_with_towers

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether packed documents with attachments are kept apart."""
        return self.token_types is None or bool(self.both_ways)

    @property
    def inputs_known(self) -> bool:
        """Whether the host makes the inputs of all towers."""
        return all(tower.inputs is not None for tower in self.kinds.values())

    def _forward_with_towers(
        self, *args: Any, attachments: Mapping[str, Any] | None = None, **inputs: Any
    ) -> Any:
        """attachments: by kind, `count`, their number; `tower` and `positions` of `TowerInputs.make`,
        for a tower that has `inputs`; and perhaps `chosen`, which features of the tower these positions
        have, in this order. None: the call is about text alone."""
        if attachments is None:
            return self._forward(*args, **inputs)
        if self.both_ways:
            assert self.token_types is not None
            types = inputs[self.token_types]
            # A row without positions is one document. Of it Gemma 4 asks the device whether it is packed
            positions = inputs.get("position_ids")
            if positions is None:
                positions = torch.arange(types.shape[1], device=types.device).expand_as(types)
            inputs["attention_mask"] = packed_masks(
                types, positions, self._window, both_ways=self.both_ways
            )
        runs: list[tuple[Tower, Mapping[str, Any], dict[str, Any]]] = []
        for kind, given in attachments.items():
            tower = self.kinds[kind]
            if (
                "tower" in given or not given["count"]
            ):  # else transformers' own forward method runs it
                own = {name: inputs.pop(name) for name in tower.takes if name in inputs}
                runs.append((tower, given, own))
        if self.elsewhere():
            runs = []

        def run_towers(module: nn.Module, args: object, embeds: torch.Tensor) -> torch.Tensor:
            handle.remove()
            deeper: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
            for tower, given, own in runs:
                features = tower.features(given.get("tower"), own)
                levels = features.get("deepstack_features")
                if not given["count"]:
                    embeds = embeds + 0 * _sum_of_features(features).to(embeds.dtype)
                    if levels:  # the same operators as with attachments: ranks gather in one order
                        nowhere = torch.empty(0, dtype=torch.long, device=embeds.device)
                        deeper.append((nowhere, [_joined(level, nowhere) for level in levels]))
                    continue
                positions, chosen = given["positions"], given.get("chosen")
                joined = _joined(features["pooler_output"], chosen).to(embeds.dtype)
                flat = embeds.flatten(0, 1).index_copy(0, positions, joined)
                embeds = flat.view_as(embeds)
                if levels:
                    deeper.append((positions, [_joined(level, chosen) for level in levels]))
            if deeper:
                self._add_deeper(deeper)
            return embeds

        if not runs:
            return self._forward(*args, **inputs)
        # After the embedding, as in transformers: the ranks gather weights in the same order
        handle = self._base.get_input_embeddings().register_forward_hook(run_towers)
        with handle:  # which removes the hook, also if the call fails before the embedding
            return self._forward(*args, **inputs)

    def _add_deeper(self, deeper: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
        """Adds features of other depths behind the first layers of the next forward pass of the text
        model. deeper: for each kind of attachments the positions of its tokens in the flattened rows,
        and their features (tokens, hidden size) of each depth."""
        text = self._base.language_model
        replace_deepstack(text, _added_at)
        positions = torch.cat([each for each, _ in deeper])
        levels = [torch.cat(each) for each in zip(*(own for _, own in deeper), strict=True)]

        def add(module: nn.Module, args: Any, inputs: Any) -> tuple[Any, Any]:
            handle.remove()
            return args, inputs | {"visual_pos_masks": positions, "deepstack_visual_embeds": levels}

        handle = text.register_forward_pre_hook(add, with_kwargs=True)


@contextmanager
def features_kept(model: nn.Module) -> Iterator[None]:
    """Within it all forward passes of the changed model are about the same attachments, such as those
    of an answer that grows: the towers run in the first one only. Every rank must enter it before the
    same forward pass: the ranks gather the towers' weights there, and not after it."""
    towers: Towers | None = record_of(model).towers
    with ExitStack() as kept:
        for tower in () if towers is None else towers.kinds.values():
            kept.enter_context(tower.kept())
        yield


def _added_at(
    hidden: torch.Tensor, positions: torch.Tensor, features: torch.Tensor
) -> torch.Tensor:
    """Takes the place of Qwen3-VL's `_deepstack_process`, which reads a mask on the device. The
    features are added to the hidden states (rows, tokens, hidden size) at these positions of the
    flattened rows."""
    flat, features = hidden.flatten(0, 1), features.to(hidden.dtype)
    return flat.index_add(0, positions, features).view_as(hidden)


def _joined(
    features: torch.Tensor | tuple[torch.Tensor, ...], chosen: torch.Tensor | None
) -> torch.Tensor:
    """The chosen features of all attachments, (tokens, hidden size); None: all of them."""
    if isinstance(features, torch.Tensor):
        joined = features.reshape(-1, features.shape[-1])
    else:
        joined = torch.cat([each.reshape(-1, each.shape[-1]) for each in features])
    return joined if chosen is None else joined.index_select(0, chosen)


def packed_masks(
    types: torch.Tensor,
    positions: torch.Tensor,
    window: int | None,
    *,
    both_ways: Collection[str] = (_FULL, _SLIDING),
) -> dict[str, torch.Tensor]:
    """Masks (rows, 1, tokens, tokens) of packed documents whose attachments attend to themselves in
    both directions, by kind of layer. types: (rows, tokens), more than 0 for tokens of attachments. positions:
    (rows, tokens), 0 at the start of each document. window: of sliding layers. both_ways: the kinds of
    layers in which attachments do so; in the others attention is causal.

    transformers 5.23 makes a wrong mask for the sliding layers of such rows: it looks for the
    attachments at positions that count from the start of the row (docs/engineering/images.md).
    """
    order = torch.arange(types.shape[1], device=types.device)
    distance = order[:, None] - order[None, :]
    is_one = types > 0
    begins = is_one & ~nn.functional.pad(is_one, (1, 0))[:, :-1]
    number = torch.where(is_one, begins.cumsum(1), 0)
    document = (positions == 0).cumsum(1)
    same_one = (number[:, :, None] == number[:, None, :]) & is_one[:, None, :]
    same_document = document[:, :, None] == document[:, None, :]
    causal = same_document & (distance >= 0)
    either = same_document & ((distance >= 0) | same_one)
    full = either if _FULL in both_ways else causal
    near = either if _SLIDING in both_ways else causal
    near = near if window is None else near & (distance < window)
    return {_FULL: full[:, None], _SLIDING: near[:, None]}


def _sum_of_features(outputs: Mapping[str, Any]) -> torch.Tensor:
    """The sum of what a model takes of the outputs of its tower. Gradients flow through the same
    layers as from the features of attachments: ranks gather the weights of the same layers."""
    features = [value for name, value in outputs.items() if name in _FEATURES]
    return torch.stack([tensor.sum().float() for tensor in _tensors(features)]).sum()


def _tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors of an output that may need gradients, at every depth."""
    if isinstance(value, torch.Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _tensors(inner)
