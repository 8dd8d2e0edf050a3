"""Measures tokenization with a cold cache, with one and several processes, and with a warm cache.

    python benchmarks/data.py [--megabytes 32] [--processes 1 2] [--output FILE]
    python benchmarks/data.py --stream 40000000 [--rate 200000] [--megabytes 200]
    python benchmarks/data.py --images 200

With --stream TOKENS it reads so many tokens from a store and from a stream, with loader processes and
without a model, and from a stream with a pause for each step as of a model with --rate tokens/s: seconds
until the first step, with tokenization, tokens/s, and the waits of the steps after it.

With --images COUNT it measures rows with images: tokenization, and the loader, in one process and with
two workers. The images are JPEG files of two sizes, the processors those of Qwen2.5-VL, Qwen3-VL and
Gemma 3 with the sizes of the real models, beside tiny models.

The text is the source code of Python's standard library, repeated as rows of a .jsonl file. The
tokenizer is a byte-level BPE with 8,192 tokens, trained on that text. Each number comes from a new
process. For comparison, a script by hand calls datasets.load_dataset and .map with the same number
of processes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import ROOT, publish

LAUNCHER = """
import json, sys, time
started = time.perf_counter()
from launcher.data.opening import open_dataset
from launcher.data.token_store import ModelTraits
from launcher.objectives.next_token import NextToken
from launcher.recipe.schema import Data
folder, processes = sys.argv[1], int(sys.argv[2])
data = Data(train=(folder + "/text.jsonl",), tokenizer=folder + "/tokenizer", cache=folder + "/cache", processes=processes)
imported = time.perf_counter()
found = open_dataset(data, data.train, tokenizer=data.tokenizer, model=ModelTraits(vocabulary=8192), build=True, objective=NextToken())
print(json.dumps({"tokens": int(found.store.offsets[-1]), "seconds": time.perf_counter() - imported, "imports": imported - started}))
"""
BY_HAND = """
import json, os, sys, time
started = time.perf_counter()
import datasets
from transformers import AutoTokenizer
datasets.disable_progress_bars()
folder, processes = sys.argv[1], int(sys.argv[2])
os.environ["TOKENIZERS_PARALLELISM"] = "false" if processes > 1 else "true"
tokenizer = AutoTokenizer.from_pretrained(folder + "/tokenizer")
imported = time.perf_counter()
rows = datasets.load_dataset("json", data_files=folder + "/text.jsonl", split="train", cache_dir=folder + "/by_hand")
encode = lambda batch: {"input_ids": tokenizer(batch["text"])["input_ids"]}
encoded = rows.map(encode, batched=True, remove_columns=["text"], num_proc=processes)
tokens = sum(len(ids) for batch in encoded.iter(1000) for ids in batch["input_ids"]) + len(encoded)
print(json.dumps({"tokens": tokens, "seconds": time.perf_counter() - imported, "imports": imported - started}))
"""

STREAM = """
import json, sys, time, torch
from launcher.data.run_data import open_run_data
from launcher.data.token_store import ModelTraits
from launcher.distributed.rank_layout import RankLayout
from launcher.objectives.next_token import NextToken
from launcher.recipe.schema import Batch, Data, Run
folder, tokens, streams, rate = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "stream", float(sys.argv[4])
options = {"streaming": True, "shard_size": "32MiB"} if streams else {}
data = Data(
    train=(folder + "/text.jsonl",), tokenizer=folder + "/tokenizer", sequence_length=2048, cache=folder + "/cache", **options
)
started = time.perf_counter()
steps = tokens // (2048 * 16)
opened = open_run_data(
    data, Batch(global_batch_size=16, micro_batch_size=16), Run(name="stream", max_steps=steps),
    objective=NextToken(), model=ModelTraits(), build=True, ranks=RankLayout(rank=0, size=1, group=None, device=torch.device("cpu")),
)
waits, no = [], {"stop_requested": lambda: False, "save_requested": lambda: False}
for batch in opened.batches(ranks=RankLayout(rank=0, size=1, group=None, device=torch.device("cpu")), **no):
    waits.append(batch.seconds_waited)
    if len(waits) == 1:
        first = time.perf_counter() - started
    if rate:
        time.sleep(2048 * 16 / rate)
