"""The counter-based generator: known vectors, distributions, and draws from any position."""

import math

import pytest
import torch

from launcher.models import philox

CPU = torch.device("cpu")
KEY = 0x243F6A88, 0x85A308D3


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [  # kat_vectors of Random123, philox4x32 with 10 rounds
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_vectors(counter, key, words):
    found = philox.philox(tuple(torch.tensor([c]) for c in counter), key)
    assert tuple(int(word) for word in found) == words


@pytest.mark.parametrize("draw", [philox.uniform, philox.normal])
def test_partial_draws_equal_slices_of_the_stream(draw):
    whole = draw(KEY, 0, 5000, CPU)
    for first, count in [(0, 1), (1, 1), (2, 3), (3, 4096), (4, 4), (777, 1234), (4999, 1)]:
        part = draw(KEY, first, count, CPU)
        assert torch.equal(part, whole[first : first + count]), (first, count)
    far = 2**34 - 2  # where the counter's first word overflows
    assert torch.equal(draw(KEY, far, 8, CPU)[3:], draw(KEY, far + 3, 5, CPU))
    assert not torch.equal(draw(KEY, far + 2, 100, CPU), whole[:100])
    assert not torch.equal(draw((KEY[0], KEY[1] + 1), 0, 100, CPU), whole[:100])


def test_distributions():
    """The tolerances are about five standard errors."""
    normal, uniform = (
        draw(KEY, 0, 10**6, CPU).double() for draw in (philox.normal, philox.uniform)
    )
    assert normal.mean().item() == pytest.approx(0, abs=5e-3)
    assert normal.std().item() == pytest.approx(1, abs=4e-3)
    assert (normal**4).mean().item() == pytest.approx(3, abs=0.05)
    for limit in (0.5, 1, 2, 3):
        inside = (normal.abs() < limit).double().mean().item()
        assert inside == pytest.approx(math.erf(limit / 2**0.5), abs=3e-3)
    assert 4.3 < normal.abs().max().item() < 6.8
    assert 0 <= uniform.min().item() < 1e-4
    assert 1 - 1e-4 < uniform.max().item() < 1
    assert uniform.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert uniform.var().item() == pytest.approx(1 / 12, abs=1e-3)
    for numbers in (normal, uniform):  # adjacent numbers must be uncorrelated
        for distance in (1, 2, 3, 4):
            pair = torch.stack([numbers[:-distance], numbers[distance:]])
            assert torch.corrcoef(pair)[0, 1].item() == pytest.approx(0, abs=5e-3)
