"""Which rank writes which parts of each tensor, and the index that says so."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as some
from torch.distributed.tensor import DTensor, Replicate, Shard

from launcher.checkpoint import files
from launcher.checkpoint.layout import Holders, as_bytes, index_of, plan, written_boxes
from launcher.checkpoint.reader import open_tensors
from launcher.distributed.rank_layout import RankLayout
from launcher.libraries.private import fake_store
from launcher.models.shards import local_part

SIZE = 8
SHAPES = {
    "model.few_rows": (5, 4),
    "model.weight": (24, 6),
    "model.uneven": (19, 6),
    "model.norm": (24,),
    "model.experts": (8, 3, 2),
    "buffer.scalar": (),
    "optimizer.weight.exp_avg": (24, 6),
}
COPIES, ROWS, COLUMNS = Replicate(), Shard(0), Shard(1)
FSDP = {name: ("shard_mesh", [ROWS]) for name, shape in SHAPES.items() if shape}
HYBRID = {name: ("shard_mesh", [COPIES, ROWS]) for name in FSDP}
BY_TENSOR = {
    "model.weight": ("tensor_parallel_mesh", [ROWS, ROWS]),
    "model.uneven": ("tensor_parallel_mesh", [ROWS, COLUMNS]),
    "optimizer.weight.exp_avg": ("tensor_parallel_mesh", [ROWS, ROWS]),
}
LAYOUTS: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "ddp": ({}, {}),
    "sharded optimizer": ({}, {"optimizer.weight.exp_avg": ("shard_mesh", [ROWS])}),
    "fsdp": ({}, FSDP),
    "hybrid": ({"replicate": 2}, HYBRID),
    "tensor": ({"tensor_parallel_size": 2}, FSDP | BY_TENSOR),
    "tensor, 2 copies": (
        {"tensor_parallel_size": 2, "replicate": 2},
        HYBRID | {name: (mesh, [COPIES, *placed]) for name, (mesh, placed) in BY_TENSOR.items()},
    ),
    "experts": (
        {"expert_parallel_size": 4},
        FSDP | {"model.experts": ("expert_parallel_mesh", [ROWS, ROWS])},
    ),
    "stages": ({"pipeline_parallel_size": 2}, FSDP),
    "stages, tensor": (
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2},
        FSDP | BY_TENSOR,
    ),
}
"""Sizes of the ranks, and the mesh and the placements of each tensor that is divided."""
FIRST_STAGE = {"model.few_rows", "model.weight", "optimizer.weight.exp_avg", "buffer.scalar"}
LAST_STAGE = SHAPES.keys() - FIRST_STAGE | {"model.few_rows"}


def whole(name):
    """Each number once, so that the values say where they belong."""
    return torch.arange(math.prod(SHAPES[name]), dtype=torch.float32).view(SHAPES[name])


def divided(tensor, mesh, placements):
    part = tensor
    names = mesh.mesh_dim_names[-len(placements) :]
    mesh = mesh if len(names) == mesh.ndim else mesh[names]
    for index in reversed(range(mesh.ndim)):
        if isinstance(placement := placements[index], Shard):
            pieces = part.chunk(mesh.size(index), placement.dim)
            pieces += (part.narrow(placement.dim, 0, 0),) * (mesh.size(index) - len(pieces))
            part = pieces[mesh.get_local_rank(index)]
    return DTensor.from_local(
        part.clone(), mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def tensors_of(layout, rank):
    """The tensors of a rank, and which ranks hold them. Needs its process group."""
    sizes, meshes = LAYOUTS[layout]
    ranks = RankLayout(
        rank=rank, size=SIZE, group=dist.group.WORLD, device=torch.device("cpu"), **sizes
    )
    stage, names, elsewhere = ranks.stage, set(SHAPES), set()
    if stage is not ranks:
        names = LAST_STAGE if rank >= stage.size else FIRST_STAGE
        elsewhere = FIRST_STAGE & LAST_STAGE if rank >= stage.size else set()
    tensors = {}
    for name in SHAPES:
        if name in names:
            mesh, placements = meshes.get(name, (None, None))
            made = whole(name)
            tensors[name] = divided(made, getattr(stage, mesh), placements) if mesh else made
    begin = rank - stage.rank
    every = {name: whole(name).to("meta") for name in SHAPES}
    return tensors, Holders(range(begin, begin + stage.size), every, elsewhere)


def of_each_rank(layout):
    """Yields each rank, its tensors and which ranks hold them, in a process group of this rank."""
    for rank in range(SIZE):
        dist.init_process_group("fake", store=fake_store(), rank=rank, world_size=SIZE)
        try:
            yield rank, *tensors_of(layout, rank)
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_number_is_written_once_and_read_in_every_layout(tmp_path, layout):
    written = []
    for rank, tensors, held in of_each_rank(layout):
        planned = plan(tensors, {"rng": torch.ones(3)}, dist.group.WORLD, held)
        values = tensors | {"local.rng": torch.ones(3)}
        content = bytearray(planned.header.ljust(planned.size, b"\0"))
        for name, start in planned.starts.items():
            data = as_bytes(values[name]).numpy().tobytes()
            content[start : start + len(data)] = data
        (tmp_path / files.rank_file(rank)).write_bytes(content)
        written.append(planned.written)
    (tmp_path / files.INDEX).write_bytes(index_of(held.every, written))
    stored = open_tensors(tmp_path)
    for name, shape in SHAPES.items():
        assert torch.equal(stored.read(name), whole(name)), name
        widths = [(part, len(part.columns_of((*shape, 1, 1)[1]))) for part in stored._parts[name]]
        area = sum(part.rows * width for part, width in widths)
        assert area == math.prod((*shape, 1, 1)[:2]), f"{name} is written twice"
    for target in LAYOUTS:
        for _, tensors, _ in of_each_rank(target):
            own = open_tensors(tmp_path, tensors)
            assert own._parts.keys() == tensors.keys()
            for name, tensor in tensors.items():
                expected = local_part(tensor).clone()
                local_part(tensor).fill_(-1)
                own.copy_rows(name, tensor)
                assert torch.equal(local_part(tensor), expected), (target, name)


BOX = some.one_of(
    some.just(()),
    some.tuples(some.integers(0, 9), some.integers(1, 9)),
    some.tuples(*[some.integers(0, 9), some.integers(1, 9)] * 2),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ranks=some.lists(some.lists(BOX, min_size=4, max_size=4), min_size=1, max_size=6))
def test_any_parts_are_in_the_index(tmp_path_factory, ranks):
    """The parts need not follow from a division."""
    names, folder = ["c", "a", "d", "b"], tmp_path_factory.mktemp("index")
    every = {name: torch.empty(20, 20, device="meta") for name in names}
    boxes = [dict(zip(names, each, strict=True)) for each in ranks]
    written = [written_boxes(each, names) for each in boxes]
    (folder / files.INDEX).write_bytes(index_of(every, written))
    stored = open_tensors(folder)
    assert [*stored.tensors] == sorted(names)
    for name in names:
        found = [
            (part.file.name, part.first, part.rows)
            + (() if part.columns is None else (part.first_column, part.columns))
            for part in stored._parts[name]
        ]
        assert found == [
            (files.rank_file(rank), *each[name]) for rank, each in enumerate(boxes) if each[name]
        ]


def test_ranks_with_other_tensors_are_refused():
    every = {"a": torch.empty(2, device="meta")}
    with pytest.raises(ValueError, match="zip"):
        index_of(every, [written_boxes({"a": (0, 1)}, ["a"]), written_boxes({}, ["a", "b"])])


def test_the_index_of_a_thousand_ranks_is_small():
    names = [f"model.layers.{number}.weight" for number in range(1000)]
    every = {name: torch.empty(8192, 8, device="meta") for name in names}
    written = [written_boxes(dict.fromkeys(names, (8 * rank, 8)), names) for rank in range(1024)]
    assert len(index_of(every, written)) < 200_000
