"""`launcher completion bash|zsh|fish`: prints the script with which a shell completes commands.

The script has all words in it. So a completion starts no process, which takes seconds where Python
is on a network file system.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup, TyperOption

from launcher.cli.app import SweepCommand
from launcher.distributed.hardware import GPUS
from launcher.errors import EXIT_DONE
from launcher.recipe.decode import dotted, subsection
from launcher.recipe.find import recipe_names
from launcher.recipe.schema import Recipe, Slurm, Source
from launcher.recipe.section import Section

_BASH = """\
_launcher() {
  local word=${COMP_LINE:0:COMP_POINT} command=${COMP_WORDS[1]} list= values= prefix=
  local keys='@keys' key_values='@values'
  word=${word##*[[:space:]]}
@cases
  (( COMP_CWORD == 1 )) && list='@commands'
  [[ $word == *=* ]] && list=$values
  COMPREPLY=($(compgen -P "$prefix" -W "$list" -- "${word#"$prefix"}"))
  [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
  # Where = separates words, the shell replaces only what follows it
  [[ $word == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
}
complete -o bashdefault -o default -F _launcher launcher
"""
_ZSH = """\
_launcher() {
  local word=$PREFIX command=${words[2]} list= values= prefix= keys='@keys' key_values='@values'
@cases
  (( CURRENT == 2 )) && list='@commands'
  [[ $word == *=* ]] && list=$values
  local -a found=(${=list})
  found=($prefix${^found})
  compadd -S '' -- ${(M)found:#*[=.]}
  compadd -- ${found:#*[=.]}
  (( compstate[nmatches] )) && return
  compset -P '*='
  _files
}
compdef _launcher launcher
"""
_FISH = r"""
function __launcher_words
    set -l command (commandline -opc)[2]
    set -l keys @keys
    set -l key_values @values
    set -l list
    set -l values
    set -l prefix
    set -l word (commandline -ct)
@cases
    set -q command[1]; or set list @commands
    string match -q '*=*' -- $word; and set list $values
    printf "$prefix%s\n" $list
end
complete -c launcher -a '(__launcher_words)'
# Files only where no word fits
complete -c launcher -f -n 'string match -q -- (commandline -ct)\* (__launcher_words)'
"""


def completion(
    context: typer.Context,
    shell: Annotated[Literal["bash", "zsh", "fish"], typer.Argument(help="The shell.")],
) -> int:
    """Print the script that completes commands, options, recipes, keys and values in a shell.

    \b
    Example:
      launcher completion bash
    """
    group = typing.cast(TyperGroup, context.find_root().command)
    names, values = _split({"recipe": recipe_names()} | dict(_keys(Recipe)))
    script = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}[shell]
    for place, words in {
        "@keys": names,
        "@values": values,
        "@commands": list(group.commands),
    }.items():
        script = script.replace(place, " ".join(words))
    print(script.replace("@cases", "\n".join(_cases(group, fish=shell == "fish"))), end="")
    return EXIT_DONE


def _cases(group: TyperGroup, *, fish: bool) -> Iterator[str]:
    """The statement that sets `list` (words without a value) and `values` for a subcommand."""
    yield '    switch "$command:$word"' if fish else "  case $command:$word in"
    for name, command in group.commands.items():
        options = [param for param in command.params if isinstance(param, TyperOption)]
        hints, known = typing.get_type_hints(command.callback), {}
        for option in options:
            if not option.is_flag:
                word = option.opts[0].removeprefix("--").replace("-", "_")
                known[word] = _choices(word, hints[option.name])
        names, values = _split(known | (dict(_keys(Slurm)) if name == "submit" else {}))
        names += [option.opts[0] for option in options]
        names.append("--help")
        if any(param.name == "overrides" for param in command.params):
            names, values = [*names, "$keys"], [*values, "$key_values"]
            if isinstance(command, SweepCommand):
                names.append("sweep.")
                swept = {"list": "$keys", "values": "$key_values", "prefix": "sweep."}
                yield from _case(f"{name}:sweep.*", fish, **swept)
        elif not options:  # the shell completes files, or the names of shells
            hint = hints[command.params[0].name] if command.params else None
            names = list(_values(hint))
        yield from _case(f"{name}:*", fish, list=" ".join(names), values=" ".join(values))
    yield "    end" if fish else "  esac"


def _case(pattern: str, fish: bool, **sets: str) -> Iterator[str]:
    """The lines that set variables where the pattern matches."""
    if fish:
        yield f"        case '{pattern}'"
        yield from (f"            set {name} {text}" for name, text in sets.items())
    else:
        yield f"    {pattern}) " + " ".join(f'{n}="{text}"' for n, text in sets.items()) + " ;;"


def _split(known: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Each name with a =, and with each of its values."""
    return [f"{name}=" for name in known], [
        f"{name}={value}" for name, values in known.items() for value in values
    ]


def _choices(name: str, kind: Any) -> list[str]:
    """The values that an option of this type may have, if they are few."""
    if name == "gpu":
        return [gpu.name.lower().replace(" ", "-") for gpu in GPUS]
    return [value for value in _values(kind) if value != "null"]


def _keys(section: type[Section], path: tuple[str, ...] = ()) -> Iterator[tuple[str, list[str]]]:
    """Every key and the values that it may have, if they are few. Of sections that cannot be null
    only their keys."""
    for name, field in section.__dataclass_fields__.items():
        inner, values = subsection(section, name), list(dict.fromkeys(_values(field.type)))
        if inner in (None, Source) or values:
            choices = [] if inner is Source or (values == ["null"] and inner is None) else values
            yield dotted((*path, name)), choices
        if inner not in (None, Source):
            yield from _keys(inner, (*path, name))


def _values(kind: Any) -> Iterator[str]:
    """The values of a type, as YAML."""
    inside = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        yield from (value if isinstance(value, str) else json.dumps(value) for value in inside)
    elif typing.get_origin(kind) is Annotated:
        yield from _values(inside[0])
    elif kind is bool:
        yield from ("true", "false")
    elif kind is type(None):
        yield "null"
    elif typing.get_origin(kind) in (typing.Union, types.UnionType):
        for one in inside:
            yield from _values(one)
