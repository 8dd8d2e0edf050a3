"""Trains tiny models whose layers are divided over ranks, and on one rank.

    torchrun --nproc-per-node 4 tensor_worker.py FOLDER

Reads train.jsonl from FOLDER and writes losses, gradient norms and deviations to results.json. A
DeviceMesh is collective over all processes, so each variant runs on all four ranks.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.models import chunked_loss
from launcher.models.safetensors_files import StoredTensors
from launcher.strategies.base import WrappedModel
from tests.distributed.equivalence_worker import LLAMA, weights
from tests.distributed.expert_worker import LayoutWorker, checkpoint_pairs

QWEN3 = (
    LLAMA.replace("llama", "qwen3")
    .replace("key_value_heads: 2", "key_value_heads: 1, head_dim: 8")
    .replace("embeddings: false", "embeddings: true")
)
WHOLE_HEADS = LLAMA.replace("num_key_value_heads: 2, ", "")
TOKENS = "pad_token_id: 0, eos_token_id: 1, bos_token_id: 2, tie_"
MODELS = {
    "llama": LLAMA,
    "llama, 67 tokens": LLAMA.replace("size: 64", "size: 67"),
    "qwen3, one key head, tied": QWEN3,
    "qwen3, two key heads": QWEN3.replace("heads: 1", "heads: 2").replace(": true", ": false"),
    "qwen2, biases": LLAMA.replace("llama", "qwen2"),
    "mistral, windows": LLAMA.replace("llama", "mistral").replace(
        "tie_", "sliding_window: 9, tie_"
    ),
    "gemma3": LLAMA.replace("llama", "gemma3_text").replace(
        "tie_word_embeddings: false",
        "head_dim: 8, sliding_window: 9, " + TOKENS + "word_embeddings: true",
    ),
    "phi3": LLAMA.replace("llama", "phi3").replace("tie_", TOKENS),
    "olmo2": LLAMA.replace("llama", "olmo2"),
    "gpt_neox": WHOLE_HEADS.replace("llama", "gpt_neox"),
}
TP = "strategy.tensor_parallel_size="
LORA = ["lora={rank: 4, target_modules: [q_proj, k_proj, o_proj, up_proj, down_proj]}"]
VARIANTS = {
    "fsdp 2 x 2": [TP + "2"],
    "4": [TP + "4"],
    "context 2 x 2": [TP + "2", "strategy.context_parallel_size=2"],
    "2 copies": [TP + "2", "strategy.replicate=2"],
    "checkpointing": [TP + "2", "activation_checkpointing={mode: full}"],
    "selective": [TP + "2", "activation_checkpointing={mode: selective}"],
    "held back": [TP + "2", "strategy.sync_every_micro_batch=false"],
    "kept": [TP + "2", "strategy.reshard_after_backward=false"],
    "offload": [TP + "2", "strategy.cpu_offload={pin_memory: true}"],
    "state offloaded": [TP + "2", "strategy.cpu_offload={what: optimizer}"],
    "whole logits": [TP + "2", "model.chunked_loss=false"],
    "sgd": [TP + "4", "optimizer.name=sgd", "optimizer.learning_rate=0.03"],
    "lora": [TP + "2", *LORA],
    "lora on 4": [TP + "4", *LORA],
}
OF_REFERENCE = ("lora", "optimizer")
"""A variant with one of these sections is compared with one rank that has it, too."""
ONE_KEY_HEAD = "qwen3, one key head, tied"
CASES = [
    *((ONE_KEY_HEAD, variant) for variant in VARIANTS),
    *(("llama", variant) for variant in ("fsdp 2 x 2", "context 2 x 2", "lora", "lora on 4")),
    *((model, "fsdp 2 x 2") for model in MODELS if model not in ("llama", ONE_KEY_HEAD)),
    *((model, "4") for model in ("llama, 67 tokens", "qwen3, two key heads", "gemma3", "phi3")),
]
QUICK_CASES = [(ONE_KEY_HEAD, "4"), ("llama", "context 2 x 2")]
"""They are trained by expert_worker.py."""


def reference_of(model, variant):
    """The case on one rank that a case is compared with: a name, and its overrides."""
    own = [o for o in VARIANTS[variant] if o.startswith(OF_REFERENCE)]
    return " ".join([model, *own]), own


def parts_not_summed(training):
    """Injects a fault: q_norm and k_norm get the mean over ranks, each of which has some heads."""
    training.wrapped._partial = set()


def counted_twice(training):
    """Injects a fault: what ranks that divide layers have in common counts for each of them."""
    wrapped = training.wrapped

    def squared_norm(layers):
        squared = WrappedModel.grad_norm(wrapped).square()
        dist.all_reduce(squared, group=layers.mesh.get_group("tensor"))
        return squared

    wrapped._joint_squared_norm = squared_norm


FAULTS = {"mutation: not summed": parts_not_summed, "mutation: twice": counted_twice}


def train_cases(worker, cases):
    def train(name, model, overrides, *, ranks, rows, mutate=None):
        data = [f"data.validation={worker.folder}/train.jsonl", f"batch.micro_batch_size={rows}"]
        data.append("data.packing=true")
        options = {"ranks": ranks, "config": MODELS[model], "compare": False, "mutate": mutate}
        worker.train(name, [*overrides, *data], evaluate=True, **options)

    references = {}
    for model, variant in cases:
        name, own = reference_of(model, variant)
        if name not in references:
            train(name, model, ["strategy.kind=ddp", *own], ranks=1, rows=4)
            references[name] = worker.last if worker.rank == 0 else None
        train(f"{model} {variant}", model, VARIANTS[variant], ranks=4, rows=2)
        if worker.rank == 0:
            reference = references[name]
            worker.results[f"{model} {variant}"]["from_one_rank"] = max(
                (worker.last[k] - reference[k]).abs().max().item() for k in reference
            )
    for name, fault in FAULTS.items():
        train(name, ONE_KEY_HEAD, [TP + "2"], ranks=4, rows=2, mutate=fault)


def pretrained(worker):
    """Loads a pretrained folder straight into divided layers, trains a step, and exports it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, read = worker.folder / "pretrained", [0]
    if worker.rank == 0:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**yaml.safe_load(WHOLE_HEADS))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    original = StoredTensors._file

    class Counted:
        """A slice of a file that counts the elements that are read."""

        def __init__(self, stored):
            self.stored = stored

        def __getitem__(self, index):
            values = self.stored[index]
            read[0] += values.numel()
            return values

    class File:
        def __init__(self, file):
            self.get_tensor = file.get_tensor
            self.get_slice = lambda name: Counted(file.get_slice(name))

    StoredTensors._file = lambda self, path: File(original(self, path))
    expected = None
    layouts = {"1": (1, []), "fsdp 2 x 2": (4, [TP + "2"]), "4": (4, [TP + "4"])}
    for name, (ranks, overrides) in layouts.items():
        read[0] = 0
        own = ["model.config=null", f"model.path={folder}", "run.max_steps=1", *overrides]
        training = worker.train_one([*own, "strategy.kind=fsdp"], ranks=ranks)
        if training is None:
            continue
        trained, out = weights(training), worker.folder / f"exported {name}"
        training.export(out)
        if worker.rank == 0:
            expected = expected or trained
            exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
            worker.results[f"pretrained {name}"] = {
                "read": read[0],
                "from_one_rank": max(
                    (trained[k] - expected[k]).abs().max().item() for k in trained
                ),
                "exported": all(torch.equal(exported[k], trained[k]) for k in trained),
            }
    StoredTensors._file = original
    dist.barrier()


def main(folder):
    # Chunks of 16 vocabulary entries
    chunked_loss.WIDTH_MULTIPLE = chunked_loss.CHUNK_ELEMENTS = 16
    worker = LayoutWorker(folder, MODELS[ONE_KEY_HEAD])
    worker.run_plain_loop = lambda training: None  # the reference is one rank
    train_cases(worker, CASES)
    layouts = {
        "1 rank": (1, []),
        "no division": (4, []),
        **{name: (4, VARIANTS[name]) for name in ("fsdp 2 x 2", "4", "2 copies", "context 2 x 2")},
    }
    checkpoint_pairs(worker, layouts)
    worker.config = WHOLE_HEADS
    pretrained(worker)
    if worker.rank == 0:
        (folder / "results.json").write_text(json.dumps(worker.results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # like the launcher: threads of torch can abort a normal exit of the interpreter


if __name__ == "__main__":
    main(Path(sys.argv[1]))
