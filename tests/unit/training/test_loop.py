"""Steps, runs and evaluations without a target."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from launcher.data.batching import Position
from launcher.data.custom import CustomData, CustomDataset
from launcher.data.loader import GlobalBatch, StepStatistics, StepTotals
from launcher.data.packing import pack
from launcher.data.token_store import TokenStore
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.custom import Custom
from launcher.objectives.masked import Masked
from launcher.optimizers.optimizer import LossScale, make_optimizer
from launcher.recipe import schema
from launcher.run.run import TrainingRun
from launcher.strategies.one_rank import OneRank
from launcher.training.evaluation import Evaluator, refuse_without_targets
from launcher.training.generation import Generator
from launcher.training.loop import Update, train_steps
from tests.datasets import dataset_of

PACKED = {"packing": False, "sequence_length": 8}
ALONE = RankLayout(rank=0, size=1, group=None, device=torch.device("cpu"))


def on_one_rank(model):
    return OneRank(
        model, [], param_dtype=torch.float32, ranks=ALONE, init_fn=lambda *arguments: None
    )


@pytest.mark.parametrize(
    "name", ["adamw", "sgd", "adafactor", "muon", "lion", "schedule_free_adamw", "int8"]
)
def test_step_without_a_target_changes_nothing(name):
    """Neither weight decay nor momentum, and the loss is unknown, not 0."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    settings = {"state_dtype": "int8"} if name == "int8" else {"name": name}
    optimizer = make_optimizer(
        *(model, schema.Optimizer(weight_decay=0.5, learning_rate=0.1, **settings)),
        blocks=list(model),
    )

    def weight_of(counts):
        return MicroBatch({}, extra={"weight": float(counts)})

    def batches():
        for step, targets in enumerate([3, 0, 3], start=1):
            statistics = StepStatistics(StepTotals(targets, 3), ALONE)
            yield GlobalBatch(step, [weight_of(targets > 0)], statistics, step, 0.0)

    def state():
        parts = [*optimizer.state_dict()["state"].values(), model.state_dict()]
        tensors = (value for part in parts for value in part.values())
        return [value.clone() for value in tensors if isinstance(value, torch.Tensor)]

    steps = train_steps(
        on_one_rank(model),
        batches(),
        loss=lambda model, batch: model(torch.ones(2, 4)).square().sum() * batch.extra["weight"],
        update=Update(optimizer, lambda step: 0.1, LossScale(ALONE.device, enabled=False), None),
        averaged_over=1,
    )
    found = [state()]
    for step in steps:
        assert step.skipped.item() == 0
        assert step.loss.isnan() == (step.number == 2)
        found.append(state())
    for before, after, changes in zip(found, found[1:], [True, False, True], strict=False):
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert same != changes


def samples(*, number=4, targets=lambda batch: 0):
    data = CustomData(
        train=[1.0] * 4,
        collate=lambda rows: {"x": torch.tensor(rows)},
        loss=lambda model, batch: batch["x"].sum() * 0,
        targets=targets,
    )
    return CustomDataset([1.0] * number, data, "x", Custom(data))


def evaluator(dataset, **options):
    data = schema.Data(workers=0)
    options = {"micro_batch_size": 2, "max_batches": None, "ranks": ALONE} | options
    return Evaluator({"near": dataset}, data=data, **options)


