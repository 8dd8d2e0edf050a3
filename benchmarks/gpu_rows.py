"""Configurations that are measured on a GPU: what gpu_steps.py trains and gpu_plans.py plans.

Each group is trained in one process. Neither data nor weights are needed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shapes import LLAMA_1B, LLAMA_8B, QWEN3_30B_A3B

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.planner.known_models import known_models

if TYPE_CHECKING:
    from launcher.recipe.schema import Recipe

RECIPE = """\
run: {{name: measured, max_steps: 10}}
model: {{config: {config}}}
data: {{train: [none.txt], tokenizer: bytes, sequence_length: {length}}}
batch: {{global_batch_size: {batch}, micro_batch_size: {micro_batch_size}}}
"""
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
"""Sizes with which a row shows only that it runs."""


@dataclass(frozen=True)
class Goal:
    """What a row should reach on a machine."""

    gpu: str
    gpus: int
    mfu: float | None = None
    tokens_per_second: float | None = None
    """Of all GPUs."""
    why: str = ""


@dataclass(frozen=True)
class Row:
    """One configuration."""

    name: str
    config: dict[str, Any]
    """Fields of the model's config."""
    overrides: tuple[str, ...]
    """Keys of the recipe, as on the command line."""
    length: int = 4096
    """Tokens of a sequence."""
    micro_batch_size: int = 2
    micro_batches: int = 2
    """Of a step, on each rank."""
    goal: Goal | None = None

    def tiny(self) -> Row:
        """The same configuration of a model that trains in a second."""
        return dataclasses.replace(self, config=self.config | TINY, length=64)

    def tokens(self, ranks: int) -> int:
        """Tokens of a step on all ranks."""
        return ranks * self.micro_batches * self.micro_batch_size * self.length

    def recipe(self, ranks: int, *, half: bool = True) -> Recipe:
        """The recipe for a number of ranks, in bfloat16 if `half` and else in float32."""
        from launcher.recipe.load import load_recipe

        config = {"model_type": "llama", "bos_token_id": None, "eos_token_id": 1}
        config |= {"max_position_embeddings": 16384} | self.config
        text = RECIPE.format(
            config=json.dumps(config),
            length=self.length,
            batch=ranks * self.micro_batches * self.micro_batch_size,
            micro_batch_size=self.micro_batch_size,
        )
        precision = "{param_dtype: bfloat16}" if half else "null"
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(text)
            file.flush()
            words = [f"recipe={file.name}", f"strategy.mixed_precision={precision}"]
            return load_recipe([*words, *self.overrides], ranks=ranks, files=False).recipe


EAGER, COMPILED = "model.compile=false", "model.compile=true"
KEPT = "model.keep_logits=true"
DDP = ("strategy.kind=ddp",)
"""On one GPU the strategy for one rank takes its place."""
SHARDED = ("strategy.kind=fsdp", "strategy.reshard_after_forward=true")
FSDP = (*SHARDED, "strategy.sync_every_micro_batch=true")
"""The collectives of the loops written by hand."""
FULL = "activation_checkpointing={mode: full}"
SECOND = "activation_checkpointing={mode: full, every_n_blocks: 2}"
SELECTIVE = "activation_checkpointing={mode: selective}"
PADDED = "data.packing=false"
OFFLOAD = "strategy.cpu_offload.pin_memory=true"
LORA = "lora={rank: 16, alpha: 32}"
EIGHT_LAYERS = LLAMA_8B | {"num_hidden_layers": 8}

STEPS = [
    Row("ddp, compiled", LLAMA_1B, (*DDP, COMPILED, KEPT)),
    Row("fsdp, compiled", LLAMA_1B, (*FSDP, COMPILED)),
    Row("ddp, eager", LLAMA_1B, (*DDP, EAGER, KEPT)),
    Row("fsdp, eager", LLAMA_1B, (*FSDP, EAGER)),
    Row("fsdp, eager, selective", LLAMA_1B, (*FSDP, EAGER, SELECTIVE)),
    Row("fsdp, eager, full, offload", LLAMA_1B, (*FSDP, EAGER, FULL, OFFLOAD)),
]
"""Llama-3.2-1B. The rows of `ddp` keep the logits."""
WIDTHS = [
    Row("compiled, selective", EIGHT_LAYERS, (*DDP, COMPILED, SELECTIVE, KEPT)),
    Row(
        "compiled, selective, padded rows",
        EIGHT_LAYERS,
        (*DDP, COMPILED, SELECTIVE, KEPT, PADDED),
    ),
    Row("fsdp, eager, selective", EIGHT_LAYERS, (*FSDP, EAGER, SELECTIVE)),
    Row("compiled, every second block", EIGHT_LAYERS, (*DDP, COMPILED, SECOND, KEPT)),
]
"""Eight layers of Llama-3.1-8B."""


def memory_row(name: str, *overrides: str, micro_batches: int = 1) -> Row:
    return Row(name, LLAMA_1B, (EAGER, *overrides), micro_batches=micro_batches)


MEMORY = [
    memory_row("ddp", *DDP),
    memory_row("ddp, full, kept logits", *DDP, FULL, KEPT),
    memory_row("fsdp, selective", *FSDP, SELECTIVE),
    memory_row("fsdp, full to host", *FSDP, "activation_checkpointing={mode: full, offload_to_cpu: true}"),
    memory_row("fsdp, padded rows", *FSDP, PADDED),
    memory_row("ddp, LoRA", *DDP, LORA),
    memory_row("fsdp, 2 held back", *SHARDED, "strategy.sync_every_micro_batch=false", micro_batches=2),
    memory_row("fsdp, full, offload", *FSDP, FULL, OFFLOAD),
]  # fmt: skip
"""Llama-3.2-1B; only the peak counts. Eager, because the plan traces eager blocks."""


