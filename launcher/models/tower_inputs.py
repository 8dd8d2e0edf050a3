"""What an image tower takes of a micro-batch, made on the host with the micro-batch.

transformers computes these indices in the tower, from the sizes of images on the device: the host
waits for the device several times in each layer. A tower takes them as arguments instead (`image_*`
of `accepts_precomputed_kwargs`, transformers 5.17 and newer), and computes none of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Arrays = Mapping[str, npt.NDArray[Any]]
BOUNDS = ("image_cu_seqlens", "image_cu_window_seqlens")
"""The bounds of what attention keeps apart in a row of patches: images, and their windows."""


@dataclass(frozen=True)
class PatchGrid:
    """A tower of the Qwen-VL families: each image is a grid of patches."""

    merge: int
    """Patches that become a token, in each direction."""
    patch: int
    """Pixels of a patch, in each direction."""
    values: int
    """Numbers of a patch: its pixels in three colours, twice (time)."""
    window: int | None = None
    """Pixels of a window of attention, in each direction (Qwen2.5-VL)."""
    table: int | None = None
    """Rows of the square table of position embeddings (Qwen3-VL)."""

    def largest(self, tokens: int, max_pixels: int | None) -> tuple[int, int]:
        """The rows and columns of tokens of the largest image with at most so many tokens and
        pixels, about a square; zeros: there is none."""
        if max_pixels is not None:
            tokens = min(tokens, max_pixels // (self.merge * self.patch) ** 2)
        rows = math.isqrt(max(0, tokens))
        return rows, tokens // rows if rows else 0

    def indices(self, grid: torch.Tensor) -> dict[str, Any]:
        """The indices of images. grid: (images, 3), times, rows and columns of patches, on the
        host."""
        from transformers import vision_utils

        bounds = vision_utils.get_vision_cu_seqlens(grid)
        made: dict[str, Any] = {
            "image_position_ids": vision_utils.get_vision_position_ids(grid, self.merge),
            "image_cu_seqlens": bounds,
            "image_max_seqlen": int(bounds.diff().max()),
        }
        if self.window is not None:
            index, bounds = vision_utils.get_vision_window_index(
                grid,
                spatial_merge_size=self.merge,
                window_size=self.window,
                patch_size=self.patch,
            )
            made["image_window_index"], made["image_cu_window_seqlens"] = index, bounds
            made["image_max_window_seqlen"] = int(bounds.diff().max())
        if self.table is not None:
            both = vision_utils.get_vision_interpolation_indices_and_weights(
                grid,
                num_grid_per_side=self.table,
                mode="bilinear",
                align_corners=True,
                spatial_merge_size=self.merge,
            )
            made["image_interp_indices"], made["image_interp_weights"] = both
        return made


@dataclass(frozen=True)
class TowerOperations:
    """Floating-point operations of a tower's forward pass."""

    patch: float = 0.0
    """Of matrix products, for each patch."""
    token: float = 0.0
    """The same of the projector, for each token."""
    image: float = 0.0
    """Of attention, for each squared number of patches of an image."""
    window: float = 0.0
    """The same for windows."""
    passes: int = 1
    """Forward passes that take as many operations as the forward and the backward pass: 3, or 1 of a
    frozen tower."""


@dataclass(frozen=True)
class TowerInputs:
    """How the images of a micro-batch become the arguments of `ImageTower`."""

    image_token: int
    """The token whose embeddings are replaced by features."""
    takes: frozenset[str]
    """The arrays of the processor that the tower takes."""
    grid: PatchGrid | None = None
    """Of a tower that takes images as patches; None: all images have one size."""
    size: int = 0
    """Pixels of an image in each direction, if all have one size."""
    tokens: int = 0
    """Tokens of such an image."""
    image_patches: int = 0
    """Patches of such an image."""
    operations: TowerOperations = TowerOperations()

    def make(
        self,
        arrays: Arrays,
        ids: torch.Tensor,
        pixel_table: npt.NDArray[np.float32] | None = None,
    ) -> dict[str, Any]:
        """`tower`, the arguments of the model's `get_image_features`, and `image_positions`, those
        of the image tokens in the flattened rows. ids: (rows, tokens). pixel_table: for pixels in
        uint8; it is among the arguments then, for `normalized`."""
        taken = {name: array for name, array in arrays.items() if name in self.takes}
        sizes = taken.pop("image_grid_thw", None)
        made: dict[str, Any] = {name: torch.from_numpy(array) for name, array in taken.items()}
        if self.grid is not None:
            assert sizes is not None
            # Not a tensor: it stays on the host, where the sizes of features are read from it
            made["image_grid_thw"] = np.asarray(sizes)
            made |= self.grid.indices(torch.from_numpy(np.asarray(sizes)))
        if pixel_table is not None:
            made["pixel_table"] = torch.from_numpy(pixel_table)
        positions = (ids.flatten() == self.image_token).nonzero()[:, 0]
        return {"tower": made, "image_positions": positions}

    def patches(self, tower: Mapping[str, Any]) -> int:
        """The patches of all images. tower: of `make`."""
        rows = len(tower["pixel_values"])
        return rows if self.grid is not None else rows * self.image_patches

    def forward_operations(self, tower: Mapping[str, Any], tokens: int) -> tuple[float, float]:
        """Operations of matrix products, and of attention. tower: of `make`. tokens: of all
        images."""
        own, patches = self.operations, self.patches(tower)
        squares = float(patches * self.image_patches)
        windows = 0.0
        if self.grid is not None:
            whole, parts = (tower.get(name) for name in BOUNDS)
            assert whole is not None
            squares = _squares(whole)
            windows = 0.0 if parts is None else _squares(parts)
        products = own.patch * patches + own.token * tokens
        return products, own.image * squares + own.window * windows

    def without_content(
        self, tokens: int, max_pixels: int | None = None
    ) -> tuple[int, tuple[int, int], dict[str, npt.NDArray[Any]]] | None:
        """The largest image with at most so many tokens and pixels, for a plan: its tokens, their
        rows and columns (zeros without a grid), and its arrays, which take no memory before they
        are used. None: there is none."""
        if self.grid is None:
            pixels = np.zeros((1, 3, self.size, self.size), dtype=np.float32)
            return (
                (self.tokens, (0, 0), {"pixel_values": pixels}) if tokens >= self.tokens else None
            )
        rows, columns = self.grid.largest(tokens, max_pixels)
        sizes = np.array([[1, rows * self.grid.merge, columns * self.grid.merge]])
        pixels = np.zeros((int(sizes.prod()), self.grid.values), dtype=np.uint8)
        arrays = {"pixel_values": pixels, "image_grid_thw": sizes}
        return (rows * columns, (rows, columns), arrays) if rows else None


def normalized(tower: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `get_image_features`, of those of `TowerInputs.make`: pixels in uint8 are
    looked up in the table of their colour, which gives the values of the processor exactly."""
    made = dict(tower)
    if (table := made.pop("pixel_table", None)) is not None:
        pixels = made["pixel_values"]
        colours = pixels.view(len(pixels), 3, -1).int()
        places = colours + torch.arange(0, 3 * 256, 256, device=pixels.device).int()[:, None]
        looked_up = table.flatten().index_select(0, places.flatten())
        made["pixel_values"] = looked_up.view(pixels.shape)
    return made


def _squares(bounds: torch.Tensor) -> float:
    """The sum of the squared lengths between these bounds."""
    return float(bounds.diff().double().square().sum())
