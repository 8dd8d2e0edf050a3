"""Folders of small models of images and text, with the processors of their families."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from launcher.data.attachment_inputs import ModelAttachments
from launcher.data.images import RowImages
from launcher.data.tokenizer import hugging_face_byte_tokenizer

TEXT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
TEXT |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096}
TEXT |= {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256, "vocab_size": 320}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
VISION |= {"num_attention_heads": 2, "patch_size": 14}
QWEN_VISION = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
QWEN_VISION |= {"out_hidden_size": 32, "spatial_merge_size": 2, "temporal_patch_size": 2}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}
QWEN_TOKENS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
QWEN_IDS = {
    "vision_start_token_id": 260,
    "vision_end_token_id": 261,
    "image_token_id": 262,
    "video_token_id": 263,
}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_VIDEO = "<|vision_start|><|video_pad|><|vision_end|>"
GEMMA_TOKENS = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
GEMMA_TOKENS |= {"image_token": "<image_soft_token>"}
GEMMA4_TOKENS = GEMMA_TOKENS | {"audio_token": "<audio_soft_token>"}
GEMMA4_TOKENS |= {"boa_token": "<start_of_audio>", "eoa_token": "<end_of_audio>"}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2}
HYBRID |= {"linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
_TILES = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
_IDEFICS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>", *_TILES]
_IDEFICS += ["<video>"]
_IDEFICS_PROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 56},
    "do_image_splitting": True,
}


QWEN3_VIDEOS = {
    "video_processor_type": "Qwen3VLVideoProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 80 * 32 * 32},
}


def _qwen(kind, processor, *, text=None, vision=None, patch_size=16):
    text = TEXT | {"rope_parameters": MROPE} | (text or {})
    vision = QWEN_VISION | {"patch_size": patch_size} | (vision or {})
    return {
        "config": {"model_type": kind, "text_config": text, "vision_config": vision, **QWEN_IDS},
        "tokens": QWEN_TOKENS,
        "image": QWEN_IMAGE,
        "video": QWEN_VIDEO,
        "processor_class": processor,
        "processor": {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch_size,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 10 * 56 * 56},
        },
        # Qwen2-VL and Qwen2.5-VL have one file for images and videos
        "video_processor": None if patch_size == 14 else QWEN3_VIDEOS,
    }


def _idefics(kind, processor, image_processor, **videos):
    text = TEXT | {"model_type": "llama"}
    return {
        "config": {
            "model_type": kind,
            "text_config": text,
            "vision_config": VISION | {"image_size": 56},
            "image_token_id": 261,
            "scale_factor": 2,
            "pad_token_id": 256,
        },
        "tokens": _IDEFICS,
        "image": "<image>",
        "processor_class": processor,
        "processor": _IDEFICS_PROCESSOR | {"image_processor_type": image_processor},
        "processor_config": {"image_seq_len": 4},
        **videos,
    }


_SMOLVLM_VIDEOS = {
    "video_processor_type": "SmolVLMVideoProcessor",
    "size": {"longest_edge": 112},
    "max_image_size": {"longest_edge": 56},
    "video_sampling": {"fps": 2, "max_frames": 3, "video_size": {"longest_edge": 112}},
}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
_WINDOWS = {"window_size": 112, "fullatt_block_indexes": [1], "tokens_per_second": 2}
FAMILIES = {
    "qwen2_vl": _qwen(
        "qwen2_vl",
        "Qwen2VLProcessor",
        text={"head_dim": None},
        vision={"embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        patch_size=14,
    ),
    "qwen2_5_vl": _qwen(
        "qwen2_5_vl", "Qwen2_5_VLProcessor", text={"head_dim": None}, vision=_WINDOWS, patch_size=14
    ),
    # Two stages: the first one has the blocks behind which features of images are added
    "qwen3_vl": _qwen(
        "qwen3_vl", "Qwen3VLProcessor", text={"num_hidden_layers": 3}, vision=_DEEPSTACK
    ),
    "qwen3_vl_moe": _qwen("qwen3_vl_moe", "Qwen3VLProcessor", text=EXPERTS, vision=_DEEPSTACK),
    "qwen3_5": _qwen(
        "qwen3_5",
        "Qwen3VLProcessor",
        text=HYBRID | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        vision={"num_position_embeddings": 64},
    ),
    "gemma3": {
        "config": {
            "model_type": "gemma3",
            "text_config": TEXT
            | {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": VISION | {"image_size": 56, "model_type": "siglip_vision_model"},
            "mm_tokens_per_image": 4,
            "boi_token_index": 260,
            "eoi_token_index": 261,
            "image_token_index": 262,
        },
        "tokens": [*GEMMA_TOKENS.values()],
        "named": GEMMA_TOKENS,
        "image": "<start_of_image>",
        "processor_class": "Gemma3Processor",
        "processor": {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 56, "width": 56},
            "image_seq_length": 4,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
        "processor_config": {"image_seq_length": 4},
    },
    "gemma4": {
        "config": {
            "model_type": "gemma4",
            "text_config": TEXT
            | {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 320}
            | {"global_head_dim": 16, "use_bidirectional_attention": "vision"},
            "vision_config": VISION
            | {"num_key_value_heads": 2, "head_dim": 16, "pooling_kernel_size": 3}
            | {"position_embedding_size": 128},
            "audio_config": None,
            "image_token_id": 262,
            "boi_token_id": 260,
            "eoi_token_id": 261,
            "audio_token_id": 263,
            "video_token_id": 266,
        },
        "tokens": [*GEMMA4_TOKENS.values(), "<|video|>"],
        "named": GEMMA4_TOKENS,
        "image": "<image_soft_token>",
        "video": "<|video|>",
        "video_processor": {
            "video_processor_type": "Gemma4VideoProcessor",
            "patch_size": 14,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
            "num_frames": 4,
        },
        "processor_class": "Gemma4Processor",
        "processor": {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 14,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 3,
        },
    },
    "mistral3": {
        "config": {
            "model_type": "mistral3",
            "text_config": TEXT | {"model_type": "mistral", "sliding_window": None},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 16, "image_size": 112},
            "image_token_index": 260,
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        "tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
        "image": "[IMG]",
        "processor_class": "PixtralProcessor",
        "processor": {
            "image_processor_type": "PixtralImageProcessor",
            "patch_size": 14,
            "size": {"longest_edge": 112},
        },
        "processor_config": {"patch_size": 14, "spatial_merge_size": 2},
    },
    "idefics3": _idefics("idefics3", "Idefics3Processor", "Idefics3ImageProcessor"),
    "smolvlm": _idefics(
        "smolvlm",
        "SmolVLMProcessor",
        "SmolVLMImageProcessor",
        video="<video>",
        video_processor=_SMOLVLM_VIDEOS,
    ),
    "llava": {
        "config": {
            "model_type": "llava",
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"image_size": 56, "model_type": "clip_vision_model"},
            "image_token_index": 260,
            "vision_feature_layer": -2,
        },
        "tokens": ["<image>"],
        "image": "<image>",
        "processor_class": "LlavaProcessor",
        "processor": {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
        },
        "processor_config": {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    },
}
"""By model type."""

_QWEN2 = {key: value for key, value in TEXT.items() if key != "head_dim"} | {"model_type": "qwen2"}
_SIGLIP = VISION | {"image_size": 56, "model_type": "siglip_vision_model"}
_TILED = {"size": {"height": 56, "width": 56}, "crop_to_patches": True}
_TILED |= {"min_patches": 1, "max_patches": 4}
_SIZES = {"image_grid_pinpoints": [[56, 112], [112, 56], [112, 112]]}
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_GLM_KINDS = ("<|image|>", "<|video|>")
_GLM_TOKENS = [*_GLM_KINDS, "<|begin_of_image|>", "<|end_of_image|>"]
_GLM_TOKENS += ["<|begin_of_video|>", "<|end_of_video|>"]


def _glm(kind, processor, image_processor):
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    names = ("image_token", "video_token", "image_start_token", "image_end_token")
    names += ("video_start_token", "video_end_token")
    ids = {f"{name}_id": 260 + number for number, name in enumerate(names)}
    return {
        "config": {
            "model_type": kind,
            "text_config": text
            | {"model_type": "glm4v_text"}
            | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
            "vision_config": QWEN_VISION
            | {"model_type": "glm4v_vision", "patch_size": 14, "image_size": 112},
            **ids,
        },
        "tokens": _GLM_TOKENS,
        "named": dict(zip(names[:2], _GLM_KINDS, strict=True)),
        "image": "<|begin_of_image|><|image|><|end_of_image|>",
        "processor_class": processor,
        "processor": {
            "image_processor_type": image_processor,
            "patch_size": 14,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 56 * 56, "longest_edge": 20 * 56 * 56},
        },
    }


MORE = {
    "internvl": {
        "config": {
            "model_type": "internvl",
            "text_config": _QWEN2,
            "vision_config": VISION | {"image_size": [56, 56], "patch_size": [14, 14]},
            "image_token_id": 262,
            "image_seq_length": 4,
            "downsample_ratio": 0.5,
        },
        "tokens": [*_INTERNVL_TOKENS.values()],
        "named": _INTERNVL_TOKENS,
        "image": "<IMG_CONTEXT>",
        "video": "<video>",
        "video_processor": {
            "video_processor_type": "InternVLVideoProcessor",
            "size": {"height": 56, "width": 56},
            "num_frames": 3,
        },
        "processor_class": "InternVLProcessor",
        "processor": _TILED | {"image_processor_type": "GotOcr2ImageProcessor"},
        "processor_config": {"image_seq_length": 4},
    },
    "llava_next": {
        "config": {
            "model_type": "llava_next",
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"image_size": 56, "model_type": "clip_vision_model"},
            "image_token_index": 260,
            "vision_feature_layer": -2,
            **_SIZES,
        },
        "tokens": ["<image>"],
        "image": "<image>",
        "processor_class": "LlavaNextProcessor",
        "processor": {
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 56},
            "crop_size": {"height": 56, "width": 56},
            **_SIZES,
        },
        "processor_config": {
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    },
    "llava_onevision": {
        "config": {
            "model_type": "llava_onevision",
            "text_config": _QWEN2,
            "vision_config": _SIGLIP,
            "image_token_index": 260,
            "video_token_index": 261,
            **_SIZES,
        },
        "tokens": ["<image>", "<video>"],
        "image": "<image>",
        "video": "<video>",
        "video_processor": {
            "video_processor_type": "LlavaOnevisionVideoProcessor",
            "size": {"height": 56, "width": 56},
            "num_frames": 4,
        },
        "processor_class": "LlavaOnevisionProcessor",
        "processor": {
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 56, "width": 56},
            **_SIZES,
        },
        "processor_config": {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    },
    "glm4v": _glm("glm4v", "Glm4vProcessor", "Glm4vImageProcessor"),
    "glm46v": _glm("glm46v", "Glm46VProcessor", "Glm46VImageProcessor"),
    "aya_vision": {
        "config": {
            "model_type": "aya_vision",
            "text_config": TEXT
            | {"model_type": "cohere2", "sliding_window": 32}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": _SIGLIP,
            "image_token_index": 262,
            "downsample_factor": 2,
        },
        "tokens": [
            *("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>"),
            *("<image>", "TILE_GLOBAL", "TILE"),
        ],
        "image": "<image>",
        "processor_class": "AyaVisionProcessor",
        "processor": _TILED | {"image_processor_type": "GotOcr2ImageProcessor"},
        "processor_config": {"patch_size": 14, "img_size": 56, "downsample_factor": 2},
    },
    "exaone4_5": _qwen(
        "exaone4_5",
        "Exaone4_5_Processor",
        text={"model_type": "exaone4", "sliding_window": None}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        | {"layer_types": ["full_attention"] * 2},
        vision=_WINDOWS | {"num_key_value_heads": 2},
        patch_size=14,
    ),
    "vipllava": FAMILIES["llava"]
    | {
        "config": {
            "model_type": "vipllava",
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": VISION | {"image_size": 56, "model_type": "clip_vision_model"},
            "image_token_index": 260,
            "vision_feature_layers": [-1, -2],
        }
    },
    "deepseek_vl": {
        "config": {
            "model_type": "deepseek_vl",
            "text_config": TEXT | {"model_type": "llama"},
            "vision_config": _SIGLIP,
            "image_token_id": 260,
        },
        "tokens": ["<image_placeholder>"],
        "named": {"image_token": "<image_placeholder>"},
        "image": "<image_placeholder>",
        "processor_class": "DeepseekVLProcessor",
        "processor": {
            "image_processor_type": "DeepseekVLImageProcessor",
            "size": {"height": 56, "width": 56},
        },
        "processor_config": {"num_image_tokens": 16},
    },
    "ovis2": {
        "config": {
            "model_type": "ovis2",
            "text_config": _QWEN2,
            "vision_config": VISION | {"image_size": 56, "hidden_stride": 1, "vocab_size": 40},
            "image_token_id": 260,
            "visual_indicator_token_ids": [261, 262, 263, 264, 265],
            "vocab_size": 320,
            "hidden_size": 32,
        },
        "tokens": [
            *("<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
            "<image>",
        ],
        "named": {"image_token": "<image>"},
        "image": "<image>",
        "processor_class": "Ovis2Processor",
        "processor": _TILED | {"image_processor_type": "Ovis2ImageProcessor"},
        "processor_config": {"image_seq_length": 16},
    },
}
"""More of them, of which the launcher knows nothing: their processors and `get_image_features` say
all."""

_WITH_TORCHVISION_IN_5_17 = ("gemma4", "idefics2", "idefics3", "ovis2", "smolvlm")
NEEDS = {"mistral3": ("torchvision",), "smolvlm": ("num2words",)}
"""Packages that the processors of families need, and the launcher does not."""


def chat_template(image, video=""):
    """A template that writes `image` for each image in a message, and `video` for each video."""
    return (
        "{%- for message in messages -%}{{- '<|' ~ message.role ~ '|>' -}}"
        "{%- if message.role == 'assistant' -%}{%- generation -%}{{- message.content -}}"
        "{{- '<|end|>' -}}{%- endgeneration -%}{%- else -%}"
        "{%- if message.content is string -%}{{- message.content -}}"
        "{%- else -%}{%- for part in message.content -%}"
        f"{{%- if part.type == 'image' -%}}{{{{- '{image}' -}}}}"
        f"{{%- elif part.type == 'video' -%}}{{{{- '{video}' -}}}}"
        "{%- elif 'text' in part -%}{{- part.text -}}{%- endif -%}"
        "{%- endfor -%}{%- endif -%}{{- '<|end|>' -}}{%- endif -%}"
        "{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
    )


def make_model(folder, family, *, replaced=None, sections=None, shape_only=False):
    """Writes a model of a family with random weights, its tokenizer and its processor's files.

    replaced: keys of its config. sections: changes in sections of it, by section. shape_only: without
    weights, as for a plan.
    """
    about = (FAMILIES | MORE)[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = hugging_face_byte_tokenizer()
    tokenizer.add_tokens(
        [
            transformers.AddedToken(token, special=True, normalized=False)
            for token in about["tokens"]
        ]
    )
    for name, token in about.get("named", {}).items():
        setattr(tokenizer, name, token)
    tokenizer.chat_template = chat_template(about["image"], about.get("video", ""))
    if named := about.get("named"):
        tokenizer.init_kwargs["extra_special_tokens"] = named
    tokenizer.save_pretrained(folder)
    if named:
        file = folder / "tokenizer_config.json"
        config = json.loads(file.read_text())
        config["extra_special_tokens"] = named
        file.write_text(json.dumps(config))
    common = {"processor_class": about["processor_class"]}
    (folder / "preprocessor_config.json").write_text(json.dumps(about["processor"] | common))
    (folder / "processor_config.json").write_text(
        json.dumps(about.get("processor_config", {}) | common)
    )
    if (videos := about.get("video_processor")) is not None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    settings = about["config"] | (replaced or {})
    settings |= {key: settings[key] | changes for key, changes in (sections or {}).items()}
    settings = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    if shape_only:
        settings.save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.15 if parameter.ndim > 1 else 0.05)
    model.save_pretrained(folder)
    return folder


def make_image(file: Path, *, size=(84, 56), seed=0):
    """Writes an image of smooth random colours."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.rand(1, 3, 4, 4, generator=generator)
    pixels = torch.nn.functional.interpolate(noise, size=size[::-1], mode="bilinear")[0]
    Image.fromarray((pixels.permute(1, 2, 0) * 255).byte().numpy()).save(file)
    return file


