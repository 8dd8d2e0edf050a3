"""Valid recipes: decoding, defaults, overrides, origins of values, and the shipped recipes."""

import dataclasses
import functools
import itertools
import json
import operator
import re
import sysconfig
import typing

import pytest
import yaml

from launcher.checkpoint.resume import check_recipe, recipe_of_state, recipe_to_compare
from launcher.cli.main import run
from launcher.errors import RecipeError
from launcher.recipe import schema
from launcher.recipe.decode import decode, dotted, subsection
from launcher.recipe.derived import Derived
from launcher.recipe.functions import call_function
from launcher.recipe.load import (
    argument_digests,
    load_recipe,
    recorded_recipe,
    resolve_arguments,
    to_yaml,
)
from launcher.recipe.schema import (
    ActivationCheckpointing,
    Batch,
    CpuOffload,
    Data,
    Distillation,
    Embedding,
    Images,
    Kto,
    Lora,
    Model,
    MultiToken,
    Objective,
    Preference,
    Profile,
    Recipe,
    Reranker,
    Run,
    Source,
    Videos,
    Wandb,
)
from launcher.recipe.yaml_text import as_override, parse_yaml
from tests import REPOSITORY
from tests.unit.small_recipe import SMALL

SHIPPED = sorted((REPOSITORY / "recipes").glob("*.yaml"))
COMPLETE = REPOSITORY / "recipes/fsdp.yaml"
"""The recipe that shows every key."""
USER_DATA = [f"data.train={REPOSITORY}/README.md"]
"""Overrides that replace the user's data in the recipes for real models."""
FINETUNE_DATA = [
    *USER_DATA,
    "data.validation=null",
    "data.tokenizer=bytes",
    "model={path: null, config: {model_type: llama}}",
]
"""Overrides that replace the files that `make finetune` creates."""


def data_overrides(file):
    return (
        USER_DATA
        if "my/data" in file.read_text()
        else FINETUNE_DATA
        if file.stem in ("finetune", "prefer", "smollm2")
        else ["images=null", *FINETUNE_DATA]
        if file.stem == "pictures"
        else ["data.kind=retrieval", "evaluation.at_start=false", *FINETUNE_DATA]
        if file.stem == "embedding"
        else ["model.path=gpt2", *USER_DATA]
        if file.stem == "sft"
        else []
    )


def load(*overrides, recipe="x.yaml", ranks=None):
    return load_recipe([f"recipe={recipe}", *overrides], ranks=ranks).recipe


def sections(kind=Recipe, path=()):
    """Yields (path, dataclass) for each section of the schema, starting with the recipe itself."""
    yield path, kind
    for field in dataclasses.fields(kind):
        if (inner := subsection(kind, field.name)) not in (None, Source):
            yield from sections(inner, (*path, field.name))


def value_at(recipe, path):
    for name in path:
        recipe = getattr(recipe, name) if dataclasses.is_dataclass(recipe) else recipe[name]
    is_list = isinstance(recipe, tuple) and dataclasses.is_dataclass(next(iter(recipe), None))
    return recipe[0] if is_list else recipe


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_shipped_recipes_are_written_with_every_key(file, tmp_path):
    ranks = {
        "llama_3_1_8b_128k": 8,
        "qwen3_8b_1m": 8,
        "qwen3_30b_a3b": 8,
        "llama_3_1_70b_tensor": 16,
        "llama_3_1_405b_pipeline": 256,
    }.get(file.stem, 2)
    recipe = load(*data_overrides(file), recipe=file.stem, ranks=ranks)
    assert recipe == load(*data_overrides(file), recipe=file)
    assert (recipe.run.name, recipe.run.dir) == (file.stem, f"runs/{file.stem}")
    written = tmp_path / "recipe.yaml"
    written.write_text(to_yaml(recipe))
    assert load(recipe=written) == recipe
    assert to_yaml(load(recipe=written)) == written.read_text()
    plain = yaml.safe_load(written.read_text())
    for path, kind in sections():
        if value_at(recipe, path) is not None:
            shown = functools.reduce(operator.getitem, path, plain)
            assert list(shown) == list(kind.__dataclass_fields__)


