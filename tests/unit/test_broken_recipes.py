"""What a user can get wrong, and the whole of what is said about it.

One table: what is wrong in x.yaml (SMALL, edited) or on the command line, and every line of the answer. `...` in an
expected line stands for anything: lists of keys that grow with the schema. CWD is the folder that the recipe is in.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from launcher.errors import RecipeError
from launcher.recipe.load import load_recipe
from tests.unit.small_recipe import SMALL, says

LAST = SMALL.splitlines()[-1] + "\n"


@dataclass
class Broken:
    said: list[str]
    text: str | bytes = SMALL
    overrides: list[str] = field(default_factory=list)
    ranks: int | None = None
    recipe: list[str] = field(default_factory=lambda: ["recipe=x.yaml"])


def edit(old, new, *said, overrides=(), ranks=None):
    """x.yaml is SMALL with `old` replaced by `new`."""
    assert SMALL.count(old) == 1, old
    return Broken(list(said), SMALL.replace(old, new), list(overrides), ranks)


def add(lines, *said, overrides=(), ranks=None):
    """x.yaml is SMALL and, from line 14 on, these lines."""
    return Broken(list(said), SMALL + lines, list(overrides), ranks)


def whole(text, *said):
    """x.yaml is this."""
    return Broken(list(said), text)


def override(overrides, *said, ranks=None):
    """x.yaml is right; what is wrong is in an override, or in some."""
    overrides = [overrides] if isinstance(overrides, str) else overrides
    return Broken([f"command line: {line}" for line in said], overrides=overrides, ranks=ranks)


def recipes(arguments, *said):
    """The arguments name no recipe."""
    return Broken(list(said), recipe=arguments)


CYCLE = "cannot be interpolated: it leads back to itself"
NO_INTERPOLATION = (
    "is no interpolation: write ${section.key}, or \\${ for the two characters themselves"
)
TAG = "has no meaning in a recipe; text that starts with ! or = must be in quotes"
NO_OVERRIDE = "an override is key=value, such as batch.micro_batch_size=4"
KNOWN = ", ".join(
    sorted(path.stem for path in (Path(__file__).parents[2] / "recipes").glob("*.yaml"))
)
SECTIONS = "run, model, data, batch, strategy, ..."

CONFIG = "  config:\n    model_type: llama\n    vocab_size: 300\n"
OWN_MODEL = ["model.config=null", "model.builder=a.b:c"]
OWN_DATA = ["data.builder=a.b:c", "data.train=null"]
CLASSIFY = ["model.task=sequence_classification", "data.kind=classification"]
BY_TOKENS = ["batch.micro_batch_size=null", "batch.micro_batch_tokens=4096", "data.packing=false"]

BROKEN = [
    # Misspelt and misplaced keys
    add("optimiser: {}\n", "x.yaml:14: optimiser: unknown key; did you mean optimizer?"),
    add("extra: 1\n", f"x.yaml:14: extra: unknown key; known here: {SECTIONS}"),
    edit("max_steps", "max_stepz", "x.yaml:3: run.max_stepz: unknown key; did you mean max_steps?"),
    edit("  config:", "  confg:", "x.yaml:5: model.confg: unknown key; did you mean config?"),
    edit(
        "micro_batch_size",
        "micro_batchsize",
        "x.yaml:13: batch.micro_batchsize: unknown key; did you mean micro_batch_size?",
    ),
    edit("batch:\n", "bach:\n", "x.yaml:11: bach: unknown key; did you mean batch?"),
    add(
        "strategy:\n  mixed_precision:\n    parm_dtype: float16\n",
        "x.yaml:16: strategy.mixed_precision.parm_dtype: unknown key; did you mean param_dtype?",
    ),
    add(
        "strategy: {mixed_precision: {x: 1}}\n",
        "x.yaml:14: strategy.mixed_precision.x: unknown key; known here: param_dtype, reduce_dtype",
    ),
    edit(
        "vocab_size",
        "vocab_sise",
        "x.yaml:7: model.config.vocab_sise: unknown key; did you mean vocab_size?",
    ),
    edit(
        "vocab_size",
        "zzz",
        "x.yaml:7: model.config.zzz: unknown key; LlamaConfig has attention_bias, ..., vocab_size",
    ),
    edit(
        "max_steps",
        "learning_rate",
        "x.yaml:1: run.max_steps: missing; give max_steps or epochs",
        "x.yaml:3: run.learning_rate: ...",
    ),
    add(
        "batch2: {}\nrun2: {}\n",
        "x.yaml:14: batch2: unknown key; did you mean batch?",
        "x.yaml:15: run2: unknown key; did you mean run?",
    ),
    add(
        "schedule: {betas: [0.9, 0.95]}\n",
        "x.yaml:14: schedule.betas: unknown key; did you mean optimizer.betas?",
    ),
    add(
        "learning_rate: 1\n",
        "x.yaml:14: learning_rate: unknown key; did you mean optimizer.learning_rate?",
    ),
    add('"run ": {}\n', "x.yaml:14: run : unknown key; did you mean run?"),
    add(
        "optimizer.eps: 1.0\n",
        "x.yaml:14: optimizer.eps: unknown key; a dot joins keys on the command line only, in a file they are nested",
    ),
    add("3: x\n", f"x.yaml:14: 3: unknown key; known here: {SECTIONS}"),
    add("on: x\n", "x.yaml: a key must be a name; line 14 has 'on'"),
    add("null: x\n", "x.yaml: a key must be a name; line 14 has 'null'"),
    add("[a]: x\n", "x.yaml: a key must be a name; line 14 has a list or a section"),
    override("rum.max_steps=3", "rum: unknown key; did you mean run?"),
    override("run.max_stepz=3", "run.max_stepz=3: unknown key; did you mean max_steps?"),
    override(
        "strategy.mixed_precision.dtype=float16",
        "strategy.mixed_precision.dtype=float16: unknown key; did you mean param_dtype?",
    ),
    override(
        "model.config.hiden_size=64",
        "model.config.hiden_size=64: unknown key; did you mean hidden_size?",
    ),
    override("seed=3", "seed=3: unknown key; did you mean run.seed?"),
    override("batch.workers=3", "batch.workers=3: unknown key; did you mean data.workers?"),
    # Missing
    edit("  name: small\n", "", "x.yaml:1: run.name: missing; must be given: text"),
    edit(
        "run:\n  name: small\n  max_steps: 10\n",
        "",
        "x.yaml: run.name: missing; ...",
        "x.yaml: run.max_steps: missing; ...",
    ),
    edit(
        "  train: [data.txt]\n",
        "",
        "x.yaml:8: data.train: missing; must be given: a list of files, globs, folders or hub data set ids (or data.builder)",
    ),
    edit(
        LAST,
        "",
        "x.yaml:11: batch.micro_batch_size: missing; must be given: a whole number (or give micro_batch_tokens)",
    ),
    edit("  max_steps: 10\n", "", "x.yaml:1: run.max_steps: missing; give max_steps or epochs"),
    edit(
        "  config:\n    model_type: llama\n    vocab_size: 300\n",
        "  compile: false\n",
        "x.yaml:4: model.config: missing; give model.path, or a config such as {model_type: llama, hidden_size: 256, ...}",
    ),
    override("profile.start_step=3", "profile.steps: missing; must be given: a whole number"),
    override(
        "logging.wandb={mode: offline}", "logging.wandb.project: missing; must be given: text"
    ),
    # A value of another type
    edit("10\n", "8.0\n", "x.yaml:3: run.max_steps: must be a whole number, or null; got 8.0"),
    edit("10\n", "true\n", "x.yaml:3: run.max_steps: must be a whole number, or null; got true"),
    edit(
        "10\n",
        '"10"\n',
        "x.yaml:3: run.max_steps: must be a whole number, or null; got '10'; take the quotes away",
    ),
    edit("10\n", "ten\n", "x.yaml:3: run.max_steps: must be a whole number, or null; got 'ten'"),
    edit("10\n", "[10]\n", "x.yaml:3: run.max_steps: must be a whole number, or null; got [10]"),
    edit("10\n", "1e3\n", "x.yaml:3: run.max_steps: must be a whole number, or null; got 1000.0"),
    edit(
        "10\n",
        "10\n  deterministic: 1\n",
        "x.yaml:4: run.deterministic: must be true or false; got 1",
    ),
    edit(
        "10\n",
        '10\n  deterministic: "true"\n',
        "x.yaml:4: run.deterministic: must be true or false; got 'true'",
    ),
    edit("small", "3", "x.yaml:2: run.name: must be text; got 3; put it in quotes"),
    edit("small", "true", "x.yaml:2: run.name: must be text; got true; put it in quotes"),
    edit("small", "[a, null]", "x.yaml:2: run.name: must be text; got ['a', null]"),
    edit(
        "[data.txt]",
        "3",
        "x.yaml:9: data.train: must be a list or a section of names, or null; got 3",
    ),
    edit(
        "[data.txt]",
        "[data.txt, 3]",
        "x.yaml:9: data.train[1]: must be text; got 3; put it in quotes",
    ),
    edit(
        "[data.txt]",
        "\n    - data.txt\n    - [data.txt]\n",
        "x.yaml:11: data.train[1]: must be text; got ['data.txt']",
    ),
    add(
        "strategy: ddp\n",
        "x.yaml:14: strategy: must be a section with the keys kind, mixed_precision, ...; got 'ddp'",
    ),
    add(
        "strategy: [ddp]\n",
        "x.yaml:14: strategy: must be a section with the keys kind, ...; got ['ddp']",
    ),
    add(
        "strategy: {mixed_precision: bfloat16}\n",
        "x.yaml:14: strategy.mixed_precision: must be a section ..., or null; got 'bfloat16'",
    ),
    edit(
        "\n    model_type: llama\n    vocab_size: 300",
        " llama",
        "x.yaml:5: model.config: must be a section of keys, or null; got 'llama'",
    ),
    add(
        "strategy: {kind: dpp}\n",
        "x.yaml:14: strategy.kind: must be one of ddp, fsdp, auto; got 'dpp'; did you mean ddp?",
    ),
    add(
        "schedule: {kind: 3}\n",
        "x.yaml:14: schedule.kind: must be one of cosine, linear, constant, wsd; got 3",
    ),
    add("optimizer: {name: sgd}\n", "x.yaml:14: optimizer.name: must be adamw; got 'sgd'"),
    override(
        "activation_checkpointing=full",
        "activation_checkpointing=full: must be a section with the keys mode, ..., or null; got 'full'",
    ),
    override(
        "activation_checkpointing={mode: ful}",
        "activation_checkpointing.mode: must be one of full, selective; got 'ful'; did you ...",
    ),
    override(
        "strategy.sync_every_micro_batch=never",
        "strategy.sync_every_micro_batch=never: must be true or false or auto; got 'never'",
    ),
    override(
        "strategy.sync_every_micro_batch=1",
        "strategy.sync_every_micro_batch=1: must be true or false or auto; got 1",
    ),
    override(
        "strategy.cpu_offload=true",
        "strategy.cpu_offload=true: must be a section with the keys pin_memory, or null; got true",
    ),
    override(
        "optimizer.learning_rate=fast", "optimizer.learning_rate=fast: must be a number; got 'fast'"
    ),
    override(
        'optimizer.learning_rate="1e-4"',
        "optimizer.learning_rate=\"1e-4\": must be a number; got '1e-4'; take the quotes away",
    ),
    override(
        "optimizer.learning_rate=true", "optimizer.learning_rate=true: must be a number; got true"
    ),
    override("optimizer.betas=0.9", "optimizer.betas=0.9: must be a list of 2 numbers; got 0.9"),
    override(
        "optimizer.betas=[0.9]", "optimizer.betas=[0.9]: must be a list of 2 numbers; got [0.9]"
    ),
    override(
        "optimizer.betas=[0.9,0.95,0.99]",
        "optimizer.betas=[0.9,0.95,0.99]: must be a list of 2 numbers; got [0.9, 0.95, 0.99]",
    ),
    override("optimizer.betas=[0.9,x]", "optimizer.betas[1]: must be a number; got 'x'"),
    override("run.seed.x=3", "run.seed: must be a whole number; got {x: 3}"),
    override("run.name.x=null", "run.name: must be text; got {x: null}"),
    # null, nothing, empty
    edit("small", "null", "x.yaml:2: run.name: must not be null; must be text"),
    edit("small", '""', "x.yaml:2: run.name: must not be empty"),
    edit("small", '"  "', "x.yaml:2: run.name: must not be empty"),
    edit("[data.txt]", "[]", "x.yaml:9: data.train: must not be empty"),
    edit("[data.txt]", '[data.txt, ""]', "x.yaml:9: data.train[1]: must not be empty"),
    edit(
        "[data.txt]", "[data.txt, null]", "x.yaml:9: data.train[1]: must not be null; must be text"
    ),
    edit(
        "[data.txt]",
        "",
        "x.yaml:9: data.train: missing; must be given: a list of ... (or data.builder)",
    ),
    add(
        "strategy:\n",
        "x.yaml:14: strategy: must not be null; must be a section with the keys kind, mixed_precision, ...",
    ),
    edit(
        "\n  name: small\n  max_steps: 10",
        "",
        "x.yaml:1: run: must not be null; must be a section with the keys name, dir, ...",
    ),
    override("run.deterministic=", "run.deterministic=: must not be null; must be true or false"),
    override(
        "data=null", "data=null: must not be null; must be a section with the keys kind, train, ..."
    ),
    edit("10\n", "???\n", "x.yaml:3: run.max_steps: must be a whole number, or null; got '???'"),
    edit("[data.txt]", '["???"]', "x.yaml:9: data.train[0]: '???': matches no file (...)"),
    add(
        "strategy: ???\n",
        "x.yaml:14: strategy: must be a section with the keys kind, ...; got '???'",
    ),
    # Out of range
    edit("10\n", "0\n", "x.yaml:3: run.max_steps: must be at least 1; got 0"),
    edit("64", "-64", "x.yaml:12: batch.global_batch_size: must be at least 1; got -64"),
    edit(
        LAST,
        "  micro_batch_size: 0\n",
        "x.yaml:13: batch.micro_batch_size: must be at least 1; got 0",
    ),
    override("data.workers=-1", "data.workers=-1: must be at least 0; got -1"),
    override(
        "run.seed=123456789012",
        "run.seed=123456789012: must be at most 4294967295; got 123456789012",
    ),
    override("schedule.warmup_steps=-1", "schedule.warmup_steps=-1: must be at least 0; got -1"),
    override("schedule.min_ratio=1.5", "schedule.min_ratio=1.5: must be at most 1; got 1.5"),
    override("optimizer.betas=[0.9,1]", "optimizer.betas[1]: must be less than 1; got 1"),
    override("optimizer.betas=[-0.5,0.9]", "optimizer.betas[0]: must be at least 0; got -0.5"),
    override("optimizer.eps=0", "optimizer.eps=0: must be more than 0; got 0"),
    override(
        "optimizer.learning_rate=-1e-4",
        "optimizer.learning_rate=-1e-4: must be at least 0; got -0.0001",
    ),
    override(
        "optimizer.learning_rate=.nan", "optimizer.learning_rate=.nan: must be finite; got nan"
    ),
    override(
        "optimizer.max_grad_norm=.inf", "optimizer.max_grad_norm=.inf: must be finite; got inf"
    ),
    override(
        "optimizer.weight_decay=nan", "optimizer.weight_decay=nan: must be a number; got 'nan'"
    ),
    # Names of files and folders
    edit("small", "a/b", "x.yaml:2: run.name: must be usable as a folder's name; got 'a/b'"),
    edit("small", "..", "x.yaml:2: run.name: must be usable as a folder's name; got '..'"),
    override(
        "run.dir=~/runs",
        "run.dir=~/runs: ~ is not expanded in a recipe; write the whole path, or ${oc.env:HOME}; got '~/runs'",
    ),
    edit(
        "data.txt",
        "dat.txt",
        "x.yaml:9: data.train[0]: 'dat.txt': no such file or folder, and no hub id `owner/name` (looked for in CWD)",
    ),
    edit(
        "[data.txt]",
        "no/*.txt",
        "x.yaml:9: data.train[0]: 'no/*.txt': matches no file (looked for in CWD)",
    ),
    override(
        "data.train=[data.txt,b.txt]",
        "data.train[1]: 'b.txt': no such file or folder, and no hub id `owner/name` (looked for in CWD)",
    ),
    override(
        "data.validation=b.txt",
        "data.validation[0]: 'b.txt': no such file or folder, and no hub id `owner/name` (looked for in CWD)",
    ),
    override(
        f"data.train={'a' * 300}",
        "data.train[0]: 'aaa...aaa': no such file or folder, and no hub id `owner/name` (looked for in CWD)",
    ),
    edit(
        "bytes",
        "gone",
        "x.yaml:10: data.tokenizer: no such folder: gone; give `bytes`, a folder with a tokenizer, or a hub id `owner/name`",
    ),
    edit(
        "bytes",
        "data.txt",
        "x.yaml:10: data.tokenizer: no such folder: data.txt; give `bytes`, ...",
    ),
    edit(
        "  tokenizer: bytes\n",
        "",
        "x.yaml:8: data.tokenizer: missing; a model.config has none of its own: give `bytes` or ...",
    ),
    # Keys that do not go together
    edit(
        "10\n",
        "10\n  epochs: 1\n",
        "x.yaml:4: run.epochs: max_steps 10 is given too; set one of the two to null",
    ),
    override(
        "model.init=pretrained",
        "model.init=pretrained: pretrained needs model.path; without one the weights are random",
    ),
    override(
        "batch.global_batch_size=60",
        "batch.global_batch_size=60: 60 is not a multiple of 8 (micro-batch) x 2 (ranks) = 16; try 48 or 64",
        ranks=2,
    ),
    edit(
        "64",
        "64",
        "x.yaml:12: batch.global_batch_size: 64 is not a multiple of 8 (micro-batch) x 6 (ranks) = 48; try 48 or 96",
        ranks=6,
    ),
    override(
        "batch.global_batch_size=60",
        "batch.global_batch_size=60: 60 is not a multiple of 8 (micro-batch); try 56 or 64",
    ),
    override(
        "batch.global_batch_size=4",
        "batch.global_batch_size=4: 4 is not a multiple of 8 (micro-batch) x 1 (ranks) = 8; try 8",
        ranks=1,
    ),
    add(
        "strategy:\n  kind: ddp\n  cpu_offload: {}\n  mixed_precision: {reduce_dtype: bfloat16}\n  replicate: 2\n"
        "  reshard_after_forward: false\n",
        "x.yaml:16: strategy.cpu_offload: not available with kind ddp; use kind fsdp",
        "x.yaml:17: strategy.mixed_precision.reduce_dtype: not available with kind ddp, which reduces in float32; use kind fsdp",
        "x.yaml:18: strategy.replicate: not available with kind ddp; use kind fsdp",
        "x.yaml:19: strategy.reshard_after_forward: not available with kind ddp; use kind fsdp",
        ranks=1,
    ),
    override(
        "strategy.replicate=3",
        "strategy.replicate=3: 3 does not divide 4 (ranks); try one of 1, 2, 4",
        ranks=4,
    ),
    override(
        ["batch.micro_batch_size=auto", "batch.global_batch_size=60"],
        "batch.global_batch_size=60: 60 is not a multiple of 8 (ranks); try 56 or 64",
        ranks=8,
    ),
    override(
        "batch.micro_batch_size=fast",
        "batch.micro_batch_size=fast: must be a whole number or auto, or null; got 'fast'",
    ),
    override(
        ["strategy={kind: auto, replicate: 3}"],
        "strategy...: 3 does not divide 4 (ranks); try one of 1, 2, 4",
        ranks=4,
    ),
    override(
        "schedule.decay_steps=4",
        "schedule.decay_steps=4: not available with kind cosine; use kind wsd",
    ),
    override("evaluation.at_start=true", "evaluation.at_start=true: needs data.validation"),
    override(
        "profile={start_step: 9, steps: 3}",
        "profile.steps: steps 9 to 11 go beyond run.max_steps 10",
    ),
    # The model's config
    edit(
        "llama",
        "lama",
        "x.yaml:6: model.config.model_type: transformers has no model type 'lama'; did you mean llama?",
    ),
    edit(
        "llama",
        "vit",
        "x.yaml:6: model.config.model_type: vit is no causal language model; llama, qwen3 and gpt2 are",
    ),
    edit("llama", "3", "x.yaml:6: model.config.model_type: transformers has no model type 3"),
    override(
        [
            "model.task=sequence_classification",
            "model.config.model_type=vit",
            "data.kind=classification",
        ],
        "model.config.model_type=vit: vit is no sequence classifier; bert, roberta and llama are",
    ),
    edit(
        "    model_type: llama\n",
        "",
        "x.yaml:5: model.config.model_type: missing; must be given: a model type of transformers, such as ...",
    ),
    edit(
        "300",
        "200",
        "x.yaml:7: model.config.vocab_size: 200 is too small for the tokenizer `bytes`: 256 bytes and ...; give 257 or more",
    ),
    edit(
        "300",
        "300\n    attn_implementation: eager",
        "x.yaml:8: model.config.attn_implementation: is set by model.attention",
    ),
    override(
        "model.config.vocab_size=-1", "model.config.vocab_size=-1: must be at least 1; got -1"
    ),
    override(
        "model.config.num_attention_heads=0",
        "model.config.num_attention_heads=0: must be at least 1; got 0",
    ),
    override(
        "data.sequence_length=1",
        "data.sequence_length=1: 1 leaves chats and prompts without a token to predict, ...; give 2 or more",
    ),
    override(
        "run.dir=data.txt",
        "run.dir=data.txt: CWD/data.txt is a file, and must be a folder; give another, or move the file away",
    ),
    override(
        "run.dir=data.txt/a",
        "run.dir=data.txt/a: CWD/data.txt is a file, and must be a folder; give another, ...",
    ),
    override(
        "model.config.vocab_size=256",
        "model.config.vocab_size=256: 256 is too small for the tokenizer `bytes`: ...; give 257 or more",
    ),
    override(
        "model.config.dtype=float16",
        "model.config.dtype=float16: is set by strategy.mixed_precision",
    ),
    # Not built yet
    # Where the model comes from
    edit(
        "model:\n",
        "model:\n  path: owner/name\n",
        "x.yaml:6: model.config: model.path is given too; set all but one to null",
    ),
    override(
        ["model.builder=a.b:c", "data={builder: 'a:b', train: null}"],
        "model.builder=a.b:c: model.config is given too; set all but one to null",
    ),
    edit(
        CONFIG,
        "  path: gone\n",
        "x.yaml:5: model.path: no such folder: gone (looked for in CWD); give a folder or a hub id `owner/name`",
    ),
    edit(CONFIG, "  path: runs/a/hf\n", "x.yaml:5: model.path: no such folder: runs/a/hf ..."),
    edit(
        CONFIG,
        "  path: owner/name:train\n",
        "x.yaml:5: model.path: no such folder: owner/name:train ...",
    ),
    edit(
        CONFIG,
        "  path: .\n",
        "x.yaml:5: model.path: . has no config.json; give a folder as transformers' save_pretrained writes it",
    ),
    override(
        "data.tokenizer=runs/a/hf",
        "data.tokenizer=runs/a/hf: no such folder: runs/a/hf; give `bytes`, ...",
    ),
    override(
        "model.trust_remote_code=true",
        "model.trust_remote_code=true: needs model.path, whose code it would be",
    ),
    override("model.freeze=[]", "model.freeze=[]: must not be empty"),
    override(
        ["model.attention=flash_attention_2", "strategy.mixed_precision=null"],
        "model.attention=flash_attention_2: flash_attention_2 computes in 16 bits only; use sdpa, or ... bfloat16",
    ),
    override(
        ["model.attention=flash_attention_3", "strategy.mixed_precision.param_dtype=float32"],
        "model.attention=flash_attention_3: flash_attention_3 computes in 16 bits only; ...",
    ),
    # Builders
    *[
        override(
            ["model.config=null", f"model.builder={name}", *OWN_DATA],
            f"model.builder={name}: must be `package.module:function`; got '{name}'",
        )
        for name in ("mine", ":mine", "a b:c", "a.b.c", "a/b.py:c", "a:b.c")
    ],
    override(
        ["model.config=null", "model.builder=a.b:c", *OWN_DATA, "logging.memory_plan=true"],
        "logging.memory_plan=true: not available with model.builder and data.builder: the plan would call your code a second time; "
        "use `launcher plan`",
    ),
    override(
        ["data.builder=mine", "data.train=null"],
        "data.builder=mine: must be `package.module:function`; got 'mine'",
    ),
    Broken(
        [
            "x.yaml:8: data.builder: missing; a model of your own (model.builder) needs its data and loss from data.builder"
        ],
        overrides=["model={config: null, builder: 'a:b'}"],
    ),
    override(
        "model.arguments={x: 1}",
        "model.arguments={x: 1}: needs model.builder, whose arguments they are",
    ),
    override(
        "data.arguments={x: 1}",
        "data.arguments={x: 1}: needs data.builder, whose arguments they are",
    ),
    override(
        [
            *OWN_MODEL,
            *OWN_DATA,
            "model.task=sequence_classification",
            "model.num_labels=3",
            "model.attention=eager",
            "model.init=random",
        ],
        *(
            f"model.{key}: not available with model.builder, which decides it"
            for key in ("task=sequence_classification", "num_labels=3")
        ),
        *(
            f"model.{key}: not available with model.builder, which decides it"
            for key in ("attention=eager", "init=random")
        ),
    ),
    Broken(
        [
            f"{where}: data.builder is given too, which brings its own; set one of the two to null"
            for where in ("x.yaml:9: data.train", "command line: data.validation=data.txt")
        ],
        overrides=["data.builder=a:b", "data.validation=data.txt"],
    ),
    override(
        [*OWN_DATA, "data.text_column=body", "data.labels=[a,b]"],
        "data.text_column=body: not available with data.builder, which reads the data itself",
        "data.labels=[a,b]: not available with data.builder, which reads the data itself",
    ),
    override(
        [*OWN_DATA, "data.streaming=true"],
        "data.streaming=true: not available with data.builder, which decides it",
    ),
    # Classification
    override(
        "data.kind=classification",
        "data.kind=classification: classification needs model.task: sequence_classification",
    ),
    Broken(
        [
            "x.yaml:8: data.kind: text is not for task sequence_classification; use kind classification"
        ],
        overrides=["model.task=sequence_classification"],
    ),
    override(
        "model.num_labels=3",
        "model.num_labels=3: not available with task causal_lm; use sequence_classification",
    ),
    override(
        [*OWN_DATA, "model.num_labels=3"],
        "model.num_labels=3: not available with task causal_lm; use sequence_classification",
    ),
    override(["model.num_labels=1"], "model.num_labels=1: must be at least 2; got 1"),
    override(
        [*CLASSIFY, "model.num_labels=3", "data.labels=[a,b]"],
        "model.num_labels=3: 3, but data.labels names 2",
    ),
    override(
        [*CLASSIFY, "data.labels=[a,b,a]"],
        "data.labels=[a,b,a]: must name two classes or more, each once; got a, b, a",
    ),
    override(
        [*CLASSIFY, "data.labels=a"],
        "data.labels=a: must name two classes or more, each once; got a",
    ),
    override(
        [*CLASSIFY, "data.train={a: {files: data.txt, kind: text}}"],
        "data.train.a.kind: text does not mix with data.kind classification: the losses differ",
    ),
    override(
        "data.train={a: {files: data.txt, kind: classification}, b: {files: data.txt}}",
        "data.train.a.kind: classification does not mix with data.kind text: the losses differ",
    ),
    # What a kind of data reads
    override(
        "data.label_column=x",
        "data.label_column=x: not available with kind text; for kind classification",
    ),
    override(
        "data.labels=[a,b]",
        "data.labels=[a,b]: not available with kind text; for kind classification",
    ),
    override(
        "data.messages_column=x",
        "data.messages_column=x: not available with kind text; for kind chat",
    ),
    override(
        ["data.kind=chat", "data.text_column=x"],
        "data.text_column=x: not available with kind chat; for kind classification and text",
    ),
    override(
        ["data.kind=chat", "data.prompt_column=x", "data.response_column=y"],
        "data.prompt_column=x: not available with kind chat; for kind instruct",
        "data.response_column=y: not available with kind chat; for kind instruct",
    ),
    override(
        "data.chat_template=data.txt",
        "data.chat_template=data.txt: not available with kind text; for kind chat and instruct",
    ),
    override(
        ["data.kind=chat", "data.chat_template=gone.jinja"],
        "data.chat_template=gone.jinja: no such file: gone.jinja (looked for in CWD); give a file with a Jinja template",
    ),
    override(
        "data.kind=chatt",
        "data.kind=chatt: must be one of text, tokens, chat, instruct, classification; got 'chatt'; did you mean chat?",
    ),
    override(
        "data.on_error=ignore", "data.on_error=ignore: must be one of fail, skip; got 'ignore'"
    ),
    override(
        "data.cache=~/c",
        "data.cache=~/c: ~ is not expanded in a recipe; write the whole path, or ${oc.env:HOME}; got '~/c'",
    ),
    # Mixtures and several sets
    override("data.train={}", "data.train={}: must not be empty"),
    override("data.train={a: {}}", "data.train.a.files: missing; must be given: a list"),
    override(
        "data.train={a: {files: data.txt, weight: 0}}",
        "data.train.a.weight: must be more than 0; got 0",
    ),
    override(
        "data.train={a: {files: data.txt, wieght: 1}}",
        "data.train.a.wieght: unknown key; did you mean weight?",
    ),
    override(
        "data.train={a: {files: data.txt, kind: tex}}",
        "data.train.a.kind: must be one of ..., or null; got 'tex'; did you mean text?",
    ),
    override(
        "data.train={a: {files: [data.txt, b.txt]}}",
        "data.train.a.files[1]: 'b.txt': no such file or folder, and no hub id ...",
    ),
    override(
        "data.train={a.b: {files: data.txt}}",
        "data.train.a.b: a name has letters, digits, _ and - (...); got 'a.b'",
    ),
    override(
        "data.train={7: {files: data.txt}}",
        "data.train[7]: a name has letters, digits, _ and - (...); got '7'",
    ),
    override(
        "data.validation={a: b.txt}",
        "data.validation.a[0]: 'b.txt': no such file or folder, and no hub id ...",
    ),
    override(
        "data.validation={a b: data.txt}",
        "data.validation.a b: a name has letters, digits, _ and - (...); got 'a b'",
    ),
    override(
        "data.train.a.weight=3",
        "data.train.a.weight=3: data.train is a list; give it whole, as data.train=[...]",
    ),
    # Batches by tokens
    override(
        ["batch.micro_batch_tokens=4096", "data.packing=false"],
        "batch.micro_batch_tokens=4096: micro_batch_size 8 is given too; set one of the two to null",
    ),
    override(
        [*BY_TOKENS, "data.packing=true"],
        "batch.micro_batch_tokens=4096: not available with data.packing: true, whose sequences are all as long; use micro_batch_size",
    ),
    override(
        [*BY_TOKENS, "data.sequence_length=5000"],
        "batch.micro_batch_tokens=4096: 4096 does not hold one sequence of 5000 tokens (data.sequence_length)",
    ),
    override(
        [*BY_TOKENS, "data.streaming=true"],
        "batch.micro_batch_tokens=4096: not available with data.streaming, where lengths are not known beforehand; use micro_batch_size",
    ),
    override(
        [*BY_TOKENS, *OWN_DATA],
        "batch.micro_batch_tokens=4096: not available with data.builder, where lengths ...",
    ),
    # Streaming
    override(
        ["data.streaming=true", "run={max_steps: null, epochs: 1}"],
        "run.epochs: not available with data.streaming, whose length is not known; use run.max_steps",
    ),
    override(
        ["data.streaming=true", "data.train={a: {files: data.txt}}"],
        "data.train={a: {files: data.txt}}: a mixture is not available with data.streaming; give one list of files",
    ),
    override(
        [*CLASSIFY, "data.streaming=true"],
        "data.streaming=true: not available with kind classification",
    ),
    override(
        "data.shuffle_buffer=10",
        "data.shuffle_buffer=10: needs data.streaming; without it the whole set is shuffled",
    ),
    # Checkpoints, and what the run does where it diverges
    override(
        "checkpoint.keep_best=eval_loss",
        "checkpoint.keep_best=eval_loss: needs data.validation, whose loss it goes by",
    ),
    add(
        "checkpoint:\n  keep_best: accuracy\n",
        "x.yaml:15: checkpoint.keep_best: must be eval_loss, or null; got 'accuracy'",
    ),
    override(
        "checkpoint.resume=runs/a",
        "checkpoint.resume=runs/a: no such folder: runs/a; give auto, never, or a checkpoint such as runs/NAME/checkpoints/...",
    ),
    override(
        "checkpoint.resume=data.txt",
        "checkpoint.resume=data.txt: no such folder: data.txt; give auto, never, or a checkpoint ...",
    ),
    override("checkpoint.resume=null", "checkpoint.resume=null: must not be null; must be text"),
    override("checkpoint.every_steps=0", "checkpoint.every_steps=0: must be at least 1; got 0"),
    override("checkpoint.keep_last=0", "checkpoint.keep_last=0: must be at least 1; got 0"),
    override("checkpoint.keep_every=0", "checkpoint.keep_every=0: must be at least 1; got 0"),
    override("checkpoint.max_failures=0", "checkpoint.max_failures=0: must be at least 1; got 0"),
    override(
        "checkpoint.max_failure=1",
        "checkpoint.max_failure=1: unknown key; did you mean max_failures?",
    ),
    override(
        ["run.on_divergence=rewind", "checkpoint.every_steps=null"],
        "run.on_divergence=rewind: rewind needs checkpoint.every_steps, to have something to go back to",
    ),
    override(
        "run.on_divergence=go_on",
        "run.on_divergence=go_on: must be one of stop, rewind; got 'go_on'",
    ),
    override("run.max_loss_ratio=1", "run.max_loss_ratio=1: must be more than 1; got 1"),
    override("run.hang_timeout=0", "run.hang_timeout=0: must be at least 1; got 0"),
    # Adapters, and what is exported
    override(
        ["lora={}", "model.freeze=a.*"],
        "model.freeze=a.*: lora is given too, which freezes everything but the adapters; set one of the ...",
    ),
    override("lora={rank: 0}", "lora.rank: must be at least 1; got 0"),
    override("lora={dropout: 1}", "lora.dropout: must be less than 1; got 1"),
    override(
        "lora=true",
        "lora=true: must be a section with the keys rank, alpha, dropout, target_modules, or null; got true",
    ),
    override(
        "checkpoint.export_dtype=bfloat16",
        "checkpoint.export_dtype=bfloat16: needs checkpoint.export: at_end",
    ),
    override(
        "checkpoint={export: at_end, export_dtype: int8}",
        "checkpoint.export_dtype: must be one of bfloat16, float16, float32, or null; got 'int8'",
    ),
    override(
        "checkpoint={export: at_end, export_merged: true}",
        "checkpoint.export_merged: needs checkpoint.export: at_end, and lora, whose adapters ...",
    ),
    override(
        ["lora={}", "checkpoint.export_merged=true"],
        "checkpoint.export_merged=true: needs checkpoint.export: at_end, and lora, ...",
    ),
    # Interpolation
    edit(
        "10\n",
        "${run.nme}\n",
        "x.yaml:3: run.max_steps: cannot be interpolated: there is no key run.nme",
    ),
    edit(
        "[data.txt]",
        '[data.txt, "${run.nme}"]',
        "x.yaml:9: data.train[1]: cannot be interpolated: there is no key run.nme",
    ),
    edit(
        "10\n",
        "${run.name}\n",
        "x.yaml:3: run.max_steps: must be a whole number, or null; got 'small'",
    ),
    edit(
        "10\n",
        "${oc.env:NO_SUCH}\n",
        "x.yaml:3: run.max_steps: cannot be interpolated: Environment variable 'NO_SUCH' not found",
    ),
    edit(
        "10\n",
        "${x:1}\n",
        "x.yaml:3: run.max_steps: cannot be interpolated: there is no resolver x; use ${section.key}, ${oc.env:NAME} ...",
    ),
    edit("small", "a${b", f"x.yaml:2: run.name: {NO_INTERPOLATION}"),
    edit(
        "small",
        "${run.dir}\n  dir: ${run.name}",
        f"x.yaml:2: run.name: {CYCLE}",
        f"x.yaml:3: run.dir: {CYCLE}",
    ),
    edit("300", "${model}", f"x.yaml:7: model.config.vocab_size: {CYCLE}"),
    edit(
        "300",
        "300\n    rope_parameters: {x: '${model.config.rope_scaling}'}\n    rope_scaling: {y: '${model.config.rope_parameters}'}",
        f"x.yaml:8: model.config.rope_parameters.x: {CYCLE}",
        f"x.yaml:9: model.config.rope_scaling.y: {CYCLE}",
    ),
    add(
        "strategy: ${nowhere}\n",
        "x.yaml:14: strategy: cannot be interpolated: there is no key nowhere",
    ),
    override("run.seed=${", f"run.seed=${{: {NO_INTERPOLATION}"),
    override("model.config=${model.config}", f"model.config=${{model.config}}: {CYCLE}"),
    # Not a YAML file with sections
    whole("", "x.yaml: is empty; see recipes/quickstart.yaml for the shortest recipe that runs"),
    whole(
        "# name: a\n\n",
        "x.yaml: is empty; see recipes/quickstart.yaml for the shortest recipe that runs",
    ),
    whole("# a list\n- run\n", "x.yaml:2: must be sections (run:, model:, data:, ...)"),
    whole("hello", "x.yaml:1: must be sections (run:, model:, data:, ...)"),
    edit(
        "    model_type",
        "\tmodel_type",
        "x.yaml:6: not YAML: found character '\\t' that cannot start any token; indent with spaces, not with tabs",
    ),
    add(
        "strategy: {kind: ddp\n",
        "x.yaml:15: not YAML: expected ',' or '}', but got '<stream end>'; inside [ ] and { }, text with ...",
    ),
    add(
        "strategy: kind: ddp\n",
        "x.yaml:14: not YAML: mapping values are not allowed here; text with a colon and a space must be in quotes; ...",
    ),
    add(
        " strategy: {}\n",
        "x.yaml:14: not YAML: ...; is the indentation right, here and in the line before?",
    ),
    edit(
        "[data.txt]",
        "*.txt",
        "x.yaml:9: not YAML: ...; text that starts with * or & must be in quotes",
    ),
    add(
        "schedule: @x\n",
        "x.yaml:14: not YAML: found character '@' that cannot start any token; text that starts like this must be in quotes",
    ),
    add(
        "---\nrun: {}\n",
        "x.yaml:14: not YAML: expected a single document in the stream, but found another document",
    ),
    add(
        "strategy: *a\n",
        "x.yaml:14: not YAML: found undefined alias 'a'; text that starts with * must be in quotes",
    ),
    add(
        "strategy: &a {kind: *a}\n",
        "x.yaml: an alias contains itself, or sections are nested too deep",
    ),
    add("strategy: !mine {}\n", f"x.yaml:14: strategy: the YAML tag !mine {TAG}"),
    edit("small", "!!binary aGVsbG8=", f"x.yaml:2: run.name: the YAML tag !!binary {TAG}"),
    edit("10\n", "!!int x\n", "x.yaml:3: run.max_steps: the YAML tag !!int does not fit 'x'"),
    edit("10\n", "!!bool x\n", "x.yaml:3: run.max_steps: the YAML tag !!bool does not fit 'x'"),
    add("# \0\n", "x.yaml:14: not YAML: the character '\\x00' is not allowed"),
    whole(
        SMALL.encode() + b"# \xff\n", "x.yaml: not UTF-8 text (byte 194); a recipe is a YAML file"
    ),
    whole(SMALL.encode("utf-16"), "x.yaml: not UTF-8 text (byte 0); a recipe is a YAML file"),
    edit(
        "10\n",
        "10\n  seed: 1\n  seed: 2\n",
        "x.yaml:5: run.seed: given twice: in line 4 and in line 5",
    ),
    add(
        "run:\n  name: again\noptimiser: {}\n",
        "x.yaml:14: run: given twice: in line 1 and in line 14",
        "x.yaml:16: optimiser: unknown key; did you mean optimizer?",
    ),
    # Overrides that are none
    override("run.seed", f"run.seed: {NO_OVERRIDE}"),
    override("=3", f"=3: {NO_OVERRIDE}"),
    override("run..seed=3", f"run..seed=3: {NO_OVERRIDE}"),
    override("run.seed =3", f"run.seed =3: {NO_OVERRIDE}"),
    override("", f"'': {NO_OVERRIDE}"),
    override("--help", f"--help: {NO_OVERRIDE}"),
    override(
        "run.seed=[1",
        "run.seed=[1: not a value: ...; inside [ ] and { }, text with any of [ ] { } , : must be in quotes",
    ),
    override(
        "data.train=*.txt",
        "data.train=*.txt: not a value: ...; text that starts with * or & must be in quotes",
    ),
    override(
        "run.seed=@",
        "run.seed=@: not a value: found character '@' that cannot start any token; text that starts like this must be in quotes",
    ),
    override("run.seed=!!int x", "run.seed=!!int x: the YAML tag !!int does not fit 'x'"),
    override(
        "run.seed=!x 3",
        f"run.seed=!x 3: the YAML tag !x {TAG}",
    ),
    override(
        "data.train.0=b.txt",
        "data.train.0=b.txt: data.train is a list; give it whole, as data.train=[...]",
    ),
    override(
        "data.train={a: b}",
        "data.train.a: must be a section with the keys files, weight, kind; got 'b'",
    ),
    override("run=3", "run=3: must be a section with the keys name, dir, ...; got 3"),
    override(
        "model=[a]", "model=[a]: must be a section with the keys path, config, ...; got ['a']"
    ),
    # No recipe to begin with
    recipes(
        [], f"command line: no recipe given; give recipe=NAME ({KNOWN}) or recipe=path/to/file.yaml"
    ),
    recipes(
        ["recipe="],
        f"command line: no recipe given; give recipe=NAME ({KNOWN}) or recipe=path/to/file.yaml",
    ),
    recipes(
        ["run.seed=3"],
        f"command line: no recipe given; give recipe=NAME ({KNOWN}) or recipe=path/to/file.yaml",
    ),
    recipes(
        ["recipe=ddp", "recipe=fsdp"],
        f"command line: 2 recipes given; give recipe=NAME ({KNOWN}) or recipe=path/to/file.yaml",
    ),
    recipes(
        ["recipe=quikstart"],
        "command line: recipe=quikstart: no recipe of that name; did you mean quickstart?; known: ...",
    ),
    recipes(
        ["recipe=zzz"],
        f"command line: recipe=zzz: no recipe of that name; known: {KNOWN}; or give the path of a .yaml file",
    ),
    recipes(
        ["recipe=x"],
        "command line: recipe=x: no recipe of that name; did you mean x.yaml?; known: ...",
    ),
    recipes(["recipe=y.yaml"], "command line: recipe=y.yaml: no such file"),
    recipes(["recipe=./x.yml"], "command line: recipe=./x.yml: no such file; did you mean x.yaml?"),
    recipes([f"recipe={'a' * 300}.yaml"], f"command line: recipe={'a' * 300}.yaml: no such file"),
    recipes(["recipe=./"], "command line: recipe=./: is a folder; give a file in it"),
]


def name_of(broken):
    return f"{BROKEN.index(broken)}-{broken.said[0][:60].split(': ', 1)[-1]}"


@pytest.mark.parametrize("broken", BROKEN, ids=name_of)
def test_every_line_of_the_answer(folder, broken):
    (folder / "x.yaml").write_bytes(
        broken.text if isinstance(broken.text, bytes) else broken.text.encode()
    )
    with pytest.raises(RecipeError) as refused:
        load_recipe([*broken.recipe, *broken.overrides], ranks=broken.ranks)
    answer = str(refused.value).splitlines()
    assert len(answer) == len(broken.said), answer
    for expected, line in zip(broken.said, answer, strict=True):
        assert says(expected.replace("CWD", str(folder)), line), (
            f"\nexpected: {expected}\nbut said: {line}"
        )


def test_a_fresh_start_leaves_no_place_of_the_batch_empty(folder):
    """Checkpoints that are not gone on from change nothing: `never`, another run's, and an empty folder of them."""
    (folder / "runs/small/checkpoints").mkdir(parents=True)
    refused = r"^x.yaml:12: batch.global_batch_size: 64 is not a multiple of 8 \(micro-batch\) x 3 \(ranks\) = 24; try 48 or 72$"
    with pytest.raises(RecipeError, match=refused):
        load_recipe(["recipe=x.yaml"], ranks=3)
    (folder / "runs/small/checkpoints/step_00000005").mkdir()
    load_recipe(["recipe=x.yaml"], ranks=3)
    for override in ("checkpoint.resume=never", "run.dir=runs/other"):
        with pytest.raises(RecipeError, match=refused):
            load_recipe(["recipe=x.yaml", override], ranks=3)