def test_evaluation_without_a_target_is_an_error(monkeypatch):
    """Its loss would be 0, the best of all."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda *arguments, **options: None)
    wrapped = on_one_rank(torch.nn.Linear(1, 1))
    assert evaluator(samples(targets=None)).evaluate(wrapped)["near"].tokens == 4
    with pytest.raises(
        RecipeError, match=r"^data.validation: no token with loss in the set 'near' \("
    ):
        evaluator(samples()).evaluate(wrapped)
    with pytest.raises(RecipeError, match=r"^data.validation: the set 'near' has no sample$"):
        evaluator(samples(number=0))


def test_generation_without_a_prompt_is_an_error():
    store = TokenStore(np.arange(6), np.array([-100, -100, -100, -100, 4, 5]), np.array([0, 6]))
    dataset = dataset_of(store, pack(store.offsets, "chat", **PACKED, labels=store.labels), 8)
    settings = schema.Generate(max_new_tokens=5)
    generator = Generator(settings, tokenizer="bytes", rows=1, longest=8)
    message = r"^data.validation: the set 'near' has no prompt of up to 3 tokens to answer: raise "
    with pytest.raises(RecipeError, match=message):
        evaluator(dataset, generator=generator)


def masked(probability):
    store = TokenStore(np.arange(6), np.arange(6), np.array([0, 6]))
    documents = pack(store.offsets, "text", **PACKED, labels=None)
    return dataset_of(store, documents, 8, objective=Masked(probability=probability))


def test_without_a_target_masks_are_named():
    """The probability is too small for so few tokens."""
    message = "data.mask_probability: 1e-06 masks no token in the set 'near'; raise it"
    with pytest.raises(RecipeError, match=message):
        refuse_without_targets(masked(1e-6).objective, "the set 'near'")


@pytest.mark.parametrize(("position", "targets"), [(0, [0, 0, 0]), (0, [0, 3, 0, 0]), (5, [0] * 4)])
@pytest.mark.parametrize("mask", [False, True])
def test_run_without_a_target_is_an_error(position, targets, mask, caplog):
    """It is one in the first steps of a run. Later steps may have no sample left."""
    dataset = masked(1e-6) if mask else samples()
    run = SimpleNamespace(
        _recipe=SimpleNamespace(run=SimpleNamespace(max_skipped_steps=3)),
        _training=SimpleNamespace(data=SimpleNamespace(training=dataset)),
        _position=Position(step=position),
        _steps=100,
        _targets=0,
        _warned_of_targets=False,
    )
    message = r"^data: no token with loss in the first 3 steps \(for data.builder: CustomData.targ"
    if mask:
        message = r"^data.mask_probability: 1e-06 masks no token in the first 3 steps; raise it"
    raises = pytest.raises(RecipeError, match=message)
    with raises if len(targets) == 3 else nullcontext():
        for number, count in enumerate(targets, start=position + 1):
            batch = SimpleNamespace(statistics=StepStatistics(StepTotals(count, 1), ALONE))
            TrainingRun._check_targets(run, SimpleNamespace(number=number, batch=batch))
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"step {position + 1}: no token with loss in its batch: weights and")


def test_a_step_ends_before_a_micro_batch_if_the_run_stops():
    """Weights are those of the step before, and no gradient is left."""
    torch.manual_seed(2)
    model = torch.nn.Linear(4, 4)
    optimizer = make_optimizer(model, schema.Optimizer(learning_rate=0.1), blocks=[model])
    rows = [MicroBatch({"input": torch.randn(2, 4)}) for _ in range(3)]
    statistics = [StepStatistics(StepTotals(6, 6), ALONE) for _ in range(3)]
    batches = (GlobalBatch(n, rows, sums, n, 0.0) for n, sums in enumerate(statistics, start=1))
    asked = []
    steps = train_steps(
        on_one_rank(model),
        batches,
        loss=lambda model, row: model(**row.inputs).square().sum(),
        update=Update(optimizer, lambda step: 0.1, LossScale(ALONE.device, enabled=False), None),
        averaged_over=1,
        stop_reached=lambda: asked.append(None) or len(asked) == 6,
    )
    assert next(steps).number == 1
    after_one = [parameter.clone() for parameter in model.parameters()]
    assert list(steps) == []
    assert len(asked) == 6, "before each micro-batch"
    for parameter, expected in zip(model.parameters(), after_one, strict=True):
        assert torch.equal(parameter, expected)
        assert parameter.grad is None
