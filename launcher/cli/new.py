"""`launcher new`: writes a recipe for a model, data and GPUs, with the fastest configuration that fits
by the plan."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from launcher.cli.app import flag, make_parent_of_file, option
from launcher.cli.new_from import new_from, write_text
from launcher.cli.plan import machine_to_plan
from launcher.console import bytes_as_text, program, two_digits, working
from launcher.errors import EXIT_DONE, EXIT_NO, RecipeError, suggestion
from launcher.models.quantization import quantization, why_not_dequantized
from launcher.planner.formatting import speed_text
from launcher.planner.machine import Machine
from launcher.recipe.derived import Choices, Derived
from launcher.recipe.load import load_recipe
from launcher.recipe.model_config import why_not_packed
from launcher.recipe.schema import Recipe, Strategy
from launcher.recipe.yaml_text import as_override, changes_between, overrides_between
from launcher.sources.finding import first_row, rows_as_text
from launcher.sources.hub import model_folder
from launcher.sources.layouts import (
    ATTACHMENTS,
    TOKEN_KINDS,
    guess,
    has_content,
    lost_meaning,
    no_layout,
)

if TYPE_CHECKING:
    from launcher.planner.candidates import Configuration
    from launcher.planner.search import SearchResult

_METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    "lora": {"lora.rank": 16, "lora.alpha": 32},
    "qlora": {"lora.rank": 16, "lora.alpha": 32, "lora.quantize": "nf4"},
    "dpo": {"preference.loss": "dpo", "preference.beta": 0.1},
    "kto": {"kto.beta": 0.1},
    "embedding": {"model.task": "embedding", "embedding.temperature": 0.05},
}
"""Of each method the keys that it adds."""
_ABOUT = {
    "run.epochs": "passes over the data",
    "data.sequence_length": "tokens; longer chats are dropped",
    "batch.global_batch_size": "sequences per optimizer step, over all ranks",
    "schedule.warmup_steps": "steps in which the learning rate rises",
    "batch.micro_batch_size": "of a rank and forward pass; the rest is accumulated",
    "data.kind": "by the columns of the data",
    "lora.quantize": "base weights in 4 bits",
    "checkpoint.export": "RUN_DIR/hf, for from_pretrained",
}
"""What keys are, for a reader who has not seen them."""
_SIZES = (
    "run.epochs",
    "data.validation_split",
    "data.sequence_length",
    "batch.global_batch_size",
    "optimizer.learning_rate",
    "schedule.warmup_steps",
    "evaluation.every_steps",
    "checkpoint.every_steps",
)
"""Keys that are `auto` until the rows have decided them."""
_ROWS = {
    "dpo": ("preference", "chosen and rejected"),
    "kto": ("unpaired", "a label that says whether the answer is good"),
    "embedding": ("retrieval", "a query and a positive"),
}
"""The rows of methods that do not learn from tokens: data.kind, and what the rows must have."""
_LESS = {"full": ("lora", "qlora"), "lora": ("qlora",)}
"""Methods that need less memory."""


def new(
    overrides: Annotated[
        list[str], typer.Argument(metavar="KEY=VALUE", default_factory=list, hidden=True)
    ],
    model: Annotated[
        str | None,
        option("Folder or hub id of the model.", "MODEL"),
    ] = None,
    data: Annotated[
        str | None,
        option(
            "Training data: a file, a pattern, a folder or a hub id.",
            "DATA",
        ),
    ] = None,
    method: Annotated[
        Literal["full", "lora", "qlora", "dpo", "kto", "embedding"],
        option("full | lora | qlora | dpo | kto | embedding: what is trained, and how.", "METHOD"),
    ] = "full",
    gpu: Annotated[
        str | None,
        option(
            "Name of the GPU, such as h100, or cpu. Default: the devices of this machine.", "NAME"
        ),
    ] = None,
    gpus: Annotated[
        int | None, option("GPUs per node. Default: those of this machine, or 1.", "N")
    ] = None,
    nodes: Annotated[int, option("Nodes.", "N")] = 1,
    sequence_length: Annotated[
        int | None,
        option("Tokens of a sequence. Default: as many as the longest row needs.", "N", min=2),
    ] = None,
    from_files: Annotated[
        str | None,
        option(
            "Config of axolotl, LLaMA-Factory, torchtune or TRL that becomes the recipe. Several, as "
            "A.yaml,B.yaml, are read as one.",
            "FILE",
            name="from",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        option("File for the recipe. Default: standard output.", "FILE"),
    ] = None,
    force: Annotated[
        bool, flag("--force", "Replace the file of out=, which may be edited.")
    ] = False,
) -> int:
    """Write a recipe with the fastest configuration that fits, to standard output.

    Needs no GPU. The memory of other configurations is in its comments. Where the hub cannot be
    reached, it knows the sizes of some thirty models.

    With from=FILE, the recipe is that of a config of another tool, with the batch for these GPUs.
    What means another thing here is in its comments; what is lost is printed.

    Exit status 3: nothing fits; it prints what would. With from=FILE: something that changes the
    training is lost.

    \b
    Example:
      launcher new model=Qwen/Qwen3-8B data=chat.jsonl gpu=h100 gpus=8 method=full out=my.yaml
      launcher new from=axolotl.yaml gpus=8 out=my.yaml
    """
    if out is not None:
        make_parent_of_file(out, "out")
        if out.exists() and not force:
            what = "the file exists; give another name, or --force to replace it"
            raise RecipeError(f"command line: out={out}: {what}")
    if from_files is not None:
        return new_from(
            from_files,
            ranks=(gpus or 1) * nodes,
            overrides=[
                *([f"data.sequence_length={sequence_length}"] if sequence_length else ()),
                *overrides,
            ],
            model=model,
            data=data,
            method=method,
            out=out,
        )
    if model is None or data is None:
        words = [] if model is not None else ["model=MODEL"]
        words += [] if data is not None else ["data=DATA"]
        raise RecipeError(f"command line: missing; give {' '.join(words)}, or from=FILE")
    if overrides:
        raise RecipeError(f"command line: {overrides[0]}: overrides go with from=FILE")
    machine, notes = machine_to_plan(gpu, gpus, nodes=nodes, others=", or cpu")
    if notes and machine.device == "cpu":
        print(*notes, sep="\n", file=sys.stderr)
    kind, attachments = _kind(data, method)
    wanted = Wanted(model, data, kind, method, sequence_length, attachments)
    draft = load_text(as_yaml(wanted.keys(machine)), machine)

    from launcher.planner import auto, sizes
    from launcher.planner.facts import Facts, Rows
    from launcher.planner.search import search_configurations
    from launcher.planner.speed import seconds_of_step

    with working("counting the rows"):
        planned, note = plannable(draft)
        rows = sizes.rows_here(planned)
        facts = Facts(ranks=machine.ranks, rows=rows)
        _, chosen = auto.resolve(planned, facts, auto.needing("recipe", "rows"))
        wanted = replace(wanted, choices={key: one for each in chosen for key, one in each.items()})
    with working("searching for the fastest configuration that fits"):
        draft = load_text(as_yaml(wanted.keys(machine)), machine)
        planned, note = plannable(draft)
        result = search_configurations(planned, machine)
        if result.best is None:
            print("\n".join(_nothing_fits(wanted, result, machine)), file=sys.stderr)
            return EXIT_NO
        if result.best.offloads:
            print("\n".join(_offloaded(wanted, result.best, machine)), file=sys.stderr)
    kept = dataclasses.replace(draft.data, packing=planned.data.packing)
    best = dataclasses.replace(result.best.recipe, data=kept)
    long = f"the usual sizes: {rows}" if isinstance(rows, str) else None
    if isinstance(rows, Rows):
        run = sizes.run_length(best, rows)
        seconds = seconds_of_step(result.best.seconds, best, run.tokens)
        long = run.text(seconds, device=machine.device)
    file = "THIS_FILE" if out is None else str(out)
    header = _header(wanted, result, machine, note, file, long=str(long))
    text = "\n".join([*header, as_yaml(wanted.keys(machine, best))])
    load_text(text, machine)
    write_text(text, out)
    print(long, file=sys.stderr)
    if out is not None:
        print(f"next: {program()} train recipe={shlex.quote(str(out))}", file=sys.stderr)
    return EXIT_DONE


def load_text(text: str, machine: Machine) -> Recipe:
    """The recipe in a text. Raises RecipeError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "new.yaml")
        file.write_text(text, encoding="utf-8")
        try:
            return load_recipe([f"recipe={file}"], ranks=machine.ranks).recipe
        except RecipeError as error:
            where = rf"{re.escape(str(file))}(:\d+)?"
            lines = (re.sub(where, "the new recipe", problem) for problem in error.problems)
            raise RecipeError(list(lines)) from None


