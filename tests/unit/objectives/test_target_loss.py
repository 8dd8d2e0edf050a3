"""A user's loss of each target: what is refused, weights, sources of a mixture, masked models."""

import json

import pytest
import torch
from torch.nn.functional import cross_entropy

from launcher.cli.main import main
from launcher.data.batching import NO_SAMPLE
from launcher.data.opening import open_dataset
from launcher.data.token_store import ModelTraits
from launcher.errors import RecipeError
from launcher.models import head as head_module
from launcher.models.head import Chunking, Transform
from launcher.objectives.target_loss import load_target_loss
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Objective
from launcher.training.model import prepare_model
from tests import REPOSITORY

RECIPE = """
run: {name: own, dir: run, max_steps: 2, device: cpu}
model: {config: {model_type: llama, vocab_size: 64, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 64}}
data: {kind: tokens, train: {a: {files: a.jsonl}, b: {files: b.jsonl}}, validation: a.jsonl, sequence_length: 16,
  weights_column: worth, workers: 0, cache: cache}
batch: {global_batch_size: 4, micro_batch_size: 2}
strategy: {mixed_precision: null}
objective: {loss: "own_losses:FUNCTION"}
"""
OWN = """
def focal(log_probabilities, gamma=2.0):
    return -((1 - log_probabilities.exp()) ** gamma) * log_probabilities

def plain(log_probabilities):
    return -log_probabilities

def from_logits(logits, targets):
    return -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]

from_logits.needs = "logits"
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A recipe with its losses beside it, in another folder than the current one."""
    monkeypatch.chdir(tmp_path)
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "own_losses.py").write_text(OWN)
    for name, first in (("a", 3), ("b", 20)):
        rows = [
            {"input_ids": [first + (row + token) % 9 for token in range(14)], "worth": 1 + row % 3}
            for row in range(8)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return beside


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("function", ["plain", "from_logits"])
def test_the_cross_entropy_written_by_a_user_is_the_launchers(
    folder, monkeypatch, function, chunked
):
    """With weights, with two sources, with several parts of the targets, and without targets."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 64 * 5)
    monkeypatch.setattr(head_module, "WIDTH_MULTIPLE", 16)
    (folder / "own.yaml").write_text(RECIPE.replace("FUNCTION", function))
    found = []
    for own in ([], ["objective=null"]):
        words = [f"recipe={folder}/own.yaml", f"model.chunked_loss={str(chunked).lower()}", *own]
        recipe = load_recipe(words, ranks=1).recipe
        prepared = prepare_model(recipe, device=torch.device("cpu"))
        torch.manual_seed(1)
        model = prepared.model.to_empty(device="cpu")
        model.apply(model._init_weights)
        options = {"tokenizer": None, "model": ModelTraits(), "build": True}
        options["objective"] = objective = prepared.objective
        data = open_dataset(recipe.data, recipe.data.train, **options)
        made = data.collate([data[0], data[len(data) - 1], data[NO_SAMPLE]])
        losses = objective.loss(model, made.micro_batch)
        losses[0].backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        nothing = objective.loss(model, data.collate([data[NO_SAMPLE]]).micro_batch)
        found.append([losses.detach(), nothing.detach(), *gradients])
        assert (vars(objective)["target_loss"] is None) == bool(own)
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert len(found[0][0]) == 5  # of two sources, losses and weights


def test_label_smoothing_is_that_of_torch_a_part_of_the_targets_at_a_time(monkeypatch):
    """Losses and gradients, of the head and of logits. The values are those of
    cross_entropy(label_smoothing=0.2)."""
    monkeypatch.setattr(head_module, "CHUNK_ELEMENTS", 2 * 7)
    loss = load_target_loss(Objective(loss="label_smoothing", arguments={"amount": 0.2}))
    weight = (torch.arange(21.0).view(7, 3).sin() * 2).requires_grad_()
    inputs = (torch.arange(15.0).view(5, 3).cos() * 3).requires_grad_()
    targets = torch.tensor([0, 6, 3, 3, 1])
    losses = loss.of_head(inputs, weight, None, targets, Chunking(Transform(), 7))
    values = torch.tensor([5.208803, 1.155667, 3.325538, 3.629329, 8.748808])
    torch.testing.assert_close(losses, values, rtol=1e-6, atol=1e-6)
    logits = inputs @ weight.T
    torch.testing.assert_close(loss.of_logits(logits, targets), values, rtol=1e-6, atol=1e-6)
    own = torch.autograd.grad(losses.sum(), [inputs, weight])
    reference = cross_entropy(logits, targets, reduction="sum", label_smoothing=0.2)
    for ours, theirs in zip(own, torch.autograd.grad(reference, [inputs, weight]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (
            "mean",
            {},
        ),
        ("as_number", {}),
        (
            "without_gradient",
            {},
        ),
        ("infinite", {}),
        ("fails", {}),
        ("focal", {"beta": 1}),
        (
            "wrong_needs",
            {},
        ),
        ("nothing", {}),
        ("divided", {}),
        ("divided_logits", {}),
    ],
)
def test_functions_that_cannot_be_used(words, function, arguments):
    with words.refused(function):
        load_target_loss(Objective(loss=f"tests.target_losses:{function}", arguments=arguments))


@pytest.mark.parametrize(
    ("function", "noted"), [("centered", True), ("noisy", False), ("focal", False)]
)
def test_a_loss_that_depends_on_other_targets_is_noted(function, noted, caplog):
    state = torch.get_rng_state()
    with caplog.at_level("INFO", logger="launcher"):
        load_target_loss(Objective(loss=f"tests.target_losses:{function}"))
    assert ("depends on the other targets" in caplog.text) == noted
    if function != "noisy":  # its trial draws
        assert torch.equal(torch.get_rng_state(), state)


def test_logits_that_ranks_divide_are_refused(folder):
    (folder / "own.yaml").write_text(RECIPE.replace("FUNCTION", "from_logits"))
    words = [f"recipe={folder}/own.yaml", "strategy={kind: fsdp, tensor_parallel_size: 2}"]
    recipe = load_recipe([*words, "data.train=a.jsonl"], ranks=2).recipe
    with pytest.raises(
        RecipeError, match=r"objective.loss: own_losses:from_logits needs logits, of"
    ):
        prepare_model(recipe, device=torch.device("cpu"))


@pytest.mark.slow
def test_plans_and_other_tasks(folder, capsys):
    (folder / "own.yaml").write_text(RECIPE.replace("FUNCTION", "focal"))
    assert main(["plan", f"recipe={folder}/own.yaml", "gpus=2", "gpu=h100"]) == 0
    pair = ["data={kind: preference, train: a.jsonl}", "preference={}"]
    assert main(["plan", f"recipe={folder}/own.yaml", "gpus=2", "gpu=h100", *pair]) == 2
    assert "objective" in capsys.readouterr().err


def test_the_documents_show_the_tested_functions():
    """The examples are those of tests/target_losses.py, apart from their docstrings."""
    shown = (REPOSITORY / "docs/extend.md").read_text().partition("## Your own loss")[2]
    written = (REPOSITORY / "tests/target_losses.py").read_text()
    for line in shown.split("```python")[1:]:
        for code in line.split("```")[0].splitlines():
            assert code in written or code.startswith("# my_losses.py"), code
