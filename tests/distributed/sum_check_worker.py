"""Compares losses with those of halves under several strategies, on two ranks.

    torchrun --nproc-per-node 2 sum_check_worker.py FOLDER

Rank 0 writes results.json.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from launcher.distributed import process_group
from launcher.distributed.environment import read_environment
from launcher.distributed.process_group import gather
from launcher.recipe.load import load_recipe
from launcher.training.setup import assemble
from launcher.training.sum_check import check_sum
from tests.distributed.launching import end_worker
from tests.unit.training.test_sum_check import RECIPE

STRATEGIES = {
    "fsdp": "{kind: fsdp, mixed_precision: null}",
    "fsdp, resharded": "{kind: fsdp, mixed_precision: null, reshard_after_forward: true}",
    "fsdp in bfloat16": "{kind: fsdp, mixed_precision: {param_dtype: bfloat16}}",
    "ddp": "{kind: ddp, mixed_precision: null}",
}


def steps(training):
    return [float(step.loss) for step in training.all_steps]


def main(folder):
    torch.set_num_threads(1)
    results = {}
    group = process_group.process_group(read_environment(), device="cpu", init_timeout=120)
    with group as (ranks, _):
        file = folder / f"recipe_{ranks.rank}.yaml"
        file.write_text(RECIPE)

        def make(strategy, loss, kind):
            words = [f"data.arguments.loss={loss}", f"model.arguments.kind={kind}"]
            words += [f"strategy={STRATEGIES[strategy]}", "batch.micro_batch_size=2"]
            recipe = load_recipe([f"recipe={file}", *words], ranks=2).recipe
            return assemble(recipe, ranks=ranks)

        for strategy in STRATEGIES:
            for loss, kind in (
                ("as_sum", "dropout"),
                ("as_mean", "plain"),
                ("as_sum", "batch_norm"),
            ):
                if kind == "batch_norm" and "bfloat16" in strategy:
                    continue  # torch has no batch norm of bfloat16 weights and float32 buffers
                training = make(strategy, loss, kind)
                module = training.wrapped.module
                buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
                state = torch.get_rng_state()
                verdicts = gather(check_sum(training).verdict, ranks.group)
                same = torch.equal(state, torch.get_rng_state())
                kept = all(torch.equal(b, buffers[name]) for name, b in module.named_buffers())
                checked, plain = steps(training), steps(make(strategy, loss, kind))
                results[f"{strategy}: {loss}, {kind}"] = {
                    "verdicts": verdicts,
                    "unchanged": gather(same and kept and checked == plain, ranks.group),
                }
        end_worker(folder, results)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
