"""Files of videos, read with PyAV: what a file says of its frames, and some of these frames."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from launcher.errors import RowError, first_line
from launcher.libraries.extras import missing_extra

MOST_PIXELS = 100_000_000
"""Pixels of the largest frame that is decoded."""
MOST_BYTES = 4 << 30
"""Bytes of all decoded frames of a video, before they are scaled."""
LIST_RATE = 2.0
"""Frames in a second of a list of pictures, as in Qwen's own code."""
_LEAST_SHARE = 0.9
"""Share of its frames that a file must hold; with fewer it is damaged."""
_OPTIONS = {
    # FFmpeg also reads lists of other files, and addresses: a row must not name these
    "format_whitelist": "mov,matroska,webm,avi,flv,mpeg,mpegts,mpegvideo,asf,gif,ogg,h264,hevc",
    "protocol_whitelist": "none",
}
FORMATS = "MP4, MOV, MKV, WebM, AVI, FLV, MPEG, WMV, GIF, Ogg"
"""Formats that are read, for messages."""

Choose = Callable[[int, float | None], Sequence[int]]
"""Which frames are taken of so many with this rate (frames per second; None: it is not known), in
ascending order."""


@dataclass(frozen=True)
class Clip:
    """Frames that were taken of a video."""

    frames: npt.NDArray[np.uint8]
    """(frames, height, width, 3), upright, in RGB."""
    indices: tuple[int, ...]
    """Their places among all frames of the video."""
    total: int
    """All frames of the video."""
    fps: float | None
    """Frames per second of the video; None: it is not known."""

    @property
    def height(self) -> int:
        """Pixels."""
        return int(self.frames.shape[1])

    @property
    def width(self) -> int:
        """Pixels."""
        return int(self.frames.shape[2])


@dataclass(frozen=True)
class Video:
    """An opened video."""

    content: bytes
    """The file."""
    total: int
    """Its frames."""
    fps: float | None
    """Frames per second: the mean of the file."""

    @classmethod
    def of(cls, content: bytes) -> Video:
        """Raises RowError if the file is none of a video that can be read."""
        if not content:
            raise RowError("is empty")
        with _opened(content) as (container, stream):
            pixels = stream.codec_context.width * stream.codec_context.height
            if pixels > MOST_PIXELS:
                raise RowError(f"a frame has {pixels:,} pixels, more than {MOST_PIXELS:,}")
            rate, total = stream.average_rate or stream.guessed_rate, stream.frames
            if not total or "mp4" in container.format.name:
                # WebM counts no frames. MP4 counts those that are not shown, too: a part that was cut
                # out without encoding begins with them, because it needs a key frame
                hidden = [packet.is_discard for packet in container.demux(stream) if packet.size]
                total = (total or len(hidden)) - sum(hidden)
        if not total:
            raise RowError("the video has no frames")
        return cls(content, total, float(rate) if rate else None)

    @property
    def seconds(self) -> float | None:
        """Its length; None: it is not known."""
        return self.total / self.fps if self.fps else None

    def clip(self, choose: Choose) -> Clip:
        """Some of its frames. Raises RowError if they cannot be decoded, or are too many."""
        indices = [int(index) for index in choose(self.total, self.fps)]
        frames, seen = self._decoded(indices)
        if len(frames) < len(indices):
            # Files may count a few frames that are never shown
            if seen < _LEAST_SHARE * self.total:
                raise RowError(f"is damaged: {seen:,} of its {self.total:,} frames can be decoded")
            return replace(self, total=seen).clip(choose)
        return Clip(np.stack(frames), tuple(indices), self.total, self.fps)

    def _decoded(self, indices: list[int]) -> tuple[list[npt.NDArray[np.uint8]], int]:
        """The frames of these indices that the file has, and the number of frames that were read."""
        wanted, frames, seen = {*indices}, list[npt.NDArray[np.uint8]](), 0
        with _opened(self.content) as (container, stream):
            for frame in container.decode(stream):
                if seen in wanted:
                    if frame.width * frame.height * 3 * len(wanted) > MOST_BYTES:
                        size = f"{len(wanted):,} frames of {frame.width} x {frame.height} pixels"
                        what = (
                            f"{size} are more than {MOST_BYTES:,} bytes; scale the video down, or"
                        )
                        raise RowError(f"{what} set videos.fps or videos.max_frames")
                    frames.append(_upright(frame))
                seen += 1
                if len(frames) == len(wanted):
                    break
        if len({frame.shape for frame in frames}) > 1:
            raise RowError("its frames have several sizes")
        by_index = dict(zip(sorted(wanted), frames, strict=False))
        return [by_index[index] for index in indices if index in by_index], seen


def _upright(frame: Any) -> npt.NDArray[np.uint8]:
    """A frame (height, width, 3), turned as its file says."""
    made: npt.NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return np.ascontiguousarray(np.rot90(made, turns)) if turns else made


@dataclass(frozen=True)
class FrameList(Video):
    """A video whose frames are pictures."""

    frames: tuple[npt.NDArray[np.uint8], ...] = ()
    """(height, width, 3) each, of one size."""

    @classmethod
    def of_pictures(cls, frames: Sequence[npt.NDArray[np.uint8]]) -> FrameList:
        """Raises RowError if their sizes differ."""
        if len({frame.shape for frame in frames}) > 1:
            raise RowError("its frames have several sizes")
        return cls(b"", len(frames), LIST_RATE, tuple(frames))

    def clip(self, choose: Choose) -> Clip:
        indices = [int(index) for index in choose(self.total, self.fps)]
        frames = np.stack([self.frames[index] for index in indices])
        return Clip(frames, tuple(indices), self.total, self.fps)


@contextmanager
def _opened(content: bytes) -> Iterator[tuple[Any, Any]]:
    """The file, and its first stream of video. Raises RowError."""
    if (missing := missing_extra("av")) is not None:
        raise RowError(missing)
    import av

    try:
        with av.open(io.BytesIO(content), options=dict(_OPTIONS)) as container:
            if not container.streams.video:
                raise RowError("has no video")
            yield container, container.streams.video[0]
    except RowError:
        raise
    except Exception as error:  # decoders raise many classes on damaged files
        why = getattr(error, "strerror", None) or first_line(error)
        what = f"is not a video in one of the formats {FORMATS}, or a damaged one ({why})"
        raise RowError(what) from None
