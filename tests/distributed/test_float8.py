"""Training with linear layers in float8, emulated: every strategy has the losses of one rank."""

import re
import sys

import pytest

from launcher.cli.main import main
from tests.distributed.float8_worker import PRECISIONS, selected
from tests.distributed.launching import results_of, run, torchrun, write_rows
from tests.run_files import read_lines


def deviation(measured, expected):
    return max(abs(a - b) / abs(b) for a, b in zip(measured, expected, strict=True))


pytestmark = pytest.mark.long  # tests/unit/models/test_float8.py compares products and bits

EQUAL = {
    "offload": ("state offloaded", "full", "selective", "budget"),
    "ddp": ("ZeRO-1", "ddp, selective"),
}
"""Cases with as many ranks and micro-batches: their bits are the same."""


@pytest.fixture(scope="module", params=["quick", "all"])
def trained(request, tmp_path_factory):
    pytest.importorskip("torchao")
    folder = tmp_path_factory.mktemp("float8")
    return request.param, results_of(
        "float8_worker.py", folder, request.param, ranks=2, timeout=180
    )


def test_losses_and_norms_are_those_of_one_rank(trained):
    """Within what bfloat16 leaves without float8, which is the control: gradients are reduced in
    bfloat16, and other ranks and micro-batches round other sums."""
    launch, results = trained
    for precision in PRECISIONS:
        for model, cases in selected(launch).items():
            for case, (overrides, _, _) in cases.items():
                kind = "ddp" if "strategy.kind=ddp" in overrides else "fsdp"
                alone = results[f"{model} {precision} alone {kind}"]
                found, name = results[f"{model} {precision} {case}"], f"{precision} {case}"
                # Compiled blocks and divided experts round their sums in another order
                first = 5e-5 if case == "compiled" else 5e-6 if case == "experts" else 1e-6
                if kind == "ddp":  # autocast adds up in float32 what one rank does in bfloat16
                    first = max(first, 2e-5)
                assert deviation(found["losses"][:1], alone["losses"][:1]) <= first, name
                assert deviation(found["losses"], alone["losses"]) <= 1e-4, name
                assert deviation(found["norms"], alone["norms"]) <= 4e-3, name
        for one, others in EQUAL.items() if launch == "all" else ():
            expected = results[f"llama {precision} {one}"]
            for other in others:
                assert results[f"llama {precision} {other}"] == expected, f"{precision} {other}"


def test_float8_rounds_products(trained):
    results = trained[1]
    for kind in ("fsdp", "ddp"):
        names = [f"llama {precision} alone {kind}" for precision in PRECISIONS]
        first, second, plain = (results[name]["losses"] for name in names)
        assert first[0] == second[0] != plain[0]
        assert first[-1] != second[-1], "the gradients of weights are computed in another precision"


RECIPE = """
run: {name: float8, dir: FOLDER/run, max_steps: 6, seed: 7}
model: {path: FOLDER/model}
data: {kind: tokens, train: FOLDER/train.jsonl, validation: FOLDER/train.jsonl, sequence_length: 32, workers: 0, \
packing: false, cache: FOLDER/cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: {float8: rowwise}}
evaluation: {every_steps: 6}
optimizer: {learning_rate: 5.0e-3}
schedule: {warmup_steps: 1}
checkpoint: {every_steps: 3, keep_last: 5}
"""


@pytest.mark.long
def test_resumed_runs_export_and_selftest(tmp_path):
    """Resumes on the same ranks bit for bit, and on one rank of another strategy. The export has the
    weights that were trained, in the dtype of the base."""
    pytest.importorskip("torchao")
    import torch
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    torch.manual_seed(3)
    config = transformers.LlamaConfig(**sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "model")
    write_rows(tmp_path / "train.jsonl")
    recipe = tmp_path / "float8.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(tmp_path)))

    def train(name, *overrides, ranks):
        folder = tmp_path / name
        words = ["launcher/train.py", f"recipe={recipe}", f"run.dir={folder}", *overrides]
        output = torchrun(*words, ranks=ranks, timeout=120, OMP_NUM_THREADS="1").check().output
        lines = read_lines(folder / "metrics.jsonl")
        return {line["step"]: line["loss"] for line in lines if "loss" in line}, output

    losses, output = train("run", ranks=2)
    assert "float8: 14 linear layers; 1 others are not converted" in output
    first = tmp_path / "run/checkpoints/step_00000003"
    ddp = "strategy={kind: ddp, mixed_precision: {float8: rowwise}}"
    for name, overrides, ranks, tolerance in (("same", [], 2, 0), ("one", [ddp], 1, 1e-4)):
        again, _ = train(name, f"checkpoint.resume={first}", *overrides, ranks=ranks)
        for step in (4, 5, 6):
            assert again[step] == pytest.approx(losses[step], rel=tolerance, abs=0), name
    assert main(["export", f"{tmp_path}/run", f"out={tmp_path}/out", "--verify"]) == 0
    exported = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(tensor.dtype == torch.float32 for tensor in exported.values())
    command = (sys.executable, "-m", "launcher.cli.main", "selftest", f"recipe={recipe}")
    output = run([*command, "run.device=cpu"], timeout=240).check().output
    assert "All configurations give the same losses" in output
    assert len(re.findall("^fsdp +float8 ", output, re.MULTILINE)) == 1
    assert "emulated" not in output
