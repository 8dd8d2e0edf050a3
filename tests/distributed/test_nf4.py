"""Adapters on weights in NF4 train to the same losses under every strategy; resumes and exports."""

import shutil
from pathlib import Path

import pytest

from launcher.cli.main import main
from tests.distributed.launching import results_of, torchrun
from tests.distributed.nf4_worker import CASES
from tests.distributed.test_equivalence import deviation
from tests.run_files import read_lines


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nf4")
    return folder, results_of("nf4_worker.py", folder, ranks=2, timeout=90)


@pytest.mark.long
@pytest.mark.parametrize("model", CASES)
def test_losses_are_those_of_the_rounded_weights_in_float32(trained, model):
    results = trained[1]
    for case in CASES[model]:
        alone, found = results[model], results[f"{model} {case}"]
        assert deviation(found["losses"], alone["losses"]) <= 1e-6, case
        assert deviation(found["norms"], alone["norms"]) <= 2e-6, case


RECIPE = """
run: {name: nf4, dir: FOLDER/run, max_steps: 6, seed: 7}
model: {path: FOLDER/mixtral}
data: {kind: tokens, train: FOLDER/train.jsonl, sequence_length: 32, packing: false, workers: 0, cache: FOLDER/cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
lora: {rank: 4, quantize: nf4}
optimizer: {learning_rate: 5.0e-2}
schedule: {warmup_steps: 1}
checkpoint: {every_steps: 3, keep_last: 5}
"""


@pytest.mark.long
def test_resumed_runs_and_exports(trained, tmp_path, capsys):
    """Resumes on the same ranks bit for bit, and on one rank of another strategy. Both merged
    exports load in a fresh process, and compute what they should."""
    recipe = tmp_path / "nf4.yaml"
    recipe.write_text(RECIPE.replace("FOLDER", str(trained[0])))

    def train(run, *overrides, ranks):
        words = ["launcher/train.py", f"recipe={recipe}", f"run.dir={run}", *overrides]
        output = torchrun(*words, ranks=ranks, timeout=120, OMP_NUM_THREADS="1").check().output
        lines = read_lines(Path(run) / "metrics.jsonl")
        return {line["step"]: line["loss"] for line in lines if "loss" in line}, output

    run = tmp_path / "run"
    losses, output = train(run, ranks=2)
    assert "nf4: 12 weights with" in output
    for name, overrides, ranks, tolerance in (
        ("same", [], 2, 0),
        ("experts", ["strategy.expert_parallel_size=2"], 2, 1e-6),
        ("one", ["strategy={kind: ddp, mixed_precision: null}"], 1, 1e-6),
    ):
        first = run / "checkpoints/step_00000003"
        again, _ = train(tmp_path / name, f"checkpoint.resume={first}", *overrides, ranks=ranks)
        for step in (4, 5, 6):
            assert again[step] == pytest.approx(losses[step], rel=tolerance, abs=0), name
    shutil.rmtree(tmp_path / "same")
    for base in ("original", "quantized"):
        words = [str(run), f"out={tmp_path / base}", "--merged", f"base={base}", "--verify"]
        assert main(["export", *words]) == 0, capsys.readouterr().out
    words = [str(run), f"out={tmp_path}/quantized", "--merged", "base=original", "--verify"]
    assert main(["export", *words]) == 3
