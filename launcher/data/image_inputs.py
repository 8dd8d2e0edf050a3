"""Micro-batches whose rows have images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from launcher.data.collation import Collated, Sample, TextInputs
from launcher.data.image_processor import Arrays, ImageProcessor, load_processor
from launcher.data.images import ImageSource, RowImages
from launcher.data.messages import RowError
from launcher.models.tower_inputs import TowerInputs
from launcher.recipe import schema

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ModelImages:
    """How a model takes images."""

    rows: RowImages
    grid: bool = False
    """Whether the tokens of an image have positions of time, height and width (M-RoPE)."""
    token_types: str | None = None
    """The name of the argument that says which tokens are those of images; None: it has none."""
    tower: TowerInputs | None = None
    """How the host makes the inputs of the tower; None: they are the processor's arrays."""

    @property
    def processor(self) -> ImageProcessor:
        """The processor of this process."""
        return load_processor(self.rows.processor, self.rows.max_pixels)

    @property
    def in_bytes(self) -> bool:
        """Whether the device normalizes pixels."""
        return self.tower is not None and self.processor.pixel_table is not None


@dataclass(frozen=True)
class PlannedImages(ModelImages):
    """How a model takes images of which only sizes are known, in a plan: the processor, whose files
    a plan may not have, gives the largest images without content."""

    @property
    def processor(self) -> Any:
        """Takes the place of an `ImageProcessor` in `ImageInputs.collate`."""
        return self

    @property
    def token_ids(self) -> list[int]:
        """See `ImageProcessor.token_ids`."""
        assert self.tower is not None
        return [self.tower.image_token]

    @property
    def pixel_table(self) -> npt.NDArray[np.float32]:
        """See `ImageProcessor.pixel_table`."""
        return np.zeros((3, 256), dtype=np.float32)

    @property
    def blank_in_bytes(self) -> Arrays:
        """See `ImageProcessor.blank_in_bytes`."""
        assert self.tower is not None
        made = self.tower.form.largest(self.tower.form.least_tokens)
        assert made is not None
        return made[2]

    def join(self, images: list[Arrays]) -> Arrays:
        """See `ImageProcessor.join`."""
        shapes = np.array([image["pixel_values"].shape for image in images])
        whole = (shapes[:, 0].sum(), *shapes[:, 1:].max(axis=0))
        others = {*images[0]} - {"pixel_values"}
        joined = {name: np.concatenate([image[name] for image in images]) for name in others}
        return {**joined, "pixel_values": np.zeros(whole, dtype=np.uint8)}


def images_of(section: schema.Images | None, model: schema.Model) -> ModelImages | None:
    """How the rows of a recipe have images, without what only the built model knows; None: they are
    text."""
    if section is None or model.path is None:
        return None
    return ModelImages(RowImages(model.path, section.max_pixels, section.folder))


