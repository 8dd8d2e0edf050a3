"""Trains models with recurrent layers on packed rows, and in a plain loop over single documents.

    torchrun --nproc-per-node 2 recurrent_worker.py FOLDER [CASE ...]

Reads train.jsonl from FOLDER, and writes losses and gradient norms to results.json.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import transformers

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from tests.distributed.launching import end_worker
from tests.unit.models.recurrent_families import FAMILIES

STEPS, BATCH, RATE = 3, 8, 5e-3
RECIPE = f"""
run: {{name: recurrent, max_steps: {STEPS}, seed: 7}}
model: {{config: CONFIG, chunked_loss: false}}
data: {{kind: tokens, train: FOLDER/train.jsonl, sequence_length: 48, shuffle: false, workers: 0, cache: FOLDER/cache}}
batch: {{global_batch_size: {BATCH}, micro_batch_size: 2}}
strategy: {{mixed_precision: null}}
optimizer: {{learning_rate: {RATE}, weight_decay: 0.0}}
schedule: {{warmup_steps: {STEPS}}}
"""
CASES = {
    "nemotron_h fsdp": ["strategy.kind=fsdp"],
    "nemotron_h fsdp full": ["strategy.kind=fsdp", "activation_checkpointing={mode: full}"],
    "nemotron_h ddp": ["strategy.kind=ddp"],
    "qwen3_5_text fsdp": ["strategy.kind=fsdp"],
    # With groups of FSDP for A_log and dt_bias in float32
    "qwen3_5_text fsdp bfloat16": ["strategy={kind: fsdp, mixed_precision: {}}"],
    "qwen3_5_text hybrid bfloat16": ["strategy={kind: fsdp, mixed_precision: {}, replicate: 2}"],
}
UNCHANGED = ["optimizer.learning_rate=1e-12", "run.max_steps=10"]
"""Steps that hardly change the weights: with float16 the first ones are skipped, until the scale of
the loss has settled."""
HALF = "strategy={kind: fsdp, mixed_precision: {param_dtype: bfloat16}, SIZE: 2}"
IN_FLOAT32 = {
    "qwen3_5_text float16": [
        "strategy={kind: fsdp, mixed_precision: {param_dtype: float16}}",
        *UNCHANGED,
    ],
    "qwen3_5_text float32": ["strategy={kind: fsdp, mixed_precision: null}", *UNCHANGED],
    "qwen3_5_text compiled": [
        "strategy={kind: fsdp, mixed_precision: {}}",
        "activation_checkpointing={mode: full}",
        "model.compile=true",
    ],
    "qwen3_5_text tensor": [HALF.replace("SIZE", "tensor_parallel_size")],
    "qwen3_5_moe_text experts": [HALF.replace("SIZE", "expert_parallel_size")],
    "nemotron_h experts": [HALF.replace("SIZE", "expert_parallel_size")],
    "nemotron_h tensor": [HALF.replace("SIZE", "tensor_parallel_size")],
}
"""Combinations of groups in float32 with what also changes weights or how they are called."""


def start_ranks():
    """The ranks of the workers, over gloo."""
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    return RankLayout(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        group=dist.group.WORLD,
        device=torch.device("cpu"),
    )


def train(training):
    losses, norms = [], []
    for step in training.all_steps:
        loss = step.loss.clone()
        dist.all_reduce(loss)
        losses.append(loss.item())
        norms.append(step.grad_norm.item())
    return {"losses": losses, "norms": norms}


def plain_loop(model, dataset):
    """AdamW over the documents of the same rows, one after the other, on the model's device."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, foreach=False
    )
    losses, norms, documents = [], [], 0
    for step in range(STEPS):
        total, count = torch.zeros((), device=device), 0
        for index in range(step * BATCH, (step + 1) * BATCH):
            row = dataset[index % len(dataset)]
            starts = np.flatnonzero(row["position_ids"] == 0)[1:]
            parts = (np.split(row[name], starts) for name in ("input_ids", "targets"))
            for ids, targets in zip(*parts, strict=True):
                ids, targets = (torch.from_numpy(part).to(device) for part in (ids, targets))
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
                total = total + torch.nn.functional.cross_entropy(
                    logits, targets, ignore_index=-100, reduction="sum"
                )
                count += int((targets != -100).sum())
                documents += 1
        loss = total / count
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        for group in optimizer.param_groups:
            group["lr"] = RATE * (step + 1) / STEPS
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses, "norms": norms, "documents": documents}


def main(folder, *chosen):
    ranks = start_ranks()
    results = {}
    for case in chosen or CASES:
        overrides = (CASES | IN_FLOAT32)[case]
        family = case.split()[0]
        config = {"model_type": family} | FAMILIES[family]
        if ranks.rank == 0:
            text = RECIPE.replace("FOLDER", str(folder)).replace("CONFIG", json.dumps(config))
            (folder / f"{family}.yaml").write_text(text)
        dist.barrier()
        words = [f"recipe={folder}/{family}.yaml", *overrides]
        recipe = load_recipe(words, ranks=ranks.size).recipe
        try:
            training = assemble(recipe, ranks=ranks, build_data=ranks.rank == 0)
        except RecipeError as error:
            results[case] = {"refused": str(error)}
            continue
        if case.endswith(" ddp") or family not in results:
            plain = assemble(
                load_recipe([words[0], "strategy.kind=ddp"], ranks=ranks.size).recipe,
                ranks=ranks,
            )
            model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.for_model(**config), dtype=torch.float32
            ).train()
            weights = plain.wrapped.module.state_dict()
            model.load_state_dict({name.removeprefix("module."): weights[name] for name in weights})
            results[family] = plain_loop(model, plain.data.training)
        results[case] = train(training) | {
            "document_masking": training.data.training.inputs.document_masking,
            "description": training.wrapped.description(),
        }
    end_worker(folder, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
