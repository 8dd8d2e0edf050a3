"""From `recipe=NAME key=value ...` to a checked Recipe.

`yaml_text.py` reads the YAML, OmegaConf interpolates, `columns.py` looks at the data, `decode.py`
makes a Recipe of the plain values, and `rules.py` has the rules that join several keys.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import operator
import os
import re
import shlex
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.resolvers import oc

from launcher.errors import RecipeError, first_line
from launcher.recipe.decode import (
    ARGUMENTS,
    DEFAULT,
    KeyPath,
    Problem,
    Reference,
    decode,
    dotted,
    invalidated_with,
    merged,
    plain_value,
    shown,
)
from launcher.recipe.derived import (
    Derived,
    decide_compile,
    decide_documents,
    decide_packing,
    decide_precision,
    drop_idle_auto,
    open_rate_of_adapters,
)
from launcher.recipe.find import find_recipe, shown_path, written_as
from launcher.recipe.objectives import kinds_of_objective
from launcher.recipe.rules import ALTERNATIVES, check, kind_by_keys
from launcher.recipe.schema import DEFAULT_RUN_DIR, Recipe
from launcher.recipe.yaml_text import NotYamlError, parse_yaml
from launcher.recipe.yaml_text import to_yaml as to_yaml
from launcher.sources.adapter import ADAPTER_CONFIG, PEFT_KEYS, adapter_keys
from launcher.sources.finding import rows_as_text, why_text
from launcher.sources.first_look import FirstLook, look_at
from launcher.sources.layouts import ATTACHMENTS, named_columns
from launcher.sources.store_names import without_secrets

_LARGEST_FILE = 2**20
_MOST_INTERPOLATIONS = 500
"""In a recipe. A text counts those in the values that it refers to, too."""
_REFERENCE = re.compile(r"\$\{(\.*)([\w.\[\]-]+)\}")
_INTERPOLATION = re.compile(r"(?<!\\)(\\\\)*\$\{")
"""Not `\\${`, which stands for the two characters."""
_NOT_TEXT = re.compile("[\0\ud800-\udfff]")
"""Characters that neither a path nor a text file can hold: NUL and halves of surrogate pairs."""

Places = dict[KeyPath, int | str]
"""For each key, its line in the file, or the argument as it was typed."""


@dataclass(frozen=True)
class Origins:
    """Where each value of a recipe came from."""

    file: str
    places: Places
    derived: dict[KeyPath, Derived] = field(default_factory=dict)
    """The values of keys that were not given, if they are not the defaults."""
    as_text: dict[KeyPath, Derived] = field(default_factory=dict)
    """Why data has the default kind, for messages."""
    adapter: dict[KeyPath, str] = field(default_factory=dict)
    """For keys that were not given and come from the adapter in lora.path: its file, and the name
    of the key there."""

    def of(self, path: KeyPath) -> str:
        """`recipes/ddp.yaml:24`, `command line` or `default`."""
        if path in self.derived:
            return str(self.derived[path])
        place = self.places.get(path)
        if isinstance(place, str):
            return "command line"
        return "default" if place is None else f"{self.file}:{place}"

    def locate(self, path: KeyPath) -> str | int:
        """The place of a key, or else of the section around it; 0: neither."""
        above = (path[:length] for length in range(len(path), 0, -1))
        return next((self.places[key] for key in above if key in self.places), 0)

    def cite(self, problem: Problem) -> str:
        """One line: where, which key, what is wrong."""
        if (there := self.adapter.get(problem.path[:2])) is not None:
            problem = problem._replace(path=("lora", "path"), message=f"{there}: {problem.message}")
        where, key = self.locate(problem.path), dotted(problem.path)
        if isinstance(where, str):
            place, key = "command line", where if where.partition("=")[0] == key else key
        else:
            place = f"{self.file}:{where}" if where else self.file
        message = problem.message
        kind = (self.derived | self.as_text).get(("data", "kind"))
        if problem.rule == "needs-data.kind" and kind is not None:
            message += f"; it is {kind}"
        if problem.path in self.derived:
            key += f" ({self.derived[problem.path]})"
        return without_secrets(f"{place}: {shown(key)}: {shown(message, 3000)}")

    def refuse(self, problems: Sequence[Problem]) -> RecipeError:
        """The error with these problems."""
        rules = [f"{dotted(problem.path)}/{problem.rule}" for problem in problems]
        return RecipeError([self.cite(problem) for problem in problems], rules=rules)


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe, and where each of its values came from."""

    recipe: Recipe
    origins: Origins

    def refuse(self, path: KeyPath, message: str) -> RecipeError:
        """An error about a key that is found after the check, such as a GPU without bfloat16."""
        return self.origins.refuse([Problem(path, "refused", message)])


