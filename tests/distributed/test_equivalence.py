"""Compares all strategies, accumulations and numbers of ranks with a plain PyTorch loop.

Losses, gradient norms and final weights must agree."""

import itertools

import pytest

from tests.distributed.equivalence_worker import (
    CHECKPOINTING,
    LONG,
    OFFLOADED,
    OPTIMIZERS,
    OWN,
    OWN_RUNS,
    PARTS,
    SHARDINGS,
    STEPS,
    SYNCS,
)
from tests.distributed.launching import amount, results_of


def launch(part):
    """A fixture: what the worker stores for this part of the comparisons."""

    @pytest.fixture(scope="module")
    def results(request, tmp_path_factory):
        folder, of = tmp_path_factory.mktemp("equivalence"), amount(request)
        return results_of("equivalence_worker.py", folder, part, of, ranks=4, timeout=300)

    return results


# Launches of less than a minute, which a loaded machine does not stretch to their time limit
strategies, optimizers, others = map(launch, PARTS)


def parametrize(names, values, form="{}"):
    """Marks the tests of configurations that are long. form: of the name of a configuration."""
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*value, marks=pytest.mark.long if form.format(*value) in LONG else ())
            for value in ((value,) if isinstance(value, str) else value for value in values)
        ],
    )


def deviation(measured, expected):
    assert len(measured) == len(expected) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(measured, expected, strict=True))


def assert_same(note, plain, *, loss, norm, final=None):
    assert "error" not in note, note
    worst_loss, worst_norm = (
        deviation(note["losses"], plain["losses"]),
        deviation(note["norms"], plain["norms"]),
    )
    assert worst_loss <= loss, f"losses differ by {worst_loss:.1e}"
    assert worst_norm <= norm, f"gradient norms differ by {worst_norm:.1e}"
    assert note["initial"] == 0.0, f"initial weights differ by {note['initial']:.1e}"
    if final is not None:
        assert note["final"] <= final, f"final weights differ by {note['final']:.1e}"


NOT_DIVIDED = [("label_smoothing", "tensor")]
"""A loss of logits cannot be divided by vocabulary."""


def test_plain_loop_learns(strategies):
    losses = strategies["plain"]["losses"]
    assert losses[0] > 4.0, "the initial loss should be about ln 64"
    assert losses[-1] < 0.97 * losses[0]


FLOAT32 = [
    f"{strategy} ranks={ranks} accumulation={accumulation} sync={sync}"
    for strategy in ("ddp", "fsdp", "offload")
    for ranks, ways in SYNCS.items()
    for accumulation, sync in ways
] + [
    "hybrid 2x2",
    "hybrid 2x2 held back",
    "kept gathered",
    "kept gathered, held back",
    "not resharded after forward",
    "selective",
    "budget",
    "every second block",
    "activations offloaded",
    "loader processes",
    "ddp selective",
    "ddp budget",
    "ZeRO-1 ranks=1",
    "ZeRO-1 ranks=2",
    "ZeRO-1 ranks=4",
]


@parametrize("name", FLOAT32)
def test_float32_training_matches_plain_loop(strategies, name):
    assert_same(strategies[name], strategies["plain"], loss=1e-5, norm=1e-5, final=1e-5)


@pytest.mark.parametrize("name", ["weighted ddp ranks=4", "weighted fsdp ranks=2"])
def test_weighted_losses_do_not_depend_on_ranks_and_accumulation(strategies, name):
    note, reference = strategies[name], strategies["weighted ddp ranks=1"]
    assert deviation(note["losses"], reference["losses"]) <= 2e-6
    assert deviation(note["norms"], reference["norms"]) <= 1e-5
    assert note["evaluation"] == pytest.approx(reference["evaluation"], rel=1e-6)
    assert deviation(reference["losses"], strategies["plain"]["losses"]) > 1e-3


@parametrize("optimizer, sharding", itertools.product(OPTIMIZERS, SHARDINGS), "{} {}")
def test_optimizer_is_independent_of_sharding(optimizers, optimizer, sharding):
    """Stochastic rounding draws the same numbers, and no int8 block is split between ranks."""
    reference = optimizers[f"{optimizer} ddp ranks=1"]
    assert_same(optimizers[f"{optimizer} {sharding}"], reference, loss=2e-6, norm=1e-5)
    assert reference["losses"][-1] < reference["losses"][0]
    if optimizer == "muon":
        assert optimizers[f"{optimizer} {sharding}"]["from_one_rank"] <= 1e-6
    assert reference["final"] > 1e-5, "the optimizer behaved like AdamW in float32"


@parametrize("name", OFFLOADED)
def test_offloaded_optimizer_state_is_bit_identical(optimizers, name):
    """The state is split into several buckets, which share buffers in turn."""
    offloaded, before = optimizers[name], optimizers[f"{name} before"]
    assert offloaded["losses"] == before["losses"]
    assert offloaded["norms"] == before["norms"]
    assert offloaded["final"] == before["final"]
    if not any(other in name for other in ("int8", "sgd", "lion")):
        assert_same(offloaded, optimizers["plain"], loss=1e-5, norm=1e-5, final=1e-5)


