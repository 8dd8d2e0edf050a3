"""Trains many small recipes on null GPUs in one torchrun and records placement, dtypes and memory.

    torchrun --nproc-per-node N matrix_worker.py FOLDER

FOLDER contains train.jsonl and cases.json, a list of `Case`s as dictionaries. Each rank writes
results_RANK.json to it, and marks each case and each step in the devices' log.
"""

import functools
import gc
import itertools
import json
import os
import sys
import time
import traceback
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

STRATEGIES = {
    "ddp": ["strategy.kind=ddp"],
    "fsdp": ["strategy.kind=fsdp"],
    "offload": ["strategy.kind=fsdp", "strategy.cpu_offload={pin_memory: true}"],
    "hybrid": ["strategy.kind=fsdp", "strategy.replicate=2"],
}
CHECKPOINTING = {
    "none": "null",
    "full": "{mode: full}",
    "selective": "{mode: selective}",
    "offloaded": "{mode: full, offload_to_cpu: true}",
}
PRECISION = {
    "bfloat16": "{param_dtype: bfloat16, reduce_dtype: float32}",
    "float16": "{param_dtype: float16, reduce_dtype: float32}",
    "float32": "null",
}
FACTORS = (tuple(STRATEGIES), tuple(CHECKPOINTING), tuple(PRECISION), (True, False), (True, False))
STEPS, MICRO_BATCHES, ROWS, TOKENS = 3, 2, 2, 256
LAYERS = 2
RECIPE = f"""
run: {{name: matrix, max_steps: {STEPS}, seed: 7}}
model: {{config: {{model_type: llama, vocab_size: 512, hidden_size: 256, intermediate_size: 512, num_hidden_layers: {LAYERS},
  num_attention_heads: 4, num_key_value_heads: 2, tie_word_embeddings: false}}}}
data: {{kind: tokens, train: FOLDER/train.jsonl, cache: FOLDER/cache, sequence_length: {TOKENS}, workers: 0}}
optimizer: {{learning_rate: 1.0e-4}}
"""


@dataclass(frozen=True)
class Case:
    """One combination of settings."""

    strategy: str
    checkpointing: str
    precision: str
    packed: bool
    lora: bool
    ranks: int = 2

    @property
    def name(self) -> str:
        words = [
            self.strategy,
            self.checkpointing,
            self.precision,
            "packed" if self.packed else "padded",
        ]
        return "-".join([*words, "lora" if self.lora else "whole", str(self.ranks)])

    def overrides(self) -> list[str]:
        return [
            *STRATEGIES[self.strategy],
            f"activation_checkpointing={CHECKPOINTING[self.checkpointing]}",
            f"strategy.mixed_precision={PRECISION[self.precision]}",
            f"data.packing={str(self.packed).lower()}",
            f"lora={'{rank: 8}' if self.lora else 'null'}",
            f"batch.micro_batch_size={ROWS}",
            f"batch.global_batch_size={ROWS * MICRO_BATCHES * self.ranks}",
        ]


def all_cases(*, ranks: int = 2) -> list[Case]:
    """All combinations of the factors."""
    return [Case(*factors, ranks=ranks) for factors in itertools.product(*FACTORS)]