def test_recipes_that_differ_have_another_repr():
    """Caches of the plan are keyed by it."""

    def sections(cls):
        for field in dataclasses.fields(cls):
            assert field.repr, (cls, field.name)
        assert "__repr__" in vars(cls), cls
        hints = typing.get_type_hints(cls)
        for inner in (each for hint in hints.values() for each in (hint, *typing.get_args(hint))):
            if dataclasses.is_dataclass(inner):
                sections(inner)

    sections(Recipe)


def test_omitted_keys_have_defaults(folder):
    assert load() == Recipe(
        run=Run(name="small", dir="runs/small", max_steps=10),
        model=Model(config={"model_type": "llama", "vocab_size": 300}),
        data=Data(train=("data.txt",), tokenizer="bytes"),
        batch=Batch(global_batch_size=64, micro_batch_size=8),
    )


WEB = {"web": Source(files=("data.txt",))}
OVERRIDES = {
    "run.max_steps=20": 20,
    "run.deterministic=true": True,
    'run.name="3"': "3",
    "run.dir=/tmp/a=b": "/tmp/a=b",
    "run.seed=${run.max_steps}": 10,
    "run.max_loss_ratio=3": 3.0,
    "optimizer.learning_rate=1e-4": 1e-4,
    "optimizer.betas=[0,0]": (0.0, 0.0),
    "optimizer.max_grad_norm=null": None,
    "data.train=./data.txt": ("./data.txt",),
    "data.train=owner/name:train": ("owner/name:train",),
    "data.train=owner/name:train[:1000]": ("owner/name:train[:1000]",),
    "data.train={web: {files: data.txt}}": WEB,
    "data.validation=['*.txt']": ("*.txt",),
    "data.validation={near: data.txt, far: [data.txt, ./data.txt]}": {
        "near": ("data.txt",),
        "far": ("data.txt", "./data.txt"),
    },
    "strategy.mixed_precision.param_dtype=float16": "float16",
    "strategy.mixed_precision=null": None,
    "strategy.cpu_offload={}": CpuOffload(),
    "strategy.cpu_offload.pin_memory=false": False,
    "strategy.sync_every_micro_batch=auto": "auto",
    "strategy.sync_every_micro_batch=false": False,
    "activation_checkpointing={mode: selective}": ActivationCheckpointing(mode="selective"),
    "profile={start_step: 3, steps: 2}": Profile(start_step=3, steps=2),
    "lora={rank: 8, target_modules: [q_proj]}": Lora(rank=8, target_modules=("q_proj",)),
    "model.config.rope_parameters={rope_type: default}": {"rope_type": "default"},
    "model.freeze=model.embed_tokens.*": ("model.embed_tokens.*",),
    "checkpoint.resume=.": ".",
}


def test_override_changes_only_its_key(folder):
    plain = load()
    for override, value in OVERRIDES.items():
        changed = load(override)
        first, *rest = override.partition("=")[0].split(".")
        got = value_at(changed, [first, *rest])
        assert (override, got, type(got)) == (override, value, type(value))
        unchanged = {first: getattr(plain, first)}
        if first == "lora":  # the rate of adapters is auto
            unchanged["optimizer"] = plain.optimizer
        assert dataclasses.replace(changed, **unchanged) == plain


def test_an_argument_replaces_the_alternative_in_the_file(folder):
    """Of two keys, exactly one must be given."""
    alternatives: dict[tuple[str, ...], dict[str, object]] = {
        ("run.epochs=2",): {"run.epochs": 2, "run.max_steps": None},
        ("run={epochs: 2}",): {"run.epochs": 2, "run.max_steps": None, "run.name": "small"},
        ("batch.micro_batch_tokens=2048", "data.packing=false"): {
            "batch.micro_batch_tokens": 2048,
            "batch.micro_batch_size": None,
        },
    }
    for words, expected in alternatives.items():
        loaded = load_recipe(["recipe=x.yaml", *words], ranks=None)
        for key, value in expected.items():
            assert operator.attrgetter(key)(loaded.recipe) == value
        again = [
            as_override(dotted(path), derived.value)
            for path, derived in loaded.origins.derived.items()
        ]
        assert load(*words, *again) == loaded.recipe  # as `launcher train` starts the ranks
    derived = loaded.origins.derived["batch", "micro_batch_size"]
    assert str(derived) == "null, because batch.micro_batch_tokens is given"


