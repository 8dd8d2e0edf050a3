"""Trains small models of many families on one GPU, and compares them with transformers' own models.

    python benchmarks/gpu_models.py               # one GPU: about two minutes
    python benchmarks/gpu_models.py --tiny        # smaller models, also on a CPU: does it run?

The launcher trains packed rows from a saved model with its usual parts: attention kernels for packed
rows, grouped products of experts, recurrent layers, loss in chunks. The reference is a plain loop in
float32 over single documents, with eager attention, on the same device. Prints a row of a Markdown
table for each family and variant: the relative differences of three losses and gradient norms, and for
bfloat16 also the largest of the plain loop under autocast. A variant that fails has its reason. Exit
status: 1 if one failed or exceeded its limit: in float32 2e-5 for losses and 2e-3 for gradient norms,
both in the first step, because AdamW's steps of gradients near zero have the sign of rounding; in
bfloat16 2e-2 and 1e-1, or three times the error of autocast.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from launcher.distributed.environment import prepare_cuda, read_environment

prepare_cuda(deterministic=False)  # before torch is imported, as a training run has it

import torch  # noqa: E402
import transformers  # noqa: E402

from launcher.distributed import process_group  # noqa: E402
from launcher.distributed.rank_layout import RankLayout  # noqa: E402
from launcher.recipe.load import load_recipe  # noqa: E402
from launcher.training.setup import Training, assemble  # noqa: E402
from tests.distributed import images_worker, recurrent_worker  # noqa: E402
from tests.image_models import make_model  # noqa: E402

NULL = "NULLGPU_COUNT" in os.environ
"""Whether the GPU is a null GPU (tests/nullgpu), which computes no values."""
COLUMNS = (
    "model | variant | attention | loss | loss, error | gradient norm, error "
    "| loss, autocast | gradient norm, autocast | holds | s"
)
VOCABULARY, LENGTH = 512, 256
RECIPE = f"""
run: {{name: models, max_steps: {recurrent_worker.STEPS}, seed: 7, float32_matmul: highest}}
model: {{path: FOLDER/MODEL}}
data: {{kind: tokens, train: FOLDER/train.jsonl, sequence_length: {LENGTH}, shuffle: false, workers: 0, cache: FOLDER/cache}}
batch: {{global_batch_size: {recurrent_worker.BATCH}, micro_batch_size: 2}}
strategy: {{mixed_precision: null}}
optimizer: {{learning_rate: {recurrent_worker.RATE}, weight_decay: 0.0}}
schedule: {{warmup_steps: {recurrent_worker.STEPS}}}
"""
"""Its rate is that of the plain loop."""

BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
WINDOW = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "head_dim": 32,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
}
DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 128}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": BASE,
    "qwen2": BASE,
    "qwen3": BASE,
    "mistral": BASE | {"sliding_window": 64},
    "phi3": BASE,
    "olmo2": BASE,
    "glm4": BASE,
    "smollm3": BASE,
    "gemma2": BASE | WINDOW,
    "gemma3_text": BASE | WINDOW,
    "gemma4_text": BASE
    | WINDOW
    | {"hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCABULARY}
    | {"global_head_dim": 128},
    "cohere2": BASE | WINDOW,
    "mixtral": BASE | {"num_local_experts": 8},
    "qwen3_moe": BASE | EXPERTS,
    "glm4_moe": BASE | LATENT | {"num_key_value_heads": 2, "head_dim": 64, "n_shared_experts": 1},
    "deepseek_v3": BASE | LATENT,
    "gpt_oss": BASE | WINDOW | {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_5_text": BASE | DELTA,
    "qwen3_5_moe_text": BASE | DELTA | SHARED,
    "qwen3_next": BASE | DELTA | SHARED,
    "granitemoehybrid": BASE
    | MAMBA
    | {"layer_types": ["mamba", "attention"], "num_local_experts": 8, "num_experts_per_tok": 2}
    | {"shared_intermediate_size": 128},
    "falcon_h1": BASE | MAMBA | {"mamba_d_ssm": 512},
    "nemotron_h": BASE
    | {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4}
    | {"mamba_num_heads": 8, "mamba_head_dim": 64, "ssm_state_size": 32, "n_groups": 2}
    | {"chunk_size": 64, "n_routed_experts": 8, "n_group": 1, "topk_group": 1}
    | {"num_experts_per_tok": 2, "moe_intermediate_size": 128}
    | {"moe_shared_expert_intermediate_size": 128},
    "lfm2": BASE | {"layer_types": ["conv", "full_attention"], "block_ff_dim": 512},
    "llama4_text": BASE
    | {"num_local_experts": 8, "interleave_moe_layer_step": 1, "intermediate_size_mlp": 512}
    | {"attention_chunk_size": LENGTH},
}
"""Families by model type, with heads as kernels of GPUs know them."""
SMALLER: dict[str, Any] = {
    "hidden_size": 128,
    "head_dim": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
"""What --tiny changes in families that have these sizes only."""
TINY = ("llama", "mistral", "qwen3_moe", "qwen2_5_vl")
IMAGES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "gemma4", "idefics3", "llava")

FSDP = "strategy.kind=fsdp"
HALF = "strategy.mixed_precision={param_dtype: bfloat16}"
VARIANTS = {
    "float32": ["strategy.kind=ddp"],
    "bfloat16, fsdp": [FSDP, "strategy.sync_every_micro_batch=true", HALF],
}
COMPILED = {
    "bfloat16, compiled, checkpointing": [
        "strategy.kind=ddp",
        HALF,
        "model.compile=true",
        "activation_checkpointing={mode: full}",
    ]
}
COMPILED_FAMILIES = ("qwen3_moe", "gpt_oss", "qwen3_5_text", "gemma3_text", "llama")
LIMITS = {"float32": [2e-5, 2e-3], "bfloat16": [2e-2, 1e-1]}
"""Of losses and gradient norms, by the first word of a variant."""


@dataclasses.dataclass
class Report:
    """Prints the table and remembers what failed."""

    failed: list[str] = dataclasses.field(default_factory=list)

    def start(self) -> None:
        """Prints the head of the table."""
        print(f"| {COLUMNS} |\n|---|{'---|' * COLUMNS.count('|')}", flush=True)

    def add(self, model: str, variant: str, measure: Callable[[], list[str]]) -> None:
        """Prints the cells that `measure` returns, or why it failed."""
        started = time.monotonic()
        try:
            cells = measure()
        except Exception as error:  # the other variants run all the same
            traceback.print_exc()
            first = str(error).replace("|", "/").splitlines() or [""]
            cells = [f"failed: {type(error).__name__}: {first[0][:300]}", *[""] * 6]
            self.failed.append(f"{model}, {variant}")
        else:
            if cells[-1] == "NO":
                self.failed.append(f"{model}, {variant}")
        seconds = f"{time.monotonic() - started:.1f}"
        print(f"| {' | '.join([model, variant, *cells, seconds])} |", flush=True)
        gc.collect()
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class Reference:
    """Losses and gradient norms of the plain loop, in float32 and under autocast."""

    def __init__(self, loop: Callable[[], dict[str, Any]], device: torch.device) -> None:
        self.exact = loop()
        # Its cache of rounded weights would outlive an optimizer step
        with torch.autocast(device.type, torch.bfloat16, cache_enabled=False):
            self.rounded = loop()

    def cells(self, found: dict[str, Any], *, attention: str, variant: str) -> list[str]:
        """The cells of a row."""
        precision = variant.split(",")[0]
        every = self._errors(found)
        limits, cells = LIMITS[precision], ["", ""]
        errors = [each[0] if precision == "float32" else max(each) for each in every]
        if precision != "float32":
            rounded = [max(each) for each in self._errors(self.rounded)]
            cells = [f"{error:.1e}" for error in rounded]
            limits = [max(one, 3 * other) for one, other in zip(limits, rounded, strict=True)]
        holds = all(error <= limit for error, limit in zip(errors, limits, strict=True))
        losses = self.exact["losses"]
        return [
            attention,
            f"{losses[0]:.4f} to {losses[-1]:.4f}",
            *(", ".join(f"{error:.1e}" for error in each) for each in every),
            *cells,
            "no values" if NULL else "yes" if holds else "NO",
        ]

    def _errors(self, found: dict[str, Any]) -> list[list[float]]:
        """Of the losses and of the gradient norms of each step."""
        return [
            [
                abs(a - b) / (abs(b) or 1.0)
                for a, b in zip(found[name], self.exact[name], strict=True)
            ]
            for name in ("losses", "norms")
        ]


def train(training: Training) -> dict[str, Any]:
    """Losses and gradient norms of a run on one rank."""
    losses, norms = [], []
    for step in training.all_steps:
        losses.append(float(step.loss))
        norms.append(float(step.grad_norm))
    return {"losses": losses, "norms": norms}


def save_model(folder: Path, name: str, config: dict[str, Any]) -> None:
    """Saves a model with random weights that are larger than initial ones, so that a mistake in
    masks or positions changes the loss."""
    torch.manual_seed(0)
    settings = transformers.AutoConfig.for_model(name, **config)
    model = transformers.AutoModelForCausalLM.from_config(settings, dtype=torch.float32)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("A_log"):  # states that are kept for 1 to 30 tokens
                parameter.uniform_(0.1, 15).log_()
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.06)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder / name)


def save_rows(folder: Path, *, rows: int) -> None:
    """Saves documents of 5 to 150 tokens."""
    generator = torch.Generator().manual_seed(3)
    lines = []
    for _ in range(rows):
        length = int(torch.randint(5, 150, (), generator=generator))
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator).tolist()
        lines.append(json.dumps({"input_ids": ids}))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


def text_families(
    folder: Path,
    ranks: RankLayout,
    report: Report,
    *,
    models: list[str],
    variants: list[str],
    tiny: bool,
    end: float,
) -> None:
    """Compares families of MODELS; the compiled variants come last, because they take longest."""
    save_rows(folder, rows=100)
    plain: dict[str, Reference] = {}

    def loop(name: str, dataset: Any) -> dict[str, Any]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder / name, dtype=torch.float32, attn_implementation="eager"
        )
        for module in model.modules():  # without kernels of other packages
            if hasattr(module, "chunk_gated_delta_rule"):
                code = sys.modules[type(module).__module__]
                module.chunk_gated_delta_rule = code.torch_chunk_gated_delta_rule
        model.train().to(ranks.device)
        found: dict[str, Any] = recurrent_worker.plain_loop(model, dataset)  # type: ignore[no-untyped-call]
        return found

    def measure(name: str, variant: str, overrides: list[str]) -> list[str]:
        file = folder / f"{name}.yaml"
        if not file.exists():
            save_model(folder, name, MODELS[name] | (SMALLER if tiny else {}))
            file.write_text(RECIPE.replace("FOLDER", str(folder)).replace("MODEL", name))
        words = [f"recipe={file}", *overrides]
        if name == "gemma2":  # it supports no other attention
            words.append("model.attention=eager")
        training = assemble(load_recipe(words, ranks=1).recipe, ranks=ranks)
        if name not in plain:
            plain[name] = Reference(partial(loop, name, training.data.training), ranks.device)
        dataset: Any = training.data.training
        found = train(training)
        return plain[name].cells(
            found, attention=str(dataset.inputs.document_masking), variant=variant
        )

    jobs = [(name, *variant) for name in models for variant in VARIANTS.items()]
    if not tiny:
        compiled = [name for name in COMPILED_FAMILIES if name in models]
        jobs += [(name, *variant) for name in compiled for variant in COMPILED.items()]
    for name, variant, overrides in jobs:
        if variants and variant not in variants:
            continue
        if time.monotonic() > end:
            print(f"not started: {name}, {variant}", flush=True)
            continue
        report.add(name, variant, partial(measure, name, variant, overrides))


def image_families(
    folder: Path, ranks: RankLayout, report: Report, *, models: list[str], end: float
) -> None:
    """Compares models of images and text: with transformers' processor and model on single rows."""
    folder.mkdir()
    rows = images_worker.write_rows(folder)  # type: ignore[no-untyped-call]
    plain: dict[str, Reference] = {}

    def measure(family: str, variant: str, overrides: list[str]) -> list[str]:
        file = folder / f"{family}.yaml"
        if not file.exists():
            make_model(folder / family, family)  # type: ignore[no-untyped-call]
            text = images_worker.RECIPE.replace("FOLDER", str(folder)).replace("FAMILY", family)
            text = text.replace("LENGTH", str(images_worker.LONGEST.get(family, 160)))
            file.write_text(text.replace("seed: 7", "seed: 7, float32_matmul: highest"))
        recipe = load_recipe([f"recipe={file}", *overrides], ranks=1).recipe
        training = assemble(recipe, ranks=ranks)
        dataset: Any = training.data.training
        size = recipe.batch.global_batch_size
        if family not in plain:
            steps = [
                [
                    document
                    for index in range(step * size, (step + 1) * size)
                    for document, _, _ in dataset.pieces(index)
                ]
                for step in range(images_worker.STEPS)
            ]
            loop = partial(images_worker.plain_loop, folder, family, rows, "all", steps)
            plain[family] = Reference(partial(loop, device=ranks.device), ranks.device)
        found = train(training)
        return plain[family].cells(
            found, attention=str(dataset.inputs.document_masking), variant=variant
        )

    for family in models:
        for variant, overrides in VARIANTS.items():
            if time.monotonic() > end:
                print(f"not started: {family}, {variant}", flush=True)
                continue
            name = f"{family} (images)"
            report.add(name, variant, partial(measure, family, variant, overrides))


