"""Trains models of images, videos and text, and in a plain loop over single rows, with transformers'
own processor and model.

    torchrun --nproc-per-node 2 images_worker.py FOLDER [CASE ...]

Writes losses and gradient norms to results.json.
"""

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.rank_layout import RankLayout
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from tests.distributed.launching import end_worker
from tests.distributed.recurrent_worker import train
from tests.image_models import FAMILIES, MORE, make_image, make_model, reference_processor
from tests.reference_videos import inputs_of as of_processor
from tests.reference_videos import reference_of, whole
from tests.run_files import write_lines
from tests.video_files import make_video

transformers.logging.set_verbosity_error()
STEPS, RATE = 3, 2e-3
RECIPE = f"""
run: {{name: images, max_steps: {STEPS}, seed: 7}}
model: {{path: FOLDER/FAMILY}}
data:
  {{train: FOLDER/train.jsonl, validation: FOLDER/train.jsonl, sequence_length: LENGTH, shuffle: false, workers: 0,
   cache: FOLDER/cache, overlong: cut}}
images: {{train: all}}
batch: {{global_batch_size: 4, micro_batch_size: 1}}
strategy: {{mixed_precision: null}}
optimizer: {{learning_rate: {RATE}, weight_decay: 0.0}}
schedule: {{kind: constant, warmup_steps: 0}}
evaluation: {{every_steps: 100, generate: {{prompts: 9, max_new_tokens: 5}}}}
"""
CONTEXT, FULL = "strategy.context_parallel_size=2", "activation_checkpointing={mode: full}"
STAGES = "strategy.pipeline_parallel_size=2"
FSDP, PADDED = "strategy.kind=fsdp", ["data.packing=false", "batch.global_batch_size=8"]
CASES = {
    "qwen2_5_vl fsdp": [FSDP],
    "gemma3 fsdp": [FSDP],
    "gemma3 ddp padded": ["strategy.kind=ddp", *PADDED],
    "qwen2_vl fsdp": [FSDP],
    "qwen2_5_vl ddp padded projector": ["strategy.kind=ddp", "images.train=projector", *PADDED],
    "qwen3_vl fsdp checkpointing": [FSDP, FULL],
    "qwen3_vl fsdp none": [FSDP, "images.train=none"],
    "qwen3_vl_moe fsdp": [FSDP],
    "qwen3_5 fsdp": [FSDP],
    "qwen3_5 fsdp checkpointing": [FSDP, FULL],
    "gemma4 fsdp": [FSDP],
    "idefics3 fsdp": [FSDP],
    "llava fsdp selective": [FSDP, "activation_checkpointing={mode: selective}"],
    "mistral3 fsdp": [FSDP],
    "smolvlm fsdp": [FSDP],
    "gemma4 ddp padded checkpointing": ["strategy.kind=ddp", *PADDED, FULL],
    "idefics3 fsdp checkpointing": [FSDP, FULL],
    "mistral3 ddp padded checkpointing": ["strategy.kind=ddp", *PADDED, FULL],
    "qwen2_5_vl fsdp compile": [FSDP, "model.compile=true"],
    "qwen2_5_vl context": [FSDP, CONTEXT, "batch.global_batch_size=2"],
    "qwen3_vl context padded": [FSDP, CONTEXT, *PADDED],
    "qwen3_vl_moe experts": [FSDP, "strategy.expert_parallel_size=2"],
    "gemma3 pipeline": [FSDP, STAGES],
    "qwen2_5_vl pipeline": [FSDP, STAGES],
    "qwen2_5_vl pipeline projector padded": [
        FSDP,
        STAGES,
        "images.train=projector",
        *PADDED,
    ],
    "qwen3_vl pipeline none": [FSDP, STAGES, "images.train=none"],
    "qwen3_vl pipeline checkpointing": [FSDP, STAGES, FULL],
    "llava pipeline": [FSDP, STAGES],
    "idefics3 pipeline none": [FSDP, STAGES, "images.train=none"],
    "qwen3_5 pipeline": [FSDP, STAGES],
    "qwen2_5_vl tensor": [FSDP, "strategy.tensor_parallel_size=2"],
    "gemma3 tensor": [FSDP, "strategy.tensor_parallel_size=2"],
    "idefics3 context": [FSDP, CONTEXT, "batch.global_batch_size=2"],
    "llava context": [FSDP, CONTEXT, "batch.global_batch_size=2"],
}
QUICK = ("qwen2_5_vl fsdp", "gemma3 fsdp")
VIDEOS = ["videos={train: all}", "data.train=FOLDER/videos.jsonl"]
VIDEOS += ["data.validation=FOLDER/videos.jsonl"]
VIDEO_CASES = {
    "qwen2_5_vl videos pipeline": [FSDP, STAGES],
    "qwen3_vl videos pipeline": [FSDP, STAGES],
    "internvl videos pipeline padded": [FSDP, STAGES, *PADDED],
    "qwen2_5_vl videos fsdp": [FSDP],
    "qwen3_vl videos fsdp checkpointing": [FSDP, FULL],
    "qwen2_vl videos fsdp": [FSDP],
    "qwen3_5 videos fsdp": [FSDP],
    "qwen3_vl_moe videos fsdp": [FSDP],
    "gemma4 videos fsdp": [FSDP],
    "llava_onevision videos fsdp": [FSDP],
    "internvl videos fsdp": [FSDP],
    "internvl videos ddp padded": ["strategy.kind=ddp", *PADDED],
    "internvl videos context": [FSDP, CONTEXT, "batch.global_batch_size=2"],
    "smolvlm videos fsdp": [FSDP],
    "smolvlm videos fsdp checkpointing": [FSDP, FULL],
    "smolvlm videos context": [FSDP, CONTEXT, "batch.global_batch_size=2"],
    "qwen2_5_vl videos ddp padded": ["strategy.kind=ddp", *PADDED],
    "qwen3_vl videos none alone": [FSDP, "videos.train=none", "images=null"],
    "qwen2_5_vl videos context": [FSDP, CONTEXT, "batch.global_batch_size=2"],
    "qwen3_vl videos context padded": [FSDP, CONTEXT, *PADDED],
    "llava_onevision videos context alone": [
        FSDP,
        CONTEXT,
        "images=null",
        "batch.global_batch_size=2",
    ],
}
QUICK_VIDEOS = ("qwen2_5_vl videos fsdp", "qwen3_vl videos fsdp checkpointing")
CASES |= {case: [*VIDEOS, *words] for case, words in VIDEO_CASES.items()}
CASES |= {f"{family} fsdp": [FSDP] for family in MORE}
LONGEST = {"gemma4": 480, "idefics3": 240, "smolvlm": 240, "llava_next": 300, "ovis2": 300}
LONGEST |= {"llava_onevision": 300, "aya_vision": 300}
LONGEST_VIDEOS = {"gemma4": 1400, "llava_onevision": 300, "qwen3_vl": 320, "qwen3_5": 320}
LONGEST_VIDEOS |= {"qwen3_vl_moe": 320, "smolvlm": 800, "internvl": 320}
"""Tokens of a row, where images have more than 160 tokens."""
PROJECTORS = ("merger", "projector", "connector", "embed_vision")


