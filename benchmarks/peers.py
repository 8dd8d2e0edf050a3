"""The loops that other libraries' users write, to compare the launcher with. Started by overhead.py, through torchrun.

accelerate: `Accelerator.prepare` and `accumulate`. trainer: transformers' Trainer. fabric: Lightning Fabric. Each reads
the loss in every step, as the launcher does with `logging.every_steps: 1`, and does nothing else beside training. All do
the same work: with FSDP they reduce gradients after each micro-batch and in float32, as the launcher does by default
(accelerate and Trainer reduce them in bfloat16 unless they get a policy).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from raw_common import (
    IGNORED,
    cpu_seconds,
    end,
    learning_rate_at,
    load_rows,
    make_optimizer,
    read_config,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaForCausalLM

POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class CpuSeconds:
    """This rank's processor time in each step, written to a file of its own at the end."""

    def __init__(self) -> None:
        self._since = cpu_seconds()
        self._steps: list[float] = []

    def step_done(self) -> None:
        now = cpu_seconds()
        self._steps.append(now - self._since)
        self._since = now

    def write(self, file: Path) -> None:
        import torch.distributed as dist

        Path(f"{file}.{dist.get_rank()}").write_text(json.dumps(self._steps))


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of token ids; the targets are the labels that transformers' own loss takes."""

    def __init__(self, file: Path) -> None:
        named, targets, _ = load_rows(file, torch.device("cpu"))
        self._inputs = named["input_ids"]
        # Here labels[t] is the target of token t; transformers shifts by itself
        self._labels = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], dim=1)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._inputs[row], "labels": self._labels[row]}


def accelerate_loop(arguments: argparse.Namespace, model: nn.Module) -> CpuSeconds:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

    plugin = None
    if arguments.strategy == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            mixed_precision_policy=POLICY,
        )
    accelerator = Accelerator(
        mixed_precision="bf16",
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=arguments.accumulation, sync_each_batch=arguments.strategy == "fsdp"
        ),
        fsdp_plugin=plugin,
    )
    loader = DataLoader(Rows(arguments.data), batch_size=arguments.micro_batch_size)
    model, optimizer, loader = accelerator.prepare(
        model, make_optimizer(model, arguments.learning_rate), loader
    )
    model.train()
    seconds, step = CpuSeconds(), 0
    total = torch.zeros((), device=accelerator.device)
    while step < arguments.steps:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch, use_cache=False).loss
                accelerator.backward(loss)
                total += loss.detach()
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                    for group in optimizer.param_groups:
                        group["lr"] = rate(arguments, step + 1)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                accelerator.reduce(total, reduction="mean").item()
                total.zero_()
                step += 1
                seconds.step_done()
                if step == arguments.steps:
                    break
    return seconds


def trainer_loop(arguments: argparse.Namespace, model: nn.Module) -> CpuSeconds:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seconds = CpuSeconds()

    class AfterStep(TrainerCallback):
        def on_log(self, *unused: Any, **more: Any) -> None:
            seconds.step_done()

    sharded: dict[str, Any] = {}
    if arguments.strategy == "fsdp":
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        reduced = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
        sharded = {"fsdp": True, "fsdp_config": wrapped, "accelerator_config": reduced}
    settings = TrainingArguments(
        output_dir=str(arguments.metrics.parent / "trainer"),
        per_device_train_batch_size=arguments.micro_batch_size,
        gradient_accumulation_steps=arguments.accumulation,
        max_steps=arguments.steps,
        learning_rate=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        bf16=True,
        optim="adamw_torch_fused",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **sharded,
    )
    trainer = Trainer(
        model=model, args=settings, train_dataset=Rows(arguments.data), callbacks=[AfterStep()]
    )
    if arguments.strategy == "fsdp":
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = POLICY
    trainer.train()
    return seconds


def fabric_loop(arguments: argparse.Namespace, model: nn.Module) -> CpuSeconds:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(module: nn.Module, mesh: Any) -> nn.Module:
        for layer in module.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=POLICY)
        return fully_shard(module, mesh=mesh["data_parallel"], mp_policy=POLICY)

    fsdp = arguments.strategy == "fsdp"
    count = torch.cuda.device_count()
    # Its default is tensor parallelism over all GPUs of a node, which shards no data
    sharded = ModelParallelStrategy(shard, data_parallel_size=count, tensor_parallel_size=1)
    strategy = sharded if fsdp else DDPStrategy(gradient_as_bucket_view=True)
    fabric = Fabric(
        accelerator="cuda",
        devices=count,
        strategy=strategy,
        precision=None if fsdp else "bf16-mixed",
    )
    fabric.launch()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(make_optimizer(model, arguments.learning_rate))
    loader = fabric.setup_dataloaders(
        DataLoader(Rows(arguments.data), batch_size=arguments.micro_batch_size)
    )
    model.train()
    seconds = CpuSeconds()
    batches = endless(loader)
    for step in range(1, arguments.steps + 1):
        total = torch.zeros((), device=fabric.device)
        for index in range(arguments.accumulation):
            batch = next(batches)
            last = index == arguments.accumulation - 1
            with fabric.no_backward_sync(model, enabled=not last and not fsdp):
                loss = model(**batch, use_cache=False).loss / arguments.accumulation
                fabric.backward(loss)
            total += loss.detach()
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        for group in optimizer.param_groups:
            group["lr"] = rate(arguments, step)
        optimizer.step()
        optimizer.zero_grad()
        fabric.all_reduce(total, reduce_op="mean").item()
        seconds.step_done()
    return seconds


def endless(loader: Any) -> Any:
    while True:
        yield from loader


def rate(arguments: argparse.Namespace, step: int) -> float:
    return learning_rate_at(
        step,
        peak=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        steps=arguments.steps,
    )


LOOPS = {"accelerate": accelerate_loop, "trainer": trainer_loop, "fabric": fabric_loop}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=LOOPS, required=True)
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], required=True)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument(
        "--metrics", type=Path, required=True, help="each rank writes to this name and its rank"
    )
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--accumulation", type=int, required=True)
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--warmup-steps", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(read_config(arguments.config))
    LOOPS[arguments.library](arguments, model).write(arguments.metrics)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    end()