@pytest.mark.parametrize(
    "value", [None, False, 3, 1e-05, "a, b", "null", "40GiB", "x: y", ["a, b", "c"], {"a": "1, 2"}]
)
def test_a_derived_value_reaches_the_ranks_as_it_is(value):
    """Also one with a comma, at which its text was cut."""
    key, _, text = as_override("data.kind", value).partition("=")
    assert (key, parse_yaml(text)[0]) == ("data.kind", value)
    assert str(Derived(value, "because, of")).endswith(", because, of")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ("model.path=owner/name model.config=null lora.quantize=nf4", "because {} excludes it"),
        ("strategy.tensor_parallel_size=2", "no GPU has run {} compiled; true compiles it"),
        ("strategy.expert_parallel_size=2", "no GPU has run {} compiled; true compiles it"),
    ],
)
def test_automatic_compilation_is_off_with_some_keys(folder, words, why):
    loaded = load_recipe(["recipe=x.yaml", "model.compile=auto", *words.split()], ranks=None)
    assert loaded.recipe.model.compile is False
    key = words.split()[-1].partition("=")[0]
    assert loaded.origins.of(("model", "compile")) == f"false, {why.format(key)}"
    assert load("model.compile=auto").model.compile == "auto"


def test_no_part_is_held_out_with_a_share_of_0(folder):
    assert load("data.validation_split=0").data.validation_split is None
    assert load("data.validation_split=0.0").data.validation_split is None


def test_several_overrides_are_combined(folder):
    load("checkpoint.keep_best=eval_loss", "data.validation=[data.txt]")
    own = "data={builder: a.b:c, train: null, tokenizer: null}"
    load("checkpoint.keep_best=eval_loss", "model={config: null, builder: a.b:c}", own)
    offload = "strategy.cpu_offload="  # the last one applies
    twice = load("run.seed=1", f"{offload}{{}}", "run.seed=2", f"{offload}null")
    assert twice == load("run.seed=2")


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_recipes_work_with_either_strategy(kind):
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
    library = sysconfig.get_path("stdlib")
    assert recipe.data.train == (f"{folder}/data.txt", f"{library}/json/*.py", "data.txt")
    assert load("run.name=b", "run.seed=5").run.dir == "out/b-5-10"


BUILT = ("data.train=null", "data.builder=a:b", "data.tokenizer=null", "data.validation=null")


@pytest.mark.parametrize(
    ("text", "kept", "value"),
    [
        ("${oc.env:WORD}", "${oc.env:WORD}", "secret-word"),
        ("x: ${oc.env:WORD}/${run.name}", "x: ${oc.env:WORD}/small", "x: secret-word/small"),
        ("${oc.decode:${oc.env:NUMBER}}", "${oc.decode:${oc.env:NUMBER}}", 5),
        ("${oc.env:UNSET,null}", "${oc.env:UNSET,null}", None),
        ("${oc.env:UNSET,${run.name}}", '${oc.env:UNSET,"small"}', "small"),
        ("${data.arguments.other}", "${oc.env:WORD}", "secret-word"),
        ("${run.name}", "small", "small"),
        ("\\${oc.env:WORD}", "${oc.env:WORD}", "${oc.env:WORD}"),
    ],
)
def test_arguments_from_the_environment_stay_references(folder, monkeypatch, text, kept, value):
    """They may be secrets. What a run records of them has their values nowhere."""
    monkeypatch.setenv("WORD", "secret-word")
    monkeypatch.setenv("NUMBER", "5")
    (folder / "x.yaml").write_text(SMALL.replace("  sequence_length: 8\n", ""))
    given = json.dumps({"a": [text], "other": "${oc.env:WORD}"})
    recipe = load(*BUILT, f"data.arguments={given}")
    recorded = to_yaml(recipe)
    again = recorded_recipe(recorded, file=folder)
    assert again == recipe
    assert to_yaml(again) == recorded
    assert "secret-word" not in recorded + json.dumps(dataclasses.asdict(recipe))
    for each in (recipe, again, load_recipe_text(folder, recorded)):
        assert each.data.arguments["a"][0] == kept
        resolved = resolve_arguments(each.data.arguments, ("data", "arguments"))
        assert resolved == {"a": [value], "other": "secret-word"}


def load_recipe_text(folder, text):
    (folder / "y.yaml").write_text(text)
    return load_recipe(["recipe=y.yaml"], ranks=None).recipe


