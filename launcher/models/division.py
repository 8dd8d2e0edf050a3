"""The ways in which ranks divide a model among them: `divisions_of` lists those of a layout, in order.

Each checks the whole model first, and then leaves this rank's part in it. What it tells the strategy
about the result is `Divided`. A strategy does not know which divisions there were.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from launcher.distributed.rank_layout import RankLayout
from launcher.distributed.units import PartialGradients, Unit
from launcher.errors import RecipeError
from launcher.models.context_parallel import check_rows, divide_rows
from launcher.models.description import describe
from launcher.models.experts import check_experts, divide_experts
from launcher.models.pipeline import (
    Chain,
    Links,
    StagedModel,
    chain_of,
    check_first_stage,
    check_stages,
    stages_of,
)
from launcher.models.record import record_of
from launcher.models.row_division import RowDivision
from launcher.models.tensor_parallel import PlannedMesh, check_layers, divide_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class Divided:
    """What divisions leave of a model on this rank."""

    blocks: dict[str, nn.Module]
    """The blocks that this rank has, by name."""
    units: list[Unit] = field(default_factory=list)
    """Modules that divisions made units of FSDP."""
    partial: list[PartialGradients] = field(default_factory=list)
    stages: StagedModel | None = None
    """This rank's stages of a pipeline."""

    def present(self, model: nn.Module, named: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """These modules without those that other ranks have."""
        present = {*model.modules()}
        return {name: module for name, module in named.items() if module in present}

    def without_missing(self, model: nn.Module, units: Collection[Unit]) -> list[Unit]:
        """The units of divisions and these, without modules that other ranks have."""
        present = {*model.modules()}
        found = list[Unit]()
        for unit in (*self.units, *units):
            modules = tuple(module for module in unit.modules if module in present)
            if modules:
                found.append(replace(unit, modules=modules))
        return found


class Division(ABC):
    """A way to divide a model on the meta device."""

    whole_layers = False
    """Whether each rank still computes with whole layers and all blocks."""

    @abstractmethod
    def check(self, model: PreTrainedModel) -> None:
        """Raises RecipeError if the model cannot be divided so. No division has changed it yet."""

    @abstractmethod
    def divide(self, model: PreTrainedModel, divided: Divided) -> None:
        """Leaves this rank's part in the model, and says in `divided` what it has done."""


@dataclass
class Rows(Division):
    """Context parallelism: each rank computes a part of each row."""

    rows: RowDivision
    sequence_length: int
    tensor_parallel_size: int
    """Each rank has the heads of one of so many parts of the layers."""
    missing_for_varlen: str | None
    missing_for_ring: str | None
    """The results of the functions of these names, for messages."""
    whole_layers = True

    def check(self, model: PreTrainedModel) -> None:
        check_rows(
            model,
            self.rows,
            sequence_length=self.sequence_length,
            tensor_parallel_size=self.tensor_parallel_size,
            missing_for_varlen=self.missing_for_varlen,
            missing_for_ring=self.missing_for_ring,
        )

    def divide(self, model: PreTrainedModel, divided: Divided) -> None:
        divide_rows(model, self.rows)


@dataclass
class Experts(Division):
    """Expert parallelism: each rank has some of the experts of each layer."""

    mesh: DeviceMesh
    same_experts: DeviceMesh
    """The ranks with the experts of this rank."""

    def check(self, model: PreTrainedModel) -> None:
        check_experts(model, self.mesh.size())

    def divide(self, model: PreTrainedModel, divided: Divided) -> None:
        found = divide_experts(model, self.mesh)
        divided.units += [Unit((module,), mesh=self.same_experts) for module in found]


@dataclass
class Layers(Division):
    """Tensor parallelism: each rank has a part of each layer."""

    mesh: DeviceMesh | PlannedMesh

    def check(self, model: PreTrainedModel) -> None:
        check_layers(model, self.mesh.size())

    def divide(self, model: PreTrainedModel, divided: Divided) -> None:
        summed = divide_layers(model, self.mesh)
        if isinstance(self.mesh, DeviceMesh):
            divided.partial.append(PartialGradients(self.mesh, tuple(summed)))


@dataclass
class Stages(Division):
    """Pipeline parallelism: each rank has some of the blocks."""

    ranks: RankLayout
    """With the ranks of all stages."""
    stages_of_rank: int
    dtype: torch.dtype
    """Of computation."""
    pipeline_blocks: Sequence[int] | None = None
    """The number of blocks of each stage; None: balanced by time."""
    _chain: Chain | None = None

    def check(self, model: PreTrainedModel) -> None:
        blocks, count = describe(model).blocks, self.ranks.pipeline_parallel_size
        self._chain = chain_of(model, blocks)
        check_stages(len(blocks), count * self.stages_of_rank, self.pipeline_blocks)

    def divide(self, model: PreTrainedModel, divided: Divided) -> None:
        assert self._chain is not None
        ranks, chain = self.ranks, self._chain
        stages = stages_of(
            chain.whole,
            chain,
            ranks.pipeline_parallel_size * self.stages_of_rank,
            self.pipeline_blocks,
        )
        check_first_stage(model, stages)
        groups = Links.count(ranks.pipeline_parallel_size, chunks=self.stages_of_rank)
        links = Links(ranks.pipeline_groups(groups))
        divided.stages = record_of(model).stages = StagedModel(
            model,
            divided.blocks,
            chain,
            stages,
            links=links,
            dtype=self.dtype,
            device=ranks.device,
        )


def divisions_of(
    ranks: RankLayout,
    rows: RowDivision,
    *,
    sequence_length: int,
    missing_for_varlen: str | None,
    missing_for_ring: str | None,
    stages_of_rank: int,
    pipeline_blocks: Sequence[int] | None,
    dtype: torch.dtype,
) -> list[Division]:
    """The divisions of a layout, in the order in which they are made. The arguments are fields of
    `Rows` and `Stages`. Every rank must call this: meshes are made."""
    stage, found = ranks.stage, list[Division]()
    # Before blocks are measured for activation checkpointing: they have the attention that they will
    # have
    if stage.context_parallel_size > 1:
        size = stage.tensor_parallel_size
        found.append(Rows(rows, sequence_length, size, missing_for_varlen, missing_for_ring))
    if stage.expert_parallel_size > 1:
        mesh = stage.expert_parallel_mesh["expert"]
        found.append(Experts(mesh, stage.same_experts_mesh))
    # Rows of the vocabulary and blocks of NF4 have parts then
    if stage.tensor_parallel_size > 1:
        found.append(Layers(stage.tensor_parallel_mesh["tensor"]))
    # Last: all others read the whole model
    if ranks is not stage:
        found.append(Stages(ranks, stages_of_rank, dtype, pipeline_blocks))
    return found


def check_all(divisions: Sequence[Division], model: PreTrainedModel) -> None:
    """Raises RecipeError with the reasons of all divisions that the model does not allow."""
    problems = list[str]()
    for division in divisions:
        try:
            division.check(model)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
