"""Processors of a model: from an image, or an attachment of another kind, to its tokens and pixels."""

from __future__ import annotations

import copy
import functools
import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from launcher.data.attachments import Placed
from launcher.data.chat_template import Rendered
from launcher.data.coordinates import SizedImage, Unit, converted, located, with_objects
from launcher.data.modality import Arrays
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.errors import RecipeError, RowError, first_line
from launcher.libraries.families import COORDINATES, OBJECT_TEXTS
from launcher.sources.hub import model_folder
from launcher.sources.layouts import ATTACHMENTS, typed, with_article

if TYPE_CHECKING:
    from PIL.Image import Image

_OF_TEXT = (
    "input_ids",
    "attention_mask",
    "token_type_ids",
    "mm_token_type_ids",
    "text_replacement_offsets",
)
_IN_LISTS = ("Idefics3Processor", "SmolVLMProcessor")
"""Processors whose arrays have a dimension for conversations before that for images."""

_IN_BYTES = {"do_rescale": False, "do_normalize": False}
_KEPT_BYTES = 64 << 20
"""Arrays of the images that a process has read last: those of a long row."""
_IMAGE_TOKENS = ("image_token_id", "image_token_index")
"""Keys of a model's config, of which one names the token whose embeddings images replace."""
_NEED_TWO = ("PixtralProcessor",)
"""Processors of models that squeeze the features of a single token away (Mistral 3 in 5.23)."""


@dataclass(frozen=True)
class Processed:
    """An attachment as the processor gives it."""

    text: str
    """Takes the place of its placeholder."""
    arrays: Arrays
    meta: tuple[int, ...] = ()
    """What its kind notes (`Attachment`)."""
    sizes: tuple[tuple[int, int], tuple[int, int] | None] = (0, 0), None
    """The width and height of the image, and those that the model sees; None: they are not known."""


