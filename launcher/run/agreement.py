"""Whether all ranks train the same thing: recipe, versions, files.

Machines on which a user starts the ranks by hand, each with its own command, may differ. Replicas
of a model would then drift apart without an error, or the ranks would wait for each other for ever.
A reduction of a few bytes compares digests. If the digests differ, the ranks exchange what the
digests are made of.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from launcher import __version__
from launcher.data.run_data import RunData
from launcher.distributed.process_group import gather
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError
from launcher.models.build import is_pretrained
from launcher.recipe.decode import dotted
from launcher.recipe.load import argument_digests
from launcher.recipe.schema import Recipe
from launcher.sources.hub import model_folder

_OWN = (
    "run.name",
    "run.dir",
    "slurm",
    "logging.wandb",
    "logging.tensorboard",
    "logging.tracker",
    "data.cache",
    "data.workers",
    "data.prefetch_factor",
    "data.persistent_workers",
    "data.pin_memory",
    "data.processes",
)
"""Sections and keys that may differ: they are about one machine, or only rank 0 uses them."""
_BLOCKS, _BLOCK_BYTES = 16, 2**12
"""A sample of a file of weights: so many blocks, evenly spaced, of so many bytes."""
_SHOWN = 12
"""Most differences that a message lists."""
_LARGEST = 2**63 - 1
_SALT = "ranks"
"""Salt of the digests of arguments from the environment. It is the same on all ranks."""


def compare_recipes(
    recipe: Recipe, ranks: RankLayout, *, several_machines: bool, reads: bool
) -> None:
    """Compares the recipe of all ranks, and on several machines the versions. Every rank must call this.
    `reads`: see `compare_content`.

    If a text has slashes, only the part after the last slash is compared: machines may have the
    same file in different folders. Raises RecipeError on every rank, with the keys and ranks that
    differ.
    """
    found: dict[str, object] = dict(_flat(dataclasses.asdict(recipe)))
    if several_machines:
        for path, digest in argument_digests(recipe, _SALT).get("values", ()):
            found[f"{dotted(path)}, value"] = f"digest {digest}"
    _refuse_differences(found, ranks)
    if several_machines:
        _refuse_differences(_versions() if reads else None, ranks)


def compare_content(
    recipe: Recipe, data: RunData, ranks: RankLayout, *, several_machines: bool, reads: bool
) -> None:
    """Compares what the ranks have read: data, and on several machines weights and the user's code.
    Every rank must call this. `reads`: whether this rank reads files for the comparison, as one
    rank of each machine does. Raises RecipeError on every rank, with the files and ranks that
    differ."""
    found = dict(_of_data("data.train", data.fingerprint))
    for name, validation in data.validation.items():
        found |= dict(_of_data(f"data.validation, {name}", validation.fingerprint))
    _refuse_differences(found, ranks)
    if several_machines:
        _refuse_differences(dict(_of_files(recipe)) if reads else None, ranks)


def _flat(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The values of nested sections by dotted key, without the keys in `_OWN`."""
    if any(path == name or path.startswith(f"{name}.") for name in _OWN):
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else str(key))
    else:
        yield path, _last_parts(value)


def _last_parts(value: object) -> object:
    if isinstance(value, str):
        return value.rstrip("/").rpartition("/")[2]
    return [_last_parts(each) for each in value] if isinstance(value, list | tuple) else value


def _versions() -> dict[str, object]:
    """The versions of launcher, with a digest of its code, of torch and of transformers."""
    package, digest = Path(__file__).parents[1], hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return {
        "version of launcher": f"{__version__}, code {digest.hexdigest()[:12]}",
        "version of torch": torch.__version__,
        "version of transformers": importlib.metadata.version("transformers"),
    }


def _of_data(key: str, fingerprint: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """A fingerprint (`TokenStore.fingerprint`), in which the digest of the tokens, if there is one,
    takes the place of the files."""
    for name, value in fingerprint.items():
        if name == "parts":
            for part, inner in value.items():
                yield from _of_data(f"{key}, {part}", inner)
        elif name == "files" and "content" in fingerprint:
            continue
        elif name == "files":
            sizes = {os.path.basename(file): size for file, size in value.items()}
            yield f"{key}, files", sizes
        else:
            yield f"{key}, {name}", value


def _of_files(recipe: Recipe) -> Iterator[tuple[str, object]]:
    """Digests of the user's code and of samples of weights."""
    for key, function in (
        ("model.builder", recipe.model.builder),
        ("data.builder", recipe.data.builder),
    ):
        module = sys.modules.get((function or "").partition(":")[0])
        if (file := getattr(module, "__file__", None)) is not None:
            yield f"code of {key}", hashlib.sha256(Path(file).read_bytes()).hexdigest()[:12]
    if recipe.model.path is not None:
        weights = is_pretrained(recipe.model)
        folder = model_folder(recipe.model.path, key="model.path", weights=weights)
        yield from _of_weights("model.path", folder, weights=weights)
    if recipe.lora is not None and recipe.lora.path is not None:
        yield from _of_weights("lora.path", Path(recipe.lora.path))


def _of_weights(key: str, folder: Path, *, weights: bool = True) -> Iterator[tuple[str, object]]:
    for file in sorted(folder.glob("*config.json")):
        yield f"{key}, {file.name}", hashlib.sha256(file.read_bytes()).hexdigest()[:12]
    for file in sorted(folder.glob("*.safetensors")) if weights else ():
        size, digest = file.stat().st_size, hashlib.sha256()
        with file.open("rb") as stream:
            for block in range(_BLOCKS):
                stream.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                digest.update(stream.read(_BLOCK_BYTES))
        yield f"{key}, {file.name}", f"{size} bytes, sample {digest.hexdigest()[:12]}"


def _refuse_differences(found: Mapping[str, object] | None, ranks: RankLayout) -> None:
    """Raises RecipeError on every rank if these values differ; None: this rank has none."""
    if ranks.size == 1:
        return
    extremes = torch.full((2,), _LARGEST, dtype=torch.int64)
    if found is not None:
        text = json.dumps(found, sort_keys=True, default=str)
        own = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
        extremes = torch.tensor([own, -own])
    dist.all_reduce(extremes, dist.ReduceOp.MIN, group=ranks.group)
    smallest, largest = int(extremes[0]), -int(extremes[1])
    if smallest == largest:
        return
    everyone = gather((socket.gethostname(), found), ranks.group)
    having = {
        rank: (host, values) for rank, (host, values) in enumerate(everyone) if values is not None
    }
    raise RecipeError(_differences(having))


def _differences(having: Mapping[int, tuple[str, Mapping[str, object]]]) -> list[str]:
    """A line for each key that differs. `having`: host and values by rank."""
    keys = dict.fromkeys(key for _, values in having.values() for key in values)
    lines = []
    for key in keys:
        places: dict[str, list[str]] = {}
        for rank, (host, values) in having.items():
            shown = json.dumps(values[key], default=str) if key in values else "absent"
            places.setdefault(shown, []).append(f"{host} (rank {rank})")
        if len(places) > 1:
            each = (f"{shown} on {_some(names)}" for shown, names in places.items())
            lines.append(f"  {key}: {'; '.join(each)}")
    if more := len(lines[_SHOWN:]):
        lines = [*lines[:_SHOWN], f"  and {more} more"]
    return [
        "the ranks would not train the same model; these differ:",
        *lines,
        "start each machine with the same command, versions and files",
    ]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
