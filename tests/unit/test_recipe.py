"""Recipes that are right: what they decode to, where values come from, and what the shipped ones show."""

import ast
import dataclasses
import inspect
import json
import re
import subprocess
import sys
import sysconfig
import typing
from pathlib import Path

import pytest
import yaml

from launcher.cli.main import run
from launcher.cli.show import main as show
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.recipe.decode import decode, dotted, subsection
from launcher.recipe.load import load_recipe, scalar_as_yaml, to_yaml
from launcher.recipe.model_config import config_problems
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Data,
    Lora,
    MixedPrecision,
    Model,
    Profile,
    Recipe,
    Run,
    Source,
    Wandb,
)
from tests.unit.small_recipe import SMALL

REPOSITORY = Path(__file__).resolve().parents[2]
SHIPPED = sorted((REPOSITORY / "recipes").glob("*.yaml"))
COMPLETE = [REPOSITORY / "recipes" / f"{name}.yaml" for name in ("ddp", "fsdp", "fsdp_offload")]
"""Those that show every key."""


YOURS = [f"data.train={REPOSITORY}/README.md"]
"""In the place of data that a user brings, in the recipes for real models."""
MADE = [
    *YOURS,
    "data.validation=null",
    "data.tokenizer=bytes",
    "model={path: null, config: {model_type: llama}}",
]
"""In the place of what `make finetune` makes."""


def yours(file):
    return YOURS if "my/data" in file.read_text() else MADE if file.stem == "finetune" else []


def load(*overrides, recipe="x.yaml", ranks=None):
    return load_recipe([f"recipe={recipe}", *overrides], ranks=ranks).recipe


def sections(kind=Recipe, path=()):
    """(path, dataclass) of every section of the schema, the recipe itself first."""
    yield path, kind
    for field in dataclasses.fields(kind):
        if (inner := subsection(kind, field.name)) is not None:
            yield from sections(inner, (*path, field.name))


def value_at(recipe, path):
    for name in path:
        recipe = getattr(recipe, name) if dataclasses.is_dataclass(recipe) else recipe[name]
    return recipe


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_recipes_decode(file):
    recipe = load(*yours(file), recipe=file.stem, ranks=2)
    assert recipe == load(*yours(file), recipe=file)
    assert recipe.run.name == file.stem
    assert recipe.run.dir == f"runs/{file.stem}"
    assert not recipe.logging.memory_plan, "a plan costs seconds of a core in every start"


@pytest.mark.parametrize("file", COMPLETE, ids=lambda file: file.stem)
def test_complete_recipes_run_on_a_node_of_eight(file):
    load(recipe=file, ranks=8)


def test_there_are_recipes_to_test():
    assert {file.stem for file in SHIPPED} >= {"ddp", "fsdp", "fsdp_offload", "quickstart"}
    assert all(file in SHIPPED for file in COMPLETE)


def test_what_is_left_out_has_its_default(folder):
    assert load() == Recipe(
        run=Run(name="small", dir="runs/small", max_steps=10),
        model=Model(config={"model_type": "llama", "vocab_size": 300}),
        data=Data(train=("data.txt",), tokenizer="bytes"),
        batch=Batch(global_batch_size=64, micro_batch_size=8),
    )


