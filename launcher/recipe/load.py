"""From `recipe=NAME key=value ...` to a checked Recipe. The only file that imports omegaconf.

OmegaConf loads, overrides and interpolates; `decode` makes its plain result a Recipe; `check` holds the rules between keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from launcher.errors import RecipeError
from launcher.recipe.check import check
from launcher.recipe.decode import Decoder, KeyPath, Problem, dotted, suggestion
from launcher.recipe.schema import DEFAULT_RUN_DIR, Recipe

COMMAND_LINE = "command line"


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

    def cite(self, problem: Problem) -> str:
        """One line: where, which key, what is wrong."""
        path = problem.path
        if path in self.overrides:
            argument = self.overrides[path]
            shown = argument if argument.split("=", 1)[0] == dotted(path) else dotted(path)
            return f"{COMMAND_LINE}: {shown}: {problem.message}"
        where = next((f":{self.lines[path[:n]]}" for n in range(len(path), 0, -1) if path[:n] in self.lines), "")
        return f"{self.file}{where}: {dotted(path)}: {problem.message}" if path else f"{self.file}: {problem.message}"


@dataclass(frozen=True)
class LoadedRecipe:
    """A checked recipe, and where each of its values came from."""

    recipe: Recipe
    origins: Origins

    def refuse(self, path: KeyPath, message: str) -> RecipeError:
        """The error for what only turns out after the check (a GPU without bfloat16, say)."""
        return RecipeError(self.origins.cite(Problem(path, message)))


def recipe_folders() -> list[Path]:
    """Where `recipe=NAME` is looked for: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent.parent
    return [folder for folder in (package.parent / "recipes", package / "_recipes") if folder.is_dir()]


def _find(name: str) -> Path:
    written = Path(name)
    if written.suffix in (".yaml", ".yml") or "/" in name:
        if not written.exists():
            near = suggestion(written.name, [p.name for p in written.parent.glob("*.y*ml")])
            raise RecipeError(f"recipe={name}: no such file{near}")
        if not written.is_file():
            raise RecipeError(f"recipe={name}: is a folder; give a file in it")
        return written
    known = {path.stem: path for folder in reversed(recipe_folders()) for path in sorted(folder.glob("*.yaml"))}
    if name not in known:
        raise RecipeError(
            f"recipe={name}: no recipe of that name{suggestion(name, known)}; known: {', '.join(sorted(known))}; "
            "or give the path of a .yaml file"
        )
    return known[name]


def _shown(path: Path) -> str:
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _read(path: Path, shown: str) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(f"{shown}: not UTF-8 text (byte {error.start}); a recipe is a YAML file") from None
    except OSError as error:
        raise RecipeError(f"{shown}: cannot be read: {error.strerror}") from None


def _lines(node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[Problem]) -> None:
    """Fills `lines` with the line of each key; a key that stands twice in a section is a problem."""
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value)
            line = key.start_mark.line + 1
            if name in seen:
                problems.append(Problem((*path, name), f"stands twice: in line {seen[name]} and in line {line}"))
            seen[name] = line
            lines[(*path, name)] = line
            _lines(value, (*path, name), lines, problems)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*path, str(index))] = value.start_mark.line + 1
            _lines(value, (*path, str(index)), lines, problems)


