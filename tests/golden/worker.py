"""Trains the cases and writes what they compute, exactly.

    torchrun --nproc-per-node RANKS worker.py FOLDER [CASE ...]

FOLDER has the data of `cases.write_data`. Rank 0 writes FOLDER/golden.txt: for each case its losses and
metrics of each step, gradient norms, evaluations and answers; a digest of all tensors of the model, the
optimizer and their names, as checkpoints have them; and the numbers of collectives in training and in
evaluation.
"""

import gc
import hashlib
import os
import sys
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.checkpoint.state import model_and_optimizer
from launcher.distributed.rank_layout import RankLayout
from launcher.models import head as head_module
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from tests.golden.cases import CASES, RECIPES, TWO_RANKS, recipe_arguments

CHUNK = 2**13
"""Elements of a chunk of logits, where the loss has small chunks."""


class Collectives(TorchDispatchMode):
    """Counts calls of collectives."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace in ("c10d", "_c10d_functional"):
            self.counts[function.__name__.partition(".")[0].strip("_")] += 1
        return function(*args, **(kwargs or {}))

    def __str__(self):
        return ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items())) or "none"


def numbers(values):
    """All digits of float32 numbers."""
    return " ".join(f"{float(value):.9g}" for value in values)


def digest(tensors):
    """Of all tensors and their names; of shards of all ranks together."""
    total = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        total.update(f"{name} {tuple(whole.shape)}\n".encode())
        total.update(whole.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()[:16]


def lines_of(name, ranks):
    """What a case computes, in lines."""
    arguments, small = recipe_arguments(name, ranks.size)
    chunk = CHUNK if small else DEFAULT_CHUNK
    for path, module in list(sys.modules.items()):
        if path.startswith("launcher.") and hasattr(module, "CHUNK_ELEMENTS"):
            vars(module)["CHUNK_ELEMENTS"] = chunk
    torch.manual_seed(0)
    recipe = load_recipe(arguments, ranks=ranks.size).recipe
    training = assemble(recipe, ranks=ranks, build_data=ranks.rank == 0)
    losses, norms = [], []
    with Collectives() as collectives:
        for step in training.all_steps:
            total = step.loss.detach().clone().view(1)
            if step.metrics is not None:
                total = torch.cat([total, step.metrics])
            dist.all_reduce(total)
            losses.append(total.tolist())
            norms.append(step.grad_norm.item())
    for column, values in enumerate(zip(*losses, strict=True)):
        yield f"{'losses' if column == 0 else f'metric {column}'}: {numbers(values)}"
    yield f"norms: {numbers(norms)}"
    yield f"collectives: {collectives}"
    if training.evaluator is not None:
        with Collectives() as collectives:
            found = training.evaluator.evaluate(training.wrapped)
        for evaluated in found.values():
            scores = numbers([evaluated.loss, *evaluated.scores.values()])
            answers = "".join(f" {sample['answer']!r}" for sample in evaluated.samples)
            yield f"evaluation: {scores}, {evaluated.tokens} tokens{answers}"
        yield f"collectives of the evaluation: {collectives}"
    yield f"checkpoint: {digest(model_and_optimizer(training.wrapped.module, training.optimizer))}"


DEFAULT_CHUNK = head_module.CHUNK_ELEMENTS


def main():
    folder, *names = sys.argv[1:]
    os.chdir(folder)
    sys.path.insert(0, folder)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = RankLayout(rank=rank, size=size, group=dist.group.WORLD, device=torch.device("cpu"))
    parts = []
    for name in names or [*CASES, *(TWO_RANKS if size > 1 else ()), *RECIPES]:
        parts.append("\n".join([name, *(f"  {line}" for line in lines_of(name, layout))]))
        gc.collect()
        if rank == 0:
            Path("golden.txt").write_text("\n\n".join(parts) + "\n")
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # threads of gloo may outlive the interpreter


if __name__ == "__main__":
    main()
