"""Images in rows: the forms in which data sets hold them, and their place in a conversation.

An image is a part of a message, `{"type": "image"}`, for which the chat template writes a
placeholder. `data/image_processor.py` makes tokens and pixels of it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import io
import json
import re
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from launcher.data.messages import (
    IMAGE_KEYS,
    PLACEHOLDER,
    Message,
    RowError,
    encodable,
    is_image_part,
    lacks_image,
)
from launcher.errors import first_line
from launcher.files import checksum_of

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 100_000_000
"""Pixels of the largest image that is decoded: a small file may hold an image that fills memory."""
MOST_BYTES = 256 << 20
"""Bytes of the largest file of an image."""
_WIDE = ("I", "F")
"""Beginnings of Pillow's modes with more than 8 bits for a pixel: conversion cuts them to white."""
_FORMATS = (
    *("AVIF", "BMP", "DIB", "GIF", "HEIF", "ICO", "JPEG", "JPEG2000", "MPO", "PNG", "PPM"),
    *("QOI", "TGA", "TIFF", "WEBP"),
)
"""Formats that are decoded, as Pillow names them. For others, such as EPS, Pillow starts programs."""
_LONGEST_NAME = 300
"""Characters of a path in a message."""
_OWN_SIZE = ("min_pixels", "max_pixels", "resized_height", "resized_width")
"""Keys of a part, as of Qwen's, that ask for a size of its image."""
_BASE64 = ("base64", "data")
"""Keys whose values are base64."""
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "R0lGOD", "UklGR", "Qk")
"""How files of PNG, JPEG, GIF, WebP and BMP begin in base64."""


@dataclass(frozen=True)
class ImageSource:
    """The bytes of an image file, or the path of the file."""

    data: bytes
    is_file: bool = False

    @property
    def name(self) -> str:
        """For messages: without control characters, and of a long path the end."""
        if not self.is_file:
            return "an image in the row"
        shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in self.data.decode())
        return shown if len(shown) <= _LONGEST_NAME else f"...{shown[-_LONGEST_NAME:]}"

    def read(self) -> bytes:
        """The bytes of the file. Raises RowError."""
        if not self.is_file:
            return self.data
        path = Path(self.data.decode())
        try:
            status = path.stat()
            if not stat.S_ISREG(status.st_mode):
                raise RowError(f"{self.name}: is not a file")
            if status.st_size > MOST_BYTES:
                what = f"the file has {status.st_size:,} bytes, more than {MOST_BYTES:,}"
                raise RowError(f"{self.name}: {what}")
            return path.read_bytes()
        except RowError:
            raise
        except FileNotFoundError:
            what = (
                "no such file; images.folder is where relative paths start, by default the folder"
            )
            raise RowError(f"{self.name}: {what} of the row's file") from None
        except (OSError, ValueError) as error:  # ValueError: a null byte
            problem = error.strerror if isinstance(error, OSError) else None
            raise RowError(f"{self.name}: cannot be read: {problem or error}") from None

    def checksum(self, content: bytes) -> int:
        """A checksum of what `read` has returned."""
        return int(checksum_of([content])[:16], 16)

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


@dataclass(frozen=True)
class StoredImage:
    """An image of a token store."""

    first: int
    """Its first token in the store."""
    end: int
    grid: tuple[int, int]
    """See `Processed`."""
    source: ImageSource
    checksum: int
    """Of its file, when its row was tokenized."""

    @property
    def name(self) -> str:
        """For messages."""
        return self.source.name

    def shown(self) -> tuple[str, Image]:
        """A line about the image, and the image. Raises RowError."""
        picture = self.source.decode(self.source.read())
        grid = "" if self.grid == (0, 0) else f", {self.grid[0]} x {self.grid[1]}"
        return f"image: {self.source.describe(picture, self.end - self.first)}{grid}", picture


