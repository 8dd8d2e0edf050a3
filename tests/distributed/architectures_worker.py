"""Loads, trains, exports and reloads many architectures on two ranks.

    torchrun --nproc-per-node 2 architectures_worker.py FOLDER [CASE ...]

Writes results.json to FOLDER, with the results or the traceback of each case,
or of the named ones.
"""

import ctypes
import gc
import os
import sys
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import transformers

from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.units import Unit
from launcher.models import safetensors_files
from launcher.models.build import build_model
from launcher.models.description import (
    describe,
    modules_without_text,
    outer_units,
    parts_without_text,
)
from launcher.models.hugging_face_files import export_hugging_face
from launcher.models.initialization import random_weights
from launcher.models.load import open_checkpoint, pretrained_weights
from launcher.models.lora import add_adapters
from launcher.recipe.schema import (
    ActivationCheckpointing,
    CpuOffload,
    Lora,
    MixedPrecision,
    Model,
    Strategy,
)
from launcher.strategies.wrap import Parts, wrap
from tests import multimodal
from tests.distributed.launching import end_worker
from tests.distributed.messages import logged

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GATED = SIZES | {"intermediate_size": 48, "num_key_value_heads": 2}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ARCHITECTURES = {
    "llama": GATED,
    "llama_tied": GATED | {"model_type": "llama", "tie_word_embeddings": True},
    "qwen3": GATED | {"head_dim": 8},
    "mistral": GATED | {"sliding_window": 8},
    "gemma2": GATED | {"head_dim": 8, "sliding_window": 8, "tie_word_embeddings": True},
    "gemma3_text": GATED
    | {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": GATED | NO_DROPOUT,
    "gpt2": {
        "vocab_size": 64,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **NO_DROPOUT,
    },
    "gpt_neox": SIZES | {"intermediate_size": 48},
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "starcoder2": GATED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "mixtral": GATED | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": GATED
    | {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_only_layers": [0],
    },
}
FULL = ActivationCheckpointing()
STRATEGIES = {
    "ddp": Strategy(kind="ddp", mixed_precision=None),
    "fsdp": Strategy(kind="fsdp", mixed_precision=None),
    "offload": Strategy(kind="fsdp", mixed_precision=None, cpu_offload=CpuOffload()),
}
HYBRID = {"hybrid": Strategy(kind="fsdp", mixed_precision=None, replicate=2)}
AUTO = {
    "causal_lm": transformers.AutoModelForCausalLM,
    "sequence_classification": transformers.AutoModelForSequenceClassification,
    "masked_lm": transformers.AutoModelForMaskedLM,
    "images": transformers.AutoModelForImageTextToText,
}
ATTENTION = {"gemma2": "eager"}


class Worker:
    def __init__(self, folder, chosen):
        """chosen: the cases that are run; empty: all."""
        self.chosen = chosen
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.folder, self.rank = folder, dist.get_rank()
        self.ranks = RankLayout(
            rank=self.rank, size=dist.get_world_size(), group=dist.group.WORLD, device=CPU
        )
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 64, (4, 12), generator=generator)
        self.results = {}

    def case(self, name, function):
        """Stores the result of the function, or its traceback.

        If only one rank fails, the other one can block in a collective, and results.json is never
        written. The traceback is therefore also printed.
        """
        if self.chosen and name not in self.chosen:
            return
        started = time.monotonic()
        try:
            self.results[name] = function()
        except Exception:
            self.results[name] = {"error": traceback.format_exc()}
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
        failed = torch.tensor(int("error" in self.results[name]))
        dist.all_reduce(failed)
        self.results[name]["failed_ranks"] = failed.item()
        if self.rank == 0:
            print(f"{time.monotonic() - started:.2f} s  {name}", flush=True)

    def save(self, name, config, task="causal_lm", **options):
        """Saves a checkpoint in which all weights differ from their initial values."""
        path = self.folder / name
        if self.rank == 0:
            torch.manual_seed(1)
            fields = {"model_type": name} | config
            model = AUTO[task].from_config(
                transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
            )
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            dtype = options.pop("dtype", torch.float32)
            model.to(dtype).save_pretrained(path, **options)
        dist.barrier()
        return path

    def reference(self, path, task="causal_lm"):
        attention = ATTENTION.get(path.name.split("-")[0], "sdpa")
        model = (
            AUTO[task]
            .from_pretrained(path, dtype=torch.float32, attn_implementation=attention)
            .eval()
        )
        with torch.no_grad():
            return model(self.ids).logits

    def wrapped(
        self,
        path,
        strategy,
        *,
        task="causal_lm",
        lora=None,
        checkpointing=FULL,
        num_labels=None,
        freeze=None,
    ):
        attention = ATTENTION.get(path.name, "sdpa")
        known = "causal_lm" if task == "images" else task
        section = Model(
            path=str(path), task=known, attention=attention, freeze=freeze, num_labels=num_labels
        )
        model = build_model(section, sequence_length=16)
        blocks, unused = describe(model).blocks, modules_without_text(model)
        assert blocks, f"{type(model).__name__} has no blocks"
        assert bool(unused) is (task == "images")
        for name in parts_without_text(model):
            model.get_parameter(name).requires_grad_(False)
        checkpoint = open_checkpoint(path, model)
        if lora is not None:
            precision = strategy.mixed_precision
            dtype = torch.float32 if precision is None else getattr(torch, precision.param_dtype)
            add_adapters(model, lora, base_dtype=dtype, base=str(path))
        init_fn = partial(pretrained_weights, checkpoint=checkpoint, seed=5)
        return wrap(
            model,
            Parts(
                blocks, [*(Unit((m,), called=False) for m in unused), *outer_units(model, blocks)]
            ),
            strategy=strategy,
            checkpointing=checkpointing,
            ranks=self.ranks,
            init_fn=init_fn,
        )

    def no_cache(self, wrapped):
        """Like the launcher, disables the KV cache: each recomputation would append to it again."""
        text = wrapped.module.config.get_text_config(decoder=True)
        return {"use_cache": False} if hasattr(text, "use_cache") else {}

    def logits(self, wrapped):
        def logits_of(model):
            return model(self.ids, **self.no_cache(wrapped)).logits

        with wrapped.evaluating():
            return wrapped.without_gradients(logits_of)

    def train(self, wrapped, steps=2, learning_rate=1e-3):
        """Trains each rank on half of the rows; returns the mean losses of all rows."""
        optimizer = torch.optim.AdamW(
            [p for p in wrapped.module.parameters() if p.requires_grad],
            lr=learning_rate,
            fused=True,
        )
        rows = self.ids[self.rank :: 2]
        losses = []

        def loss_of(model):
            logits = model(rows, **self.no_cache(wrapped)).logits.float()
            if logits.ndim == 3:
                return nn.functional.cross_entropy(
                    logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()
                )
            return nn.functional.cross_entropy(logits, rows[:, 0] % logits.shape[1])

        wrapped.root.train()
        for _ in range(steps):
            with wrapped.micro_batch(last=True):
                loss = wrapped.call(loss_of)
                loss.backward()
            assert torch.isfinite(wrapped.grad_norm())
            optimizer.step()
            optimizer.zero_grad()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(total.item() / 2)
        return losses

    def export(self, wrapped, name, **options):
        out = self.folder / "exports" / name
        export_hugging_face(wrapped.module, out, rank=self.rank, device=CPU, **options)
        dist.barrier()
        return out

    def round_trip(self, name, path, task="causal_lm", strategies=STRATEGIES, **options):
        """Loads, compares, trains, exports and reloads the model under each strategy."""
        expected = self.reference(path, task)
        result = {}
        for strategy_name, strategy in strategies.items():
            wrapped = self.wrapped(path, strategy, task=task, **options)
            note = {"loaded": (self.logits(wrapped) - expected).abs().max().item()}
            note["losses"] = self.train(wrapped)
            trained = self.logits(wrapped)
            note["changed"] = (trained - expected).abs().max().item()
            with mock.patch.object(
                safetensors_files, "MAX_FILE_BYTES", 30_000
            ):  # forces several files
                out = self.export(wrapped, f"{name}-{strategy_name}")
            note["reloaded"] = (self.reference(out, task) - trained).abs().max().item()
            note["same_names"] = stored_names(out) == stored_names(path)
            result[strategy_name] = note
        return result

    def classification(self, name, config):
        """Trains a base model with a new head. Initial weights must not depend on the strategy."""
        path = self.save(
            f"{name}_base",
            {"model_type": name} | config,
            task="masked_lm" if name == "bert" else "causal_lm",
        )
        result = {}
        for strategy_name, strategy in STRATEGIES.items():
            with logged() as notes:
                wrapped = self.wrapped(path, strategy, task="sequence_classification", num_labels=3)
            start = self.logits(wrapped)
            losses = self.train(wrapped)
            trained = self.logits(wrapped)
            out = self.export(wrapped, f"{name}_classes_{strategy_name}")
            difference = (
                (self.reference(out, "sequence_classification") - trained).abs().max().item()
            )
            result[strategy_name] = {
                "start": start.tolist(),
                "losses": losses,
                "notes": notes,
                "reloaded": difference,
            }
        return result

    def from_config(self, name, config):
        """Trains without a checkpoint.

        The export must have the parameter names of the hub, although sharding renames the classes.
        """
        result = {}
        for strategy_name, strategy in STRATEGIES.items():
            model = build_model(Model(config={"model_type": name} | config), sequence_length=16)
            blocks = describe(model).blocks
            init_fn = partial(random_weights, seed=5)
            wrapped = wrap(
                model,
                Parts(blocks, outer_units(model, blocks)),
                strategy=strategy,
                checkpointing=FULL,
                ranks=self.ranks,
                init_fn=init_fn,
            )
            losses = self.train(wrapped)
            trained = self.logits(wrapped)
            out = self.export(wrapped, f"{name}_config-{strategy_name}")
            difference = (self.reference(out) - trained).abs().max().item()
            same = stored_names(out) == stored_names(self.folder / name)
            result[strategy_name] = {"losses": losses, "reloaded": difference, "same_names": same}
        return result

    def frozen(self, path):
        """Freezes the embedding and the first block.

        Recomputation must support inputs that do not require a gradient.
        """
        result = {}
        for strategy_name, strategy in STRATEGIES.items():
            wrapped = self.wrapped(
                path, strategy, freeze=("model.embed_tokens.*", "model.layers.0.*")
            )
            frozen = {
                name
                for name, parameter in wrapped.module.named_parameters()
                if not parameter.requires_grad
            }
            before = {
                name: unsharded(parameter).clone()
                for name, parameter in wrapped.module.named_parameters()
            }
            losses = self.train(wrapped)
            changed = {
                name
                for name, p in wrapped.module.named_parameters()
                if not torch.equal(unsharded(p), before[name])
            }
            result[strategy_name] = {
                "losses": losses,
                "frozen": len(frozen),
                "trained_ones_changed": changed == set(before) - frozen,
            }
        return result

    def memory(self):
        """Measures the peak of anonymous memory while a checkpoint is loaded and exported.

        Pages of memory-mapped files belong to the kernel and do not count.
        """
        config = (
            {"model_type": "llama"}
            | GATED
            | {
                "hidden_size": 512,
                "intermediate_size": 1536,
                "vocab_size": 2048,
                "num_hidden_layers": 12,
            }
        )
        path = self.save("large", config, dtype=torch.bfloat16, max_shard_size="30MB")
        result = {}
        for name, strategy in {**STRATEGIES, **HYBRID}.items():
            model = build_model(Model(path=str(path)), sequence_length=16)
            blocks = describe(model).blocks
            checkpoint = open_checkpoint(path, model)
            init_fn = partial(pretrained_weights, checkpoint=checkpoint, seed=5)
            figures = {"whole": sum(p.numel() for p in model.parameters()) * 4}
            figures["block"] = sum(p.numel() for p in blocks["model.layers.0"].parameters()) * 4

            def measured_init_fn(model, *devices, init_fn=init_fn, figures=figures):
                gc.collect()
                with Peak() as peak:
                    init_fn(model, *devices)
                figures["peak"] = peak.grown
                figures["shards"] = sum(local(p).numel() for p in model.parameters()) * 4

            wrapped = wrap(
                model,
                Parts(blocks),
                strategy=strategy,
                checkpointing=None,
                ranks=self.ranks,
                init_fn=measured_init_fn,
            )
            figures["largest"] = max(p.numel() for p in wrapped.module.parameters()) * 4
            limit = mock.patch.object(safetensors_files, "MAX_FILE_BYTES", 15_000_000)
            with limit, Peak() as peak:
                self.export(wrapped, f"large-{name}")
            figures["exporting"] = peak.grown
            del wrapped, model
            gc.collect()
            all_figures = [None] * self.ranks.size
            dist.all_gather_object(all_figures, figures)
            result[name] = {"ranks": all_figures}
        return result

    def lora(self, name, path, precision=None, task="causal_lm", **options):
        """Trains only LoRA adapters, which do not change the initial logits.

        peft must load the exported adapters.
        """
        import peft

        result = {}
        for strategy_name, plain in STRATEGIES.items():
            strategy = Strategy(
                kind=plain.kind, cpu_offload=plain.cpu_offload, mixed_precision=precision
            )
            wrapped = self.wrapped(
                path, strategy, task=task, lora=Lora(rank=4, alpha=8.0), **options
            )
            first = self.logits(wrapped)
            losses = self.train(wrapped, learning_rate=1e-2)
            trained = self.logits(wrapped)
            adapter = self.export(wrapped, f"{name}_adapter_{strategy_name}")
            merged = self.export(wrapped, f"{name}_merged_{strategy_name}", merged=True)
            base = AUTO[task].from_pretrained(
                path, dtype=torch.float32, **({"num_labels": 3} if task != "causal_lm" else {})
            )
            loaded = peft.PeftModel.from_pretrained(base, adapter).eval()
            with torch.no_grad():
                through_peft = loaded(self.ids).logits
            parameters = dict(wrapped.module.named_parameters())
            result[strategy_name] = {
                "first": first.tolist(),
                "losses": losses,
                "changed": (trained - first).abs().max().item(),
                "peft": (through_peft - trained).abs().max().item(),
                "merged": (self.reference(merged, task) - trained).abs().max().item(),
                "files": sorted(file.name for file in adapter.iterdir()),
                "base_dtypes": sorted(
                    {str(p.dtype) for p in parameters.values() if not p.requires_grad}
                ),
                "trained_dtypes": sorted(
                    {str(p.dtype) for p in parameters.values() if p.requires_grad}
                ),
                "trained": sum(p.numel() for p in parameters.values() if p.requires_grad),
            }
        return result


