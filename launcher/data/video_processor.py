"""Processors of videos: from a video to its tokens and pixels.

transformers' processors of videos need torchvision, of which they use what torch has, too. Here
frames are chosen, scaled and divided into patches with torch alone, to the same values bit for bit
(`tests/unit/data/test_videos.py`). The text with the tokens of a video is that of transformers'
processor.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.data.image_processor import AttachmentProcessor, Processed, load_with_config
from launcher.data.modality import Arrays
from launcher.data.tokenizer_files import (
    IMAGE_FILE,
    PROCESSOR_FILE,
    VIDEO_FILE,
    read_processor,
)
from launcher.data.tokenizer_json import Json
from launcher.data.video_files import Clip, Video
from launcher.errors import RecipeError, RowError, first_line
from launcher.libraries.families import FRAMES_ARE_IMAGES, VIDEO_PROCESSORS
from launcher.sources.hub import model_folder

_CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073]}
_CLIP |= {"image_std": [0.26862954, 0.26130258, 0.27577711]}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_LANCZOS = "lanczos" if torch.__version__ >= "2.12" else "bicubic"
"""Without it transformers takes the other one, too."""
_MODES = {0: "nearest-exact", 1: _LANCZOS, 2: "bilinear", 3: "bicubic"}
"""Of torch's `interpolate`, by the numbers of Pillow's filters that processors name."""
_FPS = 2.0
"""Where a processor takes all frames (Qwen2-VL): the rate of Qwen's own code."""
_SAMPLING = {"fps": "fps", "num_frames": "max_frames", "size": "video_size"}
"""Settings that stand in a section of their own in files of SmolVLM2, and their names there."""


@dataclass(frozen=True)
class Limits:
    """The keys of section `videos` that a processor reads."""

    fps: float | None = None
    max_frames: int | None = None
    max_pixels: int | None = None


