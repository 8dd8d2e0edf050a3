"""Micro-batches whose rows have images."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.data.collation import Collated, RowInputs, Sample
from launcher.data.image_processor import Arrays, ImageProcessor, load_processor
from launcher.data.images import RowImages, source_of
from launcher.data.messages import Message
from launcher.errors import RecipeError
from launcher.models.applied import applied
from launcher.models.tower_inputs import TowerInputs, form_of
from launcher.models.towers import token_types
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
    changed: bool = True
    """Whether an `ImageTower` takes them. Else transformers' own forward method does, which makes the
    positions itself, and takes no blank image."""

    def of_model(self, model: nn.Module) -> Self:
        """The same for a model with an `ImageTower`."""
        tower = applied(model).images
        return replace(self, grid=tower.grid, token_types=tower.token_types, tower=tower.inputs)

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


def images_of(
    section: schema.Images | None, model: schema.Model, built: nn.Module | None = None
) -> ModelImages | None:
    """How the rows of a recipe have images; None: they are text. built: the changed model, which
    alone knows how it takes them."""
    if section is None or model.path is None:
        return None
    images = ModelImages(RowImages(model.path, section.max_pixels, section.folder))
    return images if built is None else images.of_model(built)


def planned_images(section: schema.Images | None, built: nn.Module) -> PlannedImages | None:
    """How a plan has images of the changed model; None: rows are text, or of this family the
    largest image is not known. Raises RecipeError."""
    tower = applied(built).images
    if section is None or tower is None or tower.inputs is None:
        return None
    if section.max_pixels is not None and not tower.inputs.form.limited:
        what = f"the processor of {type(built).__name__} has no limit of pixels; set it to null"
        raise RecipeError(f"images.max_pixels: {what}")
    return PlannedImages(RowImages("", section.max_pixels)).of_model(built)


def blank_image(
    section: schema.Images | None, model: schema.Model, built: Any
) -> dict[str, torch.Tensor]:
    """The arguments of the built model for an image, if `use_images` reads them; else empty, and also
    in the plan of a model of which only the config is known."""
    images = images_of(section, model)
    if images is None or section is None or section.train == "none":
        return {}
    if form_of(built.config) is not None:
        return {}
    blank = images.processor.blank_batch
    return {name: torch.from_numpy(array) for name, array in blank.items()}


def own_inputs(model: Any, rows: RowImages) -> RowInputs:
    """What transformers' own forward method of a model takes of rows. rows: with which processor it
    sees images, if it does. Raises RecipeError if that cannot be loaded."""
    if not hasattr(model.base_model, "get_image_features"):
        return RowInputs(length=0)
    images = ModelImages(rows, token_types=token_types(model), changed=False)
    assert images.processor
    return ImageInputs(length=0, images=images)


def example_image(rows: RowImages) -> Arrays:
    """What a model takes of an image that is larger than the limits of most processors."""
    from PIL import Image

    image = Image.radial_gradient("L").resize((1600, 1200)).convert("RGB")
    return load_processor(rows.processor, rows.max_pixels).process(image).arrays


@dataclass(frozen=True)
class ImageInputs(RowInputs):
    """How samples with images become the rows of a micro-batch."""

    images: ModelImages = field(default_factory=lambda: ModelImages(RowImages("")))

    @property
    def row_images(self) -> RowImages:
        """How the rows have images."""
        return self.images.rows

    @property
    def given_tokens(self) -> list[int]:
        return self.images.processor.token_ids

    def of_model(self, model: nn.Module) -> ImageInputs:
        return replace(self, images=self.images.of_model(model))

    def beside_text(self, store: Any, start: int, end: int) -> dict[str, list[Any]]:
        return {"images": list(store.images_between(start, end))}

    def message_part(self, path: str) -> tuple[Message, str]:
        source, processor = source_of(path, "."), self.images.processor
        content = source.read()
        picture = source.decode(content)
        tokens = processor.count_tokens(processor.process(picture).text)
        return {"type": "image", "bytes": content}, source.describe(picture, tokens)

    def complete(
        self, sample: Sample, store: Any, pieces: Iterable[tuple[int, int, int]]
    ) -> Sample:
        """The sample with `images`, what the model takes of each of its images; `image_spans`, the
        first token of each and the one after its last; and for models with positions of a grid
        `grid_positions`, (3, tokens)."""
        processor, found, places = self.images.processor, list[Arrays](), list[Any]()
        spans, in_bytes, before = list[tuple[int, int]](), self.images.in_bytes, 0
        for _, start, end in pieces:
            for image in store.images_between(start, end):
                checksum, moved = image.checksum, before - start
                read, _ = processor.read(image.source, in_bytes=in_bytes, checksum=checksum)
                found.append(read.arrays)
                spans.append((moved + image.first, moved + image.end))
                places.append((moved + image.first, *image.grid))
            before += end - start
        made: dict[str, Any] = {**sample, "images": found, "image_spans": spans}
        if self.images.grid:
            made["grid_positions"] = grid_positions(sample["position_ids"], places)
        return made

    def filled(self, sample: Sample) -> Sample:
        """Each image stands between two other tokens, at least. The tokens of text are other than
        those of images."""
        tower = self.images.tower
        assert tower is not None
        ids = sample["input_ids"].copy()
        ids[ids == tower.image_token] = 0
        found, places, end = list[Arrays](), list[tuple[int, int, int]](), 0
        spans = list[tuple[int, int]]()
        while made := tower.form.largest(len(ids) - end - 2, self.images.rows.max_pixels):
            tokens, grid, arrays = made
            ids[end + 1 : end + 1 + tokens] = tower.image_token
            places.append((end + 1, *grid))
            spans.append((end + 1, end + 1 + tokens))
            found.append(arrays)
            end += tokens + 2
        made_sample: dict[str, Any] = {
            **sample,
            "input_ids": ids,
            "images": found,
            "image_spans": spans,
        }
        if self.images.grid:
            made_sample["grid_positions"] = grid_positions(sample["position_ids"], places)
        return made_sample

    def collate(self, rows: list[Sample], *, several_documents: bool = False) -> Collated:
        """A micro-batch with the arrays of all images, by the names of the model's arguments, or
        what `TowerInputs.make` makes of them; and `images`, their number. Without images these are
        the arrays of a blank one: all ranks compute the same layers, in which they exchange weights
        and gradients. For transformers' own forward method there are only its arguments.

        With context parallelism these are the images of which this rank's part of the rows has
        tokens, and `image_features` says which of their features are those of its tokens."""
        made = super().collate(rows, several_documents=several_documents)
        micro_batch = made.micro_batch
        tensors, processor = dict(micro_batch.inputs), self.images.processor
        ids = tensors["input_ids"]
        mine = self.part.of(ids.shape[1] * self.part.parts)
        whole = self.part.parts == 1
        found: list[Arrays] = [image for row in rows for image in row.get("images", ())]
        if not (found or self.images.changed):
            return made
        if not whole:
            found, tensors["image_features"] = self._of_part(rows, mine)
        if self.images.grid:
            tensors["position_ids"] = _with_grid(rows, mine, tensors.get("position_ids"))
        if self.images.token_types is not None:
            types = torch.isin(ids, torch.tensor(processor.token_ids))
            tensors[self.images.token_types] = types.long()
        in_bytes = self.images.in_bytes
        blank = processor.blank_in_bytes if in_bytes else processor.blank
        arrays = processor.join(found or [blank])
        if self.images.changed:
            tensors["images"] = len(found)
        if self.images.tower is None:
            tensors |= {name: torch.from_numpy(array) for name, array in arrays.items()}
            return replace(made, micro_batch=replace(micro_batch, inputs=tensors))
        table = processor.pixel_table if in_bytes else None
        tensors |= self.images.tower.make(arrays, ids, table)
        tokens = len(tensors["image_positions"])
        operations = self.images.tower.forward_operations(tensors["tower"], tokens)
        passes = self.images.tower.operations.passes if found else 0
        return replace(
            made,
            micro_batch=replace(micro_batch, inputs=tensors),
            image_operations=round(passes * sum(operations)),
        )

    def _of_part(self, rows: list[Sample], mine: slice) -> tuple[list[Arrays], torch.Tensor]:
        """The images of which these tokens of the rows have some, and the places of these tokens
        among all that stand for the features of these images."""
        assert self.images.tower is not None
        images, of_part = list[Arrays](), [np.zeros(0, dtype=bool)]
        for row in rows:
            pairs = zip(row.get("images", ()), row.get("image_spans", ()), strict=True)
            for arrays, (first, end) in pairs:
                if first < mine.stop and end > mine.start:
                    is_token = row["input_ids"][first:end] == self.images.tower.image_token
                    at = first + np.flatnonzero(is_token)
                    images.append(arrays)
                    of_part.append((at >= mine.start) & (at < mine.stop))
        return images, torch.from_numpy(np.flatnonzero(np.concatenate(of_part)))


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


def _with_grid(rows: list[Sample], mine: slice, text: torch.Tensor | None) -> torch.Tensor:
    """(3, rows, tokens), of these tokens of the rows; for packed rows (4, rows, tokens), where the
    first are the positions of text, from which masks are made."""
    grids = []
    for row in rows:
        own = row.get("grid_positions")
        own = np.zeros((3, 0), dtype=np.int64) if own is None else own
        # Padding is a document of its own
        missing = max(0, mine.stop - own.shape[1])
        rest = np.broadcast_to(np.arange(missing), (3, missing))
        grids.append(np.concatenate([own, rest], axis=1)[:, mine])
    grid = torch.from_numpy(np.stack(grids, axis=1))
    return grid if text is None else torch.cat([text[None], grid])
