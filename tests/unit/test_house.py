"""The house: who may import whom, and what is light enough to be imported before a recipe is checked."""

import ast
import graphlib
import json
import subprocess
import sys

import pytest

from tests import REPOSITORY

PACKAGE = REPOSITORY / "launcher"

MAY_IMPORT = {
    "errors": set(),
    "distributed": {"errors"},
    "recipe": {"errors"},
    "reliability": {"distributed", "errors"},
    "models": {"errors", "metrics", "recipe"},
    "strategies": {"distributed", "recipe"},
    "data": {
        *("distributed", "errors", "metrics", "models", "recipe", "reliability", "training"),
    },
    "metrics": {"distributed", "errors", "recipe", "training"},
    "checkpoint": {
        "data",
        "distributed",
        "errors",
        "metrics",
        "models",
        "recipe",
        "reliability",
        "training",
    },
    "planner": {
        "__version__",
        "data",
        "distributed",
        "errors",
        "metrics",
        "models",
        "recipe",
        "reliability",
        "strategies",
        "training",
    },
    "training": {
        *(
            "__version__",
            "checkpoint",
            "data",
            "distributed",
            "errors",
            "metrics",
            "models",
            "planner",
            "recipe",
            "reliability",
            "strategies",
        ),
    },
    "train": {"checkpoint", "distributed", "errors", "recipe", "reliability", "training"},
    "diagnostics": {"distributed", "errors", "metrics", "recipe", "reliability", "training"},
    "slurm": {"__version__", "checkpoint", "distributed", "errors", "recipe", "reliability"},
    "cli": {
        *(
            "__version__",
            "checkpoint",
            "data",
            "diagnostics",
            "distributed",
            "errors",
            "metrics",
            "models",
            "planner",
            "recipe",
        ),
        *("reliability", "slurm"),
    },
}
"""Packages that the modules of a package may import. `training` holds both parts (loss, loop) and the whole run, so packages
may depend on each other; modules may not (`test_no_module_imports_itself_through_others`)."""


def package_of(module):
    return module.split(".")[0]


def module_name(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file):
    """Names below `launcher`: `recipe.load`, or `recipe` where a package gives the name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and package_of(node.module) == "launcher"
        ):
            inside = node.module.partition(".")[2]
            for name in node.names:
                full = f"{inside}.{name.name}".strip(".")
                yield full if full in MODULES or not inside else inside
        elif isinstance(node, ast.Import):
            for name in node.names:
                if package_of(name.name) == "launcher":
                    yield name.name.partition(".")[2]


FILES = sorted(
    file for file in PACKAGE.rglob("*.py") if file.name != "__init__.py" or file.parent != PACKAGE
)
MODULES = {module_name(file) for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_run_one_way(file):
    here = package_of(module_name(file))
    wrong = {name for name in imports(file) if package_of(name) not in MAY_IMPORT[here] | {here}}
    assert not wrong, f"{here} must not import {', '.join(sorted(wrong))}"


def test_no_module_imports_itself_through_others():
    graph = {module_name(file): set(imports(file)) - {module_name(file)} for file in FILES}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


def test_only_reading_a_recipe_imports_omegaconf():
    users = [
        file.name
        for file in FILES
        if any(
            line.lstrip().startswith(("import omegaconf", "from omegaconf"))
            for line in file.read_text().splitlines()
        )
    ]
    assert users == ["load.py"]


def test_no_module_shadows_the_standard_library_where_torchrun_could_see_it():
    names = {file.stem for file in PACKAGE.glob("*.py")} | {
        folder.name for folder in PACKAGE.iterdir() if folder.is_dir()
    }
    assert not names & set(sys.stdlib_module_names)


def test_what_checks_a_recipe_imports_nothing_heavy():
    code = (
        "import sys, json, launcher.train, launcher.cli.main, launcher.cli.show, launcher.cli.selftest, launcher.cli.export,"
        "launcher.cli.prepare, launcher.cli.status, launcher.cli.report, launcher.cli.plan, launcher.cli.doctor,"
        "launcher.cli.submit, launcher.slurm.job, launcher.slurm.agent;"
        "print(json.dumps([m for m in ('torch', 'transformers', 'numpy', 'wandb', 'rich') if m in sys.modules]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
        timeout=60,
    ).stdout
    assert json.loads(printed) == []


def test_schema_needs_pydantic_only():
    roots, own = set(), set()
    for name in ("schema", "schema_evaluation", "schema_logging", "schema_slurm", "section"):
        for node in ast.walk(ast.parse((PACKAGE / f"recipe/{name}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                roots.add(node.module.split(".")[0])
                own |= {node.module} if node.module.startswith("launcher") else set()
            elif isinstance(node, ast.Import):
                roots |= {name.name.split(".")[0] for name in node.names}
    assert roots - set(sys.stdlib_module_names) == {"launcher", "pydantic"}
    assert own == {
        f"launcher.recipe.{name}"
        for name in ("section", "schema_evaluation", "schema_logging", "schema_slurm")
    }


def test_the_environment_is_read_in_one_place():
    readers = [
        str(f.relative_to(PACKAGE))
        for f in FILES
        if '"RANK"' in f.read_text() or '"WORLD_SIZE"' in f.read_text()
    ]
    assert readers == ["distributed/environment.py"]
