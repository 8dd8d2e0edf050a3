"""Published training speeds, and what the plan predicts for the same settings.

`python -m tests.unit.planner.published_speeds` prints them as the table of docs/engineering/speed.md, and with
--write replaces that table and the sentences about its errors.
"""

import dataclasses
import json
import re
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from launcher.planner.known_models import known_models
from launcher.planner.machine import known_machine
from launcher.planner.profile import profile_model
from launcher.planner.speed import RANGE, estimate_time, tokens_per_step
from launcher.planner.work import Work
from launcher.recipe.load import load_recipe
from tests import REPOSITORY

RECIPE = """\
run: {name: published, max_steps: 10}
data: {train: [train.txt], tokenizer: bytes, sequence_length: 2048}
batch: {global_batch_size: 64}
strategy: {kind: fsdp, mixed_precision: {param_dtype: bfloat16, reduce_dtype: float32}}
"""


def llama(layers, hidden, feed_forward, heads, kv_heads, *, vocabulary=32000, kind="llama"):
    return {
        "model_type": kind, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": feed_forward,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "max_position_embeddings": 8192,
    }  # fmt: skip


def mpt(layers, hidden, heads):
    """A GPT-NeoX with the shapes of MosaicML's MPT, which has no attention kernel in transformers."""
    shape = llama(layers, hidden, 4 * hidden, heads, heads, vocabulary=50368, kind="gpt_neox")
    del shape["num_key_value_heads"]
    return shape | {"use_parallel_residual": False}


MODELS = {
    "Llama 3 8B": llama(32, 4096, 14336, 32, 8, vocabulary=128256),
    "Llama 3 70B": llama(80, 8192, 28672, 64, 8, vocabulary=128256),
    "Llama 3 14.8B": llama(40, 5120, 17920, 40, 8, vocabulary=128256),
    "Llama 2 7B": llama(32, 4096, 11008, 32, 32),
    "Llama 2 13B": llama(40, 5120, 13824, 40, 40),
    "Llama 2 34B": llama(48, 8192, 22016, 64, 8),
    "Llama 2 70B": llama(80, 8192, 28672, 64, 8),
    "OLMo 2 7B": llama(32, 4096, 11008, 32, 32, vocabulary=100352, kind="olmo2"),
    "OLMo 2 13B": llama(40, 5120, 13824, 40, 40, vocabulary=100352, kind="olmo2"),
    "MPT 1B": mpt(24, 2048, 16),
    "MPT 7B": mpt(32, 4096, 32),
    "MPT 13B": mpt(40, 5120, 40),
    "MPT 30B": mpt(48, 7168, 56),
    "MPT 70B": mpt(80, 8192, 64),
    "Qwen2.5 7B": known_models()["Qwen/Qwen2.5-7B"]["config"],
    "Qwen3 0.6B": known_models()["Qwen/Qwen3-0.6B"]["config"],
    "Qwen3 4B": known_models()["Qwen/Qwen3-4B"]["config"],
    "Qwen3 30B-A3B": known_models()["Qwen/Qwen3-30B-A3B"]["config"],
}

TITAN, TITAN_A100, FMS, FMS_EAGER, KEMPNER, MOSAIC, OLMO, AUTOMODEL, PRIME = range(1, 10)
"""Numbers of the sources in docs/engineering/speed.md."""
NETWORK = {FMS: {"a100": 50e9, "h100": 100e9}, FMS_EAGER: {"a100": 50e9, "h100": 100e9}}
"""Bytes a second of the network adapters of a node, where the source has them: 400 and 800 Gbit/s."""
SLOW_H100 = {"memory_bandwidth": 0.88 * 2.4e12, "half_flops": 0.70 * 5 / 7 * 989e12}
"""Torchtitan's H100: 2.4 TB/s, and a limit of 500 W instead of 700 W, which is taken to slow products down in
proportion."""


@dataclass(frozen=True)
class Published:
    """One published figure."""

    model: str
    gpu: str
    nodes: int
    gpus: int
    """GPUs per node."""
    length: int
    micro: int
    """Sequences of a micro-batch."""
    speed: float
    """Tokens per second and GPU."""
    source: int
    count: int = 1
    """Micro-batches of a step."""
    overrides: tuple[str, ...] = ()
    rates: dict[str, float] = field(default_factory=dict)


FULL = ("activation_checkpointing={mode: full}",)
SELECTIVE = ("activation_checkpointing={mode: selective}",)
COMPILE = ("model.compile=true",)
BF16 = ("strategy.mixed_precision.reduce_dtype=bfloat16",)
LORA = ("lora={rank: 16, alpha: 32}",)


def hybrid(nodes):
    return (*BF16, f"strategy.replicate={nodes}")


