"""A hand-written DDP loop, the baseline for `strategy.kind: ddp`. Started through torchrun."""

from __future__ import annotations

from contextlib import nullcontext

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
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaForCausalLM


def main() -> None:
    arguments = parse_arguments(__doc__)
    rank, ranks, device = start()
    micro, accumulation, steps = arguments.micro_batch_size, arguments.accumulation, arguments.steps
    inputs, targets, targets_a_row = load_rows(arguments.data, device, arguments.positions)

    torch.manual_seed(1234)
    with device:
        model = LlamaForCausalLM(read_config(arguments.config))
    if arguments.weights is not None:
        load_weights(model, arguments.weights)
    ddp = DistributedDataParallel(
        model,
        device_ids=[device] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
    )
    ddp.train()  # type: ignore[no-untyped-call]
    optimizer = make_optimizer(model, arguments.learning_rate)
    parameters = list(model.parameters())
    # All rows are full, so the number of targets per step is known without an all-reduce. With
    # several documents per row it is the mean over all rows
    valid_tokens = accumulation * micro * ranks * targets_a_row

    meter = Meter(arguments.metrics, rank, ranks, device)
    for step in range(1, steps + 1):
        total = torch.zeros((), device=device)
        for index in range(accumulation):
            first = (((step - 1) * accumulation + index) * ranks + rank) * micro % len(targets)
            rows = slice(first, first + micro)
            with nullcontext() if index == accumulation - 1 else ddp.no_sync():
                with torch.autocast(device.type, dtype=torch.bfloat16, enabled=arguments.bf16):
                    # One expression, because a variable would keep the logits alive until the
                    # next forward
                    loss = F.cross_entropy(
                        ddp(
                            **{name: tensor[rows] for name, tensor in inputs.items()},
                            use_cache=False,
                        )
                        .logits.float()
                        .flatten(0, 1),
                        targets[rows].flatten(),
                        ignore_index=IGNORED,
                        reduction="sum",
                    )
                (loss * (ranks / valid_tokens)).backward()
                total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        rate = learning_rate_at(
            step, peak=arguments.learning_rate, warmup_steps=arguments.warmup_steps, steps=steps
        )
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        meter.record(step, total / valid_tokens, norm)


if __name__ == "__main__":
    main()
    end()
