"""How typer reads the arguments of the subcommands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from launcher.errors import RecipeError, closest
from launcher.recipe.decode import answer, json_schema, keys
from launcher.recipe.other_names import KEYS_BY_NAME, option_meant
from launcher.recipe.schema import Recipe, Slurm
from launcher.recipe.section import size_in_bytes


def make_parent(path: Path, option: str) -> None:
    """Makes the folder of a file or folder that a command writes at its end, before its work.

    option: of the command, for messages. Raises RecipeError if that cannot be written to.
    """
    folder, problem = path.absolute().parent, "permission denied"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = str(error.strerror).lower()
    for above in folder.parents:
        if above.is_file():
            problem = f"{above} is a file, not a directory"
    if folder.is_file():
        problem = "it is a file, not a directory"
    if not (folder.is_dir() and os.access(folder, os.W_OK)):
        what = f"the folder {folder} cannot be made or written to: {problem}"
        raise RecipeError(f"command line: {option}={path}: {what}")


def make_parent_of_file(file: Path, option: str) -> None:
    """The same for a file, which must not be a folder."""
    if file.is_dir():
        raise RecipeError(f"command line: {option}={file}: is a folder; name a file in it")
    make_parent(file, option)


Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="recipe=NAME KEY=VALUE",
        default_factory=list,
        hidden=True,  # described by Command.format_epilog, without a type
    ),
]


def read_size(text: str) -> int:
    """Bytes from a size with a unit, as `80GiB`."""
    size = size_in_bytes(text)
    if size is None:
        raise typer.BadParameter(f"{text} is not a size with a unit, such as 80GiB or 80GB")
    return size


def option(
    help: str,
    metavar: str,
    *names: str,
    min: int = 1,
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """An option `--name value`. Its help names a default that the signature cannot hold. names: if
    it is not named as the parameter, or has an older name, too."""
    return typer.Option(
        *names,
        metavar=metavar,
        min=min if metavar == "N" else None,
        help=help,
        show_default="Default: " not in help,
        parser=parser,
    )


CheckedGpus = Annotated[
    int | None,
    option("Check the batch size for N GPUs per node.", "N", "--gpus", "--ranks"),
]
"""Of commands that start no ranks, so that they take the arguments of `launcher train`."""
CheckedNodes = Annotated[int, option("Nodes.", "N")]


def flag(name: str, help: str, *, earlier: str | None = None) -> Any:
    """An option without a value. earlier: a name that older versions gave it."""
    names = [name] if earlier is None else [name, earlier]
    return typer.Option(*names, help=help)


class Command(TyperCommand):
    """A command whose options may be written `name=value` as well as `--name value`."""

    sections = ("recipe", *Recipe.__dataclass_fields__)
    """What an override may begin with."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = _options(self)
        words, problems = [], []
        for argument in args:
            try:
                words += self._with_dashes(argument, options, ctx)
            except typer.TyperException as error:
                problems.append(error.format_message())
        if problems:
            raise typer.TyperException("\ncommand line: ".join(problems))
        given = {word.partition("=")[0] for word in words}
        required = [param for param in self.params if getattr(param, "required", False)]
        missing = [
            f"{param.name}={_metavar(param)}"
            for param in required
            if isinstance(param, TyperOption) and not given & {*param.opts}
        ]
        if missing and not given & {*ctx.help_option_names}:
            raise typer.TyperException(f"missing; give {' '.join(missing)}")
        return super().parse_args(ctx, words)

    def _with_dashes(self, argument: str, options: dict[str, TyperOption], ctx: Any) -> list[str]:
        name, equals, value = argument.partition("=")
        overrides = any(param.name == "overrides" for param in self.params)
        word = name.lstrip("-").replace("-", "_") if name.startswith("-") or equals else ""
        if word not in options and word not in self.sections:
            if (known_as := option_meant(word, options)) is not None:
                raise typer.TyperException(f"{argument}: did you mean {known_as}?")
            if overrides and (meant := answer(word)) is not None:
                raise typer.TyperException(f"{argument}: {meant}")
        section, dot, _ = name.removeprefix("--").partition(".")
        if overrides and dot and name.startswith("--") and section in self.sections:
            what = f"write {word.replace('-', '_')}={value or 'VALUE'}, without dashes"
            raise typer.TyperException(f"{argument}: {what}")
        if overrides and equals and section == "sweep" and "sweep" not in self.sections:
            takers = _listed(_commands_with("sweep", ctx))
            raise typer.TyperException(f"{argument}: {takers} sweeps")
        others = {
            *ctx.help_option_names,
            *(each for param in self.params for each in param.secondary_opts),
        }
        if name.startswith("--") and word and word not in options and name not in others:
            raise typer.TyperException(f"{argument}: {self._refusal(word, options, ctx)}")
        if not equals or not (name.isidentifier() or name in options):
            return [argument]
        if name not in options:
            sections = self.sections if overrides else ()
            if name in sections or os.path.exists(argument):  # the folder lr=0.1 of a sweep
                return [argument]
            raise typer.TyperException(f"{argument}: {self._refusal(name, options, ctx)}")
        known = options[name]
        if not known.is_flag:
            return [f"{known.opts[0]}={value}"]
        if value not in ("true", "false"):
            raise typer.TyperException(f"{argument}: must be true or false")
        return known.opts[:1] if value == "true" else known.secondary_opts[:1]

    def _refusal(self, name: str, options: dict[str, TyperOption], ctx: Any) -> str:
        """Why `name=value` is no argument: another command takes it, or it has no name, or it is
        misspelt."""
        sections = self.sections if any(param.name == "overrides" for param in self.params) else ()
        alone = [param for param in self.params if param.param_type_name == "argument"]
        if name.lower() in {word for param in alone for word in _names_of_argument(param)}:
            usage = " ".join(map(_metavar, alone))
            return f"give it without {name}=: launcher {self.name} {usage}"
        what = f"not an option of launcher {self.name}"
        inside = [".".join(path) for path in keys() if path[0] == name and path[1:]]
        if inside and name in sections:
            return f"{what}; give keys of the recipe, such as {inside[0]}=VALUE"
        near = closest(name, [*options, *sections])
        if sections and near is None and (key := closest(name, _names_of_keys(), similar=0.85)):
            return f"{what}; {answer(key)}"
        if takers := _commands_with(name, ctx):
            return f"{what}; {_listed(takers)} it"
        shown = dict.fromkeys(option.opts[0] for option in options.values())
        there = ", ".join([*shown, *sections[:1]]) or "none"
        return f"{what}{'' if near is None else f'; did you mean {near}?'}; there are {there}"

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if any(param.name == "overrides" for param in self.params):
            rows = [
                ("recipe=NAME", "A shipped recipe, or recipe=path/to/file.yaml."),
                ("KEY=VALUE", "Overrides a key of the recipe: batch.micro_batch_size=4."),
            ]
            with formatter.section("Arguments"):
                formatter.write_dl(rows)