def test_arguments_without_a_value_are_refused(folder, monkeypatch):
    (folder / "x.yaml").write_text(SMALL.replace("  sequence_length: 8\n", ""))
    monkeypatch.setenv("WORD", "secret-word")
    recipe = load(*BUILT, "data.arguments={a: '${oc.env:WORD}'}")
    monkeypatch.delenv("WORD")
    what = r"data.arguments.a: \$\{oc.env:WORD\} cannot be interpolated: .*'WORD' not found"
    with pytest.raises(RecipeError, match=what):
        call_function("os.path:join", recipe.data.arguments, key="data.builder")
    with pytest.raises(RecipeError, match=r"data.arguments.a: cannot be interpolated"):
        load(*BUILT, "data.arguments={a: '${oc.env:WORD}'}")
    monkeypatch.setenv("WORD", "{a: 1}")
    with pytest.raises(RecipeError, match="an argument that reads the environment must be a text"):
        load(*BUILT, "data.arguments=${oc.decode:${oc.env:WORD}}")


def test_another_value_of_an_argument_is_noticed_by_its_digest(folder, monkeypatch):
    (folder / "x.yaml").write_text(SMALL.replace("  sequence_length: 8\n", ""))
    monkeypatch.setenv("WORD", "secret-word")
    recipe = load(*BUILT, "data.arguments={a: ['${oc.env:WORD}']}")
    digests = argument_digests(recipe)
    assert argument_digests(recipe)["salt"] != digests["salt"]
    assert "secret-word" not in json.dumps(digests)
    state = {"recipe": to_yaml(recipe), "environment": digests}

    def check():
        now = recipe_to_compare(recipe, digests)
        check_recipe(folder, recipe_of_state(state), now, allow=False)

    check()
    monkeypatch.setenv("WORD", "another")
    digest = r"\$\{oc.env:WORD\} \(digest [0-9a-f]{8}\)"
    with pytest.raises(RecipeError, match=rf'data.arguments.a: \["{digest}"\] -> \["{digest}"\]'):
        check()
    assert argument_digests(load()) == {}


def test_sections_can_be_merged_with_yaml_anchors(folder):
    anchor, key = "evaluation: &often\n  every_steps: 3\nlogging:\n", ("logging", "every_steps")
    (folder / "x.yaml").write_text(SMALL + anchor + "  tensorboard: true\n  <<: *often\n")
    loaded = load_recipe(["recipe=x.yaml"], ranks=None)
    assert loaded.recipe.logging == schema.Logging(every_steps=3, tensorboard=True)
    assert loaded.origins.of(key) == "x.yaml:15"
    assert loaded.origins.of(("logging", "tensorboard")) == "x.yaml:17"
    (folder / "x.yaml").write_text(SMALL + anchor + "  every_steps: 9\n  <<: *often\n")
    loaded = load_recipe(["recipe=x.yaml"], ranks=None)
    assert loaded.recipe.logging.every_steps == 9
    assert loaded.origins.of(key) == "x.yaml:17"


def test_origins_of_values(folder):
    words = (
        "run.seed=3;strategy={kind: ddp};data.train=[data.txt];profile.steps=2;profile.start_step=1"
    )
    loaded = load_recipe(["recipe=x.yaml", *words.split(";")], ranks=1)
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
    late = {  # problems found after the check
        ("run", "max_steps"): "x.yaml:3: run.max_steps: wrong",
        ("strategy", "kind"): "command line: strategy.kind: wrong",
        ("optimizer", "eps"): "x.yaml: optimizer.eps: wrong",
    }
    assert {key: str(loaded.refuse(key, "wrong")) for key in late} == late


MIXTURE = SMALL.replace(
    "  train: [data.txt]\n",
    "  train:\n    web: {files: data.txt, weight: 3}\n    talk:\n      files: [./data.txt]\n      kind: chat\n      weight: 1\n"
    "  validation:\n    near: data.txt\n    far: [data.txt, '*.txt']\n",
)


