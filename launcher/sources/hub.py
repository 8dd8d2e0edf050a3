"""Models and data sets of the Hugging Face hub: from its cache if they are there, else fetched."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from launcher.console import advanced
from launcher.errors import RecipeError, first_line
from launcher.libraries.extras import require_extra
from launcher.sources.fetched import fetched_folder, in_object_store
from launcher.sources.formats import COMPRESSED, FORMS
from launcher.sources.location import Location, no_such
from launcher.sources.store_names import WEB, scheme_of

logger = logging.getLogger(__name__)

_FILE_ENDINGS = (
    *FORMS,
    *COMPRESSED,
    ".txt",
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".jinja",
)
_WITHOUT_OWNER = (
    "albert|bert|camembert|ctrl|distilbert|distilgpt2|distilroberta|gpt2|openai-gpt|roberta|t5|"
    "transfo-xl|xlm|xlnet"
)
_SPLIT = r"[\w.-]+(\[-?\d*%?:-?\d*%?\])?"
"""Such as `train[:1000]` or `train[90%:]`."""
_REVISION = r"(@[\w.-]+(/[\w.-]+)*)?"
"""Such as `@v1.0`, `@refs/pr/1`, or the hash of a commit."""
_TOKENIZER_FILES = ["*.json", "*.model", "*.txt", "*.jinja", "*.py", "*.tiktoken"]
CHAT_TEMPLATE = "chat_template.json"
"""The file in which older processors keep their chat template."""
NAMED_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's named chat templates."""
_MODEL_FILES = [*_TOKENIZER_FILES, "*.safetensors"]
"""Without files that hold the same weights in another format."""


def work_offline() -> None:
    """Lets this process and its children make no requests to the hub, unless the user has set
    HF_HUB_OFFLINE: what they need is in the cache."""
    if os.environ.get("HF_HUB_OFFLINE"):
        return
    os.environ["HF_HUB_OFFLINE"] = "1"
    # The library reads the variable when it is imported, which a recipe with a hub id may have done
    if (library := sys.modules.get("huggingface_hub")) is not None:
        library.constants.HF_HUB_OFFLINE = True


def _not_fetched(what: str, error: Exception) -> RecipeError:
    from huggingface_hub.errors import RepositoryNotFoundError  # also of gated repositories

    if isinstance(error, RepositoryNotFoundError) or type(error).__name__ == "DatasetNotFoundError":
        fix = (
            "check the name, which no file or folder here has; if it is gated or private, request access on its page, then run "
            "`hf auth login` or set HF_TOKEN"
        )
    else:
        fix = (
            "without network, run `launcher prepare recipe=...` on a machine that has one and "
            "shares the cache (HF_HOME)"
        )
    return RecipeError(f"{what} and could not be fetched: {first_line(error)}; {fix}")


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a hub id, and neither it nor its first folder exists here."""
    if name.endswith(_FILE_ENDINGS) or os.path.exists(name):
        return False
    split = rf"(:{_SPLIT}(\+{_SPLIT})*)?"
    form = re.fullmatch(rf"(\w[\w.-]*)/\w[\w.-]*(/[\w.-]+)?{_REVISION}{split}", name)
    return form is not None and not os.path.isdir(form[1])


def is_model_id(name: str) -> bool:
    """Whether this is `owner/name` or `owner/name@revision`, without the config and split that a
    data set may have; or one of the hub's first models, which have no owner. The hub accepts no
    more of these."""
    first = rf"({_WITHOUT_OWNER})([-_][\w.-]+)?{_REVISION}"
    if not os.path.exists(name) and re.fullmatch(first, name):
        return True
    return is_hub_id(name) and re.fullmatch(rf"[^/:@]+/[^/:@]+{_REVISION}", name) is not None


def is_fetched(name: str) -> bool:
    """Whether the files of a model are copied to this machine: from the hub or a store."""
    return is_model_id(name) or in_object_store(name)


def no_such_name(kind: str, name: str) -> str:
    """The message about a name that is neither a file or folder nor a hub id, and why not.

    kind: what was looked for, such as `folder`.
    """
    if scheme_of(name) not in (None, *WEB):
        return f"{name}: a {kind} is read from a disk of this machine or from the hub"
    is_path = name.startswith(("/", "./", "../", "~")) or name in (".", "..")
    if is_path:
        return no_such(kind, name)
    what = _not_an_id(name)
    return no_such(kind, name, nor=f", and no hub id `owner/name`{f': {what}' if what else ''}")


def _not_an_id(name: str) -> str:
    """What is wrong with the form of a hub id; empty if that is not known."""
    repository, at, revision = name.partition("@")
    if (
        address := re.match(r"(https?://)?(huggingface\.co|hf\.co)/(datasets/)?(.+)", name)
    ) is not None:
        owner_and_name = "/".join(address[4].split("/")[:2])
        return f"that is an address of the hub; write {owner_and_name}"
    if any(character.isspace() for character in name):
        return f"it holds a space; write {''.join(name.split())}"
    if "@" in revision:
        return "it has two @, and one begins the revision"
    if at and not repository:
        return f"it has a revision only; write owner/name@{revision or 'REVISION'}"
    if at and not revision:
        return f"no revision follows @; write {repository}, or a revision as in {repository}@main"
    if name.endswith("/"):
        return f"it ends with a slash; write {name.rstrip('/')}"
    if os.path.isdir(folder := name.partition("/")[0]) and "/" in name:
        return f"{folder} is a folder here"
    return ""


def split_revision(name: str) -> tuple[str, str | None]:
    """`owner/name` and the revision of `owner/name@revision`: a branch, a tag or the hash of a
    commit; None: the name has none, or is that of a file or folder."""
    repository, _, revision = (name, "", "") if os.path.exists(name) else name.partition("@")
    return repository, revision or None


def commit_of(folder: Path) -> str | None:
    """The hash of the commit of a snapshot in the hub's cache; None: the folder is no snapshot."""
    return folder.name if folder.parent.name == "snapshots" else None


