"""Images: the first kind of attachments. `data/image_processor.py` makes tokens and pixels of them."""

from __future__ import annotations

import hashlib
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from launcher.data.attachments import Source
from launcher.data.chat_template import Rendered
from launcher.data.coordinates import Located, Unit, note
from launcher.data.image_processor import ImageProcessor, load_processor
from launcher.data.messages import Message
from launcher.data.modality import Arrays, Modality, Planned
from launcher.data.placing import source_of
from launcher.data.tokenizer_files import IMAGE_FILE, PROCESSOR_FILE, read_json
from launcher.errors import RecipeError, RowError, first_line
from launcher.libraries.families import COORDINATES
from launcher.recipe import schema
from launcher.sources.hub import model_folder

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 100_000_000
"""Pixels of the largest image that is decoded: a small file may hold an image that fills memory."""
_WIDE = ("I", "F")
"""Beginnings of Pillow's modes with more than 8 bits for a pixel: conversion cuts them to white."""
_FORMATS = (
    *("AVIF", "BMP", "DIB", "GIF", "HEIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM"),
    *("QOI", "TGA", "TIFF", "WEBP"),
)
"""Formats that are decoded, as Pillow names them. For others, such as EPS, Pillow starts programs."""
_REFUSED = dict.fromkeys(
    ("min_pixels", "max_pixels", "resized_height", "resized_width"),
    "images.max_pixels limits all images",
)
"""Keys of a part, as of Qwen's, that ask for a size of its image."""
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk")
"""How files of PNG, JPEG, GIF, WebP and BMP begin in base64."""


@dataclass(frozen=True)
class ImageSource(Source):
    """The bytes of an image file, or the path of the file."""

    kind = "image"

    def decode(self, content: bytes) -> Image:
        """The image in RGB, upright, of what `read` has returned. Raises RowError if it cannot be
        decoded, or is too large."""
        from PIL import Image, UnidentifiedImageError

        Image.init()
        formats = [name for name in _FORMATS if name in Image.OPEN]
        large = f"more than {MOST_PIXELS:,}; scale it down"
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # the limit below
                opened = Image.open(io.BytesIO(content), formats=formats)
            with opened:
                width, height = opened.size
                if width * height > MOST_PIXELS:
                    raise RowError(f"{self.name}: has {width:,} x {height:,} pixels, {large}")
                return _upright(opened, self.name)
        except RowError:
            raise
        except Image.DecompressionBombError:
            raise RowError(f"{self.name}: its number of pixels is {large}") from None
        except UnidentifiedImageError:
            what = f"is not an image in one of the formats {', '.join(formats)}, or a damaged one"
            raise RowError(f"{self.name}: {what}") from None
        except Exception as error:  # decoders raise many classes on damaged files
            raise RowError(f"{self.name}: cannot be decoded: {first_line(error)}") from None

    def describe(self, picture: Image, tokens: int) -> str:
        """A line about the decoded image, which has so many tokens."""
        width, height = picture.size
        return f"{self.name}, {width} x {height} pixels: {tokens:,} tokens"

    def shown(self, tokens: int, meta: Sequence[int]) -> tuple[str, Image]:
        picture, (rows, columns) = self.decode(self.read()), meta[:2]
        grid = f", {rows} x {columns}" if rows else ""
        return f"image: {self.describe(picture, tokens)}{grid}", picture