P = Published
# fmt: off
FIGURES = [
    P("Llama 3 8B", "h100", 1, 8, 8192, 2, 5762, TITAN, overrides=SELECTIVE, rates=SLOW_H100),
    P("Llama 3 8B", "h100", 1, 8, 8192, 2, 6667, TITAN, overrides=SELECTIVE + COMPILE, rates=SLOW_H100),
    P("Llama 3 8B", "h100", 16, 8, 8192, 2, 5605, TITAN, overrides=SELECTIVE, rates=SLOW_H100),
    P("Llama 3 8B", "h100", 16, 8, 8192, 2, 6514, TITAN, overrides=SELECTIVE + COMPILE, rates=SLOW_H100),
    P("Llama 3 8B", "a100", 8, 8, 8192, 1, 2973, TITAN_A100, overrides=SELECTIVE),
    P("Llama 3 70B", "a100", 8, 8, 8192, 1, 331, TITAN_A100, overrides=FULL),
    P("Llama 2 13B", "a100", 8, 8, 4096, 2, 2162, TITAN_A100),
    P("Llama 2 13B", "a100", 8, 8, 4096, 2, 1904, TITAN_A100, overrides=SELECTIVE),
    P("Llama 2 70B", "a100", 8, 8, 4096, 2, 353, TITAN_A100, overrides=FULL),
    P("Llama 2 7B", "a100", 16, 8, 4096, 2, 3700, FMS_EAGER, overrides=hybrid(16)),
    P("Llama 2 7B", "a100", 16, 8, 4096, 2, 4550, FMS, overrides=hybrid(16) + COMPILE),
    P("Llama 2 7B", "h100", 12, 8, 4096, 2, 7500, FMS_EAGER, overrides=hybrid(12)),
    P("Llama 2 7B", "h100", 12, 8, 4096, 2, 9600, FMS, overrides=hybrid(12) + COMPILE),
    P("Llama 2 34B", "a100", 16, 8, 4096, 2, 700, FMS_EAGER, overrides=BF16 + FULL),
    P("Llama 2 34B", "h100", 12, 8, 4096, 2, 1550, FMS_EAGER, overrides=BF16 + FULL),
    P("Llama 2 70B", "a100", 16, 8, 4096, 2, 370, FMS_EAGER, overrides=BF16 + FULL),
    P("Llama 2 70B", "h100", 12, 8, 4096, 2, 800, FMS_EAGER, overrides=BF16 + FULL),
    P("Llama 3 8B", "h200", 1, 1, 4096, 2, 10471, KEMPNER, count=4, overrides=FULL + COMPILE),
    P("Llama 3 8B", "h200", 1, 2, 4096, 2, 9364, KEMPNER, count=4, overrides=FULL + COMPILE),
    P("Llama 3 8B", "h200", 1, 4, 4096, 4, 9746, KEMPNER, count=2, overrides=FULL + COMPILE),
    P("Llama 3 14.8B", "h200", 2, 4, 4096, 4, 4426, KEMPNER, count=4, overrides=FULL),
    P("MPT 1B", "h100", 1, 8, 2048, 14, 45455, MOSAIC),
    P("MPT 7B", "h100", 1, 8, 2048, 6, 10643, MOSAIC),
    P("MPT 7B", "h100", 16, 8, 2048, 6, 10475, MOSAIC),
    P("MPT 7B", "h100", 1, 8, 8192, 8, 6935, MOSAIC, count=2, overrides=FULL),
    P("MPT 13B", "h100", 1, 8, 2048, 2, 4792, MOSAIC),
    P("MPT 13B", "h100", 1, 8, 4096, 10, 4717, MOSAIC, count=3, overrides=FULL),
    P("MPT 30B", "h100", 1, 8, 2048, 3, 2002, MOSAIC, count=21, overrides=FULL),
    P("MPT 70B", "h100", 8, 8, 2048, 8, 1039, MOSAIC, count=4, overrides=FULL),
    P("MPT 1B", "a100-40gb", 1, 8, 2048, 8, 19271, MOSAIC, count=8, overrides=BF16),
    P("MPT 7B", "a100-40gb", 1, 8, 2048, 12, 3679, MOSAIC, count=4, overrides=BF16 + FULL),
    P("OLMo 2 7B", "h100", 8, 8, 4096, 2, 10000, OLMO, count=8, overrides=COMPILE),
    P("OLMo 2 13B", "h100", 8, 8, 4096, 1, 4600, OLMO, count=16, overrides=COMPILE),
    P("Llama 3 8B", "h100", 1, 1, 4096, 2, 12473, AUTOMODEL, count=16, overrides=LORA),
    P("Qwen2.5 7B", "h100", 1, 1, 4096, 2, 14110, AUTOMODEL, count=16, overrides=LORA),
    P("Qwen3 0.6B", "h100", 1, 1, 8192, 1, 26005, PRIME, count=2, overrides=FULL + COMPILE),
    P("Qwen3 4B", "h100", 1, 1, 16384, 1, 6229, PRIME, count=2, overrides=LORA + FULL + COMPILE),
    P("Qwen3 30B-A3B", "h200", 1, 8, 16384, 1, 35030 / 8, PRIME, count=2, overrides=FULL + COMPILE),
]
# fmt: on