OVERRIDES = [
    ("run.max_steps=20", "run.max_steps", 20),
    ("run.deterministic=true", "run.deterministic", True),
    ("run.name=other", "run.dir", "runs/other"),
    ('run.name="3"', "run.name", "3"),
    ("run.dir=/tmp/a=b", "run.dir", "/tmp/a=b"),
    ("optimizer.learning_rate=1e-4", "optimizer.learning_rate", 1e-4),
    ("optimizer.learning_rate=1", "optimizer.learning_rate", 1.0),
    ("optimizer.betas=[0.8, 0.9]", "optimizer.betas", (0.8, 0.9)),
    ("optimizer.betas=[0,0]", "optimizer.betas", (0.0, 0.0)),
    ("optimizer.max_grad_norm=null", "optimizer.max_grad_norm", None),
    ("data.train=./data.txt", "data.train", ("./data.txt",)),
    ("data.train=[data.txt,./data.txt]", "data.train", ("data.txt", "./data.txt")),
    ("data.validation=['*.txt']", "data.validation", ("*.txt",)),
    ("data.pin_memory=false", "data.pin_memory", False),
    ("strategy={kind: ddp, mixed_precision: null}", "strategy.mixed_precision", None),
    (
        "strategy.mixed_precision.param_dtype=float16",
        "strategy.mixed_precision",
        MixedPrecision(param_dtype="float16"),
    ),
    ("strategy.cpu_offload={}", "strategy.cpu_offload", CpuOffload()),
    ("strategy.cpu_offload.pin_memory=false", "strategy.cpu_offload", CpuOffload(pin_memory=False)),
    ("strategy.sync_every_micro_batch=auto", "strategy.sync_every_micro_batch", "auto"),
    ("strategy.sync_every_micro_batch=false", "strategy.sync_every_micro_batch", False),
    (
        "activation_checkpointing={mode: selective}",
        "activation_checkpointing",
        ActivationCheckpointing(mode="selective"),
    ),
    ("profile={start_step: 3, steps: 2}", "profile", Profile(start_step=3, steps=2)),
    (
        "logging.wandb={project: p, mode: offline}",
        "logging.wandb",
        Wandb(project="p", mode="offline"),
    ),
    ("checkpoint.export=at_end", "checkpoint.export", "at_end"),
    ("schedule={kind: wsd, decay_steps: 3}", "schedule.decay_steps", 3),
    (
        "model.config.hidden_size=64",
        "model.config",
        {"model_type": "llama", "vocab_size": 300, "hidden_size": 64},
    ),
    (
        "model.config.rope_parameters={rope_type: default}",
        "model.config.rope_parameters",
        {"rope_type": "default"},
    ),
    ("model.config.vocab_size=257", "model.config.vocab_size", 257),
    ("run.seed=${run.max_steps}", "run.seed", 10),
    ("model={config: null, path: owner/name}", "model.path", "owner/name"),
    ("model.freeze=model.embed_tokens.*", "model.freeze", ("model.embed_tokens.*",)),
    (
        "lora={rank: 8, target_modules: [q_proj, v_proj]}",
        "lora",
        Lora(rank=8, target_modules=("q_proj", "v_proj")),
    ),
    ("lora.dropout=0.1", "lora", Lora(dropout=0.1)),
    ("data.train=owner/name:train", "data.train", ("owner/name:train",)),
    ("data.train={web: {files: data.txt}}", "data.train", {"web": Source(files=("data.txt",))}),
    (
        "data.train={web: {files: [data.txt], weight: 2}, talk: {files: ./data.txt, kind: chat}}",
        "data.train",
        {
            "web": Source(files=("data.txt",), weight=2.0),
            "talk": Source(files=("./data.txt",), kind="chat"),
        },
    ),
    (
        "data.validation={near: data.txt, far: [data.txt, ./data.txt]}",
        "data.validation",
        {"near": ("data.txt",), "far": ("data.txt", "./data.txt")},
    ),
    ("data={kind: chat, messages_column: talk}", "data.messages_column", "talk"),
    ("data={kind: chat, chat_template: data.txt}", "data.chat_template", "data.txt"),
    ("data={streaming: true, shuffle_buffer: 10}", "data.shuffle_buffer", 10),
    ("checkpoint={export: at_end, export_dtype: bfloat16}", "checkpoint.export_dtype", "bfloat16"),
    ("run.max_loss_ratio=3", "run.max_loss_ratio", 3.0),
    ("run.on_divergence=rewind", "run.on_divergence", "rewind"),
    ("run={on_divergence: stop, name: a}", "run.on_divergence", "stop"),
    ("checkpoint.every_steps=null", "checkpoint.every_steps", None),
    ("checkpoint={keep_last: 3, keep_every: 1000}", "checkpoint.keep_every", 1000),
    ("checkpoint.resume=.", "checkpoint.resume", "."),
    ("checkpoint={every_steps: null, resume: never}", "checkpoint.resume", "never"),
]


