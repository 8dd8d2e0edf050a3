"""Reference training loop in plain PyTorch, without code of the launcher.

It runs in one process and computes the whole global batch at once.
"""

import json
import math

import torch


def read_rows(file):
    return [json.loads(line) for line in open(file)]


def padded_batch(rows):
    width = max(len(row["input_ids"]) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    mask = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        length = len(row["input_ids"])
        ids[index, :length] = torch.tensor(row["input_ids"])
        labels[index, :length] = torch.tensor(row.get("labels") or row["input_ids"])
        mask[index, :length] = 1
    return ids, labels, mask


def mean_loss(model, rows, of_logits=None):
    """Mean loss per token, with labels shifted by one position and padding masked in attention.

    of_logits: the loss of each target, of (targets, vocabulary) and (targets,); None: the
    cross-entropy.
    """
    ids, labels, mask = padded_batch(rows)
    logits = model(input_ids=ids, attention_mask=mask).logits
    if of_logits is not None:
        trained = labels[:, 1:] != -100
        return of_logits(logits[:, :-1][trained], labels[:, 1:][trained]).mean()
    return torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
    )


def train(
    model,
    rows,
    *,
    steps,
    batch,
    learning_rate,
    warmup,
    min_ratio,
    weight_decay,
    betas=(0.9, 0.95),
    eps=1e-8,
    max_norm=1.0,
    of_logits=None,
):
    """Trains on the rows in order, repeating them as needed; returns losses and gradient norms."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=learning_rate,
        betas=betas,
        eps=eps,
        foreach=False,
    )
    model.train()
    losses, norms = [], []
    for step in range(1, steps + 1):
        if step <= warmup:
            rate = learning_rate * step / warmup
        else:
            progress = (step - warmup) / (steps - warmup)
            rate = learning_rate * (
                min_ratio + (1 - min_ratio) * 0.5 * (1 + math.cos(math.pi * progress))
            )
        for group in optimizer.param_groups:
            group["lr"] = rate
        chosen = [rows[((step - 1) * batch + i) % len(rows)] for i in range(batch)]
        optimizer.zero_grad()
        loss = mean_loss(model, chosen, of_logits)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms
