"""Trains tiny mixtures of experts whose experts are divided over ranks, and on one rank.

    torchrun --nproc-per-node 4 expert_worker.py FOLDER

Reads train.jsonl from FOLDER and writes losses, gradient norms and deviations to results.json. A
DeviceMesh is collective over all processes, so each variant runs on all four ranks.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.checkpoint.reader import load
from launcher.checkpoint.state import model_and_optimizer, rank_state
from launcher.checkpoint.writer import Checkpointer
from launcher.distributed.process_group import DataParallel
from launcher.models import chunked_loss, experts
from launcher.models.safetensors_files import StoredTensors
from launcher.recipe import schema
from launcher.training.setup import assemble
from tests.distributed.equivalence_worker import EXPERTS, LLAMA, Worker, unsharded, weights

QWEN3 = (
    LLAMA.replace("llama", "qwen3_moe")[:-1]
    + ", head_dim: 8, num_experts: 8, num_experts_per_tok: 2, moe_intermediate_size: 16}"
)
DEEPSEEK = (
    LLAMA.replace("llama", "deepseek_v3").replace("value_heads: 2", "value_heads: 4")[:-1]
    + ", n_routed_experts: 4, n_group: 1, topk_group: 1, num_experts_per_tok: 2, moe_intermediate_size: 16, \
first_k_dense_replace: 1, q_lora_rank: 8, kv_lora_rank: 8, qk_rope_head_dim: 8, qk_nope_head_dim: 8, v_head_dim: 8}"
)
GPT_OSS = (
    LLAMA.replace("llama", "gpt_oss")[:-1]
    + ", head_dim: 8, num_local_experts: 4, num_experts_per_tok: 2}"
)
AUXILIARY = "mixtral, auxiliary loss"
"""Its loss depends on which rows a rank has, so that it is compared with four ranks without a division."""
MODELS = {
    "qwen3_moe": QWEN3,
    AUXILIARY: EXPERTS,
    "mixtral": EXPERTS.replace("logits: true", "logits: false"),
    "mixtral, 6 experts": EXPERTS.replace("logits: true", "logits: false").replace(
        "experts: 4", "experts: 6"
    ),
    "deepseek_v3": DEEPSEEK,
    "gpt_oss": GPT_OSS,
}
EP = "strategy.expert_parallel_size="
VARIANTS = {
    "2 of 4": [EP + "2"],
    "4 of 4": [EP + "4"],
    "2, 2 copies": [EP + "2", "strategy.replicate=2"],
    "2, context 2": [EP + "2", "strategy.context_parallel_size=2"],
    "checkpointing": [EP + "2", "activation_checkpointing={mode: full}"],
    "selective": [EP + "4", "activation_checkpointing={mode: selective}"],
    "held back": [EP + "2", "strategy.sync_every_micro_batch=false"],
    "kept": [EP + "4", "strategy.reshard_after_backward=false"],
    "offload": [EP + "2", "strategy.cpu_offload={pin_memory: true}"],
    "state offloaded": [EP + "2", "strategy.cpu_offload={what: optimizer}"],
    "lora": [EP + "2", "lora={rank: 4}"],
    "muon": [EP + "2", "optimizer.name=muon", "optimizer.momentum=0.95"],
    "sgd": [EP + "4", "optimizer.name=sgd", "optimizer.learning_rate=0.03"],
    "int8": [EP + "2", "optimizer.state_dtype=int8"],
}
OF_REFERENCE = ("lora", "optimizer")
"""A variant with one of these sections is compared with one rank that has it, too."""
CASES = [
    *(("qwen3_moe", variant) for variant in VARIANTS),
    ("mixtral", "4 of 4"),
    (AUXILIARY, "2 of 4"),
    ("mixtral, 6 experts", "2 of 4"),
    ("deepseek_v3", "2 of 4"),
    ("gpt_oss", "2 of 4"),
]
QUICK_CASES = [("qwen3_moe", "2 of 4"), ("deepseek_v3", "4 of 4")]


def reference_of(model, variant):
    """The case on one rank that a case is compared with: a name, and its overrides."""
    own = [o for o in VARIANTS[variant] if o.startswith(OF_REFERENCE)]
    return " ".join([model, *own]), own


def undivided_gradients(training):
    """Injects a fault: gradients of experts are not divided by the ranks of a group."""
    experts._DividedGradient.backward = staticmethod(lambda ctx, gradient: (gradient, None))


def train_cases(worker, cases):
    def train(name, model, overrides, *, ranks, rows, mutate=None):
        data = [f"data.validation={worker.folder}/train.jsonl", f"batch.micro_batch_size={rows}"]
        data.append(f"data.packing={str(model != 'gpt_oss').lower()}")
        strategy = [] if "strategy.kind=ddp" in overrides else ["strategy.kind=fsdp"]
        options = {"ranks": ranks, "config": MODELS[model], "compare": False, "mutate": mutate}
        worker.train(name, [*strategy, *overrides, *data], evaluate=True, **options)

    references = {}
    for model, variant in cases:
        name, own = reference_of(model, variant)
        if name not in references:
            ranks, rows = (4, 2) if model == AUXILIARY else (1, 4)
            train(name, model, ["strategy.kind=ddp", *own], ranks=ranks, rows=rows)
            references[name] = worker.last if worker.rank == 0 else None
        train(f"{model} {variant}", model, VARIANTS[variant], ranks=4, rows=2)
        if worker.rank == 0:
            reference = references[name]
            worker.results[f"{model} {variant}"]["from_one_rank"] = max(
                (worker.last[k] - reference[k]).abs().max().item() for k in reference
            )
    before = experts._DividedGradient.backward
    options = {"ranks": 4, "rows": 2, "mutate": undivided_gradients}
    train("mutation: undivided", "qwen3_moe", [EP + "2"], **options)
    experts._DividedGradient.backward = before


def checkpoint_pairs(worker, layouts):
    """Loads the checkpoint of each layout (ranks, overrides) into each other one, exactly."""
    trained = {}
    for number, (name, (ranks, overrides)) in enumerate(layouts.items()):
        kept = [f"run.seed={number}", "run.max_steps=1", "strategy.kind=fsdp", *overrides]
        trained[name] = worker.train_one(kept, ranks=ranks)
    for source, (ranks, _) in layouts.items():
        shared: list = [None, None]
        if worker.rank < ranks:
            training, group = trained[source], worker.groups[ranks]
            tensors = model_and_optimizer(training.wrapped.module, training.optimizer)
            writer = Checkpointer(
                worker.folder / source.replace(" ", "_"),
                schema.Checkpoint(asynchronous=False),
                group=group,
                device=torch.device("cpu"),
                optimizer=training.optimizer,
            )
            local = rank_state(training.wrapped.module, torch.device("cpu"))
            writer.save(1, tensors, state={"step": 1}, local=local)
            (done,) = writer.finish()
            assert done.error is None, done.error
            shared = [whole(tensors), str(done.path)]
        dist.broadcast_object_list(shared, src=0)
        expected, path = shared
        for target, (ranks, _) in layouts.items():
            if target != source and worker.rank < ranks:
                training, group = trained[target], worker.groups[ranks]
                tensors = model_and_optimizer(training.wrapped.module, training.optimizer)
                with torch.no_grad():
                    for tensor in tensors.values():
                        local_part(tensor).fill_(7.0)
                load(Path(path), tensors, group=group)
                loaded = whole(tensors)
                equal = all(torch.equal(loaded[name], expected[name]) for name in expected)
                worker.results[f"checkpoint {source} -> {target}"] = {"equal": equal}
        dist.barrier()


def pretrained(worker):
    """Loads a pretrained folder straight into divided experts, trains a step, and exports it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder, read = worker.folder / "pretrained", set()
    if worker.rank == 0:
        torch.manual_seed(0)
        config = AutoConfig.for_model(**yaml.safe_load(MODELS["mixtral"]))
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    dist.barrier()
    original = StoredTensors.read

    def recorded(self, name):
        read.update(re.findall(r"layers.0.*experts\.(\d+)", name))
        return original(self, name)

    StoredTensors.read = recorded
    expected = None
    for name, ranks, overrides in (("1", 1, []), ("4 of 4", 4, [EP + "4"]), ("2", 4, [EP + "2"])):
        read.clear()
        own = ["model.config=null", f"model.path={folder}", "run.max_steps=1", *overrides]
        training = worker.train_one([*own, "strategy.kind=fsdp"], ranks=ranks)
        if training is None:
            continue
        experts_read = [None] * ranks
        dist.all_gather_object(experts_read, sorted(read), group=worker.groups[ranks])
        trained, out = weights(training), worker.folder / f"exported {name}"
        training.export(out)
        if worker.rank == 0:
            expected = expected or trained
            exported = AutoModelForCausalLM.from_pretrained(out).state_dict()
            worker.results[f"pretrained {name}"] = {
                "experts": experts_read,
                "from_one_rank": max(
                    (trained[k] - expected[k]).abs().max().item() for k in trained
                ),
                "exported": all(torch.equal(exported[k], trained[k]) for k in trained),
            }
    StoredTensors.read = original
    dist.barrier()


def local_part(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensors):
    return {name: unsharded(tensor).clone() for name, tensor in tensors.items()}


class LayoutWorker(Worker):
    def __init__(self, folder, config):
        super().__init__(folder)
        self.config = config

    def train_one(self, overrides, *, ranks):
        """Trains the model of the config, and returns the training; None on other ranks."""
        training = None
        if self.rank < ranks:
            training = assemble(
                self.recipe(overrides, ranks, 1, self.config),
                ranks=DataParallel(
                    rank=self.rank, size=ranks, group=self.groups[ranks], device=torch.device("cpu")
                ),
                build_data=self.rank == 0,
            )
            for _ in training.all_steps:
                pass
        dist.barrier()
        return training


def main(folder, cases):
    # Chunks of 16 vocabulary entries
    chunked_loss.WIDTH_MULTIPLE = chunked_loss.CHUNK_ELEMENTS = 16
    worker = LayoutWorker(folder, QWEN3)
    worker.run_plain_loop = lambda training: None  # the reference is one rank
    train_cases(worker, QUICK_CASES if cases == "quick" else CASES)
    if cases == "quick":  # one launch for both
        from tests.distributed import tensor_worker

        tensor_worker.train_cases(worker, tensor_worker.QUICK_CASES)
    if cases != "quick":
        layouts = {name: (4, VARIANTS[name]) for name in ("2 of 4", "4 of 4", "2, 2 copies")}
        checkpoint_pairs(worker, {"1 rank": (1, []), "no division": (4, []), **layouts})
        pretrained(worker)
    if worker.rank == 0:
        (folder / "results.json").write_text(json.dumps(worker.results))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # like the launcher: threads of torch can abort a normal exit of the interpreter


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