@pytest.mark.parametrize(
    ("override", "key", "value"), OVERRIDES, ids=[override for override, _, _ in OVERRIDES]
)
def test_an_override_sets_its_key_and_no_other(folder, override, key, value):
    plain, changed = load(), load(override)
    got = value_at(changed, key.split("."))
    assert got == value
    assert type(got) is type(value)
    first = override.split("=")[0].split(".")[0]
    for section in dataclasses.fields(Recipe):
        if section.name != first:
            assert getattr(changed, section.name) == getattr(plain, section.name)


def test_ranks_that_do_not_divide_the_batch_may_go_on_with_a_run(folder):
    """Where a run resumes, places of the global batch stay empty; a fresh start is refused (test_broken_recipes)."""
    with pytest.raises(RecipeError, match="64 is not a multiple of"):
        load(ranks=3)
    checkpoint = folder / "runs/small/checkpoints/step_00000005"
    checkpoint.mkdir(parents=True)
    assert load(ranks=3) == load()
    assert (
        load("checkpoint.resume=" + str(checkpoint), "run.dir=elsewhere", ranks=3).run.dir
        == "elsewhere"
    )
    with pytest.raises(RecipeError, match="60 is not a multiple of 8"):
        load("batch.global_batch_size=60", ranks=3)


def test_the_best_checkpoint_goes_by_a_validation_of_any_kind(folder):
    assert (
        load("checkpoint.keep_best=eval_loss", "data.validation=[data.txt]").checkpoint.keep_best
        == "eval_loss"
    )
    own = [
        "model={config: null, builder: a.b:c}",
        "data={builder: a.b:c, train: null, tokenizer: null}",
    ]
    assert load("checkpoint.keep_best=eval_loss", *own).checkpoint.keep_best == "eval_loss"


def test_the_last_of_several_overrides_holds(folder):
    assert load(
        "run.seed=1", "strategy.cpu_offload={}", "run.seed=2", "strategy.cpu_offload=null"
    ) == load("run.seed=2")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_either_kind_runs_the_complete_recipe_of_the_other(kind):
    other = {"ddp": "fsdp", "fsdp": "ddp"}[kind]
    changed = load(f"strategy.kind={kind}", recipe=other)
    assert changed.strategy == load(recipe=kind).strategy


def test_interpolation(folder, monkeypatch):
    monkeypatch.setenv("DATA_FOLDER", str(folder))
    (folder / "x.yaml").write_text(
        SMALL.replace(
            "  max_steps: 10", "  max_steps: 10\n  dir: out/${run.name}-${run.seed}-${.max_steps}"
        ).replace(
            "[data.txt]",
            '["${oc.env:DATA_FOLDER}/data.txt", "${stdlib:}/json/*.py", "${oc.env:UNSET,data.txt}"]',
        )
    )
    recipe = load()
    assert recipe.run.dir == "out/small-1234-10"  # the seed is a default
    assert recipe.data.train == (
        f"{folder}/data.txt",
        f"{sysconfig.get_path('stdlib')}/json/*.py",
        "data.txt",
    )
    assert load("run.name=b", "run.seed=5").run.dir == "out/b-5-10"


def test_a_section_can_be_interpolated_or_merged(folder):
    (folder / "x.yaml").write_text(
        SMALL
        + "evaluation: &often\n  every_steps: 3\nlogging:\n  tensorboard: true\n  <<: *often\n"
    )
    loaded = load_recipe(["recipe=x.yaml"], ranks=None)
    assert loaded.recipe.logging == schema.Logging(every_steps=3, tensorboard=True)
    assert loaded.origins.of(("logging", "every_steps")) == "x.yaml:15"
    assert loaded.origins.of(("logging", "tensorboard")) == "x.yaml:17"
    (folder / "x.yaml").write_text(
        SMALL + "evaluation: &often\n  every_steps: 3\nlogging:\n  every_steps: 9\n  <<: *often\n"
    )
    loaded = load_recipe(["recipe=x.yaml"], ranks=None)
    assert (loaded.recipe.logging.every_steps, loaded.origins.of(("logging", "every_steps"))) == (
        9,
        "x.yaml:17",
    )


