"""Training loops with other libraries, for comparison. Started by bench.py through torchrun.

accelerate: `Accelerator.prepare` and `accumulate`. trainer: transformers' Trainer. fabric:
Lightning Fabric. Each reads the loss in every step, like the launcher with logging.every_steps: 1.
All do the same work as raw_ddp.py and raw_fsdp.py: with FSDP they reduce gradients in float32 after
each micro-batch (accelerate and Trainer would reduce in bfloat16 without an explicit policy).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from raw_common import (
    IGNORED,
    Meter,
    end,
    learning_rate_at,
    load_rows,
    load_weights,
    make_optimizer,
    parse_arguments,
    read_config,
)
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaForCausalLM

CUDA = torch.cuda.is_available()


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Rows of token ids with labels for transformers' loss."""

    def __init__(self, file: Path) -> None:
        named, targets, _ = load_rows(file, torch.device("cpu"))
        self._inputs = named["input_ids"]
        # transformers shifts the labels itself: undo the shift of load_rows
        self._labels = torch.cat([torch.full_like(targets[:, :1], IGNORED), targets[:, :-1]], dim=1)

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._inputs[row], "labels": self._labels[row]}


def fsdp_policy(arguments: argparse.Namespace) -> MixedPrecisionPolicy:
    """With --bf16: bfloat16 parameters, and gradient reduction in float32."""
    if not arguments.bf16:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_meter(arguments: argparse.Namespace) -> Meter:
    """The raw loops' Meter. Requires an initialized process group."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if CUDA else torch.device("cpu")
    return Meter(arguments.metrics, dist.get_rank(), dist.get_world_size(), device)


def full_norm(norm: Any) -> torch.Tensor:
    """The gradient norm over all ranks, as a plain tensor."""
    tensor: torch.Tensor = norm.full_tensor() if isinstance(norm, DTensor) else norm
    return tensor


def accelerate_loop(arguments: argparse.Namespace, model: nn.Module) -> None:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, GradientAccumulationPlugin

    plugin = None
    if arguments.strategy == "fsdp":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            mixed_precision_policy=fsdp_policy(arguments),
        )
    accelerator = Accelerator(
        mixed_precision="bf16" if arguments.bf16 else "no",
        cpu=not CUDA,
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
    meter, step = make_meter(arguments), 0
    total = torch.zeros((), device=accelerator.device)
    for batch in repeat_batches(loader):
        with accelerator.accumulate(model):
            loss = model(**batch, use_cache=False).loss
            accelerator.backward(loss)
            total += loss.detach()
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), 1.0)
                for group in optimizer.param_groups:
                    group["lr"] = learning_rate_of(arguments, step + 1)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            meter.record(step, loss_share(total, arguments), full_norm(norm))
            total.zero_()
            if step == arguments.steps:
                return


def trainer_loop(arguments: argparse.Namespace, model: nn.Module) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    meters: list[Meter] = []

    class AfterStep(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *unused: Any, **more: Any) -> None:
            meters.append(make_meter(arguments))

        def on_log(self, settings: Any, state: Any, *unused: Any, **more: Any) -> None:
            logs = more["logs"]
            if "loss" in logs:  # the mean over ranks, on each of them
                loss = torch.tensor(logs["loss"] / dist.get_world_size())
                meters[0].record(state.global_step, loss, torch.tensor(logs["grad_norm"]))

    class SameOptimizer(Trainer):  # type: ignore[misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = make_optimizer(model or self.model, arguments.learning_rate)
            return self.optimizer

        def create_scheduler(self, *unused: Any, **more: Any) -> Any:
            peak = arguments.learning_rate
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                self.optimizer, lambda done: learning_rate_of(arguments, done + 1) / peak
            )
            return self.lr_scheduler

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
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",
        bf16=arguments.bf16,
        use_cpu=not CUDA,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **sharded,
    )
    trainer = SameOptimizer(
        model=model, args=settings, train_dataset=Rows(arguments.data), callbacks=[AfterStep()]
    )
    if arguments.strategy == "fsdp":
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = fsdp_policy(arguments)
    trainer.train()


def fabric_loop(arguments: argparse.Namespace, model: nn.Module) -> None:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import DDPStrategy, ModelParallelStrategy
    from torch.distributed.fsdp import fully_shard

    def shard(module: nn.Module, mesh: Any) -> nn.Module:
        policy = fsdp_policy(arguments)
        for layer in module.model.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh["data_parallel"], mp_policy=policy)
        fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy)
        return module

    fsdp = arguments.strategy == "fsdp"
    count = int(os.environ["WORLD_SIZE"])
    # The default is tensor parallelism over all GPUs of a node, without data parallelism
    sharded = ModelParallelStrategy(shard, data_parallel_size=count, tensor_parallel_size=1)
    fabric = Fabric(
        accelerator="cuda" if CUDA else "cpu",
        devices=count,
        strategy=sharded if fsdp else DDPStrategy(gradient_as_bucket_view=True),
        precision="bf16-mixed" if arguments.bf16 and not fsdp else None,
    )
    fabric.launch()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(make_optimizer(model, arguments.learning_rate))
    loader = fabric.setup_dataloaders(
        DataLoader(Rows(arguments.data), batch_size=arguments.micro_batch_size)
    )
    model.train()
    meter, batches = make_meter(arguments), repeat_batches(loader)
    for step in range(1, arguments.steps + 1):
        total = torch.zeros((), device=fabric.device)
        for index in range(arguments.accumulation):
            batch = next(batches)
            last = index == arguments.accumulation - 1
            with fabric.no_backward_sync(model, enabled=not last and not fsdp):
                loss = model(**batch, use_cache=False).loss
                fabric.backward(loss / arguments.accumulation)
            total += loss.detach()
        norm = fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_of(arguments, step)
        optimizer.step()
        optimizer.zero_grad()
        meter.record(step, loss_share(total, arguments), full_norm(norm))


def repeat_batches(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def learning_rate_of(arguments: argparse.Namespace, step: int) -> float:
    return learning_rate_at(
        step,
        peak=arguments.learning_rate,
        warmup_steps=arguments.warmup_steps,
        steps=arguments.steps,
    )


def loss_share(total: torch.Tensor, arguments: argparse.Namespace) -> torch.Tensor:
    """This rank's contribution to the mean loss of a step.

    total: sum of the micro-batches' mean losses. All micro-batches have the same number of tokens.
    """
    share: torch.Tensor = total / (arguments.accumulation * dist.get_world_size())
    return share


LOOPS = {"accelerate": accelerate_loop, "trainer": trainer_loop, "fabric": fabric_loop}


def main() -> None:
    arguments = parse_arguments(__doc__, library=list(LOOPS), strategy=["ddp", "fsdp"])
    torch.set_float32_matmul_precision("high")
    if not CUDA:  # torchrun sets OMP_NUM_THREADS=1
        cores, ranks = len(os.sched_getaffinity(0)), int(os.environ["LOCAL_WORLD_SIZE"])
        torch.set_num_threads(max(1, cores // ranks))
    torch.manual_seed(1234)
    with torch.device("cuda" if CUDA else "cpu"):
        model = LlamaForCausalLM(read_config(arguments.config))
    if arguments.weights is not None:
        load_weights(model, arguments.weights)
    LOOPS[arguments.library](arguments, model)


if __name__ == "__main__":
    main()
    end()
