"""Random numbers by position: the counter-based generator Philox4x32-10 in torch's integer
arithmetic (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

A key of two 32-bit words selects a stream of numbers. Counter `position // 4` gives the words of
four positions, so any part of a stream can be drawn alone.

Words and uniform numbers have the same bits on every device. Normal numbers are computed in
float64: on another processor the last bit of about one in 10^8 may differ.
"""

from __future__ import annotations

import hashlib
import math
import struct

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85

Key = tuple[int, int]
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def named_key(seed: int, name: str) -> Key:
    """The key of a stream of numbers that belongs to a name, such as a parameter's."""
    low, high = struct.unpack_from("<II", hashlib.sha256(f"{seed}/{name}".encode()).digest())
    return low, high


def derived_seed(seed: int, name: str) -> int:
    """A seed for a torch.Generator, of 63 bits."""
    low, high = named_key(seed, name)
    return (high << 32 | low) >> 1


def philox(counter: Words, key: Key) -> Words:
    """Ten rounds on each counter. Words are int64 tensors with 32-bit values; they broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        # Products wrap at 64 bits: the low half is exact, and the mask makes the high half unsigned
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c2 = ((high >> 32) ^ c1 ^ k0) & _MASK, ((low >> 32) ^ c3 ^ k1) & _MASK
        c1, c3 = high, low
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def numbers_at_once(device: torch.device) -> int:
    """How many numbers, of up to 28 bytes, to draw at once: fills a GPU, or the cache of each core
    (torch uses one thread per 2^15 counters)."""
    if device.type != "cpu":
        return 2**22
    threads = torch.get_num_threads()
    return 2**16 if threads == 1 else 2**17 * threads


def _words(key: Key, first: int, count: int, device: torch.device) -> tuple[Words, torch.Tensor]:
    """The words of the counters, and an uninitialized (counters, 4) tensor for their numbers."""
    counters = torch.arange(first // 4, -(-(first + count) // 4), device=device)
    zero = torch.zeros(1, dtype=torch.int64, device=device)
    words = philox((counters & _MASK, counters >> 32, zero, zero), key)
    return words, torch.empty(len(counters), 4, device=device)


def uniform(key: Key, first: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 numbers in [0, 1), multiples of 2^-24, at positions first, first + 1, ..."""
    words, numbers = _words(key, first, count, device)
    for column, word in enumerate(words):
        numbers[:, column] = word >> 8
    return numbers.mul_(2.0**-24).view(-1)[first % 4 :][:count]


def random_bytes(key: Key, first: int, count: int, step: torch.Tensor) -> torch.Tensor:
    """uint8 numbers at positions first, first + 1, ..., 16 from each counter. Each whole value of
    `step`, a scalar on the device, selects another sequence."""
    counters = torch.arange(first // 16, -(-(first + count) // 16), device=step.device)
    zero = torch.zeros(1, dtype=torch.int64, device=step.device)
    w0, w1, w2, w3 = philox((counters & _MASK, counters >> 32, step.long().view(1), zero), key)
    numbers = torch.stack((w0 | w1 << 32, w2 | w3 << 32), dim=1).view(torch.uint8)
    return numbers.view(-1)[first % 16 :][:count]


def normal(key: Key, first: int, count: int, device: torch.device) -> torch.Tensor:
    """float32 numbers of mean 0 and standard deviation 1, by the Box-Muller transform."""
    words, numbers = _words(key, first, count, device)
    for column in (0, 2):
        # The logarithm's argument lies inside (0, 1): no number is infinite, the largest is 6.8
        radius = (words[column].double() + 0.5).mul_(2.0**-32).log_().mul_(-2.0).sqrt_()
        angle = words[column + 1].double().mul_(2.0**-32 * 2.0 * math.pi)
        numbers[:, column] = angle.cos().mul_(radius)
        numbers[:, column + 1] = angle.sin_().mul_(radius)
    return numbers.view(-1)[first % 4 :][:count]
