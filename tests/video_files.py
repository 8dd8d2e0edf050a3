"""Small videos for tests, and the frames that are in them."""

from fractions import Fraction

import av
import numpy as np


def moving_frames(count, *, size=(48, 36), seed=0):
    """Frames (count, height, width, 3) of a bright square that crosses a background of noise in
    coarse blocks."""
    width, height = size
    random = np.random.default_rng(seed)
    blocks = random.integers(30, 200, (-(-height // 6), -(-width // 6), 3), dtype=np.uint8)
    ground = np.repeat(np.repeat(blocks, 6, axis=0), 6, axis=1)[:height, :width]
    frames = np.repeat(ground[None], count, axis=0)
    side = max(2, height // 4)
    for number, frame in enumerate(frames):
        left = round(number * (width - side) / max(1, count - 1))
        frame[height // 3 : height // 3 + side, left : left + side] = (250, 20 * number % 256, 40)
    return frames


def write_video(path, frames, *, fps=8, codec="libx264rgb", options=None):
    """Writes frames (count, height, width, 3) without loss, unless another codec is given."""
    pixels = "rgb24" if codec == "libx264rgb" else "yuv420p"
    given = options or ({"crf": "0"} if codec == "libx264rgb" else {})
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=Fraction(fps), options=given)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = pixels
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def make_video(path, count=12, *, size=(48, 36), fps=8, seed=0):
    """Writes a video of `moving_frames`."""
    return write_video(path, moving_frames(count, size=size, seed=seed), fps=fps)
