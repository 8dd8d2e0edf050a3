"""Compares the traced memory plan with PyTorch's caching allocator, for the shapes of real models.

With LAUNCHER_MEMORY_TABLE=FILE, the long test writes the Markdown table of benchmarks/README.md.
"""

import os
import sys
import tempfile
from pathlib import Path

import pytest

from launcher.planner.machine import known_machine
from launcher.planner.measurement import measure_recipes
from launcher.planner.plan import make_plan
from launcher.recipe.load import load_recipe
from tests.distributed.launching import run
from tests.image_models import MROPE, make_model

OVER, UNDER = 0.05, 0.02
"""Fractions of the measured peak by which the plan may be above or below it."""

LLAMA = (
    "tie_word_embeddings: false, bos_token_id: null, eos_token_id: 1, max_position_embeddings: 8192"
)
WIDTHS_1B = (
    "hidden_size: 2048, intermediate_size: 8192, num_attention_heads: 32, num_key_value_heads: 8"
)
SHAPES = {
    "4 blocks of 1B": f"{WIDTHS_1B}, vocab_size: 32000, num_hidden_layers: 4",
    # Small, because an optimizer on the host takes real time and memory
    "2 narrow blocks": "hidden_size: 512, intermediate_size: 1536, num_attention_heads: 8, num_key_value_heads: 8,"
    " vocab_size: 32000, num_hidden_layers: 2",
    "2 blocks of 30B-A3B": "model_type: qwen3_moe, hidden_size: 2048, num_attention_heads: 32, num_key_value_heads: 4,"
    " head_dim: 128, num_experts: 32, num_experts_per_tok: 8, moe_intermediate_size: 768, intermediate_size: 6144,"
    " vocab_size: 32000, num_hidden_layers: 2",
    "4 layers of Qwen3.5": "model_type: qwen3_5_text, hidden_size: 1024, intermediate_size: 3584, head_dim: 256,"
    " num_attention_heads: 8, num_key_value_heads: 2, linear_num_key_heads: 16, linear_num_value_heads: 16,"
    " vocab_size: 32000, num_hidden_layers: 4",
    "2 layers of gpt-oss": "model_type: gpt_oss, hidden_size: 1024, intermediate_size: 1024, head_dim: 64,"
    " num_attention_heads: 32, num_key_value_heads: 8, num_local_experts: 16, num_experts_per_tok: 4,"
    " vocab_size: 32000, num_hidden_layers: 2",
    "1B": f"{WIDTHS_1B}, vocab_size: 128256, num_hidden_layers: 16",
    "8B": "hidden_size: 4096, intermediate_size: 14336, num_attention_heads: 32, num_key_value_heads: 8,"
    " vocab_size: 128256, num_hidden_layers: 32",
    "70B": "hidden_size: 8192, intermediate_size: 28672, num_attention_heads: 64, num_key_value_heads: 8,"
    " vocab_size: 128256, num_hidden_layers: 80",
}
BF16, FP16 = (
    "strategy.mixed_precision.param_dtype=bfloat16",
    "strategy.mixed_precision.param_dtype=float16",
)
FP32 = "strategy.mixed_precision=null"
DDP, HYBRID = "strategy.kind=ddp", "strategy.replicate=2"
STATE, IN_FILES = (
    "strategy.cpu_offload.what=optimizer",
    f"strategy.cpu_offload.optimizer_path={tempfile.gettempdir()}",
)
OFFLOAD = "strategy.cpu_offload.pin_memory=true"
FULL, SELECTIVE = "activation_checkpointing.mode=full", "activation_checkpointing.mode=selective"
BUDGET = "activation_checkpointing={mode: selective, budget: 0.5}"
TO_HOST = "activation_checkpointing={mode: full, offload_to_cpu: true}"
PADDED, LORA = "data.packing=false", "lora.rank=16"
EXPERTS, ON_EXPERTS = (
    "2 blocks of 30B-A3B",
    "lora={rank: 12, target_parameters: [gate_up_proj, down_proj]}",
)
NF4_ON_EXPERTS = ON_EXPERTS.replace("}", ", quantize: nf4}")
NF4 = "lora={rank: 16, quantize: nf4}"
DORA = "lora={rank: 16, dora: true, modules_to_save: [embed_tokens, lm_head]}"
QWEN3_5, GPT_OSS = "4 layers of Qwen3.5", "2 layers of gpt-oss"
SHORT = "data.sequence_length=1024"
CONTEXT, TENSOR = "strategy.context_parallel_size=2", "strategy.tensor_parallel_size=2"
REDUCE_ONCE, UNSHARDED = (
    "strategy.sync_every_micro_batch=false",
    "strategy.reshard_after_backward=false",
)

MUON, EMA = "optimizer.name=muon", "optimizer.ema=0.99"
ONE_RANK = "strategy.reshard_after_forward=false"
COMPILED = "model.compile=true"

