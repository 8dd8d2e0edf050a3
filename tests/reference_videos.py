"""transformers' own processors of videos, also where torchvision is not installed.

They use three functions of torchvision, which are calls of torch. Where torchvision is missing, or
its library does not belong to the installed torch, these functions stand in for it.
"""

import contextlib
import importlib
import itertools
import sys
import types
from enum import Enum
from unittest import mock

import torch
import transformers
from PIL import Image
from transformers import image_processing_backends, video_processing_utils

from launcher.data.tokenizer_files import read_processor
from launcher.data.video_files import Video
from launcher.data.video_processor import settings_of
from tests.image_models import reference_processor


class InterpolationMode(Enum):
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    LANCZOS = "lanczos"


def resize(image, size, interpolation=InterpolationMode.BILINEAR, antialias=True):
    """torchvision.transforms.v2.functional.resize_image, of uint8 on a CPU."""
    assert image.dtype == torch.uint8
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    flat = image.reshape(-1, *image.shape[-3:])
    mode = {2: "bilinear", 3: "bicubic"}.get(interpolation) or interpolation.value
    made = torch.nn.functional.interpolate(
        flat, size=list(size), mode=mode, align_corners=False, antialias=antialias
    )
    return made.reshape(*image.shape[:-2], *size)


def normalize(image, mean, std, inplace=False):
    """torchvision.transforms.v2.functional.normalize_image."""
    mean, std = (torch.as_tensor(each, dtype=image.dtype).view(-1, 1, 1) for each in (mean, std))
    return (image.sub_(mean) if inplace else image.sub(mean)).div_(std)


def _stand_in() -> dict[str, types.ModuleType]:
    """The modules by their names, the one with the functions first."""
    names = ["torchvision.transforms.v2.functional", "torchvision.transforms.v2"]
    names += ["torchvision.transforms", "torchvision"]
    modules = {name: types.ModuleType(name) for name in names}
    functions = {"resize": resize, "normalize": normalize, "InterpolationMode": InterpolationMode}
    vars(modules[names[0]]).update(functions, grayscale_to_rgb=lambda image: image)
    for inner, outer in itertools.pairwise(names):
        setattr(modules[outer], inner.rpartition(".")[2], modules[inner])
    return modules


@contextlib.contextmanager
def _torchvision():
    """Modules that are imported within find torchvision's functions."""
    if transformers.utils.is_torchvision_available():
        yield
        return
    modules = _stand_in()
    for module in (image_processing_backends, video_processing_utils):
        module.tvF = next(iter(modules.values()))
    # torchvision has it since 0.27, which belongs to torch 2.12
    image_processing_backends.is_torchvision_greater_or_equal = lambda version: (
        torch.__version__ >= "2.12"
    )
    image_processing_backends.pil_torch_interpolation_mapping = {
        Image.Resampling.BICUBIC: InterpolationMode.BICUBIC,
        Image.Resampling.BILINEAR: InterpolationMode.BILINEAR,
        Image.Resampling.LANCZOS: InterpolationMode.LANCZOS,
    }
    with contextlib.ExitStack() as patches:
        for name in ("is_torchvision_available", "is_torchvision_v2_available"):
            patches.enter_context(mock.patch.object(transformers.utils, name, return_value=True))
        patches.enter_context(mock.patch.dict(sys.modules, modules))
        yield


_MODULES = {
    "Gemma4VideoProcessor": "gemma4",
    "InternVLVideoProcessor": "internvl",
    "LlavaOnevisionVideoProcessor": "llava_onevision",
    "Qwen2VLVideoProcessor": "qwen2_vl",
    "Qwen3VLVideoProcessor": "qwen3_vl",
    "SmolVLMVideoProcessor": "smolvlm",
}


def video_processor(name, **settings):
    """A video processor of transformers. name: of its class."""
    with _torchvision():
        kind = _MODULES[name]
        module = importlib.import_module(f"transformers.models.{kind}.video_processing_{kind}")
        return getattr(module, name)(**settings)


def with_videos(folder, name, **settings):
    """`reference_processor`, with this video processor."""
    made = reference_processor(folder)
    made.video_processor = video_processor(name, **settings)
    return made


def whole(path):
    """All frames of a file, and what transformers calls its metadata."""
    video = Video.of(path.read_bytes())
    clip = video.clip(lambda total, fps: range(total))
    about = {"total_num_frames": video.total, "fps": video.fps, "duration": video.seconds}
    about |= {"width": clip.width, "height": clip.height, "video_backend": "pyav"}
    return clip.frames, about


def reference_of(folder):
    """transformers' processor of a model in this folder, as its files say. Where it takes all frames,
    it takes two in a second, as Qwen's own code does."""
    content = settings_of(read_processor(folder))
    name = content.get("video_processor_type", "Qwen2VLVideoProcessor")
    settings = {
        key: value for key, value in content.items() if not key.endswith(("_type", "_class"))
    }
    if name == "Qwen2VLVideoProcessor":
        settings.setdefault("fps", 2)
    return with_videos(folder, name, **settings)


def inputs_of(processor, *, images, **options):
    """What a processor makes of a row whose images stand before its videos. That of SmolVLM forgets the
    pixels of images if there are videos."""
    made = processor(images=images or None, return_tensors="pt", **options)
    if "videos" in options and isinstance(processor, transformers.SmolVLMProcessor):
        for name in ("pixel_values", "pixel_attention_mask"):
            made[name] = made[name].flatten(0, 1)[None]
        alone = processor.image_processor([images], return_tensors="pt") if images else {}
        for name in alone.keys() & made.keys():
            made[name] = torch.cat([alone[name], made[name]], dim=1)
    return made