class Peak:
    """Measures the growth of this process's anonymous memory in bytes, at its peak."""

    def __enter__(self):
        ctypes.CDLL(None).malloc_trim(
            0
        )  # otherwise allocations would reuse freed memory and hide the growth
        self._stop = threading.Event()
        self._start = self._highest = self._now()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._stop.set()
        self._thread.join()
        self.grown = max(self._highest, self._now()) - self._start

    def _watch(self):
        while not self._stop.wait(0.001):
            self._highest = max(self._highest, self._now())

    @staticmethod
    def _now():
        lines = Path("/proc/self/status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def local(tensor):
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def unsharded(tensor):
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def stored_names(folder):
    from launcher.models.safetensors_files import open_folder

    return sorted(open_folder(folder).tensors)


def main(folder, *cases):
    worker = Worker(folder, cases)
    worker.case("memory", worker.memory)
    for name, config in ARCHITECTURES.items():
        worker.case(
            name,
            lambda name=name, config=config: worker.round_trip(name, worker.save(name, config)),
        )
    for name, config in multimodal.MODELS.items():
        worker.case(
            name,
            lambda name=name, config=config: worker.round_trip(
                name, worker.save(name, config, task="images"), task="images"
            ),
        )
    llama = ARCHITECTURES["llama"]
    path = worker.save(
        "bf16", {"model_type": "llama"} | llama, dtype=torch.bfloat16, max_shard_size="20KB"
    )
    worker.case("bf16 in several files", lambda: worker.round_trip("bf16", path))
    for name in ("llama", "mixtral", "bf16"):
        worker.case(
            f"hybrid {name}",
            lambda name=name: worker.round_trip(f"{name}_copies", folder / name, strategies=HYBRID),
        )
    for name in ("gpt_neox", "mixtral"):
        worker.case(
            f"from config {name}", lambda name=name: worker.from_config(name, ARCHITECTURES[name])
        )
    worker.case("frozen", lambda: worker.frozen(folder / "llama"))
    classifier = worker.save(
        "classifier",
        {"model_type": "llama", "num_labels": 3} | llama,
        task="sequence_classification",
    )
    worker.case(
        "classifier",
        lambda: worker.round_trip("classifier", classifier, task="sequence_classification"),
    )
    worker.case("classes on llama", lambda: worker.classification("llama", llama))
    bert = SIZES | {
        "intermediate_size": 48,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    worker.case("classes on bert", lambda: worker.classification("bert", bert))
    worker.case("lora llama", lambda: worker.lora("llama", folder / "llama"))
    worker.case("lora gpt2", lambda: worker.lora("gpt2", folder / "gpt2"))
    worker.case("lora mixtral", lambda: worker.lora("mixtral", folder / "mixtral"))
    half = MixedPrecision()
    worker.case("lora llama bfloat16", lambda: worker.lora("llama_half", folder / "llama", half))
    worker.case(
        "lora mixtral bfloat16", lambda: worker.lora("mixtral_half", folder / "mixtral", half)
    )
    worker.case(
        "lora classes",
        lambda: worker.lora(
            "classes", folder / "llama", task="sequence_classification", num_labels=3
        ),
    )
    end_worker(folder, worker.results)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
