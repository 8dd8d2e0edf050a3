"""Times the optimizer's step on one device, for each precision of AdamW's state.

    python benchmarks/optimizer.py --layers 8          # matrices of Llama-3.1-8B's widths

Prints a Markdown table. `fused` is torch.optim.AdamW with fused=True, which has float32 states.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from shapes import LLAMA_8B
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.optimizers.optimizer import make_optimizer
from launcher.recipe.schema import Optimizer

STATES = {
    "fused": None,
    "float32": Optimizer(),
    "bfloat16": Optimizer(state_dtype="bfloat16"),
    "int8": Optimizer(state_dtype="int8"),
}


def model(layers: int, hidden: int, intermediate: int, device: torch.device) -> nn.Module:
    """The matrices and norms of some layers, with gradients."""
    attention, mlp = (hidden * 5 // 2, hidden), (intermediate * 3, hidden)
    shapes = [attention, mlp, (hidden,), (hidden,)] * layers
    module = nn.ParameterList([torch.zeros(shape, device=device) for shape in shapes])
    for parameter in module:
        parameter.grad = torch.full_like(parameter, 1e-3)
    return module


def milliseconds(step: Callable[[], object], repeats: int, device: torch.device) -> float:
    """The median time of a call, which completes on the device."""

    def timed() -> float:
        started = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return 1000 * (time.perf_counter() - started)

    for _ in range(3):
        timed()
    return statistics.median(timed() for _ in range(repeats))


def main() -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=LLAMA_8B["hidden_size"])
    parser.add_argument("--intermediate", type=int, default=LLAMA_8B["intermediate_size"])
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print("| state | ms a step | ns per parameter | bytes of state per parameter |")
    print("|---|---:|---:|---:|", flush=True)
    for name, settings in STATES.items():
        module = model(options.layers, options.hidden, options.intermediate, device)
        count = sum(parameter.numel() for parameter in module.parameters())
        optimizer: torch.optim.Optimizer
        if settings is None:
            optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        else:
            optimizer = make_optimizer(module, settings)
        taken = milliseconds(optimizer.step, options.repeats, device)
        states = (value for state in optimizer.state.values() for value in state.values())
        held = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        each = f"{1e6 * taken / count:.4f} | {held / count:.2f}"
        print(f"| {name} | {taken:.2f} | {each} |", flush=True)
        del module, optimizer
    return 0


if __name__ == "__main__":
    sys.exit(main())
