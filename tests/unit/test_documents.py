"""Commands, recipes, keys and links in README.md, docs/ and the headers of the recipes."""

import ast
import dataclasses
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from typing import cast

import pytest
import typer.main
import yaml
from shapes import LLAMA_1B, LLAMA_8B, QWEN3_30B_A3B
from typer.core import TyperGroup

from launcher.cli.main import app, main
from launcher.cli.submit import sort_arguments
from launcher.distributed.rank_layout import PARALLEL_SIZES
from launcher.errors import RecipeError
from launcher.planner.auto import COLLECTIVES, LOGITS, SEARCH, resolve
from launcher.planner.facts import Facts, profiled
from launcher.planner.known_models import known_models
from launcher.planner.machine import known_machine
from launcher.planner.plan import make_plan
from launcher.recipe.decode import keys
from launcher.recipe.load import load_recipe
from launcher.recipe.schema import Recipe, Slurm
from launcher.reliability.run_directory import RunFolder
from launcher.slurm.render import node_counts, ranks_per_node
from tests import REPOSITORY
from tests.distributed.launching import torchrun
from tests.run_files import read_lines
from tests.unit.recipe.test_recipe import FINETUNE_DATA

COMMANDS = cast(TyperGroup, typer.main.get_command(app)).commands
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
PROGRAMS = r"(torchrun|launcher|python|make|docker|enroot|srun) "
RUN_HERE = r"launcher (schema|show|inspect recipe=quickstart|submit .*--dry-run|.*--help)\b"
"""Commands that `test_commands_in_documents_are_valid` runs unchanged."""
NOT_RUN_HERE = {
    r"make ": "CI and test_finetune.py run it, or it needs a GPU. The target must exist",
    r"torchrun |python launcher/train.py|launcher train": "needs GPUs, user data or minutes. "
    "The recipe is checked for its number of ranks. test_tutorials.py trains the others",
    r"launcher plan": "needs the hub, or takes long: test_tutorials.py, test_plan_command.py",
    r"launcher (prepare|inspect)": "needs the hub or user data: test_prepare.py, test_inspect.py",
    r"launcher (selftest|doctor)": "takes long: test_doctor.py, test_tutorials.py",
    r"python llama.cpp/": "scripts of llama.cpp",
    r"launcher submit": "needs Slurm: tests/slurm. The recipe is checked",
    r"launcher (status|export|report|rows|chat)": "needs a run: test_status.py, test_export.py, test_chat.py, "
    "test_tutorials.py",
    r"launcher --install-completion": "writes to the home folder: test_completion.py",
    r"launcher new": "needs user data and takes long: test_new.py",
    r"python (recipes/arithmetic|recipes/preferences|recipes/pictures|docs/memory_chart).py": "test_tutorials.py",
    r"docker |enroot |srun ": "needs a registry or pyxis. The command for the container is checked",
}
"""All other commands, by pattern: why that test does not run them, and what is checked instead."""


