"""The training loop: steps without a target."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from launcher.data.loader import GlobalBatch, StepStatistics
from launcher.distributed.process_group import DataParallel
from launcher.recipe import schema
from launcher.training.loop import Update, train_steps
from launcher.training.optimizer import LossScale, make_optimizer

ALONE = DataParallel(rank=0, size=1, group=None, device=torch.device("cpu"))


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor", "muon", "int8"])
def test_step_without_a_target_changes_nothing(name):
    """Neither weight decay nor momentum, and the loss is unknown, not 0."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    settings = {"state_dtype": "int8"} if name == "int8" else {"name": name}
    optimizer = make_optimizer(
        *(model, schema.Optimizer(weight_decay=0.5, learning_rate=0.1, **settings)),
        blocks=list(model),
    )

    def batches():
        for step, targets in enumerate([3, 0, 3], start=1):
            statistics = StepStatistics([targets, 3, 0, 0], ALONE)
            yield GlobalBatch(step, [{"weight": float(targets > 0)}], statistics, step, 0.0)

    def state():
        parts = [*optimizer.state_dict()["state"].values(), model.state_dict()]
        tensors = (value for part in parts for value in part.values())
        return [value.clone() for value in tensors if isinstance(value, torch.Tensor)]

    def grad_norm():
        return torch.stack([p.grad.norm() for p in model.parameters()]).norm()

    wrapped = SimpleNamespace(
        model=model,
        forward_context=nullcontext,
        micro_batch=lambda last: nullcontext(),
        grad_norm=grad_norm,
    )
    steps = train_steps(
        wrapped,
        batches(),
        loss=lambda model, batch: model(torch.ones(2, 4)).square().sum() * batch["weight"],
        update=Update(optimizer, lambda step: 0.1, LossScale(ALONE.device, enabled=False), None),
        ranks=1,
    )
    found = [state()]
    for step in steps:
        assert step.skipped.item() == 0
        assert step.loss.isnan() == (step.number == 2)
        found.append(state())
    for before, after, changes in zip(found, found[1:], [True, False, True], strict=False):
        same = len(before) == len(after) and all(map(torch.equal, before, after))
        assert same != changes
