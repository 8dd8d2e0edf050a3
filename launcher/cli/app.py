"""How typer reads and describes the subcommands that `main.py` declares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from launcher.recipe.find import recipe_names


def _complete(incomplete: str) -> list[str]:
    from launcher.cli.options import complete_override

    return complete_override(incomplete)


Overrides = Annotated[
    list[str],
    typer.Argument(
        metavar="recipe=NAME KEY=VALUE",
        default_factory=list,
        hidden=True,  # described by Command.format_epilog
        autocompletion=_complete,
    ),
]


def option(help: str, metavar: str | None = None, *, min: int = 1) -> Any:
    """An option `--name value`. Its help names a default that the signature cannot hold."""
    shows_default = "Default: " not in help
    bound = min if metavar == "N" else None
    return typer.Option(metavar=metavar, min=bound, help=help, show_default=shows_default)


def flag(name: str, help: str) -> Any:
    """An option without a value."""
    return typer.Option(name, help=help)


class Command(TyperCommand):
    """A command whose options may be written `name=value` as well as `--name value`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from launcher.cli.options import with_dashes

        options = {
            str(param.name): bool(param.default) if param.is_flag else None
            for param in self.params
            if isinstance(param, TyperOption)
        }
        overrides = any(param.name == "overrides" for param in self.params)
        return super().parse_args(
            ctx, with_dashes(str(self.name), args, options, overrides=overrides)
        )

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        if any(param.name == "overrides" for param in self.params):
            with formatter.section("Arguments"):
                formatter.write_dl(
                    [
                        ("recipe=NAME", "A shipped recipe, or recipe=path/to/file.yaml."),
                        ("KEY=VALUE", "Overrides a key of the recipe: batch.micro_batch_size=4."),
                    ]
                )


class SubmitCommand(Command):
    """Describes the keys of the recipe's section slurm, too, which are arguments of `submit`."""

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        from launcher.recipe.decode import json_schema

        super().format_epilog(ctx, formatter)
        keys = json_schema()["$defs"]["Slurm"]["properties"]
        with formatter.section("Arguments for Slurm (keys of the recipe's section slurm)"):
            formatter.write_dl(
                [
                    (f"{name}=...", f"{key['description']}  [default: {_as_yaml(key['default'])}]")
                    for name, key in keys.items()
                ]
            )


def _as_yaml(value: Any) -> str:
    return "null" if value is None else str(value).lower()


class _Group(TyperGroup):
    """Lists the commands with the whole first line of their help, and the shipped recipes."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of `main.py`

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        first_lines = {name: command.help or "" for name, command in self.commands.items()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, text.split("\n")[0]) for name, text in first_lines.items()])

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        formatter.write_paragraph()
        formatter.write_text(f"Shipped recipes: {', '.join(recipe_names())}.")


app = typer.Typer(
    cls=_Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def command(function: Callable[..., int]) -> Callable[..., int]:
    """Adds a subcommand."""
    return app.command(cls=Command)(function)
