"""Completion: the words that are offered, and what a user's line is after a tab in the shells that are
installed."""

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from launcher.cli.completion import _keys
from launcher.cli.main import main
from launcher.recipe.find import recipe_names
from launcher.recipe.schema import Recipe

PREPARE = {
    "bash": "bind 'set enable-bracketed-paste off'",
    "zsh": "autoload -U compinit; compinit -D -u",
}
OPTIONS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
PRINTS = 'launcher() { echo "got<$*>"; }'
"""Replaces the command of a line; a completion starts the program."""
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
SECONDS = 60


class Terminal:
    """An interactive bash or zsh on a terminal of its own."""

    def __init__(self, name, script):
        self.text = ""
        self.master, slave = pty.openpty()
        variables = {"PATH": PATH, "HOME": str(script.parent), "TERM": "xterm"}
        self.process = subprocess.Popen(
            [name, *OPTIONS[name]],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            cwd=script.parent,
            env=variables,
        )
        os.close(slave)
        for line in (PREPARE[name], PRINTS, f"source {script}", "launcher rea''dy"):
            os.write(self.master, f"{line}\n".encode())
        self.read("got<ready>")

    def read(self, pattern):
        """Reads up to the pattern and returns its match."""
        while (found := re.search(pattern, self.text)) is None:
            assert select.select([self.master], [], [], SECONDS)[0], self.text
            self.text += os.read(self.master, 1 << 16).decode(errors="replace")
        self.text = self.text[found.end() :]
        return found

    def completed(self, line):
        """The arguments after a tab at the end of the line."""
        os.write(self.master, f"launcher {line}\t".encode())
        time.sleep(0.2)  # zsh takes a newline that follows at once for pasted text
        os.write(self.master, b"\n")
        return self.read(r"got<(.*?)>")[1].rstrip()

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.master)


class Fish:
    """The completions that fish shows; it needs no terminal for that."""

    def __init__(self, name, script):
        self.script = script

    def completed(self, line):
        """The arguments after a tab."""
        command = f"source {self.script}; complete -C 'launcher {line}'"
        options = {"cwd": self.script.parent, "capture_output": True, "text": True, "check": True}
        options["env"] = os.environ | {"PATH": PATH}
        shown = subprocess.run(["fish", "--no-config", "-c", command], timeout=SECONDS, **options)
        found = [word.partition("\t")[0] for word in shown.stdout.splitlines()]
        return " ".join([*line.split(" ")[:-1], os.path.commonprefix(found)])  # noqa: RUF071

    def close(self):
        pass


@pytest.fixture(scope="module", params=["bash", "zsh", "fish"])
def shell(request, tmp_path_factory):
    name = request.param
    if shutil.which(name) is None:
        message = f"{name} is not installed"
        assert os.environ.get("CI_REQUIRES_SHELLS") != "1", message
        pytest.skip(message)
    script = tmp_path_factory.mktemp(name) / "script"
    (script.parent / "my_data.jsonl").touch()
    variables = os.environ | {"PATH": PATH, "_LAUNCHER_COMPLETE": f"source_{name}"}
    done = subprocess.run(["launcher"], env=variables, capture_output=True, check=True)
    script.write_bytes(done.stdout)
    shell = (Fish if name == "fish" else Terminal)(name, script)
    yield shell
    shell.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("sel", "selftest"),
        ("plan recipe=fsdp_", "plan recipe=fsdp_offload"),
        ("plan strategy.ki", "plan strategy.kind="),
        ("train strategy.kind=d", "train strategy.kind=ddp"),
        ("train recipe=fsdp optimizer.learn", "train recipe=fsdp optimizer.learning_rate="),
        ("inspect nod", "inspect nodes="),
        ("submit --dr", "submit --dry-run"),
        ("show data.train=my_", "show data.train=my_data.jsonl"),
        ("status my_", "status my_data.jsonl"),
    ],
)
def test_lines_in_a_shell(shell, line, completed):
    assert shell.completed(line) == completed


@pytest.fixture
def offered(monkeypatch, capsys):
    """The words that are offered for the last word of a line, where the shell separates at the =."""

    def words(line):
        separated = re.sub("=", " = ", line).split(" ")
        monkeypatch.setenv("_LAUNCHER_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", "\n".join(["launcher", *separated]).rstrip("\n"))
        monkeypatch.setenv("COMP_CWORD", str(len(separated)))
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out.split()

    return words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("pl", ["plan"]),
        ("plan recipe=fsdp_", ["fsdp_offload"]),
        ("plan nod", ["nodes=", "nodes=VALUE"]),
        ("plan gpu_", ["gpu_memory=", "gpu_memory=VALUE"]),
        ("plan gpu=rtx-40", ["rtx-4090"]),
        ("plan --no", ["--no-search"]),
        ("plan --gpu", []),
        ("plan strategy.ki", ["strategy.kind=auto", "strategy.kind=ddp", "strategy.kind=fsdp"]),
        ("plan recipe=fsdp --json strategy.kind=d", ["ddp"]),
        ("plan optimizer.learn", ["optimizer.learning_rate=", "optimizer.learning_rate=VALUE"]),
        ("submit recipe=fsdp partit", ["partition=", "partition=VALUE"]),
        ("submit gpus_", []),
        ("export run dtype=bf", ["bfloat16"]),
        ("export run dty", ["dtype=bfloat16", "dtype=float16", "dtype=float32"]),
        ("train sweep.optimizer.na", ["sweep.optimizer.name=adafactor"]),
        ("submit sweep.strategy.kind=d", ["ddp"]),
        ("plan sweep.optimizer.learn", []),
        ("new recipe", []),
        ("show data.train=my_", []),
        ("status my_", []),
        ("schema --h", ["--help"]),
    ],
)
def test_words_that_are_offered(offered, line, words):
    assert {*words} <= {*offered(line)}
    assert len(words) == len(offered(line)) or "sweep.optimizer" in line


def test_files_are_offered_where_the_shell_does_not_separate_at_the_equals_sign(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows/a.jsonl").touch()
    monkeypatch.setenv("_LAUNCHER_COMPLETE", "complete_zsh")
    for line, words in {
        "data.train=r": ["data.train=rows/", "data.train=rows/a.jsonl"],
        "strategy.kind=d": ["strategy.kind=ddp"],
    }.items():
        monkeypatch.setenv("_TYPER_COMPLETE_ARGS", f"launcher plan {line}")
        with pytest.raises(SystemExit):
            main([])
        assert re.findall(r'"(.+?)"', capsys.readouterr().out) == words


def test_a_completion_does_not_import_torch():
    """It would take seconds at each tab."""
    code = (
        "import sys; from launcher.cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules)"
    )
    variables = {"_LAUNCHER_COMPLETE": "complete_bash", "COMP_WORDS": "launcher\nplan\ngpus"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | variables | {"COMP_CWORD": "2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["gpus=", "gpus=VALUE", "False"]


def test_values_are_valid():
    """Every value that is offered is one, and no word means anything else to a shell."""
    known = dict(_keys(Recipe))
    assert {"run.dir", "lora.rank", "strategy.cpu_offload.what"} <= {*known}
    assert "null" in known["lora"]
    assert "muon" in known["optimizer.name"]
    assert known["run.deterministic"] == ["true", "false"]
    words = [*known, *(value for values in known.values() for value in values)]
    assert all(re.fullmatch(r"[\w.]+", word) for word in words)
    assert "sft" in recipe_names()