SMALL, NARROW = "4 blocks of 1B", "2 narrow blocks"
SAMPLE = [
    (SMALL, 1, [DDP, BF16]),
    (SMALL, 1, [BF16, SELECTIVE]),
    (SMALL, 2, [FP16, UNSHARDED, REDUCE_ONCE]),
    (NARROW, 2, [BF16, OFFLOAD, FULL]),
    (SMALL, 1, [BF16, LORA, PADDED, FULL]),
    (SMALL, 1, [BF16, NF4, FULL]),
    (SMALL, 2, [BF16, TO_HOST]),
    (SMALL, 1, [BF16, BUDGET]),
    (SMALL, 1, [DDP, BF16, BUDGET]),
    (SMALL, 2, [BF16, FULL, STATE]),
    (NARROW, 1, [BF16, FULL, STATE, IN_FILES]),
    (SMALL, 2, [BF16, MUON]),
]
"""Model, micro-batches per step, overrides."""

GRID = {
    # (ranks, compute capability): cases
    (2, 80): [
        ("1B", 1, [DDP, BF16]),
        ("1B", 1, [DDP, BF16, FULL]),
        ("1B", 1, [DDP, FP16, SELECTIVE, PADDED]),
        ("1B", 1, [DDP, FP32, FULL]),
        ("1B", 2, [DDP, BF16, FULL]),
        ("1B", 1, [DDP, BF16, LORA]),
        ("1B", 1, [BF16]),
        ("1B", 1, [BF16, PADDED]),
        ("1B", 1, [BF16, SELECTIVE]),
        ("1B", 1, [BF16, FULL]),
        ("1B", 1, [BF16, TO_HOST]),
        ("1B", 1, [FP16, FULL]),
        ("1B", 1, [FP32, FULL, PADDED]),
        ("1B", 1, [FP32, FULL, PADDED, "model.attention=eager"]),
        ("1B", 2, [BF16, FULL, REDUCE_ONCE]),
        ("1B", 2, [BF16, FULL, UNSHARDED]),
        ("1B", 2, [BF16, UNSHARDED, REDUCE_ONCE]),
        ("1B", 1, [BF16, FULL, LORA]),
        ("1B", 1, [BF16, FULL, NF4]),
        ("1B", 1, [DDP, BF16, NF4]),
        ("1B", 1, [BF16, FULL, DORA]),
        (EXPERTS, 2, [DDP, BF16, ON_EXPERTS]),
        (EXPERTS, 1, [BF16, ON_EXPERTS, PADDED]),
        (EXPERTS, 1, [BF16, ON_EXPERTS, FULL]),
        (EXPERTS, 1, [BF16, NF4_ON_EXPERTS]),
        ("1B", 1, [DDP, BF16, COMPILED]),
        ("1B", 1, [BF16, COMPILED]),
        ("1B", 1, [BF16, COMPILED, "activation_checkpointing={mode: full, every_n_blocks: 2}"]),
    ],
    # The plan includes 64 MiB of cuBLAS workspaces, as on GPUs of capability 9.0; 8.0 has 16 MiB
    (2, 90): [
        (NARROW, 1, [BF16, OFFLOAD, FULL]),
        (NARROW, 2, [BF16, OFFLOAD, FULL, PADDED]),
        (NARROW, 1, [FP32, OFFLOAD, SELECTIVE]),
        (NARROW, 1, [BF16, OFFLOAD, LORA, TO_HOST]),
        (QWEN3_5, 2, [BF16, FULL, SHORT]),
        (QWEN3_5, 1, [BF16, SHORT]),
        (QWEN3_5, 1, [BF16, SHORT, PADDED]),
        (QWEN3_5, 1, [DDP, BF16, SHORT]),
        (GPT_OSS, 1, [BF16, FULL, SHORT, ON_EXPERTS]),
        (GPT_OSS, 1, [BF16, SHORT, ON_EXPERTS, PADDED]),
    ],
    (1, 80): [
        (SMALL, 1, [DDP, BF16]),
        (SMALL, 1, [BF16, FULL]),
        ("1B", 2, [DDP, BF16]),
        ("1B", 1, [BF16, ONE_RANK, FULL]),
        ("1B", 2, [BF16, ONE_RANK, SELECTIVE]),
        ("1B", 2, [BF16, LORA, PADDED, FULL]),
        ("1B", 2, [BF16, NF4, FULL]),
        ("1B", 1, [FP32, PADDED, FULL]),
        ("1B", 2, [FP16, ONE_RANK, FULL, MUON]),
        (SMALL, 2, [BF16, ONE_RANK, STATE, FULL]),
        (SMALL, 2, [BF16, ONE_RANK, BUDGET, EMA]),
    ],
    (1, 90): [(NARROW, 2, [BF16, OFFLOAD, FULL])],
    (4, 90): [
        ("1B", 1, [HYBRID, BF16, FULL]),
        ("1B", 2, [HYBRID, BF16, SELECTIVE]),
        ("1B", 2, [HYBRID, BF16, FULL, REDUCE_ONCE]),
        (NARROW, 2, [HYBRID, BF16, OFFLOAD, FULL]),
    ],
    (8, 80): [("8B", 1, [BF16, FULL]), ("70B", 1, [BF16, LORA, FULL])],
}