def _options(command: TyperCommand) -> dict[str, TyperOption]:
    """The options of a command, by each of their names."""
    return {
        name.removeprefix("--").replace("-", "_"): param
        for param in command.params
        if isinstance(param, TyperOption)
        for name in param.opts
    }


def _names_of_keys() -> set[str]:
    """The last names of the keys of a recipe, and what other tools call them."""
    return {*KEYS_BY_NAME, *(path[-1] for path in keys())}


def _names_of_argument(param: Any) -> set[str]:
    """The names by which an argument without a name may be called."""
    if param.name == "overrides":
        return set()
    metavar = _metavar(param).lower()
    return {param.name, param.name.removesuffix("s"), metavar, metavar.removesuffix("_dir")}


def _metavar(param: Any) -> str:
    return str(param.metavar or param.name.upper())


def _commands_with(name: str, ctx: Any) -> list[str]:
    """The commands that take `name=value`, or `name.KEY=value`, and are no part of a recipe."""
    commands = ctx.find_root().command.commands.items()
    found = []
    for other, command in commands:
        names = {option.opts[0].removeprefix("--") for option in _options(command).values()}
        if any(param.name == "overrides" for param in command.params):
            names |= {*command.sections} - {*Recipe.__dataclass_fields__}
        if name.replace("_", "-") in names:
            found.append(other)
    return found


def _listed(commands: list[str]) -> str:
    """`launcher new, plan and submit take`."""
    *others, last = commands
    return f"launcher {', '.join(others)} and {last} take" if others else f"launcher {last} takes"


class NewCommand(Command):
    """Takes overrides of the recipe that it makes, and no recipe=NAME."""

    sections = (*Recipe.__dataclass_fields__,)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Arguments"):
            formatter.write_dl([("KEY=VALUE", "With from=FILE: sets a key of the recipe.")])


class SweepCommand(Command):
    """Takes sweep.KEY=A,B,C, too."""

    sections = (*Command.sections, "sweep")


class SubmitCommand(SweepCommand):
    """Describes the keys of the recipe's section slurm, too, which are arguments of `submit`."""

    sections = (*SweepCommand.sections, "gpus", *Slurm.__dataclass_fields__)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        super().format_epilog(ctx, formatter)
        keys = json_schema()["$defs"]["Slurm"]["properties"]
        with formatter.section("Arguments for Slurm (keys of the recipe's section slurm)"):
            rows = [
                (f"{name}=...", f"{key['description']}  [default: {json.dumps(key['default'])}]")
                for name, key in keys.items()
            ]
            formatter.write_dl(rows)
