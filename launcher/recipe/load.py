"""From `recipe=NAME key=value ...` to a checked Recipe. The only file that imports omegaconf.

OmegaConf loads, overrides and interpolates; `decode` makes its plain result a Recipe; `check` holds the rules between keys.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from launcher.errors import RecipeError
from launcher.recipe.decode import KeyPath, Problem, decode, dotted, subsection
from launcher.recipe.find import find_recipe, read_recipe, recipe_folders, shown_path
from launcher.recipe.schema import Recipe
from launcher.recipe.validate import check

COMMAND_LINE = "command line"

_TAG = "tag:yaml.org,2002:"
_KNOWN_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "null", "timestamp", "map", "seq")}
_BROKEN_INTERPOLATION = "is no interpolation: write ${section.key}, or \\${ for the two characters themselves"
_MISFIT = "a YAML tag (!!int, !!bool, ...) or an alias (*name) stands where it does not fit"
_YAML_HINTS = (  # part of what the YAML reader says, and what is mostly meant by it
    ("\\t", "indent with spaces, not with tabs"),
    ("undefined alias", "text that starts with * stands in quotes"),
    ("alphabetic or numeric", "text that starts with * or & stands in quotes"),
    ("expected ',' or", "inside [ ] and { }, text with any of [ ] { } , : stands in quotes"),
    ("<block", "is the indentation right, here and in the line before?"),
    ("mapping values", "text with a colon and a space stands in quotes; or is the indentation wrong?"),
    ("found '?'", "??? stands in quotes in a list"),
    ("cannot start any token", "text that starts so stands in quotes"),
)


@dataclass
class Origins:
    """Where each value of a recipe came from."""

    file: str
    lines: dict[KeyPath, int] = field(default_factory=dict)
    overrides: dict[KeyPath, str] = field(default_factory=dict)
    """Key to the argument that set it, as it was typed."""

    def of(self, path: KeyPath) -> str:
        """`recipes/ddp.yaml:24`, `command line` or `default`."""
        if path in self.overrides:
            return COMMAND_LINE
        if path in self.lines:
            return f"{self.file}:{self.lines[path]}"
        return "default"

    def override(self, path: KeyPath, argument: str) -> None:
        """An argument set this key; what the file says inside it stands no more."""
        self.lines = {key: line for key, line in self.lines.items() if key == path or key[: len(path)] != path}
        self.overrides = {key: earlier for key, earlier in self.overrides.items() if key[: len(path)] != path}
        self.overrides[path] = argument

    def locate(self, path: KeyPath) -> str | int:
        """The argument or the line that set a key, or else the section nearest to it; 0: neither."""
        for length in range(len(path), 0, -1):
            if path[:length] in self.overrides:
                return self.overrides[path[:length]]
            if path[:length] in self.lines:
                return self.lines[path[:length]]
        return 0

    def cite(self, problem: Problem) -> str:
        """One line: where, which key, what is wrong."""
        where, key = self.locate(problem.path), dotted(problem.path)
        if isinstance(where, str):
            return f"{COMMAND_LINE}: {where if where.partition('=')[0] == key else key}: {problem.message}"
        return ": ".join(part for part in (f"{self.file}:{where}" if where else self.file, key, problem.message) if part)


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe, and where each of its values came from."""

    recipe: Recipe
    origins: Origins

    def refuse(self, path: KeyPath, message: str) -> RecipeError:
        """The error for what only turns out after the check (a GPU without bfloat16, say)."""
        return RecipeError(self.origins.cite(Problem(path, message)))


def _lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[Problem]) -> None:
    """Fills `lines` with the line of each key.

    What OmegaConf would stop at, or say without a line, is a problem, and is taken out of the tree: a key that stands
    twice in a section or is no text, a tag, a broken interpolation.
    """
    if node.tag not in _KNOWN_TAGS:
        problems.append(
            Problem(
                path,
                f"the YAML tag {node.tag.replace(_TAG, '!!')} has no meaning in a recipe; text that starts with ! or = stands in quotes",
            )
        )
        node.tag = _TAG + ("map" if isinstance(node, yaml.MappingNode) else "seq" if isinstance(node, yaml.SequenceNode) else "str")
    if isinstance(node, yaml.MappingNode):
        kept: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in sorted(node.value, key=lambda pair: pair[0].tag != _TAG + "merge"):
            name, line = key.value, key.start_mark.line + 1
            if key.tag == _TAG + "merge":  # <<: what it brings in stands where its anchor is
                for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                    _lines(merged, path, lines, problems)
            elif not isinstance(name, str) or key.tag not in (_TAG + "str", _TAG + "int"):
                shown = repr(name) if isinstance(name, str) else "a list or a section"
                problems.append(Problem(path, f"a key must be a name; line {line} has {shown}"))
                continue
            else:
                if name in kept:
                    problems.append(Problem((*path, name), f"stands twice: in line {lines[(*path, name)]} and in line {line}"))
                lines[(*path, name)] = line
                _lines(value, (*path, name), lines, problems)
            kept[name] = (key, value)
        node.value = list(kept.values())
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _lines(value, (*path, str(index)), lines, problems)
    elif "${" in node.value:
        try:
            OmegaConf.create([node.value])
        except GrammarParseError:
            problems.append(Problem(path, _BROKEN_INTERPOLATION))
            node.value = ""