def test_origins(folder):
    loaded = load_recipe(
        [
            "recipe=x.yaml",
            "run.seed=3",
            "strategy={kind: ddp}",
            "data.train=[data.txt]",
            "profile.steps=2",
            "profile.start_step=1",
        ],
        ranks=1,
    )
    origins = {
        "run.name": "x.yaml:2",
        "run.max_steps": "x.yaml:3",
        "model.config": "x.yaml:5",
        "model.config.vocab_size": "x.yaml:7",
        "run.seed": "command line",
        "strategy.kind": "command line",
        "data.train": "command line",
        "profile.steps": "command line",
        "run.dir": "default",
        "strategy.replicate": "default",
        "evaluation.every_steps": "default",
    }
    assert {key: loaded.origins.of(tuple(key.split("."))) for key in origins} == origins


def test_what_turns_out_later_names_its_origin(folder):
    loaded = load_recipe(
        ["recipe=x.yaml", "strategy.mixed_precision={param_dtype: bfloat16}"], ranks=1
    )
    assert (
        str(loaded.refuse(("run", "max_steps"), "is no good"))
        == "x.yaml:3: run.max_steps: is no good"
    )
    precision = ("strategy", "mixed_precision", "param_dtype")
    assert (
        str(loaded.refuse(precision, "no such GPU"))
        == "command line: strategy.mixed_precision.param_dtype: no such GPU"
    )
    assert (
        str(loaded.refuse(("optimizer", "eps"), "too small")) == "x.yaml: optimizer.eps: too small"
    )


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_to_yaml_is_the_same_recipe_with_every_key(file, tmp_path):
    recipe = load(*yours(file), recipe=file)
    written = tmp_path / "recipe.yaml"
    written.write_text(to_yaml(recipe))
    assert load(recipe=written) == recipe
    assert to_yaml(load(recipe=written)) == written.read_text()
    plain = yaml.safe_load(written.read_text())
    for path, kind in sections():
        if value_at(recipe, path) is not None:
            shown = plain
            for name in path:
                shown = shown[name]
            assert list(shown) == [field.name for field in dataclasses.fields(kind)]


MIXTURE = SMALL.replace(
    "  train: [data.txt]\n",
    "  train:\n    web: {files: data.txt, weight: 3}\n    talk:\n      files: [./data.txt]\n      kind: chat\n"
    "  validation:\n    near: data.txt\n    far: [data.txt, '*.txt']\n",
)


def test_a_mixture_survives_being_written_and_overridden(folder):
    (folder / "x.yaml").write_text(MIXTURE)
    web, talk = Source(files=("data.txt",), weight=3.0), Source(files=("./data.txt",), kind="chat")
    recipe = load()
    assert recipe.data.train == {"web": web, "talk": talk}
    assert recipe.data.validation == {"near": ("data.txt",), "far": ("data.txt", "*.txt")}
    (folder / "y.yaml").write_text(to_yaml(recipe))
    assert load(recipe="y.yaml") == recipe
    assert to_yaml(load(recipe="y.yaml")) == (folder / "y.yaml").read_text()

    assert load("data.train.web.weight=4").data.train == {
        "web": dataclasses.replace(web, weight=4.0),
        "talk": talk,
    }
    assert load("data.train.web.files=./data.txt").data.train["web"] == Source(
        files=("./data.txt",), weight=3.0
    )
    assert load("data.train.code={files: data.txt}").data.train == {
        "web": web,
        "talk": talk,
        "code": Source(files=("data.txt",)),
    }
    assert load("data.train=[data.txt]").data.train == ("data.txt",)
    assert load("data.validation.near=./data.txt").data.validation["near"] == ("./data.txt",)
    assert load("data.validation=null").data.validation is None


def test_show_prints_a_mixture_as_it_is_written(folder, capsys):
    (folder / "x.yaml").write_text(MIXTURE)
    assert show(["recipe=x.yaml", "data.train.talk.weight=0.5"]) == 0
    printed = capsys.readouterr().out
    lines = [re.sub(r" {2,}(?=#)", "  ", line) for line in printed.splitlines()]
    at = lines.index("  train:")
    assert lines[at : at + 12] == [
        "  train:",
        "    web:",
        "      files: [data.txt]  # x.yaml:10",
        "      weight: 3.0  # x.yaml:10",
        "      kind: null  # default",
        "    talk:",
        "      files: [./data.txt]  # x.yaml:12",
        "      weight: 0.5  # command line",
        "      kind: chat  # x.yaml:13",
        "  validation:",
        "    near: [data.txt]  # x.yaml:15",
        "    far: [data.txt, '*.txt']  # x.yaml:16",
    ]
    (folder / "y.yaml").write_text(printed)
    assert load(recipe="y.yaml") == load("data.train.talk.weight=0.5")


