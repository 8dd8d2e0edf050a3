"""Variable-length attention of packed documents, as on a GPU.

Losses must equal those of attention that is computed for each document separately.
"""

import pytest

from tests.distributed.launching import results_of
from tests.distributed.varlen_worker import ALL, CASES

pytestmark = pytest.mark.long  # tests/unit/models/test_packed_attention.py compares one rank


def launch(folder, *arguments, timeout=300):
    return results_of("varlen_worker.py", folder, *arguments, ranks=2, timeout=timeout)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return launch(tmp_path_factory.mktemp("varlen"))


def assert_same_losses(note, expected):
    assert note["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert note["norms"] == pytest.approx(expected["norms"], rel=1e-4)


def check_case(results, strategy, mode, compiled):
    note = results[f"{strategy} {mode} compile={compiled}"]
    assert results["document by document"]["calls"] == {"forward": 0, "backward": 0}
    assert_same_losses(note, results["document by document"])
    # The kernel runs only for micro-batches with a packed row. Selective checkpointing saves its
    # output; full checkpointing runs it again in the backward pass
    calls = note["calls"]["backward"]
    assert calls > 0
    assert note["calls"]["forward"] == (2 * calls if mode == "{mode: full}" else calls)


@pytest.mark.parametrize(("strategy", "mode", "compiled"), CASES)
def test_losses_match_separate_documents(results, strategy, mode, compiled):
    check_case(results, strategy, mode, compiled)


@pytest.mark.long
def test_losses_match_in_all_combinations(tmp_path):
    results = launch(tmp_path, "all", timeout=1200)
    for case in ALL:
        check_case(results, *case)


def test_losses_match_with_two_head_sizes(results):
    calls = results["latent fsdp"]["calls"]
    assert calls["forward"] == calls["backward"] > 0
    assert_same_losses(results["latent fsdp"], results["latent document by document"])


def test_losses_match_with_context_parallelism(results):
    assert results["context parallel"]["calls"]["backward"] > 0
    assert_same_losses(results["context parallel"], results["document by document"])
    assert results["bfloat16, context parallel"]["losses"] != results["context parallel"]["losses"]


@pytest.mark.parametrize(
    ("divided", "whole"),
    [
        ("context parallel", "bfloat16"),
        ("tensor parallel", "bfloat16"),
        ("divided experts", "bfloat16, all experts"),
    ],
)
def test_losses_match_in_bfloat16(results, divided, whole):
    """Context, tensor and expert parallel ranks, with packed rows."""
    note, expected = results[f"bfloat16, {divided}"], results[whole]
    assert note["calls"]["backward"] > 0
    assert expected["calls"]["backward"] > 0
    assert note["losses"] == pytest.approx(expected["losses"], rel=1e-4)
    assert note["norms"] == pytest.approx(expected["norms"], rel=1e-2)
