"""What `launcher inspect` prints of the samples of a `data.builder`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from launcher.cli.inspect_page import Page
from launcher.data.batching import NO_SAMPLE
from launcher.data.collation import raise_error
from launcher.data.custom import CustomDataset, build_custom_data
from launcher.data.opening import make_order
from launcher.errors import RecipeError, suggestion
from launcher.libraries.extras import require_extra
from launcher.recipe.schema import Recipe

if TYPE_CHECKING:
    import PIL.Image
    from typing_extensions import TypeIs

_VALUES = 8
"""First values that are printed of a tensor."""
_ITEMS = 16
"""Most items that are printed of a list, a tuple or a dict."""
_CHARACTERS = 80
"""Most characters of any other value."""
_SMALLEST_IMAGE, _SHOWN = 8, 96
"""Pixels of a side: of the smallest image, and how large a smaller one than this is shown."""


def print_own_page(recipe: Recipe, name: str, *, samples: int, html: Path | None) -> None:
    """Prints the samples of a set of data.builder in the order of the run, a micro-batch of them and
    totals. name: `train`, `validation`, or that of a validation set. html: a file to which they are
    also written, with what looks like images as pictures. Raises RecipeError."""
    sets = _open(recipe, name)
    trains = name == "train"
    page = Page(as_html=html is not None)
    title = f"{recipe.run.name} · {name}"
    page.title(title, "in the order of the run" if trains else "validation", marks=False)
    for part, dataset in sets.items():
        order = make_order(
            dataset,
            seed=recipe.run.seed,
            shuffle=recipe.data.shuffle and trains,
            epochs=1,
        )
        drawn = [order.sample(position) for position in range(min(samples, len(dataset)))]
        several = [part] if len(sets) > 1 else []
        for number, index in enumerate(drawn, start=1):
            row = dataset[index]
            assert row is not None  # only NO_SAMPLE has none
            page.part([f"sample {number}", *several, f"index {index:,}"])
            for line, value in describe(row[1]):
                page.line(line, None if html is None else picture_of(value))
        size = recipe.batch.micro_batch_size
        size = size if isinstance(size, int) else 1
        drawn = [index for index in map(order.sample, range(size)) if index != NO_SAMPLE]
        collated = raise_error(dataset.collate([dataset[index] for index in drawn]))
        targets = f"{collated.loss_tokens:,} targets"
        page.part(["micro-batch", *several, f"{len(drawn):,} samples", targets])
        for line, _ in describe(collated.micro_batch.extra["batch"]):
            page.line(line)
    page.totals({part: {"samples": f"{len(dataset):,}"} for part, dataset in sets.items()})
    if html is not None:
        page.write(html, title)


def _open(recipe: Recipe, name: str) -> dict[str, CustomDataset]:
    """The sets of this name. Raises RecipeError if there is none."""
    data = recipe.data
    assert data.builder is not None
    custom = build_custom_data(data.builder, data.arguments)
    validation: Any = custom.validation
    if validation is None:
        validation = {}
    elif not isinstance(validation, Mapping):
        validation = {"validation": validation}
    if name == "train":
        return {"train": CustomDataset(custom.train, custom, data.builder, seed=recipe.run.seed)}
    chosen = {part: each for part, each in validation.items() if name in ("validation", part)}
    if not chosen:
        known = ["train", *(["validation"] if validation else []), *validation]
        known = list(dict.fromkeys(known))
        what = f"no set of that name{suggestion(name, known)}; there are {', '.join(known)}"
        raise RecipeError(f"command line: set={name}: {what}")
    return {part: CustomDataset(each, custom, data.builder) for part, each in chosen.items()}


def describe(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """A line about each of the tensors, arrays, images and other values in dicts, lists and tuples,
    with its path; and the value."""
    items: list[tuple[str, object]] | None = None
    if isinstance(value, Mapping):
        items = [(f"{path}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        items = [(f"{path}.{key}", each) for key, each in value._asdict().items()]
    elif isinstance(value, list | tuple):
        items = [(f"{path}[{index}]", each) for index, each in enumerate(value)]
    if items is None:
        yield f"{path or 'sample'}  {_describe_one(value)}", value
        return
    for inner, each in items[:_ITEMS]:
        yield from describe(each, inner)
    if len(items) > _ITEMS:
        yield f"{path}  … {len(items) - _ITEMS:,} more items", None
    elif not items:
        yield f"{path or 'sample'}  empty {type(value).__name__}", None


def _describe_one(value: object) -> str:
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            return f"array of {value.dtype} {value.shape}"
        return f"array of {_describe_tensor(torch.from_numpy(np.ascontiguousarray(value)))}"
    if isinstance(value, torch.Tensor):
        return _describe_tensor(value)
    if _is_picture(value):
        return f"PIL image, {value.width} x {value.height} pixels, {value.mode}"
    text = repr(value)
    shown = text if len(text) <= _CHARACTERS else f"{text[:_CHARACTERS]}…"
    return f"{type(value).__name__}: {shown}"


def _describe_tensor(tensor: torch.Tensor) -> str:
    """Dtype, shape, range, and the first values."""
    what = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
    if not tensor.numel() or tensor.is_complex():
        return what
    numbers = tensor.detach().cpu().flatten().double()
    finite = numbers[numbers.isfinite()]
    if tensor.numel() > 1 and len(finite):
        what += f", from {finite.min().item():.4g} to {finite.max().item():.4g}"
    if len(finite) < len(numbers):
        what += f", {len(numbers) - len(finite):,} values not finite"
    shown = tensor.detach().flatten()[:_VALUES].tolist()
    first = ", ".join(f"{each:.4g}" if isinstance(each, float) else str(each) for each in shown)
    return f"{what}: {first}{', …' * (len(numbers) > _VALUES)}"


def _is_picture(value: object) -> TypeIs[PIL.Image.Image]:
    """Whether a value is an image of Pillow, which need not be installed."""
    pillow = sys.modules.get("PIL.Image")
    return pillow is not None and isinstance(value, pillow.Image)


def picture_of(value: object) -> PIL.Image.Image | None:
    """The picture of an image, or of a tensor or array that looks like one: 1, 3 or 4 channels, first
    or last, or two dimensions of bytes or bools. None for others. Numbers beyond 0 to 1, or of
    integers 0 to 255, are drawn from the smallest to the largest."""
    if _is_picture(value):
        return value.convert("RGB")
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        value = torch.from_numpy(np.ascontiguousarray(value))
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return None
    tensor = value.detach().cpu()
    is_plane = tensor.ndim == 2 and tensor.dtype in (torch.uint8, torch.bool)
    if is_plane:
        tensor = tensor[None]
    if tensor.ndim != 3:
        return None
    if tensor.shape[0] not in (1, 3, 4):
        tensor = tensor.permute(2, 0, 1)
    if tensor.shape[0] not in (1, 3, 4) or min(tensor.shape[1:]) < _SMALLEST_IMAGE:
        return None
    values = tensor.double().nan_to_num(0.0, 0.0, 0.0)
    low, high = values.min().item(), values.max().item()
    whole = 255.0 if not tensor.is_floating_point() and tensor.dtype != torch.bool else 1.0
    if low < 0 or high > whole:
        values, whole = values - low, max(high - low, 1e-12)
    levels = (values / whole * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    require_extra("PIL", "out")
    import PIL.Image

    picture = PIL.Image.fromarray(levels[..., 0] if levels.shape[2] == 1 else levels)
    larger = -(-_SHOWN // max(picture.size))
    if larger > 1:
        size = picture.width * larger, picture.height * larger
        picture = picture.resize(size, PIL.Image.Resampling.NEAREST)
    return picture
