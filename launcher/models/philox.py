"""Random numbers by position: the counter-based generator Philox4x32-10 in torch's integer
arithmetic.

A key of two 32-bit words selects a stream. Its numbers have positions 0, 1, 2, and so on: counter
`position // 4` gives the words of four positions. So any part of a stream can be drawn alone.
Generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

Words and uniform numbers have the same bits on every device. Normal numbers are computed in float64
and rounded to float32, and do not depend on which part of a stream is drawn at once. Another
processor may round the last bit of a float64 logarithm or cosine differently; that changes the last
bit of about one float32 number in 10^8.
"""

from __future__ import annotations

import math

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds on each counter. Words are int64 tensors with 32-bit values; they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Products wrap at 64 bits: the low half is exact, and the mask makes the high half unsigned
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((high >> 32) ^ c1 ^ k0) & _MASK,
            high,
            ((low >> 32) ^ c3 ^ k1) & _MASK,
            low,
        )
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def numbers_at_once(device: torch.device) -> int:
    """How many numbers to draw at once for speed. Each takes up to 28 bytes: 112 MiB on CUDA.

    CPU: fits each core's cache; torch uses one thread per 2^15 counters. CUDA: keeps the GPU busy.
    """
    if device.type != "cpu":
        return 2**22
    threads = torch.get_num_threads()
    return 2**16 if threads == 1 else 2**17 * threads


def _words(key: tuple[int, int], first: int, count: int, device: torch.device) -> Words:
    """The words of the counters of `count` positions from `first` on."""
    counters = torch.arange(first // 4, -(-(first + count) // 4), device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return philox((counters & _MASK, counters >> 32, zero, zero), key)


def _in_order(lanes: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """lanes: (counters, 4). Returns (count,): the requested positions."""
    return lanes.view(-1)[first % 4 : first % 4 + count]


def uniform(key: tuple[int, int], first: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 numbers in [0, 1), multiples of 2^-24, at positions first, first + 1, ..."""
    words = _words(key, first, count, device)
    lanes = torch.empty(words[0].numel(), 4, device=device)
    for lane, word in enumerate(words):
        lanes[:, lane] = word >> 8
    return _in_order(lanes.mul_(2.0**-24), first, count)


def normal(key: tuple[int, int], first: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 numbers of mean 0 and standard deviation 1, by the Box-Muller transform."""
    words = _words(key, first, count, device)
    lanes = torch.empty(words[0].numel(), 4, device=device)
    for lane in (0, 2):
        # The logarithm's argument lies inside (0, 1): no number is infinite, the largest is 6.8
        radius = (words[lane].double() + 0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = words[lane + 1].double().mul_(2.0**-32 * 2.0 * math.pi)
        lanes[:, lane] = angle.cos().mul_(radius)
        lanes[:, lane + 1] = angle.sin_().mul_(radius)
    return _in_order(lanes, first, count)


def truncated_normal(
    key: tuple[int, int],
    first: int,
    count: int,
    device: torch.device,
    *,
    limits: tuple[float, float],
) -> torch.Tensor:
    """float32 numbers of the normal distribution within limits, by its inverse in float64."""
    words = _words(key, first, count, device)
    lanes = torch.empty(words[0].numel(), 4, device=device)
    low, high = (math.erf(limit / math.sqrt(2.0)) for limit in limits)
    for lane, word in enumerate(words):
        # Inside (0, 1): no number is infinite, even with distant limits
        share = (word.double() + 0.5).mul_(2.0**-32)
        lanes[:, lane] = share.mul_(high - low).add_(low).erfinv_().mul_(math.sqrt(2.0))
    return _in_order(lanes, first, count)