def load_recipe(
    arguments: Sequence[str], *, ranks: int | None, files: bool = True, hub: bool = False
) -> LoadedRecipe:
    """Loads, overrides, interpolates, decodes and checks a recipe.

    arguments: `recipe=NAME` or `recipe=FILE`, and overrides `key=value`, in any order.
    ranks: data-parallel ranks of the run; None: the rules that need them are not checked.
    files: whether the data must exist; a plan does not need it.
    hub: fetch a data set of the hub where data.kind is not given, to see its columns, and the config
    of a model of the hub.
    Raises RecipeError with all problems: those of the file first, by line, then those of the
    arguments.
    """
    file = find_recipe(arguments)
    plain, origins = _read(file)
    overrides = [argument for argument in arguments if not argument.startswith("recipe=")]
    refused = (_override(plain, argument, origins.places) for argument in overrides)
    problems = [problem for problem in refused if problem is not None]
    _replace_alternatives(plain, origins)
    drop_idle_auto(plain)
    open_rate_of_adapters(plain)
    problems += _interpolate(plain, origins)
    problems += _complete(plain, origins, hub=hub)
    decide_documents(plain, origins.derived)
    problems += decide_packing(plain, origins.derived, hub=hub)
    decide_precision(plain, origins.derived)
    problems += _characters(plain, {problem.path for problem in problems})
    problems += _continued_adapter(plain, origins)
    reported = {problem.path for problem in problems}
    recipe, wrong, unsound = decode(plain)
    problems += [problem for problem in wrong if problem.path not in reported]
    recipe = decide_compile(recipe, origins.derived)
    unsound |= {invalidated_with(path) for path in reported}
    problems += check(recipe, ranks=ranks, unsound=unsound, files=files)
    if ("run", "dir") not in origins.places:  # its default has the problems of run.name
        problems = [problem for problem in problems if problem.path != ("run", "dir")]

    def order(problem: Problem) -> tuple[bool, int]:
        where = origins.locate(problem.path)
        return isinstance(where, str), where if isinstance(where, int) else overrides.index(where)

    if problems:
        raise origins.refuse(sorted(problems, key=order))
    generate, folder = recipe.evaluation.generate, str(file.resolve().parent)
    metrics = generate.metrics if generate is not None else ()
    own = recipe.own_functions() or any(":" in name for name in metrics)
    if (own or recipe.logging.tracker is not None) and folder not in sys.path:
        sys.path.append(folder)  # where `import_function` finds their modules
    return LoadedRecipe(recipe, origins)