def predicted(figure, folder):
    """Return the predicted tokens per second and GPU. The recipe is written to the folder."""
    (folder / "published.yaml").write_text(RECIPE)
    (folder / "train.txt").write_text("text")
    ranks, layers = figure.nodes * figure.gpus, MODELS[figure.model]["num_hidden_layers"]
    config = MODELS[figure.model] | {"num_hidden_layers": 2}
    recipe = load_recipe(
        [
            f"recipe={folder}/published.yaml",
            f"data.train=[{folder}/train.txt]",
            f"model.config={json.dumps(config)}",
            f"data.sequence_length={figure.length}",
            f"batch.micro_batch_size={figure.micro}",
            f"batch.global_batch_size={figure.micro * figure.count * ranks}",
            *figure.overrides,
        ],
        ranks=ranks,
    ).recipe
    rates = dict(figure.rates)
    if network := NETWORK.get(figure.source):
        rates["inter_node_bandwidth"] = 0.8 * network[figure.gpu]
    machine = known_machine(
        figure.gpu, nodes=figure.nodes, gpus_per_node=figure.gpus, overrides=rates
    )
    two = profile_model(recipe, device="cuda")  # two blocks are profiled as fast as possible
    profile = dataclasses.replace(two, block_classes=two.block_classes[-1:] * layers)
    return (
        tokens_per_step(recipe)
        / estimate_time(Work(profile, recipe, ranks=machine.ranks), machine).total
        / ranks
    )


def tested(figure):
    """Whether the figure tests the formulas. Those of prime-rl are goals: with 17 to 22 % MFU, something
    else than compute takes most of their time."""
    return figure.source != PRIME


def errors(folder):
    """Return the relative error of each prediction that tests the formulas."""
    return [predicted(figure, folder) / figure.speed - 1 for figure in FIGURES if tested(figure)]


def setting(figure):
    """The words for what a figure's overrides switch on."""
    words = [
        text
        for override, text in (
            (FULL, "full"),
            (SELECTIVE, "selective"),
            (LORA, "LoRA"),
            (COMPILE, "compiled"),
        )
        if override[0] in figure.overrides
    ]
    words += ["hybrid"] if any("replicate" in text for text in figure.overrides) else []
    return ", ".join(words) or "-"


def table():
    """The lines of the table, and the text about its errors."""
    lines = [
        "| model | GPUs | tokens | setting | published | predicted | error | source |",
        "|---|---|---|---|---:|---:|---:|---|",
    ]
    found = []
    with tempfile.TemporaryDirectory() as name:
        for figure in FIGURES:
            speed = predicted(figure, Path(name))
            error = speed / figure.speed - 1
            found += [error] if tested(figure) else []
            count = f" x {figure.count}" if figure.count > 1 else ""
            cells = (
                figure.model,
                f"{figure.nodes * figure.gpus} {figure.gpu.upper()}",
                f"{figure.micro} x {figure.length:,}{count}",
                setting(figure),
                f"{figure.speed:,.0f}",
                f"{float(f'{speed:.3g}'):,.0f}",
                f"{error:+.0%}",
                str(figure.source),
            )
            lines.append(f"| {' | '.join(cells)} |")
    mean = sum(map(abs, found)) / len(found)
    close = sum(abs(error) <= 0.1 for error in found)
    low, high = RANGE
    within = sum(low <= 1 / (1 + error) <= high for error in found)
    text = (
        f"Without source 9, the mean error is {mean:.0%}; {close} of {len(found)} predictions are within 10 %.\n"
        f"A plan prints the range from {low} to {high} times its prediction, in which {within} of these {len(found)} "
        "figures lie."
    )
    return lines, text


def write(lines, text):
    """Replaces the table of docs/engineering/speed.md and the text about its errors."""
    page = REPOSITORY / "docs/engineering/speed.md"
    before = page.read_text()
    new = re.sub(r"(?m)^\| model \| GPUs \| tokens(.*\n\|)*.*$", lambda _: "\n".join(lines), before)
    new = re.sub(r"(?m)^Without source 9, the mean(.|\n)*?figures lie\.$", lambda _: text, new)
    page.write_text(new)


def main():
    lines, text = table()
    print(*lines, "", text, sep="\n")
    if "--write" in sys.argv:
        write(lines, text)


if __name__ == "__main__":
    main()