class Frames(ABC):
    """How the video processor of a family chooses frames, and what it makes of them."""

    defaults: ClassVar[Json] = {}
    """Settings that a file need not have: those of the class of transformers."""
    limits_pixels: ClassVar[bool] = False
    """Whether it has a limit of pixels (videos.max_pixels)."""
    pixels: ClassVar[str] = "pixel_values_videos"
    """The argument of the model with the values of pixels."""

    def __init__(self, settings: Mapping[str, Any], limits: Limits) -> None:
        """settings: of the processor's file. Raises RecipeError for limits that it does not have."""
        common: Json = {"do_resize": True, "do_rescale": True, "do_normalize": True, "resample": 3}
        common |= {"rescale_factor": 1 / 255, "fps": None, "num_frames": None}
        common |= {"do_sample_frames": True}
        given = {key: value for key, value in settings.items() if value is not None}
        self.settings: Json = common | self.defaults | given
        if limits.max_pixels is not None:
            self._limit_pixels(limits.max_pixels)
        if limits.fps is not None:
            self.settings |= {"fps": limits.fps, "num_frames": None}
        if limits.max_frames is not None:
            self._limit_frames(limits.max_frames)

    def _limit_pixels(self, most: int) -> None:
        size = self.settings["size"] if self.limits_pixels else {}
        if "longest_edge" not in size:
            what = "the processor of this model has no limit of pixels of a video; set it to null"
            raise RecipeError(f"videos.max_pixels: {what}")
        if most < size["shortest_edge"]:
            least = size["shortest_edge"]
            what = f"must be at least {least:,} for this model; got {most:,}"
            raise RecipeError(f"videos.max_pixels: {what}")
        self.settings["size"] = size | {"longest_edge": min(most, size["longest_edge"])}

    def _limit_frames(self, most: int) -> None:
        for key in ("num_frames", "max_frames"):
            if self.settings.get(key) is not None:
                most = min(most, self.settings[key])
        self.settings["max_frames"] = most
        if self.settings["num_frames"] is not None:
            self.settings["num_frames"] = most

    def choose(self, total: int, fps: float | None) -> Sequence[int]:
        """See `video_files.Choose`. As transformers' `default_sample_indices_fn`, which refuses videos
        with too few frames; here all of them are taken."""
        count, rate = self.settings["num_frames"], self.settings["fps"]
        if count is None:
            count = max(1, int(total / (fps or 24) * rate))
        count = min(count, total, self.settings.get("max_frames") or total)
        return [index * total // count for index in range(count)]

    @abstractmethod
    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """The height and width to which so many frames of a size are scaled. Raises ValueError."""

    @abstractmethod
    def arrays(self, pixels: torch.Tensor) -> Arrays:
        """The arguments of the model, of scaled frames (frames, 3, height, width)."""

    def scaled(self, clip: Clip) -> torch.Tensor:
        """The frames of a clip, (frames, 3, height, width), uint8. Raises ValueError."""
        frames = torch.from_numpy(clip.frames).permute(0, 3, 1, 2).contiguous()
        if not self.settings["do_resize"]:
            return frames
        return self._scaled_to(frames, self.size(len(frames), clip.height, clip.width))

    def _scaled_to(self, frames: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
        if size == tuple(frames.shape[-2:]):
            return frames
        mode = _MODES[self.settings["resample"]]
        smooth: Json = (
            {} if mode == "nearest-exact" else {"antialias": True, "align_corners": False}
        )
        return nn.functional.interpolate(frames, size=size, mode=mode, **smooth)

    @functools.cached_property
    def pixel_table(self) -> npt.NDArray[np.float32]:
        """(3, 256): the value that a model takes of each value of a colour."""
        own, table = self.settings, torch.arange(256, dtype=torch.float32).expand(3, 256).clone()
        scale = own["rescale_factor"] if own["do_rescale"] else 1.0
        if own["do_normalize"]:
            # In this order, because it rounds like transformers
            mean, std = (
                torch.tensor(own[f"image_{name}"]) * (1 / scale) for name in ("mean", "std")
            )
            table = table.sub_(mean[:, None]).div_(std[:, None])
        else:
            table = table * scale
        return table.numpy()

    def normalized(self, pixels: torch.Tensor) -> torch.Tensor:
        """Scaled frames in uint8 as the values that a model takes."""
        table = torch.from_numpy(self.pixel_table)
        colours = [table[colour][pixels[:, colour].int()] for colour in range(3)]
        return torch.stack(colours, dim=1)

    def changes(self, own: Json) -> Json:
        """The settings that differ from those of the processor's file, such that transformers takes
        the same frames."""
        before = type(self)(own, Limits()).settings
        keys = ("fps", "num_frames", "min_frames", "max_frames", "size")
        made = {key: self.settings.get(key) for key in keys}
        made = {key: value for key, value in made.items() if value != before.get(key)}
        if not self.settings["do_sample_frames"]:  # transformers would take all frames
            made |= {key: self.settings[key] for key in ("fps", "num_frames")}
        if "size" in made:
            made |= dict.fromkeys({"min_pixels", "max_pixels"} & own.keys())
        if {"fps", "num_frames"} & made.keys():
            made["do_sample_frames"] = True
        return made


class _Qwen(Frames):
    """Patches of pairs of frames, as `Qwen2VLVideoProcessor.patchify`."""

    limits_pixels = True

    def _limit_frames(self, most: int) -> None:
        own, pair = self.settings, self.settings["temporal_patch_size"]
        if most < pair:
            what = f"must be at least {pair} for this model; got {most}"
            raise RecipeError(f"videos.max_frames: {what}")
        super()._limit_frames(most)
        own["min_frames"] = min(own["min_frames"], own["max_frames"])

    def check_total(self, total: int) -> None:
        """Raises RowError for a video of fewer frames than those of a patch."""
        if total < (pair := self.settings["temporal_patch_size"]):
            raise RowError(f"has {total} frame; a video has at least {pair}")

    @property
    def factor(self) -> int:
        """Pixels of a token in each direction."""
        side: int = self.settings["patch_size"] * self.settings["merge_size"]
        return side

    def arrays(self, pixels: torch.Tensor) -> Arrays:
        own = self.settings
        patch, merge, pair = own["patch_size"], own["merge_size"], own["temporal_patch_size"]
        if missing := -len(pixels) % pair:
            pixels = torch.cat([pixels, pixels[-1:].expand(missing, -1, -1, -1)])
        times, rows, columns = (
            size // part
            for size, part in zip(pixels[:, 0].shape, (pair, patch, patch), strict=True)
        )
        parts = pixels.reshape(
            times, pair, 3, rows // merge, merge, patch, columns // merge, merge, patch
        )
        patches = parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(times * rows * columns, -1)
        grid = np.array([[times, rows, columns]])
        return {"pixel_values_videos": patches.numpy(), "video_grid_thw": grid}

    def second_per_grid(self, clip: Clip) -> float:
        """Seconds between the rows of tokens of a clip in time: those of a pair of frames."""
        rate = len(clip.indices) / clip.total * clip.fps if clip.fps else 24
        pair: int = self.settings["temporal_patch_size"]
        return pair / rate


class Qwen2Frames(_Qwen):
    """Qwen2-VL and Qwen2.5-VL: pixels of a frame are limited."""

    defaults: ClassVar[Json] = {
        **_CLIP,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_frames": 4,
        "max_frames": 768,
        "do_sample_frames": False,
        "max_video_tokens": 128_000,
    }

    def __init__(self, settings: Mapping[str, Any], limits: Limits) -> None:
        """See `Frames`."""
        size = dict(settings.get("size") or self.defaults["size"])
        for key, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
            if settings.get(key) is not None:
                size[edge] = settings[key]
        super().__init__({**settings, "size": size}, limits)
        if self.settings["fps"] is None and self.settings["num_frames"] is None:
            self.settings["fps"] = _FPS

    def choose(self, total: int, fps: float | None) -> Sequence[int]:
        own, pair = self.settings, self.settings["temporal_patch_size"]
        self.check_total(total)
        if own["num_frames"] is not None:
            count = round(min(own["num_frames"], total) / pair) * pair
        else:
            most = min(own["max_frames"], total) // pair * pair
            count = min(max(total / (fps or 24) * own["fps"], own["min_frames"]), most, total)
            count = math.floor(count / pair) * pair
        indices: list[int] = torch.arange(0, total, total / count).int().tolist()
        return indices

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        own, factor = self.settings, self.factor
        least, most = own["size"]["shortest_edge"], own["size"]["longest_edge"]
        if own.get("cap_pixels_per_frame"):
            whole = int(own["max_video_tokens"] * factor * factor * 0.9)
            share = whole * own["temporal_patch_size"] // frames
            most = max(min(most, share), int(least * 1.05))
        return _within(height, width, factor, least, most)


class Qwen3Frames(_Qwen):
    """Qwen3-VL and Qwen3.5: pixels of all frames together are limited."""

    defaults: ClassVar[Json] = {
        **_HALF,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_frames": 4,
        "max_frames": 768,
        "fps": 2,
        "max_video_tokens": 768,
    }

    def choose(self, total: int, fps: float | None) -> Sequence[int]:
        own = self.settings
        self.check_total(total)
        count = own["num_frames"]
        if count is None:
            count = int(total / (fps or 24) * own["fps"])
            count = max(count, own["min_frames"])
        count = min(count, own["max_frames"], total)
        indices: list[int] = np.linspace(0, total - 1, count).round().astype(int).tolist()
        return indices

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        own, factor, pair = self.settings, self.factor, self.settings["temporal_patch_size"]
        least, most = own["size"]["shortest_edge"], own["size"]["longest_edge"]
        if own.get("cap_pixels_per_frame"):
            share = max(
                min(own["max_video_tokens"] * factor * factor, most // frames), int(least * 1.05)
            )
            most = share * frames
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return _within(
            height, width, factor, least, most, frames=frames, counted=round(frames / pair) * pair
        )


def _within(
    height: int,
    width: int,
    factor: int,
    least: int,
    most: int,
    *,
    frames: int = 1,
    counted: int = 1,
) -> tuple[int, int]:
    """The multiples of `factor` near a size with at least and at most so many pixels, and about its
    shape. frames: whose pixels are counted together. counted: their number after rounding. The
    formula of Qwen's `smart_resize`. Raises ValueError for a shape that is too long."""
    if max(height, width) > 200 * min(height, width):
        raise ValueError("one side is more than 200 times as long as the other")
    rows, columns = round(height / factor), round(width / factor)
    pixels = counted * rows * columns * factor**2
    if pixels > most:
        ratio = math.sqrt(frames * height * width / most)
        rows = max(1, math.floor(height / ratio / factor))
        columns = max(1, math.floor(width / ratio / factor))
    elif pixels < least:
        ratio = math.sqrt(least / (frames * height * width))
        rows = math.ceil(height * ratio / factor)
        columns = math.ceil(width * ratio / factor)
    return rows * factor, columns * factor


class Gemma4Frames(Frames):
    """Gemma 4: frames keep their shape, and their patches are padded to one number. A video has a
    number of frames, whatever its length."""

    defaults: ClassVar[Json] = {
        "image_mean": [0.0] * 3,
        "image_std": [1.0] * 3,
        "num_frames": 32,
        "patch_size": 16,
        "max_soft_tokens": 70,
        "pooling_kernel_size": 3,
    }

    def __init__(self, settings: Mapping[str, Any], limits: Limits) -> None:
        """See `Frames`."""
        if limits.fps is not None:
            what = "the processor of this model takes a number of frames of each video; "
            raise RecipeError(f"videos.fps: {what}set it to null, and videos.max_frames")
        super().__init__(settings, limits)

    @property
    def _most(self) -> int:
        """Patches of a frame, with padding."""
        own = self.settings
        patches: int = own["max_soft_tokens"] * own["pooling_kernel_size"] ** 2
        return patches

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        own = self.settings
        side = own["pooling_kernel_size"] * own["patch_size"]
        factor = math.sqrt(self._most * own["patch_size"] ** 2 / (height * width))
        rows, columns = (int(factor * pixels // side) for pixels in (height, width))
        if not rows and not columns:
            raise ValueError("it is too small for a token")
        longest = own["max_soft_tokens"]
        if not rows:
            rows, columns = 1, min(width // height, longest)
        elif not columns:
            rows, columns = min(height // width, longest), 1
        return rows * side, columns * side

    def arrays(self, pixels: torch.Tensor) -> Arrays:
        patch, pool = self.settings["patch_size"], self.settings["pooling_kernel_size"]
        frames, _, height, width = pixels.shape
        rows, columns = height // patch, width // patch
        parts = pixels.reshape(frames, 3, rows, patch, columns, patch)
        patches = parts.permute(0, 2, 4, 3, 5, 1).reshape(frames, rows * columns, -1).numpy()
        places = np.indices((rows, columns)).reshape(2, -1)[::-1].T  # column, row
        padded = np.zeros((frames, self._most, patches.shape[2]), dtype=patches.dtype)
        positions = np.full((frames, self._most, 2), -1)
        padded[:, : rows * columns], positions[:, : rows * columns] = patches, places
        return {
            "pixel_values_videos": padded,
            "video_position_ids": positions,
            "num_frames_per_video": np.array([frames]),
            "num_soft_tokens_per_video": np.array([rows * columns // pool**2]),
        }


class OneSizeFrames(Frames):
    """LLaVA-OneVision: all frames are scaled to one size."""

    frames: ClassVar[int] = 32
    """Where a processor takes all frames: those of its authors' examples."""
    defaults: ClassVar[Json] = {
        **_CLIP,
        "size": {"height": 384, "width": 384},
        "do_sample_frames": False,
    }

    def __init__(self, settings: Mapping[str, Any], limits: Limits) -> None:
        """See `Frames`."""
        rate = (
            {} if settings.get("fps") or settings.get("num_frames") else {"num_frames": self.frames}
        )
        super().__init__({**settings, **rate}, limits)

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        size = self.settings["size"]
        return size["height"], size["width"]

    def arrays(self, pixels: torch.Tensor) -> Arrays:
        """In bytes, frames without a dimension for videos, which may have different numbers of them
        (`PooledFrames`)."""
        if pixels.dtype == torch.uint8:
            return {
                "pixel_values_videos": pixels.numpy(),
                "num_frames": np.array([len(pixels)]),
            }
        return {"pixel_values_videos": pixels[None].numpy()}


class InternVLFrames(OneSizeFrames):
    """InternVL: each frame is an image, and the frames are from the middles of parts of the video."""

    frames = 8
    defaults: ClassVar[Json] = {**OneSizeFrames.defaults, "initial_shift": True}
    pixels = "pixel_values"

    def choose(self, total: int, fps: float | None) -> Sequence[int]:
        every = total / len(super().choose(total, fps))
        shift = self.settings["initial_shift"]
        first = every / 2 if shift is True else float(shift)
        indices: list[int] = torch.arange(first, total, every).int().tolist()
        return indices

    def arrays(self, pixels: torch.Tensor) -> Arrays:
        return {"pixel_values": pixels.numpy()}


class SmolVLMFrames(Frames):
    """SmolVLM2: each frame is an image, and is scaled twice."""

    defaults: ClassVar[Json] = {
        **_HALF,
        "resample": 1,
        "size": {"longest_edge": 4 * 364},
        "max_image_size": {"longest_edge": 364},
        "do_sample_frames": False,
    }
    pixels = "pixel_values"

    def __init__(self, settings: Mapping[str, Any], limits: Limits) -> None:
        """See `Frames`. Files without a rate and a number of frames get those of SmolVLM2's files. Both
        limit the frames, so `videos.fps` leaves the number as it is."""
        given = {key: value for key, value in settings.items() if value is not None}
        own = {"fps": 1, "num_frames": 64} | given
        super().__init__(own, limits)
        most = own["num_frames"]
        if limits.max_frames is not None:
            most = min(most, limits.max_frames)
        self.settings["num_frames"] = most

    def choose(self, total: int, fps: float | None) -> Sequence[int]:
        """Long videos without their first and last second."""
        rate, most = fps or 24, self.settings["num_frames"]
        seconds = total / rate
        count = max(1, min(round(self.settings["fps"] * seconds), most))
        first, last = 0, total - 1
        if seconds - 2 > most * self.settings["fps"] and int(rate) < int(total - rate):
            first, last = int(rate), min(int(total - rate), last)
        indices: list[int] = np.unique(np.linspace(first, last, count, dtype=int)).tolist()
        return indices

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        side = self.settings["max_image_size"]["longest_edge"]
        return side, side

    def scaled(self, clip: Clip) -> torch.Tensor:
        """See `Frames`. Frame by frame: the first size may be much larger than the second."""
        frames = torch.from_numpy(clip.frames).permute(0, 3, 1, 2)
        if not self.settings["do_resize"]:
            return frames.contiguous()
        first = self._first_size(clip.height, clip.width)
        second = self.size(1, clip.height, clip.width)
        return torch.cat(
            [
                self._scaled_to(self._scaled_to(frame[None].contiguous(), first), second)
                for frame in frames
            ]
        )

    def _first_size(self, height: int, width: int) -> tuple[int, int]:
        size = self.settings["size"]
        if "longest_edge" not in size:
            return size["height"], size["width"]
        side = min(4096, size["longest_edge"])
        # The shorter side is even
        if width >= height:
            shorter = int(side / (width / height))
            return max(1, shorter + shorter % 2), side
        shorter = int(side * (width / height))
        return side, max(1, shorter + shorter % 2)

    def arrays(self, pixels: torch.Tensor) -> Arrays:
        made = {"pixel_values": pixels.numpy()}
        if pixels.dtype != torch.uint8:  # as the processor's images
            made["pixel_attention_mask"] = np.ones_like(made["pixel_values"][:, 0], dtype=np.int64)
        return made


PROCESSORS: dict[str, type[Frames]] = {
    "Gemma4VideoProcessor": Gemma4Frames,
    "InternVLVideoProcessor": InternVLFrames,
    "LlavaOnevisionVideoProcessor": OneSizeFrames,
    "Qwen2VLVideoProcessor": Qwen2Frames,
    "Qwen3VLVideoProcessor": Qwen3Frames,
    "SmolVLMVideoProcessor": SmolVLMFrames,
}
"""By the class of transformers."""
_SECTION = "video_processor"
"""Of PROCESSOR_FILE."""


def settings_of(files: Mapping[str, Json]) -> Json:
    """The settings of a video processor in the processor's files, by their names; empty: they have
    none. transformers looks for them in this order."""
    found = files.get(PROCESSOR_FILE, {}).get(_SECTION)
    if not isinstance(found, dict):
        found = files.get(VIDEO_FILE) or files.get(IMAGE_FILE) or {}
    sampling = found.get("video_sampling")
    if not isinstance(sampling, dict):
        return found
    own = {key: sampling.get(name) for key, name in _SAMPLING.items()}
    size = found.get("size") or own["size"]  # in this order, as in transformers
    return found | own | {"size": size}


def set_settings(files: dict[str, Json], changes: Json) -> None:
    """Changes the settings of a video processor in the processor's files. Those that it shares with
    images get a file of their own."""
    own = files.get(PROCESSOR_FILE, {}).get(_SECTION)
    if not isinstance(own, dict):
        own = files.setdefault(VIDEO_FILE, dict(files.get(IMAGE_FILE, {})))
    own |= changes
    if isinstance(sampling := own.get("video_sampling"), dict):
        read = {name: changes[key] for key, name in _SAMPLING.items() if key in changes}
        own["video_sampling"] = sampling | read


def _class_of(settings: Json, model_type: str) -> str:
    """The class of the video processor, as transformers finds it."""
    named = settings.get("video_processor_type")
    if isinstance(named, str):
        return named
    image = str(settings.get("image_processor_type")).replace("ImageProcessor", "VideoProcessor")
    return image if image in PROCESSORS else VIDEO_PROCESSORS[model_type]


@functools.lru_cache(maxsize=2)
def load_video_processor(name: str, limits: Limits) -> VideoProcessor:
    """The processor of videos of a model. name, limits: see `RowVideos`. Raises RecipeError if there
    is none, or if it cannot be used."""
    return VideoProcessor(name, limits)


class VideoProcessor(AttachmentProcessor):
    """A processor of transformers, for one video at a time."""

    kind = "video"

    def __init__(self, name: str, limits: Limits) -> None:
        """Raises RecipeError."""
        from transformers.processing_utils import ProcessorMixin

        processor, config = load_with_config(name, "videos")
        super().__init__(processor)
        kind = type(processor).__name__
        placeholder = getattr(processor, "video_token", None)
        own = type(processor).replace_video_token is not ProcessorMixin.replace_video_token
        if config.model_type not in VIDEO_PROCESSORS or not isinstance(placeholder, str) or not own:
            what = (
                f"rows with videos are not supported for models of type {config.model_type}, but "
            )
            raise RecipeError(f"videos: {name}: {what}for {', '.join(VIDEO_PROCESSORS)}")
        settings = settings_of(
            read_processor(Path(model_folder(name, key="model.path", weights=False)))
        )
        wanted = _class_of(settings, config.model_type)
        if wanted not in PROCESSORS:
            raise RecipeError(f"videos: {name}: its video processor {wanted} is not supported")
        self.frames = PROCESSORS[wanted](settings, limits)
        processor.video_processor = SimpleNamespace(**self.frames.settings)
        self.placeholder = placeholder
        self.token_ids = [self._tokenizer.convert_tokens_to_ids(placeholder)]
        if config.model_type in FRAMES_ARE_IMAGES:
            self.token_ids = self._image_token_ids(config)
        self._timed = kind == "Qwen2_5_VLProcessor"
        """Whether positions follow seconds."""

    def process(self, decoded: Video, *, in_bytes: bool = False) -> Processed:
        return self._processed(decoded.clip(self.frames.choose), in_bytes=in_bytes)

    def _processed(self, clip: Clip, *, in_bytes: bool) -> Processed:
        from transformers.video_utils import VideoMetadata

        try:
            pixels = self.frames.scaled(clip)
        except ValueError as error:
            what = f"frames of {clip.width} x {clip.height} pixels are refused"
            raise RowError(f"{what}: {first_line(error)}") from None
        arrays = self.frames.arrays(pixels if in_bytes else self.frames.normalized(pixels))
        metadata = VideoMetadata(
            total_num_frames=clip.total,
            fps=clip.fps,
            width=clip.width,
            height=clip.height,
            duration=clip.total / clip.fps if clip.fps else None,
            video_backend="pyav",
            frames_indices=list(clip.indices),
        )
        about = {**arrays, "video_metadata": [metadata]}
        if (frames := arrays[self.frames.pixels]).ndim == 4:
            about[self.frames.pixels] = about["pixel_values_videos"] = frames[None]
        text = self._processor.replace_video_token(about, 0)
        arrays.pop("num_soft_tokens_per_video", None)
        seconds = np.float32(0)
        if self._timed:
            assert isinstance(self.frames, Qwen2Frames)
            seconds = np.float32(self.frames.second_per_grid(clip))
            arrays["second_per_grid_ts"] = np.array([seconds])
        meta: tuple[int, ...] = (len(clip.indices), 0, 0, 0)
        if (grid := arrays.get("video_grid_thw")) is not None:
            times, rows, columns = grid[0].tolist()
            merge = self.frames.settings["merge_size"]
            meta = times, rows // merge, columns // merge, int(seconds.view(np.int32))
        return Processed(text, arrays, meta)

    @property
    def pixel_table(self) -> npt.NDArray[np.float32]:
        return self.frames.pixel_table

    def join(self, attachments: list[Arrays]) -> Arrays:
        """The arrays of several videos. Raises RowError if the model takes only videos with one number
        of frames together."""
        shapes = {one[self.frames.pixels].shape[1:] for one in attachments}
        if len(shapes) > 1:
            what = "transformers takes videos of one number of frames together for this model"
            raise RowError(f"{what}; show one video, or set videos.max_frames")
        return super().join(attachments)

    def example(self, frames: int, height: int, width: int, *, in_bytes: bool = False) -> Arrays:
        """The arrays of a video of so many gray frames, two in a second."""
        shades = np.linspace(96, 160, frames * height * width * 3).astype(np.uint8)
        made = shades.reshape(frames, height, width, 3)
        clip = Clip(made, tuple(range(frames)), frames, 2.0)
        return self._processed(clip, in_bytes=in_bytes).arrays

    @functools.cached_property
    def blank(self) -> Arrays:
        """The arrays of a small gray video."""
        return self.example(2, 32, 32)

    @functools.cached_property
    def blank_in_bytes(self) -> Arrays:
        """The same with pixels that are not normalized."""
        return self.example(2, 32, 32, in_bytes=True)
