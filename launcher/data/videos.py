"""Videos: the second kind of attachments. `data/video_processor.py` makes tokens and pixels of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from launcher.console import plural
from launcher.data.attachments import Source
from launcher.data.images import ImageSource, RowImages
from launcher.data.messages import Message
from launcher.data.modality import Arrays, Modality, Planned
from launcher.data.placing import source_of
from launcher.data.tokenizer_files import PROCESSOR_FILES, read_processor
from launcher.data.video_files import Clip, FrameList, Video
from launcher.data.video_processor import (
    Limits,
    VideoProcessor,
    load_video_processor,
    set_settings,
    settings_of,
)
from launcher.errors import RecipeError, RowError
from launcher.recipe import schema
from launcher.sources.hub import model_folder

if TYPE_CHECKING:
    from PIL.Image import Image

_NO_LIMITS = Limits()
_KEYS = {
    "fps": "videos.fps",
    "sample_fps": "videos.fps",
    "nframes": "videos.max_frames",
    "min_frames": "videos.max_frames",
    "max_frames": "videos.max_frames",
    "min_pixels": "videos.max_pixels",
    "max_pixels": "videos.max_pixels",
    "total_pixels": "videos.max_pixels",
    "resized_height": "videos.max_pixels",
    "resized_width": "videos.max_pixels",
    "video_start": "the whole video is shown: cut the file; videos.max_frames",
    "video_end": "the whole video is shown: cut the file; videos.max_frames",
}
_REFUSED = {key: f"{section} holds for all videos" for key, section in _KEYS.items()}
"""Keys of a part, as of Qwen's, that choose frames or sizes of its video."""
_LIST = b"frames:"
"""Stands before the paths of the pictures of a video, as JSON."""
_SHOWN_FRAMES, _SHOWN_HEIGHT = 6, 120
"""Frames of a strip, and its pixels."""


class _Frame(ImageSource):
    """A picture of a list of them."""

    kind = "video"  # its path is relative to videos.folder


@dataclass(frozen=True)
class VideoSource(Source):
    """The bytes of a video file, or the path of the file."""

    kind = "video"
    most_bytes = 2 << 30

    @property
    def _pictures(self) -> list[_Frame]:
        """The frames of a list of pictures; empty: it is a file."""
        if self.is_file or not self.data.startswith(_LIST):
            return []
        paths = json.loads(self.data.removeprefix(_LIST))
        return [_Frame(path.encode(), is_file=True) for path in paths]

    @property
    def name(self) -> str:
        """See `Source`."""
        if pictures := self._pictures:
            return f"{plural(len(pictures), 'frame')} from {pictures[0].name}"
        return super().name

    def read(self) -> bytes:
        """See `Source`. Of a list of pictures their files, each behind its size."""
        if not (pictures := self._pictures):
            return super().read()
        files = [picture.read() for picture in pictures]
        return b"".join(len(file).to_bytes(8, "little") + file for file in files)

    def decode(self, content: bytes) -> Video:
        """The video of what `read` has returned. Raises RowError if it cannot be read."""
        try:
            if not (pictures := self._pictures):
                return Video.of(content)
            frames = []
            for picture in pictures:
                end = 8 + int.from_bytes(content[:8], "little")
                frames.append(np.asarray(picture.decode(content[8:end])))
                content = content[end:]
            return FrameList.of_pictures(frames)
        except RowError as error:
            raise RowError(f"{self.name}: {error}") from None

    def describe(self, video: Video, clip: Clip, tokens: int) -> str:
        """A line about the opened video, which has so many tokens."""
        length = "" if video.seconds is None else f", {video.seconds:.1f} s"
        size = f"{clip.width} x {clip.height} pixels"
        return f"{self.name}, {size}, {video.total:,} frames{length}: {tokens:,} tokens"

    def shown(self, tokens: int, meta: Sequence[int]) -> tuple[str, Image]:
        video = self.decode(self.read())
        try:
            clip = video.clip(_evenly)
        except RowError as error:
            raise RowError(f"{self.name}: {error}") from None
        times, rows, columns = meta[:3]
        seen = f", {times} frames"
        if rows:  # without the text between frames
            tokens, seen = times * rows * columns, f", {times} x {rows} x {columns}"
        return f"video: {self.describe(video, clip, tokens)}{seen}", _strip(clip)


