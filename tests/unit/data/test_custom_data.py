"""Custom data: invalid builders, the weight of incomplete batches, random numbers."""

import itertools
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from launcher.data.batching import NO_SAMPLE, Position, RankBatchSampler, SampleOrder
from launcher.data.collation import Unreadable
from launcher.data.custom import CustomData, CustomDataset, build_custom_data
from launcher.data.loader import check_shared_memory, make_loader
from launcher.data.run_data import open_run_data
from launcher.data.token_store import ModelTraits
from launcher.distributed import host_memory
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.micro_batch import MicroBatch
from launcher.objectives.custom import Custom
from launcher.recipe import schema
from tests.distributed import vision

HERE = "tests.unit.data.test_custom_data"


def build_dict():
    return {"train": [1, 2]}


def build_empty():
    return CustomData(train=[], collate=lambda rows: {}, loss=lambda model, batch: torch.zeros(()))


VISION = "tests.distributed.vision"


@pytest.mark.parametrize(
    ("builder", "arguments"),
    [
        (f"{VISION}:datas", None),
        (
            f"{VISION}s:data",
            None,
        ),
        (
            f"{VISION}:data",
            {"numbers": 3},
        ),
        (
            f"{HERE}:build_dict",
            None,
        ),
        (f"{HERE}:build_empty", None),
    ],
)
def test_invalid_builders_are_refused(words, builder, arguments):
    with words.refused(builder):
        build_custom_data(builder, arguments)


def test_rows_without_a_sample_have_zero_weight():
    data = build_custom_data("tests.distributed.vision:data", {"number": 6})
    dataset = CustomDataset(data.train, data, "vision")
    net = vision.model()
    whole = dataset.collate([dataset[index] for index in (0, 1, 2)])
    part = dataset.collate([dataset[index] for index in (0, NO_SAMPLE, 2)])
    none = dataset.collate([dataset[NO_SAMPLE]] * 3)
    assert [collated.loss_tokens for collated in (whole, part, none)] == [3, 2, 0]
    losses = [Custom(data).loss(net, collated.micro_batch) for collated in (whole, part, none)]
    assert losses[0] > losses[1] > losses[2] == 0
    losses[2].backward()
    assert all(parameter.grad is not None for parameter in net.parameters()), (
        "the backward pass must reach every parameter, which sharding requires"
    )


def test_non_scalar_loss_is_refused():
    data = CustomData(train=[1.0], collate=torch.tensor, loss=lambda model, batch: batch["x"])
    batch = {"x": torch.ones(2)}
    message = (
        r"its loss must be a scalar tensor, the sum over the micro-batch; got the shape \(2,\)"
    )
    micro_batch = MicroBatch({}, extra={"batch": batch, "weight": 1.0})
    with pytest.raises(RecipeError, match=message):
        Custom(data).loss(torch.nn.Identity(), micro_batch)