@dataclass(frozen=True)
class ImageInputs(TextInputs):
    """How samples with images become the rows of a micro-batch."""

    images: ModelImages = field(default_factory=lambda: ModelImages(RowImages("")))

    @property
    def row_images(self) -> RowImages:
        """How the rows have images."""
        return self.images.rows

    def complete(
        self, sample: Sample, store: Any, pieces: Iterable[tuple[int, int, int]]
    ) -> Sample:
        """The sample with `images`, what the model takes of each of its images; and for models with
        positions of a grid `grid_positions`, (3, tokens). An image that cannot be read is the
        `error` of the sample."""
        processor, found, places = self.images.processor, list[Arrays](), list[Any]()
        before = 0
        for _, start, end in pieces:
            for image in images_between(store.images, start, end):
                try:
                    source = store.image_source(image)
                    found.append(_arrays(source, image, processor, self.images.in_bytes))
                except RowError as error:
                    return {**sample, "error": str(error)}  # type: ignore[dict-item]
                first = before + int(image["first"]) - start
                places.append((first, int(image["rows"]), int(image["columns"])))
            before += end - start
        made: dict[str, Any] = {**sample, "images": found}
        if self.images.grid:
            made["grid_positions"] = grid_positions(sample["position_ids"], places)
        return made

    def with_largest_images(self, sample: Sample) -> Sample:
        """Each image stands between two other tokens, at least. The tokens of text are other than
        those of images."""
        tower = self.images.tower
        assert tower is not None
        ids = sample["input_ids"].copy()
        ids[ids == tower.image_token] = 0
        found, places, end = list[Arrays](), list[tuple[int, int, int]](), 0
        while made := tower.form.largest(len(ids) - end - 2, self.images.rows.max_pixels):
            tokens, grid, arrays = made
            ids[end + 1 : end + 1 + tokens] = tower.image_token
            places.append((end + 1, *grid))
            found.append(arrays)
            end += tokens + 2
        made_sample: dict[str, Any] = {**sample, "input_ids": ids, "images": found}
        if self.images.grid:
            made_sample["grid_positions"] = grid_positions(sample["position_ids"], places)
        return made_sample

    def collate(self, rows: list[Sample], *, several_documents: bool = False) -> Collated:
        """A micro-batch with the arrays of all images, by the names of the model's arguments, or
        what `TowerInputs.make` makes of them; and `images`, their number. Without images these are
        the arrays of a blank one: all ranks compute the same layers, in which they exchange weights
        and gradients."""
        made = super().collate(rows, several_documents=several_documents)
        tensors, processor = dict(made["tensors"]), self.images.processor
        ids = tensors["input_ids"]
        found: list[Arrays] = [image for row in rows for image in row.get("images", ())]
        if self.images.grid:
            tensors["position_ids"] = _with_grid(rows, ids, tensors.get("position_ids"))
        if self.images.token_types is not None:
            types = torch.isin(ids, torch.tensor(processor.token_ids))
            tensors[self.images.token_types] = types.long()
        in_bytes = self.images.in_bytes
        blank = processor.blank_in_bytes if in_bytes else processor.blank
        arrays = processor.join(found or [blank])
        tensors["images"] = len(found)
        if self.images.tower is None:
            tensors |= {name: torch.from_numpy(array) for name, array in arrays.items()}
            return {**made, "tensors": tensors}
        table = processor.pixel_table if in_bytes else None
        tensors |= self.images.tower.make(arrays, ids, table)
        tokens = len(tensors["image_positions"])
        operations = self.images.tower.forward_operations(tensors["tower"], tokens)
        passes = self.images.tower.operations.passes if found else 0
        return {**made, "tensors": tensors, "image_operations": round(passes * sum(operations))}


def images_between(table: npt.NDArray[Any] | None, start: int, end: int) -> npt.NDArray[Any]:
    """The images whose first token is in this range of the store."""
    if table is None:
        return np.zeros(0)
    first, last = np.searchsorted(table["first"], [start, end])
    return table[first:last]


def _arrays(
    source: ImageSource, image: npt.NDArray[Any], processor: ImageProcessor, in_bytes: bool
) -> Arrays:
    content = source.read()
    if source.checksum(content) != int(image["checksum"]):
        what = "has changed since its row was tokenized"
        raise RowError(f"{source.name}: {what}; restore the file, or start with another data.cache")
    return processor.process(source.decode(content), in_bytes=in_bytes).arrays


def grid_positions(positions: Integers, images: list[tuple[int, int, int]]) -> Integers:
    """Positions of time, height and width, (3, tokens) (M-RoPE: Wang et al., 2024). The tokens of an
    image count its rows and columns, and the text after it continues after the larger of both.

    positions: (tokens,), 0 at the start of each document. images: the first token of each image, and
    the rows and columns of its tokens.
    """
    made = np.broadcast_to(positions, (3, len(positions))).copy()
    starts = np.append(np.flatnonzero(positions == 0), len(positions))
    for first, rows, columns in images:
        end = first + rows * columns
        document = int(starts[np.searchsorted(starts, first, side="right")])
        at = made[0, first]
        made[:, first:end] = at + np.stack(
            np.broadcast_arrays(0, *np.indices((rows, columns)))
        ).reshape(3, -1)
        # The rest of the document has counted each token of the image
        made[:, end:document] -= rows * columns - max(rows, columns)
    return made


def _with_grid(rows: list[Sample], ids: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
    """(3, rows, tokens); for packed rows (4, rows, tokens), where the first are the positions of text,
    from which masks are made."""
    width = ids.shape[1]
    grids = []
    for row in rows:
        own = row.get("grid_positions")
        own = np.zeros((3, 0), dtype=np.int64) if own is None else own
        # Padding is a document of its own
        rest = np.broadcast_to(np.arange(width - own.shape[1]), (3, width - own.shape[1]))
        grids.append(np.concatenate([own, rest], axis=1))
    grid = torch.from_numpy(np.stack(grids, axis=1))
    return grid if text is None else torch.cat([text[None], grid])