def _parse(text: str, origins: Origins, problems: list[Problem]) -> DictConfig:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise RecipeError(f"{origins.file}: is empty; see recipes/quickstart.yaml for the shortest recipe that runs")
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{origins.file}:{node.start_mark.line + 1}: must be sections (run:, model:, data:, ...)")
        _lines(node, (), origins.lines, problems)
        loaded = OmegaConf.create(yaml.serialize(node, Dumper=yaml.SafeDumper) if problems else text)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise RecipeError(f"{origins.file}:{line}: not YAML: the character {text[error.position]!r} is not allowed") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origins.file}:{mark.line + 1}" if mark else origins.file
        raise RecipeError(f"{where}: not YAML: {_yaml_words(error)}") from None
    except RecursionError:
        raise RecipeError(f"{origins.file}: an alias contains itself, or sections are nested without end") from None
    except RecipeError:
        raise
    except (OmegaConfBaseException, ValueError, LookupError, TypeError):  # what construction of `!!int x` and the like raises
        raise RecipeError(f"{origins.file}: {_MISFIT}") from None
    assert isinstance(loaded, DictConfig)
    return loaded


def _yaml_words(error: yaml.YAMLError) -> str:
    what = getattr(error, "problem", None) or _first_line(error)
    if what.startswith("but "):
        what = f"{getattr(error, 'context', None)}, {what}"
    if "constructor" in what:
        return "a tag (!...) has no meaning in a recipe; text that starts with ! or = stands in quotes"
    hint = next((hint for sign, hint in _YAML_HINTS if sign in what), None)
    return f"{what}; {hint}" if hint else what


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _leaves(value: Any, path: KeyPath) -> list[KeyPath]:
    if isinstance(value, dict):
        return [path] + [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, str(key)))]
    return [path]


def _override(config: DictConfig, argument: str, origins: Origins) -> DictConfig:
    """Raises RecipeError where the argument is no override."""
    key, equals, _ = argument.partition("=")
    if not equals or any(not part or part != part.strip() for part in key.split(".")):
        raise RecipeError(f"{COMMAND_LINE}: {argument or repr('')}: an override is key=value, such as batch.micro_batch_size=4")
    try:
        override = OmegaConf.from_dotlist([argument])
        _make_way(config, OmegaConf.to_container(override, resolve=False), (), argument, origins)
        merged = OmegaConf.merge(config, override)
    except RecipeError:
        raise
    except GrammarParseError:
        raise RecipeError(f"{COMMAND_LINE}: {argument}: {_BROKEN_INTERPOLATION}") from None
    except yaml.YAMLError as error:
        raise RecipeError(f"{COMMAND_LINE}: {argument}: not a value: {_yaml_words(error)}") from None
    except (OmegaConfBaseException, ValueError, LookupError, TypeError, RecursionError):
        raise RecipeError(f"{COMMAND_LINE}: {argument}: not a value: {_MISFIT}") from None
    assert isinstance(merged, DictConfig)
    return merged


def _make_way(config: DictConfig, values: Any, path: KeyPath, argument: str, origins: Origins) -> None:
    """Notes what an override sets as its own, and takes away what stands there: a list and a section do not merge."""
    for key, value in values.items():
        here = (*path, str(key))
        before = _peek(config, key)
        if isinstance(before, DictConfig) and isinstance(value, dict):
            _make_way(before, value, here, argument, origins)
            continue
        if isinstance(before, ListConfig) and isinstance(value, dict) and argument.partition("=")[0] != dotted(here):
            raise RecipeError(f"{COMMAND_LINE}: {argument}: {dotted(here)} is a list; give it whole, as {dotted(here)}=[...]")
        if before is not None:
            config[key] = None
        for leaf in _leaves(value, here):
            origins.override(leaf, argument)


def _peek(config: DictConfig, key: Any) -> Any:
    """A value, interpolated where that is possible; None where there is none."""
    try:
        return config[key] if key in set(config) and not OmegaConf.is_missing(config, key) else None
    except (OmegaConfBaseException, ValueError):
        return None


def _write_defaults(config: DictConfig, section: Any, path: KeyPath) -> Iterator[KeyPath]:
    """Adds what a recipe leaves out, so that an interpolation finds it; yields the keys."""
    for key in dataclasses.fields(section):
        name, default = key.name, key.default
        if name not in set(config) and default is not dataclasses.MISSING:  # `in config` would interpolate
            config[name] = _plain(default)
            yield (*path, name)
            continue
        inner, value = subsection(section, name), _peek(config, name)
        if inner is not None and isinstance(value, DictConfig) and not OmegaConf.is_interpolation(config, name):
            yield from _write_defaults(value, inner, (*path, name))


