"""Custom data: invalid builders, and the weight of incomplete batches."""

import pytest
import torch

from launcher.data.batching import NO_SAMPLE
from launcher.data.custom import CustomData, CustomDataset, build_custom_data
from launcher.errors import RecipeError
from tests.distributed import vision

HERE = "tests.unit.data.test_custom_data"


def build_dict():
    return {"train": [1, 2]}


def build_empty():
    return CustomData(train=[], collate=lambda rows: {}, loss=lambda model, batch: torch.zeros(()))


VISION = "tests.distributed.vision"


@pytest.mark.parametrize(
    ("builder", "arguments", "message"),
    [
        (f"{VISION}:datas", None, r"builder: .* has no function datas; it has .*data"),
        (
            f"{VISION}s:data",
            None,
            r"builder: there is no module tests\.distributed\.visions; it mus",
        ),
        (
            f"{VISION}:data",
            {"numbers": 3},
            r"arguments: .*\(number=50\) cannot be called .*numbers",
        ),
        (
            f"{HERE}:build_dict",
            None,
            r"builder: .* must return a launcher\..*\.CustomData; got dict",
        ),
        (f"{HERE}:build_empty", None, r"builder: .* returned an empty training set"),
    ],
)
def test_invalid_builders_are_refused(builder, arguments, message):
    with pytest.raises(RecipeError, match=rf"^data\.{message}"):
        build_custom_data(builder, arguments)


def test_rows_without_a_sample_have_zero_weight():
    data = build_custom_data("tests.distributed.vision:data", {"number": 6})
    dataset = CustomDataset(data.train, data, "vision")
    net = vision.model()
    whole = dataset.collate([dataset[index] for index in (0, 1, 2)])
    part = dataset.collate([dataset[index] for index in (0, NO_SAMPLE, 2)])
    none = dataset.collate([dataset[NO_SAMPLE]] * 3)
    assert [collated["loss_tokens"] for collated in (whole, part, none)] == [3, 2, 0]
    losses = [dataset.loss(net, collated["tensors"]) for collated in (whole, part, none)]
    assert losses[0] > losses[1] > losses[2] == 0
    losses[2].backward()
    assert all(parameter.grad is not None for parameter in net.parameters()), (
        "the backward pass must reach every parameter, which sharding requires"
    )


def test_non_scalar_loss_is_refused():
    data = CustomData(train=[1.0], collate=torch.tensor, loss=lambda model, batch: batch["x"])
    dataset, batch = CustomDataset([1.0], data, "x"), {"x": torch.ones(2)}
    message = r"its loss must be a scalar, the sum over the micro-batch; got the shape \(2,\)"
    with pytest.raises(RecipeError, match=message):
        dataset.loss(torch.nn.Identity(), {"batch": batch, "weight": 1.0})