def pairwise_cases(*, given: list[Case]) -> list[Case]:
    """The given cases and a few more on two ranks, which cover every pair of values of two factors.

    Greedy: each added case is the one with the most uncovered pairs.
    """

    def pairs(case: Case) -> set[tuple[int, object, int, object]]:
        values = (case.strategy, case.checkpointing, case.precision, case.packed, case.lora)
        return {(i, a, j, b) for (i, a), (j, b) in itertools.combinations(enumerate(values), 2)}

    candidates, chosen = all_cases(), list(given)
    missing = set().union(*map(pairs, candidates)) - set().union(*map(pairs, given))
    while missing:
        best = max(candidates, key=lambda case: len(pairs(case) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return chosen


def run_case(case, folder, ranks):
    """Trains one case; returns placements, sizes, memory peaks and attention calls."""
    import torch
    from torch.distributed.tensor import DTensor

    from launcher.models.initialization import clean_name
    from launcher.recipe.load import load_recipe
    from launcher.training.setup import Hooks, assemble
    from tests.nullgpu.devices import preloaded

    def local(tensor):
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def placements(tensors):
        """The distinct devices and dtypes of the tensors, and whether they are pinned."""
        tensors = [local(tensor) for tensor in tensors]
        return sorted(
            {
                f"{t.device} {str(t.dtype).removeprefix('torch.')}{' pinned' * (t.is_pinned() and t.numel() > 0)}"
                for t in tensors
            }
        )

    library = preloaded()
    recipe = load_recipe(
        [f"recipe={folder}/recipe.yaml", *case.overrides()], ranks=case.ranks
    ).recipe
    seen = {"computed": [], "gradients": [], "peaks": [], "widths": []}

    def record_gradients(phase):
        if phase == "optimizer":
            seen["gradients"] = placements(
                p.grad for p in training.wrapped.module.parameters() if p.grad is not None
            )

    training = assemble(
        recipe, ranks=ranks, build_data=ranks.rank == 0, hooks=Hooks(heartbeat=record_gradients)
    )
    module = training.wrapped.module
    parameters = dict(module.named_parameters())
    trained = [p for p in parameters.values() if p.requires_grad]
    frozen = [p for p in parameters.values() if not p.requires_grad]

    def note_dtype(layer, inputs, output):
        seen["computed"] = [str(output.dtype).removeprefix("torch.")]
        seen["widths"].append(output.shape[1])

    next(
        m for name, m in module.named_modules() if clean_name(name).endswith("q_proj")
    ).register_forward_hook(note_dtype)
    seen |= {
        "trained": placements(trained),
        "frozen": placements(frozen),
        "buffers": placements(b for b in module.buffers() if b.is_floating_point()),
        "trained_numbers": sum(p.numel() for p in trained),
        "frozen_numbers": sum(p.numel() for p in frozen),
        # fully_shard all-gathers these in the forward pass and again in the backward pass
        "block_numbers": sum(p.numel() for name, p in parameters.items() if "layers." in name),
        "trained_tensors": len(trained),
    }
    library.nullgpu_mark(f"case {case.name}".encode())
    ATTENTION.clear()
    steps = training.all_steps
    for number in range(1, STEPS + 1):
        torch.cuda.reset_peak_memory_stats()
        step = next(steps)
        library.nullgpu_mark(f"step {number}".encode())
        seen["peaks"].append(torch.cuda.max_memory_allocated())
    assert step.number == STEPS
    assert next(steps, None) is None
    state = [
        v for values in training.optimizer.state.values() for k, v in values.items() if k != "step"
    ]
    seen |= {
        "optimizer": placements(state),
        "states": len(state),
        "skipped": placements([step.skipped]),
        "loss": placements([step.loss]),
    }
    return seen | {"attention": dict(ATTENTION)}


ATTENTION = Counter()
"""Number of attention calls, by the name of their autograd node."""


def count_attention():
    """Patches the attention functions of this process to count their calls in ATTENTION."""
    from torch.nn import functional
    from torch.nn.attention import varlen

    def counted(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            out = function(*args, **kwargs)
            ATTENTION[type(out.grad_fn).__name__] += 1
            return out

        return call

    functional.scaled_dot_product_attention = counted(functional.scaled_dot_product_attention)
    varlen.varlen_attn = counted(varlen.varlen_attn)


def main(folder):
    from launcher.distributed.environment import prepare_cuda, read_environment

    prepare_cuda(deterministic=False)  # before torch is imported, as launcher/train.py does
    import torch
    import torch.distributed as dist

    from launcher.distributed import process_group
    from launcher.distributed.rank_layout import RankLayout
    from launcher.training import model
    from tests.nullgpu.devices import preloaded

    count_attention()
    # The check compares logits, which have no values on null GPUs
    model.check_isolation = lambda _, **what: None
    cases = [Case(**case) for case in json.loads((folder / "cases.json").read_text())]
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    environment = read_environment()
    results = {}
    with process_group.process_group(environment, device="any", init_timeout=300) as (world, _):
        sizes = sorted({case.ranks for case in cases})
        groups = {size: dist.new_group(list(range(size))) for size in sizes}
        barrier_group = dist.new_group(backend="gloo")
        for case in cases:
            dist.barrier(group=barrier_group)
            if world.rank >= case.ranks:
                continue
            ranks = RankLayout(
                rank=world.rank, size=case.ranks, group=groups[case.ranks], device=world.device
            )
            started = time.monotonic()
            try:
                results[case.name] = run_case(case, folder, ranks)
            except Exception:
                # Exit at once, because the other ranks would wait for this one
                print(f"{case.name}:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                os._exit(1)
            if world.rank == 0:
                print(f"{time.monotonic() - started:5.2f} s  {case.name}", flush=True)
            gc.collect()
            gc.freeze()  # exclude imported modules, so that the next collection is fast
            torch.cuda.empty_cache()
        dist.barrier(group=barrier_group)
        preloaded().nullgpu_mark(b"end")
        (folder / f"results_{world.rank}.json").write_text(json.dumps(results))
    sys.stdout.flush()
    os._exit(0)  # like the launcher: torch's threads can abort a normal interpreter exit


def write_cases(folder, cases):
    """Writes the input files of `main`, with documents of different lengths."""
    lengths = [TOKENS // 4, TOKENS // 2, TOKENS, TOKENS // 8] * 64
    rows = [{"input_ids": [i % 512 for i in range(length)]} for length in lengths]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "cases.json").write_text(json.dumps([asdict(case) for case in cases]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
