"""The completion scripts, in the shells that are installed: what a user's line is after a tab."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from launcher.cli.main import main
from launcher.recipe.find import find_recipe
from tests.unit.cli.test_command_line import LAUNCHER

PREPARE = {
    "bash": "bind 'set enable-bracketed-paste off'",
    "zsh": "autoload -U compinit; compinit -D -u",
}
OPTIONS = {"bash": ["--norc", "--noprofile", "-i"], "zsh": ["-f", "-i"]}
PRINTS = 'launcher() { echo "got<$*>"; }'
"""Replaces the command: the tests see its arguments, and no Python can take part."""
SECONDS = 60


class Terminal:
    """An interactive bash or zsh on a terminal of its own."""

    def __init__(self, name, script):
        self.text = ""
        self.master, slave = pty.openpty()
        variables = {"PATH": os.environ["PATH"], "HOME": str(script.parent), "TERM": "xterm"}
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
        """The arguments after a tab, where there is one completion."""
        command = f"source {self.script}; complete -C 'launcher {line}'"
        options = {"cwd": self.script.parent, "capture_output": True, "text": True, "check": True}
        shown = subprocess.run(["fish", "--no-config", "-c", command], timeout=SECONDS, **options)
        found = shown.stdout.splitlines()
        return " ".join([*line.split(" ")[:-1], *found]) if len(found) == 1 else line

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
    done = subprocess.run([*LAUNCHER, "completion", name], capture_output=True, check=True)
    script.write_bytes(done.stdout)
    shell = (Fish if name == "fish" else Terminal)(name, script)
    yield shell
    shell.close()


@pytest.mark.parametrize(
    ("line", "completed"),
    [
        ("sel", "selftest"),
        ("completion z", "completion zsh"),
        ("plan recipe=fsdp_", "plan recipe=fsdp_offload"),
        ("plan strategy.ki", "plan strategy.kind="),
        ("train strategy.kind=d", "train strategy.kind=ddp"),
        ("train recipe=fsdp optimizer.learn", "train recipe=fsdp optimizer.learning_rate="),
        ("plan recipe=fsdp gpu=rtx-40", "plan recipe=fsdp gpu=rtx-4090"),
        ("inspect --s", "inspect --s"),  # --samples or --set
        ("inspect --sa", "inspect --samples"),
        ("submit recipe=fsdp partit", "submit recipe=fsdp partition="),
        ("export dtype=bf", "export dtype=bfloat16"),
        ("train recipe=fsdp swe", "train recipe=fsdp sweep."),
        ("train sweep.optimizer.learn", "train sweep.optimizer.learning_rate="),
        ("submit sweep.strategy.kind=d", "submit sweep.strategy.kind=ddp"),
        ("plan sweep.optimizer.learn", "plan sweep.optimizer.learn"),
        ("show data.train=my_", "show data.train=my_data.jsonl"),
        ("status my_", "status my_data.jsonl"),
    ],
)
def test_completions(shell, line, completed):
    assert shell.completed(line) == completed


def test_words_are_valid(capsys):
    """Every value that is offered is one, and no word means anything else to a shell."""
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    values = re.search(r"key_values='(.*)'", script)[1].split()
    keys = re.search(r" keys='(.*?)'", script)[1].split()
    assert {value.partition("=")[0] + "=" for value in values} <= {*keys}
    assert all(re.fullmatch(r"[\w.]+=[\w.]*", word) for word in (*keys, *values))
    assert {"recipe=", "run.dir=", "lora.rank=", "strategy.cpu_offload.what="} <= {*keys}
    assert {"recipe=sft", "lora=null", "optimizer.name=muon", "run.deterministic=true"} <= {*values}
    for name in re.findall(r"recipe=(\w+)", " ".join(values)):
        assert find_recipe([f"recipe={name}"]).is_file()


def test_unknown_shell_is_an_error(capsys):
    assert main(["completion", "csh"]) == 2
    assert "'csh' is not one of 'bash', 'zsh', 'fish'" in capsys.readouterr().err
