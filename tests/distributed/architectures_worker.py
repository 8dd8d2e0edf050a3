"""Many architectures through load, train, export and back, in one torchrun of two ranks.

    torchrun --nproc-per-node 2 architectures_worker.py FOLDER

Writes results.json to FOLDER: by case, either figures or the error it ended with.
"""

import json
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

import transformers

from launcher.model.build import build_model, find_blocks
from launcher.model.checkpoint import open_checkpoint, pretrained_weights
from launcher.model.export import export_hugging_face
from launcher.model.lora import add_adapters
from launcher.processes import DataParallel
from launcher.recipe.schema import ActivationCheckpointing, CpuOffload, Lora, MixedPrecision, Model, Strategy
from launcher.strategies import wrap

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
    "phi": GATED | NO_DROPOUT,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2, **NO_DROPOUT},
    "gpt_neox": SIZES | {"intermediate_size": 48},
    "opt": SIZES | {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0},
    "starcoder2": GATED | {"residual_dropout": 0.0, "embedding_dropout": 0.0},
    "mixtral": GATED | {"num_local_experts": 3, "num_experts_per_tok": 2},
    "qwen3_moe": GATED | {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [0]},
}
FULL = ActivationCheckpointing()
STRATEGIES = {
    "ddp": Strategy(kind="ddp", mixed_precision=None),
    "fsdp": Strategy(kind="fsdp", mixed_precision=None),
    "offload": Strategy(kind="fsdp", mixed_precision=None, cpu_offload=CpuOffload()),
}
AUTO = {"causal_lm": transformers.AutoModelForCausalLM, "sequence_classification": transformers.AutoModelForSequenceClassification}


class Worker:
    def __init__(self, folder):
        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        self.folder, self.rank = folder, dist.get_rank()
        self.ranks = DataParallel(rank=self.rank, size=dist.get_world_size(), group=dist.group.WORLD, device=CPU)
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, 64, (4, 12), generator=generator)
        self.results = {}

    def case(self, name, function):
        """Notes what the function returns, or the error. A rank that fails alone would leave the other one waiting: torchrun
        then ends both, so the name is printed first."""
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
        """A checkpoint with weights that are all different from their first values."""
        path = self.folder / name
        if self.rank == 0:
            torch.manual_seed(1)
            fields = {"model_type": name} | config
            model = AUTO[task].from_config(transformers.AutoConfig.for_model(fields.pop("model_type"), **fields))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.add_(torch.randn_like(parameter) * 0.05)
            dtype = options.pop("dtype", torch.float32)
            model.to(dtype).save_pretrained(path, **options)
        dist.barrier()
        return path

    def reference(self, path, task="causal_lm"):
        model = AUTO[task].from_pretrained(path, dtype=torch.float32).eval()
        with torch.no_grad():
            return model(self.ids).logits

    def wrapped(self, path, strategy, *, task="causal_lm", lora=None, checkpointing=FULL, num_labels=None, notes=None, compile=False):
        section = Model(path=str(path), task=task)
        say = notes.append if notes is not None else None
        model = build_model(section, sequence_length=16, num_labels=num_labels)
        blocks = find_blocks(model)
        assert blocks, f"{type(model).__name__} has no blocks"
        checkpoint = open_checkpoint(path, model, say=say)
        if lora is not None:
            precision = strategy.mixed_precision
            dtype = torch.float32 if precision is None else getattr(torch, precision.param_dtype)
            add_adapters(model, lora, blocks=blocks, base_dtype=dtype, base=str(path), say=say)
        fill = partial(pretrained_weights, checkpoint=checkpoint, blocks=blocks, seed=5, group=self.ranks.group)
        return wrap(
            model, strategy=strategy, checkpointing=checkpointing, compile=compile, blocks=blocks, ranks=self.ranks, fill=fill
        )

    def no_cache(self, wrapped):
        """As the launcher calls a causal model: a cache would grow again in every recomputation."""
        return {"use_cache": False} if hasattr(wrapped.module.config, "use_cache") else {}

    def logits(self, wrapped):
        wrapped.model.eval()
        with torch.no_grad(), wrapped.forward_context():
            logits = wrapped.model(self.ids, **self.no_cache(wrapped)).logits
        wrapped.reshard()
        return logits

    def train(self, wrapped, steps=2, learning_rate=1e-3):
        """Each rank has half of the rows; the loss is the mean over all."""
        optimizer = torch.optim.AdamW([p for p in wrapped.module.parameters() if p.requires_grad], lr=learning_rate, fused=True)
        rows = self.ids[self.rank :: 2]
        losses = []
        wrapped.model.train()
        for _ in range(steps):
            with wrapped.micro_batch(last=True):
                with wrapped.forward_context():
                    logits = wrapped.model(rows, **self.no_cache(wrapped)).logits.float()
                    if logits.ndim == 3:
                        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
                    else:
                        loss = nn.functional.cross_entropy(logits, rows[:, 0] % logits.shape[1])
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

    def whole_way(self, name, path, task="causal_lm", **options):
        """Load, compare, train, export, reload, under each strategy."""
        expected = self.reference(path, task)
        result = {}
        for strategy_name, strategy in STRATEGIES.items():
            wrapped = self.wrapped(path, strategy, task=task, **options)
            note = {"loaded": (self.logits(wrapped) - expected).abs().max().item()}
            note["losses"] = self.train(wrapped)
            trained = self.logits(wrapped)
            note["changed"] = (trained - expected).abs().max().item()
            # Small files, so that there are several
            out = self.export(wrapped, f"{name}_{strategy_name}", max_file_bytes=30_000)
            note["reloaded"] = (self.reference(out, task) - trained).abs().max().item()
            note["same_names"] = stored_names(out) == stored_names(path)
            result[strategy_name] = note
        return result

    def classification(self, name, config):
        """A base model with a new head: said, drawn the same everywhere, and trained."""
        path = self.save(f"{name}_base", {"model_type": name} | config)
        result = {}
        for strategy_name, strategy in STRATEGIES.items():
            notes = []
            wrapped = self.wrapped(path, strategy, task="sequence_classification", num_labels=3, notes=notes)
            start = self.logits(wrapped)
            losses = self.train(wrapped)
            trained = self.logits(wrapped)
            out = self.export(wrapped, f"{name}_classes_{strategy_name}")
            difference = (self.reference(out, "sequence_classification") - trained).abs().max().item()
            result[strategy_name] = {"start": start.tolist(), "losses": losses, "notes": notes, "reloaded": difference}
        return result

    def lora(self, name, path, precision=None, task="causal_lm", **options):
        """Adapters start as nothing, and are all that is trained; peft reads what is exported."""
        import peft

        result = {}
        for strategy_name, plain in STRATEGIES.items():
            strategy = Strategy(kind=plain.kind, cpu_offload=plain.cpu_offload, mixed_precision=precision)
            wrapped = self.wrapped(path, strategy, task=task, lora=Lora(rank=4, alpha=8.0), **options)
            first = self.logits(wrapped)
            losses = self.train(wrapped, learning_rate=1e-2)
            trained = self.logits(wrapped)
            adapter = self.export(wrapped, f"{name}_adapter_{strategy_name}")
            merged = self.export(wrapped, f"{name}_merged_{strategy_name}", merged=True)
            base = AUTO[task].from_pretrained(path, dtype=torch.float32, **({"num_labels": 3} if task != "causal_lm" else {}))
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
                "base_dtypes": sorted({str(p.dtype) for p in parameters.values() if not p.requires_grad}),
                "trained_dtypes": sorted({str(p.dtype) for p in parameters.values() if p.requires_grad}),
                "trained": sum(p.numel() for p in parameters.values() if p.requires_grad),
            }
        return result


