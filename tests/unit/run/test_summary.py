"""Lines of the start of a run."""

from types import SimpleNamespace

import pytest
import torch

from launcher.data.batching import Position
from launcher.distributed.rank_layout import RankLayout
from launcher.recipe.schema import Batch, Checkpoint, Data, Evaluation, Run, Schedule
from launcher.run import summary


def batch_lines(*, steps=10, passes=(), schedule=None, packing=True, max_steps=None, **sizes):
    data = SimpleNamespace(
        sampler=SimpleNamespace(micro_batches=lambda step: 4),
        steps=steps,
        start=Position(),
        order=SimpleNamespace(epochs_seen=lambda samples: list(passes), samples=0),
        validation=None,
    )
    recipe = SimpleNamespace(
        batch=Batch(global_batch_size=16, micro_batch_size=2),
        checkpoint=Checkpoint(),
        data=Data(packing=packing),
        evaluation=Evaluation(),
        lora=None,
        model=None,
        objective=None,
        run=Run(name="run", max_steps=max_steps),
        schedule=schedule or Schedule(),
    )
    ranks = RankLayout(rank=0, size=8, group=None, device=torch.device("cpu"), **sizes)
    return list(summary._batch(SimpleNamespace(recipe=recipe, data=data, ranks=ranks)))


@pytest.mark.parametrize(
    ("sizes", "ranks"),
    [
        ({}, "8 ranks"),
        ({"expert_parallel_size": 2}, "8 ranks"),
        ({"context_parallel_size": 8}, "1 group of 8 context parallel ranks"),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 2},
            "2 groups of 2 context parallel x 2 tensor parallel ranks",
        ),
    ],
)
def test_the_batch_names_context_and_tensor_parallel_ranks(sizes, ranks):
    expected = f"batch: 16 sequences = 2 per micro-batch x 4 accumulation steps x {ranks}; 10 steps"
    assert batch_lines(**sizes)[0] == expected


@pytest.mark.parametrize(
    ("steps", "passes", "text"),
    [(1, [1.0], "1 step is 1 pass"), (20, [4.0], "20 steps are 4 passes"), (2, [], "2 steps")],
)
def test_steps_and_passes(steps, passes, text):
    end = " over the data" if passes else ""
    assert batch_lines(steps=steps, passes=passes)[0].endswith(f"; {text}{end}")


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("max_steps", "longer"), [(None, "run.epochs"), (1, "run.max_steps")])
def test_a_warm_up_that_is_longer_than_the_run_is_named_with_what_to_do(packing, max_steps, longer):
    """Such as that of a config for a large data set, on a few packed rows."""
    (note,) = [
        line
        for line in batch_lines(
            steps=1, schedule=Schedule(warmup_steps=10), packing=packing, max_steps=max_steps
        )
        if line.startswith("note")
    ]
    assert "the warm-up of 10 steps does not end within the run's 1, so the learning rate" in note
    assert longer in note
    assert ("data.packing=false" in note) == packing
    assert batch_lines(steps=11, schedule=Schedule(warmup_steps=10))[-1].startswith("plan")
