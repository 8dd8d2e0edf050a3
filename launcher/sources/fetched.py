"""Models in object stores: their files are copied to this machine once."""

from __future__ import annotations

import contextlib
import fcntl
import fnmatch
import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from launcher.console import bytes_as_text, task
from launcher.distributed.environment import cache_folder
from launcher.errors import RecipeError
from launcher.sources.location import Location, no_such
from launcher.sources.store_names import READ_ONLY, require_store, scheme_of

logger = logging.getLogger(__name__)


def in_object_store(name: str) -> bool:
    """Whether a name is that of a folder whose files can be listed: no web server, and not the hub."""
    return scheme_of(name) not in (None, *READ_ONLY)


def fetched_folder(name: str, *, key: str, patterns: Sequence[str]) -> Path:
    """A folder of this machine with the files of a folder in a store that match a pattern. Files that
    are there are not fetched again, unless the store has others by now.

    key: of the recipe, for messages. Raises RecipeError.
    """
    try:
        require_store(name)
        return _fetched(Location(name.rstrip("/")), key, patterns)
    except RecipeError as error:
        raise RecipeError(
            [f"{key}: {each.removeprefix(f'{key}: ')}" for each in error.problems]
        ) from None
    except OSError as error:
        raise RecipeError(f"{key}: {error.filename or name}: {error.strerror or error}") from None


def _fetched(source: Location, key: str, patterns: Sequence[str]) -> Path:
    listed = {"/".join(file.parts[len(source.parts) :]): file for file in source.files()}
    listed = {name: file for name, file in listed.items() if ".." not in name.split("/")}
    if "config.json" not in listed and "tokenizer_config.json" not in listed:
        raise RecipeError(no_such("folder with a config.json", source.name))
    states = json.dumps([file.state() for _, file in sorted(listed.items())])
    digest = hashlib.sha256(states.encode()).hexdigest()[:16]
    folder = cache_folder(None) / "models" / f"{source.last}-{digest}"
    wanted = {name for name in listed if any(fnmatch.fnmatch(name, each) for each in patterns)}
    if all((folder / name).is_file() for name in wanted):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(f"{folder.name}.lock")):
        missing = sorted(name for name in wanted if not (folder / name).is_file())
        size = sum(listed[name].size() for name in missing)
        if missing:
            logger.info(f"fetching {bytes_as_text(size)} from {source.name}")
        with task(f"fetching {source.last}", size) as advance:
            for name in missing:
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                listed[name].download(folder / name, advance=advance)
    return folder


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """One process of those that share the file system fetches, and the others wait."""
    with file.open("a") as stream:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
