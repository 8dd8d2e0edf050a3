"""Times a Llama block with the kernels of liger-kernel, beside the eager and the compiled block.

    python benchmarks/extras.py

Prints a Markdown table of forward and backward passes in bfloat16 at the widths of Llama-3.1-8B.
Only a row that is faster than the compiled block would be worth a dependency.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import statistics
import sys
import time

import torch
from shapes import LLAMA_8B
from transformers import LlamaConfig, LlamaModel


def model(config: LlamaConfig, kind: str) -> LlamaModel:
    """Blocks without a large embedding."""
    if kind == "liger-kernel":
        liger = importlib.import_module("liger_kernel.transformers")
        liger.apply_liger_kernel_to_llama(cross_entropy=False, fused_linear_cross_entropy=False)
    with torch.device("cuda"):
        built = LlamaModel(config).bfloat16()
    if kind == "compiled":
        for layer in built.layers:
            layer.compile()
    return built


def milliseconds(built: LlamaModel, tokens: int, repeats: int) -> float:
    """The median time of a forward and a backward pass."""
    hidden = torch.randn(
        1, tokens, built.config.hidden_size, device="cuda", dtype=torch.bfloat16, requires_grad=True
    )
    times = []
    for _ in range(repeats + 3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        built(inputs_embeds=hidden, use_cache=False).last_hidden_state.sum().backward()
        torch.cuda.synchronize()
        times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times[3:])


def main() -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=LLAMA_8B["hidden_size"])
    parser.add_argument("--intermediate", type=int, default=LLAMA_8B["intermediate_size"])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--no-compile", action="store_true", help="leaves out the compiled block")
    options = parser.parse_args()
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=options.hidden,
        intermediate_size=options.intermediate,
        num_hidden_layers=2,
        num_attention_heads=LLAMA_8B["num_attention_heads"],
        num_key_value_heads=LLAMA_8B["num_key_value_heads"],
        attn_implementation="sdpa",
    )
    print("| block | ms of two layers | / eager |\n|---|---:|---:|", flush=True)
    eager = 0.0
    for kind in ("eager", "compiled", "liger-kernel"):  # the last one changes transformers
        if kind == "liger-kernel" and importlib.util.find_spec("liger_kernel") is None:
            print(f"| {kind} | skipped: it is not installed | |")
        elif kind != "compiled" or not options.no_compile:
            taken = milliseconds(model(config, kind), options.tokens, options.repeats)
            eager = eager or taken
            print(f"| {kind} | {taken:.2f} | {taken / eager:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