TEXT = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "head_dim": 128}
TEXT |= {"num_key_value_heads": 4, "num_hidden_layers": 4, "vocab_size": 32000}
TEXT |= {"bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256}
SECTIONS = {"rope_parameters": MROPE | {"mrope_section": [24, 20, 20]}}
WIDE = {"depth": 4, "num_heads": 16, "out_hidden_size": 2048}
PICTURED = {
    "Qwen2.5-VL": {
        "text_config": TEXT | SECTIONS,
        "vision_config": WIDE
        | {"hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14, "window_size": 112}
        | {"fullatt_block_indexes": [1, 3]},
    },
    "Qwen3-VL": {
        "text_config": TEXT | SECTIONS,
        "vision_config": WIDE
        | {"hidden_size": 1152, "intermediate_size": 4304, "patch_size": 16}
        | {"deepstack_visual_indexes": [0, 1, 2]},
    },
    "Gemma 3": {
        "mm_tokens_per_image": 256,
        "text_config": TEXT | {"sliding_window": 1024},
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152}
        | {"intermediate_size": 4304, "num_hidden_layers": 4, "num_attention_heads": 16}
        | {"image_size": 896, "patch_size": 14, "vision_use_head": False},
    },
    "Gemma 4": {
        "text_config": TEXT
        | {"sliding_window": 1024, "vocab_size_per_layer_input": 32000, "global_head_dim": 256}
        | {"hidden_size_per_layer_input": 256, "use_bidirectional_attention": "vision"},
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 4}
        | {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 72, "patch_size": 16}
        | {"position_embedding_size": 10240},
    },
    "Idefics3": {
        "scale_factor": 2,
        "text_config": TEXT,
        "vision_config": {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 4}
        | {"num_attention_heads": 16, "image_size": 364, "patch_size": 14},
    },
    "Mistral 3": {
        "text_config": TEXT,
        "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4}
        | {"num_attention_heads": 16, "head_dim": 64, "image_size": 1540, "patch_size": 14},
    },
}
"""Four blocks of each, as wide as in Qwen2.5-VL-7B, Qwen3-VL-8B, Gemma 3, Idefics3-8B and Mistral Small 3.1
(towers) and models of 1B (text)."""
FROZEN, PROJECTOR, TOWER = (f"images.train={train}" for train in ("none", "projector", "all"))
IMAGES = [
    *((name, 1, [BF16, SHORT, TOWER]) for name in PICTURED),
    ("Qwen3-VL", 2, [BF16, SHORT, FROZEN]),
    ("Gemma 3", 1, [BF16, SHORT, TOWER, FULL]),
]
MORE_IMAGES = [
    (name, 1, [strategy, SHORT, train, *checkpointing])
    for name in PICTURED
    for strategy in (BF16, DDP)
    for train in (FROZEN, PROJECTOR, TOWER)
    for checkpointing in ((), (FULL,))
]
MORE_IMAGES += [
    ("Qwen3-VL", 2, [BF16, SHORT, TOWER, CONTEXT]),
    ("Qwen2.5-VL", 2, [BF16, SHORT, FROZEN, CONTEXT, "images.max_pixels=200704"]),
    ("Qwen2.5-VL", 2, [BF16, SHORT, FROZEN, FULL, TENSOR]),
    ("Gemma 3", 2, [BF16, SHORT, TOWER, TENSOR]),
]
MORE_IMAGES += [(name, 1, [BF16, SHORT, TOWER, COMPILED]) for name in ("Qwen2.5-VL", "Mistral 3")]


@pytest.fixture
def folder(tmp_path):
    """A folder with a recipe for each model."""
    for name, changes in PICTURED.items():
        family = name.lower().replace(" ", "").replace(".", "_").replace("-", "_")
        stem = name.replace(" ", "_")
        make_model(tmp_path / stem, family, replaced=changes, shape_only=True)
        (tmp_path / f"{stem}.yaml").write_text(
            "run: {name: measured, max_steps: 3}\n"
            f"model: {{path: {tmp_path / stem}}}\n"
            "images: {train: none}\n"
            "data: {train: [none.jsonl], kind: chat, sequence_length: 4096}\n"
            "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
        )
    for name, config in SHAPES.items():
        (tmp_path / f"{name.replace(' ', '_')}.yaml").write_text(
            "run: {name: measured, max_steps: 3}\n"
            f"model: {{config: {{{'' if 'model_type' in config else 'model_type: llama, '}{LLAMA}, {config}}}}}\n"
            "data: {train: [none.txt], tokenizer: bytes, sequence_length: 4096}\n"
            "batch: {global_batch_size: 1, micro_batch_size: 1}\n"
        )
    return tmp_path


