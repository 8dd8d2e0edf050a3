"""The sizes of a layout, and the ranks of its groups and meshes."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from launcher.distributed.rank_layout import PIPELINE, TENSOR, LayoutSizes, RankLayout

CPU = torch.device("cpu")


@pytest.fixture
def layout_of():
    """A function that makes the layout of a rank in a fake process group."""

    def make(rank, size, **sizes):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
        return RankLayout(rank=rank, size=size, group=dist.group.WORLD, device=CPU, **sizes)

    yield make
    dist.destroy_process_group()


def members(mesh, *names):
    return {name: dist.get_process_group_ranks(mesh.get_group(name)) for name in names}


def test_ranks_are_numbered_by_data_context_and_tensor_rank():
    sizes = {"context_parallel_size": 2, "tensor_parallel_size": 4, "replicate": 3}
    layouts = [RankLayout(rank=n, size=24, group=None, device=CPU, **sizes) for n in range(24)]
    assert [
        (each.data_parallel_rank, each.context_parallel_rank, each.coordinate(TENSOR))
        for each in layouts
    ] == [*itertools.product(range(3), range(2), range(4))]
    assert [each.computing_group for each in layouts] == [n // 4 for n in range(24)]
    assert [each.random_stream for each in layouts] == [n // 4 for n in range(24)]
    assert [each.counts for each in layouts] == [n % 4 == 0 for n in range(24)]
    first = layouts[0]
    assert (first.data_parallel_size, first.computing_groups, first.shard_size) == (3, 6, 2)


def test_stages_are_the_outermost_groups_and_the_last_one_counts():
    sizes = {"pipeline_parallel_size": 2, "replicate": 2, "tensor_parallel_size": 2}
    layouts = [RankLayout(rank=n, size=16, group=None, device=CPU, **sizes) for n in range(16)]
    assert [each.coordinate(PIPELINE) for each in layouts] == [n // 8 for n in range(16)]
    assert [each.data_parallel_rank for each in layouts] == [n % 8 // 2 for n in range(16)]
    assert [each.computing_group for each in layouts] == [n % 8 // 2 for n in range(16)]
    assert [each.random_stream for each in layouts] == [n // 2 for n in range(16)]
    assert [n for n in range(16) if layouts[n].counts] == [8, 10, 12, 14]
    first = layouts[0]
    assert (first.data_parallel_size, first.computing_groups, first.shard_size) == (4, 4, 2)


def test_a_stage_is_a_layout_of_its_own(layout_of):
    stage = layout_of(13, 16, pipeline_parallel_size=2, replicate=2, tensor_parallel_size=2).stage
    assert (stage.size, stage.rank, stage.pipeline_parallel_size) == (8, 5, 1)
    assert dist.get_process_group_ranks(stage.group) == [*range(8, 16)]
    assert members(stage.tensor_parallel_mesh, "replicate", "shard", "tensor") == {
        "replicate": [9, 13],
        "shard": [13, 15],
        "tensor": [12, 13],
    }
    assert stage.whole is not None
    first, second = stage.whole.pipeline_groups(2)
    assert [dist.get_process_group_ranks(group) for group in (first, second)] == [[5, 13]] * 2
    assert first is not second
    assert stage.stage is stage


def test_groups_of_a_pipeline_are_different_also_if_a_stage_is_one_rank(layout_of):
    """Messages of one kind must not be taken for those of another."""
    layout = layout_of(1, 2, pipeline_parallel_size=2)
    groups = layout.pipeline_groups(4)
    assert len({group.group_name for group in groups}) == 4
    assert [dist.get_process_group_ranks(group) for group in groups] == [[0, 1]] * 4
    assert layout.stage.size == 1


def test_tensor_parallel_ranks_shard_and_replicate_with_ranks_of_the_same_part(layout_of):
    layout = layout_of(5, 16, replicate=2, tensor_parallel_size=2, context_parallel_size=2)
    assert members(layout.tensor_parallel_mesh, "replicate", "shard", "tensor") == {
        "replicate": [5, 13],
        "shard": [1, 3, 5, 7],
        "tensor": [4, 5],
    }
    assert layout.shard_mesh.mesh_dim_names == ("replicate", "shard")
    assert members(layout.shard_mesh, "shard") == {"shard": [1, 3, 5, 7]}
    assert layout.shard_mesh.size(1) == layout.shard_size
    assert dist.get_process_group_ranks(layout.context_parallel_group) == [5, 7]
    assert layout.tensor_parallel_mesh is layout.tensor_parallel_mesh


def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones(layout_of):
    layout = layout_of(5, 8, expert_parallel_size=2)
    assert members(layout.expert_parallel_mesh, "expert") == {"expert": [4, 5]}
    assert layout.same_experts_mesh.mesh_dim_names == ("shard",)
    assert members(layout.same_experts_mesh, "shard") == {"shard": [1, 3, 5, 7]}
    assert members(layout.shard_mesh, "shard") == {"shard": [*range(8)]}


def test_context_parallel_ranks_are_all_ranks_or_neighbours(layout_of):
    layout = layout_of(2, 4, context_parallel_size=4)
    assert layout.context_parallel_group is layout.group
    assert layout.context_groups(1) == (layout.group, None)


def test_ranks_that_divide_heads_are_neighbours_and_a_ring_is_outside(layout_of):
    layout = layout_of(13, 32, context_parallel_size=8, tensor_parallel_size=2)
    heads, ring = layout.context_groups(2)
    assert dist.get_process_group_ranks(layout.context_parallel_group) == [*range(1, 16, 2)]
    assert dist.get_process_group_ranks(heads) == [9, 11, 13, 15]
    assert dist.get_process_group_ranks(ring) == [5, 13]
    assert layout.context_groups(2)[1] is ring
    assert layout.context_groups(8)[0] is None
    assert dist.get_process_group_ranks(layout.context_groups(8)[1]) == [*range(1, 16, 2)]


@pytest.mark.parametrize(
    ("sizes", "key"),
    [
        ({"replicate": 3}, "replicate"),
        ({"context_parallel_size": 3}, "context_parallel_size"),
        ({"replicate": 2, "expert_parallel_size": 8}, "expert_parallel_size"),
        ({"context_parallel_size": 4, "tensor_parallel_size": 4}, "tensor_parallel_size"),
        ({"pipeline_parallel_size": 3}, "pipeline_parallel_size"),
        ({"pipeline_parallel_size": 4, "tensor_parallel_size": 4}, "tensor_parallel_size"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_have_one_problem(sizes, key):
    assert [name for name, _ in LayoutSizes(size=8, **sizes).problems()] == [key]


def test_sizes_that_allow_replicas():
    expert = LayoutSizes(size=8, expert_parallel_size=2)
    assert expert.allows_replicas(4)
    assert not expert.allows_replicas(8)
