"""Combinations of strategy, checkpointing, precision, packing and LoRA on null GPUs.

Kernels compute no values. The tests check devices and dtypes of tensors, the attention kernels, the
bytes of each collective and the order of memory peaks.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.nullgpu import devices
from tests.nullgpu.matrix_worker import (
    LAYERS,
    MICRO_BATCHES,
    STEPS,
    Case,
    all_cases,
    pairwise_cases,
    write_cases,
)

WORKER = Path(__file__).with_name("matrix_worker.py")
WIDTH = {"bfloat16": 2, "float16": 2, "float32": 4}
PLAIN = Case("fsdp", "none", "bfloat16", packed=True, lora=False)
ORDERED = [
    *(replace(PLAIN, checkpointing=mode) for mode in ("none", "full", "selective", "offloaded")),
    replace(PLAIN, strategy="ddp"),
    replace(PLAIN, strategy="offload"),
    replace(PLAIN, ranks=1),
]
CASES = pairwise_cases(given=ORDERED)
HOPPER = [
    replace(PLAIN, ranks=1),
    replace(PLAIN, packed=False, ranks=1),
    replace(PLAIN, packed=False, ranks=1, strategy="ddp"),
]


class Results:
    """The results of one launch: the records of each rank, and the collectives of each step."""

    def __init__(self, folder, gpus):
        self.seen = {
            file.stem: json.loads(file.read_text()) for file in folder.glob("results_*.json")
        }
        self.collectives = {}
        for log in gpus.logs():
            if not log.of_kind("mark"):
                continue
            rank = log.rank or 0
            assert log.contexts == {rank}, "a process has a context on another rank's device"
            case, moved = None, {}
            for event in log.of_kind("mark", "nccl"):
                if event.kind == "nccl":
                    name, _, ranks, size, *_ = event.arguments
                    if size.startswith("bytes=") and ranks != "ranks=1":
                        moved.setdefault(name, []).append(int(size.removeprefix("bytes=")))
                elif event.arguments[0] == "case":
                    case, moved = event.arguments[1], {}
                elif event.arguments[0] == "step":
                    self.collectives[rank, case, int(event.arguments[1])] = moved
                    moved = {}

    def of(self, case, rank=0):
        return self.seen[f"results_{rank}"][case.name]

    def moved(self, case, rank, step):
        """Bytes of each kind of collective in a step.

        Small messages are ignored: counts, norms and the order of DDP's buckets.
        """
        found = self.collectives[rank, case.name, step]
        return {
            name: sum(size for size in sizes if size > 1024)
            for name, sizes in found.items()
            if max(sizes) > 1024
        }


def launch(folder, cases, *, ranks, timeout=400, **options):
    write_cases(folder, cases)
    gpus = devices.null_gpus(
        folder, build_folder=REPOSITORY / "build/nullgpu", count=ranks, **options
    )
    if ranks == 1:
        run([sys.executable, WORKER, folder], timeout=timeout, **gpus.variables).check()
    else:
        torchrun(WORKER, folder, ranks=ranks, timeout=timeout, **gpus.variables).check()
    return Results(folder, gpus)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("matrix"), CASES, ranks=2)


def check_placement(case, seen, rank):
    device = "cpu" if case.strategy == "offload" else f"cuda:{rank}"
    pinned = " pinned" if case.strategy == "offload" else ""
    assert seen["trained"] == [f"{device} float32{pinned}"]
    assert seen["frozen"] == ([f"{device} {case.precision}{pinned}"] if case.lora else [])
    assert seen["gradients"] == [f"{device} float32{pinned}"]
    assert seen["optimizer"] == [f"{device} float32"]
    assert seen["states"] == 2 * seen["trained_tensors"]
    assert seen["buffers"] == [f"cuda:{rank} float32"]
    assert seen["computed"] == [case.precision]
    assert seen["loss"] == [f"cuda:{rank} float32"]


def check_attention(case, seen):
    """Packed rows use the variable-length kernel in half precision and a document mask in float32.

    Rows with a single document need neither. Whether transformers creates a mask nevertheless
    depends on values, which are garbage here. With a mask, half precision uses the memory-efficient
    kernel. Without a mask, float32 uses the math kernel, the only one for grouped-query attention.
    """
    nodes = set(seen["attention"])
    varlen = {node for node in nodes if "varlen" in node}
    dense = nodes - varlen
    half = case.precision != "float32"
    assert bool(varlen) == (case.packed and half)
    efficient, math = "ScaledDotProductEfficientAttentionBackward0", "UnsafeViewBackward0"
    if not half:
        assert dense <= {efficient, math}
    elif case.packed:
        assert dense <= {"ScaledDotProductFlashAttentionBackward0"}
    else:
        assert dense <= {"ScaledDotProductFlashAttentionBackward0", efficient}
    forwards = 1 if case.checkpointing == "none" else 2
    assert sum(seen["attention"].values()) == STEPS * MICRO_BATCHES * LAYERS * forwards


def expected_traffic(case, seen):
    """The expected bytes of each kind of collective in a step."""
    if case.ranks == 1:
        return {}
    gradients = 4 * seen["trained_numbers"]
    if case.strategy == "ddp":
        return {"all_reduce": gradients}
    if case.strategy == "hybrid":  # with two ranks, each has a replica of the whole model
        return {"all_reduce": MICRO_BATCHES * gradients}
    blocks = seen["block_numbers"]
    gathered = (
        seen["trained_numbers"] + seen["frozen_numbers"] + blocks
    )  # blocks are gathered again in the backward pass
    return {
        "all_gather": MICRO_BATCHES * WIDTH[case.precision] * gathered,
        "reduce_scatter": MICRO_BATCHES * gradients,
    }


def check(results, case):
    for rank in range(case.ranks):
        seen = results.of(case, rank)
        check_placement(case, seen, rank)
        check_attention(case, seen)
        for step in range(1, STEPS + 1):
            assert results.moved(case, rank, step) == expected_traffic(case, seen), (
                f"rank {rank}, step {step}"
            )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_combination(results, case):
    check(results, case)


def check_order(results, case):
    """More checkpointing, sharding and offload reduce the memory peak of a step."""

    def peak(**changes):
        # The minimum after the first step, because uncollected garbage may raise a peak
        return min(results.of(replace(case, **changes))["peaks"][1:])

    full = peak(checkpointing="full")
    assert full < peak(checkpointing="selective") < peak(checkpointing="none")
    # Block inputs are a small part of this peak; uncollected garbage can be as large
    assert peak(checkpointing="offloaded") < 1.1 * full
    assert peak(strategy="offload") < peak(strategy="fsdp") < peak(strategy="ddp")


def test_memory_options_reduce_the_peak(results):
    check_order(results, PLAIN)


@pytest.mark.long
def test_capability_90_uses_cudnn_attention(tmp_path):
    """Packed rows use the variable-length kernel."""
    results = launch(tmp_path, HOPPER, ranks=1, capability=90)
    packed, *padded = (set(results.of(case)["attention"]) for case in HOPPER)
    assert any("varlen" in node for node in packed)
    assert padded == [{"ScaledDotProductCudnnAttentionBackward0"}] * 2
    widths = {width for case in HOPPER for width in results.of(case)["widths"]}
    assert widths == {128, 256}, "cuDNN plans attention for each width"


@pytest.mark.long
def test_all_combinations(tmp_path):
    cases = [
        *all_cases(ranks=2),
        *(case for case in all_cases(ranks=1) if case.strategy != "hybrid"),
    ]
    results = launch(tmp_path, cases, ranks=2, timeout=3000)
    for case in cases:
        check(results, case)