seconds = time.perf_counter() - started
waits = waits[1:]
print(json.dumps({"first": first, "rate": steps * 2048 * 16 / seconds, "mean": sum(waits) / len(waits), "longest": max(waits),
                  "waited": sum(wait > 0.05 for wait in waits), "steps": len(waits)}))
"""


IMAGES = """
import dataclasses, json, sys, time, torch
from pathlib import Path
sys.path.insert(0, ".")
from launcher.data.batching import RankBatchSampler, SampleOrder
from launcher.data.loader import make_loader
from launcher.data.opening import open_dataset
from launcher.data.token_store import ModelTraits
from launcher.objectives.next_token import NextToken
from launcher.recipe.load import load_recipe
from launcher.training.model import prepare_model
from tests.image_models import make_image, make_model
folder, family, width, height, count = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
make_model(folder / family, family, replaced=json.loads(sys.stdin.read()), shape_only=True)
sizes = json.loads((folder / family / "preprocessor_config.json").read_text())
sizes["size"] = {"height": 896, "width": 896} if family == "gemma3" else {"shortest_edge": 65536, "longest_edge": 2**24}
(folder / family / "preprocessor_config.json").write_text(json.dumps(sizes))
tokens = {"image_seq_length": 256} if family == "gemma3" else {}
config = json.loads((folder / family / "processor_config.json").read_text())
(folder / family / "processor_config.json").write_text(json.dumps(config | tokens))
names = [make_image(folder / f"{n}.jpg", size=(width, height), seed=n).name for n in range(count)]
turns = lambda n: [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": f"It is number {n}."}]
rows = [{"messages": turns(n), "images": [name]} for n, name in enumerate(names)]
(folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
common = [f"model.path={folder / family}", f"data.train={folder}/rows.jsonl", f"data.cache={folder}/cache", "data.packing=false",
          "data.sequence_length=4096", "data.processes=1", "images={train: none}", "model.init=random"]
recipe = load_recipe(["recipe=sft", *common, "strategy.kind=ddp", "batch.micro_batch_size=1", "batch.global_batch_size=1"], ranks=1).recipe
device, data = torch.device("cpu"), recipe.data
images = prepare_model(recipe, device=device).images
started = time.process_time()
dataset = open_dataset(data, data.train, tokenizer=recipe.model.path, model=ModelTraits(images=images), build=True, objective=NextToken())
found = {"tokenized": (time.process_time() - started) / count}
order, one = SampleOrder(samples=count, seed=0, shuffle=False), dict(global_batch_size=1, micro_batch_size=1, rank=0, ranks=1)
sampler = RankBatchSampler(order=order, first_step=0, steps=count, **one)
for workers in (0, 2):
    loader = make_loader(dataset, sampler, dataclasses.replace(data, workers=workers), seed=0, persistent_workers=False, device=device)
    loaded = iter(loader)
    first = next(loaded)  # with the start of the workers
    started, cpu = time.perf_counter(), time.process_time()
    total = sum(1 for _ in loaded)
    found |= {f"rate {workers}": total / (time.perf_counter() - started), f"cpu {workers}": (time.process_time() - cpu) / total}
pixels = first.micro_batch.inputs["tower"]["pixel_values"]
found |= {"bytes": pixels.nbytes, "tokens": len(first.micro_batch.inputs["image_positions"])}
print(json.dumps(found))
"""
TOWERS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {},
    "qwen3_vl": {},
    "gemma3": {
        "mm_tokens_per_image": 256,
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14}
        | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        | {"num_attention_heads": 2},
    },
}
"""By family: what differs from the tiny model of the tests."""


def images(count: int) -> str:
    """Markdown table of the time that images take before training and in the loader."""
    lines = [
        "| processor | image | tokens | bytes | tokenization, CPU ms | loader, CPU ms | images/s, 2 workers |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for family, changes in TOWERS.items():
        for width, height in ((300, 168), (1600, 900)):
            with tempfile.TemporaryDirectory(prefix="launcher-data-") as name:
                words = [family, width, height, count]
                found = run(IMAGES, Path(name), *words, given=json.dumps(changes))
            lines.append(
                f"| {family} | {width} x {height} | {found['tokens']:,} | {found['bytes']:,} "
                f"| {1000 * found['tokenized']:.1f} | {1000 * found['cpu 0']:.1f} | {found['rate 2']:.0f} |"
            )
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def stream(folder: Path, tokens: int, rate: float) -> str:
    """Markdown table of a store and a stream, and of a stream while a step takes as long as it would with this
    many tokens/s."""
    lines = [
        "| 2,048 x 16 tokens per step | first step after | tokens/s | mean wait | longest wait | steps that waited |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for what, kind, limit in (
        ("store", "store", 0.0),
        ("data.streaming", "stream", 0.0),
        (f"data.streaming, {rate:,.0f} tokens/s trained", "stream", rate),
    ):
        shutil.rmtree(folder / "cache", ignore_errors=True)
        found = run(STREAM, folder, tokens, kind, limit)
        lines.append(
            f"| {what} | {found['first']:.1f} s | {found['rate']:,.0f} | {1000 * found['mean']:.1f} ms "
            f"| {found['longest']:.2f} s | {found['waited']} of {found['steps']} |"
        )
        print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines) + "\n"


def make_inputs(folder: Path, megabytes: int) -> int:
    """Writes the text and the tokenizer; returns the bytes of text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=8192, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(
        folder / "tokenizer"
    )
    written = 0
    with (folder / "text.jsonl").open("w", encoding="utf-8") as file:
        while written < megabytes * 10**6:
            for text in texts:
                # Documents of 4,000 characters, like typical web pages
                for start in range(0, len(text), 4000):
                    piece = text[start : start + 4000]
                    written += len(piece.encode())
                    file.write(json.dumps({"text": piece}) + "\n")
    return written


def run(code: str, folder: Path, *arguments: object, given: str = "") -> dict[str, Any]:
    """Runs the code in a new process, with `given` on its standard input; returns the JSON that it
    prints and the total seconds."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *map(str, arguments)],
        cwd=ROOT,
        input=given,
        capture_output=True,
        text=True,
        check=True,
        timeout=3600,
    )
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"process": time.perf_counter() - started}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--output", type=Path)
    parser.add_argument("--stream", type=int, metavar="TOKENS")
    parser.add_argument(
        "--rate", type=float, default=200_000.0, help="tokens/s of the model, with --stream"
    )
    parser.add_argument("--images", type=int, metavar="COUNT")
    arguments = parser.parse_args()
    if arguments.images is not None:
        publish(images(arguments.images), arguments.output)
        return
    if arguments.stream is not None:
        with tempfile.TemporaryDirectory(prefix="launcher-data-") as name:
            make_inputs(Path(name), arguments.megabytes)
            print(stream(Path(name), arguments.stream, arguments.rate))
        return
    lines = [
        "| | processes | text | tokens | seconds | MB/s | tokens/s | whole process |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for processes in arguments.processes:
        with tempfile.TemporaryDirectory(prefix="launcher-data-") as name:
            folder = Path(name)
            size = make_inputs(folder, arguments.megabytes)
            for what, code in (
                ("launcher, cold", LAUNCHER),
                ("launcher, warm cache", LAUNCHER),
                ("datasets by hand, cold", BY_HAND),
            ):
                found = run(code, folder, processes)
                seconds = found["seconds"]
                lines.append(
                    f"| {what} | {processes} | {size / 1e6:.0f} MB | {found['tokens']:,} | {seconds:.2f} | {size / 1e6 / seconds:,.1f} "
                    f"| {found['tokens'] / seconds:,.0f} | {found['process']:.1f} s |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    text = "\n".join(lines) + "\n"
    publish(text, arguments.output)


if __name__ == "__main__":
    main()