def _upright(image: Any, name: str) -> Image:
    """An image of Pillow in RGB, turned as its EXIF data say. Raises RowError if that would cut its
    values."""
    from PIL import ImageOps

    if image.mode.startswith(_WIDE):
        what = f"has pixels of more than 8 bits (Pillow's mode {image.mode})"
        raise RowError(f"{name}: {what}; save it with values from 0 to 255")
    return ImageOps.exif_transpose(image).convert("RGB")


def source_of(value: object, folder: str) -> ImageSource:
    """An image from the forms in which data sets hold it: a path, which may be relative to `folder`,
    the bytes of a file, base64, `{"bytes": ..., "path": ...}` (datasets), `{"url": ...}` (OpenAI), or
    an image of Pillow. Raises RowError."""
    if isinstance(value, Mapping):
        for key in IMAGE_KEYS:
            inner = value.get(key)
            if isinstance(inner, str) and inner and key in _BASE64:
                return ImageSource(_from_base64(inner.rpartition("base64,")[2]))
            if inner is not None:
                return source_of(inner, folder)
        raise RowError(f"an image has none of the keys {', '.join(IMAGE_KEYS)}")
    if isinstance(value, bytes | bytearray) and value:
        return ImageSource(bytes(value))
    if isinstance(value, str) and value:
        return _source_of_text(value, folder)
    if hasattr(value, "convert") and hasattr(value, "save"):
        stream, name = io.BytesIO(), "an image in the row"
        try:
            _upright(value, name).save(stream, format="PNG")
        except RowError:
            raise
        except Exception as error:  # a file that Pillow has opened, and not decoded
            raise RowError(f"{name}: cannot be decoded: {first_line(error)}") from None
        return ImageSource(stream.getvalue())
    got = "nothing" if value in ("", b"", None) else type(value).__name__
    raise RowError(f"an image must be a path, the bytes of a file, or base64; got {got}")


def _source_of_text(value: str, folder: str) -> ImageSource:
    encodable(value, "the path of an image")
    if value.startswith("data:"):
        return ImageSource(_from_base64(value.partition(",")[2]))
    scheme = re.match(r"([a-z][a-z0-9+.-]+)://", value, re.IGNORECASE)
    if re.match("file:/", value, re.IGNORECASE):
        url = urlsplit(value)
        if url.netloc not in ("", "localhost"):
            what = f"names the host {url.netloc}; a path stands after three slashes"
            raise RowError(f"{value[:200]}: {what}: file:///folder/image.png")
        return ImageSource(unquote(url.path).encode(), is_file=True)
    if scheme is not None:
        what = "images are not downloaded; download them first, and give their paths"
        raise RowError(f"{value[:200]}: {what}")
    # Base64 without a name: no path is as long, or begins like this
    encoded = value.startswith(_BEGINNINGS) and len(value) >= 64
    if (encoded or len(value) > 4096) and re.fullmatch(r"[A-Za-z0-9+/\s]+=*\s*", value):
        return ImageSource(_from_base64(value))
    return ImageSource(str(Path(folder, value).absolute()).encode(), is_file=True)


def _from_base64(value: str) -> bytes:
    try:
        return base64.b64decode(re.sub(r"\s", "", value), validate=True)
    except (binascii.Error, ValueError) as error:
        raise RowError(f"an image is no base64: {error}") from None