def _kind(data: str, method: str) -> tuple[str, list[str]]:
    """data.kind, and the kinds of attachments of rows, by the first row of the data. Raises
    RecipeError if the method is for others."""
    first = first_row([data], hub=True)
    if first is None:
        if (file := rows_as_text([data])) is not None:
            what = "its lines are JSON objects, and its name says that it is text: name it .jsonl"
            raise RecipeError(f"command line: data={data}: {file}: {what}")
        return "text", []
    row, where = first[1], f"command line: data={data}"
    wanted = (_ROWS[method][0],) if method in _ROWS else TOKEN_KINDS
    found = guess(row, {}, kinds=wanted)
    if found is None:
        what = "a recipe of yours can name them (docs/data.md)"
        raise RecipeError(f"{where}: {no_layout(row, {})}; {what}")
    columns = {kind: found.get(nouns) for kind, nouns in ATTACHMENTS.items()}
    seen = [kind for kind, column in columns.items() if column and has_content(row.get(column))]
    if (problem := lost_meaning(row, found, attachments=seen)) is not None:
        raise RecipeError(f"{where}: {problem}; a recipe of yours can have that key (docs/data.md)")
    kind = found.layout.kind
    if kind not in wanted:
        if method in _ROWS:
            what = f"method={method} needs {_ROWS[method][1]}"
        else:
            what = "chosen and rejected are for method=dpo"
        raise RecipeError(f"{where}: columns {', '.join(row)}: {what}")
    return kind, seen