def write_rows(folder):
    """Nine rows, of which the last ones have no images, so that a rank has a micro-batch of text."""
    sizes = [(84, 56), (120, 60), (40, 150), (56, 28)]
    names = [
        make_image(folder / f"{n}.png", size=size, seed=n).name for n, size in enumerate(sizes)
    ]
    pictured = [["0"], ["1", "2"], ["3"], ["2"], ["0", "3"]]
    rows = []
    for number, images in enumerate(pictured):
        question = "".join("<image>" for _ in images) + "?" * (number + 1)
        answer = f"It is number {number}."
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": question},
                    {"role": "assistant", "content": answer},
                ],
                "images": [names[int(image)] for image in images],
            }
        )
    for number in range(4):
        words = f"word {number} " * (6 + number)
        rows.append(
            {
                "messages": [
                    {"role": "user", "content": "Text."},
                    {"role": "assistant", "content": words},
                ]
            }
        )
    write_lines(folder / "train.jsonl", rows)
    return rows


def write_video_rows(folder, *, images=True):
    """Nine rows, of which some have videos, and some images beside them."""
    for number, (count, size, fps) in enumerate([(16, (48, 36), 8), (40, (90, 60), 10)]):
        make_video(folder / f"{number}.mkv", count, size=size, fps=fps, seed=number)
    rows = write_rows(folder)
    shown = ["0", "", "01", "", "1", "0", "", "", ""]
    for row, videos in zip(rows, shown, strict=True):
        if not images:
            row.pop("images", None)
            row["messages"][0]["content"] = row["messages"][0]["content"].replace("<image>", "")
        if videos:
            row["videos"] = [f"{video}.mkv" for video in videos]
            row["messages"][0]["content"] += "".join(f" {video}<video>" for video in videos)
    write_lines(folder / "videos.jsonl", rows)
    return rows


def inputs_of(row, folder, processor, *, prompt=False):
    """What transformers makes of a row, and the targets: what the assistant says, and the end."""
    messages, images = [], list(row.get("images", ()))
    for message in row["messages"]:
        content = message["content"]
        if message["role"] == "user":
            parts = re.split("<(image|video)>", content)
            texts = [{"type": "text", "text": text} for text in parts[::2]]
            shown = [{"type": kind} for kind in parts[1::2]]
            content = [part for both in zip(texts, shown, strict=False) for part in both]
            content = [*content, *texts[len(shown) :]]
        messages.append({"role": message["role"], "content": content})
    text = processor.tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=prompt
    )
    opened = [Image.open(folder / name).convert("RGB") for name in images]
    given = {"text": [text]}
    if videos := [whole(folder / name) for name in row.get("videos", ())]:
        given |= {"videos": [frames for frames, _ in videos], "do_sample_frames": True}
        given |= {"video_metadata": [about for _, about in videos]}
    made = of_processor(processor, images=opened, **given)
    ids = made["input_ids"][0]
    begin, end = processor.tokenizer.convert_tokens_to_ids(["<|assistant|>", "<|end|>"])
    targets = torch.full_like(ids, -100)
    learns = False
    for place, token in enumerate(ids[:-1].tolist()):
        learns = token == begin or (learns and token != end)
        if learns:
            targets[place] = ids[place + 1]
    return made, targets