def _parse(text: str, origins: Origins, problems: list[Problem]) -> DictConfig:
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None:
            raise RecipeError(f"{origins.file}: is empty; see recipes/quickstart.yaml for the shortest recipe that runs")
        if not isinstance(node, yaml.MappingNode):
            raise RecipeError(f"{origins.file}:{node.start_mark.line + 1}: must be sections (run:, model:, data:, ...)")
        _lines(node, (), origins.lines, problems)
        if problems:  # OmegaConf refuses duplicate keys too, but names only the first
            raise RecipeError([origins.cite(problem) for problem in problems])
        loaded = OmegaConf.create(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{origins.file}:{mark.line + 1}" if mark else origins.file
        what = getattr(error, "problem", None) or str(error).splitlines()[0]
        hint = "; indent with spaces, not with tabs" if "\\t" in what else ""
        raise RecipeError(f"{where}: not YAML: {what}{hint}") from None
    except RecursionError:
        raise RecipeError(f"{origins.file}: an alias contains itself") from None
    except OmegaConfBaseException as error:
        raise RecipeError(f"{origins.file}: {_first_line(error)}") from None
    assert isinstance(loaded, DictConfig)
    return loaded


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _leaves(value: Any, path: KeyPath) -> list[KeyPath]:
    if isinstance(value, dict) and value:
        return [path] + [leaf for key, inner in value.items() for leaf in _leaves(inner, (*path, str(key)))]
    if isinstance(value, list):
        return [path] + [leaf for index, inner in enumerate(value) for leaf in _leaves(inner, (*path, str(index)))]
    return [path]


def _override(config: DictConfig, argument: str, origins: Origins, cited: list[str]) -> DictConfig:
    key, equals, _ = argument.partition("=")
    if not equals or not key.strip() or any(not part.strip() for part in key.split(".")):
        cited.append(f"{COMMAND_LINE}: {argument}: an override is key=value, such as batch.micro_batch_size=4")
        return config
    try:
        override = OmegaConf.from_dotlist([argument])
        merged = OmegaConf.merge(config, override)
        plain = OmegaConf.to_container(override, resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, TypeError) as error:
        cited.append(f"{COMMAND_LINE}: {argument}: not a value: {getattr(error, 'problem', None) or _first_line(error)}")
        return config
    assert isinstance(merged, DictConfig)
    for leaf in _leaves(plain, ()):
        if len(leaf) >= len(key.split(".")):
            origins.overrides[leaf] = argument
    return merged


def _resolve(config: Any, path: KeyPath, problems: list[Problem]) -> Any:
    """OmegaConf's tree as plain values, each interpolation resolved; one that fails is a problem and comes out as None."""
    keys = range(len(config)) if isinstance(config, ListConfig) else list(config.keys())
    resolved: dict[str, Any] = {}
    for key in keys:
        here = (*path, str(key))
        try:
            if OmegaConf.is_missing(config, key):
                problems.append(Problem(here, "??? stands where a value must be given"))
                continue
            value = config[key]
        except (OmegaConfBaseException, ValueError) as error:
            problems.append(Problem(here, f"cannot be interpolated: {_first_line(error)}"))
            continue
        resolved[str(key)] = _resolve(value, here, problems) if isinstance(value, (DictConfig, ListConfig)) else value
    return list(resolved.values()) if isinstance(config, ListConfig) else resolved


def _standard_library(folder: str = "") -> str:
    """`${stdlib:}`: where the running Python keeps the source of its standard library."""
    import sysconfig

    return str(Path(sysconfig.get_path("stdlib")) / folder)


def load_recipe(arguments: Sequence[str], *, ranks: int | None) -> LoadedRecipe:
    """Loads, overrides, interpolates, decodes and checks.

    arguments: `recipe=NAME` or `recipe=FILE`, and overrides in OmegaConf's dot-list form, in any order.
    ranks: data-parallel ranks that will run it; None leaves out the rules that need them.
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
    path = _find(named[0])
    origins = Origins(file=_shown(path))
    problems: list[Problem] = []
    cited: list[str] = []
    config = _parse(_read(path, origins.file), origins, problems)
    if config.get("run") is not None and isinstance(config.get("run"), DictConfig) and "dir" not in config["run"]:
        config["run"]["dir"] = DEFAULT_RUN_DIR
    for argument in arguments:
        if not argument.startswith("recipe="):
            config = _override(config, argument, origins, cited)
    plain = _resolve(config, (), problems)
    decoder = Decoder(Recipe)
    recipe = decoder.section(Recipe, plain, ())
    named_already = {problem.path for problem in problems}
    problems += [problem for problem in decoder.problems if problem.path not in named_already]
    problems += check(recipe, ranks=ranks, unsound={problem.path for problem in problems})
    if problems or cited:
        raise RecipeError([origins.cite(problem) for problem in sorted(problems, key=lambda p: _order(p, origins))] + cited)
    return LoadedRecipe(recipe, origins)


def _order(problem: Problem, origins: Origins) -> tuple[bool, int]:
    """In the order of the file, the command line last."""
    near = next((origins.lines[problem.path[:n]] for n in range(len(problem.path), 0, -1) if problem.path[:n] in origins.lines), 0)
    return problem.path in origins.overrides, near


def to_yaml(recipe: Recipe) -> str:
    """The resolved recipe, every key written out; running it repeats the run."""
    return yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True, default_flow_style=None, width=100)


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value
