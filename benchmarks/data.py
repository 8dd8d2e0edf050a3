"""Measures tokenization with a cold cache, with one and several processes, and with a warm cache.

    python benchmarks/data.py [--megabytes 32] [--processes 1 2] [--output FILE]
    python benchmarks/data.py --stream 500 [--length 16] [--megabytes 200]

With --stream STEP it measures data.streaming in one process, with a global batch of 1,024 and
without a model: seconds and peak memory until the first step, and until STEP with and without the
positions from a checkpoint.

The text is the source code of Python's standard library, repeated as rows of a .jsonl file. The
tokenizer is a byte-level BPE with 8,192 tokens, trained on that text. Each number comes from a new
process. For comparison, a script by hand calls datasets.load_dataset and .map with the same number
of processes.
"""

from __future__ import annotations

import argparse
import json
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
from launcher.data.token_store import ModelInputs
from launcher.objectives.next_token import NextToken
from launcher.recipe.schema import Data
folder, processes = sys.argv[1], int(sys.argv[2])
data = Data(train=(folder + "/text.jsonl",), tokenizer=folder + "/tokenizer", cache=folder + "/cache", processes=processes)
imported = time.perf_counter()
found = open_dataset(data, data.train, tokenizer=data.tokenizer, model=ModelInputs(vocabulary=8192), build=True, objective=NextToken())
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
import json, resource, sys, time
from launcher.data.batching import RankBatchSampler, StreamOrder
from launcher.data.encoder import make_encoder
from launcher.data.sources import find_parts
from launcher.data.streaming import StreamingDataset
from launcher.data.token_store import ModelInputs
from launcher.objectives.next_token import NextToken
from launcher.recipe.schema import Data
folder, step, length, positions = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
data = Data(train=(folder + "/text.jsonl",), tokenizer=folder + "/tokenizer", sequence_length=length)
started, cpu = time.perf_counter(), time.process_time()
sampler = RankBatchSampler(
    order=StreamOrder(), global_batch_size=1024, micro_batch_size=8, rank=0, ranks=1, first_step=step, steps=step + 1
)
stream = StreamingDataset(
    find_parts(data.train, kind="text"), make_encoder("text", data, tokenizer=data.tokenizer), sampler=sampler, data=data, seed=1,
    model=ModelInputs(), skipped_rows=None, objective=NextToken(),
)
# Positions after the step: one step later
start = {"order": stream.order, "samples": step * 1024, "positions": positions} if positions else None
*_, last = stream.starting(sampler, start)
seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
positions = [last["positions"][shard] for shard in sorted(last["positions"])]
print(json.dumps({"seconds": seconds, "cpu": cpu, "peak": peak, "positions": positions}))
"""


def stream(folder: Path, step: int, length: int) -> str:
    """Markdown table of the time and memory until a step of a streamed dataset."""
    lines = [
        "| data.streaming, global batch 1,024 | seconds | CPU seconds | peak memory |",
        "|---|---:|---:|---:|",
    ]
    before = run(
        STREAM, folder, step - 1, length, "null"
    )  # a checkpoint would contain these positions
    for what, at, positions in (
        ("to the first step", 0, None),
        (f"to step {step:,}, from a checkpoint's positions", step, before["positions"]),
        (f"to step {step:,}, without them", step, None),
    ):
        found = run(STREAM, folder, at, length, json.dumps(positions))
        lines.append(
            f"| {what} | {found['seconds']:.1f} | {found['cpu']:.1f} | {found['peak'] / 1024:.0f} MiB |"
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


def run(code: str, folder: Path, *arguments: object) -> dict[str, Any]:
    """Runs the code in a new process; returns the JSON that it prints and the total seconds."""
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *map(str, arguments)],
        cwd=ROOT,
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
    parser.add_argument("--stream", type=int, metavar="STEP")
    parser.add_argument(
        "--length", type=int, default=16, help="sequence length in tokens, with --stream"
    )
    arguments = parser.parse_args()
    if arguments.stream is not None:
        with tempfile.TemporaryDirectory(prefix="launcher-data-") as name:
            make_inputs(Path(name), arguments.megabytes)
            print(stream(Path(name), arguments.stream, arguments.length))
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
