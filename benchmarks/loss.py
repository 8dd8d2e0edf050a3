"""Compares time and peak memory of the loss: full logits, the launcher's loss and torch's loss.

    python benchmarks/loss.py [--tokens 4096] [--hidden 256] [--rounds 5] [--output FILE]

Runs one forward and backward pass of the head and the cross-entropy for each in turn, in one
process. Memory is the peak of allocated bytes without the inputs, the weight and their gradients,
from the profiler's allocation events on CPUs and from the caching allocator on CUDA. Gradients are
compared with those of full logits.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

from launcher.models.head import Chunking, Transform, chunk_width, linear_cross_entropy
from launcher.planner.measurement import CpuMeter

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def full(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), targets, reduction="sum")


def chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    keep_logits: bool = False,
) -> torch.Tensor:
    width = chunk_width(len(targets), len(weight))
    chunking = Chunking(Transform(), width, keep_logits=keep_logits)
    return linear_cross_entropy(hidden, weight, None, targets, chunking)


def torch_chunked(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """torch's loss (2.13): chunks of tokens, with gradients computed in the forward pass."""
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=options)


def peak(loss: Loss, arguments: tuple[torch.Tensor, ...], device: torch.device) -> int:
    tensor_bytes = 2 * sum(t.nbytes for t in arguments[:2])  # with gradients
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        loss(*arguments).backward()  # type: ignore[no-untyped-call]
        return torch.cuda.max_memory_allocated(device) - tensor_bytes - arguments[2].nbytes
    meter = CpuMeter()
    meter.start()
    loss(*arguments).backward()  # type: ignore[no-untyped-call]
    most: int = max(mark.peak for mark in meter.stop())
    return most - tensor_bytes // 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    sides: dict[str, Loss] = {
        "full logits": full,
        "launcher": chunked,
        "launcher, kept logits": partial(chunked, keep_logits=True),
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        sides["F.linear_cross_entropy"] = torch_chunked
    lines = [
        f"{options.tokens:,} tokens, hidden size {options.hidden:,}; {device.type}, torch "
        f"{torch.__version__}; medians of {options.rounds} rounds",
        "",
        "| vocabulary | dtype | side | ms | / full logits | peak MiB | gradient of the weight, relative error |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    for vocabulary in (32_000, 128_256):
        for dtype in (torch.float32, torch.bfloat16):
            lines += compare(sides, vocabulary, dtype, options, device)
            print("\n".join(lines[-len(sides) :]), flush=True)
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


def compare(
    sides: dict[str, Loss],
    vocabulary: int,
    dtype: torch.dtype,
    options: argparse.Namespace,
    device: torch.device,
) -> list[str]:
    torch.manual_seed(0)
    targets = torch.randint(vocabulary, (options.tokens,), device=device)
    hidden = torch.randn(options.tokens, options.hidden, device=device).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, options.hidden, device=device).mul(0.05).to(dtype)
    weight.requires_grad_()
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(options.rounds):
        for side, loss in sides.items():
            hidden.grad = weight.grad = None
            begin = time.perf_counter()
            loss(hidden, weight, targets).backward()  # type: ignore[no-untyped-call]
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds[side].append(time.perf_counter() - begin)
    rows: list[str] = []
    exact: torch.Tensor | None = None
    for side, loss in sides.items():
        hidden.grad = weight.grad = None
        peak_bytes = peak(loss, (hidden, weight, targets), device)
        assert weight.grad is not None
        exact = weight.grad.float() if exact is None else exact
        error = float((weight.grad.float() - exact).norm() / exact.norm())
        ratio = statistics.median(
            a / b for a, b in zip(seconds[side], seconds["full logits"], strict=True)
        )
        rows.append(
            f"| {vocabulary:,} | {str(dtype).removeprefix('torch.')} | {side} | "
            f"{1000 * statistics.median(seconds[side]):,.0f} | **{ratio:.2f}** | "
            f"{peak_bytes / 2**20:,.0f} | {error:.1e} |"
        )
    return rows


if __name__ == "__main__":
    main()
