"""Context, tensor and expert parallel ranks train as one rank does.

Checkpoints load between all layouts."""

import re

import pytest

from tests import REPOSITORY
from tests.distributed.launching import results_of, torchrun
from tests.distributed.layouts import BOUNDS, FAULTS, LAUNCHES, STEPS, reference_of


def launch(folder, name):
    return results_of("layout_worker.py", folder, name, ranks=4, timeout=150)


def deviation(measured, expected):
    pairs = zip(measured, expected, strict=False)  # a planted fault is trained for one step
    return max(abs(a - b) / abs(b) for a, b in pairs)


@pytest.mark.parametrize(
    "name",
    [name if name == "quick" else pytest.param(name, marks=pytest.mark.long) for name in LAUNCHES],
)
def test_losses_norms_and_weights_are_those_of_one_rank(tmp_path, name):
    results = launch(tmp_path, name)
    for model, variant in LAUNCHES[name]:
        divided, alone = results[f"{model} {variant}"], results[reference_of(model, variant)[0]]
        assert len(divided["losses"]) == STEPS[name == "quick"]
        limit = 1e-6 if variant.startswith("context") else 1e-5
        assert deviation(divided["losses"], alone["losses"]) <= limit, variant
        assert deviation(divided["norms"], alone["norms"]) <= limit, variant
        # The states of int8 amplify rounding: sharded alone over four ranks, 1.2e-5
        assert divided["from_one_rank"] <= (1e-4 if "int8" in variant else 1e-5), variant
        assert divided["evaluation"] == pytest.approx(alone["evaluation"], rel=limit, abs=1e-6), (
            variant
        )
        assert divided["copies"] == [], variant
    for fault, (model, variant, _) in FAULTS.items() if name == "quick" else ():
        found, alone = results[fault], results[reference_of(model, variant)[0]]
        assert deviation(found["norms"], alone["norms"]) > 1e-5, fault
        if fault == BOUNDS:
            assert found["copies"] == ["model.norm.weight"]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "count"), [("layers", 36), ("experts", 25), ("stages", 36)])
def test_checkpoints_load_between_all_layouts(tmp_path, kind, count):
    loaded = launch(tmp_path, f"checkpoints of {kind}")
    assert len(loaded) == count
    assert all(loaded.values()), loaded


@pytest.mark.long
def test_each_rank_reads_its_share_of_a_pretrained_folder(tmp_path):
    results = launch(tmp_path, "pretrained layers")
    for name, share in (("1", 1), ("tensor 2", 4), ("tensor 4", 4), ("context 2", 4)):
        note = results[name]
        assert note["from_one_rank"] <= 1e-5
        assert note["exported"]
        assert note["read"] <= 1.1 * results["1"]["read"] / share  # each rank reads all norms


@pytest.mark.long
def test_each_rank_reads_its_experts_of_a_pretrained_folder(tmp_path):
    results = launch(tmp_path, "pretrained experts")
    by_rank = {name: found["by_rank"] for name, found in results.items()}
    experts = {name: [found["experts"] for found in each] for name, each in by_rank.items()}
    assert experts["experts 4"] == [["0"], ["1"], ["2"], ["3"]]
    assert experts["experts 2"] == [["0"], ["2"], ["1"], ["3"]]  # FSDP divides pairs
    for name, each in by_rank.items():
        share = by_rank["1"][0]["read"] / len(each)
        assert all(found["read"] <= 1.1 * share for found in each), name
        assert results[name]["from_one_rank"] <= 1e-5
        assert results[name]["exported"]


@pytest.mark.long
def test_an_adapter_is_continued_in_any_layout(tmp_path):
    results = launch(tmp_path, "adapters")
    assert results["first"]["change"] > 0.01  # else a lost adapter would not show
    for name in ("1", "tensor 2", "tensor 4", "context 2"):
        assert results[name]["from_one_rank"] <= 1e-5


@pytest.mark.long
def test_reported_script_finds_wrong_gradients_in_transformers(tmp_path):
    """docs/engineering/parallelism.md reports them. If this fails, a version of transformers has mended them."""
    text = (REPOSITORY / "docs/engineering/parallelism.md").read_text()
    (tmp_path / "norms.py").write_text(re.search(r"^```python\n(.*?)^```", text, re.M | re.S)[1])
    output = torchrun(tmp_path / "norms.py", ranks=2).check().output
    errors = re.findall(r"micro-batch (\d), the gradient of [qk]_norm is ([\d.]+)% wrong", output)
    assert [number for number, _ in errors] == ["1", "1", "2", "2"]
    assert [float(error) > 10 for _, error in errors] == [False, False, True, True]