class AttachmentProcessor(ABC):
    """A processor of transformers, for one attachment of a kind at a time."""

    kind: ClassVar[str]
    """See `Modality`."""
    placeholder: str
    """What a chat template writes for an attachment."""
    token_ids: list[int]
    """The tokens that stand for an attachment, and those between its parts."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._tokenizer: Any = processor.tokenizer
        self._in_lists = type(processor).__name__ in _IN_LISTS
        self._kept: dict[tuple[int, bool], Processed] = {}
        """The attachments that were read last, oldest first, by the checksums of their files."""

    def _image_token_ids(self, config: Any) -> list[int]:
        # Those of the model, too: that of Ovis2's processor stands for an image in texts only
        of_model = [getattr(config, name, None) for name in _IMAGE_TOKENS]
        known = [*self._processor.image_token_ids, *of_model]
        return list(dict.fromkeys(number for number in known if number is not None))

    @functools.cached_property
    def _token_texts(self) -> list[str]:
        texts: list[str] = self._tokenizer.convert_ids_to_tokens(self.token_ids)
        return texts

    @abstractmethod
    def process(self, decoded: Any, *, in_bytes: bool = False) -> Processed:
        """decoded: what `decode` of the source returns. in_bytes: pixels are not normalized, and
        uint8; `pixel_table` must not be None. Raises RowError if the processor refuses it."""

    @property
    @abstractmethod
    def pixel_table(self) -> npt.NDArray[np.float32] | None:
        """See `Modality`."""

    @property
    @abstractmethod
    def blank(self) -> Arrays:
        """The arrays of a small gray attachment."""

    @property
    @abstractmethod
    def blank_in_bytes(self) -> Arrays:
        """The same with pixels that are not normalized."""

    def _with_coordinates(
        self,
        rendered: Rendered,
        found: list[tuple[int, Processed]],
        unit: Unit | None,
    ) -> Rendered:
        """The conversation with coordinates as the model was trained with them. found: each attachment
        and where its placeholder begins. unit: images.coordinates. Raises RowError, and RecipeError if
        the model's coordinates are not known."""
        return rendered

    def read(
        self, source: Any, *, in_bytes: bool, checksum: int | None = None
    ) -> tuple[Processed, int]:
        """The attachment of a file, and the checksum of the file. What was read last is not decoded
        again: both answers of a pair show the same ones. checksum: what it was when the row was
        tokenized. Raises RowError."""
        content = source.read()
        found = source.checksum(content)
        if checksum is not None and found != checksum:
            what = "has changed since its row was tokenized"
            raise RowError(
                f"{source.name}: {what}; restore the file, or start with another data.cache"
            )
        made = self._kept.pop((found, in_bytes), None)
        if made is None:
            decoded = source.decode(content)
            try:
                made = self.process(decoded, in_bytes=in_bytes)
            except RowError as error:
                raise RowError(f"{source.name}: {error}") from None
        self._kept[found, in_bytes] = made
        while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > _KEPT_BYTES:
            del self._kept[next(iter(self._kept))]
        return made, found

    def join(self, attachments: list[Arrays]) -> Arrays:
        """The arrays of several attachments. Those of different sizes are padded with zeros on the
        right and at the bottom: models read their sizes."""
        joined: Arrays = {}
        for name in attachments[0]:
            arrays = [one[name] for one in attachments]
            shapes = {array.shape[1:] for array in arrays}
            if len(shapes) > 1:
                largest = np.max([array.shape[1:] for array in arrays], axis=0)
                arrays = [_padded(array, largest) for array in arrays]
            made = np.concatenate(arrays)
            joined[name] = made[None] if self._in_lists else made
        return joined

    def check(self, text: str, count: int, kinds: Collection[str]) -> None:
        """See `Modality.check`."""
        nouns, found = ATTACHMENTS[self.kind], text.count(self.placeholder)
        known = {kind: getattr(self._processor, f"{kind}_token", None) for kind in ATTACHMENTS}
        placeholders = (self.placeholder, *known.values())
        others = [each for each in self._token_texts if each in text and each not in placeholders]
        if found != count or others:
            written = others[0] if others else self.placeholder
            what = f"the text of the conversation holds {written}, which stands for {nouns}; "
            what += f"remove it; <{self.kind}> is the place of {with_article(self.kind)} of the "
            what += "row's column"
            if found < count:
                what = f"the chat template shows {found} of {count} {nouns}; set "
                what += "data.chat_template to one that shows them"
            raise RowError(what)
        for kind in ATTACHMENTS.keys() - {*kinds}:
            other = known[kind]
            if isinstance(other, str) and other in text:
                of_kind = ATTACHMENTS[kind]
                what = f"the text of the conversation holds {other}, which stands for {of_kind}; "
                raise RowError(
                    f"{what}remove it; {typed(f'{of_kind}.train', 'none')} trains on them"
                )

    def expand(
        self, rendered: Rendered, sources: list[Any], coordinates: Unit | None = None
    ) -> Rendered:
        """See `Modality.expand`, after `check`. coordinates: images.coordinates. Raises RowError, and
        RecipeError if the model's coordinates are not known."""
        if not sources:
            return self._with_coordinates(rendered, [], coordinates)
        texts, placed, found = [], [], []
        in_bytes = self.pixel_table is not None  # only the text is needed here
        starts = [
            match.start() for match in re.finditer(re.escape(self.placeholder), rendered.text)
        ]
        for source, start in zip(sources, starts, strict=True):
            made, checksum = self.read(source, in_bytes=in_bytes)
            found.append((start, made))
            texts.append(made.text)
            tokens = self.count_tokens(made.text)
            if not tokens:
                what = (
                    f"the text of {with_article(self.kind)} has none of the tokens that stand for "
                )
                name = type(self._processor).__name__
                nouns = ATTACHMENTS[self.kind]
                raise RecipeError(f"{nouns}: {name}: {what}{nouns}")
            placed.append(Placed(tokens, source, checksum, made.meta))
        rendered = self._with_coordinates(rendered, found, coordinates)
        return rendered.expanded(self.placeholder, texts, placed)

    def count_tokens(self, text: str) -> int:
        """The tokens of attachments in the text that takes the place of a placeholder."""
        # Not by their texts: that of a token may be a part of another's (TILE_GLOBAL of Aya Vision)
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return int(np.isin(ids, self.token_ids).sum())


@functools.lru_cache(maxsize=2)
def load_processor(name: str, max_pixels: int | None) -> ImageProcessor:
    """The processor of a model. name, max_pixels: see `RowImages`. Raises RecipeError if there is
    none, or if it cannot be used."""
    return ImageProcessor(name, max_pixels)


class ImageProcessor(AttachmentProcessor):
    """A processor of transformers, for one image at a time."""

    kind = "image"

    def __init__(self, name: str, max_pixels: int | None) -> None:
        """Raises RecipeError."""
        from transformers.processing_utils import ProcessorMixin

        processor, config = load_with_config(name, "images")
        super().__init__(processor)
        kind = type(self._processor).__name__
        self._needs_two = kind in _NEED_TWO
        self._merge: int | None = getattr(self._processor.image_processor, "merge_size", None)
        placeholder = getattr(self._processor, "image_token", None)
        if not isinstance(placeholder, str):
            raise RecipeError(f"images: {name}: {kind} has no placeholder for images")
        if type(self._processor).replace_image_token is ProcessorMixin.replace_image_token:
            what = f"{kind} does not say which text takes the place of an image; rows of its type"
            raise RecipeError(f"images: {name}: {what} with images are not supported")
        self.placeholder = placeholder
        if max_pixels is not None:
            self._limit(max_pixels)
        self.token_ids = self._image_token_ids(config)
        self._kind: str = config.model_type

    def _limit(self, max_pixels: int) -> None:
        size = self._processor.image_processor.size
        if self._merge is None or "longest_edge" not in size or "shortest_edge" not in size:
            what = f"{type(self._processor).__name__} has no limit of pixels; set it to null"
            raise RecipeError(f"images.max_pixels: {what}")
        if max_pixels < size["shortest_edge"]:
            least = size["shortest_edge"]
            what = f"must be at least {least:,} for this model; got {max_pixels:,}"
            raise RecipeError(f"images.max_pixels: {what}")
        size["longest_edge"] = min(max_pixels, size["longest_edge"])

    @property
    def image_processor(self) -> Any:
        """The image processor of transformers."""
        return self._processor.image_processor

    def process(self, decoded: Image, *, in_bytes: bool = False) -> Processed:
        image = decoded
        try:
            made = self._processor(
                images=[image],
                text=[self.placeholder],
                return_text_replacement_offsets=True,
                return_tensors="np",  # Ovis2 fails on lists
                **(_IN_BYTES if in_bytes else {}),
            )
        except Exception as error:  # such as for a line of pixels
            width, height = image.size
            what = f"the image of {width} x {height} pixels is refused"
            raise RowError(f"{what}: {first_line(error)}") from None
        (replaced,) = made["text_replacement_offsets"][0]
        if self._needs_two and replaced["replacement"].count(self.placeholder) < 2:
            width, height = image.size
            what = f"the image of {width} x {height} pixels has a single token, with which"
            raise RowError(f"{what} the model fails; scale it up")
        arrays = {name: np.asarray(made[name]) for name in made if name not in _OF_TEXT}
        if self._in_lists:
            arrays = {name: array[0] for name, array in arrays.items()}
        if in_bytes:
            arrays["pixel_values"] = arrays["pixel_values"].astype(np.uint8)
        sizes = image.size, self._seen(arrays)
        return Processed(replaced["replacement"], arrays, self._grid(arrays), sizes)

    def _grid(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, int]:
        grid = arrays.get("image_grid_thw")
        if grid is None or self._merge is None:
            return 0, 0
        _, rows, columns = grid[0].tolist()
        return rows // self._merge, columns // self._merge

    def _seen(self, arrays: Mapping[str, npt.NDArray[Any]]) -> tuple[int, int] | None:
        """The width and height of an image for the model."""
        grid = arrays.get("image_grid_thw")
        patch = getattr(self._processor.image_processor, "patch_size", None)
        if grid is None or not isinstance(patch, int):
            return None
        _, rows, columns = grid[0].tolist()
        return columns * patch, rows * patch

    def _with_coordinates(
        self, rendered: Rendered, found: list[tuple[int, Processed]], unit: Unit | None
    ) -> Rendered:
        if not found and rendered.objects is not None:
            what = "has boxes, and the row has no images"
            raise RowError(f"column {rendered.objects.column!r} {what}")
        video = getattr(self._processor, "video_token", None)
        videos = list[int]()
        if isinstance(video, str):
            videos = [match.start() for match in re.finditer(re.escape(video), rendered.text)]
        if not found and not videos:
            return rendered
        images = [SizedImage(start, *made.sizes) for start, made in found]
        own, objects = COORDINATES.get(self._kind), rendered.objects
        if own is None and (unit is not None or objects is not None):
            key = "images.coordinates: "
            hint = "set it to null, and write those into the rows"
            if objects is not None:
                key, hint = (
                    "",
                    f"{typed('data.ignore_columns', [objects.column])} trains without them",
                )
            raise RecipeError(
                f"{key}it is not known what coordinates a model of the type {self._kind} was trained "
                f"with; {hint}"
            )
        if unit is None or own is None:
            rendered = replace(rendered, coordinates=located(rendered, images, own, videos))
        else:
            rendered = converted(rendered, images, unit, own, videos)
        if objects is None or own is None:
            return rendered
        known = [self.placeholder, *self._token_texts, *self._tokenizer.get_added_vocab()]
        for reference in objects.references:
            if written := [text for text in known if text in reference]:
                what = f"{reference!r} holds {written[0]}, a token of the model; remove it"
                raise RowError(f"column {objects.column!r}: {what}")
        texts = OBJECT_TEXTS.get(self._kind, ("{ref}", "{list}"))
        return with_objects(rendered, images, own, texts)

    @functools.cached_property
    def pixel_table(self) -> npt.NDArray[np.float32] | None:
        """(3, 256): the normalized value of each value of a colour, with which the device normalizes
        pixels: a quarter of the bytes, and less time in the loader. None: the processor does more
        with pixels, or has several colours in another order."""
        from PIL import Image

        own, values = self.image_processor, np.arange(256, dtype=np.uint8)
        values = np.broadcast_to(values.reshape(1, 16, 16), (3, 16, 16))
        image = np.random.default_rng(0).integers(0, 256, (96, 80, 3), dtype=np.uint8)
        tested = Image.fromarray(image)
        try:
            scaled = own.rescale(values, own.rescale_factor)
            table = own.normalize(scaled, own.image_mean, own.image_std)
            table = np.asarray(table, dtype=np.float32).reshape(3, 256)
            found = self.process(tested, in_bytes=True).arrays["pixel_values"]
            expected = self.process(tested).arrays["pixel_values"]
            colours = found.reshape(len(found), 3, -1)
            made = table[np.arange(3)[:, None], colours].reshape(expected.shape)
        except Exception:  # processors differ in their methods and shapes
            return None
        return table if np.array_equal(made, expected) else None

    @functools.cached_property
    def blank(self) -> Arrays:
        """The arrays of a small gray image."""
        return self.process(_gray()).arrays

    @functools.cached_property
    def blank_in_bytes(self) -> Arrays:
        """The same with pixels that are not normalized."""
        return self.process(_gray(), in_bytes=True).arrays


