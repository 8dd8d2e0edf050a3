"""A hand-written FSDP2 loop, the baseline for `strategy.kind: fsdp`. Started through torchrun.

It all-gathers and reshards the weights in every micro-batch. With --keep-gathered they stay
unsharded from the first to the last micro-batch of a step. Gradients are reduced in every
micro-batch, with --reduce-once only in the last. --offload adds CPU offload and full activation
checkpointing, like the recipe `fsdp_offload`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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
    start,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from transformers import LlamaForCausalLM


def main() -> None:
    arguments = parse_arguments(
        "A hand-written FSDP2 loop.", "--keep-gathered", "--offload", "--reduce-once"
    )
    rank, ranks, device = start(offload=arguments.offload)
    micro, accumulation, steps = arguments.micro_batch_size, arguments.accumulation, arguments.steps
    inputs, targets, targets_a_row = load_rows(arguments.data, device, arguments.positions)

    with torch.device("meta"):
        model = LlamaForCausalLM(read_config(arguments.config))
    mesh = init_device_mesh(device.type, (ranks,))
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if arguments.bf16
        else MixedPrecisionPolicy()
    )
    offload = OffloadPolicy()
    if arguments.offload:
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    layers, reshard = model.model.layers, not arguments.keep_gathered
    for index, layer in enumerate(layers):
        layers[index] = checkpoint_wrapper(layer) if arguments.offload else layer
        fully_shard(
            layers[index],
            mesh=mesh,
            mp_policy=policy,
            offload_policy=offload,
            reshard_after_forward=reshard,
        )
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    model.to_empty(device="cpu" if arguments.offload else device)
    torch.manual_seed(1234)
    model.init_weights()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))  # buffers are not offloaded
    if arguments.weights is not None:
        load_weights(model, arguments.weights)
    model.train()
    optimizer = make_optimizer(model, arguments.learning_rate)
    parameters = list(model.parameters())
    # All rows are full, so the number of targets per step is known without an all-reduce. With
    # several documents per row it is the mean over all rows
    valid_tokens = accumulation * micro * ranks * targets_a_row

    meter = Meter(arguments.metrics, rank, ranks, device)
    for step in range(1, steps + 1):
        total = torch.zeros((), device=device)
        for index in range(accumulation):
            last = index == accumulation - 1
            model.set_is_last_backward(last)
            if arguments.reduce_once:
                model.set_requires_gradient_sync(last)
            if arguments.keep_gathered:
                model.set_reshard_after_backward(last)
            first = (((step - 1) * accumulation + index) * ranks + rank) * micro % len(targets)
            rows = slice(first, first + micro)
            # One expression, because a variable would keep the logits alive until the next forward
            loss = F.cross_entropy(
                model(**{name: tensor[rows] for name, tensor in inputs.items()}, use_cache=False)
                .logits.float()
                .flatten(0, 1),
                targets[rows].flatten(),
                ignore_index=IGNORED,
                reduction="sum",
            )
            (loss * (ranks / valid_tokens)).backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        norm = norm.full_tensor()  # type: ignore[attr-defined]
        rate = learning_rate_at(
            step, peak=arguments.learning_rate, warmup_steps=arguments.warmup_steps, steps=steps
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # With offload, the gradient norm is in host memory
        meter.record(step, total / valid_tokens, norm.to(device))


if __name__ == "__main__":
    main()
    end()