def test_mixture_is_written_shown_and_overridden(folder, capsys):
    (folder / "x.yaml").write_text(MIXTURE)
    web, talk = (
        Source(files=("data.txt",), weight=3.0),
        Source(files=("./data.txt",), kind="chat", weight=1.0),
    )
    recipe = load()
    assert recipe.data.train == {"web": web, "talk": talk}
    assert recipe.data.validation == {"near": ("data.txt",), "far": ("data.txt", "*.txt")}
    (folder / "y.yaml").write_text(to_yaml(recipe))
    assert load(recipe="y.yaml") == recipe
    for override, train in {
        "data.train.web.weight=4": {"web": dataclasses.replace(web, weight=4.0), "talk": talk},
        "data.train.code={files: data.txt, weight: 2}": {
            "web": web,
            "talk": talk,
            "code": dataclasses.replace(web, weight=2.0),
        },
        "data.train=[data.txt]": ("data.txt",),
    }.items():
        assert load(override).data.train == train
    assert load("data.validation.near=./data.txt").data.validation["near"] == ("./data.txt",)

    assert run(["show", "recipe=x.yaml", "data.train.talk.weight=0.5"]) == 0
    printed = capsys.readouterr().out
    lines = [re.sub(r" {2,}(?=#)", "  ", line) for line in printed.splitlines()]
    lines = [
        line
        for line in lines
        if "mixture_" not in line
        and not re.search(
            r"(_column|_prompt|limit|columns|prompt_format|overlong|max_epochs|loss_weight|token_dtype|end_token): null  # default$",
            line,
        )
    ]
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
        "    near: [data.txt]  # x.yaml:16",
        "    far: [data.txt, '*.txt']  # x.yaml:17",
    ]
    (folder / "y.yaml").write_text(printed)
    assert load(recipe="y.yaml") == load("data.train.talk.weight=0.5")


# fmt: off
TEXTS = [
    "1e-4", "-1.5E+3", "1_000", "010", "1:30", "null", "~", "on", "true", ".nan", "2020-01-01",
    "=", "<<", "???x", "- a", "a: b", "a #b", "a, b",
    "*", "&a", "!a", "%", "@", "`", "'", '"', "[a]",
    "{a: b}", "日本語 🙂", " a ", "a\nb\n", "a\tb", "x" * 300, "${run.name}", "\\${x}", "a\\",
]
# fmt: on


@pytest.mark.slow
def test_text_and_numbers_round_trip(folder, capsys):
    plain = load()
    for column, project, entity in zip(TEXTS[::3], TEXTS[1::3], TEXTS[2::3], strict=True):
        recipe = dataclasses.replace(
            plain,
            data=dataclasses.replace(plain.data, text_column=column),
            logging=dataclasses.replace(plain.logging, wandb=Wandb(project=project, entity=entity)),
        )
        (folder / "y.yaml").write_text(to_yaml(recipe))
        assert load(recipe="y.yaml") == recipe
        assert run(["show", "recipe=y.yaml"]) == 0
        (folder / "z.yaml").write_text(capsys.readouterr().out)
        assert load(recipe="z.yaml") == recipe
        keys = ("data.text_column", "logging.wandb.project", "logging.wandb.entity")
        escaped = (re.sub(r"(\\*)\$\{", r"\1\1\\${", text) for text in (column, project, entity))
        quoted = (json.dumps(text, ensure_ascii=False) for text in escaped)
        overrides = [f"{key}={text}" for key, text in zip(keys, quoted, strict=True)]
        assert load(*overrides) == recipe
    for number in (1e-8, 2.5e-05, 3, 1e22, 0.1 + 0.2):
        recipe = load(f"optimizer.weight_decay={number!r}")
        assert recipe.optimizer.weight_decay == number
        (folder / "y.yaml").write_text(to_yaml(recipe))
        assert load(recipe="y.yaml") == recipe


def test_recipe_is_immutable(folder):
    recipe = load(
        *("strategy.cpu_offload={}", "activation_checkpointing={}", "lora={}", "slurm={}"),
        *("logging.wandb={project: p}", "profile={start_step: 1, steps: 1}"),
        *("data.train={a: {files: data.txt, weight: 1}}", "data.validation=data.txt"),
        "data.mixture_stages=[{until_step: 1, weights: {a: 1}}]",
        *("data.kind=chat", "evaluation.generate={}"),
        "optimizer.groups=[{patterns: a, weight_decay: 0}]",
    )
    recipe = dataclasses.replace(recipe, preference=Preference(), kto=Kto())  # for other data
    recipe = dataclasses.replace(recipe, distillation=Distillation(teacher="a/b"))
    model = dataclasses.replace(recipe.model, mtp=MultiToken())
    recipe = dataclasses.replace(recipe, model=model)
    recipe = dataclasses.replace(recipe, objective=Objective(loss="a:b"), images=Images())
    recipe = dataclasses.replace(recipe, videos=Videos())
    recipe = dataclasses.replace(recipe, embedding=Embedding(), reranker=Reranker())
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.data.train["a"].weight = 2.0
    for path, kind in sections():
        for name in kind.__dataclass_fields__:
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(value_at(recipe, path), name, None)


