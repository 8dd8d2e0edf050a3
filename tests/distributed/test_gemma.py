"""Gemma 3n and 4: losses and gradients of a loop over documents, with each strategy."""

import pytest
import torch

from tests.distributed.gemma_worker import MODELS, PLAIN, VARIANTS
from tests.distributed.launching import results_of

REFUSED = {
    "gemma4_text, experts tensor": "has what is not supported: moe_tp_experts",
    "gemma4 tensor": "reads the weight of its embedding beside looking tokens up",
    "gemma3n_text tensor": "keeps the largest activations of a layer",
}
CASES = {
    "gemma4_text": [name for name in VARIANTS if name not in ("tensor eager", "experts")],
    "gemma4_text, experts": ["ddp", "fsdp", "fsdp full", "fsdp selective", "tensor"],
    "gemma4_text, one key head": ["ddp", "tensor", "tensor eager"],
    "gemma4, untied": ["ddp", "fsdp"],
    "gemma4": ["ddp", "fsdp", "fsdp full", "offload", "lora fsdp", "nf4 fsdp", "dpo", "tensor"],
    "gemma3n_text": ["ddp", "fsdp", "fsdp full", "fsdp selective", "offload", "tensor"],
}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_gemma_trains_as_single_documents(tmp_path, name):
    cases = [f"{name} {variant}" for variant in CASES[name]]
    results = results_of("gemma_worker.py", tmp_path, *cases, ranks=2, timeout=200)
    expected = results[name]
    assert results[f"{name} cache"] == [0.0, True]  # with and without a cache, and generation
    for variant, case in zip(CASES[name], cases, strict=True):
        found = results[case]
        if case in REFUSED:
            assert REFUSED[case] in found["refused"]
        elif variant in PLAIN:
            assert found["losses"] == pytest.approx(expected["losses"], abs=2e-6), case
            assert found["norms"] == pytest.approx(expected["norms"], rel=2e-5), case
        elif variant == "dpo":
            assert found["losses"][0] == pytest.approx(0.6931472, abs=1e-6), case
            assert found["losses"][-1] < 0.6
        elif variant.startswith("lora"):  # adapters change nothing at first
            assert found["losses"][0] == pytest.approx(expected["losses"][0], abs=2e-6), case
            assert found["losses"][-1] < expected["losses"][0]
        elif variant.endswith(" ddp"):  # weights that are rounded to 4 bits
            assert found["losses"][0] == pytest.approx(expected["losses"][0], abs=2e-2), case
    methods = ["lora", "nf4"]
    if torch.__version__ < "2.12" and (refused := results.get(f"{name} nf4 fsdp")) is not None:
        assert "needs torch 2.12 or newer" in refused["refused"]
        methods.remove("nf4")
    for method in methods:
        if {f"{method} ddp", f"{method} fsdp"} <= set(CASES[name]):
            ddp, fsdp = (results[f"{name} {method} {kind}"]["losses"] for kind in ("ddp", "fsdp"))
            assert fsdp == pytest.approx(ddp, abs=2e-6)