def compared(folder, cases, *, ranks, timeout):
    """Yields (case, planned, measured) for each case; all are measured in one launch."""
    arguments = [
        [
            f"recipe={folder / name.replace(' ', '_')}.yaml",
            f"batch.global_batch_size={accumulated * ranks}",
            *overrides,
        ]
        for name, accumulated, overrides in cases
    ]
    for case, own, measured in zip(
        cases, arguments, measure_recipes(arguments, ranks=ranks, timeout=timeout), strict=True
    ):
        recipe = load_recipe(own, ranks=ranks, files=False).recipe
        plan = make_plan(recipe, known_machine("h100", nodes=1, gpus_per_node=ranks))
        yield case, plan.step.peak.components.total, measured


def check(results):
    off = [
        f"{case}: planned {planned:,}, measured {measured.peak:,} ({planned / measured.peak - 1:+.2%}), by step {measured.step_peaks}"
        for case, planned, measured in results
        if not -UNDER <= planned / measured.peak - 1 <= OVER
    ]
    assert not off, "planned and measured memory differ:\n" + "\n".join(off)


def test_plan_matches_the_caching_allocator(null_gpus, folder, monkeypatch):
    for name, value in null_gpus(count=2, capability=90).variables.items():
        monkeypatch.setenv(name, value)
    results = list(compared(folder, SAMPLE, ranks=2, timeout=300))
    check(results)
    (_, _, ddp), *_ = results
    # DDP frees its first buckets before it allocates the rebuilt ones
    assert ddp.step_peaks[1] == ddp.step_peaks[2]


def test_plan_of_towers_matches_the_caching_allocator(null_gpus, folder, monkeypatch):
    for name, value in null_gpus(count=2, capability=90).variables.items():
        monkeypatch.setenv(name, value)
    check(list(compared(folder, IMAGES, ranks=2, timeout=300)))


CLOCK = """
import torch
from launcher.planner.measurement import Clock
from tests.nullgpu.devices import preloaded

clock, library, waits = Clock(torch.device("cuda", 0)), preloaded(), []
torch.zeros(1, device="cuda")
micro_batches = ["forward", "backward"] * 3
for phase in ["data", *micro_batches, "optimizer"] * 2 + ["data"]:
    before = library.nullgpu_waits()
    clock.mark(phase)
    waits.append((phase, library.nullgpu_waits() - before))
assert all(count == (phase == "data") for phase, count in waits), waits
times = clock.times()
assert [phase for phase, _ in times] == [phase for phase, _ in waits]
seconds = [when for _, when in times]
assert seconds[0] == 0 and seconds == sorted(seconds), seconds
print("timed")
"""


def test_the_host_waits_between_timed_steps_only(null_gpus):
    output = run([sys.executable, "-c", CLOCK], **null_gpus(count=1).variables).check().output
    assert "timed" in output


def write_table(results, *, ranks, capability):
    """Appends the rows of a table to the file of LAUNCHER_MEMORY_TABLE, if it is set."""
    if file := os.environ.get("LAUNCHER_MEMORY_TABLE"):
        with Path(file).open("a") as table:
            for (name, accumulated, overrides), planned, measured in results:
                settings = ", ".join(
                    override.removeprefix("strategy.").replace(
                        "activation_checkpointing", "checkpointing"
                    )
                    for override in overrides
                )
                table.write(
                    f"| {name} | {ranks} | {capability} | {accumulated} | {settings} | {measured.peak / 2**30:.2f} | {planned / 2**30:.2f} "
                    f"| {planned / measured.peak - 1:+.2%} | {measured.reserved / measured.peak - 1:+.0%} |\n"
                )


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "capability"), GRID)
def test_plan_matches_the_allocator_in_all_combinations(
    null_gpus, folder, monkeypatch, ranks, capability
):
    for name, value in null_gpus(count=ranks, capability=capability).variables.items():
        monkeypatch.setenv(name, value)
    results = list(compared(folder, GRID[ranks, capability], ranks=ranks, timeout=1800))
    write_table(results, ranks=ranks, capability=capability)
    check(results)


@pytest.mark.long
def test_plan_of_towers_matches_the_allocator_in_all_combinations(null_gpus, folder, monkeypatch):
    for name, value in null_gpus(count=2, capability=90).variables.items():
        monkeypatch.setenv(name, value)
    results = list(compared(folder, MORE_IMAGES, ranks=2, timeout=1800))
    write_table(results, ranks=2, capability=90)
    check(results)