@functools.lru_cache(maxsize=8)
def load_data_set(name: str, *, validation: bool = False, streaming: bool = False) -> Any:
    """The rows of a hub data set: a `datasets.Dataset`, memory-mapped from its cache.

    name: `owner/name`, `owner/name:split` or `owner/name/config@revision:split`, where the split may
    be a slice, `train[:1000]`; or a folder of `datasets.Dataset.save_to_disk` or
    `datasets.DatasetDict.save_to_disk`.
    streaming: a `datasets.IterableDataset` instead, whose rows are fetched as they are read.
    validation: takes the split `validation`, or else `test`, where the name has none; else `train`.
    Raises RecipeError if it can be neither found nor fetched, or has no such split.
    """
    require_extra("datasets", f"data: {name}")
    import datasets

    if os.path.isdir(name):
        return _load_saved(name, ["validation", "test"] if validation else ["train"])
    path, _, split = name.partition(":")
    path, revision = split_revision(path)
    owner, repository, *configs = path.split("/")
    repository, config = f"{owner}/{repository}", configs[0] if configs else None
    splits = [split] if split else ["validation", "test"] if validation else ["train"]
    options: dict[str, Any] = {"streaming": True} if streaming else {}
    if revision is not None:
        options["revision"] = revision
    for wanted in splits:
        try:
            return datasets.load_dataset(repository, config, split=wanted, **options)
        except ValueError as error:
            what = first_line(error)
            if "split" not in what.lower():
                raise RecipeError(f"data: {name}: {what}") from None
        except Exception as error:  # no network, no access, a broken file: many classes
            raise _not_fetched(f"data: {name} is not in the cache of data sets", error) from None
    missing = f"has no split {' or '.join(splits)}: {what.rstrip('.')}"
    raise RecipeError(f"data: {name}: {missing}; name one, as in {repository}:train")


SAVED_DICT = "dataset_dict.json"
"""Of a folder that `DatasetDict.save_to_disk` wrote."""


SAVED_INFO = "dataset_info.json"
"""Of a folder that `Dataset.save_to_disk` wrote."""


def is_saved_data_set(folder: Location) -> bool:
    """Whether `save_to_disk` wrote this folder, of this machine."""
    if folder.in_store:
        return False
    both = folder.inside("state.json").is_file() and folder.inside(SAVED_INFO).is_file()
    return both or folder.inside(SAVED_DICT).is_file()


def saved_rows(folder: Location) -> list[Location]:
    """The files of Arrow that `save_to_disk` wrote."""
    return [file for file in folder.files() if file.name.endswith(".arrow")]


def _load_saved(folder: str, splits: list[str]) -> Any:
    import datasets

    try:
        loaded = datasets.load_from_disk(folder)
    except Exception as error:  # damaged files raise many classes
        what = "save_to_disk wrote this folder, but it cannot be loaded"
        raise RecipeError(f"data: {folder}: {what}: {first_line(error)}") from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    for split in splits:
        if split in loaded:
            return loaded[split]
    named = f"name the folder of one, such as {folder}/{next(iter(loaded), 'train')}"
    raise RecipeError(f"data: {folder}: has no split {' or '.join(splits)}; {named}")


def _refuse_pipes(folder: str, key: str) -> None:
    """Raises RecipeError if the folder holds a pipe, socket or device, which would block a reader."""
    with contextlib.suppress(OSError):  # reported by whoever reads the folder
        for path in Path(folder).iterdir():
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise RecipeError(f"{key}: {path} is not a regular file")


