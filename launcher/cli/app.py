"""The syntax of the command line: values are written `name=value`, and switches `--name`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperOption

from launcher.cli.completion import completions
from launcher.errors import RecipeError, closest
from launcher.recipe.decode import answer, json_schema, keys
from launcher.recipe.other_names import KEYS_BY_NAME, option_meant
from launcher.recipe.schema import Recipe, Slurm
from launcher.recipe.section import size_in_bytes


def make_parent(path: Path, option: str) -> None:
    """Makes the folder of a file or folder that a command writes at its end, before its work.

    option: of the command, for messages. Raises RecipeError if that cannot be written to.
    """
    folder = path.absolute().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        problem = None if os.access(folder, os.W_OK) else "permission denied"
    except (FileExistsError, NotADirectoryError):
        problem = "a part of it is a file, not a directory"
    except OSError as error:
        problem = str(error.strerror).lower()
    if problem is not None:
        what = f"the folder {folder} cannot be made or written to: {problem}"
        raise RecipeError(f"command line: {option}={path}: {what}")


def make_parent_of_file(file: Path, option: str) -> None:
    """The same for a file, which must not be a folder."""
    if file.is_dir():
        raise RecipeError(f"command line: {option}={file}: is a folder; name a file in it")
    make_parent(file, option)


Overrides = Annotated[list[str], typer.Argument(default_factory=list, hidden=True)]
"""`recipe=NAME` and `KEY=VALUE`, which Command.format_epilog describes."""


def read_size(text: str) -> int:
    """Bytes from a size with a unit, as `80GiB`."""
    size = size_in_bytes(text)
    if size is None:
        raise typer.BadParameter(f"{text} is not a size with a unit, such as 80GiB or 80GB")
    return size


def option(
    help: str,
    metavar: str,
    *,
    name: str | None = None,
    min: int = 1,
    parser: Callable[[str], Any] | None = None,
) -> Any:
    """An argument `name=value`. Its help names a default that the signature cannot hold. name: if it
    is not that of the parameter."""
    return typer.Option(
        *([] if name is None else [f"--{name}"]),
        metavar=metavar,
        min=min if metavar == "N" else None,
        help=help,
        show_default="Default: " not in help,
        parser=parser,
    )


def flag(name: str, help: str) -> Any:
    """A switch, `--name`."""
    return typer.Option(name, help=help)


CheckedGpus = Annotated[int | None, option("Check the batch size for N GPUs per node.", "N")]
"""Of commands that start no ranks, so that they take the arguments of `launcher train`."""
CheckedNodes = Annotated[int, option("Nodes.", "N")]


class Word(NamedTuple):
    """A word that a shell offers, as typer's completion takes it."""

    value: str
    help: str | None = None