@dataclass(frozen=True)
class RowImages(Modality):
    """Images, as the rows of a run have them and a model takes them."""

    max_pixels: int | None = None
    """images.max_pixels"""
    coordinates: Unit | None = None
    """images.coordinates"""
    kind = "image"
    source = ImageSource
    refused_keys = _REFUSED
    beginnings = _BEGINNINGS
    example = "image.png"
    token_type = 1

    @classmethod
    def of(cls, section: schema.Images | None, model: str) -> RowImages:
        if section is None:
            return cls(model)
        return cls(
            model,
            section.folder,
            max_pixels=section.max_pixels,
            coordinates=section.coordinates,
        )

    @classmethod
    def of_export(cls, folder: Path, base: str | None) -> RowImages:
        """The limit of pixels is beside an adapter, its processor beside the base model."""
        if base is None:
            return cls(str(folder))
        limits = [_pixel_limit(at) for at in (folder, model_folder(base, key="command line"))]
        limit = limits[0] if limits[0] != limits[1] else None
        return cls(base, max_pixels=limit)

    def identity(self) -> list[object]:
        folder = model_folder(self.processor, key="model.path", weights=False)
        files = [Path(folder, name) for name in (IMAGE_FILE, PROCESSOR_FILE)]
        sums = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()]
        coordinates = [] if self.coordinates is None else [self.coordinates]
        return ["images", sums, self.max_pixels, self.folder, *coordinates]

    @property
    def loaded(self) -> ImageProcessor:
        """The processor of this process. Raises RecipeError if there is none."""
        return load_processor(self.processor, self.max_pixels)

    def limit_files(self, files: dict[str, dict[str, Any]]) -> None:
        if self.max_pixels is None:
            return
        for name in (PROCESSOR_FILE, IMAGE_FILE):
            content = files.get(name, {})
            for section in (content, content.get("image_processor")):
                size = section.get("size") if isinstance(section, dict) else None
                if isinstance(size, dict) and isinstance(size.get("longest_edge"), int):
                    size["longest_edge"] = min(self.max_pixels, size["longest_edge"])
                if isinstance(section, dict) and isinstance(section.get("max_pixels"), int):
                    section["max_pixels"] = min(self.max_pixels, section["max_pixels"])

    def expand(self, rendered: Rendered, sources: list[Any]) -> Rendered:
        return self.loaded.expand(rendered, sources, self.coordinates)

    def notes(self, found: Located) -> list[str]:
        if self.coordinates is None and found == Located():
            return []
        folder = model_folder(self.processor, key="model.path", weights=False)
        kind = read_json(folder / "config.json").get("model_type")
        return note(found, self.coordinates, COORDINATES.get(str(kind)))

    def example_arrays(self) -> Arrays:
        from PIL import Image

        image = Image.radial_gradient("L").resize((1600, 1200)).convert("RGB")
        return self.loaded.process(image).arrays

    def message_part(self, path: str) -> tuple[Message, str]:
        source: Any = source_of(path, self)
        content = source.read()
        picture = source.decode(content)
        tokens = self.loaded.count_tokens(self.loaded.process(picture).text)
        return {"type": "image", "bytes": content}, source.describe(picture, tokens)

    def file_of(self, value: Any) -> bytes | None:
        """The bytes of an image of Pillow."""
        known = hasattr(value, "convert") and hasattr(value, "save")
        return _png_of(value) if known else None

    def grid(self, meta: Sequence[int], ids: npt.NDArray[Any]) -> tuple[npt.NDArray[np.int64], int]:
        rows, columns = meta[:2]
        indices = np.broadcast_arrays(0, *np.indices((rows, columns)))
        return np.stack(indices).reshape(3, -1), max(rows, columns)

    def largest(self, tokens: int) -> tuple[int, tuple[int, ...], Arrays] | None:
        assert self.tower is not None
        return self.tower.form.largest(tokens, self.max_pixels)

    def planned(self, model: str) -> PlannedImages:
        assert self.tower is not None
        if self.max_pixels is not None and not self.tower.form.limited:
            what = f"the processor of {model} has no limit of pixels; set it to null"
            raise RecipeError(f"images.max_pixels: {what}")
        return PlannedImages(**vars(self))


@dataclass(frozen=True)
class PlannedImages(Planned, RowImages):
    """Images of which only sizes are known."""


def _pixel_limit(folder: Path) -> int | None:
    """The largest number of pixels of an image in a processor's files (`RowImages.limit_files`); None:
    there is none."""
    for name in (IMAGE_FILE, PROCESSOR_FILE):
        content = read_json(folder / name)
        for section in (content, content.get("image_processor")):
            size = section.get("size") if isinstance(section, dict) else None
            most = size.get("longest_edge") if isinstance(size, dict) else None
            if isinstance(most, int):
                return most
    return None


def _png_of(image: Any) -> bytes:
    """The file of an image of Pillow. Raises RowError."""
    stream, name = io.BytesIO(), "an image in the row"
    try:
        _upright(image, name).save(stream, format="PNG")
    except RowError:
        raise
    except Exception as error:  # a file that Pillow has opened, and not decoded
        raise RowError(f"{name}: cannot be decoded: {first_line(error)}") from None
    return stream.getvalue()


def _upright(image: Any, name: str) -> Image:
    """An image of Pillow in RGB, turned as its EXIF data say. Raises RowError if that would cut its
    values."""
    from PIL import ImageOps

    if image.mode.startswith(_WIDE):
        what = f"has pixels of more than 8 bits (Pillow's mode {image.mode})"
        raise RowError(f"{name}: {what}; save it with values from 0 to 255")
    return ImageOps.exif_transpose(image).convert("RGB")