def recorded_recipe(text: str, *, file: Path, strict: bool = False) -> Recipe:
    """The recipe that a run has recorded in a file (`to_yaml`). Nothing in it is interpolated: the
    run has done so, and `${oc.env:NAME}` would show the reader's environment. Arguments of builders
    stay references, which are resolved if the builder is called. Raises RecipeError.

    strict: no key may be wrong; else a wrong one has its default.
    """
    try:
        plain, _ = parse_yaml(text)
        for path, value in list(_walk(plain, ())):
            if isinstance(value, str):
                kept = path[:2] in ARGUMENTS and _INTERPOLATION.search(value) is not None
                text = Reference(value) if kept else value.replace("\\${", "${")
                _get(plain, path[:-1])[path[-1]] = text
        if isinstance(lora := plain.get("lora"), dict):
            lora.setdefault("target_parameters", [])  # earlier versions had no adapters of experts
        recipe, problems, _ = decode(plain)
    except (NotYamlError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise RecipeError(f"{file}: not the recipe of a run: {first_line(error)}") from None
    if strict and problems:
        raise RecipeError([f"{dotted(problem.path)}: {problem.message}" for problem in problems])
    return recipe


def _read(path: Path) -> tuple[dict[str, Any], Origins]:
    """The values of a file, not interpolated, and their lines. Raises RecipeError."""
    file = shown_path(path)
    try:
        with path.open("rb") as opened:
            text = opened.read(_LARGEST_FILE + 1)
        if len(text) > _LARGEST_FILE:
            raise RecipeError(f"{file}: larger than 1 MiB, so it is no recipe")
        values, lines = parse_yaml(text)
    except OSError as error:
        raise RecipeError(f"{file}: cannot be read: {error.strerror}") from None
    except NotYamlError as error:
        place = file if error.line is None else f"{file}:{error.line}"
        raise RecipeError(f"{place}: not YAML: {error}") from None
    if not isinstance(values, dict):
        what = "must be sections (run:, model:, data:, ...), as in recipes/quickstart.yaml"
        raise RecipeError(f"{file}: {what}")
    return values, Origins(file, dict(lines))


def _override(plain: dict[str, Any], argument: str, places: Places) -> Problem | None:
    """Sets what an override sets, and records it as the origin. Returns what is wrong with it."""
    key, equals, text = argument.partition("=")
    path = tuple(key.split("."))
    if not equals or any(not part or part != part.strip() for part in path):
        places[path] = argument
        hint = ", such as batch.micro_batch_size=4"
        if (meant := written_as(argument)) is not None:
            hint = f"; write {shlex.quote(meant)}"
        return Problem(path, "not-key=value", f"an override is key=value{hint}")
    value: Any = text
    lines: dict[KeyPath, int] = {}
    try:
        if not text.startswith(("@", "`")):  # YAML has no use for these, and a name may begin so
            value, lines = parse_yaml(text)
    except NotYamlError as error:
        places[path] = argument
        return Problem(path, "not-yaml", f"not a value: {error}")
    if (joined := _joined_key(value)) is not None:
        places[path] = argument
        name, _, rest = joined.partition(":")
        what = f"YAML wants a space after the colon: {{{name}: {rest}}}, not {{{joined}}}"
        return Problem(path, "joined-key", what)
    if not isinstance(value, dict):  # a section keeps its other keys
        for place in [place for place in places if place[: len(path)] == path]:
            del places[place]
    for length in range(1, len(path)):
        places.setdefault(path[:length], argument)
    places[path] = argument
    for inner in lines:
        places[*path, *inner] = argument
    for part in reversed(path):
        value = {part: value}
    plain |= merged(plain, value)
    return None


def _replace_alternatives(plain: dict[str, Any], origins: Origins) -> None:
    """Sets a key of the file to null if an argument gives the one that stands in its place."""
    for keys in ALTERNATIVES:
        paths: list[KeyPath] = [tuple(key.split(".")) for key in keys]
        given = [
            path
            for path, key in zip(paths, keys, strict=True)
            if plain_value(plain, key) is not None
        ]
        typed = [path for path in given if isinstance(origins.places.get(path), str)]
        if len(typed) != 1:  # several are reported, as are several in the file
            continue
        for path in given:
            if path != typed[0]:
                _get(plain, path[:-1])[path[-1]] = None
                origins.places.pop(path, None)
                origins.derived[path] = Derived(None, f"because {dotted(typed[0])} is given")


def _joined_key(value: object) -> str | None:
    """A key inside a value that holds its own value, as in `{rank:8}`, which is YAML for the key
    `rank:8` with the value null; None: there is none."""
    return next(
        (
            path[-1]
            for path, inner in _walk(value, ())
            if inner is None and isinstance(path[-1], str) and re.match(r"\w+:.", path[-1])
        ),
        None,
    )


def _walk(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, Any]]:
    """Every key inside a value, with its value; a section before its keys."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield (*path, key), inner
            yield from _walk(inner, (*path, key))


def _interpolate(plain: dict[str, Any], origins: Origins) -> list[Problem]:
    """Replaces each `${...}` by its value. One without a value is a problem, and becomes null.
    Raises RecipeError if there are too many."""
    if isinstance(plain.get("run"), dict):
        plain["run"].setdefault("dir", DEFAULT_RUN_DIR)
    _register_resolvers()
    texts = [path for path, text in _walk(plain, ()) if isinstance(text, str) and "${" in text]
    problems = []
    counter, total = _Counter({path: _get(plain, path) for path in texts}), 0
    for path in texts:
        total += counter.count(path) if len(texts) <= _MOST_INTERPOLATIONS else 1
        if total > _MOST_INTERPOLATIONS:
            what = f"more than {_MOST_INTERPOLATIONS} interpolations up to here"
            raise origins.refuse([Problem(path, "too-many-interpolations", what)])
    for path in texts:
        try:
            OmegaConf.create([_get(plain, path)])
        except GrammarParseError:
            what = "is no interpolation: write ${section.key}, or \\${ for the two characters"
            problems.append(Problem(path, "interpolation", what))
            _get(plain, path[:-1])[path[-1]] = None
    whole = merged(dataclasses.asdict(DEFAULT), plain)
    # Without the sections that no text is in or names: making the tree takes most of the loading
    named = "".join(str(_get(plain, path)) for path in texts)
    needed = {path[0] for path in texts} | {name for name in whole if str(name) in named}
    tree = OmegaConf.create({name: whole[name] for name in whole if name in needed})
    for path in texts:
        try:
            _environment.was_read = False
            value = _resolved(tree, path)
            if _environment.was_read and path[:2] in ARGUMENTS:
                value = _reference(tree, path, _get(plain, path), value)
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            value, what = None, first_line(error)
            if isinstance(error, RecursionError):
                what = "it leads back to itself"
            problems.append(Problem(path, "interpolation", f"cannot be interpolated: {what}"))
        _get(plain, path[:-1])[path[-1]] = value
    return problems


class _Environment:
    """OmegaConf's resolver `oc.env`, which remembers that it was called."""

    def __init__(self) -> None:
        self.was_read = False
        self.keeps_references = False
        """Returns `${oc.env:NAME}` instead of the value."""

    def __call__(self, name: str, *default: str | None) -> str | None:
        self.was_read = True
        if not self.keeps_references:
            return oc.env(name, *default)
        quoted = ("null" if text is None else json.dumps(text) for text in default)
        return f"${{oc.env:{','.join([name, *quoted])}}}"