@pytest.mark.parametrize("targets", [2.5, -1, float("nan"), None, torch.ones(2)])
def test_targets_that_are_no_whole_number_are_refused(targets):
    """A fraction was cut off, and a negative number turned the gradient around."""
    data = CustomData(
        train=[1.0],
        collate=lambda rows: {"x": torch.tensor(rows)},
        loss=lambda model, batch: batch["x"].sum(),
        targets=lambda batch: targets,
    )
    dataset = CustomDataset([1.0, 2.0], data, "x")
    with pytest.raises(RecipeError, match=r"^data\.builder: its targets must be a whole number"):
        dataset.collate([dataset[0]])
    batches = [[0], [1]]
    loader = make_loader(
        dataset,
        batches,
        schema.Data(workers=1),
        seed=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    problem = next(iter(loader))
    assert isinstance(problem, Unreadable)
    assert problem.message.startswith("data.builder: its targets must be")


@pytest.mark.parametrize("targets", [2, 2.0, np.int64(2), torch.tensor(2), torch.tensor([2])])
def test_whole_numbers_of_any_type_are_targets(targets):
    data = CustomData(
        train=[1.0], collate=lambda rows: {}, loss=torch.zeros, targets=lambda batch: targets
    )
    dataset = CustomDataset([1.0], data, "x")
    assert repr(dataset.collate([dataset[0]]).loss_tokens) == "2"


@pytest.mark.parametrize("batch", [(torch.ones(2),), torch.ones(2), None])
def test_a_batch_that_is_no_dict_is_refused(batch):
    data = CustomData(train=[1.0], collate=lambda rows: batch, loss=torch.zeros)
    dataset = CustomDataset([1.0], data, "x")
    with pytest.raises(RecipeError, match="its collate must return a dict"):
        dataset.collate([dataset[0]])


@pytest.mark.parametrize("value", [1.0, None])
def test_a_loss_that_is_no_tensor_is_refused(value):
    data = CustomData(train=[1.0], collate=dict, loss=lambda model, batch: value)
    micro_batch = MicroBatch({}, extra={"batch": {}, "weight": 1.0})
    with pytest.raises(RecipeError, match=f"a scalar tensor.*got {type(value).__name__}"):
        Custom(data).loss(torch.nn.Identity(), micro_batch)


@pytest.mark.parametrize(
    ("loss", "problem"),
    [
        (lambda model, batch: model(torch.ones(2)).sum().detach(), "its loss has no gradient"),
        (lambda model, batch: torch.tensor(1), "its loss has no gradient"),
        (lambda model, batch: model(torch.ones(2)).sum() * 1j, "a real number; got torch.complex"),
    ],
)
def test_a_loss_that_trains_nothing_is_refused(loss, problem):
    data = CustomData(train=[1.0], collate=dict, loss=loss)
    micro_batch = MicroBatch({}, extra={"batch": {}, "weight": 1.0})
    with pytest.raises(RecipeError, match=problem):
        Custom(data).loss(torch.nn.Linear(2, 2), micro_batch)


class Noise:
    """Each sample is its index, and a number from each of the global generators."""

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return index, random.random(), np.random.rand(), float(torch.rand(()))


def masked(samples):
    return {"samples": samples, "mask": [random.random(), np.random.rand(), float(torch.rand(()))]}


def build_noise():
    return CustomData(train=Noise(), validation=Noise(), collate=masked, loss=sum)


def open_noise(*, rank=0, ranks=1, seed=3, workers=0, size=4):
    group = RankLayout(rank=rank, size=ranks, group=None, device=torch.device("cpu"))
    recipe = schema.Recipe(
        run=schema.Run(name="noise", epochs=2, seed=seed),
        model=schema.Model(config={}),
        data=schema.Data(builder=f"{HERE}:build_noise", workers=workers),
        batch=schema.Batch(global_batch_size=size, micro_batch_size=2),
    )
    inputs = ModelTraits()
    return open_run_data(
        recipe.data,
        recipe.batch,
        recipe.run,
        objective=Custom(),
        model=inputs,
        ranks=group,
        build=True,
    ), group


def draws(position=None, *, steps=None, **options):
    """Returns the samples and the draws of collate of all ranks, in the order of the run."""
    found = []
    for rank in range(options.get("ranks", 1)):
        data, group = open_noise(rank=rank, **options)
        data = data.starting(position or Position())
        # The statistics of the ranks are not exchanged
        no = {"stop_requested": lambda: False, "save_requested": lambda: False}
        alone = RankLayout(rank=group.rank, size=1, group=None, device=group.device)
        for batch in itertools.islice(data.batches(ranks=alone, **no), steps):
            for number, one in enumerate(batch.micro_batches):
                content = one.extra["batch"]
                found.append((batch.step, number, rank, content["samples"], content["mask"]))
    found.sort(key=lambda one: one[:3])
    samples = [sample for *_, samples, _ in found for sample in samples]
    return samples, [mask for *_, mask in found]


def test_draws_are_a_function_of_seed_epoch_and_sample():
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    samples, masks = draws()
    assert torch.equal(torch.get_rng_state(), before[0]), "dropout uses the same generators"
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before[1:]
    assert sorted(index for index, *_ in samples) == sorted([*range(6)] * 2)
    for kind in range(1, 4):
        assert len({sample[kind] for sample in samples}) == 12, "each epoch has its own numbers"
        assert len({mask[kind - 1] for mask in masks}) == 6
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    assert draws() == (samples, masks)
    assert draws(workers=2) == (samples, masks)
    assert draws(ranks=2) == (samples, masks)
    resumed = Position(step=1, samples=4)
    assert draws(resumed) == (samples[4:], masks[2:])
    assert draws(resumed, size=2) == (samples[4:], masks[2:])
    other, _ = draws(seed=4)
    assert not {sample[1] for sample in samples} & {sample[1] for sample in other}


def test_evaluations_draw_the_same_numbers():
    found = []
    for seed in (3, 4):
        data, _ = open_noise(seed=seed, workers=1)
        (validation,) = data.validation.values()
        sampler = RankBatchSampler(
            order=SampleOrder(samples=6, seed=0, shuffle=False, epochs=1),
            global_batch_size=2,
            micro_batch_size=2,
            steps=3,
        )
        options = {"persistent_workers": True, "device": torch.device("cpu")}
        loader = make_loader(validation, sampler, data.data, seed=0, **options)
        found += [[one.micro_batch.extra["batch"] for one in loader] for _ in range(2)]
    assert found[0] == found[1] == found[2] == found[3]
    assert len({sample[1] for one in found[0] for sample in one["samples"]}) == 6


class Unsendable:
    def __reduce__(self):
        raise OSError(28, "No space left on device")


def test_a_batch_that_a_loader_process_cannot_pass_on_is_reported():
    """With 64 MB of /dev/shm, Python dropped it, and the run waited for ever."""
    data = CustomData(train=[1.0], collate=lambda rows: {"x": Unsendable()}, loss=torch.zeros)
    loader = make_loader(
        CustomDataset([1.0, 2.0], data, "x"),
        [[0], [1]],
        schema.Data(workers=1),
        seed=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    for batch in loader:
        start = (
            "data.workers: a loader process could not pass on a micro-batch: [Errno 28] No space"
        )
        assert isinstance(batch, Unreadable)
        assert batch.message.startswith(start)
        assert "--shm-size" in batch.message


def test_micro_batches_that_do_not_fit_into_shared_memory_are_refused(monkeypatch):
    data = CustomData(
        train=[1.0], collate=lambda rows: {"x": [torch.zeros(len(rows), 2**18)]}, loss=torch.zeros
    )
    dataset, batches = CustomDataset([1.0] * 4, data, "x"), [[0, 1], [2, 3]]
    section = schema.Data(workers=2, prefetch_factor=3)
    for free, fits in ((24 * 2**20, True), (11 * 2**20, False)):
        monkeypatch.setattr(host_memory, "shared_memory", lambda free=free: (free, 64 * 2**20))
        with nullcontext() if fits else pytest.raises(RecipeError) as raised:
            check_shared_memory(dataset, batches, section, ranks=1)
    assert raised.value.problems[0].startswith(
        "data.workers: 2 loader processes of each of 1 ranks, with 3 micro-batches of 2.0 MiB each, "
        "hold 12.0 MiB in shared memory. /dev/shm has 11.0 MiB of 64.0 MiB free: "
    )
