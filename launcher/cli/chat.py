"""`launcher chat`: talks with the model of a run."""

from __future__ import annotations

import contextlib
import io
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from launcher.checkpoint.files import DamagedCheckpointError
from launcher.cli.app import flag, option
from launcher.cli.export import checkpoint_of_step, find_checkpoint
from launcher.cli.requests import Terminated
from launcher.console import configure_logging
from launcher.errors import EXIT_DONE, RecipeError
from launcher.recipe.functions import TRUST_HELP
from launcher.sources.hub import is_fetched, model_folder, no_such_name
from launcher.sources.layouts import ATTACHMENTS, with_article

if TYPE_CHECKING:
    from launcher.cli.chat_model import ChatModel, Sampling


_CONTROL = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}")
"""Characters of an answer that a terminal would obey, but for tabs and line breaks."""


def chat(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN_DIR",
            help="Folder of a run, one of its checkpoints, or a Hugging Face folder or hub id.",
        ),
    ],
    step: Annotated[
        int | None, option("Checkpoint of this step. Default: the newest.", "N")
    ] = None,
    temperature: Annotated[
        float, option("Of the sampling; 0: always the most likely token.", "T")
    ] = 0.7,
    top_p: Annotated[
        float, option("Sample from the most likely tokens with this probability.", "P")
    ] = 0.95,
    max_new_tokens: Annotated[int, option("Tokens of an answer at most.", "N")] = 512,
    system: Annotated[
        str | None, option("System prompt. Default: data.system of the run.", "TEXT")
    ] = None,
    plain: Annotated[
        bool | None,
        flag(
            "--plain/--template",
            "Complete texts, or use the chat template. Default: as the run did.",
        ),
    ] = None,
    cpu: Annotated[bool, flag("--cpu", "Use the CPU although there is a GPU.")] = False,
    trust_run: Annotated[bool, flag("--trust-run", TRUST_HELP)] = False,
) -> int:
    """Talk with the model of a run: a line for each turn, from the terminal or a pipe.

    It answers with the chat template and the system prompt of the run, or under the headings of
    Alpaca's text if it was trained on them; a model that was trained without either completes each
    line. The first line says which. /image PATH shows an image with the next line, to a model of
    images and text, and /video PATH a video. /reset begins another conversation. Ctrl-C stops an answer, Ctrl-D ends.

    \b
    Example:
      launcher chat runs/quickstart temperature=0
    """
    configure_logging(stream="stderr")
    if not 0 <= temperature < math.inf or not 0 < top_p <= 1:
        wrong, limits = "temperature", "a number of at least 0"
        if 0 <= temperature < math.inf:
            wrong, limits = "top_p", "above 0 and at most 1"
        raise RecipeError(f"command line: {wrong} must be {limits}")
    if system is not None and any("\ud800" <= character <= "\udfff" for character in system):
        raise RecipeError("command line: system: holds bytes that are not UTF-8")
    with contextlib.ExitStack() as held:
        folder, checkpoint = _find(run, step, held)

        import torch

        from launcher.cli.chat_model import Sampling, open_chat_model

        try:
            model = open_chat_model(folder, checkpoint=checkpoint, plain=plain, trust_run=trust_run)
            on_gpu = torch.cuda.is_available() and not cpu
            model.load(torch.device("cuda" if on_gpu else "cpu"))
        except DamagedCheckpointError as error:
            raise RecipeError(f"command line: {error}") from None
    if model.template is None and system is not None:
        raise RecipeError("command line: system: needs a chat template")
    system = model.system if system is None else system
    shows = "".join(
        f"; /{kind} PATH shows {with_article(kind)} with the next line" for kind in model.seen
    )
    print(f"{folder}: {model.format_text(system)}{shows}", file=sys.stderr)
    _talk(model, Sampling(max_new_tokens, temperature, top_p), system)
    return EXIT_DONE


def _find(name: str, step: int | None, held: contextlib.ExitStack) -> tuple[Path, bool]:
    """The folder with the weights, and whether it is a checkpoint, which `held` keeps. Raises
    RecipeError."""
    run = Path(name)
    if step is not None:
        run = checkpoint_of_step(run, step)
    found = find_checkpoint(run, held)
    if found is not None:
        return found, True
    for folder in (run, run / "hf"):
        if any((folder / name).is_file() for name in ("adapter_config.json", "config.json")):
            return folder, False
    if is_fetched(name):
        return model_folder(name, key="command line"), False
    if run.is_dir():
        raise RecipeError(f"command line: {run}: it has neither a checkpoint nor a model")
    raise RecipeError(f"command line: {no_such_name('folder', name)}")


def _kind_shown(line: str) -> str | None:
    """The kind of the attachment that a line shows, `/image PATH`; None: it shows none."""
    return next((kind for kind in ATTACHMENTS if line.split(maxsplit=1)[:1] == [f"/{kind}"]), None)


def _talk(model: ChatModel, sampling: Sampling, system: str | None) -> None:
    from launcher.errors import RowError

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() then has a history)

    if isinstance(sys.stdin, io.TextIOWrapper):  # bytes that are no text, which no tokenizer takes
        sys.stdin.reconfigure(errors="replace")
    start: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    messages, shown = list(start), list[dict[str, Any]]()
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        except Terminated:
            raise
        except KeyboardInterrupt:  # at the prompt: another line
            print()
            continue
        if line == "/reset":
            messages, shown = list(start), []
        elif (kind := _kind_shown(line)) is not None:
            try:
                part, about = model.attachment(kind, _path(line.removeprefix(f"/{kind}").strip()))
            except RowError as error:
                if not sys.stdin.isatty():  # the next line would ask about another attachment
                    raise RecipeError(f"{line}: not shown: {error}") from None
                print(f"not shown: {error}", file=sys.stderr)
                continue
            shown.append(part)
            print(f"{about}, shown with the next line", file=sys.stderr)
        elif line:
            parts: list[str] = []

            def write(part: str, parts: list[str] = parts) -> None:
                parts.append(part)
                text = part.translate(_CONTROL) if sys.stdout.isatty() else part
                print(text, end="", flush=True)

            content = [*shown, {"type": "text", "text": line}] if shown else line
            turns = [*messages, {"role": "user", "content": content}]
            try:
                model.answer(turns, sampling, write)
            except Terminated:
                raise
            except KeyboardInterrupt:
                print(" [stopped]", end="")
            except (RowError, RecipeError) as error:
                print(f"not answered: {error}", file=sys.stderr)
                continue
            print()
            shown = []
            messages = [*turns, {"role": "assistant", "content": "".join(parts)}]


def _path(text: str) -> str:
    """The path that follows a command; terminals put a dropped file in quotes."""
    quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
    return os.path.expanduser(text[1:-1] if quoted else text)