def _resolve(config: Any, path: KeyPath, above: tuple[Any, ...], defaults: set[KeyPath], problems: list[Problem]) -> Any:
    """OmegaConf's tree as plain values, each interpolation resolved; one that fails is a problem and comes out as None.

    above: the sections that lead here.
    defaults: left out again, but where they are interpolated (`run.dir`) and that succeeds.
    """
    keys = range(len(config)) if isinstance(config, ListConfig) else list(config.keys())
    resolved: dict[str, Any] = {}
    for key in keys:
        here = (*path, str(key))
        if here in defaults and not OmegaConf.is_interpolation(config, key):
            continue
        try:
            if OmegaConf.is_missing(config, key):
                resolved[str(key)] = None
                problems.append(Problem(here, "??? stands where a value must be given"))
                continue
            value = config[key]
            if any(value is node for node in above):
                raise ValueError(_CYCLE)
        except (OmegaConfBaseException, ValueError) as error:
            if here not in defaults:
                resolved[str(key)] = None
                problems.append(Problem(here, f"cannot be interpolated: {_interpolation_words(error, config)}"))
            continue
        inside = isinstance(value, (DictConfig, ListConfig))
        resolved[str(key)] = _resolve(value, here, (*above, value), defaults, problems) if inside else value
    return list(resolved.values()) if isinstance(config, ListConfig) else resolved


_CYCLE = "it leads back to itself"


def _interpolation_words(error: Exception, config: Any) -> str:
    what = _first_line(error)
    if "Recursive" in what or "parent node" in what:
        return _CYCLE
    if "is not a container" in what:
        return "it looks for a key in what is no section"
    if missing := re.fullmatch(r"Interpolation key '(.*)' not found", what):
        return f"there is no key {missing[1]}"
    if unsupported := re.fullmatch(r"Unsupported interpolation type (.*)", what):
        return f"there is no resolver {unsupported[1]}; use ${{section.key}}, ${{oc.env:NAME}} or ${{stdlib:}}"
    return re.sub(r"^\w+ raised while resolving interpolation: ", "", what).strip('"')


def _standard_library(folder: str = "") -> str:
    """`${stdlib:}`: where the running Python keeps the source of its standard library."""
    import sysconfig

    return str(Path(sysconfig.get_path("stdlib")) / folder)


def load_recipe(arguments: Sequence[str], *, ranks: int | None, files: bool = True) -> LoadedRecipe:
    """Loads, overrides, interpolates, decodes and checks.

    arguments: `recipe=NAME` or `recipe=FILE`, and overrides in OmegaConf's dot-list form, in any order.
    ranks: data-parallel ranks that will run it; None leaves out the rules that need them.
    files: whether the data must be there; to plan it need not.
    Raises RecipeError with all problems found, each with the file and line or the argument it comes from.
    """
    if not OmegaConf.has_resolver("stdlib"):
        register = getattr(OmegaConf, "register_resolver", None) or OmegaConf.register_new_resolver  # renamed in omegaconf 2.4
        register("stdlib", _standard_library)
    named = [argument.partition("=")[2] for argument in arguments if argument.startswith("recipe=")]
    if len(named) != 1 or not named[0]:
        known = sorted({path.stem for folder in recipe_folders() for path in folder.glob("*.yaml")})
        what = "no recipe given" if not named or not named[0] else f"{len(named)} recipes given"
        raise RecipeError(f"{COMMAND_LINE}: {what}; say recipe=NAME ({', '.join(known)}) or recipe=path/to/file.yaml")
    path = find_recipe(named[0])
    origins = Origins(file=shown_path(path))
    problems: list[Problem] = []
    found: list[tuple[bool, int, str]] = []
    """Problems in the order to tell them in: as in the file, then as on the command line."""
    config = _parse(read_recipe(path, origins.file), origins, problems)
    for index, argument in enumerate(arguments):
        if not argument.startswith("recipe="):
            try:
                config = _override(config, argument, origins)
            except RecipeError as error:
                found.append((True, index, str(error)))
    defaults = set(_write_defaults(config, Recipe, ()))
    plain = _resolve(config, (), (config,), defaults, problems)
    recipe, wrong, unsound = decode(plain)
    reported = {problem.path for problem in problems}
    problems += [problem for problem in wrong if problem.path not in reported]
    problems += check(recipe, ranks=ranks, unsound=unsound | reported, files=files)
    for problem in problems:
        where = origins.locate(problem.path)
        found.append((isinstance(where, str), where if isinstance(where, int) else arguments.index(where), origins.cite(problem)))
    if found:
        raise RecipeError([text for _, _, text in sorted(found, key=lambda one: one[:2])])
    return LoadedRecipe(recipe, origins)


class _Dumper(yaml.SafeDumper):
    """Writes text so that OmegaConf reads the same: not as a number (1e-4), not as an interpolation."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_str(re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


_Dumper.add_representer(str, _represent_text)
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", re.compile(r"[-+]?[\d_.]+[eE][-+]?\d+"), list("-+.0123456789"))


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every key written out; running it repeats the run."""
    return yaml.dump(_plain(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def scalar_as_yaml(value: Any) -> str:
    """A value that is no section, on one line of YAML."""
    text: str = yaml.dump(_plain(value), Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=10**6)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