@pytest.mark.slow
def test_json_schema_describes_every_key(capsys):
    assert run(["schema"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for _, kind in sections():
        section = printed if kind is Recipe else printed["$defs"][kind.__name__]
        assert list(section["properties"]) == list(kind.__dataclass_fields__)
        assert section["description"].strip()
        for key in section["properties"].values():  # the class of a section describes it
            assert key.get("description", key.get("$ref"))
        assert section["additionalProperties"] is False
    data = printed["$defs"]["Data"]["properties"]
    assert [kind["type"] for kind in data["train"]["anyOf"]] == [
        "string",
        "array",
        "object",
        "null",
    ]
    kinds, null = data["kind"]["anyOf"]
    assert (kinds["enum"], null) == (
        [
            *("text", "tokens", "chat", "instruct", "classification", "preference", "unpaired"),
            *("retrieval", "reranking"),
        ],
        {"type": "null"},
    )
    rate = printed["$defs"]["Optimizer"]["properties"]["learning_rate"]
    assert [kind.get("type") for kind in rate["anyOf"]] == ["number", "string"]
    assert rate["default"] == 2e-5
    assert printed["required"] == ["run", "model", "data", "batch"]


def test_decode_keeps_valid_keys_of_an_invalid_recipe():
    """A checkpoint may contain a recipe with keys that this version does not know."""
    plain = {"run": {"nam": "a", "seed": 3}, "data": {"train": [3]}, "profile": {"steps": "x"}}
    recipe, problems, unsound = decode(plain | {"gone": {}})
    assert (recipe.run.seed, recipe.data.train, recipe.profile) == (3, None, None)
    assert {dotted(path) for path in unsound} == {
        *("gone", "run.nam", "run.name", "data.train", "profile", "batch.global_batch_size"),
    }
    assert "run.name" not in {dotted(problem.path) for problem in problems}


def test_complete_recipe_shows_every_key_and_every_choice():
    """The comment at a section that is null names its keys. Comments name all allowed values."""
    loaded = load_recipe([f"recipe={COMPLETE}"], ranks=None)
    lines, places = COMPLETE.read_text().splitlines(), loaded.origins.places

    def comment(path):
        first = places[path]
        further = itertools.takewhile(lambda line: line.lstrip().startswith("#"), lines[first:])
        return lines[first - 1].partition("#")[2] + "".join(further)

    hidden = []
    for path, kind in sections():
        names = list(kind.__dataclass_fields__)
        if value_at(loaded.recipe, path[:-1]) and value_at(loaded.recipe, path):
            hidden += [(*path, name) for name in names if (*path, name) not in places]
        else:
            words = re.findall(r"\w+", comment(path))
            hidden += [(*path, name) for name in names if name not in words]
    assert hidden == []
    for key, choices in {
        "run.float32_matmul": "highest high medium",
        "run.on_divergence": "stop rewind",
        "strategy.kind": "ddp fsdp",
        "data.kind": "text tokens chat instruct classification preference",
        "preference": "dpo ipo hinge robust apo_zero simpo orpo",
        "schedule.kind": "cosine linear constant wsd",
        "model.init": "pretrained random",
        "model.task": "causal_lm sequence_classification reward masked_lm",
        "data.on_error": "fail skip",
        "checkpoint.keep_best": "null eval_loss",
        "checkpoint.resume": "auto never",
        "checkpoint.export_dtype": "bfloat16 float16 float32",
    }.items():
        words = re.findall(r"\w+", comment(tuple(key.split("."))))
        assert set(choices.split()) <= set(words), key


def test_an_adapter_as_the_model_is_named(folder):
    (folder / "adapter").mkdir()
    (folder / "adapter/adapter_config.json").write_text("{}")
    with pytest.raises(
        RecipeError, match=r"model.path: adapter is an adapter: lora.path continues"
    ):
        load("model={path: adapter}")
