"""Rules for the structure of the code: import directions, light imports."""

import ast
import functools
import graphlib
import itertools
import json
import re
import subprocess
import sys
from dataclasses import fields, is_dataclass

import pytest

from launcher.recipe import schema
from tests import REPOSITORY

PACKAGE = REPOSITORY / "launcher"

LEVELS = (
    "errors console __version__",
    "libraries",
    "distributed",
    "files",
    "sources",
    "recipe",
    "reliability strategies models",
    "data",
    "objectives checkpoint",
    "optimizers",
    "training",
    "metrics diagnostics",
    "planner convert",
    "run slurm",
    "cli train",
    "__main__",
)
"""The packages from bottom to top. A module imports its own package and packages of lower levels."""


@functools.cache
def parsed(file):
    """The syntax tree of a file, which no test changes."""
    return ast.parse(file.read_text())


@functools.cache
def nodes(tree):
    """All nodes of a syntax tree."""
    return [*ast.walk(tree)]


@pytest.fixture(autouse=True, scope="module")
def _all_parsed():
    """Before the first test, whose time is limited."""
    for file in FILES:
        nodes(parsed(file))


def package_of(module):
    return module.split(".")[0]


def module_name(file):
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(file, *, at_runtime=False):
    """Yields imports below `launcher`: `recipe.load`, or `recipe` if the package has the name.
    at_runtime: without those below `if TYPE_CHECKING`."""
    body = parsed(file).body
    if at_runtime:
        named = [node for node in body if isinstance(node, ast.If)]
        body = [
            node for node in body if node not in named or ast.unparse(node.test) != "TYPE_CHECKING"
        ]
    for node in itertools.chain.from_iterable(map(nodes, body)):
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


def test_imports_go_downwards_without_cycles():
    level = {name: index for index, names in enumerate(LEVELS) for name in names.split()}
    graph = {module_name(file): set(imports(file)) - {module_name(file)} for file in FILES}
    upwards = [
        f"{module}: {name}"
        for module, names in graph.items()
        for name in names
        if package_of(name) != package_of(module)
        and level[package_of(name)] >= level[package_of(module)]
    ]
    assert upwards == []
    # Two modules of a package may name each other's types, which is better than Any
    run = {module_name(file): {*imports(file, at_runtime=True)} for file in FILES}
    for module, names in graph.items():
        types = {name for name in names if package_of(name) == package_of(module)}
        graph[module] = names - (types - run[module])
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError with the cycle


CONCEPTS = {
    "store",
    "dataset",
    "objective",
    "recipe",
    "micro_batch",
    "wrapped",
    "prepared",
    "ranks",
}


def test_no_function_takes_a_concept_as_any():
    """A name would say what it is, and no type what it has: an arrow between packages that nothing
    shows."""
    found = [
        f"{module_name(file)}.{function.name}({argument.arg})"
        for file in FILES
        for function in nodes(parsed(file))
        if isinstance(function, ast.FunctionDef)
        for argument in (*function.args.args, *function.args.kwonlyargs)
        if argument.arg in CONCEPTS and argument.annotation is not None
        if ast.unparse(argument.annotation) == "Any"
    ]
    assert found == []


WINGS = ("planner", "convert", "slurm", "diagnostics", "cli")
"""Packages that a run does not need, apart from three modules that ask the plan."""
USE_THE_PLAN = ("run.resolve", "run.run", "run.out_of_memory")


def test_the_core_imports_no_wing():
    """`run.resolve` replaces `auto`, `run.run` logs the time of a run, and `run.out_of_memory` explains
    a failure."""
    found = {
        module_name(file): {package_of(name) for name in imports(file)} & {*WINGS}
        for file in FILES
        if package_of(module_name(file)) not in (*WINGS, "__main__")
    }
    found = {name: wings for name, wings in found.items() if wings}
    assert found == {name: {"planner"} for name in USE_THE_PLAN}


def test_only_recipe_load_imports_omegaconf():
    pattern = r"^\s*(import|from) omegaconf"
    users = [file.name for file in FILES if re.search(pattern, file.read_text(), re.MULTILINE)]
    assert users == ["load.py"]


def test_no_module_shadows_the_standard_library():
    """`torchrun launcher/train.py` puts launcher/ first on sys.path."""
    assert not {path.stem for path in PACKAGE.iterdir()} & set(sys.stdlib_module_names)


def test_commands_and_recipe_check_import_nothing_heavy():
    code = (
        "import sys, json, launcher.train, launcher.cli.main, launcher.slurm.job, launcher.slurm.agent\n"
        "from launcher.recipe.load import load_recipe\n"
        "load_recipe(['recipe=fsdp', 'model.config.hidden_size=64'], ranks=2)\n"
        "heavy = ('torch', 'transformers', 'numpy', 'wandb', 'rich', 'plotly', 'pyarrow', 'tokenizers')\n"
        "print(json.dumps([name for name in heavy if name in sys.modules]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=REPOSITORY,
        timeout=300,
    ).stdout
    assert json.loads(printed) == []


def test_schema_imports_only_pydantic():
    files = [
        PACKAGE / f"{name}.py" for name in ("recipe/schema", "recipe/section", "sources/layouts")
    ]
    names = {name for file in files for name in imports(file)}
    assert names == {"recipe.section", "sources.layouts"}
    text = "\n".join(file.read_text() for file in files)
    roots = set(re.findall(r"^(?:from|import) (\w+)", text, re.MULTILINE))
    assert roots - set(sys.stdlib_module_names) == {"launcher", "pydantic"}


