"""Trains on the same data with different numbers of ranks, batching and packing.

    torchrun --nproc-per-node 2 data_worker.py FOLDER

Creates the data in FOLDER and writes results.json to it.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.rank_layout import RankLayout
from launcher.recipe.load import load_recipe
from launcher.training.evaluation import over_all
from launcher.training.setup import assemble
from tests.distributed.launching import end_worker
from tests.run_files import write_lines

SIZES = (
    "vocab_size: 64, hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, \
max_position_embeddings: 64, bos_token_id: 0, eos_token_id: 1, pad_token_id: 2"
)
MODELS = {
    "llama": "{model_type: llama, num_key_value_heads: 2, " + SIZES + "}",
    "mistral": "{model_type: mistral, num_key_value_heads: 2, sliding_window: 6, " + SIZES + "}",
    "bert": "{model_type: bert, hidden_dropout_prob: 0.0, attention_probs_dropout_prob: 0.0, "
    + SIZES
    + "}",
    "gpt2": "{model_type: gpt2, vocab_size: 64, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 64, resid_pdrop: 0.0, embd_pdrop: 0.0, \
attn_pdrop: 0.0}",
}
BASE = """
run: {name: data, max_steps: 4, seed: 7}
model: {config: %s}
data: {kind: tokens, train: FOLDER/rows.jsonl, sequence_length: 32, workers: 0, cache: FOLDER/cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {mixed_precision: null, kind: ddp}
optimizer: {learning_rate: 2.0e-3}
schedule: {warmup_steps: 2}
"""


def make_data(folder):
    generator = random.Random(5)
    for name, number in (("rows", 60), ("other", 9)):
        rows = []
        for index in range(number):
            ids = [generator.randrange(3, 64) for _ in range(generator.choice([2, 5, 9, 20, 31]))]
            labels = [-100 if place < len(ids) // 3 else token for place, token in enumerate(ids)]
            rows.append({"input_ids": ids, "labels": labels} if index % 2 else {"input_ids": ids})
        write_lines(folder / f"{name}.jsonl", rows)
    sizes = [(generator.choice([3, 9, 25]), generator.choice(["plain", "odd"])) for _ in range(40)]
    labelled = [
        "".join(generator.choices("abcdef ", k=size)) + f"x,{label}" for size, label in sizes
    ]
    (folder / "labelled.csv").write_text("\n".join(["text,label", *labelled, ""]))
    (folder / "texts").mkdir()
    for index in range(3):
        lengths = [generator.choice([3, 20, 90]) for _ in range(40)]
        words = ["".join(generator.choices("abcdefgh ", k=length)) for length in lengths]
        lines = [json.dumps({"text": text}) + "\n" for text in words]
        (folder / f"texts/{index}.jsonl").write_text("".join(lines))


class Worker:
    def __init__(self, folder):
        dist.init_process_group("gloo")
        self.folder, self.rank = folder, dist.get_rank()
        self.groups = {1: dist.new_group([0]), 2: dist.new_group([0, 1])}
        self.results = {}

    def assemble(self, overrides, *, ranks, model="llama"):
        file = self.folder / f"recipe_{self.rank}.yaml"
        file.write_text((BASE % MODELS[model]).replace("FOLDER", str(self.folder)))
        overrides = [override.replace("FOLDER", str(self.folder)) for override in overrides]
        recipe = load_recipe([f"recipe={file}", *overrides], ranks=ranks).recipe
        data_parallel = RankLayout(
            rank=self.rank, size=ranks, group=self.groups[ranks], device=torch.device("cpu")
        )
        return assemble(recipe, ranks=data_parallel, build_data=self.rank == 0)

    def train(self, name, overrides, *, ranks=2, model="llama"):
        """Trains and stores the losses, gradient norms and token counts of all steps."""
        started = time.monotonic()
        note = {"losses": [], "norms": [], "counts": [], "micro_batches": []}
        if self.rank < ranks:
            for step in self.assemble(overrides, ranks=ranks, model=model).all_steps:
                loss = step.loss.clone()
                dist.all_reduce(loss, group=self.groups[ranks])
                note["losses"].append(loss.item())
                note["norms"].append(step.grad_norm.item())
                note["counts"].append(step.batch.statistics.read()[:2])
                note["micro_batches"].append(len(step.batch.micro_batches))
                if step.metrics is not None:
                    parts = step.metrics.clone()
                    dist.all_reduce(parts, group=self.groups[ranks])
                    note.setdefault("parts", []).append(parts.tolist())
        self.done(name, note, started)

    def evaluate(self, name, overrides, *, ranks=2, model="llama"):
        """Stores the loss on all documents with the initial weights."""
        started, note = time.monotonic(), {}
        if self.rank < ranks:
            training = self.assemble(overrides, ranks=ranks, model=model)
            results = training.evaluator.evaluate(training.wrapped)
            whole = over_all(results)
            note = {
                "loss": whole.loss,
                "tokens": whole.tokens,
                "scores": whole.scores,
                "sets": {key: [one.loss, one.tokens] for key, one in results.items()},
            }
            note["described"] = training.data.training.describe()
        self.done(name, note, started)

    def done(self, name, note, started):
        dist.barrier()
        self.results[name] = note
        if self.rank == 0:
            print(f"{time.monotonic() - started:.2f} s  {name}", flush=True)


MIXTURE = "data.train={a: {files: FOLDER/rows.jsonl, weight: 3}, b: {files: FOLDER/other.jsonl, weight: 1}}"


def main(folder):
    torch.set_num_threads(1)
    if os.environ["RANK"] == "0":
        make_data(folder)
    worker = Worker(folder)
    dist.barrier()
    train, evaluate = worker.train, worker.evaluate

    train("mixture, 2 ranks", [MIXTURE])
    train("mixture, 1 rank", [MIXTURE, "batch.micro_batch_size=4"], ranks=1)

    unpacked = ["data.packing=false"]
    tokens = [*unpacked, "batch.micro_batch_size=null", "batch.micro_batch_tokens=48"]
    train("by rows, 1 rank", [*unpacked, "batch.micro_batch_size=8"], ranks=1)
    for strategy in ("ddp", "fsdp"):
        train(f"by tokens, 2 ranks, {strategy}", [*tokens, f"strategy.kind={strategy}"])
    train("by tokens, 1 rank, two passes", [*tokens, "run.max_steps=null", "run.epochs=2"], ranks=1)
    train("by tokens, 2 ranks, two passes", [*tokens, "run.max_steps=null", "run.epochs=2"])

    validation = ["data.validation=FOLDER/rows.jsonl"]
    for model in ("llama", "mistral", "gpt2"):
        for attention in ("sdpa", "eager"):
            setting = f"model.attention={attention}"
            evaluate(f"packed, {model}, {attention}", [*validation, setting], model=model)
        evaluate(f"not packed, {model}", [*validation, *unpacked], model=model)
    evaluate("two sets", ["data.validation={a: FOLDER/rows.jsonl, b: [FOLDER/other.jsonl]}"])
    settings = "streaming=true kind=text tokenizer=bytes shard_size=2KB sequence_length=48"
    stream = [f"data.{setting}" for setting in [*settings.split(), "train=FOLDER/texts"]]
    stream += ["model.config.vocab_size=260", "model.config.max_position_embeddings=64"]
    train("stream, 2 ranks", stream)
    train("stream, 1 rank", [*stream, "batch.micro_batch_size=4"], ranks=1)
    processes = ["data.workers=3", "batch.micro_batch_size=1"]
    train("stream, 2 ranks, loader processes", [*stream, *processes])
    train("stream, another seed", [*stream, "run.seed=8"])
    file = "FOLDER/labelled.csv"
    settings = f"kind=classification tokenizer=bytes train={file} validation={file}"
    labelled = [f"data.{setting}" for setting in [*settings.split(), "labels=[plain, odd]"]]
    labelled += ["model.task=sequence_classification", "model.config.vocab_size=260"]
    whole = [*labelled, "batch.micro_batch_size=8"]
    budget = ["micro_batch_size=null", "micro_batch_tokens=64"]
    budget = [*labelled, *(f"batch.{setting}" for setting in budget), "strategy.kind=fsdp"]
    for model in ("llama", "bert"):
        train(f"classes, {model}, 2 ranks", labelled, model=model)
        train(f"classes, {model}, 1 rank", whole, ranks=1, model=model)
        train(f"classes, {model}, 2 ranks, by tokens, fsdp", budget, model=model)
    evaluate("classes", labelled)
    evaluate("classes, 1 rank", whole, ranks=1)

    vision = "tests.distributed.vision"
    custom = [f"model.builder={vision}:model", f"data.builder={vision}:data", "run.epochs=2"]
    custom += ["model.config=null", "data.train=null", "run.max_steps=null"]
    custom += ["optimizer.learning_rate=2e-2"]
    deep = ["batch.micro_batch_size=8", "model.arguments={depth: 2}"]
    train("images, 1 rank", [*custom, *deep], ranks=1)
    train("images, 2 ranks", custom)
    checkpointed = ["strategy.kind=fsdp", "activation_checkpointing={mode: full}"]
    train("images, 2 ranks, fsdp", [*custom, *checkpointed])
    evaluate("images", custom)

    # All documents in one step: packing changes the rows, but neither the loss nor the gradient
    whole = ["run.max_steps=null", "run.epochs=1"]
    whole += ["batch.global_batch_size=64", "data.shuffle=false"]
    train("a step of all, not packed", [*whole, *unpacked])
    train("a step of all, packed", whole)
    offloaded = [*whole, *checkpointed, "strategy.cpu_offload={}"]
    train("a step of all, packed, offload and checkpointing", offloaded)
    end_worker(folder, worker.results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
