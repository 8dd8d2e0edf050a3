"""First values of adapters that are a part of the weight W (out, in), and what is left of it: PiSSA
(Meng et al., 2024) and OLoRA (Büyükakyüz, 2024).

W = base + scale * B A. A run trains A (rank, in) and B (out, rank) and freezes the base, so the model
begins as it was. The results are those of peft, but for the signs of PiSSA's rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Factors = tuple[torch.Tensor, torch.Tensor]
"""A and B, float32."""
_TINY = torch.finfo(torch.float64).tiny


def pissa(weight: torch.Tensor, rank: int, scale: float) -> Factors:
    """The part of the largest singular values: of W = U S V^T, A = sqrt(S / scale) V^T and
    B = U sqrt(S / scale).

    Computed from the eigenvectors of W W^T, or W^T W if that is smaller: all other singular vectors
    of a large matrix would take most of the time. In float64, because that squares the singular values.
    """
    weight = weight.double()
    tall = weight.shape[0] > weight.shape[1]
    wide = weight.T if tall else weight
    _, vectors = torch.linalg.eigh(wide @ wide.T)
    left = vectors[:, -rank:].flip(1)
    # Eigenvectors have any sign. All ranks, which keep different rows, must have the same one
    left *= left.gather(0, left.abs().argmax(0, keepdim=True)).sign()
    right = left.T @ wide
    sizes = right.norm(dim=1).clamp(min=_TINY)  # the singular values
    root = (sizes / scale).sqrt()
    left, right = left * root, right * (root / sizes)[:, None]
    down, up = (left.T, right.T) if tall else (right, left)
    return down.float(), up.float()


def olora(weight: torch.Tensor, rank: int, scale: float) -> Factors:
    """The first columns of Q and rows of R in W = Q R: B and A. `scale` is not divided out, as in
    peft."""
    weight = weight.double()
    # The other columns of Q do not change the first ones
    up, _ = torch.linalg.qr(weight[:, :rank])
    return (up.T @ weight).float(), up.float()


FIRST_FACTORS: dict[str, Callable[[torch.Tensor, int, float], Factors]] = {
    "pissa": pissa,
    "olora": olora,
}
"""By the values of lora.init other than default."""
