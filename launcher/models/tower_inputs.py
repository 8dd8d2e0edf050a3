"""What an image tower takes of a micro-batch, made on the host with the micro-batch.

transformers computes indices in the tower, from the sizes of images on the device: the host waits for
the device several times in each layer. Here the loader makes them. A family has a form of images
(`TowerForm`), which knows what its tower takes of the processor's arrays, how the tower is called, and
how large images can be.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from launcher.libraries.families import FRAMES_ARE_IMAGES
from launcher.libraries.private import attention_implementation, without_block_mask
from launcher.models.description import Config

Arrays = Mapping[str, npt.NDArray[Any]]
Image = tuple[int, tuple[int, ...], dict[str, npt.NDArray[Any]]]
"""An image or a video without content: its tokens; what its kind notes, such as rows and columns of
tokens for models that give these positions; and its arrays, which take no memory before they are
used."""
BOUNDS = ("image_cu_seqlens", "image_cu_window_seqlens", "cu_seq_lens_q")
"""The bounds of what attention keeps apart in a row of patches: images, and their windows."""
TOWER = "launcher_tower"
FLASH_TOWER = "launcher_flash_tower"
"""Names in transformers' table of attention functions: `varlen_attention` in image towers, and the same
for towers that pass the bounds of images only to an attention whose name contains "flash"; to another one they
pass parts of a row, for which the host waits for the device (transformers 5.17 to 5.23)."""


class TowerForm(ABC):
    """The form in which the tower of a family takes images."""

    attention: ClassVar[str | None] = None
    """The attention with which the host does not wait in the tower; None: any."""
    several_lengths: ClassVar[bool] = False
    """Whether attention keeps images of several lengths apart."""
    limited: ClassVar[bool] = False
    """Whether the processor has a limit of pixels (images.max_pixels)."""
    patch_values: int
    """Numbers that the tower multiplies with each of its widths, for each patch, before and after
    its blocks."""

    @classmethod
    @abstractmethod
    def of(cls, config: Config) -> TowerForm | None:
        """The form of a model with this config; None: the model is another one than those that are
        known of the family."""

    @abstractmethod
    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        """The arguments of `features`. arrays: of the processor, for the images of a micro-batch.
        What is not a tensor stays on the host."""

    def features(self, base: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Runs the tower and the projector of a model. The result has `pooler_output`, the features
        of all images, (tokens, hidden size) or a tuple of such tensors, and for some families
        `deepstack_features`."""
        features: Mapping[str, Any] = base.get_image_features(**arguments, return_dict=True)
        return features

    @abstractmethod
    def patches(self, arguments: Mapping[str, Any]) -> int:
        """The patches that the tower computes."""

    @abstractmethod
    def squares(self, arguments: Mapping[str, Any]) -> tuple[float, float]:
        """The sum of the squared numbers of patches that attend to each other, of images and of
        windows."""

    @abstractmethod
    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        """The largest image with at most so many tokens and pixels, about a square; None: there is
        none."""

    @property
    def least_tokens(self) -> int:
        """Tokens of the smallest image."""
        return 1

    def positions(
        self, meta: Sequence[int], is_token: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """See `Modality.grid`. is_token: whether a token of the attachment stands for features. Only
        of models that give these positions."""
        raise NotImplementedError


@dataclass(frozen=True)
class PatchGrid(TowerForm):
    """Qwen-VL: each image is a grid of patches, and all patches are one row. The tower takes its
    indices as arguments (`image_*` of transformers' `accepts_precomputed_kwargs`)."""

    merge: int
    """Patches that become a token, in each direction."""
    patch: int
    """Pixels of a patch, in each direction."""
    patch_values: int
    """Numbers of a patch: its pixels in three colours, twice (time)."""
    window: int | None = None
    """Pixels of a window of attention, in each direction (Qwen2.5-VL)."""
    table: int | None = None
    """Rows of the square table of position embeddings (Qwen3-VL)."""
    attention = FLASH_TOWER
    several_lengths = True
    limited = True

    @classmethod
    def of(cls, config: Config) -> PatchGrid:
        vision = config.vision_config
        positions = getattr(vision, "num_position_embeddings", None)
        return cls(
            merge=vision.spatial_merge_size,
            patch=vision.patch_size,
            patch_values=vision.in_channels * vision.temporal_patch_size * vision.patch_size**2,
            window=vision.window_size if config.model_type == "qwen2_5_vl" else None,
            table=None if positions is None else int(positions**0.5),
        )

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        from transformers import vision_utils

        sizes = np.asarray(arrays["image_grid_thw"])
        grid = torch.from_numpy(sizes)
        bounds = vision_utils.get_vision_cu_seqlens(grid)
        made: dict[str, Any] = {
            "pixel_values": torch.from_numpy(arrays["pixel_values"]),
            "image_grid_thw": sizes,  # the sizes of features are read from it
            "image_position_ids": vision_utils.get_vision_position_ids(grid, self.merge),
            "image_cu_seqlens": bounds,
            "image_max_seqlen": int(bounds.diff().max()),
        }
        if self.window is not None:
            index, bounds = vision_utils.get_vision_window_index(
                grid,
                spatial_merge_size=self.merge,
                window_size=self.window,
                patch_size=self.patch,
            )
            made["image_window_index"], made["image_cu_window_seqlens"] = index, bounds
            made["image_max_window_seqlen"] = int(bounds.diff().max())
        if self.table is not None:
            both = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=self.table,
                mode="bilinear",
                align_corners=True,
                spatial_merge_size=self.merge,
            )
            made["image_interp_indices"], made["image_interp_weights"] = both
        return made

    def patches(self, arguments: Mapping[str, Any]) -> int:
        return len(arguments["pixel_values"])

    def squares(self, arguments: Mapping[str, Any]) -> tuple[float, float]:
        images, windows = _squares(arguments["image_cu_seqlens"]), 0.0
        if self.window is not None:
            windows = _squares(arguments["image_cu_window_seqlens"])
        return images, windows

    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        if max_pixels is not None:
            tokens = min(tokens, max_pixels // (self.merge * self.patch) ** 2)
        if tokens < 1:
            return None
        rows = math.isqrt(tokens)
        columns = tokens // rows
        sizes = np.array([[1, rows * self.merge, columns * self.merge]])
        pixels = np.zeros((int(sizes.prod()), self.patch_values), dtype=np.uint8)
        arrays = {"pixel_values": pixels, "image_grid_thw": sizes}
        return rows * columns, (rows, columns), arrays


@dataclass(frozen=True)
class VideoGrid(PatchGrid):
    """Videos of Qwen-VL: a grid of patches for each pair of frames. Attention is within a pair."""

    pair: int = 2
    """Frames of a patch."""
    per_second: float | None = None
    """Positions of a second (Qwen2.5-VL); None: one for each pair."""
    apart: bool = False
    """Whether the time of each pair stands as text before it (Qwen3-VL, Qwen3.5), and the limit of
    pixels is one of all frames together."""

    @classmethod
    def of(cls, config: Config) -> VideoGrid:
        vision, kind = config.vision_config, config.model_type
        return cls(
            **vars(PatchGrid.of(config)),
            pair=vision.temporal_patch_size,
            per_second=vision.tokens_per_second if kind == "qwen2_5_vl" else None,
            apart=kind.startswith("qwen3"),
        )

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        pixels, sizes = arrays["pixel_values_videos"], arrays["video_grid_thw"]
        return super().arguments({"pixel_values": pixels, "image_grid_thw": sizes})

    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        of_pair = max_pixels
        if self.apart and max_pixels is not None:
            of_pair = max_pixels // self.pair
            tokens = min(tokens, of_pair // (self.merge * self.patch) ** 2)
        made = super().largest(tokens, of_pair)
        if made is None:
            return None
        each, (rows, columns), _ = made
        times = tokens // each
        sizes = np.array([[times, rows * self.merge, columns * self.merge]])
        pixels = np.zeros((int(sizes.prod()), self.patch_values), dtype=np.uint8)
        arrays = {"pixel_values_videos": pixels, "video_grid_thw": sizes}
        if self.per_second is not None:
            arrays["second_per_grid_ts"] = np.ones(1, dtype=np.float32)
        return times * each, (times, rows, columns, 0), arrays

    def positions(
        self, meta: Sequence[int], is_token: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], int]:
        """As `get_rope_index` of transformers 5.23 (5.17 cuts the seconds of Qwen2.5-VL to whole ones):
        text goes on after the height or width of the last pair, also where the positions of time are
        larger."""
        times, rows, columns, bits = meta
        step, grid = max(rows, columns), np.indices((times, rows, columns)).reshape(3, -1)
        if not self.apart:
            if self.per_second is not None:
                # In float32, as there
                seconds = np.array(bits, dtype=np.int32).view(np.float32)
                every = np.float32(self.per_second) * seconds
                grid[0] = (grid[0].astype(np.float32) * every).astype(np.int64)
            return grid, step
        pair = grid[:, : rows * columns]
        made = np.zeros((3, len(is_token)), dtype=np.int64)
        at = place = 0
        while place < len(is_token):
            if is_token[place]:
                made[:, place : place + rows * columns] = at + pair
                place, at = place + rows * columns, at + step
            else:
                made[:, place] = at
                place, at = place + 1, at + 1
        return made, at


@dataclass(frozen=True)
class OneSize(TowerForm):
    """Gemma 3, LLaVA: all images are scaled to one size."""

    size: int
    """Pixels of an image in each direction."""
    patch: int
    """Pixels of a patch, in each direction."""
    tokens: int
    """Tokens of an image."""

    @classmethod
    def of(cls, config: Config) -> OneSize | None:
        vision = config.vision_config
        if vision.model_type not in ("clip_vision_model", "siglip_vision_model"):
            return None
        tokens = getattr(config, "mm_tokens_per_image", None)
        if tokens is None:  # LLaVA
            whole = getattr(config, "vision_feature_select_strategy", "default") == "full"
            tokens = (vision.image_size // vision.patch_size) ** 2 + whole
        return cls(vision.image_size, vision.patch_size, tokens)

    @property
    def patch_values(self) -> int:  # type: ignore[override]
        """See `TowerForm`."""
        return 3 * self.patch**2

    @property
    def _image_patches(self) -> int:
        return (self.size // self.patch) ** 2

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        return {"pixel_values": torch.from_numpy(arrays["pixel_values"])}

    def patches(self, arguments: Mapping[str, Any]) -> int:
        return len(arguments["pixel_values"]) * self._image_patches

    def squares(self, arguments: Mapping[str, Any]) -> tuple[float, float]:
        return float(self.patches(arguments) * self._image_patches), 0.0

    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        pixels = np.zeros((1, 3, self.size, self.size), dtype=np.uint8)
        return (self.tokens, (0, 0), {"pixel_values": pixels}) if tokens >= self.tokens else None

    @property
    def least_tokens(self) -> int:
        return self.tokens


@dataclass(frozen=True)
class PooledFrames(OneSize):
    """Videos of LLaVA-OneVision: all frames have one size, and the features of four patches become a
    token. A line break follows the frames of each video."""

    most: int = 32
    """Frames of a video, at most, for a plan."""

    @classmethod
    def of(cls, config: Config) -> PooledFrames | None:
        vision = config.vision_config
        side = vision.image_size // vision.patch_size
        return cls(vision.image_size, vision.patch_size, math.ceil(side / 2) ** 2)

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        frames: list[int] = arrays["num_frames"].tolist()
        return {"pixel_values": torch.from_numpy(arrays["pixel_values_videos"]), "frames": frames}

    def features(self, base: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        # The frames of all videos as those of one, behind whose features is a line break (5.23) or not
        pixels = arguments["pixel_values"]
        made = base.get_video_features(pixels[None], return_dict=True).pooler_output[0]
        lengths = [frames * self.tokens for frames in arguments["frames"]]
        line_break = base.image_newline[None].to(made.dtype)
        parts = made[: sum(lengths)].split(lengths)
        return {"pooler_output": torch.cat([each for part in parts for each in (part, line_break)])}

    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        frames = min((tokens - 1) // self.tokens, self.most)
        if frames < 1:
            return None
        pixels = np.zeros((frames, 3, self.size, self.size), dtype=np.uint8)
        arrays = {"pixel_values_videos": pixels, "num_frames": np.array([frames])}
        return frames * self.tokens + 1, (0, 0), arrays

    @property
    def least_tokens(self) -> int:
        return self.tokens + 1


@dataclass(frozen=True)
class Tiles(OneSize):
    """Idefics3, SmolVLM: an image is divided into tiles of one size. For a plan each tile is an
    image of its own.

    transformers looks on the device for tiles that are only padding, and for the patches of each
    tile. Here there are no such tiles, and all patches are taken.
    """

    attention = TOWER

    @classmethod
    def of(cls, config: Config) -> Tiles:
        vision = config.vision_config
        tokens = (vision.image_size // vision.patch_size) ** 2 // config.scale_factor**2
        return cls(vision.image_size, vision.patch_size, tokens)

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        # One conversation with all tiles, where the processor made them
        pixels = arrays["pixel_values"]
        return {"pixel_values": torch.from_numpy(pixels.reshape(-1, *pixels.shape[-3:]))}

    def features(self, base: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        tower, pixels = base.vision_model, arguments["pixel_values"]
        sides = [side // self.patch for side in pixels.shape[-2:]]
        whole = torch.ones(len(pixels), *sides, dtype=torch.bool, device=pixels.device)
        hidden = tower(pixel_values=pixels.to(tower.dtype), patch_attention_mask=whole)
        return {"pooler_output": base.connector(hidden.last_hidden_state)}


@dataclass(frozen=True)
class ShuffledTiles(OneSize):
    """InternVL: an image is divided into tiles of one size, and the features of several patches become
    a token. For a plan each tile is an image of its own."""

    @classmethod
    def of(cls, config: Config) -> ShuffledTiles | None:
        vision = config.vision_config
        (size, width), (patch, other) = vision.image_size, vision.patch_size
        if vision.model_type != "internvl_vision" or size != width or patch != other:
            return None
        return cls(size, patch, round((size // patch * config.downsample_ratio) ** 2))

    @property
    def _image_patches(self) -> int:
        return super()._image_patches + 1  # the token of the whole image


@dataclass(frozen=True)
class PaddedPatches(TowerForm):
    """Gemma 4: images keep their shapes, are scaled to at most so many patches, and padded to that
    number."""

    patch: int
    """Pixels of a patch, in each direction."""
    merge: int
    """Patches that become a token, in each direction."""
    most: int = 280
    """Tokens of an image, at most: the default of the processor, because the config does not say."""
    attention = TOWER
    several_lengths = True

    @classmethod
    def of(cls, config: Config) -> PaddedPatches:
        vision = config.vision_config
        return cls(vision.patch_size, vision.pooling_kernel_size)

    @property
    def patch_values(self) -> int:  # type: ignore[override]
        """Also those that patches are multiplied with to become tokens."""
        return 3 * self.patch**2 + self.most

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        positions = arrays["image_position_ids"]
        padded = positions.shape[1]
        patches = (positions >= 0).all(axis=2).sum(axis=1)
        # Padding is an image of its own, which nothing reads
        parts = np.stack([patches, padded - patches], axis=1).flatten()
        each, tokens = padded // self.merge**2, patches // self.merge**2
        places = [number * each + np.arange(count) for number, count in enumerate(tokens)]
        return {
            "pixel_values": torch.from_numpy(arrays["pixel_values"]),
            "image_position_ids": torch.from_numpy(positions),
            "token_places": torch.from_numpy(np.concatenate(places)),
            **_bounds(parts[parts > 0]),
        }

    def features(self, base: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        inputs, tower = dict(arguments), base.vision_tower
        places = inputs.pop("token_places")
        inputs["pixel_position_ids"] = inputs.pop("image_position_ids")

        def without_padding(module: object, args: object, pooled: Any) -> tuple[Any, slice]:
            handle.remove()
            hidden = pooled[0].flatten(0, 1).index_select(0, places)
            return hidden, slice(None)  # in the place of a mask, by which the tower indexes

        handle = tower.pooler.register_forward_hook(without_padding)
        hidden = tower(**inputs).last_hidden_state
        return {"pooler_output": base.embed_vision(inputs_embeds=hidden)}

    def patches(self, arguments: Mapping[str, Any]) -> int:
        images, padded, _ = arguments["pixel_values"].shape
        return int(images * padded)

    def squares(self, arguments: Mapping[str, Any]) -> tuple[float, float]:
        return _squares(arguments["cu_seq_lens_q"]), 0.0

    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        """A square, which most images of a row may be: it has less padding than one with fewer tokens."""
        side = math.isqrt(self.most)
        if tokens < side**2:
            return None
        padded = self.most * self.merge**2
        grid = np.indices((side * self.merge, side * self.merge)).reshape(2, -1)[::-1].T
        positions = np.full((1, padded, 2), -1)
        positions[0, : len(grid)] = grid
        pixels = np.zeros((1, padded, 3 * self.patch**2), dtype=np.uint8)
        return side**2, (0, 0), {"pixel_values": pixels, "image_position_ids": positions}

    @property
    def least_tokens(self) -> int:
        return math.isqrt(self.most) ** 2


@dataclass(frozen=True)
class PaddedFrames(PaddedPatches):
    """Videos of Gemma 4: each frame is as an image, with fewer tokens."""

    most: int = 70

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        pixels, places = arrays["pixel_values_videos"], arrays["video_position_ids"]
        return super().arguments({"pixel_values": pixels, "image_position_ids": places})

    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        made = super().largest(tokens)
        if made is None:
            return None
        of_frame, meta, arrays = made
        video = {
            "pixel_values_videos": arrays["pixel_values"],
            "video_position_ids": arrays["image_position_ids"],
            "num_frames_per_video": np.ones(1, dtype=np.int64),
        }
        return of_frame, meta, video


@dataclass(frozen=True)
class PaddedImages(TowerForm):
    """Mistral 3 (Pixtral): images keep their shapes, and are padded to the largest of a micro-batch.
    The patches of all images are one row, without those of padding."""

    patch: int
    """Pixels of a patch, in each direction."""
    merge: int
    """Patches that become a token, in each direction."""
    side: int
    """Pixels of the longer side, at most."""
    attention = TOWER
    several_lengths = True

    @classmethod
    def of(cls, config: Config) -> PaddedImages | None:
        vision = config.vision_config
        if vision.model_type != "pixtral" or config.vision_feature_layer != -1:
            return None
        return cls(vision.patch_size, config.spatial_merge_size, vision.image_size)

    @property
    def patch_values(self) -> int:  # type: ignore[override]
        """See `TowerForm`."""
        return 3 * self.patch**2

    def arguments(self, arrays: Arrays) -> dict[str, Any]:
        sizes = arrays["image_sizes"]
        return {
            "pixel_values": torch.from_numpy(arrays["pixel_values"]),
            "image_sizes": sizes.tolist(),  # on the host, where the tower reads them
            **_bounds((sizes // self.patch).prod(axis=1)),
        }

    def features(self, base: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        tower, sizes = base.vision_tower, arguments["image_sizes"]
        if attention_implementation(tower) == TOWER:
            with without_block_mask():
                hidden = tower(**arguments).last_hidden_state
        else:
            hidden = tower(**arguments).last_hidden_state
        return {"pooler_output": base.multi_modal_projector(hidden[0], sizes)}

    def patches(self, arguments: Mapping[str, Any]) -> int:
        return int(arguments["cu_seq_lens_q"][-1])

    def squares(self, arguments: Mapping[str, Any]) -> tuple[float, float]:
        return _squares(arguments["cu_seq_lens_q"]), 0.0

    def largest(self, tokens: int, max_pixels: int | None = None) -> Image | None:
        pixels = self.patch * self.merge
        rows = min(math.isqrt(max(0, tokens)), self.side // pixels)
        if rows < 1:
            return None
        columns = min(tokens // rows, self.side // pixels)
        sizes = np.array([[rows * pixels, columns * pixels]])
        arrays = {
            "pixel_values": np.zeros((1, 3, *sizes[0].tolist()), dtype=np.uint8),
            "image_sizes": sizes,
        }
        return rows * columns, (0, 0), arrays


FORMS: dict[str, type[TowerForm]] = {
    "gemma3": OneSize,
    "gemma4": PaddedPatches,
    "idefics3": Tiles,
    "internvl": ShuffledTiles,
    "llava": OneSize,
    "mistral3": PaddedImages,
    "qwen2_5_vl": PatchGrid,
    "qwen2_vl": PatchGrid,
    "qwen3_5": PatchGrid,
    "qwen3_5_moe": PatchGrid,
    "qwen3_vl": PatchGrid,
    "qwen3_vl_moe": PatchGrid,
    "smolvlm": Tiles,
}
"""By model type."""


VIDEO_FORMS: dict[str, type[TowerForm]] = {
    "gemma4": PaddedFrames,
    "internvl": ShuffledTiles,
    "llava_onevision": PooledFrames,
    "qwen2_5_vl": VideoGrid,
    "qwen2_vl": VideoGrid,
    "qwen3_5": VideoGrid,
    "qwen3_5_moe": VideoGrid,
    "qwen3_vl": VideoGrid,
    "qwen3_vl_moe": VideoGrid,
    "smolvlm": Tiles,
}
"""The same for videos."""


@dataclass(frozen=True)
class TowerKind:
    """What transformers calls what models have for a kind of attachments."""

    tower: str
    """The kind whose tower it uses: that of images sees videos, too."""
    features: str
    """The method of a model's base that runs the tower."""
    token: str
    """The key of a config with the token whose embeddings are replaced by features."""
    config: str
    """The key of a config with that of the tower."""
    forms: Mapping[str, type[TowerForm]]
    """By model type."""
    smaller: str
    """How attachments become smaller, for a plan."""
    families: Collection[str] | None = None
    """The model types whose rows may have them; None: all that have the method."""


TOWERS = {
    "image": TowerKind(
        tower="image",
        features="get_image_features",
        token="image_token_id",
        config="vision_config",
        forms=FORMS,
        smaller="images.max_pixels makes images smaller",
    ),
    "video": TowerKind(
        tower="image",
        features="get_video_features",
        token="video_token_id",
        config="vision_config",
        forms=VIDEO_FORMS,
        smaller="videos.max_pixels and videos.max_frames make videos smaller",
        families=VIDEO_FORMS,
    ),
}
"""By the kind of attachments (`launcher/sources/layouts.py`)."""


def tower_kind(config: Config, kind: str) -> TowerKind:
    """What transformers calls what a model with this config has for a kind of attachments."""
    about = TOWERS[kind]
    if kind == "video" and config.model_type in FRAMES_ARE_IMAGES:
        images = TOWERS["image"]
        return replace(about, features=images.features, token=images.token)
    return about


def is_of_tower(name: str, kinds: Collection[str]) -> bool:
    """Whether a module or parameter that text does not use is for one of these kinds of attachments,
    by its name."""
    return ("audio" if "audio" in name else "image") in {TOWERS[kind].tower for kind in kinds}


def form_of(config: Config, kind: str) -> TowerForm | None:
    """The form in which a model takes attachments of a kind; None: of this family it is not known."""
    form = TOWERS[kind].forms.get(config.model_type)
    return None if form is None else form.of(config)


def _bounds(lengths: npt.NDArray[Any]) -> dict[str, Any]:
    """The arguments of attention that keep parts of these lengths apart. Towers hand them to their
    blocks."""
    ends = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
    longest = int(lengths.max())
    return {
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


@dataclass(frozen=True)
class TowerOperations:
    """Floating-point operations of a tower's forward pass."""

    patch: float = 0.0
    """Of matrix products, for each patch."""
    token: float = 0.0
    """The same of the projector, for each token."""
    whole: float = 0.0
    """Of attention, for each squared number of patches of an image."""
    window: float = 0.0
    """The same for windows."""
    passes: int = 1
    """Forward passes that take as many operations as the forward and the backward pass: 3, or 1 of a
    frozen tower."""


@dataclass(frozen=True)
class TowerInputs:
    """How the attachments of a micro-batch become the arguments of a tower."""

    token: int
    """The token whose embeddings are replaced by features."""
    form: TowerForm
    operations: TowerOperations = TowerOperations()

    def make(
        self,
        arrays: Arrays,
        ids: torch.Tensor,
        pixel_table: npt.NDArray[np.float32] | None = None,
    ) -> dict[str, Any]:
        """`tower`, the arguments of `TowerForm.features`, and `positions`, those of the tokens in the
        flattened rows. ids: (rows, tokens), in which no other kind has these tokens. pixel_table: for pixels in uint8; it is
        among the arguments then, for `normalized`."""
        made = self.form.arguments(arrays)
        if pixel_table is not None:
            made["pixel_table"] = torch.from_numpy(pixel_table)
        positions = (ids.flatten() == self.token).nonzero()[:, 0]
        return {"tower": made, "positions": positions}

    def patches(self, tower: Mapping[str, Any]) -> int:
        """The patches of all images. tower: of `make`."""
        return self.form.patches(tower)

    def forward_operations(self, tower: Mapping[str, Any], tokens: int) -> tuple[float, float]:
        """Operations of matrix products, and of attention. tower: of `make`. tokens: of all
        images."""
        own, (images, windows) = self.operations, self.form.squares(tower)
        products = own.patch * self.form.patches(tower) + own.token * tokens
        return products, own.whole * images + own.window * windows


def normalized(tower: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `TowerForm.features`, of those of `TowerInputs.make`: pixels in uint8 are
    looked up in the table of their colour, which gives the values of the processor exactly."""
    made = dict(tower)
    if (table := made.pop("pixel_table", None)) is not None:
        pixels = made["pixel_values"]
        colours = pixels.view(len(pixels), 3, -1).int()
        places = colours + torch.arange(0, 3 * 256, 256, device=pixels.device).int()[:, None]
        looked_up = table.flatten().index_select(0, places.flatten())
        made["pixel_values"] = looked_up.view(pixels.shape)
    return made


def _squares(bounds: torch.Tensor) -> float:
    """The sum of the squared lengths between these bounds."""
    return float(bounds.diff().double().square().sum())
