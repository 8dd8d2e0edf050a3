"""Every type of causal and of image-text models of transformers takes a step in bfloat16, under `ddp`,
whose autocast hides mixed dtypes, and under `fsdp`, which gathers and frees weights."""

import json
from pathlib import Path

import pytest

from tests.distributed.families_worker import TYPES
from tests.distributed.launching import amount, cases, forked

WORKER = Path(__file__).with_name("families_worker.py")
QUICK = ("llama", "minimax", "inkling_text", "qwen3_5_text", "gpt_oss")
"""MiniMax has decays in float32, and Inkling a norm in its embedding."""
NO_SMALL_CONFIG = {
    *("bailing_hybrid", "blt", "cpmant", "deepseek_v2", "gemma4_assistant", "kimi_linear"),
    *("mllama", "molmo2", "step3p7", "xlstm", "zamba2"),
}
"""Types whose small configs fail, in the same way under both strategies."""


@pytest.fixture(scope="module")
def results(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("families")
    chosen = QUICK if amount(request) == "quick" else ()
    forked(WORKER, folder, *chosen, ranks=2, timeout=1500 if not chosen else 300).check()
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("model_type", cases(TYPES, QUICK))
def test_a_step_in_bfloat16(results, model_type):
    found = results[model_type]
    if "refused" in found:
        pytest.skip(found["refused"])
    if model_type in NO_SMALL_CONFIG:
        assert found["ddp"] == found["fsdp"], "fails in another way"
        pytest.skip(found["ddp"])
    assert isinstance(found["ddp"], float), found["ddp"]
    assert isinstance(found["fsdp"], float), found["fsdp"]
    assert found["fsdp"] == pytest.approx(found["ddp"], rel=5e-3, abs=1e-3)
