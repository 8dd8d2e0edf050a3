"""Trains tiny models whose rows are divided over ranks, and on one rank.

    torchrun --nproc-per-node 4 row_worker.py FOLDER LAUNCH

LAUNCH is a key of row_cases.LAUNCHES. Writes to results.json, for each case: the largest relative
differences of losses, with the sums of layers of multi-token prediction, and of norms of gradients; and
the largest difference of a parameter's gradient in the first step, relative to all gradients and to its
own.
"""

import random
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from launcher.distributed.rank_layout import RankLayout
from launcher.models.names import clean_name
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from tests.distributed.launching import end_worker
from tests.distributed.row_cases import LAUNCHES, MODELS, ROWS, name_of, text_of
from tests.run_files import write_lines

STEPS = 3
RECIPE = f"""
run: {{name: rows, max_steps: {STEPS}, seed: 7}}
model: {{config: CONFIG, chunked_loss: false}}
data: {{kind: tokens, train: FOLDER/TRAIN.jsonl, sequence_length: 64, shuffle: false, workers: 0, cache: FOLDER/cache}}
batch: {{global_batch_size: 4, micro_batch_size: 1}}
strategy: {{mixed_precision: null, kind: fsdp}}
optimizer: {{learning_rate: 2.0e-3}}
schedule: {{warmup_steps: {STEPS}}}
"""
OF_REFERENCE = ("data.packing", "data.weights_column", "model", "lora")


def documents(lengths):
    """Rows of ids, of documents with these numbers of tokens in turn."""
    generator = random.Random(3)
    counts = [generator.choice(lengths) for _ in range(90)]
    return [{"input_ids": [generator.randrange(3, 96) for _ in range(n)]} for n in counts]


class Worker:
    def __init__(self, folder):
        dist.init_process_group("gloo")
        self.folder, self.rank = folder, dist.get_rank()
        sizes = range(1, dist.get_world_size() + 1)
        self.groups = {size: dist.new_group(list(range(size))) for size in sizes}
        if self.rank == 0:
            for name, lengths in ROWS.items():
                rows, weights = documents(lengths), random.Random(4)
                for row in rows if name == "weighted" else ():
                    row["weights"] = [weights.random() for _ in row["input_ids"]]
                write_lines(folder / f"{name}.jsonl", rows)
        self.references, self.results = {}, {}
        dist.barrier()

    def train(self, model, rows, ranks, overrides):
        """Losses, norms, and the gradients of the first step; None on other ranks."""
        if self.rank >= ranks:
            return None
        file = self.folder / f"recipe_{self.rank}.yaml"
        text = RECIPE.replace("CONFIG", text_of(MODELS[model])).replace("TRAIN", rows)
        file.write_text(text.replace("FOLDER", str(self.folder)))
        recipe = load_recipe([f"recipe={file}", *overrides], ranks=ranks).recipe
        group = self.groups[ranks]
        layout = RankLayout(rank=self.rank, size=ranks, group=group, device=torch.device("cpu"))
        training = assemble(recipe, ranks=layout, build_data=self.rank == 0)
        gradients, module = {}, training.wrapped.module

        def keep(*_):
            for name, parameter in () if gradients else module.named_parameters():
                found = parameter.grad
                if found is not None:
                    found = found.full_tensor() if isinstance(found, DTensor) else found
                    gradients[clean_name(name)] = found.clone()

        training.optimizer.register_step_pre_hook(keep)
        losses, norms = [], []
        for step in training.all_steps:
            loss = step.loss.clone().view(1)
            if step.metrics is not None:
                loss = torch.cat([loss, step.metrics[~step.metrics.isnan()]])
            dist.all_reduce(loss, group=group)
            losses += loss.tolist()
            norms.append(step.grad_norm.item())
        return losses, norms, gradients

    def compare(self, name, case):
        model, rows, heads, groups, overrides = case
        own = [each for each in overrides if each.startswith(OF_REFERENCE)]
        key = (model, rows, *own)
        if key not in self.references:
            self.references[key] = self.train(model, rows, 1, ["strategy.kind=ddp", *own])
        dist.barrier()
        sizes = [f"strategy.context_parallel_size={heads * groups}"]
        sizes.append(f"strategy.context_parallel_ring={groups}")
        found = self.train(model, rows, dist.get_world_size(), [*sizes, *overrides])
        if self.rank == 0:
            expected = self.references[key]
            pairs = [zip(*both, strict=True) for both in zip(found[:2], expected[:2], strict=True)]
            worst = [max(abs(a - b) / abs(b) for a, b in each) for each in pairs]
            both = {
                each: (found[2][each], want)
                for each, want in expected[2].items()
                if each in found[2]
            }
            off = {each: float((a - b).norm()) for each, (a, b) in both.items()}
            whole = float(sum(b.square().sum() for _, b in both.values())) ** 0.5
            worst.append(max(off.values()) / whole)
            worst.append(
                max(
                    each and each / float(b.norm())  # an adapter's first factor has none at first
                    for each, (_, b) in zip(off.values(), both.values(), strict=True)
                )
            )
            self.results[name] = worst
            print(f"{name}: " + " ".join(f"{each:.1e}" for each in worst), flush=True)
        dist.barrier()


def main(folder, launch):
    torch.set_num_threads(1)
    worker = Worker(folder)
    for case in LAUNCHES[launch]:
        worker.compare(name_of(*case), case)
    end_worker(folder, worker.results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