def layers(name: str, count: int) -> dict[str, Any]:
    """The config of a known model with fewer layers: a period of those that differ."""
    config = dict(known_models()[name]["config"])
    config.pop("layer_types", None)
    return config | {"num_hidden_layers": count}


QWEN3_5 = {"model_type": "qwen3_5_text", "num_hidden_layers": 4}
"""The text model of Qwen3.5-9B, whose sizes are the defaults of transformers."""
GEMMA_3 = known_models()["google/gemma-3-4b-it"]["config"]["text_config"]
FAMILIES = [
    Row("Qwen3-30B-A3B, 4 layers", layers("Qwen/Qwen3-30B-A3B", 4), (*DDP, COMPILED, KEPT)),
    Row("Qwen3-30B-A3B, 4 layers, eager", layers("Qwen/Qwen3-30B-A3B", 4), (*DDP, EAGER, KEPT)),
    Row("Qwen3.5-9B, 4 layers, full", QWEN3_5, (*DDP, COMPILED, FULL), micro_batch_size=1),
    Row("Llama-3.1-8B, 8 layers, float8", EIGHT_LAYERS, (*DDP, COMPILED, SELECTIVE, KEPT, "strategy.mixed_precision.float8=rowwise")),
    Row("Llama-3.1-8B, QLoRA, full", LLAMA_8B, (*DDP, "lora={rank: 16, alpha: 32, quantize: nf4}", FULL)),
    Row("gpt-oss-20b, 2 layers", layers("openai/gpt-oss-20b", 2), (*DDP, COMPILED), micro_batch_size=1),
    Row(
        "Gemma-3-4b, 6 layers",
        {"model_type": "gemma3_text"} | GEMMA_3 | {"num_hidden_layers": 6},
        (*DDP, COMPILED, KEPT),
    ),
]  # fmt: skip
"""Layers of families that differ from Llama: experts, recurrent layers, sinks, windows, 4 and 8 bits."""

AUTOMODEL = "NeMo Automodel's"
PRIME = "prime-rl's"
GOALS = [
    Row(
        "Llama-3.1-8B, selective",
        LLAMA_8B,
        (*FSDP, COMPILED, SELECTIVE, KEPT),
        goal=Goal("h100", 8, mfu=0.47, why="torchtitan: 39 % with 8,192 tokens, at 500 W"),
    ),
    Row(
        "Llama-3.1-8B, every second block",
        LLAMA_8B,
        (*FSDP, COMPILED, SECOND, KEPT),
        goal=Goal("h100", 8, mfu=0.50, why="half of the blocks are computed once"),
    ),
    Row(
        "Llama-3.1-8B, AdamW in int8",
        LLAMA_8B,
        (*DDP, COMPILED, KEPT, "optimizer.state_dtype=int8"),
        micro_batch_size=1,
        micro_batches=16,
        goal=Goal("h200", 1, mfu=0.58, why="fits one GPU without recomputation"),
    ),
    Row(
        "Llama-3.2-1B",
        LLAMA_1B,
        (*DDP, COMPILED, KEPT),
        goal=Goal("h100", 1, mfu=0.46, why="the row of the first call"),
    ),
    Row(
        "Qwen3-4B, LoRA, full",
        known_models()["Qwen/Qwen3-4B"]["config"],
        (*DDP, COMPILED, LORA, FULL),
        length=16384,
        micro_batch_size=1,
        goal=Goal("h100", 1, tokens_per_second=6_200, why=PRIME),
    ),
    Row(
        "Llama-3.1-8B, LoRA",
        LLAMA_8B,
        (*DDP, COMPILED, LORA),
        micro_batches=16,
        goal=Goal("h100", 1, tokens_per_second=12_500, why=AUTOMODEL),
    ),
    Row(
        "Qwen2.5-7B, LoRA",
        known_models()["Qwen/Qwen2.5-7B"]["config"],
        (*DDP, COMPILED, LORA),
        micro_batches=16,
        goal=Goal("h100", 1, tokens_per_second=14_100, why=AUTOMODEL),
    ),
    Row(
        "Qwen3-0.6B",
        known_models()["Qwen/Qwen3-0.6B"]["config"],
        (*DDP, COMPILED),
        length=8192,
        micro_batch_size=1,
        goal=Goal("h100", 1, tokens_per_second=26_000, why=PRIME),
    ),
    Row(
        "Qwen3-30B-A3B, full",
        QWEN3_30B_A3B,
        (*FSDP, COMPILED, FULL),
        length=16384,
        micro_batch_size=1,
        goal=Goal("h200", 8, tokens_per_second=35_000, why=PRIME),
    ),
]
"""Real models, on the machines for which their goals are."""
GROUPS = {
    "steps": STEPS,
    "widths": WIDTHS,
    "families": FAMILIES,
    "memory": MEMORY,
    "goals": GOALS,
}


def rows_of(group: str, *, gpu: str | None, ranks: int) -> list[Row]:
    """The rows of a group that a machine can train: goals are for some machines only.

    `gpu` is the name in the table of GPUs, such as H100; None: all rows.
    """
    return [
        row
        for row in GROUPS[group]
        if gpu is None
        or row.goal is None
        or (row.goal.gpu.lower(), row.goal.gpus) == (gpu.lower(), ranks)
    ]