def plannable(recipe: Recipe) -> tuple[Recipe, str]:
    """The recipe with a known config in place of a model that is not here, and without packing if
    the model cannot have it; and a note or an empty text. Raises RecipeError."""
    planned, config, note = _with_config(recipe)
    if (problem := why_not_dequantized(quantization(config))) is not None:
        raise RecipeError(f"command line: model={recipe.model.path}: {problem}")
    if why_not_packed(config) is not None:
        unpacked = dataclasses.replace(planned.data, packing=False)
        planned = dataclasses.replace(planned, data=unpacked)
    return planned, note


def _with_config(recipe: Recipe) -> tuple[Recipe, Mapping[str, Any], str]:
    """The recipe with a known config if the model is not here, the config, and a note."""
    from launcher.planner.known_models import known_models, with_known_config

    path = str(recipe.model.path)
    planned, note = with_known_config(recipe)
    config = planned.model.config
    try:
        if config is None:
            folder = model_folder(path, key="command line: model", weights=False)
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except RecipeError as error:
        raise RecipeError(f"{error}{suggestion(path, known_models())}") from None
    return planned, config, note


@dataclass(frozen=True)
class Wanted:
    """What to train, and how."""

    model: str
    data: str
    kind: str
    method: str
    sequence_length: int | None
    """None: as many tokens as the longest row needs."""
    attachments: Sequence[str] = ()
    """The kinds of attachments of rows."""
    choices: Choices = field(default_factory=dict)
    """The sizes that the rows decide; none yet: they are `auto`."""

    def command(self, machine: Machine) -> str:
        """The command that asks for it."""
        words = [f"model={self.model}", f"data={self.data}", f"method={self.method}"]
        words += [f"gpu={machine.name.lower().replace(' ', '-')}", f"gpus={machine.gpus_per_node}"]
        words += [f"nodes={machine.nodes}"] if machine.nodes > 1 else []
        if self.sequence_length is not None:
            words.append(f"sequence_length={self.sequence_length}")
        return f"{program()} new {shlex.join(words)}"

    def keys(self, machine: Machine, best: Recipe | None = None) -> Choices:
        """The keys of the recipe, and what each is or why it has its value. best: what the plan has
        chosen; None: a configuration that every model has."""
        model, data = (
            re.sub(r"\W+", "_", name.lower()).strip("_")
            for name in (Path(self.model).name, Path(self.data).name.split(".")[0])
        )
        values = {
            "run.name": "_".join(filter(None, [model or "model", self.method, data])),
            "model.path": self.model,
            "data.kind": self.kind,
            "data.train": [self.data],
            **dict.fromkeys(_SIZES, "auto"),
            "batch.micro_batch_size": 1,
            "optimizer.weight_decay": 0.0,
            "checkpoint.export": "at_end",
            **_METHODS[self.method],
        }
        if machine.device == "cpu":
            values["run.device"] = "cpu"
        if best is not None:
            values["strategy.kind"] = best.strategy.kind
            values |= dict(changes_between(Strategy(), best.strategy, "strategy"))
            checkpointing = best.activation_checkpointing
            values |= dict(changes_between(None, checkpointing, "activation_checkpointing"))
            values["batch.micro_batch_size"] = best.batch.micro_batch_size
        chosen = {key: Derived(value, _ABOUT.get(key, "")) for key, value in values.items()}
        if self.kind == "text":
            chosen["data.sequence_length"] = Derived("auto", "tokens")
        if best is not None and best.model.compile:
            chosen["model.compile"] = Derived("auto", "torch.compile on GPUs")
        if best is not None and not best.data.packing:
            why = "this model cannot keep packed documents apart"
            chosen["data.packing"] = Derived(False, why)
        for nouns in (nouns for kind, nouns in ATTACHMENTS.items() if kind in self.attachments):
            chosen[f"{nouns}.train"] = Derived("none", f"or projector, or all: docs/{nouns}.md")
        for key, choice in self.choices.items():
            about = chosen[key].reason if key in _SIZES else ""
            why = "; ".join(text for text in (about, choice.reason) if text)
            chosen[key] = Derived(choice.value, why)
        if self.sequence_length is not None:
            what = _ABOUT["data.sequence_length"]
            chosen["data.sequence_length"] = Derived(self.sequence_length, what)
        return chosen