def config_file(name: str, *, fetch: bool) -> Path | None:
    """The config.json of a model, of a folder or of the hub's cache; None: it is not here. fetch:
    fetch it from the hub, without weights. Raises RecipeError if it cannot be fetched."""
    if os.path.isdir(name):
        return Path(name, "config.json")
    if in_object_store(name):
        return (
            model_folder(name, key="model.path", weights=False) / "config.json" if fetch else None
        )
    if not is_model_id(name):
        return None
    from huggingface_hub import try_to_load_from_cache

    repository, revision = split_revision(name)
    cached = try_to_load_from_cache(repository, "config.json", revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    return model_folder(name, key="model.path", weights=False) / "config.json" if fetch else None


def model_config(name: str, *, fetch: bool) -> object:
    """What is in a model's config.json (`config_file`); None: it is not here, or cannot be read,
    which is reported when the model is built."""
    with contextlib.suppress(RecipeError, OSError, ValueError):
        file = config_file(name, fetch=fetch)
        if file is not None and file.is_file():
            return json.loads(file.read_text(encoding="utf-8"))
    return None


def model_folder(name: str, *, key: str, weights: bool = True) -> Path:
    """The folder of a model or tokenizer: `name` itself, a snapshot in the hub's cache of `owner/name`
    or `owner/name@revision`, or a copy of a folder in a store.

    key: of the recipe, for messages. weights: false: fetch only config and tokenizer.
    Raises RecipeError if it can be neither found nor fetched, or if links lead out of it.
    """
    if os.path.isdir(name):
        _refuse_pipes(name, key)
        refuse_links(Path(name), key=key)
        return Path(name)
    patterns = _MODEL_FILES if weights else _TOKENIZER_FILES
    if in_object_store(name):
        return fetched_folder(name, key=key, patterns=patterns)
    if not is_model_id(name):
        raise RecipeError(f"{key}: {no_such_name('folder', name)}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError
    from huggingface_hub.utils.tqdm import tqdm

    class Bar(tqdm):
        """A progress bar. A download that gets further is no hang."""

        def update(self, n: float | None = 1) -> Any:
            advanced()
            return super().update(n)

    repository, revision = split_revision(name)
    fetch = functools.partial(
        snapshot_download, repository, revision=revision, allow_patterns=patterns
    )
    try:
        folder = Path(fetch(local_files_only=True))
        if not weights or any(folder.glob("*.safetensors")):
            return folder
    except LocalEntryNotFoundError:
        pass
    logger.info(f"fetching {name} from the hub")
    try:
        return Path(fetch(tqdm_class=Bar))
    except Exception as error:  # no network, no such repository, no access: many classes
        raise _not_fetched(f"{key}: {name} is not in the hub's cache", error) from None


def target_outside(file: Path, folder: Path) -> Path | None:
    """What a file in a model's folder points to, if that is outside of the folder."""
    target, real = file.resolve(), folder.resolve()
    allowed = [real]
    if real.parent.name == "snapshots":  # in the hub's cache, the files of a snapshot are links
        allowed.append(real.parent.parent / "blobs")
    return None if any(target.is_relative_to(own) for own in allowed) else target


def copy_files(source: Path, patterns: Iterable[str], folder: Path) -> None:
    """Copies the files of a model's folder that match a pattern, into an existing folder. A link to
    a file outside of the model's folder, made since `refuse_links`, is left out with a warning."""
    for file in sorted({file for pattern in patterns for file in source.glob(pattern)}):
        if (target := target_outside(file, source)) is not None:
            logger.warning(f"{file} is not exported: it is a link to {target}")
        elif file.is_file():
            shutil.copyfile(file, folder / file.name)


def refuse_links(folder: Path, *, key: str) -> None:
    """Raises RecipeError if a file of a model's folder is a link to one outside of it.

    An export copies the license, the chat template, the processor and the tokenizer: the folder of
    a stranger could publish any file of the reader. Weights may be links, because they are too
    large to be copied; they are read as safetensors, and no other file is such.
    """
    try:
        files = [*folder.iterdir(), *folder.glob(f"{NAMED_TEMPLATES}/*")]
    except OSError as error:
        raise RecipeError(f"{key}: {folder} cannot be read: {error.strerror}") from None
    for file in files:
        target = target_outside(file, folder)
        if target is not None and file.suffix != ".safetensors" and file.is_file():
            raise RecipeError(
                f"{key}: {file} is a link to a file outside of the folder ({target}), which an "
                "export would publish; put a copy in its place, or remove it"
            )
