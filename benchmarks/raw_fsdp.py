"""A hand-written FSDP2 loop, to compare the launcher's `fsdp` with. Started by compare.py, through torchrun.

It gathers and frees the weights in every micro-batch; with --keep-gathered they stay gathered from a step's first to its
last micro-batch. Gradients are reduced in every micro-batch either way. --offload adds CPU offload and full activation
checkpointing, as `fsdp_offload` has.
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
    """Trains."""
    arguments = parse_arguments("A hand-written FSDP2 loop.", "--keep-gathered", "--offload")
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
            setattr(module, name, buffer.to(device))  # what is no parameter is not offloaded
    if arguments.weights is not None:
        load_weights(model, arguments.weights)
    model.train()
    optimizer = make_optimizer(model, arguments.learning_rate)
    parameters = list(model.parameters())
    # Rows are full, and alike but for the ends of documents: what each step divides its loss by is known, without counting over the ranks
    valid_tokens = accumulation * micro * ranks * targets_a_row

    meter = Meter(arguments.metrics, rank, ranks, device)
    for step in range(1, steps + 1):
        total = torch.zeros((), device=device)
        for index in range(accumulation):
            last = index == accumulation - 1
            model.set_is_last_backward(last)
            if arguments.keep_gathered:
                model.set_reshard_after_backward(last)
            first = (((step - 1) * accumulation + index) * ranks + rank) * micro % len(targets)
            rows = slice(first, first + micro)
            # In one expression: a name would keep the logits, the largest of tensors, into the next forward pass
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
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0).full_tensor()
        rate = learning_rate_at(
            step, peak=arguments.learning_rate, warmup_steps=arguments.warmup_steps, steps=steps
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        # The norm of offloaded gradients is in host memory
        meter.record(step, total / valid_tokens, norm.to(device))


if __name__ == "__main__":
    main()
    end()