# fmt: off
TEXTS = [
    "1e-4", "-1.5E+3", "1_000", "010", "1:30", "null", "~", "on", "true", ".nan", "2020-01-01",
    "=", "<<", "???x", "- a", "a: b", "a #b", "a, b",
    "*", "&a", "!a", "%", "@", "`", "'", '"', "[a]",
    "{a: b}", "日本語 🙂", " a ", "a\nb", "a\tb", "x" * 300, "${run.name}", "\\${x}", "a\\",
]
# fmt: on


@pytest.mark.parametrize(
    "texts", list(zip(TEXTS[::3], TEXTS[1::3], TEXTS[2::3], strict=True)), ids=repr
)
def test_text_survives_being_written(folder, texts):
    column, project, entity = texts
    keys = {
        "data.text_column": column,
        "logging.wandb.project": project,
        "logging.wandb.entity": entity,
    }
    plain = load()
    recipe = dataclasses.replace(
        plain,
        data=dataclasses.replace(plain.data, text_column=column),
        logging=dataclasses.replace(plain.logging, wandb=Wandb(project=project, entity=entity)),
    )
    (folder / "y.yaml").write_text(to_yaml(recipe))
    assert load(recipe="y.yaml") == recipe
    assert load(*(f"{key}={scalar_as_yaml(text)}" for key, text in keys.items())) == recipe


@pytest.mark.parametrize("number", [1e-8, 2.5e-05, 3, 1e22, 0.1 + 0.2])
def test_numbers_survive_being_written(folder, number):
    recipe = load(f"optimizer.weight_decay={number!r}")
    assert recipe.optimizer.weight_decay == number
    (folder / "y.yaml").write_text(to_yaml(recipe))
    assert load(recipe="y.yaml") == recipe


def test_nothing_can_be_changed(folder):
    recipe = load(
        *(
            "strategy.cpu_offload={}",
            "activation_checkpointing={}",
            "logging.wandb={project: p}",
            "profile={start_step: 1, steps: 1}",
        ),
        *("lora={}", "data.train={a: {files: data.txt}}", "slurm={}"),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.data.train["a"].weight = 2.0
    for path, kind in sections():
        for field in dataclasses.fields(kind):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value_at(recipe, path), field.name, None)