def stored_names(folder):
    from launcher.model.stored import open_folder

    return sorted(open_folder(folder).tensors)


def main(folder):
    worker = Worker(folder)
    for name, config in ARCHITECTURES.items():
        worker.case(name, lambda name=name, config=config: worker.whole_way(name, worker.save(name, config)))
    llama = ARCHITECTURES["llama"]
    path = worker.save("bf16", {"model_type": "llama"} | llama, dtype=torch.bfloat16, max_shard_size="20KB")
    worker.case("bf16 in several files", lambda: worker.whole_way("bf16", path))
    classifier = worker.save("classifier", {"model_type": "llama", "num_labels": 3} | llama, task="sequence_classification")
    worker.case("classifier", lambda: worker.whole_way("classifier", classifier, task="sequence_classification"))
    worker.case("classes on llama", lambda: worker.classification("llama", llama))
    bert = SIZES | {"intermediate_size": 48, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True}
    worker.case("classes on bert", lambda: worker.classification("bert", bert))
    worker.case("lora llama", lambda: worker.lora("llama", folder / "llama"))
    worker.case("lora gpt2", lambda: worker.lora("gpt2", folder / "gpt2"))
    worker.case("lora mixtral", lambda: worker.lora("mixtral", folder / "mixtral"))
    half = MixedPrecision()
    worker.case("lora llama bfloat16", lambda: worker.lora("llama_half", folder / "llama", half))
    worker.case("lora mixtral bfloat16", lambda: worker.lora("mixtral_half", folder / "mixtral", half))
    worker.case("lora classes", lambda: worker.lora("classes", folder / "llama", task="sequence_classification", num_labels=3))
    if worker.rank == 0:
        (folder / "results.json").write_text(json.dumps(worker.results))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as the launcher ends: threads of torch can abort the interpreter's own end


if __name__ == "__main__":
    main(Path(sys.argv[1]))