class Command(TyperCommand):
    """A command whose values are written `name=value`, and whose switches `--name`."""

    sections: tuple[str, ...] = ()
    """What an override may begin with."""
    described: tuple[tuple[str, str], ...] = ()
    """Overrides in the help."""

    def values(self) -> dict[str, TyperOption]:
        """The options with a value, by name."""
        return {_word(one.opts[0]): one for one in _options(self) if not one.is_flag}

    def switches(self) -> list[str]:
        """The options without a value, as they are written."""
        flags = [one for one in _options(self) if one.is_flag]
        return [name for one in flags for name in (*one.opts, *one.secondary_opts)]

    def get_params(self, ctx: Any) -> Any:
        """The parameters; none while a shell completes, so that `shell_complete` is asked."""
        return [] if ctx.resilient_parsing else super().get_params(ctx)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """The words that the word before the cursor may become."""
        words = completions(self.values(), self.switches(), self.sections, ctx.args, incomplete)
        return list(map(Word, words))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Gives typer `name=value` as `--name=value`. Raises TyperException with all problems."""
        if ctx.resilient_parsing:  # a shell completes
            ctx.args = args
            return args
        values = self.values()
        words: list[str] = []
        problems: list[str] = []
        written = {*self.switches(), *ctx.help_option_names}
        for argument, following in zip(args, [*args[1:], "-"], strict=False):
            name, equals, value = argument.partition("=")
            if equals and name in values:
                words.append(f"{values[name].opts[0]}={value}")
            elif argument in written or self._is_positional(argument):
                words.append(argument)
            else:
                alone = equals or following.startswith("-") or "=" in following
                given = value if alone else following
                problems.append(f"{argument}: {self._refusal(name, given, ctx)}")
        if problems:
            raise typer.TyperException("\ncommand line: ".join(problems))
        try:
            return super().parse_args(ctx, words)
        except typer.TyperException as error:
            raise typer.TyperException(_message(error, args)) from None

    def _is_positional(self, argument: str) -> bool:
        """Whether it is an override, or an argument without a name."""
        name, equals, _ = argument.partition("=")
        section, dot, _ = name.partition(".")
        if argument.startswith("-"):
            return False
        if not equals or name in self.sections or os.path.exists(argument):
            return True  # a run folder of a sweep is named lr=0.1
        return bool(dot) and (section in self.sections or section != "sweep")

    def _refusal(self, name: str, value: str, ctx: Any) -> str:
        """Why an argument is none, and what to write."""
        word, sections = _word(name), self.sections
        own = {_word(switch): switch for switch in self.switches()}
        for each, one in self.values().items():
            own[each] = f"{each}={value}" if value else _form(one)
        forms = {each: f"{each}={value or 'VALUE'}" for each in sections}
        for path in reversed(list(keys())):  # of a section its first key
            if path[0] in forms and path[1:]:
                forms[path[0]] = f"{'.'.join(path)}=VALUE"
        forms |= own
        section, dot, _ = word.partition(".")
        if dot and section in sections:
            forms[word] = f"{word}={value or 'VALUE'}"
        if word in forms:
            return f"write {forms[word]}" + ", or leave it out" * (value == "false")
        if (known := option_meant(word, own)) is not None:
            return f"did you mean {forms[known]}?"
        if sections and (meant := answer(word)) is not None:
            return meant
        if word in ("run", "run_dir", "folder") and not sections:
            return f"give it without {word}=: launcher {self.name} {value or 'RUN_DIR'}"
        what = f"not an argument of launcher {self.name}"
        near = closest(word, forms)
        other_names = {*KEYS_BY_NAME, *(path[-1] for path in keys())}
        if sections and near is None and (key := closest(word, other_names, similar=0.85)):
            return f"{what}; {answer(key)}"
        if takers := _commands_with(section, ctx):
            *others, last = takers
            listed = f"{', '.join(others)} and {last} take" if others else f"{last} takes"
            return f"{what}; launcher {listed} it"
        hint = "" if near is None else f"; did you mean {forms[near]}?"
        there = ", ".join([*(f"{one}=" for one in self.values()), *self.switches(), *sections[:1]])
        return f"{what}{hint}; there are {there}"

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The arguments that are needed, and the forms of the others."""
        needed = [_form(param) for param in self.params if param.required]
        needed += [name for name, _ in self.described if name == "recipe=NAME"]
        return [*needed, "[NAME=VALUE ...]", "[--SWITCH ...]"]

    def descriptions(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Arguments and switches as they are written, with what they do."""
        rows: dict[str, list[tuple[str, str]]] = {"Arguments": [*self.described], "Switches": []}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                switch = isinstance(param, TyperOption) and param.is_flag
                row = record if switch else (_form(param), record[1])
                rows["Switches" if switch else "Arguments"].append(row)
        return {title: described for title, described in rows.items() if described}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Writes the help of arguments and switches."""
        for title, rows in self.descriptions(ctx).items():
            with formatter.section(title):
                formatter.write_dl(rows)


def _options(command: TyperCommand) -> list[TyperOption]:
    return [param for param in command.params if isinstance(param, TyperOption)]


def _word(name: str) -> str:
    """An option's name as that of a value: `--gpu-memory` is `gpu_memory`."""
    return name.lstrip("-").replace("-", "_")


def _form(param: Any) -> str:
    """How an argument is written: RUN_DIR, or step=N."""
    what = str(param.metavar or param.name.upper())
    return f"{_word(param.opts[0])}={what}" if isinstance(param, TyperOption) else what


def _message(error: typer.TyperException, args: list[str]) -> str:
    """What typer refuses, with the argument as it was written."""
    if (param := getattr(error, "param", None)) is None:
        message = error.format_message()
        return message[:1].lower() + message[1:]
    if not (message := getattr(error, "message", "")):  # typer has none where a value is missing
        return f"missing; give {_form(param)}"
    name = _form(param).partition("=")[0]
    written = next((word for word in args if word.startswith(f"{name}=")), name)
    return f"{written}: {message.removeprefix('Value error, ')}"


def _commands_with(name: str, ctx: Any) -> list[str]:
    """The commands that take an argument or a switch of this name, which is no section of a
    recipe."""
    return [
        other
        for other, command in ctx.find_root().command.commands.items()
        if name in command.values()
        or name in map(_word, command.switches())
        or name in {*command.sections} - {*Recipe.__dataclass_fields__}
    ]


class RecipeCommand(Command):
    """A command on a recipe, of which it takes overrides."""

    sections = ("recipe", *Recipe.__dataclass_fields__)
    described = (
        ("recipe=NAME", "A shipped recipe, or recipe=path/to/file.yaml."),
        ("KEY=VALUE", "Sets a key of the recipe: batch.micro_batch_size=4."),
    )


class NewCommand(Command):
    """Takes overrides of the recipe that it makes, and no recipe=NAME."""

    sections = tuple(Recipe.__dataclass_fields__)
    described = (("KEY=VALUE", "With from=FILE: sets a key of the recipe."),)


class SweepCommand(RecipeCommand):
    """Takes sweep.KEY=A,B,C, too."""

    sections = (*RecipeCommand.sections, "sweep")


class SubmitCommand(SweepCommand):
    """Takes the keys of the recipe's section slurm without its name, too; the number of GPUs is
    `gpus`, as in other commands."""

    slurm_keys = tuple(name for name in Slurm.__dataclass_fields__ if name != "gpus_per_node")
    sections = (*SweepCommand.sections, *slurm_keys)

    def descriptions(self, ctx: Any) -> dict[str, list[tuple[str, str]]]:
        """Those of the keys of the section, too."""
        described = json_schema()["$defs"]["Slurm"]["properties"]
        rows = [
            (f"{name}=...", f"{key['description']}  [default: {json.dumps(key['default'])}]")
            for name, key in described.items()
            if name in self.slurm_keys
        ]
        title = "Arguments for Slurm (keys of the recipe's section slurm)"
        return super().descriptions(ctx) | {title: rows}
