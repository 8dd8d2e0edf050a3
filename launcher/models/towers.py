"""The image tower of a model of images and text, where rows have images.

The features of the tower take the place of the embeddings of a model's image tokens. This module
runs the tower on every rank in every micro-batch, puts its features there without waiting for the
device, and makes the masks of packed rows in which an image attends to itself in both directions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from launcher.errors import RecipeError
from launcher.libraries.private import block_classes, replace_deepstack
from launcher.models.applied import applied
from launcher.models.build import modules_without_text, parts_without_text, text_config
from launcher.models.tower_inputs import (
    ImageForm,
    PatchGrid,
    TowerInputs,
    TowerOperations,
    form_of,
    normalized,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Trained = Literal["none", "projector", "all"]
_PROJECTORS = ("projector", "merger", "connector", "embed_vision")
"""Parts of the names of the modules between a tower and the text model."""
_OTHERS = ("audio",)
"""Parts of the names of modules that neither text nor images use."""
_TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")
"""Arguments of models that say which tokens are those of images."""
_FEATURES = ("pooler_output", "deepstack_features")
"""The outputs of a tower that models put in the place of the embeddings of images."""
_FULL, _SLIDING = "full_attention", "sliding_attention"


def use_images(
    model: PreTrainedModel,
    train: Trained,
    blank_image: Mapping[str, torch.Tensor],
) -> None:
    """Changes a meta model so that it trains on rows with images, and freezes what is not trained of
    the parts that text does not use. blank_image: the arguments of the model for an image; only read
    if something is trained, and if the form of its images is not known. Raises RecipeError if the
    model takes no images, or in a way that is not known."""
    base: Any = model.base_model
    name = type(model).__name__
    if getattr(text_config(model), "cross_attention_layers", None):
        raise RecipeError(
            f"images: {name} attends to images in layers of their own, which is not supported"
        )
    if not hasattr(base, "get_image_features"):
        raise RecipeError(
            f"images: {name} takes no images; remove the section, or give a model that does"
        )
    unused = parts_without_text(model)
    # What model.freeze names stays frozen
    free = [name for name in unused if model.get_parameter(name).requires_grad]
    trained = {name for name in free if _is_trained(name, train)}
    if trained:
        trained -= _without_gradient(model, blank_image)
    if train != "none" and not trained:
        raise RecipeError(f"images.train: {train}: {name} has no parameters of that kind")
    for name in unused:
        model.get_parameter(name).requires_grad_(name in trained)
    applied(model).images = ImageTower(model)


def _without_gradient(model: PreTrainedModel, blank_image: Mapping[str, torch.Tensor]) -> set[str]:
    """The parameters of the tower that its features do not depend on, such as the layers after
    `vision_feature_layer` (LLaVA): DDP would wait for their gradients."""
    tower, form = copy.deepcopy(model.base_model), form_of(model.config)
    names = {name for name, _ in tower.named_parameters()}
    blank = dict(blank_image)
    if form is not None:
        smallest = form.largest(form.least_tokens)
        assert smallest is not None
        blank = form.arguments(smallest[2])
    # Only integers, such as the sizes of images, are read
    blank["pixel_values"] = torch.empty(blank["pixel_values"].shape, device="meta")
    try:
        if form is not None:
            features = form.features(tower, blank)
        else:
            features = vars(tower.get_image_features(**blank, return_dict=True))
        torch.autograd.backward(_sum_of_features(features))
    except (
        Exception
    ):  # a model that cannot run on meta; of those that are known, all parts are used
        return set()
    used = {name for name, parameter in tower.named_parameters() if parameter.grad is not None}
    base = f"{model.base_model_prefix}."
    return {base + name for name in names - used}


def _is_trained(name: str, train: Trained) -> bool:
    if train == "none" or any(part in name for part in _OTHERS):
        return False
    return train == "all" or is_of_projector(name)


def is_of_projector(name: str) -> bool:
    """Whether a parameter that text does not use is between a tower and the text model."""
    return any(part in name for part in _PROJECTORS) and not any(part in name for part in _OTHERS)


def token_types(model: nn.Module) -> str | None:
    """The argument of a model that says which tokens are those of images; None: it has none."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in _TOKEN_TYPES if name in parameters), None)


