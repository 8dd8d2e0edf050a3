"""The house: who may import whom, and what is light enough to be imported before a recipe is checked."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "launcher"

MAY_IMPORT = {
    "errors": set(),
    "batching": set(),
    "loss": set(),
    "hardware": set(),
    "host_memory": set(),
    "functions": {"errors"},
    "hub": {"errors"},
    "environment": {"errors"},
    "recipe": {"errors", "hub"},
    "ownership": {"environment", "errors"},
    "run_folder": {"environment", "errors", "ownership"},
    "processes": {"environment", "errors"},
    "failures": {"environment", "errors", "host_memory", "ownership", "run_folder"},
    "watchdog": {"environment", "errors", "failures", "ownership", "stopping"},
    "stopping": {"errors", "failures"},
    "profiling": {"recipe"},
    "model": {"errors", "functions", "hub", "recipe"},
    "checkpoints": {"errors", "model", "processes", "recipe"},
    "resume": {"checkpoints", "errors", "recipe", "run_folder"},
    "keeper": {"checkpoints", "errors", "metrics", "optimizer", "processes", "recipe", "resume"},
    "strategies": {"processes", "recipe"},
    "optimizer": {"recipe"},
    "data": {"batching", "errors", "functions", "hub", "loss", "ownership", "processes", "recipe"},
    "evaluation": {"batching", "data", "loss", "processes", "recipe", "strategies"},
    "loop": {"data", "loss", "optimizer", "strategies"},
    "metrics": {"host_memory", "loop", "processes", "recipe"},
    "reporting": {
        "batching",
        "data",
        "errors",
        "evaluation",
        "hardware",
        "loop",
        "metrics",
        "processes",
        "recipe",
        "resume",
        "run_folder",
        "strategies",
    },
    "assembly": {"data", "evaluation", "loop", "model", "optimizer", "processes", "recipe", "strategies"},
    "memory": {
        *("assembly", "batching", "data", "environment", "errors", "hardware", "host_memory", "hub", "loop", "loss", "metrics"),
        *("model", "optimizer", "processes", "recipe", "run_folder", "strategies"),
    },
    "measuring": {"assembly", "data", "environment", "errors", "loop", "model", "optimizer", "processes", "recipe", "strategies"},
    "pipeline": {
        *("assembly", "data", "environment", "errors", "failures", "keeper", "memory", "processes", "profiling", "recipe"),
        *("reporting", "resume", "run_folder", "stopping", "watchdog"),
    },
    "selftest": {"assembly", "environment", "errors", "failures", "hub", "processes", "recipe"},
    "train": {"environment", "errors", "failures", "pipeline", "recipe", "resume", "run_folder"},
    "health": {"host_memory", "metrics"},
    "doctor": {"environment", "errors", "failures", "health", "memory", "processes"},
    "slurm": {"__version__", "checkpoints", "errors", "metrics", "ownership", "recipe", "resume", "run_folder"},
    "commands": {
        *("batching", "checkpoints", "data", "environment", "errors", "hardware", "health", "hub", "measuring", "memory", "metrics"),
        *("model", "ownership", "recipe", "resume", "run_folder", "slurm"),
    },
    "cli": {"__version__", "errors", "recipe"},
}


def room(file):
    return file.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "launcher":
            inside = node.module.partition(".")[2]
            yield from [inside.split(".")[0]] if inside else (name.name for name in node.names)
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name.split(".")[0] == "launcher":
                    yield name.name.partition(".")[2].split(".")[0]


FILES = sorted(file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py" or file.parent != PACKAGE)


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_one_way(file):
    here = room(file)
    wrong = {name for name in imports(file) if name not in MAY_IMPORT[here] | {here}}
    assert not wrong, f"{here} must not import {', '.join(sorted(wrong))}"


def test_only_load_imports_omegaconf():
    users = [
        file.name
        for file in FILES
        if any(line.lstrip().startswith(("import omegaconf", "from omegaconf")) for line in file.read_text().splitlines())
    ]
    assert users == ["load.py"]


def test_no_module_shadows_the_standard_library_where_torchrun_could_see_it():
    names = {file.stem for file in PACKAGE.glob("*.py")} | {folder.name for folder in PACKAGE.iterdir() if folder.is_dir()}
    assert not names & set(sys.stdlib_module_names)


def test_what_checks_a_recipe_imports_nothing_heavy():
    code = (
        "import sys, json, launcher.train, launcher.cli, launcher.commands.show, launcher.commands.selftest, launcher.commands.export,"
        "launcher.commands.prepare, launcher.commands.status, launcher.commands.plan, launcher.commands.doctor,"
        "launcher.commands.submit, launcher.slurm.attempts, launcher.slurm.agent;"
        "print(json.dumps([m for m in ('torch', 'transformers', 'numpy', 'wandb', 'rich') if m in sys.modules]))"
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY, timeout=60).stdout
    assert json.loads(printed) == []


def test_schema_needs_the_standard_library_only():
    roots = set()
    for node in ast.walk(ast.parse((PACKAGE / "recipe/schema.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            roots.add(node.module.split(".")[0])
        elif isinstance(node, ast.Import):
            roots |= {name.name.split(".")[0] for name in node.names}
    assert roots <= set(sys.stdlib_module_names)


def test_the_environment_is_read_in_one_place():
    readers = [str(f.relative_to(PACKAGE)) for f in FILES if '"RANK"' in f.read_text() or '"WORLD_SIZE"' in f.read_text()]
    assert readers == ["environment.py"]
