"""Micro-batches whose rows have attachments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from launcher.data.images import RowImages
from launcher.data.modality import Arrays, Modality
from launcher.data.packing import Integers
from launcher.data.videos import RowVideos
from launcher.models.micro_batch import MicroBatch
from launcher.models.record import record_of
from launcher.models.row_division import RowDivision
from launcher.models.tower_inputs import form_of
from launcher.models.towers import takes_attachments, token_types
from launcher.recipe import schema

if TYPE_CHECKING:
    from launcher.data.token_store import TokenStore

Sample = dict[str, npt.NDArray[Any]]
MODALITIES: tuple[type[Modality], ...] = (RowImages, RowVideos)
"""All kinds of attachments."""


@dataclass(frozen=True)
class Loaded:
    """An attachment of a sample."""

    kind: str
    arrays: Arrays
    first: int
    """Its first token in the sample."""
    end: int
    meta: Sequence[int]

    def moved(self, tokens: int) -> Loaded:
        """The same after so many tokens more."""
        return replace(self, first=self.first + tokens, end=self.end + tokens)


@dataclass(frozen=True)
class ModelAttachments:
    """How a model takes attachments."""

    modalities: tuple[Modality, ...] = ()
    """Each `Modality` that rows have; none: they are text."""
    grid: bool = False
    """Whether the tokens of an attachment have positions of time, height and width (M-RoPE)."""
    token_types: str | None = None
    """The name of the argument that says which tokens are attachments; None: it has none."""
    changed: bool = True
    """Whether `Towers` take them. Else transformers' own forward method does, which makes the
    positions itself, and takes no blank attachment."""

    @property
    def placeholder_token_ids(self) -> list[int]:
        """The tokens that stand for attachments. An answer has none of them."""
        return [token for modality in self.modalities for token in modality.token_ids]

    def of_model(self, model: nn.Module) -> ModelAttachments:
        """The same for a model with `Towers`."""
        if not self.modalities:
            return self
        towers = record_of(model).towers
        assert towers is not None
        made = (replace(one, tower=towers.kinds[one.kind].inputs) for one in self.modalities)
        return replace(
            self, modalities=tuple(made), grid=towers.grid, token_types=towers.token_types
        )

    def planned(self, model: nn.Module) -> ModelAttachments:
        """The same for a plan of the model; of families whose largest attachment is not known, rows
        are text. Raises RecipeError."""
        name = type(model).__name__
        known = (
            modality.planned(name) for modality in self.modalities if modality.tower is not None
        )
        return replace(self, modalities=tuple(known))

    def complete(
        self, sample: Sample, store: TokenStore, pieces: Iterable[tuple[int, int, int]]
    ) -> Sample:
        """The sample with `attachments`, those of its pieces of a `TokenStore`, and for models with
        positions of a grid `grid_positions`, (3, tokens). pieces: see `SequenceDataset.pieces`. Raises
        RowError if one cannot be read."""
        if not self.modalities:
            return sample
        of_kind = {modality.kind: modality for modality in self.modalities}
        found, before = list[Loaded](), 0
        for _, start, end in pieces:
            for one in store.attachments_between(start, end):
                arrays = of_kind[one.kind].load(one)
                place = before - start + one.first, before - start + one.end
                found.append(Loaded(one.kind, arrays, *place, one.meta))
            before += end - start
        return self._with(sample, found)

    def with_largest_attachments(self, sample: Sample) -> Sample:
        """A sample without data, with as many attachments as its tokens can be, each the largest one.
        It stands between two other tokens, at least. The tokens of text are other than those of
        attachments."""
        if not self.modalities:
            return sample
        modality = self.modalities[0]  # the plan of several kinds assumes those of the first
        tower = modality.tower
        assert tower is not None
        ids = sample["input_ids"].copy()
        ids[ids == tower.token] = 0
        found, end = list[Loaded](), 0
        while made := modality.largest(len(ids) - end - 2):
            tokens, meta, arrays = made
            place = end + 1, end + 1 + tokens
            ids[slice(*place)] = tower.token
            found.append(Loaded(modality.kind, arrays, *place, meta))
            end += tokens + 2
        return self._with({**sample, "input_ids": ids}, found)

    def _with(self, sample: Sample, found: list[Loaded]) -> Sample:
        made: dict[str, Any] = {**sample, "attachments": found}
        if self.grid:
            of_kind = {modality.kind: modality for modality in self.modalities}
            ids = sample["input_ids"]
            places = [
                (one.first, *of_kind[one.kind].grid(one.meta, ids[one.first : one.end]))
                for one in found
            ]
            made["grid_positions"] = grid_positions(sample["position_ids"], places)
        return made

    def attached(
        self, micro_batch: MicroBatch, rows: list[Sample], division: RowDivision
    ) -> tuple[MicroBatch, int]:
        """The micro-batch with the input `attachments`: by kind `count`, their number, and what
        `TowerInputs.make` makes of them; or with the arrays of the processor, by the names of the
        model's arguments. Without attachments these are those of a blank one: all ranks compute the
        same layers, in which they exchange weights and gradients. For transformers' own forward
        method there are only its arguments. Also the operations of the towers.

        With context parallelism these are the attachments of which this rank's part of the rows has
        tokens, and `chosen` says which of their features are those of its tokens."""
        if not self.modalities or not (self.changed or any(row.get("attachments") for row in rows)):
            return micro_batch, 0
        tensors = dict(micro_batch.inputs)
        ids = tensors["input_ids"]
        mine = division.slice_of(ids.shape[1] * division.size)
        if self.grid:
            tensors["position_ids"] = _with_grid(rows, mine, tensors.get("position_ids"))
        if self.token_types is not None:
            tensors[self.token_types] = torch.zeros_like(ids)
            for modality in self.modalities:
                is_token = torch.isin(ids, torch.tensor(modality.token_ids))
                tensors[self.token_types][is_token] = modality.token_type
        operations, of_kinds = 0, dict[str, dict[str, Any]]()
        for modality in self.modalities:
            given = dict[str, Any]()
            kind = modality.kind
            if division.size == 1:
                found = [one.arrays for row in rows for one in _of(row, kind)]
            else:
                found, given["chosen"] = _of_part(rows, modality, mine)
            given["count"] = len(found)
            of_kinds[kind] = given
            if modality.tower is None:
                continue
            arrays = modality.join(found or [modality.blank])
            own_ids = _without_other_kinds(ids, rows, kind, mine)
            given |= modality.tower.make(arrays, own_ids, modality.pixel_table)
            counted = modality.tower.forward_operations(given["tower"], len(given["positions"]))
            passes = modality.tower.operations.passes if found else 0
            operations += round(passes * sum(counted))
        tensors |= self._arguments(rows)
        if self.changed:
            tensors["attachments"] = of_kinds
        return replace(micro_batch, inputs=tensors), operations

    def _arguments(self, rows: list[Sample]) -> dict[str, torch.Tensor]:
        """What transformers' own forward method takes of attachments. Kinds whose arrays have the same
        names share one array, in the order of the rows."""
        given = list[tuple[Modality, Arrays]]()
        plain = {one.kind: one for one in self.modalities if one.tower is None}
        for row in rows:
            shown: Any = row.get("attachments", ())
            given += [(plain[one.kind], one.arrays) for one in shown if one.kind in plain]
        if self.changed:
            seen = {modality.kind for modality, _ in given}
            given += [(one, one.blank) for one in plain.values() if one.kind not in seen]
        groups = dict[frozenset[str], tuple[Modality, list[Arrays]]]()
        for modality, arrays in given:
            groups.setdefault(frozenset(arrays), (modality, []))[1].append(arrays)
        return {
            name: torch.from_numpy(array)
            for modality, each in groups.values()
            for name, array in modality.join(each).items()
        }


TEXT_ALONE = ModelAttachments()
Sections = Mapping[str, Any]
"""Those of a recipe about attachments (`Recipe.attachments`)."""
NO_SECTIONS: Sections = MappingProxyType({})


def _of(row: Sample, kind: str) -> Iterator[Loaded]:
    """The attachments of a kind in a sample."""
    found: Any = row.get("attachments", ())
    return (one for one in found if one.kind == kind)


def _without_other_kinds(
    ids: torch.Tensor, rows: list[Sample], kind: str, mine: slice
) -> torch.Tensor:
    """The ids with -1 in the places of attachments of other kinds, which may have the same tokens. ids:
    (rows, tokens), the part `mine` of the rows."""
    made = ids.clone()
    for number, row in enumerate(rows):
        shown: Any = row.get("attachments", ())
        for one in shown:
            if one.kind != kind:
                first = max(0, one.first - mine.start)
                end = max(0, one.end - mine.start)
                made[number, first:end] = -1
    return made


def _of_part(
    rows: list[Sample], modality: Modality, mine: slice
) -> tuple[list[Arrays], torch.Tensor]:
    """The attachments of which these tokens of the rows have some, and the places of these tokens
    among all that stand for the features of these attachments."""
    assert modality.tower is not None
    found, of_part = list[Arrays](), [np.zeros(0, dtype=bool)]
    for row in rows:
        for one in _of(row, modality.kind):
            if one.first < mine.stop and one.end > mine.start:
                is_token = row["input_ids"][one.first : one.end] == modality.tower.token
                at = one.first + np.flatnonzero(is_token)
                found.append(one.arrays)
                of_part.append((at >= mine.start) & (at < mine.stop))
    return found, torch.from_numpy(np.flatnonzero(np.concatenate(of_part)))


def grid_positions(
    positions: Integers, attachments: Iterable[tuple[int, Integers, int]]
) -> Integers:
    """Positions of time, height and width, (3, tokens) (M-RoPE: Wang et al., 2024).

    positions: (tokens,), 0 at the start of each document. attachments: the first token of each, the
    positions of its tokens, (3, tokens), and the one of the text after it, see `Modality.grid`.
    """
    made = np.broadcast_to(positions, (3, len(positions))).copy()
    starts = np.append(np.flatnonzero(positions == 0), len(positions))
    for first, own, following in attachments:
        end = first + own.shape[1]
        document = int(starts[np.searchsorted(starts, first, side="right")])
        made[:, first:end] = made[0, first] + own
        # The rest of the document has counted each token of the attachment
        made[:, end:document] -= own.shape[1] - following
    return made


def _with_grid(rows: list[Sample], mine: slice, text: torch.Tensor | None) -> torch.Tensor:
    """(3, rows, tokens), of these tokens of the rows; for packed rows (4, rows, tokens), where the
    first are the positions of text, from which masks are made."""
    grids = []
    for row in rows:
        own = row.get("grid_positions")
        own = np.zeros((3, 0), dtype=np.int64) if own is None else own
        # Padding is a document of its own
        missing = max(0, mine.stop - own.shape[1])
        rest = np.broadcast_to(np.arange(missing), (3, missing))
        grids.append(np.concatenate([own, rest], axis=1)[:, mine])
    grid = torch.from_numpy(np.stack(grids, axis=1))
    return grid if text is None else torch.cat([text[None], grid])


def attachments_of(
    sections: Sections, model: schema.Model, built: nn.Module | None = None
) -> ModelAttachments:
    """How the rows of a recipe have attachments. built: the changed model, which alone knows how it
    takes them."""
    made: list[Modality] = []
    for modality in MODALITIES:
        section = sections.get(modality.kind)
        if section is not None and model.path is not None:
            made.append(modality.of(section, model.path))
    attachments = ModelAttachments(tuple(made))
    return attachments if built is None else attachments.of_model(built)


def blank_arguments(
    sections: Sections, model: schema.Model, built: Any
) -> dict[str, dict[str, torch.Tensor]]:
    """By kind, the arguments of the built model for an attachment, if `use_towers` reads them; also in
    the plan of a model of which only the config is known."""
    return {
        modality.kind: {
            name: torch.from_numpy(array) for name, array in modality.join([modality.blank]).items()
        }
        for modality in attachments_of(sections, model).modalities
        if sections[modality.kind].train != "none" and form_of(built.config, modality.kind) is None
    }


def own_attachments(model: nn.Module, modalities: Iterable[Modality]) -> ModelAttachments:
    """What transformers' own forward method of a model takes of rows. modalities: how rows would have
    attachments. Raises RecipeError if a processor cannot be loaded."""
    taken = tuple(one for one in modalities if takes_attachments(model, one.kind))
    assert all(modality.token_ids for modality in taken)
    return ModelAttachments(taken, token_types=token_types(model), changed=False)
