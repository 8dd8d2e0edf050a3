"""Random numbers by position: the counter-based generator Philox4x32-10 in torch's integer arithmetic.

A stream is identified by a key of two 32-bit words. Its numbers have positions 0, 1, 2, ...; counter `position // 4`
gives four 32-bit words, one a position. So any part of a stream can be drawn alone, on any device.
Generator: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.

What is guaranteed: the words, and the uniform numbers, are the same bits on every device. The normal
numbers are computed in float64 and then rounded to float32. They do not depend on which part of a
stream is drawn at once. Another kind of processor, or a GPU, may round the last bit of a float64
logarithm or cosine differently; that changes the float32 number, by its last bit, about once in 10^8.
"""

from __future__ import annotations

import math

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Ten rounds on each counter. All words are int64 tensors that hold 32 bits; they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # A product wraps at 64 bits: its low half is exact, and the mask makes the high half unsigned
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
    """How many numbers to draw at once for speed. Drawing takes up to 28 bytes for each of them: 112 MiB on CUDA.

    CPU: small enough for the cache of each core, and torch uses a thread for 2^15 counters.
    CUDA: large enough to keep the GPU busy.
    """
    if device.type != "cpu":
        return 2**22
    threads = torch.get_num_threads()
    return 2**16 if threads == 1 else 2**17 * threads


def _words(key: tuple[int, int], first: int, count: int, device: torch.device) -> Words:
    """The words of the counters for `count` positions from `first` on, in order."""
    counters = torch.arange(first // 4, -(-(first + count) // 4), device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    return philox((counters & _MASK, counters >> 32, zero, zero), key)


def _in_order(lanes: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """lanes: (counters, 4). Returns (count,): the requested positions only."""
    return lanes.view(-1)[first % 4 : first % 4 + count]


def uniform(key: tuple[int, int], first: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 numbers in [0, 1), multiples of 2^-24: those at positions first, first + 1, ..."""
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
    """float32 numbers of the standard normal distribution between two limits, by its inverse in float64."""
    words = _words(key, first, count, device)
    lanes = torch.empty(words[0].numel(), 4, device=device)
    low, high = (math.erf(limit / math.sqrt(2.0)) for limit in limits)
    for lane, word in enumerate(words):
        # Inside (0, 1), so no number is infinite even where the limits are far away
        share = (word.double() + 0.5).mul_(2.0**-32)
        lanes[:, lane] = share.mul_(high - low).add_(low).erfinv_().mul_(math.sqrt(2.0))
    return _in_order(lanes, first, count)