def test_all_problems_at_once_in_the_order_of_file_and_command_line(folder):
    text = (
        SMALL.replace("max_steps: 10", "max_stepz: 10")
        .replace("vocab_size", "vocab_sise")
        .replace("64", "65")
    )
    (folder / "x.yaml").write_text(
        text
        + "strategy: {kind: dp, replicate: 0}\noptimiser: {}\nschedule: {warmup_steps: 3, warmup_steps: 4}\n"
    )
    with pytest.raises(RecipeError) as refused:
        load_recipe(
            [
                "foo.bar=3",
                "recipe=x.yaml",
                "run.seed",
                "run.seed=x",
                "data.train.0=x",
                "data.workers=-1",
            ],
            ranks=2,
        )
    assert [
        problem.split(": ")[0] + " " + problem.split(": ")[1] for problem in refused.value.problems
    ] == [
        "x.yaml:3 run.max_stepz",
        "x.yaml:7 model.config.vocab_sise",
        "x.yaml:12 batch.global_batch_size",
        "x.yaml:14 strategy.kind",
        "x.yaml:14 strategy.replicate",
        "x.yaml:15 optimiser",
        "x.yaml:16 schedule.warmup_steps",
        "command line foo",
        "command line run.seed",
        "command line run.seed=x",
        "command line data.train.0=x",
        "command line data.workers=-1",
    ]


