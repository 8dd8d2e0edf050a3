"""Pictures of two coloured discs, and a small model of images and text that learns to name the colours.

python recipes/pictures.py make FOLDER          writes the untrained model, pictures, train.jsonl and test.jsonl
python recipes/pictures.py score MODEL FOLDER   share of the pictures of test.jsonl that a model describes correctly
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any

COLOURS = {
    "red": (220, 40, 40),
    "green": (30, 160, 60),
    "blue": (40, 80, 220),
    "yellow": (235, 200, 40),
    "white": (245, 245, 245),
    "pink": (240, 130, 190),
}
SIZE = 64
"""Pixels of a side of a picture."""
TRAIN, TEST = 2000, 200
QUESTION = "<image>What do you see?"
TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
TEMPLATE = """\
{%- for message in messages -%}
    {{- "<|" ~ message.role ~ "|>" -}}
    {%- if message.content is string -%}
        {{- message.content -}}
    {%- else -%}
        {%- for part in message.content -%}
            {%- if part.type == "image" -%}
                {{- "<|vision_start|><|image_pad|><|vision_end|>" -}}
            {%- else -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{- "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|>" -}}{%- endif -%}
"""


def draw(file: Path, colours: tuple[str, str], generator: random.Random) -> None:
    """Writes a picture of a disc on the left and one on the right, on a dark ground."""
    from PIL import Image, ImageDraw

    ground = tuple(generator.randrange(0, 50) for _ in range(3))
    picture = Image.new("RGB", (SIZE, SIZE), ground)
    pen = ImageDraw.Draw(picture)
    for half, colour in enumerate(colours):
        radius = generator.randrange(8, 15)
        across = half * SIZE // 2 + SIZE // 4 + generator.randrange(-3, 4)
        down = generator.randrange(radius, SIZE - radius)
        pen.circle((across, down), radius, fill=COLOURS[colour])
    picture.save(file)


def make(folder: Path, *, seed: int = 1234) -> None:
    """Writes the model and the rows, deterministic for a seed."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    generator = random.Random(seed)
    for name, count in (("train", TRAIN), ("test", TEST)):
        rows = []
        for number in range(count):
            left, right = generator.choice(sorted(COLOURS)), generator.choice(sorted(COLOURS))
            picture = f"pictures/{name}_{number}.png"
            draw(folder / picture, (left, right), generator)
            messages = [
                {"role": "user", "content": QUESTION},
                {"role": "assistant", "content": f"{left} and {right}"},
            ]
            rows.append({"messages": messages, "images": [picture]})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    make_model(folder / "model")
    print(
        f"{folder}: {TRAIN:,} pictures to train on, {TEST} others to test, and an untrained model"
    )


def make_model(folder: Path) -> None:
    """Writes a model of the architecture of Qwen3-VL with 0.7 million random weights."""
    import torch
    import transformers

    from launcher.data.tokenizer import hugging_face_byte_tokenizer

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer = hugging_face_byte_tokenizer()
    added = [transformers.AddedToken(token, special=True, normalized=False) for token in TOKENS]
    tokenizer.add_tokens(added)  # type: ignore[arg-type]
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    text = {
        "vocab_size": 264,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 1024,
        "bos_token_id": None,
        "eos_token_id": 256,
        "pad_token_id": 256,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [4, 4, 4],
        },
    }
    vision = {
        "depth": 3,
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_heads": 4,
        "out_hidden_size": 96,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [],
    }
    config = transformers.AutoConfig.for_model(
        "qwen3_vl",
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        vision_start_token_id=260,
        vision_end_token_id=261,
        image_token_id=262,
        video_token_id=263,
    )
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 8,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": SIZE * SIZE, "longest_edge": SIZE * SIZE},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))


def score(model_folder: Path, folder: Path, *, examples: int = 5) -> float:
    """Prints and returns the share of test pictures that the model describes correctly, by transformers'
    `generate`."""
    import torch
    import transformers
    from PIL import Image

    from launcher.data.image_processor import load_processor

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(model_folder)
    model = transformers.AutoModelForImageTextToText.from_pretrained(model_folder).eval()
    processor = load_processor(str(model_folder), None)
    lines = (folder / "test.jsonl").read_text(encoding="utf-8").splitlines()
    correct = 0
    for number, row in enumerate(map(json.loads, lines)):
        [file] = row["images"]
        with Image.open(folder / file) as picture:
            seen = processor.process(picture.convert("RGB"))
        asked = [{"type": "image"}, {"type": "text", "text": QUESTION.removeprefix("<image>")}]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(
            prompt.replace(processor.placeholder, seen.text),
            add_special_tokens=False,
            return_tensors="pt",
        )["input_ids"]
        arrays = {name: torch.from_numpy(array) for name, array in seen.arrays.items()}
        types = torch.isin(ids, torch.tensor(processor.token_ids)).int()
        with torch.inference_mode():
            tokens = model.generate(
                input_ids=ids,
                mm_token_type_ids=types,
                max_new_tokens=16,
                do_sample=False,
                **arrays,
            )
        answer = tokenizer.decode(tokens[0, ids.shape[1] :], skip_special_tokens=True)
        wanted = row["messages"][1]["content"]
        correct += answer == wanted
        if number < examples:
            print(f"  {file:<24} {wanted:<18} {answer!r}")
    share = correct / len(lines)
    print(f"{model_folder}: {correct} of {len(lines)} pictures described correctly ({share:.0%})")
    return share


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["make", folder]:
            make(Path(folder))
        case ["score", model, folder]:
            score(Path(model), Path(folder))
        case _:
            sys.exit(__doc__)
