"""Prints the values of `sentence_transformers` that test_embedding_losses.py compares with.

pip install sentence-transformers==6.2.0
python -m tests.unit.objectives.embedding_references
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

QUERIES, WIDTH, SCALE = 4, 8, 20.0
TEACHER = torch.tensor([[2.0, 0.5, 0.1], [1.5, 1.0, -1.0], [0.2, 0.3, 0.0], [3.0, -2.0, 1.0]])
"""(queries, documents of a row): scores."""


def vectors() -> torch.Tensor:
    """(queries, 4, features): of each query, its positive and two negatives."""
    numbers = torch.arange(QUERIES * 4 * WIDTH, dtype=torch.float32)
    return torch.sin(numbers * 1.7 + numbers.square() * 0.013).view(QUERIES, 4, WIDTH)


def value(loss: Callable[[list[torch.Tensor], Any], torch.Tensor]) -> tuple[float, float]:
    """The loss, and the norm of its gradient with respect to the vectors."""
    leaf = vectors().requires_grad_()
    found = loss([leaf[:, index] for index in range(4)], None)
    (gradient,) = torch.autograd.grad(found, leaf)
    return found.item(), gradient.norm().item()


def main() -> None:
    """Prints name, loss and norm of the gradient."""
    from sentence_transformers import losses
    from sentence_transformers.util import pairwise_cos_sim

    model: Any = nn.Identity()
    rank = losses.MultipleNegativesRankingLoss(model, scale=SCALE)
    found = {"infonce": value(rank.compute_loss_from_embeddings)}

    def cut(parts: list[torch.Tensor], labels: Any) -> torch.Tensor:
        of_sizes = [
            rank.compute_loss_from_embeddings([part[:, :size] for part in parts], labels)
            for size in (8, 4)
        ]
        return torch.stack(of_sizes).mean()

    found["matryoshka"] = value(cut)
    one = TEACHER[:, 0] / 3
    cosine = losses.CosineSimilarityLoss(model)
    found["cosine"] = value(lambda p, _: cosine.compute_loss_from_embeddings(p[:2], one))
    cosent = losses.CoSENTLoss(model, scale=SCALE)
    found["cosent"] = value(lambda p, _: cosent.compute_loss_from_embeddings(p[:2], one))
    triplet = losses.TripletLoss(model, losses.TripletDistanceMetric.COSINE, triplet_margin=0.3)
    found["triplet"] = value(lambda p, _: triplet.compute_loss_from_embeddings(p[:3], None))
    margin = losses.MarginMSELoss(model, similarity_fct=pairwise_cos_sim)
    apart = TEACHER[:, :1] - TEACHER[:, 1:]
    found["margin_mse"] = value(lambda p, _: margin.compute_loss_from_embeddings(p, apart))
    kl = losses.DistillKLDivLoss(
        model, pairwise_cos_sim, student_temperature=1 / SCALE, teacher_temperature=1.0
    )
    found["kl"] = value(lambda p, _: kl.compute_loss_from_embeddings(p, TEACHER))
    for name, (loss, norm) in found.items():
        print(f'    "{name}": ({loss!r}, {norm!r}),')


if __name__ == "__main__":
    main()