_environment = _Environment()


def _register_resolvers() -> None:
    if OmegaConf.has_resolver("stdlib"):
        return
    renamed = getattr(OmegaConf, "register_resolver", None)  # since omegaconf 2.4
    register = renamed or OmegaConf.register_new_resolver
    register("stdlib", lambda: sysconfig.get_path("stdlib"))  # of the running Python
    register("oc.env", _environment, replace=True)


def _resolved(tree: Any, path: KeyPath) -> Any:
    value = _get(tree, path)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _reference(tree: Any, path: KeyPath, text: str, value: object) -> Reference:
    """A text that has this value without the rest of the recipe. Raises ValueError without one."""
    candidates = [text]
    _environment.keeps_references = True
    try:
        candidates.append(str(_get(tree, path)))  # for one that refers to other keys, too
    finally:
        _environment.keeps_references = False
    for candidate in candidates if len(path) > 2 else ():
        try:
            if _resolved(OmegaConf.create([candidate]), (0,)) == value:
                return Reference(candidate)
        except (OmegaConfBaseException, ValueError):
            continue
    raise ValueError("an argument that reads the environment must be a text, as in ${oc.env:NAME}")


def resolve_arguments(arguments: Any, path: KeyPath) -> Any:
    """The arguments of a builder with the values of references. Raises RecipeError if a value is
    missing in the environment of this process.

    path: of the arguments in the recipe, for messages."""
    if isinstance(arguments, Reference):
        _register_resolvers()
        try:
            return _resolved(OmegaConf.create([str(arguments)]), (0,))
        except (OmegaConfBaseException, ValueError, RecursionError) as error:
            what = f"{arguments} cannot be interpolated: {first_line(error)}"
            raise RecipeError(f"{dotted(path)}: {what}") from None
    if isinstance(arguments, Mapping):
        return {key: resolve_arguments(value, (*path, key)) for key, value in arguments.items()}
    if isinstance(arguments, list | tuple):
        inner = enumerate(arguments)
        return type(arguments)(resolve_arguments(value, (*path, index)) for index, value in inner)
    return arguments