def _bytes(made: Processed) -> int:
    return sum(array.nbytes for array in made.arrays.values())


def _gray() -> Image:
    from PIL import Image

    return Image.new("RGB", (32, 32), (128, 128, 128))


def _padded(array: npt.NDArray[Any], shape: npt.NDArray[Any]) -> npt.NDArray[Any]:
    missing = shape - array.shape[1:]
    return np.pad(array, [(0, 0), *((0, int(one)) for one in missing)])


def _processor_class(name: str) -> Any:
    """A class of processors, without looking for torchvision as `transformers` itself does. Raises
    RecipeError."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    for kind, own in PROCESSOR_MAPPING_NAMES.items():
        if own == name:
            try:
                module = importlib.import_module(f"transformers.models.{kind}.processing_{kind}")
            except ImportError as error:
                if error.name == "torchvision":  # Gemma 4 in 5.17
                    version = transformers.__version__
                    what = f"{name} of transformers {version} needs torchvision; install it"
                    raise RecipeError(f"images: {what}, or a newer transformers") from None
                continue
            if hasattr(module, name):
                return getattr(module, name)
    return getattr(transformers, name)


def load_with_config(name: str, section: str) -> tuple[Any, Any]:
    """The processor of a model, with the part for the attachments of this section, and the model's
    config. Raises RecipeError."""
    import transformers

    # `transformers` itself gives this class only where torchvision is installed (5.17)
    from transformers.models.auto.image_processing_auto import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    folder = str(model_folder(name, key="model.path", weights=False))
    tokenizer = copy.deepcopy(hugging_face_tokenizer(name))  # processors add tokens to it
    try:
        config = transformers.AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
        if config.model_type not in PROCESSOR_MAPPING_NAMES:
            what = "transformers has no processor of images for its type"
            raise RecipeError(
                f"images: {name}: {what}; remove the section, or give a model of images"
            )
        kind = _processor_class(PROCESSOR_MAPPING_NAMES[config.model_type])
        # In Pillow and numpy on every machine: the pixels of torchvision differ
        images = AutoImageProcessor.from_pretrained(
            folder, backend="pil", local_files_only=True, trust_remote_code=False
        )

        class Processor(kind):  # type: ignore[misc, valid-type]
            """Without processors of video and audio, which need torchvision."""

            def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> None:
                """Accepts None in the place of these."""

        Processor.__name__ = kind.__name__
        own, _ = kind.get_processor_dict(folder, local_files_only=True)
        own = {
            key: value
            for key, value in own.items()
            if not key.endswith(("_processor", "feature_extractor"))
        }
        parts = {"image_processor": images, "tokenizer": tokenizer}
        arguments = [parts.get(part) for part in kind.get_attributes()]
        made = Processor.from_args_and_dict(arguments, own)
    except RecipeError:
        raise
    except Exception as error:  # of missing files and unsuitable values
        what = f"no processor of images could be loaded: {first_line(error)}"
        raise RecipeError(f"images: {name}: {what}") from None
    return made[0] if isinstance(made, tuple) else made, config