@pytest.mark.parametrize("name", ["ddp ranks=2", "fsdp ranks=2", "offload ranks=4"])
def test_rounded_weights_do_not_depend_on_sharding(others, name):
    """A layer rounds its whole weight, in each micro-batch (model.qat)."""
    note, reference = others[f"qat {name}"], others["qat ddp ranks=1"]
    assert deviation(note["losses"], reference["losses"]) <= 1e-6
    assert deviation(note["norms"], reference["norms"]) <= 1e-5
    assert deviation(reference["losses"], others["plain"]["losses"]) > 1e-5


def test_initial_weights_are_bit_identical_on_any_ranks(others):
    notes = {name: note for name, note in others.items() if name.startswith("initial ")}
    assert len(notes) == 10
    assert {note["digest"] for note in notes.values()} == {notes["initial ddp ranks=1"]["digest"]}
    assert {note["collectives"] for note in notes.values()} == {0}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "offload"])
def test_bfloat16_training_matches_plain_loop(others, strategy):
    assert_same(others[f"bfloat16 {strategy}"], others["plain"], loss=1e-3, norm=2e-2)
    assert deviation(others[f"bfloat16 {strategy}"]["losses"], others["plain"]["losses"]) > 1e-7, (
        "the run computed in float32"
    )


@parametrize("strategy", ["ddp", "fsdp", "offload", "ZeRO-1"], "float16 {}")
def test_float16_overflow_on_one_rank_skips_the_step_on_all(others, strategy):
    smooth, overflow = others[f"float16 {strategy}"], others[f"overflow {strategy}"]
    assert smooth["skipped"] == [0, 0, 0, 0, 0, 0]
    assert overflow["skipped"] == [0, 0, 0, 1, 0, 0], (
        "rank 0 must skip the step because of the overflow on rank 1"
    )
    assert overflow["losses"][:3] == smooth["losses"][:3]
    assert smooth["losses"][-1] < smooth["losses"][0]
    # The skipped step changes no weights: step 5 starts from the weights after step 3
    assert overflow["losses"][4] > smooth["losses"][4]


@parametrize(
    "name, where",
    [(name, where) for name in OWN for where in OWN_RUNS if (name, where) not in NOT_DIVIDED],
    "{} {}",
)
def test_a_users_loss_matches_the_plain_loop(others, name, where):
    note, plain = others[f"{name} {where}"], others[f"plain {name}"]
    assert deviation(plain["losses"], others["plain"]["losses"]) > 1e-3
    if where == "packed":  # other rows are in a step
        assert note["losses"][0] == pytest.approx(plain["losses"][0], rel=0.05)
    else:
        assert deviation(note["losses"], plain["losses"]) <= 1e-6
        assert deviation(note["norms"], plain["norms"]) <= 1e-5


@parametrize("strategy", ["ddp", "fsdp", "offload"], "experts {}")
def test_balance_of_experts_is_that_of_one_rank(others, strategy):
    """Rows differ in length. One rank has one micro-batch, and each of two ranks has two."""
    alone, other, without = (
        others["experts alone"],
        others[f"experts {strategy}"],
        others["experts without"],
    )
    assert deviation(other["losses"], alone["losses"]) <= 1e-6
    assert deviation(other["norms"], alone["norms"]) <= 1e-6
    assert deviation(alone["norms"], without["norms"]) > 1e-2, (
        "the gradient must include the auxiliary loss"
    )
    assert alone["losses"][0] == pytest.approx(without["losses"][0], rel=1e-6), (
        "the reported loss must exclude the auxiliary loss"
    )


def test_balance_of_a_micro_batch_depends_on_the_division(others):
    own, alone = others["experts, micro-batches"], others["experts alone"]
    assert deviation(own["losses"], alone["losses"]) > 1e-4


@parametrize("strategy, mode", itertools.product(["ddp", "fsdp"], CHECKPOINTING), "dropout {} {}")
def test_dropout_is_bit_identical_under_checkpointing(others, strategy, mode):
    assert (
        others[f"dropout {strategy} {mode}"]["losses"]
        == others[f"dropout {strategy} null"]["losses"]
    )
    assert others[f"dropout {strategy} {mode}"]["bit_identical"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("packing", [True, False])
def test_evaluation_counts_each_token_once(strategies, ranks, packing):
    note = strategies[f"evaluation ranks={ranks} packing={packing}"]
    loss, tokens = note["evaluation"]
    expected_loss, expected_tokens = strategies["plain"]["evaluation"]
    assert tokens == expected_tokens
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert note["sequences"] < 53 if packing else note["sequences"] == 53


@parametrize(
    "mutation, strategy",
    itertools.product(["mean of means", "held back"], ["ddp", "fsdp", "offload"]),
    "mutation: {} {}",
)
def test_planted_faults_are_detected(strategies, mutation, strategy):
    with pytest.raises(AssertionError):
        assert_same(
            strategies[f"mutation: {mutation} {strategy}"],
            strategies["plain"],
            loss=1e-5,
            norm=1e-5,
            final=1e-5,
        )