def _complete(plain: dict[str, Any], origins: Origins, *, hub: bool) -> Iterator[Problem]:
    """Sets the keys of section data that follow from others, unless these are not sound. Yields
    what is wrong with the first row of data without a kind."""
    data = plain.get("data", {})
    if not isinstance(data, dict):
        return
    if data.get("validation") is not None:
        data.pop("validation_split", None)
        given = origins.places.pop(("data", "validation_split"), None)
        if given is not None:
            instead = Derived(None, "because data.validation is given")
            origins.derived["data", "validation_split"] = instead
    if data.get("kind") is not None:
        return
    kinds = kinds_of_objective(plain)
    assumed = kind_by_keys(plain, kinds)
    by_keys = "by the other keys of the recipe" if assumed != DEFAULT.data.kind else None
    train, validation = data.get("train"), data.get("validation")
    for name, source in (train if isinstance(train, dict) else {"": {"files": train}}).items():
        files = _texts(source.get("files")) if isinstance(source, dict) else []
        if not files or source.get("kind") is not None:
            continue
        where: KeyPath = ("data", "train", name, "files") if name else ("data", "train")
        keys = data | {key: value for key, value in source.items() if value is not None}
        ignored = _texts(keys.get("ignore_columns"))
        try:
            seen = look_at(
                files,
                named_columns(keys),
                kinds=kinds,
                ignored=ignored,
                to_check=_texts(source.get("ignore_columns")) if name else ignored,
                attachments=[
                    kind for kind, key in ATTACHMENTS.items() if plain.get(key) is not None
                ],
                hub=hub,
            )
        except RecipeError as error:
            yield Problem(where, "first-row", str(error))
            seen = FirstLook(None)
        kind, why = seen.kind or "text", None
        if seen.problem is not None:  # alone: not with rules about its kind
            kind = kind_by_keys(plain, (kind, *kinds))
            yield Problem(where, "first-row", f"{shown(str(seen.file))}: {seen.problem}")
        elif seen.file is not None:
            why = f"by the columns of {shown(seen.file)}"
        elif seen.kind is None and (text := why_text(files)) is not None:
            origins.as_text["data", "kind"] = Derived("text", f"as {shown(text)}")
        elif seen.kind is None:
            kind, why = assumed, by_keys
        if kind == "text":
            yield from _refuse_rows_as_text(where, files)
        is_first = data.get("kind") is None
        if kind != data.get("kind"):
            (data if is_first else source)["kind"] = kind
            if why is not None:
                path: KeyPath = ("data", "kind") if is_first else ("data", "train", name, "kind")
                origins.derived[path] = Derived(kind, why)
    if data.get("kind") in (None, "text"):  # then it was not given
        sets = validation if isinstance(validation, dict) else {"": validation}
        for name, patterns in sets.items():
            where = ("data", "validation", name) if name else ("data", "validation")
            yield from _refuse_rows_as_text(where, _texts(patterns))
    if data.get("kind") is None and data.get("builder") is None and by_keys is not None:
        plain["data"] = data | {"kind": assumed}
        origins.derived["data", "kind"] = Derived(assumed, by_keys)