def plain_loop(folder, family, rows, trained, steps, *, device="cpu"):
    """steps: the numbers of the rows that each step trains on."""
    videos = "video" in (FAMILIES | MORE)[family]
    processor = (reference_of if videos else reference_processor)(folder / family)
    model = transformers.AutoModelForImageTextToText.from_pretrained(
        folder / family, dtype=torch.float32
    ).train()
    model.to(device)
    text = model.get_decoder()
    used = {id(p) for m in (text, model.get_output_embeddings()) for p in m.parameters()}
    for name, parameter in model.named_parameters():
        projects = any(part in name for part in PROJECTORS)
        if id(parameter) not in used and not (trained == "all" or (trained and projects)):
            parameter.requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    inputs = [inputs_of(row, folder, processor) for row in rows]
    losses, norms = [], []
    for step in steps:
        loss, total = torch.zeros((), device=device), 0
        for row in step:
            made, targets = (part.to(device) for part in inputs[row])
            logits = model(**made, use_cache=False).logits[0]
            loss = loss + torch.nn.functional.cross_entropy(
                logits, targets, ignore_index=-100, reduction="sum"
            )
            total += int((targets != -100).sum())
        loss = loss / total
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    answers = {
        row["messages"][1]["content"].strip(): answer(model, row, folder, processor) for row in rows
    }
    return {"losses": losses, "norms": norms, "answers": answers}


def answer(model, row, folder, processor):
    """What transformers' generate answers to the first message of a row. It may not answer with the
    tokens of images."""
    made, _ = inputs_of(row | {"messages": row["messages"][:1]}, folder, processor, prompt=True)
    suppressed = [*processor.image_token_ids]
    if "videos" in row:
        suppressed += processor.video_token_ids
    tokens = model.generate(
        **made,
        max_new_tokens=5,
        do_sample=False,
        eos_token_id=256,
        pad_token_id=256,
        suppress_tokens=[token for token in suppressed if token is not None],
    )
    new = tokens[0, made["input_ids"].shape[1] :]
    return processor.tokenizer.decode(new, skip_special_tokens=True).strip()


def main(folder, cases):
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    ranks = RankLayout(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
    )
    results = {}
    for case in cases:
        family, *words = case.split()
        rows = []
        if ranks.rank == 0:
            videos = "videos" in words
            alone = "alone" in words
            rows = write_video_rows(folder, images=not alone) if videos else write_rows(folder)
            if not (folder / family).exists():
                make_model(folder / family, family)
            text = RECIPE.replace("FOLDER", str(folder)).replace("FAMILY", family)
            longest = LONGEST_VIDEOS if videos else LONGEST
            text = text.replace("LENGTH", str(longest.get(family, 160)))
            (folder / f"{family}.yaml").write_text(text)
        dist.barrier()
        recipe = load_recipe(
            [
                f"recipe={folder}/{family}.yaml",
                *(word.replace("FOLDER", str(folder)) for word in CASES[case]),
            ],
            ranks=ranks.size,
        ).recipe
        training = assemble(recipe, ranks=ranks, build_data=ranks.rank == 0)
        batches = training.data.batches(
            ranks=ranks, stop_requested=lambda: False, save_requested=lambda: False
        )
        images = [
            sum(given["count"] for given in part.inputs["attachments"].values())
            for part in next(iter(batches)).micro_batches
        ]
        trained_values = train(training)
        evaluated = training.evaluator.evaluate(training.wrapped)["validation"]
        results[case] = trained_values | {
            "answers": {sample["reference"]: sample["answer"] for sample in evaluated.samples},
            "shown": [[sample["prompt"], _files(sample)] for sample in evaluated.samples],
            "images": _gathered(images),
            "documents": training.data.training.sequences.documents,
            "cut": training.data.training.sequences.cut_documents,
        }
        if ranks.rank == 0:
            trained = next((word for word in words if word in ("none", "projector")), "all")
            dataset, size = training.data.training, recipe.batch.global_batch_size
            steps = [
                [
                    document
                    for index in range(step * size, (step + 1) * size)
                    for document, _, _ in dataset.pieces(index)
                ]
                for step in range(STEPS)
            ]
            plain = plain_loop(folder, family, rows, "" if trained == "none" else trained, steps)
            results[case]["plain"] = plain
        dist.barrier()
    end_worker(folder, results)


def _files(sample: Any):
    """The names of the images and videos of an answer's prompt."""
    return [*sample.get("images", ()), *sample.get("videos", ())]


def _gathered(value):
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