def code_blocks(document):
    """Returns the fenced blocks of a Markdown file as (language, text) pairs."""
    return re.findall(r"^```(\w*)\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)


def commands(text):
    """Returns the commands in a text, without prompts and comment signs, with joined lines."""
    lines = [re.sub(r"^\s*(#|\$)?\s*", "", line) for line in text.splitlines()]
    joined = "\n".join(lines).replace("\\\n", " ")
    return [line for line in joined.splitlines() if re.match(PROGRAMS, line)]


def arguments(command):
    """Returns the recipe arguments of a torchrun command and its number of ranks."""
    for name in ("my/data/*.jsonl", "chat.jsonl"):
        command = command.replace(name, str(REPOSITORY / "README.md"))
    words = shlex.split(command, comments=True)
    ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else None
    if ranks is not None and "--nnodes" in words:
        ranks *= int(words[words.index("--nnodes") + 1].split(":")[-1])
    recipe = next(index for index, word in enumerate(words) if word.startswith("recipe="))
    return words[recipe:], ranks


def overrides_of(recipe):
    """Overrides in place of files that scripts write, for the recipe of this name."""
    if recipe == "pictures":
        return ["images=null", *FINETUNE_DATA]
    if recipe == "embedding":
        return ["data.kind=retrieval", "evaluation.at_start=false", *FINETUNE_DATA]
    return FINETUNE_DATA if recipe in ("finetune", "prefer", "smollm2") else []


@pytest.mark.parametrize("recipe", [path.stem for path in RECIPES])
def test_commands_in_recipe_headers_are_valid(recipe):
    text = (REPOSITORY / f"recipes/{recipe}.yaml").read_text()
    found = [command for command in commands(text) if command.startswith("torchrun")]
    assert found
    for command in found:
        words, ranks = arguments(command)
        assert words[0] == f"recipe={recipe}"
        load_recipe(
            words + overrides_of(recipe),
            ranks=ranks,
        )


def small_commands():
    """Yields each recipe of a real model and the command in its header for a small version."""
    for path in RECIPES:
        text = path.read_text()
        if "my/data" in text:
            yield pytest.param(path, commands(text)[-1], id=path.stem)


@pytest.mark.parametrize(("path", "command"), list(small_commands()))
def test_small_versions_in_recipe_headers_match_the_recipe(path, command):
    """The small version differs only in model and data. The disk space in the header is correct."""
    complete = load_recipe(
        [f"recipe={path}", f"data.train={REPOSITORY}/README.md"], ranks=None
    ).recipe
    words, ranks = arguments(command)
    small = load_recipe(words, ranks=ranks).recipe
    assert small.model.config["hidden_size"] <= 64
    same = {"model": complete.model, "data": complete.data, "run": complete.run}
    keys = [each.key for each in PARALLEL_SIZES]
    if any(getattr(complete.strategy, key) > 1 for key in keys):
        # Two ranks; context parallel attention runs on CPUs only in float32
        values = {name: getattr(complete.strategy, name) for name in (*keys, "mixed_precision")}
        same["strategy"] = dataclasses.replace(small.strategy, **values)
    if complete.images is not None:  # the small version is one of the text model
        same["images"] = complete.images
    assert dataclasses.replace(small, **same) == complete
    header = path.read_text().partition("\nrun:")[0]
    assert "not measured on" in header
    stated = re.search(r"12 bytes per trained parameter \([^)]*\), ([\d.]+) GB", header)
    unit, billions = ("million of rank", 1e-3) if complete.lora else ("billion parameters", 1)
    trained = re.search(rf"([\d.]+) {unit}", header)
    assert float(stated[1]) == pytest.approx(12 * float(trained[1]) * billions, abs=0.05)
    assert complete.checkpoint.every_steps is not None
    # With CPU offload the host has no memory for the copy that an asynchronous save needs
    assert complete.checkpoint.asynchronous == (complete.strategy.cpu_offload is None)


CONFIGS = {
    "llama_3_2_1b": LLAMA_1B,
    "qwen3_8b": LLAMA_8B
    | {"model_type": "qwen3", "vocab_size": 151936, "intermediate_size": 12288}
    | {"num_hidden_layers": 36},
    "llama_3_1_8b_one_gpu": LLAMA_8B,
    "llama_3_1_8b_128k": LLAMA_8B,
    "qwen3_8b_1m": LLAMA_8B
    | {"model_type": "qwen3", "vocab_size": 151936, "intermediate_size": 12288}
    | {"num_hidden_layers": 36},
    "llama_3_1_70b": LLAMA_8B
    | {"hidden_size": 8192, "intermediate_size": 28672}
    | {"num_hidden_layers": 80, "num_attention_heads": 64},
    "lora_llama_3_1_8b": LLAMA_8B,
    "qlora_llama_3_1_8b": LLAMA_8B,
    "qwen3_30b_a3b": QWEN3_30B_A3B,
    "lora_qwen3_30b_a3b": QWEN3_30B_A3B,
    "gpt_oss_20b_lora": known_models()["openai/gpt-oss-20b"]["config"],
    "qwen3_5_9b": known_models()["Qwen/Qwen3.5-9B"]["config"],
    "qwen3_vl_8b": known_models()["Qwen/Qwen3-VL-8B-Instruct"]["config"],
    "llama_3_1_405b_pipeline": known_models()["meta-llama/Llama-3.1-405B"]["config"],
    "gemma3_12b": known_models()["google/gemma-3-12b-it"]["config"],
}
CONFIGS |= dict.fromkeys(("llama_3_1_70b_tensor", "qlora_llama_3_1_70b"), CONFIGS["llama_3_1_70b"])
"""Model configs, from the model cards."""


@pytest.mark.parametrize(
    "name",
    [
        name if name == "llama_3_2_1b" else pytest.param(name, marks=pytest.mark.long)
        for name in CONFIGS
    ],
)
def test_memory_in_recipe_headers_matches_the_plan(name, tmp_path):
    """The header states the traced memory. The closed formula is within 10 % of the trace, but for
    attention in PyTorch's operators (gpt_oss), whose temporary memory it does not know."""
    header = (REPOSITORY / f"recipes/{name}.yaml").read_text().partition("\nrun:")[0]
    config = {"model_type": "llama", "max_position_embeddings": 131072} | CONFIGS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = shlex.split(re.search(r"`launcher plan (recipe=[^`]*)`", header)[1])
    options = dict(word.split("=") for word in words)
    nodes, per_node = int(options.get("nodes", 1)), int(options["gpus"])
    ranks = {"nodes": nodes, "gpus_per_node": per_node}
    machine = known_machine(options["gpu"], **ranks, memory=None, host_memory=None, overrides=None)
    arguments = [words[0], f"model.path={tmp_path}"]
    recipe = load_recipe(arguments, ranks=machine.ranks, files=False).recipe
    facts = Facts(ranks=machine.ranks, machine=machine, profiles=profiled(machine))
    recipe, _ = resolve(recipe, facts, [SEARCH, COLLECTIVES, LOGITS])
    plan = make_plan(recipe, machine)
    stated = re.search(r"with driver and margin ([\d.]+) GiB", header)
    assert float(stated[1]) == pytest.approx(plan.needed / 2**30, rel=0.02)
    traced = plan.step.peak.components.total
    allowed = 0.12 if name == "gpt_oss_20b_lora" else 0.1
    assert plan.arithmetic.peak.components.total == pytest.approx(traced, rel=allowed)


@pytest.mark.long
@pytest.mark.parametrize(("path", "command"), list(small_commands()))
def test_small_versions_of_real_models_train(path, command, tmp_path):
    words, ranks = arguments(command)
    words = ["launcher/train.py", *words, f"run.dir={tmp_path}/run"]
    torchrun(*words, ranks=ranks, OMP_NUM_THREADS="1").check()
    lines = read_lines(tmp_path / "run/metrics.jsonl")
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(4 < line["loss"] < 7 for line in steps)
    assert list((tmp_path / "run/hf").glob("*.safetensors"))


def document_commands():
    for document in DOCUMENTS:
        for _, block in code_blocks(document):
            for command in commands(block):
                yield pytest.param(command, id=f"{document.stem}: {command[:60]}")
    for name, command in COMMANDS.items():
        for line in commands(command.callback.__doc__.partition("Example:")[2]):
            yield pytest.param(line, id=f"{name} --help: {line[:60]}")


COMMANDS_OF_DOCUMENTS = list(document_commands())
assert len(COMMANDS_OF_DOCUMENTS) >= 30


@pytest.mark.parametrize("command", COMMANDS_OF_DOCUMENTS)
def test_commands_in_documents_are_valid(command, tmp_path, monkeypatch, capsys):
    words = shlex.split(command, comments=True)
    plain = re.sub(r"'[^']*'|\"[^\"]*\"", "", command)
    assert not re.search(r"[*?\[]", plain), "zsh refuses a pattern that is not in quotes"
    words = words[: words.index(">")] if ">" in words else words
    if re.match(RUN_HERE, command):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        (tmp_path / "my/data").mkdir(parents=True)
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        (tmp_path / "my/data/chat.jsonl").write_text(json.dumps({"messages": turns}))
        assert main(words[1:]) == 0
        assert capsys.readouterr().out
        return
    assert any(re.match(pattern, command) for pattern in NOT_RUN_HERE), (
        "add a pattern to NOT_RUN_HERE"
    )
    if words[0] == "make":
        assert f"\n{words[1]}:" in (REPOSITORY / "Makefile").read_text()
    elif words == ["launcher", "--install-completion"]:
        assert any(words[1] in param.opts for param in typer.main.get_command(app).params)
    elif words[0] == "launcher" or words[:2] == ["docker", "run"]:
        check_arguments(words[words.index("launcher") + 1 :])
    elif any(word.startswith("recipe=") for word in words):
        words, ranks = arguments(command)
        more = overrides_of("pictures") if words[0] == "recipe=pictures" else []
        load_recipe([*words, *more], ranks=ranks)
    elif words[0] == "python" and not words[1].startswith("llama.cpp/"):
        assert (REPOSITORY / words[1]).is_file()


def check_arguments(words):
    """Checks the options of `launcher SUBCOMMAND ...`, and its recipe if the repository has it."""
    subcommand = COMMANDS[words[0]]
    context = subcommand.make_context(subcommand.name, words[1:])
    overrides = context.params.get("overrides")
    if overrides and "optimizer.learning_rate=fast" not in overrides:
        recipe, sweep = sort_arguments([w for w in overrides if not w.startswith("lora.path=")])
        recipe += overrides_of(recipe[0].removeprefix("recipe="))
        options = {"nodes": 1, "gpus": None, "gpus_per_node": None} | context.params
        gpus = options["gpus"] or options["gpus_per_node"]
        if recipe[0] != "recipe=waves.yaml":  # test_tutorials.py trains it
            for values in itertools.product(*([f"{k}={v}" for v in vs] for k, vs in sweep)):
                given = [*recipe, *values]
                loaded = load_recipe(
                    given, ranks=gpus and (options["nodes"] or 1) * gpus, files=False
                )
                if words[0] == "submit":
                    slurm = loaded.recipe.slurm or Slurm()
                    for nodes in node_counts(slurm):
                        ranks = nodes * ranks_per_node(slurm)
                        load_recipe(given, ranks=ranks, files=False)


def test_make_resumes_an_interrupted_run(tmp_path):
    """The folder that `make train` trains into. A run without a checkpoint cannot be resumed."""
    show = "show: ; @echo $(call unused,quickstart)"
    command = ["make", "--silent", f"--file={REPOSITORY}/Makefile", f"--eval={show}", "show"]

    def chosen():
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": True}
        return subprocess.run(command, timeout=60, **options).stdout.strip()

    assert chosen() == "runs/quickstart"
    run = tmp_path / "runs/quickstart"
    (run / "checkpoints").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("{}\n")
    assert chosen() == "runs/quickstart-2"
    (run / "checkpoints/step_00000200").mkdir()
    folder = RunFolder(run)
    for state in ("running", "stopped", "failed"):
        folder.write_status(state, step=200)
        assert chosen() == "runs/quickstart"
    folder.write_status("finished", step=600)
    assert chosen() == "runs/quickstart-2"


def document_recipes():
    for document in DOCUMENTS:
        for language, block in code_blocks(document):
            if language == "yaml" and not block.startswith("apiVersion:"):  # of Kubernetes
                yield pytest.param(block, id=document.stem)


@pytest.mark.parametrize("text", list(document_recipes()))
def test_recipes_in_documents_are_valid(text, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    trained_here = "runs/" in text or "waves" in text  # by a tutorial, on two ranks
    data_overrides = FINETUNE_DATA if "path: runs/" in text else []
    ranks = 2 if trained_here else 8
    load_recipe([f"recipe={tmp_path}/recipe.yaml", *data_overrides], ranks=ranks, files=False)
    if data_overrides:  # the tutorial says that it shows this file
        shipped = (REPOSITORY / "recipes/finetune.yaml").read_text()
        assert yaml.safe_load(text) == yaml.safe_load(shipped)


@pytest.mark.parametrize("name", ["README.md", "docs/recipes.md"])
def test_documented_error_messages_are_exact(name):
    """The example has a line number of a recipe to which new keys are not added."""
    blocks = [block for _, block in code_blocks(REPOSITORY / name) if "micro_batchsize" in block]
    command, *expected = blocks[0].removeprefix("$ ").splitlines()
    words = [word for word in shlex.split(command)[2:] if not word.startswith("gpus=")]
    with pytest.raises(RecipeError) as error:
        load_recipe(words, ranks=6)
    assert error.value.problems == expected


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.stem)
def test_links_between_documents_resolve(document):
    text = document.read_text()
    for name, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        target = document.parent / name if name else document
        assert target.is_file(), name
        if anchor:
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            assert anchor in [heading.lower().replace(" ", "-") for heading in headings], anchor


def test_documents_name_each_key():
    """Not only the generated reference, where a key stands alone."""
    text = "\n".join(document.read_text() for document in DOCUMENTS)
    assert [".".join(p) for p in keys() if not re.search(rf"(?<!\w){p[-1]}\b", text)] == []


def test_keys_in_documents_exist():
    known = {".".join(path) for path in keys()}
    first = "|".join(Recipe.__dataclass_fields__)
    modules = {file.name for file in REPOSITORY.glob("launcher/*.py")}
    named = set()
    for document in DOCUMENTS:
        named |= set(re.findall(rf"`((?:{first})\.\w+(?:\.\w+)*)(?=[`:=])", document.read_text()))
    assert len(named - modules) > 20
    assert named - modules - known == set()


@pytest.mark.long
def test_wheel_trains_in_an_empty_environment(tmp_path):
    """The dependencies come from the current environment. The test below checks pyproject.toml."""

    def run(*words, cwd=REPOSITORY):
        variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        options = {"env": variables, "cwd": cwd, "capture_output": True, "text": True}
        done = subprocess.run(words, **options, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    pip = [sys.executable, "-m", "pip", "--quiet"]
    run(*pip, "wheel", "--no-deps", "-w", tmp_path, REPOSITORY)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert any(name.endswith("/LICENSE") for name in archive.namelist())
        assert "launcher/metrics/page.html.j2" in archive.namelist()
    environment, work = tmp_path / "environment", tmp_path / "work"
    work.mkdir()
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin/python"
    run(*pip, "--python", python, "install", "--no-deps", "--no-index", wheel)
    (site,) = environment.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(python, "-c", "import launcher; print(launcher.__file__)", cwd=work)
    assert where.startswith(str(site))

    def launcher(*words):
        return run(environment / "bin/launcher", *words, cwd=work)

    assert "_recipes/quickstart.yaml:" in launcher("show", "recipe=quickstart")
    assert "#SBATCH" in launcher("submit", "recipe=quickstart", "cpus=1", "--dry-run")
    short = ["run.device=cpu", "gpus=2", "run.max_steps=2", "evaluation.max_batches=1"]
    launcher("train", "recipe=quickstart", *short)
    assert "state       finished" in launcher("status", "runs/quickstart")
    assert list((work / "runs/quickstart/hf").glob("*.safetensors"))


@pytest.mark.slow
def test_imported_packages_are_declared_dependencies():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    ours = [line for name in extras.keys() - {"dev", "docs"} for line in extras[name]]
    declared = project["dependencies"] + ours
    names = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in declared} | {"launcher"}
    imported = set()
    for file in (REPOSITORY / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.partition(".")[0])
    imported -= sys.stdlib_module_names
    provided = {"pynvml": "nvidia_ml_py", "yaml": "pyyaml", "PIL": "pillow"}
    provided["typing_extensions"] = "pydantic"
    provided |= dict.fromkeys(("huggingface_hub", "tokenizers"), "transformers") | {
        "triton": "torch",
        "fsspec": "torch",
    }
    assert {provided.get(name, name) for name in imported} - names == set()


NAMED = r"`([a-z_]+/[a-z_]+\.py|[a-z_]+\.py)`"


def test_the_reading_path_names_files_and_definitions_that_exist():
    """docs/engineering/architecture.md, and what each file of the tables has to do with it."""
    text = (REPOSITORY / "docs/engineering/architecture.md").read_text()
    path = text.split("## Read in this order")[1].split("## A run from top to bottom")[0]
    read, _, add = path.partition("## To add something")
    files = re.findall(NAMED, path)
    assert [file for file in files if not (REPOSITORY / "launcher" / file).is_file()] == []
    lines = sum(
        len((REPOSITORY / "launcher" / file).read_text().splitlines())
        for file in re.findall(r"^\| " + NAMED, read, re.MULTILINE)
    )
    assert lines == pytest.approx(7400, rel=0.05)
    for file, what in {
        "planner/work.py": "adafactor",
        "planner/speed.py": "adafactor",
        "optimizers/optimizer.py": "adafactor",
        "recipe/schema.py": "adafactor",
        "distributed/hardware.py": "h100",
        "cli/main.py": "doctor",
        "metrics/sinks.py": "wandb",
        "sources/layouts.py": "classification",
        "data/encoder.py": "classification",
        "recipe/objectives.py": "classification",
        "objectives/masked.py": "masked",
        "objectives/preference.py": "hinge",
    }.items():
        assert f"`{file}`" in add, file
        assert what in (REPOSITORY / "launcher" / file).read_text().lower(), file
    for name in re.findall(r"`([A-Z][A-Za-z]+|[a-z]+_[a-z_]+)`", path.split("## A batch")[1]):
        definition = rf"(def|class) {name}\b"
        modules = (REPOSITORY / "launcher").rglob("*.py")
        assert any(re.search(definition, module.read_text()) for module in modules), name


def test_make_install_ends_with_two_commands():
    """Which are valid, and need no activated environment."""
    recipe = (REPOSITORY / "Makefile").read_text().partition("\ninstall: $(INSTALLED)\n")[2]
    first, second = re.findall(r"'(?:next:)? +([^']+)'", recipe.partition("\n\n")[0])
    assert first == "make train"
    program, *words = second.split()
    assert program == "$(BIN)/launcher"
    assert re.match("|".join(NOT_RUN_HERE) + f"|{RUN_HERE}", f"launcher {shlex.join(words)}")