def test_only_one_module_flushes_and_computes_checksums_of_files():
    """An atomic write that is made elsewhere would be tested against kills once more."""
    pattern = r"\bfsync\(|^import xxhash|\bos\.(replace|rename)\(|\bscratch\.replace\("
    users = [
        str(file.relative_to(PACKAGE))
        for file in FILES
        if re.search(pattern, file.read_text(), re.MULTILINE)
    ]
    assert users == ["files.py"]


def test_only_one_module_reads_rank_variables():
    readers = [
        str(f.relative_to(PACKAGE))
        for f in FILES
        if '"RANK"' in f.read_text() or '"WORLD_SIZE"' in f.read_text()
    ]
    assert readers == ["distributed/environment.py"]


WHOLE_RECIPE = {
    "checkpoint": "export resume",
    "diagnostics": "selftest",
    "models": "config_keys",
    "objectives": "answers base distillation embedding kto make masked next_token preference reranker teacher",
    "planner": "auto candidates facts formatting known_models measurement plan plan_as_json profile recipe_values"
    " search sizes speed trace trials work",
    "training": "model setup",
}
"""Modules outside `recipe`, `cli` and `run` whose signatures or fields may name `Recipe`. They plan,
assemble, take the sections of an objective, decide whether to resume, or read what a checkpoint was written with."""


def test_other_modules_take_sections_or_plain_values():
    whole = set()
    for file in FILES:
        for node in nodes(parsed(file)):
            for typed in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                names = {getattr(part, "id", None) for part in nodes(typed)} if typed else ()
                if "Recipe" in names or "LoadedRecipe" in names:
                    whole.add(module_name(file))
    allowed = {
        f"{package}.{name}" for package, text in WHOLE_RECIPE.items() for name in text.split()
    }
    others = {name for name in whole if package_of(name) not in ("recipe", "cli", "run", "train")}
    assert others == allowed


TENSOR_PARALLEL_SIZE = {
    "recipe/schema.py": "the key",
    "recipe/other_names.py": "its names in other programs",
    "convert/transformations.py": "not with images, and it divides the ranks of a batch",
    "convert/convert.py": "a config that compiles, too, loses that",
    "distributed/rank_layout.py": "the layout",
    "recipe/rules.py": "what the key needs of other keys",
    "models/tensor_parallel.py": "the implementation",
    "models/context_parallel.py": "attention heads are divided by both sizes",
    "models/division.py": "which divisions a layout has",
    "training/model.py": "refuses losses that need all logits",
    "planner/plan.py": "a note about networks between nodes",
    "planner/profile.py": "the part of a rank",
    "planner/search.py": "profiles again if it differs",
    "planner/trace.py": "the part of the logits",
    "planner/work.py": "the speed model",
}
"""Modules that name the size of tensor parallel groups, and why. Others ask the rank layout."""


def test_few_modules_know_about_tensor_parallelism():
    named = {str(f.relative_to(PACKAGE)) for f in FILES if "tensor_parallel_size" in f.read_text()}
    assert named == set(TENSOR_PARALLEL_SIZE)


def test_public_methods_have_docstrings():
    """Methods of subclasses are mostly overrides and need none, nor does a method that another
    class of the project documents: a protocol. Ruff's D102 would ask for a docstring on each.
    """
    methods = [
        (f"{file.relative_to(PACKAGE)}: {owner.name}.{method.name}", owner, method)
        for file in FILES
        for owner in nodes(parsed(file))
        if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_")
        for method in owner.body
        if isinstance(method, ast.FunctionDef) and not method.name.startswith("_")
    ]
    documented = {method.name for _, _, method in methods if ast.get_docstring(method)}
    missing = [
        name
        for name, owner, method in methods
        if method.name not in documented
        and all(ast.unparse(base) == "Protocol" for base in owner.bases)
    ]
    assert missing == []


def test_every_call_says_whether_code_of_a_checkpoint_may_run():
    """Without trust_remote_code, transformers asks in a terminal, and an answer would run it."""
    silent = []
    for file in FILES:
        for node in nodes(parsed(file)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            loader = ast.unparse(node.func.value)
            without_code = ("GenerationConfig", "PeftConfig", "PeftModel")
            if node.func.attr in ("from_pretrained", "from_config") and not loader.endswith(
                without_code
            ):
                if "trust_remote_code" not in [keyword.arg for keyword in node.keywords]:
                    silent.append(f"{module_name(file)}:{node.lineno}: {ast.unparse(node)}")
    assert silent == []


def texts(file):
    """Yields the texts of a module that are no docstrings, with {} for their values."""
    tree = parsed(file)
    skipped = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for node in nodes(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
            parts = [part.value if isinstance(part, ast.Constant) else "{}" for part in node.values]
            yield "".join(parts)
        elif isinstance(node, ast.Constant) and id(node) not in skipped:
            if isinstance(node.value, str):
                yield node.value


def test_suggestions_can_be_typed():
    """Messages suggest key=value, as an argument. What is set may be stated as key: value."""
    keys = {name for section in vars(schema).values() for name in fields_of(section)}
    pattern = re.compile(
        r"\b(?:set|use|use it,|try|or) (?:[a-z_]+\.)*([a-z_]+): (?:[a-z0-9]|\{[a-z])"
    )
    found = [
        f"{file.name}: {match.group()}"
        for file in FILES
        for text in texts(file)
        for match in pattern.finditer(text)
        if match.group(1) in keys
    ]
    assert found == []


def fields_of(section):
    return [field.name for field in fields(section)] if is_dataclass(section) else []
