"""How typer reads the arguments of the subcommands."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

from launcher.errors import suggestion
from launcher.recipe.decode import answer, json_schema
from launcher.recipe.schema import Recipe, Slurm
from launcher.recipe.section import size_in_bytes

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


def flag(name: str, help: str, *, earlier: str | None = None) -> Any:
    """An option without a value. earlier: a name that older versions gave it."""
    return typer.Option(*([name] if earlier is None else [name, earlier]), help=help)


class Command(TyperCommand):
    """A command whose options may be written `name=value` as well as `--name value`."""

    sections = ("recipe", *Recipe.__dataclass_fields__)
    """What an override may begin with."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {
            name.removeprefix("--").replace("-", "_"): param
            for param in self.params
            if isinstance(param, TyperOption)
            for name in param.opts
        }
        words, problems = [], []
        for argument in args:
            try:
                words += self._with_dashes(argument, options)
            except typer.TyperException as error:
                problems.append(error.format_message())
        if problems:
            raise typer.TyperException("\ncommand line: ".join(problems))
        return super().parse_args(ctx, words)

    def _with_dashes(self, argument: str, options: dict[str, TyperOption]) -> list[str]:
        name, equals, value = argument.partition("=")
        overrides = any(param.name == "overrides" for param in self.params)
        word = name.removeprefix("--").replace("-", "_") if name.startswith("--") or equals else ""
        if overrides and word not in options and (meant := answer(word)) is not None:
            if word not in self.sections:
                raise typer.TyperException(f"{argument}: {meant}")
        if not equals or not name.isidentifier():
            return [argument]
        if name not in options:
            sections = self.sections if overrides else ()
            if name in sections or os.path.exists(argument):  # the folder lr=0.1 of a sweep
                return [argument]
            shown = dict.fromkeys(option.opts[0] for option in options.values())
            there = ", ".join([*shown, *sections[:1]])
            what = f"not an option of launcher {self.name}{suggestion(name, [*options, *sections])}"
            raise typer.TyperException(f"{argument}: {what}; there are {there}")
        known = options[name]
        if not known.is_flag:
            return [f"{known.opts[0]}={value}"]
        if value not in ("true", "false"):
            raise typer.TyperException(f"{argument}: must be true or false")
        return known.opts[:1] if value == "true" else known.secondary_opts[:1]

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if any(param.name == "overrides" for param in self.params):
            rows = [
                ("recipe=NAME", "A shipped recipe, or recipe=path/to/file.yaml."),
                ("KEY=VALUE", "Overrides a key of the recipe: batch.micro_batch_size=4."),
            ]
            with formatter.section("Arguments"):
                formatter.write_dl(rows)


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