def place_images(
    messages: Sequence[Message], column: object, folder: str, *, placeholders: bool = True
) -> tuple[list[Message], list[ImageSource]]:
    """The messages with a part `{"type": "image"}` for each image, and the images in their order.

    column: the value of the row's column of images, a list, as JSON too, or a single image; None: it
    has none. Its images take the place of parts without an image of their own and, in texts, of
    `<image>`, in this order. If there are no such places, they come first in the first message of a
    user, as in TRL. placeholders: whether `<image>` is the place of an image. Raises RowError if the
    numbers do not agree, or if an assistant answers with an image.
    """
    given = _listed(column)
    waiting = list(given)
    sources: list[ImageSource] = []

    def next_of_column(what: str) -> None:
        if not waiting:
            held = f"the row's column of images has {len(given)}"
            if not given:
                held = "the row's column of images is empty or missing"
            raise RowError(f"{what}, and {held}")
        sources.append(source_of(waiting.pop(0), folder))

    def placed(part: object) -> Iterator[dict[str, Any]]:
        if is_image_part(part):
            assert isinstance(part, Mapping)
            if sized := [key for key in _OWN_SIZE if part.get(key) is not None]:
                what = f"an image has the key {' and '.join(sized)}, which is not read"
                raise RowError(f"{what}; images.max_pixels limits all images. Remove the key")
            if lacks_image(part):
                keys = [str(key) for key, value in part.items() if value is not None]
                next_of_column(f"a part with the keys {', '.join(keys)} has no image of its own")
            else:
                sources.append(source_of(part, folder))
            yield {"type": "image"}
            return
        text = part if isinstance(part, str) else part["text"]  # type: ignore[index]
        for number, piece in enumerate(text.split(PLACEHOLDER) if placeholders else [text]):
            if number:
                next_of_column(f"{PLACEHOLDER} in a text is the place of an image")
                yield {"type": "image"}
            if piece:
                yield {"type": "text", "text": piece}

    for number, message in enumerate(messages, start=1):
        answers = placeholders and message["role"] == "assistant"
        if answers and PLACEHOLDER in str(message["content"] or ""):
            what = f"its text holds {PLACEHOLDER}, the place of an image"
            raise RowError(f"message {number}: the assistant cannot answer with an image: {what}")
    made = [_with_content(message, placed) for message in messages]
    if given and len(waiting) == len(given):
        first = next((at for at, message in enumerate(made) if message["role"] == "user"), None)
        if first is None:
            raise RowError("the row has images, and no message of a user to show them in")
        if sources:
            what = "the row has a column of images, and its messages have other images"
            raise RowError(f"{what}; give them in one of the two places")
        sources += [source_of(value, folder) for value in given]
        rest = made[first]["content"]
        parts: list[dict[str, Any]] = [{"type": "image"} for _ in given]
        parts += [{"type": "text", "text": rest}] if rest else []
        made[first] = {**made[first], "content": parts}
    elif waiting:
        shown = len(given) - len(waiting)
        raise RowError(
            f"the row's column of images has {len(given)}, and the messages show {shown} of them; "
            f"write {PLACEHOLDER} where each belongs"
        )
    for number, message in enumerate(made, start=1):
        if message["role"] == "assistant" and not isinstance(message["content"], str | None):
            raise RowError(f"message {number}: the assistant cannot answer with an image")
    return made, sources


def _listed(column: object) -> list[object]:
    """The images of a column."""
    if isinstance(column, str) and column.lstrip().startswith("["):  # as in a .csv
        with contextlib.suppress(ValueError):  # of a path
            column = json.loads(column)
    if column is None:
        return []
    return list(column) if isinstance(column, list | tuple) else [column]


def _with_content(
    message: Message, placed: Callable[[object], Iterator[dict[str, Any]]]
) -> Message:
    """The message with its content in parts if it has images, and else as text."""
    content = message["content"]
    if content is None:
        return message
    parts = [
        made
        for part in ([content] if isinstance(content, str) else content)
        for made in placed(part)
    ]
    if not any(part["type"] == "image" for part in parts):
        return {**message, "content": "".join(part["text"] for part in parts)}
    return {**message, "content": parts}


@dataclass(frozen=True)
class RowImages:
    """How the rows of a run have images."""

    processor: str
    """The folder or hub id of the model, with its image processor."""
    max_pixels: int | None = None
    """images.max_pixels"""
    folder: str | None = None
    """images.folder: where relative paths start. None: at the folder of the row's file."""

    def of_file(self, name: str) -> RowImages:
        """The same for the rows of a file, with its `folder`."""
        return self if self.folder is not None else replace(self, folder=str(Path(name).parent))
