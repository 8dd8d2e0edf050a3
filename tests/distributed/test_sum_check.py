"""A loss of the user's own that is a mean is noticed under each strategy, and nothing changes by it."""

import sys

import pytest

from tests import REPOSITORY
from tests.distributed.launching import results_of, run, torchrun
from tests.distributed.test_train import TRAIN
from tests.run_files import status
from tests.unit.training.test_sum_check import RECIPE


def test_all_ranks_have_the_verdict_and_nothing_changes(tmp_path):
    found = results_of("sum_check_worker.py", tmp_path, ranks=2, timeout=120)
    verdicts = {"as_sum, dropout": "sum", "as_mean, plain": "mean"}
    verdicts["as_sum, batch_norm"] = "dependent"
    assert len(found) == 11
    for name, result in found.items():
        assert result["verdicts"] == [verdicts[name.split(": ")[1]]] * 2, name
        assert result["unchanged"] == [True, True], name


@pytest.mark.long
def test_a_run_with_a_mean_ends_before_its_first_step(tmp_path):
    (tmp_path / "own.yaml").write_text(RECIPE)
    words = [f"recipe={tmp_path}/own.yaml", f"run.dir={tmp_path}/run"]
    mean = "data.arguments.loss=as_mean"
    variables = {"PYTHONPATH": str(REPOSITORY)}
    result = torchrun(TRAIN, *words, mean, ranks=2, **variables)
    assert result.status == 1, "torchrun exits with status 1 after any failure"
    assert "it is a mean over the micro-batch, and must be a sum" in result.output
    assert "Traceback" not in result.output.split("it is a mean")[0]
    ended = status(tmp_path / "run")
    assert (ended["state"], ended["reason"]) == ("failed", "recipe")
    noted = "data.arguments.loss=contrastive"
    result = torchrun(TRAIN, *words, noted, ranks=2, **variables).check()
    assert result.output.count("note: data.builder: the loss of 4 samples") == 1


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        ("data.arguments.loss=as_mean", "it is a mean over the micro-batch"),
        ("model.arguments.kind=batch_norm", "batch norm (norm, BatchNorm1d) is the likely cause"),
        ("model.arguments.kind=functional", "such as noise or nn.functional.dropout"),
    ],
)
def test_selftest_names_the_likely_cause(tmp_path, arguments, cause):
    (tmp_path / "own.yaml").write_text(RECIPE)
    words = [f"recipe={tmp_path}/own.yaml", arguments, "steps=2", "run.device=cpu", "gpus=1"]
    command = [sys.executable, "-m", "launcher.cli.main", "selftest", *words]
    result = run(command, PYTHONPATH=str(REPOSITORY)).check(3)
    (line,) = [line for line in result.output.splitlines() if line.startswith("Likely cause: ")]
    assert cause in line