def features_of(model: Any, arrays: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The features of the images in the processor's arrays, by transformers' own method of the model;
    empty without arrays."""
    if not arrays:
        return []
    found = model.base_model.get_image_features(**arrays, return_dict=True).pooler_output
    return [found] if isinstance(found, torch.Tensor) else list(found)


def unused_modules(model: nn.Module) -> tuple[nn.Module, ...]:
    """The outermost modules that are never called: those that text does not use, or with images
    those that neither uses."""
    without_images = applied(model).images is None
    return modules_without_text(model) if without_images else _of_neither(model)


def _of_neither(model: nn.Module) -> tuple[nn.Module, ...]:
    """The outermost modules that neither text nor images use."""
    names = {module: name for name, module in model.named_modules()}
    modules = modules_without_text(model)
    return tuple(m for m in modules if any(part in names[m] for part in _OTHERS))


def tower_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The repeated blocks of the image tower, by name; empty if rows have no images."""
    return {} if applied(model).images is None else _blocks(model)


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    unused = set(_of_neither(model))
    towers = [module for module in modules_without_text(model) if module not in unused]
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
    """The kinds of layers in which the tokens of an image see those after them."""
    text = text_config(model)
    if text.model_type == "gemma3_text":
        return frozenset((_FULL, _SLIDING))
    vision = getattr(text, "use_bidirectional_attention", None) == "vision"
    return frozenset((_SLIDING,)) if text.model_type == "gemma4_text" and vision else frozenset()


def _tower_inputs(model: PreTrainedModel) -> TowerInputs | None:
    """How the host makes the inputs of the tower; None: of this family it is not known, and
    transformers' own forward method runs the tower."""
    form = form_of(model.config)
    if form is None:
        return None
    return TowerInputs(model.config.image_token_id, form, _operations(model, form))


def _operations(model: PreTrainedModel, form: ImageForm) -> TowerOperations:
    """Of embeddings of positions, which are looked up, there are none."""
    vision, blocks = model.config.vision_config, _blocks(model)
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL's hidden_size: text
    attended = width
    if (head := getattr(vision, "head_dim", None)) is not None:
        attended = head * vision.num_attention_heads
    windows = 0
    if isinstance(form, PatchGrid) and form.window is not None:
        windows = len(blocks) - len(vision.fullatt_block_indexes)
    patch, token = 2.0 * form.patch_values * width, 0.0
    for name in parts_without_text(model):
        parameter = model.get_parameter(name)
        if any(part in name for part in _OTHERS) or parameter.ndim < 2:
            continue
        if is_of_projector(name):
            token += 2.0 * parameter.numel()
        elif any(name.startswith(f"{block}.") for block in blocks):
            patch += 2.0 * parameter.numel()
    trained = any(p.requires_grad for block in blocks.values() for p in block.parameters())
    return TowerOperations(
        patch=patch,
        token=token,
        image=4.0 * attended * (len(blocks) - windows),
        window=4.0 * attended * windows,
        passes=3 if trained else 1,
    )


class ImageTower:
    """Replaces the forward method of a model's base, so that the tower runs in every micro-batch.

    FSDP gathers weights and reduces gradients in the tower, and DDP waits for the gradients of its
    parameters. So a rank whose micro-batch has no image must compute the tower, too. There the tower
    sees a blank image, whose features are added to the embeddings times 0.

    transformers finds the image tokens on the device, and waits to compare their number with that of
    the features. Here the host knows where they are (`TowerInputs`).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        base: Any = model.base_model
        own = inspect.signature(base.get_image_features).parameters
        self._takes = frozenset(own) - {"kwargs", "return_dict"}
        self.inputs = _tower_inputs(model)
        """How the host makes the inputs of the tower; None: transformers' forward method does."""
        self.grid = hasattr(base, "get_rope_index")
        """Whether tokens of an image have positions of time, height and width."""
        self.both_ways = _both_ways(model)
        """The kinds of layers in which the tokens of an image see those after them."""
        types = token_types(base)
        # Those with positions of a grid read the types only for these, which the launcher makes
        needed = bool(self.both_ways) or not (self.grid or types == "mm_token_type_ids")
        self.token_types = types if needed else None
        """The argument that says which tokens are those of images, if masks are made of it."""
        window = getattr(text_config(model), "sliding_window", None)
        self._window = window if isinstance(window, int) else None
        self._kept: list[Any] | None = None
        """The features within `kept`, once they are computed."""
        self._base, self._forward = base, base.forward
        base.forward = self._forward_with_tower

    @property
    def keeps_documents_apart(self) -> bool:
        """Whether packed documents with images are kept apart."""
        return self.token_types is None or bool(self.both_ways)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """See `features_kept`."""
        run = self._base.get_image_features
        self._kept = []
        # transformers' own forward method calls it
        self._base.get_image_features = lambda *args, **options: self._once(
            lambda: run(*args, **options)
        )
        try:
            yield
        finally:
            self._kept = None
            del self._base.get_image_features  # the method of its class stays

    def _once(self, run: Callable[[], Any]) -> Any:
        """The features that `run` returns; within `kept` those of the first call."""
        kept = self._kept
        if kept:
            return kept[0]
        self._kept = None  # `run` may call `get_image_features`
        try:
            features = run()
        finally:
            self._kept = kept
        if kept is not None:
            kept.append(features)
        return features

    def _features(
        self, tower: Mapping[str, Any] | None, arguments: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The outputs of the tower for what the host has made; None: for the processor's arrays."""
        if self.inputs is not None and tower is not None:
            return self.inputs.form.features(self._base, normalized(tower))
        # Some outputs have features that are not among their items (transformers 5.17)
        features: dict[str, Any] = vars(
            self._base.get_image_features(**arguments, return_dict=True)
        )
        return features

    def _forward_with_tower(
        self,
        *args: Any,
        images: int | None = None,
        tower: Mapping[str, Any] | None = None,
        image_positions: torch.Tensor | None = None,
        image_features: torch.Tensor | None = None,
        **inputs: Any,
    ) -> Any:
        """images: the number of images; None: the call is about text alone. tower,
        image_positions: those of `TowerInputs.make`, for a model that has `inputs`. image_features:
        which features of the tower these positions have, in this order; None: all."""
        if images is None:
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
        if tower is None and images:
            return self._forward(*args, **inputs)
        arguments = {name: inputs.pop(name) for name in self._takes if name in inputs}

        def run_tower(module: nn.Module, args: object, embeds: torch.Tensor) -> torch.Tensor:
            handle.remove()
            features = self._once(lambda: self._features(tower, arguments))
            if images:
                return self._with_features(embeds, features, image_positions, image_features)
            return embeds + 0 * _sum_of_features(features).to(embeds.dtype)

        # After the embedding, as in transformers: the ranks gather weights in the same order
        handle = self._base.get_input_embeddings().register_forward_hook(run_tower)
        return self._forward(*args, **inputs)

    def _with_features(
        self,
        embeds: torch.Tensor,
        features: Mapping[str, Any],
        positions: torch.Tensor | None,
        chosen: torch.Tensor | None,
    ) -> torch.Tensor:
        """The embeddings (rows, tokens, hidden size) with the features of images at these positions
        of the flattened rows. Features of other depths are added behind the first layers."""
        assert positions is not None
        if deeper := features.get("deepstack_features"):
            text = self._base.language_model
            replace_deepstack(text, _added_at)

            def add_deeper(module: nn.Module, args: Any, inputs: Any) -> tuple[Any, Any]:
                handle.remove()
                levels = [_joined(level, chosen) for level in deeper]
                deep = {"visual_pos_masks": positions, "deepstack_visual_embeds": levels}
                return args, inputs | deep

            handle = text.register_forward_pre_hook(add_deeper, with_kwargs=True)
        joined = _joined(features["pooler_output"], chosen).to(embeds.dtype)
        return embeds.flatten(0, 1).index_copy(0, positions, joined).view_as(embeds)


def features_kept(model: nn.Module) -> AbstractContextManager[None]:
    """Within it all forward passes of the changed model are about the same images, such as those of
    an answer that grows: the tower runs in the first one only. Every rank must enter it before the
    same forward pass: the ranks gather the tower's weights there, and not after it."""
    tower: ImageTower | None = applied(model).images
    return nullcontext() if tower is None else tower.kept()


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
    """The chosen features of all images, (tokens, hidden size); None: all of them."""
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
    """Masks (rows, 1, tokens, tokens) of packed documents whose images attend to themselves in both
    directions, by kind of layer. types: (rows, tokens), 1 for tokens of images. positions: (rows,
    tokens), 0 at the start of each document. window: of sliding layers. both_ways: the kinds of
    layers in which images do so; in the others attention is causal.

    transformers 5.23 makes a wrong mask for the sliding layers of such rows: it looks for the images
    at positions that count from the start of the row (docs/images.md).
    """
    order = torch.arange(types.shape[1], device=types.device)
    distance = order[:, None] - order[None, :]
    is_image = types == 1
    begins = is_image & ~nn.functional.pad(is_image, (1, 0))[:, :-1]
    image = torch.where(is_image, begins.cumsum(1), 0)
    document = (positions == 0).cumsum(1)
    same_image = (image[:, :, None] == image[:, None, :]) & is_image[:, None, :]
    same_document = document[:, :, None] == document[:, None, :]
    causal = same_document & (distance >= 0)
    either = same_document & ((distance >= 0) | same_image)
    full = either if _FULL in both_ways else causal
    near = either if _SLIDING in both_ways else causal
    near = near if window is None else near & (distance < window)
    return {_FULL: full[:, None], _SLIDING: near[:, None]}


def _sum_of_features(outputs: Mapping[str, Any]) -> torch.Tensor:
    """The sum of what a model takes of the outputs of its tower. Gradients flow through the same
    layers as from the features of images: ranks gather the weights of the same layers."""
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