def needs(family):
    """Packages that the processor of a family needs, and the launcher does not."""
    if transformers.__version__ == "5.17.0" and family in _WITH_TORCHVISION_IN_5_17:
        return ("torchvision", *NEEDS.get(family, ()))
    return NEEDS.get(family, ())


def skip_without_packages(family):
    """Skips a test whose processor of images needs a package that is not installed."""
    for package in needs(family):
        pytest.importorskip(package, reason=f"the processor of {family} needs it")


def reference_processor(folder):
    """transformers' own processor, without those of video and audio, which need torchvision."""
    config = json.loads((Path(folder) / "processor_config.json").read_text())
    kind = getattr(transformers, config.pop("processor_class"))

    class Processor(kind):  # type: ignore[misc, valid-type]
        def check_argument_for_proper_class(self, name, argument):
            pass

    parts = {
        "image_processor": AutoImageProcessor.from_pretrained(folder, backend="pil"),
        "tokenizer": transformers.AutoTokenizer.from_pretrained(folder),
    }
    arguments = [parts.get(name) for name in kind.get_attributes()]
    made = Processor.from_args_and_dict(arguments, config)
    return made[0] if isinstance(made, tuple) else made


def with_images(name, tower=None, **of_model):
    """How a model with this processor takes images. of_model: see `ModelAttachments`."""
    return ModelAttachments((RowImages(name, tower=tower),), **of_model)