def main() -> int:
    """Prints the table and returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tiny", action="store_true", help="small models: does everything run?")
    parser.add_argument("--models", nargs="+", choices=[*IMAGES, *MODELS], metavar="MODEL")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS, *COMPILED], metavar="VARIANT")
    parser.add_argument("--seconds", type=float, default=3600, help="no variant starts later")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    environment, report = read_environment(), Report()
    end = time.monotonic() + options.seconds
    with (
        tempfile.TemporaryDirectory() as temporary,
        process_group.process_group(environment, device="any", init_timeout=300) as (ranks, _),
    ):
        process_group.prepare_cpu(environment, device=ranks.device, cpu_offload=False)
        process_group.set_numerics(deterministic=False, float32_matmul="highest")
        report.start()
        folder = Path(temporary)
        chosen = options.models or (TINY if options.tiny else [*IMAGES, *MODELS])
        # Image features take the places of tokens, which null GPUs do not find
        models = [name for name in IMAGES if name in chosen and not NULL]
        image_families(folder / "images", ranks, report, models=models, end=end)
        models = [name for name in MODELS if name in chosen]
        text_families(
            folder,
            ranks,
            report,
            models=models,
            variants=options.variants,
            tiny=options.tiny,
            end=end,
        )
    if report.failed:
        print("\nFailed:", *report.failed, sep="\n  ")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
