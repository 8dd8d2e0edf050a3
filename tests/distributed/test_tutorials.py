"""Runs the commands of the tutorials in docs, and checks the chart of docs/index.md."""

import os
import re
import shlex
import subprocess
import sys

import pytest

from docs import memory_chart
from tests import REPOSITORY
from tests.unit.test_documents import DOCUMENTS, code_blocks, commands

TUTORIALS = REPOSITORY / "docs"
NEEDS_MORE = r"8b|Qwen|SmolLM2|runs/sft|my_qlora"
"""Commands that need the hub, GPUs or a model of PyPI, or the run of such a command."""


def run_command(folder, *words):
    """Runs a `launcher` or `python` command in a folder and returns its standard output."""
    start = ["-m", "launcher.cli.main"] if words[0] == "launcher" else []
    done = subprocess.run(
        [sys.executable, *start, *words[1:]],
        env=os.environ
        | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout


def tutorial_commands(name):
    blocks = code_blocks(TUTORIALS / f"{name}.md")
    return [shlex.split(command) for _, block in blocks for command in commands(block)]


def write_own_model(folder):
    """Writes waves.py and waves.yaml of the tutorial; returns its last Python block."""
    blocks = code_blocks(TUTORIALS / "extend.md")
    model, data, script = [block for language, block in blocks if language == "python"][:3]
    recipe = next(block for language, block in blocks if language == "yaml")
    (folder / "waves.py").write_text(f"{model}\n\n{data}")
    (folder / "waves.yaml").write_text(recipe)
    return script


@pytest.mark.long
def test_own_model_tutorial(tmp_path):
    """With fewer steps than in the tutorial."""
    script = write_own_model(tmp_path)
    inspect, train, *_ = tutorial_commands("extend")
    document = (TUTORIALS / "extend.md").read_text()
    for line in run_command(tmp_path, *inspect).splitlines():
        if line.startswith(("[", "micro-batch")):  # without the rule after it
            assert line.rstrip(" ━") in document
    overrides = ["run.max_steps=3", "checkpoint.every_steps=3", "evaluation.every_steps=3"]
    assert "finished after 3 of 3 steps" in run_command(tmp_path, *train, *overrides)
    script = script.replace("step_00000200", "step_00000003")
    (tmp_path / "use.py").write_text(f"{script}\nprint(model.last.weight.shape)")
    assert "[1, 64]" in run_command(tmp_path, "python", "use.py")


@pytest.mark.long
def test_tutorial_commands_run(tmp_path):
    """Runs all commands that need neither a GPU nor a network, in order, with few steps."""
    (tmp_path / "recipes").symlink_to(REPOSITORY / "recipes")
    write_own_model(tmp_path)
    first = "launcher train recipe=quickstart run.device=cpu gpus=2 run.max_steps=3"
    run_command(tmp_path, *first.split())
    names = ("quickstart", "finetune", "lora", "extend")
    ran = 0
    for command in (words for name in names for words in tutorial_commands(name)):
        if command[0] == "make" or re.search(NEEDS_MORE, " ".join(command)):
            continue
        overrides = []
        if command[1] == "train":
            resumed = any("max_steps" in word for word in command)
            overrides = ["run.epochs=null", f"run.max_steps={4 if resumed else 3}"]
        run_command(tmp_path, *command, *overrides)
        ran += 1
    assert ran == 15
    assert (tmp_path / "runs/finetune_merged/model.safetensors").is_file()


@pytest.mark.long
def test_documented_plans_and_selftests_run(tmp_path):
    """Plans and selftests in the documentation that need neither a GPU nor a network."""
    pattern = r"launcher (plan recipe=fsdp gpu=.*|selftest recipe=fsdp .*=null\b)"
    found = {
        match[0]
        for document in DOCUMENTS
        for _, block in code_blocks(document)
        for match in re.finditer(pattern, block)
    }
    assert len(found) == 2
    for command in sorted(found):
        short = ["data.sequence_length=64"] if "selftest" in command else []
        run_command(tmp_path, *shlex.split(command), *short)


@pytest.mark.long
def test_memory_chart_is_up_to_date():
    """If this fails, `python docs/memory_chart.py` draws the chart again."""
    lines = memory_chart.draw(
        {strategy: memory_chart.planned(strategy) for strategy in memory_chart.STRATEGIES}
    )
    numbers = [
        re.findall(r": ([\d.]+) GiB<", text)
        for text in ("\n".join(lines), (REPOSITORY / "docs/memory.svg").read_text())
    ]
    drawn, kept = ([float(number) for number in found] for found in numbers)
    assert len(kept) == 21
    assert kept == pytest.approx(drawn, rel=0.02, abs=0.1)