def test_every_key_of_the_schema_has_a_docstring():
    """But a key that is a section, whose class has one."""
    undocumented = []
    for _, kind in sections():
        (tree,) = ast.parse(inspect.getsource(kind)).body
        assert ast.get_docstring(tree), kind
        for statement, after in zip(tree.body, [*tree.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                documented = (
                    isinstance(after, ast.Expr)
                    and isinstance(after.value, ast.Constant)
                    and isinstance(after.value.value, str)
                )
                key = statement.target.id
                is_section = dataclasses.is_dataclass(typing.get_type_hints(kind)[key])
                if not is_section and not (documented and after.value.value.strip()):
                    undocumented.append(f"{kind.__name__}.{key}")
    assert undocumented == []


def test_the_json_schema_describes_every_key(capsys):
    assert run(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for _, kind in sections():
        section = printed if kind is Recipe else printed["$defs"][kind.__name__]
        assert list(section["properties"]) == [field.name for field in dataclasses.fields(kind)]
        assert section["description"].strip()
        for key in section[
            "properties"
        ].values():  # a key described like its section has no description of its own
            assert key.get("description", key.get("$ref"))
        assert section["additionalProperties"] is False
    data, optimizer = printed["$defs"]["Data"], printed["$defs"]["Optimizer"]
    assert [kind["type"] for kind in data["properties"]["train"]["anyOf"]] == [
        "string",
        "array",
        "object",
        "null",
    ]
    assert data["properties"]["kind"]["enum"] == [
        "text",
        "tokens",
        "chat",
        "instruct",
        "classification",
    ]
    rate = optimizer["properties"]["learning_rate"]
    assert (rate["type"], rate["minimum"], rate["default"]) == ("number", 0, 2e-5)
    assert printed["required"] == ["run", "model", "data", "batch"]


def test_a_recipe_with_wrong_keys_decodes_to_the_sound_ones():
    """A checkpoint may hold a recipe with keys that this version does not know."""
    plain = {
        "run": {"nam": "a", "seed": 3},
        "data": {"train": [3]},
        "profile": {"steps": "x"},
        "gone": {},
    }
    recipe, problems, unsound = decode(plain)
    assert (recipe.run.seed, recipe.data.train, recipe.profile) == (3, None, None)
    assert {dotted(path) for path in unsound} == {
        *("gone", "run.nam", "run.name", "data.train[0]", "profile.start_step", "profile.steps"),
        "batch.global_batch_size",
    }
    assert "run.name" not in {dotted(problem.path) for problem in problems}


@pytest.mark.parametrize("file", COMPLETE, ids=lambda file: file.stem)
def test_complete_recipes_show_every_key(file):
    """Where a section is null, the comment beside it names its keys."""
    loaded = load_recipe([f"recipe={file}"], ranks=None)
    text = file.read_text().splitlines()
    hidden = []
    for path, kind in sections():
        section = value_at(loaded.recipe, path[:-1]) and value_at(loaded.recipe, path)
        for field in dataclasses.fields(kind):
            if section is not None:
                shown = (*path, field.name) in loaded.origins.places
            else:
                shown = (
                    re.search(
                        rf"\b{field.name}\b",
                        text[loaded.origins.places[path] - 1].partition("#")[2],
                    )
                    is not None
                )
            if not shown:
                hidden.append(dotted((*path, field.name)))
    assert hidden == []


@pytest.mark.parametrize("file", COMPLETE, ids=lambda file: file.stem)
def test_complete_recipes_say_what_the_choices_are(file):
    """A comment with `a | b` names every value that the key takes, but what is not built yet."""
    loaded = load_recipe([f"recipe={file}"], ranks=None)
    text = file.read_text().splitlines()
    for key, choices in {
        "run.float32_matmul": {"highest", "high", "medium"},
        "run.on_divergence": {"stop", "rewind"},
        "strategy.kind": {"ddp", "fsdp"},
        "data.kind": {"text", "tokens", "chat", "instruct", "classification"},
        "schedule.kind": {"cosine", "linear", "constant", "wsd"},
        "model.init": {"pretrained", "random"},
        "model.task": {"causal_lm", "sequence_classification"},
        "data.on_error": {"fail", "skip"},
        "checkpoint.keep_best": {"null", "eval_loss"},
        "checkpoint.resume": {"auto", "never"},
        "checkpoint.export_dtype": {"bfloat16", "float16", "float32"},
    }.items():
        line = loaded.origins.places[tuple(key.split("."))]
        comment = text[line - 1].partition("#")[2]
        for further in text[line:]:
            if not further.lstrip().startswith("#"):
                break
            comment += further
        assert choices <= set(re.findall(r"\w+", comment)), key


def test_a_recipe_is_checked_without_torch():
    program = (
        "import sys, time; from launcher.recipe.load import load_recipe\n"
        "load_recipe(['recipe=fsdp', 'model.config.hidden_size=64'], ranks=2)\n"
        "heavy = {'torch', 'transformers', 'numpy', 'pyarrow', 'tokenizers'} & set(sys.modules)\n"
        "print(f'checked after {time.process_time():.2f} s of CPU time', file=sys.stderr)\n"
        "print(sorted(heavy))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_a_config_key_that_only_the_model_reads_is_known():
    """The config class of qwen3_moe does not declare head_dim; its attention reads it."""
    config = {"model_type": "qwen3_moe", "head_dim": 32}
    assert list(config_problems(config, task="causal_lm")) == []
    assert [key for key, _ in config_problems(config | {"head_dims": 32}, task="causal_lm")] == [
        "head_dims"
    ]