def as_yaml(chosen: Choices) -> str:
    """A recipe with these keys, and with the reasons as comments."""
    plain: dict[str, Any] = {name: {} for name in Recipe.__dataclass_fields__}
    for key, choice in chosen.items():
        *above, last = key.split(".")
        place = plain
        for part in above:
            place = place.setdefault(part, {})
        place[last] = choice.value
    lines = []
    for section, values in plain.items():
        lines += [f"{section}:"] if values else []
        for name, value in values.items():
            why = chosen.get(f"{section}.{name}")
            reason = "" if why is None else why.reason
            written = as_override(name, value).partition("=")[2]
            lines.append(f"  {name}: {written}" + (f"  # {reason}" if reason else ""))
    return "\n".join(lines) + "\n"


def _header(
    wanted: Wanted, result: SearchResult, machine: Machine, note: str, file: str, *, long: str
) -> Iterator[str]:
    """file: in which the recipe is. long: how long the run is."""
    best = result.best
    assert best is not None
    assert machine.memory is not None
    where = f"gpus={machine.gpus_per_node}"
    start = f"{program()} train recipe={shlex.quote(file)} {where}"
    if machine.nodes > 1:
        start = f"{program()} submit recipe={shlex.quote(file)} nodes={machine.nodes} {where}"
    yield f"# {wanted.command(machine)}"
    yield "# wrote this recipe. To start it:"
    yield f"#   {start}"
    if best.offloads:
        yield f"# A node needs {bytes_as_text(best.plan.host.total)} of host memory by plan."
    on_cpu = machine.device == "cpu"  # whose speed is only assumed
    needs = f"{bytes_as_text(best.plan.needed)} of {bytes_as_text(machine.memory)} by plan"
    speed = speed_text(best.tokens_per_second, best.tokens_per_second_range)
    yield f"# {'A rank' if on_cpu else 'A GPU'} needs {needs}, which is not measured" + (
        "" if on_cpu else f": {speed}"
    )
    yield f"# {long}"
    others = [
        other
        for other in result.configurations
        if other.recipe not in (best.recipe, result.written.recipe) and other.plan.fits is not False
    ]
    if others:
        yield "# What else fits, with the words to add to the command:"
    for other in others:
        words = shlex.join(overrides_between(best.recipe, other.recipe))
        speed = "" if on_cpu else f", {two_digits(other.tokens_per_second)} tokens/s"
        yield f"#   {bytes_as_text(other.plan.needed)}{speed}: {words}"
    if note:
        yield f"# {note}"


