"""The self-test compares each configuration once, under the name of what runs."""

from dataclasses import replace

from launcher.diagnostics.selftest import make_variants
from tests.unit.planner.example_plans import RECIPE


def test_one_rank_has_its_strategy_once():
    """On one rank, DDP, ZeRO-1 and FSDP in float32 are one strategy."""
    names = [variant.name for variant in make_variants(RECIPE, ranks=1)]
    assert names.count("one rank") == 3, "one and several micro-batches, and mixed precision"
    assert not any(name.startswith("ddp") for name in names)
    several = {variant.name for variant in make_variants(RECIPE, ranks=2)}
    assert several >= {"fsdp", "ddp", "ddp, ZeRO-1", "one rank"}


def test_a_ring_is_that_of_the_recipe():
    strategy = replace(RECIPE.strategy, context_parallel_size=4, context_parallel_ring=2)
    for own, name in (
        (strategy, "fsdp, sequences over 4 ranks in 2 groups"),
        (replace(strategy, context_parallel_ring=1), "fsdp, sequences over 4 ranks"),
        (replace(strategy, context_parallel_ring=None), "fsdp, sequences over 4 ranks"),
    ):
        variants = make_variants(replace(RECIPE, strategy=own), ranks=4)
        found = {v.recipe.strategy.context_parallel_ring for v in variants if v.name == name}
        assert found == {own.context_parallel_ring}