@dataclass(frozen=True)
class RowVideos(Modality):
    """Videos, as the rows of a run have them and a model takes them."""

    limits: Limits = _NO_LIMITS
    kind = "video"
    source = VideoSource
    refused_keys = _REFUSED
    beginnings = ("AAAA", "GkXfo", "UklGR", "R0lGOD", "AAABu", "RkxW")
    """MP4, WebM, AVI, GIF, MPEG and FLV."""
    example = "video.mp4"
    token_type = 2

    @classmethod
    def of(cls, section: schema.Videos | None, model: str) -> RowVideos:
        if section is None:
            return cls(model)
        limits = Limits(section.fps, section.max_frames, section.max_pixels)
        return cls(model, section.folder, limits=limits)

    @classmethod
    def of_export(cls, folder: Path, base: str | None) -> RowVideos:
        """The settings are beside an adapter, its processor beside the base model."""
        if base is None:
            return cls(str(folder))
        own = settings_of(read_processor(folder))
        before = settings_of(read_processor(Path(model_folder(base, key="command line"))))
        changed = {key: value for key, value in own.items() if value != before.get(key)}
        frames = changed.get("max_frames", changed.get("num_frames"))
        pixels = changed.get("size", {}).get("longest_edge")
        return cls(base, limits=Limits(changed.get("fps"), frames, pixels))

    def identity(self) -> list[object]:
        folder = model_folder(self.processor, key="model.path", weights=False)
        files = [Path(folder, name) for name in PROCESSOR_FILES]
        sums = [hashlib.sha256(f.read_bytes()).hexdigest() for f in files if f.is_file()]
        limits = self.limits
        return ["videos", sums, limits.fps, limits.max_frames, limits.max_pixels, self.folder]

    @property
    def loaded(self) -> VideoProcessor:
        """The processor of this process. Raises RecipeError if there is none."""
        return load_video_processor(self.processor, self.limits)

    def limit_files(self, files: dict[str, dict[str, Any]]) -> None:
        """Also a rate that the recipe does not give, and the processor lacks."""
        folder = Path(model_folder(self.processor, key="model.path", weights=False))
        if changes := self.loaded.frames.changes(settings_of(read_processor(folder))):
            set_settings(files, changes)

    def file_of(self, value: Any) -> bytes | None:
        """Of a list of the paths of pictures these paths."""
        if not isinstance(value, list | tuple) or not value:
            return None
        pictures = [source_of(each, RowImages(self.processor, self.folder)) for each in value]
        if not all(picture.is_file for picture in pictures):
            raise RowError("a video that is a list of pictures must name their files")
        return _LIST + json.dumps([picture.data.decode() for picture in pictures]).encode()

    def message_part(self, path: str) -> tuple[Message, str]:
        source: Any = source_of(path, self)
        content = source.read()
        video = source.decode(content)
        processed = self.loaded.process(video)
        tokens = self.loaded.count_tokens(processed.text)
        line = source.describe(video, video.clip(lambda total, fps: [0]), tokens)
        return {"type": "video", "bytes": content}, line

    def example_arrays(self) -> Arrays:
        return self.loaded.example(6, 480, 640)

    def largest(self, tokens: int) -> tuple[int, tuple[int, ...], Arrays] | None:
        assert self.tower is not None
        return self.tower.form.largest(tokens, self.limits.max_pixels)

    def planned(self, model: str) -> PlannedVideos:
        assert self.tower is not None
        if self.limits.max_pixels is not None and not self.tower.form.limited:
            what = f"the processor of {model} has no limit of pixels of a video; set it to null"
            raise RecipeError(f"videos.max_pixels: {what}")
        return PlannedVideos(**vars(self))


@dataclass(frozen=True)
class PlannedVideos(Planned, RowVideos):
    """Videos of which only sizes are known."""


def _evenly(total: int, fps: float | None) -> list[int]:
    count = min(total, _SHOWN_FRAMES)
    return [round(index * (total - 1) / max(1, count - 1)) for index in range(count)]


def _strip(clip: Clip) -> Image:
    """The frames of a clip beside each other."""
    from PIL import Image

    gap, height = 2, min(_SHOWN_HEIGHT, clip.height)
    width = max(1, round(clip.width * height / clip.height))
    strip = Image.new("RGB", (len(clip.frames) * (width + gap) - gap, height), (255, 255, 255))
    for place, frame in enumerate(clip.frames):
        strip.paste(Image.fromarray(frame).resize((width, height)), (place * (width + gap), 0))
    return strip