def _offloaded(wanted: Wanted, best: Configuration, machine: Machine) -> Iterator[str]:
    """What a configuration with CPU offload takes, and what fits without."""
    host = bytes_as_text(best.plan.host.total)
    yield (
        f"note: {wanted.model} with method={wanted.method} fits with CPU offload only, which is slow: "
        f"by plan a node needs {host} of host memory."
    )
    fits = [_first_fit(changes, offload=False) for changes in _changes(wanted, machine)]
    if any(fits):
        yield "What fits without it:"
    yield from (f"  {command}" for command in fits if command)


def _nothing_fits(wanted: Wanted, result: SearchResult, machine: Machine) -> Iterator[str]:
    least = min(row.plan.needed for row in result.configurations)
    memory = f" of {bytes_as_text(machine.memory)}" if machine.memory is not None else ""
    yield (
        f"{wanted.model} with method={wanted.method} does not fit: each of {machine.ranks} "
        f"{machine.name}{memory} needs at least {bytes_as_text(least)}."
    )
    fits = [_first_fit(changes) for changes in _changes(wanted, machine)]
    yield "What fits:" if any(fits) else "No change of method, length or number of GPUs helps."
    yield from (f"  {command}" for command in fits if command)


def _changes(wanted: Wanted, machine: Machine) -> Iterator[list[tuple[Wanted, Machine]]]:
    """Lists of changes that help more and more: of the method, of the length, of the GPUs."""
    from launcher.planner.search import NODES, SHORTEST

    yield [(replace(wanted, method=method), machine) for method in _LESS.get(wanted.method, ())]
    chosen = wanted.choices.get("data.sequence_length", Derived(4096, "")).value
    lengths = [(wanted.sequence_length or chosen) // 2**n for n in range(1, 20)]
    yield [
        (replace(wanted, sequence_length=length), machine)
        for length in lengths
        if length >= SHORTEST
    ]
    per_node = [(1, count) for count in (2, 4, 8) if count > machine.gpus_per_node]
    count = max(machine.gpus_per_node, 8)
    sizes = per_node if machine.nodes == 1 else []
    sizes += [(nodes, count) for nodes in NODES if nodes > machine.nodes]
    yield [(wanted, replace(machine, nodes=n, gpus_per_node=gpus)) for n, gpus in sizes]


def _first_fit(changes: Iterable[tuple[Wanted, Machine]], *, offload: bool = True) -> str | None:
    """The command of the first change that fits by the estimate; `offload`: also with CPU offload."""
    from launcher.planner.search import smallest_that_fits

    for wanted, machine in changes:
        size = -(-32 // machine.ranks) * machine.ranks  # the rows decide it when it is asked for
        choices = wanted.choices | {"batch.global_batch_size": Derived(size, "")}
        wanted = replace(wanted, choices=choices)
        recipe, _ = plannable(load_text(as_yaml(wanted.keys(machine)), machine))
        found = smallest_that_fits(recipe, machine)
        if found is not None and (offload or found.strategy.cpu_offload is None):
            return wanted.command(machine)
    return None
