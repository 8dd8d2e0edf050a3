"""The self-test compares each configuration once, under the name of what runs."""

from launcher.diagnostics.selftest import make_variants
from tests.unit.planner.example_plans import RECIPE


def test_one_rank_has_its_strategy_once():
    """On one rank, DDP, ZeRO-1 and FSDP in float32 are one strategy."""
    names = [variant.name for variant in make_variants(RECIPE, ranks=1)]
    assert names.count("one rank") == 3, "one and several micro-batches, and mixed precision"
    assert not any(name.startswith("ddp") for name in names)
    several = {variant.name for variant in make_variants(RECIPE, ranks=2)}
    assert several >= {"fsdp", "ddp", "ddp, ZeRO-1", "one rank"}
