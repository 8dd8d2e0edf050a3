"""Lines of the start of a run."""

from types import SimpleNamespace

import pytest
import torch

from launcher.data.batching import Position
from launcher.distributed.rank_layout import RankLayout
from launcher.recipe.schema import Batch, Checkpoint, Evaluation, Schedule
from launcher.run import summary


def batch_line(**sizes):
    data = SimpleNamespace(
        sampler=SimpleNamespace(micro_batches=lambda step: 4),
        steps=10,
        start=Position(),
        order=SimpleNamespace(passes=lambda samples: [], samples=0),
        validation=None,
    )
    recipe = SimpleNamespace(
        batch=Batch(global_batch_size=16, micro_batch_size=2),
        checkpoint=Checkpoint(),
        evaluation=Evaluation(),
        schedule=Schedule(),
    )
    ranks = RankLayout(rank=0, size=8, group=None, device=torch.device("cpu"), **sizes)
    return next(summary._batch(SimpleNamespace(recipe=recipe, data=data, ranks=ranks)))


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
    assert batch_line(**sizes) == expected