def test_the_message_names_the_file_as_it_was_found(folder, monkeypatch):
    (folder / "deep").mkdir()
    (folder / "deep" / "x.yaml").write_text(SMALL.replace("64", "63"))
    with pytest.raises(RecipeError, match=r"^deep/x.yaml:12: batch.global_batch_size: 63 is not"):
        load_recipe(["recipe=deep/x.yaml"], ranks=None)
    monkeypatch.chdir(folder / "deep")
    with pytest.raises(RecipeError, match=r"^x.yaml:12: batch.global_batch_size"):
        load_recipe(["recipe=../deep/x.yaml", "data.train=../data.txt"], ranks=None)


SCRAPS = [
    "null",
    "???",
    "${",
    "${run.name}",
    "*",
    "&a ",
    "*a",
    "!!int ",
    "{",
    "}",
    "[",
    "]",
    ": ",
    "- ",
    "\n",
    "\n  ",
    "\t",
    "'",
    '"',
    "#",
    "<<: ",
]


def test_whatever_stands_in_the_file_the_answer_is_no_traceback(folder):
    """Cuts and scraps at random places: each is a recipe still, or is refused with a place."""
    chance = random.Random(7)
    refused = []
    for _ in range(80):
        text = SMALL
        for _ in range(chance.choice([1, 2])):
            at = chance.randrange(len(text))
            text = text[:at] + chance.choice(
                [text[at + chance.randrange(1, 9) :], chance.choice(SCRAPS) + text[at:]]
            )
        (folder / "x.yaml").write_text(text)
        try:
            load_recipe(["recipe=x.yaml"], ranks=2)
        except RecipeError as error:
            refused.append(error.problems)
    assert len(refused) > 40
    assert [
        problems
        for problems in refused
        if not all(problem.startswith("x.yaml") for problem in problems)
    ] == []