def _texts(value: object) -> list[str]:
    """A list of texts, or one; empty for other values, which are reported when the recipe is
    decoded."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        return []
    return texts


def _refuse_rows_as_text(where: KeyPath, files: list[str]) -> Iterator[Problem]:
    if (file := rows_as_text(files)) is not None:
        what = "its lines are JSON objects, and its name says that it is text: name it .jsonl, or "
        what = f"{shown(file)}: {what}set data.kind=text to train it as it is written"
        yield Problem(where, "rows-as-text", what)


class _Counter:
    """Counts the interpolations that OmegaConf resolves for a text. It resolves a value again at
    each reference, so a few that refer to one another can take billions of resolutions."""

    def __init__(self, texts: Mapping[KeyPath, str]) -> None:
        self._texts, self._counts = texts, dict[KeyPath, int]()
        self._below: dict[tuple[str, ...], list[KeyPath]] = defaultdict(list)
        """The texts at each key and in each section."""
        for path in texts:
            for length in range(1, len(path) + 1):
                self._below[tuple(map(str, path[:length]))].append(path)

    def count(self, path: KeyPath) -> int:
        """The number of interpolations in a text and in the values that it refers to."""
        if path not in self._counts:
            self._counts[path] = 0  # of one that leads back to itself, which OmegaConf reports
            total = 0
            for dots, key in _REFERENCE.findall(self._texts[path]):
                above = path[: len(path) - len(dots)] if dots else ()
                target = (*map(str, above), *re.split(r"[.\[\]]+", key.rstrip("]")))
                total += 1 + sum(map(self.count, self._below.get(target, ())))
            self._counts[path] = total
        return self._counts[path]


def _characters(plain: dict[str, Any], reported: set[KeyPath]) -> Iterator[Problem]:
    for path, text in _walk(plain, ()):
        wrong = _NOT_TEXT.search(text) if isinstance(text, str) else None
        if wrong is not None and path not in reported:
            yield Problem(path, "not-text", f"holds {wrong[0]!r}, which is no character of a text")


def _continued_adapter(plain: dict[str, Any], origins: Origins) -> Iterator[Problem]:
    """Sets the keys of `lora` to those of the adapter in lora.path; where the recipe has another
    value, that is a problem."""
    lora = plain.get("lora")
    path = lora.get("path") if isinstance(lora, dict) else None
    if not isinstance(lora, dict) or not isinstance(path, str):
        return
    try:
        keys = adapter_keys(path)
    except ValueError as error:
        yield Problem(("lora", "path"), "no-adapter", str(error))
        return
    for key, value in keys.items():
        given = lora.get(key)
        names = [given] if isinstance(given, str) else given
        if isinstance(names, list):
            names = sorted(map(str, names))
        if given is not None and names != value:
            there, here = (json.dumps(each, default=str) for each in (value, given))
            what = f"{here}, but the adapter in {path} has {there}; leave the key out"
            yield Problem(("lora", key), "not-as-lora.path", what)
        if given is None:
            name = next(theirs for theirs, ours in PEFT_KEYS.items() if ours == key)
            origins.adapter["lora", key] = f"{Path(path) / ADAPTER_CONFIG}: {name}"
        lora[key] = value
        origins.places.setdefault(("lora", key), origins.locate(("lora", "path")))


def _get(values: Any, path: KeyPath) -> Any:
    return functools.reduce(operator.getitem, path, values)


def argument_digests(recipe: Recipe, salt: str | None = None) -> dict[str, Any]:
    """Digests of the arguments from the environment, for a checkpoint: `salt`, and `values` as pairs
    of path and digest. Empty without such arguments.

    A resume notices by them that a value has changed. They are slow to compute and short, so that
    nobody finds a password by trying many. salt: of an earlier result, to compare with it.
    """
    plain = dataclasses.asdict(recipe)
    paths = [
        (*above, *path)
        for above in ARGUMENTS
        if _get(plain, above[:1]) is not None
        for path, value in _walk(_get(plain, above), ())
        if isinstance(value, Reference)
    ]
    if not paths:
        return {}
    salt = salt or os.urandom(8).hex()
    values = []
    for path in paths:
        value = json.dumps(resolve_arguments(_get(plain, path), path), default=str)
        digest = hashlib.pbkdf2_hmac("sha256", value.encode(), salt.encode(), 200_000)
        values.append([list(path), digest[:4].hex()])
    return {"salt": salt, "values": values}


def with_digests(plain: dict[str, Any], digests: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of a recipe, in which each argument from the environment has its digest, so that
    two recipes can be compared. digests: of `argument_digests`."""
    for path, digest in (digests or {}).get("values", ()):
        section = _get(plain, tuple(path[:-1]))
        section[path[-1]] = f"{section[path[-1]]} (digest {digest})"
    return plain
