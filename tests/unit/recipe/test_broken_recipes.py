"""Invalid recipes and the complete error messages for them.

`...` in an expected line matches any text. CWD is the folder that contains the recipe x.yaml.
"""

import itertools
import random
from pathlib import Path

import pytest
import yaml

from launcher.errors import RecipeError
from launcher.recipe.decode import decode, dotted, keys, merged
from launcher.recipe.load import load_recipe, to_yaml
from tests import REPOSITORY
from tests.unit.small_recipe import SMALL, says

# fmt: off
MISTAKES_IN_A_FILE = [
    # A line of SMALL, which has 13, the text that replaces it, and the messages, a line each, without `x.yaml:`
    (14, "optimiser: {}", "14: optimiser: unknown key; did you mean optimizer?"),
    (3, "  max_stepz: 10", "3: run.max_stepz: unknown key; did you mean max_steps?"),
    (13, "  micro_batchsize: 8", "13: batch.micro_batchsize: unknown key; did you mean micro_batch_size?"),
    (11, "bach:", "11: bach: unknown key; did you mean batch?"),
    (14, "strategy: {mixed_precision: {x: 1}}",
     "14: strategy.mixed_precision.x: unknown key; known here: param_dtype, reduce_dtype, float8"),
    (3, "  learning_rate: 1", "1: run.max_steps: missing; ...\n3: run.learning_rate: unknown key; did you mean ..."),
    (14, "schedule: {betas: [0.9, 0.95]}", "14: schedule.betas: unknown key; did you mean optimizer.betas?"),
    (14, "3: x", "14: 3: unknown key; known here: run, ..."),
    (14, "on: x", "14: on: unknown key; known here: run, ..."),
    (14, "[a]: x", "14: not YAML: found unhashable key"),
    (2, "", "1: run.name: missing; must be given"),
    (9, "", "8: data.train: missing; give data.train or data.builder"),
    (13, "", "11: batch.micro_batch_size: missing; give batch.micro_batch_size or batch.micro_batch_tokens"),
    (3, "", "1: run.max_steps: missing; give run.max_steps or run.epochs"),
    (3, "  max_steps: true", "3: run.max_steps: must be a whole number; got true"),
    (3, '  max_steps: "10"', "3: run.max_steps: must be a whole number; got '10'"),
    (3, "  max_steps: 0", "3: run.max_steps: must be at least 1, or null; got 0"),
    (3, "  max_steps: 10\n  hang_timeout: 10000000000",
     "4: run.hang_timeout: must be at most 2592000; got 10000000000"),
    (3, "  max_steps: 10\n  deterministic: 1", "4: run.deterministic: must be true or false; got 1"),
    (3, "  max_steps: 10\n  epochs: 1", "4: run.epochs: run.max_steps is given too; set one to null: "
     "run.max_steps=null or run.epochs=null"),
    (3, "  max_steps: 10\n  seed: 1\n  seed: 2", "5: not YAML: seed is given twice"),
    (2, "  name: 3", "2: run.name: must be text; got 3; put it in quotes"),
    (2, "  name: a/b", "2: run.name: must be usable as a folder's name; got 'a/b'"),
    (2, "  name: ..", "2: run.name: must be usable as a folder's name; got '..'"),
    (9, "  train: 3", "9: data.train: must be a list or a section; got 3"),
    (9, "  train: [data.txt, 3]", "9: data.train[1]: must be text; got 3; put it in quotes"),
    (9, "  train: []", "9: data.train: must not be empty"),
    (9, '  train: [data.txt, ""]', "9: data.train[1]: must not be empty; got ''"),
    (9, "  train: [dat.txt]",
     "9: data.train[0]: no such file or folder: dat.txt (looked for in CWD), and no hub id `owner/name`; did you mean data.txt?"),
    (10, "  tokenizer: gone",
     "10: data.tokenizer: no such folder: gone (looked for in CWD), and no hub id `owner/name`; give `bytes`, a "
     "folder with a tokenizer, or a hub id `owner/name`"),
    (10, "", "8: data.tokenizer: missing; a model.config or model.builder has none of its own: give `bytes`, ..."),
    (14, "strategy: {mixed_precision: {float8: tensorwise}}",
     "14: strategy.mixed_precision.float8: has one scale for a whole tensor, so that losses depend on how rows are "
     "divided over ranks; use rowwise or rowwise_with_gw_hp..."),
    (14, "strategy: {mixed_precision: {float8: row}}",
     "14: strategy.mixed_precision.float8: must be rowwise or rowwise_with_gw_hp; got 'row'..."),
    (14, "strategy: {mixed_precision: {float8: true}}",
     "14: strategy.mixed_precision.float8: must be rowwise or rowwise_with_gw_hp; got true..."),
    (14, "strategy: {mixed_precision: {float8: rowwise, param_dtype: float16}}",
     "14: strategy.mixed_precision.float8: needs strategy.mixed_precision.param_dtype=bfloat16"),
    (14, "strategy: {tensor_parallel_size: 2, mixed_precision: {float8: rowwise}}",
     "14: strategy.mixed_precision.float8: needs strategy.tensor_parallel_size=1"),
    (14, "lora: {rank: 4}\nstrategy: {mixed_precision: {float8: rowwise}}",
     "15: strategy.mixed_precision.float8: not available with lora; its base weights are frozen, or in NF4"),
    (14, "strategy: ddp", "14: strategy: must be a section with the keys kind, mixed_precision, ...; got 'ddp'"),
    (14, "strategy:", "14: strategy: must be a section with the keys kind, ...; got null"),
    (14, "strategy: {kind: dpp}", "14: strategy.kind: must be ddp, fsdp or auto; got 'dpp'; did you mean ddp?"),
    (14, "optimizer: {name: sgd, eps: 1.0e-6}", "14: optimizer.eps: needs optimizer.name=adamw or muon"),
    (14, "strategy:\n  kind: ddp\n  replicate: 2", "16: strategy.replicate: needs strategy.kind=fsdp or auto"),
    (14, "strategy:\n  kind: ddp\n  mixed_precision: {reduce_dtype: bfloat16}",
     "16: strategy.mixed_precision.reduce_dtype: needs ..."),
    (6, "", "5: model.config.model_type: must be a model type of transformers, such as llama, ...; got None"),
    (7, "    vocab_size: 200", "7: model.config.vocab_size: 200 is too small; the tokenizer `bytes` needs 257: ..."),
    (7, "    attn_implementation: eager", "7: model.config.attn_implementation: is set by model.attention"),
    (4, "model:\n  path: owner/name",
     "7: model.config.model_type: model.path has its own; give only keys that change, or set model.config to null"),
    (3, "  max_steps: ${run.nme}", "3: run.max_steps: cannot be interpolated: Interpolation key 'run.nme' not found"),
    (3, "  max_steps: ${oc.env:NO_SUCH}",
     "3: run.max_steps: cannot be interpolated: ...Environment variable 'NO_SUCH' not found..."),
    (3, "  max_steps: ${x:1}", "3: run.max_steps: cannot be interpolated: Unsupported interpolation type x"),
    (2, "  name: a${b", "2: run.name: is no interpolation: write ${section.key}, or \\${ for the two characters"),
    (2, "  name: ${run.dir}\n  dir: ${run.name}",
     "2: run.name: cannot be interpolated: Recursive ...\n"
     "3: run.dir: cannot be ..."),
    (7, "    x: {a: '${model.config.y}'}\n    y: {b: '${model.config.x}'}",
     "7: ....x.a: cannot be ...\n"
     "8: ....y.b: cannot be ..."),
    (6, "\tmodel_type: llama",
     "6: not YAML: found character '\\t' that cannot start any token; is it indented right, and ..."),
    (14, "strategy: {kind: ddp", "15: not YAML: expected ',' or '}', but got '<stream end>'; ..."),
    (14, "strategy: kind: ddp", "14: not YAML: mapping values are not allowed here; ..."),
    (9, "  train: *.txt",
     "9: not YAML: ...; is it indented right, and is text with any of * & ! @ : [ ] { } in quotes?"),
    (14, "---\nrun: {}", "14: not YAML: a second document begins; a recipe is one"),
    (14, "strategy: &a {kind: *a}", "14: not YAML: an alias leads back to itself"),
    (14, '"run\\0": 1', "14: not YAML: the key 'run\\x00' holds a character that cannot be printed"),
    (2, '  name: "\\ud800"', "2: run.name: holds '\\ud800', which is no character of a text"),
    (2, "  name: ${nope}", "2: run.name: cannot be interpolated: Interpolation key 'nope' not found"),
    (3, "  max_steps: 0100", "3: run.max_steps: must be a whole number; got '0100'"),
    (3, "  max_steps: 1:30", "3: run.max_steps: must be a whole number; got '1:30'"),
    (14, "lora: !!set {a}", "14: not YAML: could not determine a constructor for the tag ..."),
    (3, "  max_steps: !!int x", " not YAML: invalid literal for int() with base 10: 'x'"),
]
PREFER = ("data.kind=preference", "preference.loss=dpo")
TEACH = "distillation={teacher: a/b}"
MASKED = ("data.kind=text", "model.task=masked_lm", "data.packing=false")
REWARD = ("data.kind=preference", "model.task=reward")
CLASSIFY = ("data.kind=classification", "model.task=sequence_classification")
LONG = "é" * 128
MISTAKES_IN_ARGUMENTS = [
    # Ranks, arguments after recipe=x.yaml, and the messages, a line each, without `command line: `
    (None, ["rum.max_steps=3"], "rum: unknown key; did you mean run?"),
    (None, ["seed=3"], "seed=3: unknown key; did you mean run.seed?"),
    (None, ["learning_rate=1e-4"], "learning_rate=1e-4: unknown key; did you mean optimizer.learning_rate?"),
    (None, ["optimizer.lr=1e-4"], "optimizer.lr=1e-4: unknown key; did you mean optimizer.learning_rate?"),
    (None, ["lora.r=8"], "lora.r=8: unknown key; did you mean lora.rank?"),
    (None, ["batch.gradient_accumulation_steps=4"],
     "batch.gradient_accumulation_steps=4: unknown key; gradient accumulation follows from batch.global_batch_size, ..."),
    (None, ["data.validation_split=-1"], "data.validation_split=-1: must be greater than 0; got -1"),
    (None, ["data.validation_split=false"], "data.validation_split=false: must be a number; got false"),
    (None, ["data.validation_split=1"], "data.validation_split=1: must be less than 1; got 1"),
    (None, ["data.validation_split=2%"], "data.validation_split=2%: must be a number; got '2%'"),
    (None, ["data.validation_split=0.1", "data.builder=a.b:c", "data.train=null"],
     "data.validation_split=0.1: not available with data.builder"),
    (None, ["model.config.eos_token_id=[2,300]"],
     "model.config.eos_token_id=[2,300]: 300 is beyond the vocabulary of 300 (model.config.vocab_size)"),
    (None, ["model.config=null", "model.path=gpt3"], "model.path=gpt3: no such folder with a config.json: gpt3 ..."),
    (None, ["profile.start_step=3"], "profile.steps: missing; must be given"),
    (None, ["activation_checkpointing=full"],
     "activation_checkpointing=full: must be a section with the keys mode, ...; got 'full'"),
    (None, ["strategy.cpu_offload=true"],
     "strategy.cpu_offload=true: must be a section with the keys what, pin_memory, optimizer_path; got true"),
    (None, ["optimizer.learning_rate=fast"], "optimizer.learning_rate=fast: must be a number; got 'fast'"),
    (None, ['optimizer.learning_rate="1e-4"'], "optimizer.learning_rate=\"1e-4\": must be a number; got '1e-4'"),
    (None, ["optimizer.betas=[0.9]"], "optimizer.betas[1]: missing; must be given"),
    (None, ["optimizer.betas=[0.9,0.95,0.99]"],
     "optimizer.betas=[0.9,0.95,0.99]: must be a list of 2; got [0.9, 0.95, 0.99]"),
    (None, ["optimizer.betas=[0.9,x]"], "optimizer.betas[1]: must be a number; got 'x'"),
    (None, ["run.seed.x=3"], 'run.seed: must be a whole number; got {"x": 3}'),
    (None, ["data.workers=-1"], "data.workers=-1: must be at least 0; got -1"),
    (None, ["data.workers=2000"], "data.workers=2000: must be at most 1024; got 2000"),
    (None, ["run.name=???"], "run.name=???: must be usable as a folder's name; got '???'"),
    (None, [f"run.name={LONG}"],
     "run.name=...: must be shorter: a name in a path may have 255 bytes, and a folder's path 3,000; got "
     "'éééé..."),
    (None, [f"run.dir=a/{LONG}"],
     "run.dir=...: must be shorter: a name in a path may have 255 bytes, and a folder's path 3,000; got "
     "'a/éé..."),
    (None, ['run.name="\\u202e\\u2066"'],
     "run.name=\"\\u202e\\u2066\": must not hold control characters or marks of text direction, which hide "
     "what a name is; got '\\u202e\\u2066'"),
    (None, ['run.dir="runs/a\\u202eb"'],
     "run.dir=\"runs/a\\u202eb\": must not hold control characters or marks of text direction, which hide "
     "what a name is; got 'runs/a\\u202eb'"),
    (None, ['run.dir="a\\0b"'], "run.dir=\"a\\0b\": holds '\\x00', which is no character of a text"),
    (None, ['data.train="a\\0b"'], "data.train=\"a\\0b\": holds '\\x00', which is no character of a text"),
    (None, ['data.train="a\\e[31m"'],
     "data.train[0]: no such file or folder: a\\x1b[31m (looked for in CWD), and no hub id ..."),
    (None, ["run.timeout=10000000000000000"],
     "run.timeout=10000000000000000: must be at most 2592000; got 10000000000000000"),
    (None, ["run.init_timeout=2592001"], "run.init_timeout=2592001: must be at most 2592000; got 2592001"),
    (None, ["run.init_timeout=1e30"], "run.init_timeout=1e30: must be a whole number; got 1e+30"),
    (None, ["slurm.lead=2592001"], "slurm.lead=2592001: must be at most 2592000; got 2592001"),
    (None, ["run.max_steps=9223372036854775808"],
     "run.max_steps=9223372036854775808: must be at most 2147483647; got 9223372036854775808"),
    (None, ["run.max_steps=１２"], "run.max_steps=１２: must be a whole number; got '１２'"),
    (None, ["optimizer.learning_rate=1e300"], "optimizer.learning_rate=1e300: must be at most 1e30; got 1e+300"),
    (None, ["slurm.nodes=1-1000000"],
     "slurm.nodes=1-1000000: must be a number, or a range such as 2-4; got '1-1000000'"),
    (None, ['slurm.time="１２"'], "slurm.time=\"１２\": must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS; got '１２'"),
    (None, ['slurm.host_memory="１２G"'],
     "slurm.host_memory=\"１２G\": must be a number with K, M, G or T, such as 500G; got '１２G'"),
    (None, ["activation_checkpointing={mode: selective, budget: 0GiB}"],
     "activation_checkpointing.budget: must be a size such as 40GiB, ..."),
    (None, ["activation_checkpointing={mode: selective, budget: １２GiB}"],
     "activation_checkpointing.budget: must be a size such as 40GiB, ..."),
    (None, ["schedule.min_ratio=1.5"], "schedule.min_ratio=1.5: must be at most 1; got 1.5"),
    (None, ["optimizer.betas=[0.9,1]"], "optimizer.betas[1]: must be less than 1; got 1"),
    (None, ["optimizer.eps=0"], "optimizer.eps=0: must be greater than 0; got 0"),
    (None, ["optimizer.learning_rate=.nan"], "optimizer.learning_rate=.nan: must be a finite number; got NaN"),
    (None, ["run.dir=~/runs"], "run.dir=~/runs: must be a folder; instead of ~ write ${oc.env:HOME}; got '~/runs'"),
    (None, ["data.train=[data.txt,b*.txt]"],
     "data.train[1]: no such file or folder: b*.txt (looked for in CWD), and no hub id `owner/name`"),
    (2, ["batch.global_batch_size=60"],
     "batch.global_batch_size=60: 60 is not a multiple of 8 (micro-batch) x 2 (ranks) = 16; try 48 or 64"),
    (1, ["batch.global_batch_size=4"],
     "batch.global_batch_size=4: 4 is not a multiple of 8 (micro-batch) x 1 (ranks) = 8; try 8"),
    (8, ["batch.micro_batch_size=auto", "batch.global_batch_size=60"],
     "batch.global_batch_size=60: 60 is not a multiple of 8 (ranks); try 56 or 64"),
    (4, ["strategy.replicate=3"], "strategy.replicate=3: 3 does not divide 4 (ranks); try one of 1, 2, 4"),
    (4, ["strategy.context_parallel_size=-2"], "strategy.context_parallel_size=-2: must be at least 1; got -2"),
    (4, ["strategy.context_parallel_size=3"],
     "strategy.context_parallel_size=3: 3 does not divide 4 (ranks); try one of 1, 2, 4"),
    (None, ["strategy.tensor_parallel_size=two"],
     "strategy.tensor_parallel_size=two: must be a whole number; got 'two'"),
    (None, ["strategy.expert_parallel_size=null"],
     "strategy.expert_parallel_size=null: must be a whole number; got null"),
    (2, ["strategy.context_parallel_size=2", "data.sequence_length=127"],
     "data.sequence_length=127: 127 is not a multiple of 2 (strategy.context_parallel_size); try 128"),
    (4, ["strategy.context_parallel_size=2", "batch.global_batch_size=60"],
     "batch.global_batch_size=60: 60 is not a multiple of 8 (micro-batch) x 4 (ranks) / 2 "
     "(strategy.context_parallel_size) = 16; try 48 or 64"),
    (None, ["strategy.cp_size=2"], "strategy.cp_size=2: unknown key; did you mean strategy.context_parallel_size?"),
    (None, ["strategy.ep_size=2"], "strategy.ep_size=2: unknown key; did you mean strategy.expert_parallel_size?"),
    (4, ["strategy.expert_parallel_size=3"],
     "strategy.expert_parallel_size=3: 3 does not divide 4 (ranks); try one of 1, 2, 4"),
    (4, ["strategy.expert_parallel_size=4", "strategy.replicate=2"],
     "strategy.expert_parallel_size=4: 4 does not divide 2 (ranks of a copy); try one of 1, 2"),
    (None, ["strategy.kind=ddp", "strategy.expert_parallel_size=2"],
     "strategy.expert_parallel_size=2: needs strategy.kind=fsdp or auto"),
    (None, ["strategy.expert_parallel_size=2", "optimizer.name=adafactor"],
     "strategy.expert_parallel_size=2: needs optimizer.name=adamw or sgd or muon"),
    (None, ["strategy.expert_parallel_size=2", "activation_checkpointing={mode: selective, budget: 0.5}"],
     "activation_checkpointing.budget: needs strategy.expert_parallel_size=1"),
    (None, ["strategy.expert_parallel_size=0"],
     "strategy.expert_parallel_size=0: must be at least 1; got 0"),
    (None, ["strategy.tp_size=2"], "strategy.tp_size=2: unknown key; did you mean strategy.tensor_parallel_size?"),
    (4, ["strategy.tensor_parallel_size=3"],
     "strategy.tensor_parallel_size=3: 3 does not divide 4 (ranks); try one of 1, 2, 4"),
    (4, ["strategy.tensor_parallel_size=4", "strategy.replicate=2"],
     "strategy.tensor_parallel_size=4: 4 does not divide 2 (ranks of a copy); try one of 1, 2"),
    (4, ["strategy.tensor_parallel_size=4", "strategy.context_parallel_size=2"],
     "strategy.tensor_parallel_size=4: 4 x 2 (strategy.context_parallel_size) does not divide 4 (ranks); "
     "try one of 1, 2"),
    (4, ["strategy.tensor_parallel_size=2", "strategy.context_parallel_size=2", "batch.global_batch_size=60"],
     "batch.global_batch_size=60: 60 is not a multiple of 8 (micro-batch) x 4 (ranks) / 2 "
     "(strategy.context_parallel_size) / 2 (strategy.tensor_parallel_size) = 8; try 56 or 64"),
    (None, ["strategy.kind=ddp", "strategy.tensor_parallel_size=2"],
     "strategy.tensor_parallel_size=2: needs strategy.kind=fsdp or auto"),
    (None, ["strategy.tensor_parallel_size=2", "optimizer.name=muon", "optimizer.momentum=0.95"],
     "strategy.tensor_parallel_size=2: needs optimizer.name=adamw or sgd"),
    (None, ["strategy.tensor_parallel_size=2", "optimizer.state_dtype=int8"],
     "strategy.tensor_parallel_size=2: needs optimizer.state_dtype=float32"),
    (None, ["strategy.tensor_parallel_size=2", "strategy.expert_parallel_size=2"],
     "strategy.tensor_parallel_size=2: needs strategy.expert_parallel_size=1; for a mixture of experts use "
     "strategy.expert_parallel_size alone"),
    (None, ["strategy.tensor_parallel_size=2", "model.compile=true"],
     "strategy.tensor_parallel_size=2: not available with model.compile; set model.compile=false"),
    (None, ["strategy.expert_parallel_size=2", "model.compile=true"],
     "strategy.expert_parallel_size=2: not available with model.compile; set model.compile=false"),
    (None, ["strategy.tensor_parallel_size=2", "lora={dora: true}"],
     "strategy.tensor_parallel_size=2: not available with lora.dora; FSDP, strategy.context_parallel_size and "
     "strategy.expert_parallel_size are"),
    (None, ["strategy.tensor_parallel_size=2", "activation_checkpointing={mode: selective, budget: 0.5}"],
     "activation_checkpointing.budget: needs strategy.tensor_parallel_size=1"),
    (4, ["strategy={kind: auto, replicate: 3}"], "strategy.replicate: 3 does not divide 4 (ranks); ..."),
    (4, ["profile={start_step: 1, steps: 1, ranks: [0, 4]}"],
     "profile.ranks: there is no rank 4 of 4, which count from 0"),
    (None, ["batch.global_batch_size=60"],
     "batch.global_batch_size=60: 60 is not a multiple of 8 (micro-batch); try 56 or 64"),
    (None, ["profile={start_step: 9, steps: 3}"], "profile.steps: steps 9 to 11 go beyond run.max_steps 10"),
    (None, ["model.init=pretrained"], "model.init=pretrained: pretrained needs model.path"),
    (None, ["model.config.num_attention_heads=0"], "model.config.num_attention_heads=0: must be at least 1; got 0"),
    (None, ["model.config.model_type=[llama]"],
     "model.config.model_type=[llama]: must be a model type of transformers, such as ...; got ['llama']"),
    (None, ["model.config.num_attention_heads=4", "model.config.num_key_value_heads=3"],
     "model.config.num_key_value_heads=3: 3 does not divide 4 (num_attention_heads)"),
    (None, ["model.config.attention_dropout=7"], "model.config.attention_dropout=7: must be from 0 to 1; got 7"),
    (None, ["model.config.rope_theta=x"], "model.config.rope_theta=x: must be a number greater than 0; got 'x'"),
    (None, ["model.config.rope_scaling={rope_type: yarn, factor: 0.5}"],
     "model.config.rope_scaling.factor: must be a number of at least 1; got 0.5"),
    (None, ["model.config.rms_norm_eps=.nan"], "model.config.rms_norm_eps=.nan: must be a finite number; got nan"),
    (None, ["model.config.num_hidden_layers=4611686018427387904"],
     "model.config.num_hidden_layers=4611686018427387904: must be at most 10000; got 4611686018427387904"),
    (None, ["model.config.dtype=float16"], "model.config.dtype=float16: is set by strategy.mixed_precision"),
    (None, ["data={builder: 'a:b', train: null}", "model.builder=a.b:c"],
     "model.builder=a.b:c: model.config is given too; set one to null: model.config=null or model.builder=null"),
    (None, ["model.config={model_type:llama}"],
     "model.config={model_type:llama}: YAML wants a space after the colon: {model_type: llama}, not {model_type:llama}"),
    (None, ["lora={rank:8, alpha: 16}"],
     "lora={rank:8, alpha: 16}: YAML wants a space after the colon: {rank: 8}, not {rank:8}"),
    (None, ["data.columns.text={prompt:a}"],
     "data.columns.text={prompt:a}: YAML wants a space after the colon: {prompt: a}, not {prompt:a}"),
    (None, ["model={config: null, path: gone}"],
     "model.path: no such folder with a config.json: gone (looked for in CWD), and no hub id `owner/name`"),
    (None, ["model={config: null, path: owner/name:train}"],
     "model.path: no such folder with a config.json: owner/name:train ..."),
    (None, ["model.trust_remote_code=true"], "model.trust_remote_code=true: needs model.path"),
    (None, ["strategy.mixed_precision=null", "model.attention=flash_attention_2"],
     "model.attention=flash_attention_2: flash_attention_2 computes in 16 bits only; use sdpa, or ... ..."),
    (None, ["model.new_tokens=[a, a, ' b']"],
     "model.new_tokens[1]: is given twice; got 'a'\n"
     "model.new_tokens[2]: must not begin or end with white space; got ' b'"),
    (None, ["model.new_tokens=[a, '', 3, {b: 1}]"],
     "model.new_tokens[1]: must not be empty; got ''\nmodel.new_tokens[2]: must be text; got 3; put it in quotes\n..."),
    (None, [f"model.new_tokens={'x' * 201}"], "model.new_tokens[0]: must have at most 200 characters; ..."),
    (2, ["model.new_tokens=[a]", "lora={rank: 4}", "strategy={kind: fsdp, tensor_parallel_size: 2}"],
     "model.new_tokens=[a]: not available with lora and strategy.tensor_parallel_size; use 1"),
    (None, ["data.train=null", "data.builder=mine"],
     "data.builder=mine: must be `package.module:function`; got 'mine'"),
    (None, ["data.train=null", "data.builder=a.b:c", "data.text_column=body"],
     "data.text_column=body: not available with data.builder"),
    (None, ["data.train=null", "data.builder=a.b:c", "model.num_labels=3"],
     "model.num_labels=3: needs model.task=sequence_classification"),
    (None, ["data.arguments={x: 1}"], "data.arguments={x: 1}: needs data.builder"),
    (None, ["model={config: null, builder: 'a:b'}", "data={train: data.txt, tokenizer: null}"],
     "data.tokenizer: missing; a model.config or model.builder has none of its own: give `bytes`, ..."),
    (None, ["model={config: null, builder: 'a:b'}", "data.packing=true"],
     "data.packing=true: a model of model.builder gets a document in each row; set it to auto, or to false"),
    (None, [*PREFER, "model={config: null, builder: 'a:b'}", "data.packing=false"],
     "preference: not available with model.builder"),
    (None, ["model={config: null, builder: 'a:b', init: random}", "data={builder: 'a:b', train: null}"],
     "model.init: not available with model.builder"),
    (None, ["data.kind=classification"], "data.kind=classification: classification is not for model.task: causal_lm"),
    (None, [*CLASSIFY, "data.labels=[a,b]", "model.num_labels=3"], "model.num_labels=3: 3, but data.labels names 2"),
    (None, [*CLASSIFY, "data.labels=[a,b,a]"],
     "data.labels=[a,b,a]: must name two classes or more, each once; got a, b, a"),
    (None, [*CLASSIFY, "data.labels=a"], "data.labels=a: must name two classes or more, each once; got a"),
    (None, [*CLASSIFY, "data.train={a: {files: data.txt, kind: text}}"],
     "data.train.a.kind: text does not mix with data.kind classification: the ..."),
    (None, ["data.labels=[a,b]"], "data.labels=[a,b]: needs data.kind=classification; it is text, as data.txt..."),
    (None, ["distillation={}"], "distillation.teacher: missing; must be given"),
    (None, ["distillation.teacher=nowhere"],
     "distillation.teacher=nowhere: no such folder with a config.json: nowhere (looked for in ...), and no hub ..."),
    (None, [TEACH, "distillation.top_k=0"], "distillation.top_k=0: must be at least 1; got 0"),
    (None, [TEACH, "distillation.temperature=0"], "distillation.temperature=0: must be at least 0.01; got 0"),
    (None, [TEACH, "distillation.temperature=1.0e-40"], "distillation.temperature=1.0e-40: must be at least 0.01; got 1e-40"),
    (None, [TEACH, "distillation.temperature=1.0e+9"],
     "distillation.temperature=1.0e+9: must be at most 100; got 1000000000.0"),
    (None, [TEACH, "distillation.weight=1.5"], "distillation.weight=1.5: must be at most 1; got 1.5"),
    (None, [TEACH, "distillation.kd_temperature=2"],
     "distillation.kd_temperature=2: unknown key; did you mean distillation.temperature?"),
    (None, [TEACH, *PREFER], "distillation...: needs data.kind=text or tokens or chat or instruct"),
    (None, [TEACH, "data.kind=text", "data.streaming=true"],
     "distillation...: not available with data.streaming: a pass over all data before training ..."),
    (None, [TEACH, "data.kind=text", "model.task=masked_lm", "data.packing=false"],
     "distillation...: needs model.task=causal_lm"),
    (None, [TEACH, "model.chunked_loss=false"], "distillation...: needs model.chunked_loss"),
    (None, ["model.chunked_loss=false", "model.keep_logits=true"],
     "model.keep_logits=true: needs model.chunked_loss; set model.keep_logits=auto"),
    (None, [TEACH, "model.keep_logits=true"],
     "model.keep_logits=true: not available with distillation; set model.keep_logits=auto"),
    (None, ["model.keep_logits=maybe"], "model.keep_logits=maybe: must be true or false or auto; got 'maybe'"),
    (None, [TEACH, "strategy.context_parallel_size=2"],
     "distillation...: needs strategy.context_parallel_size=1"),
    (None, [TEACH, "strategy.tensor_parallel_size=2"],
     "distillation...: needs strategy.tensor_parallel_size=1"),
    (None, ["data.kind=preference"],
     "data.kind=preference: needs the section preference, such as preference.loss=dpo"),
    (None, [*PREFER, "data.builder=a.b:c", "data.train=null"], "preference...: not available with data.builder"),
    (None, ["preference.loss=dpo"], "preference...: needs data.kind=preference; it is text, as data.txt..."),
    (None, [*PREFER, "preference.loss=dop"], "preference.loss=dop: must be dpo, ipo, ...; did you mean dpo?"),
    (None, [*PREFER, "preference.beta=0"], "preference.beta=0: must be greater than 0; got 0"),
    (None, [*PREFER, "preference.label_smoothing=0.1"],
     "preference.label_smoothing=0.1: needs preference.loss=robust"),
    (None, [*PREFER, "preference.margin=1"], "preference.margin=1: needs preference.loss=simpo"),
    (None, ["data.kind=preference", "preference.loss=robust"],
     "...preference.label_smoothing: loss: robust needs a share above 0; else use dpo"),
    (None, ["data.kind=preference", "preference={loss: robust, label_smoothing: 0.5}"],
     "...preference.label_smoothing: must be less than 0.5; got 0.5"),
    (None, [*MASKED, "data.packing=true"],
     "data.packing=true: not available with model.task: masked_lm: packed documents would ...; set it to false"),
    (None, [*MASKED, "data.mask_probability=0"], "data.mask_probability=0: must be greater than 0; got 0"),
    (None, [*MASKED, "data.mask_probability=-1"], "data.mask_probability=-1: must be greater than 0; got -1"),
    (None, [*MASKED, "data.mask_probability=1"], "data.mask_probability=1: must be less than 1; got 1"),
    (None, ["data.similar_lengths=true"],
     "data.similar_lengths=true: needs data.packing=false; packed sequences are all as long"),
    (None, ["data.mask_probability=0.2"], "data.mask_probability=0.2: needs model.task=masked_lm"),
    (2, [*MASKED, "strategy.context_parallel_size=2"],
     "strategy.context_parallel_size=2: needs model.task=causal_lm"),
    (None, [*MASKED, "data.train={a: {files: data.txt}}"],
     "data.train={a: {files: data.txt}}: a mixture is not available with model.task: masked_lm; give a list"),
    (None, [*MASKED, "strategy.tensor_parallel_size=2"],
     "strategy.tensor_parallel_size=2: needs model.task=causal_lm or sequence_classification"),
    (None, [*MASKED, "lora.rank=4"],
     "lora...: needs model.task=causal_lm or sequence_classification or reward"),
    (None, [*MASKED, "model={path: null, config: {model_type: bert, is_decoder: true}}"],
     "model.config.is_decoder: must be false with model.task: masked_lm, so that tokens ..."),
    (None, [*MASKED, "data.kind=chat"], "data.kind=chat: chat is not for model.task: masked_lm"),
    (None, ["optimizer.ema=1.0"], "optimizer.ema=1.0: must be less than 1; got 1.0"),
    (None, ["optimizer.ema=0"], "optimizer.ema=0: must be greater than 0, or null; got 0"),
    (None, ["checkpoint.every_steps=0"], "checkpoint.every_steps=0: must be at least 1, or null; got 0"),
    (None, ["optimizer.ema=-1"], "optimizer.ema=-1: must be greater than 0; got -1"),
    (None, ["optimizer.ema=0.9", "checkpoint.every_steps=null"],
     "optimizer.ema=0.9: needs checkpoint.every_steps or checkpoint.every_epochs"),
    (None, ["optimizer.ema=0.9", "strategy.cpu_offload.what=optimizer"],
     "strategy.cpu_offload.what=optimizer: not available with optimizer.ema"),
    (None, ["evaluation.ema=true"], "evaluation.ema=true: needs optimizer.ema"),
    (None, ["optimizer.ema=0.9", "evaluation.ema=true", "strategy={kind: ddp, shard_optimizer: true}"],
     "evaluation.ema=true: not available with strategy.shard_optimizer"),
    (None, ["data.kind=text", "model.task=reward"], "data.kind=text: text is not for model.task: reward"),
    (None, [*PREFER, "model.task=reward"], "preference...: needs model.task=causal_lm"),
    (None, [*REWARD, "model.num_labels=2"], "model.num_labels=2: needs model.task=sequence_classification"),
    (None, [*REWARD, "strategy.tensor_parallel_size=2"],
     "strategy.tensor_parallel_size=2: needs model.task=causal_lm or sequence_classification"),
    (None, [*REWARD, "data.margin_column=3"], "data.margin_column=3: must be text; got 3; put it in quotes"),
    (None, [*PREFER, "data.margin_column=x"], "data.margin_column=x: needs model.task=reward"),
    (None, [*REWARD, "data.validation=data.txt", "checkpoint.keep_best=eval_f1"],
     "...no such metric: eval_f1; this run has eval_loss, eval_accuracy, eval_margin"),
    (None, [*PREFER, "lora.dropout=0.1"], "lora.dropout=0.1: not available with preference"),
    (None, [*PREFER, "data.streaming=true"],
     "preference.loss=dpo: not available with data.streaming: a pass over all data before training computes what the loss "
     "compares with; simpo and orpo need none"),
    (None, ["data.kind=unpaired", "kto={beta: 0.1}", "data.streaming=true"],
     "kto={beta: 0.1}: not available with data.streaming: a pass over all data before training ..."),
    (None, [*PREFER, "strategy.context_parallel_size=2"],
     "strategy.context_parallel_size=2: needs data.kind=text or tokens or chat or instruct"),
    (None, [*PREFER, "data.train={a: {files: data.txt, kind: chat}}"],
     "data.train.a.kind: chat does not mix with data.kind preference: the losses differ"),
    (None, ["data.train={a: {files: data.txt, kind: preference}}"],
     "data.train.a.kind: preference does not mix with data.kind text: the losses differ"),
    (None, [*PREFER, "data.validation=data.txt", "evaluation.generate={}"],
     "evaluation.generate={}: needs data.kind=chat or instruct"),
    (None, ["data.response_column=x"],
     "data.response_column=x: needs data.kind=instruct or preference or unpaired; it is text, as data.txt..."),
    (None, ["data.chosen_column=x"], "data.chosen_column=x: needs data.kind=preference; it is text, as data.txt..."),
    (None, [*PREFER, "data.validation=data.txt", "checkpoint.keep_best=eval_f1"],
     "...no such metric: eval_f1; this run has eval_loss, eval_rewards/accuracies, eval_rewards/margins"),
    (None, ["data.kind=chat", "data.text_column=x"], "data.text_column=x: needs data.kind=text or classification"),
    (None, ["data.kind=chat", "data.chat_template=gone.jinja"],
     "data.chat_template=gone.jinja: no such file: gone.jinja (looked for in CWD)"),
    (None, ["data.train={a: {}}"], "data.train.a.files: missing; must be given"),
    (None, ["data.train={a: {files: data.txt, wieght: 1}}"], "data.train.a.wieght: unknown key; did you mean weight?"),
    (None, ["data.train={a: {path: data.txt}}"], "data.train.a.path: unknown key; did you mean files?"),
    (None, ["data.train={a: {data_files: data.txt, weight: 2}}"],
     "data.train.a.data_files: unknown key; did you mean files?"),
    (None, ["data.train={a: {files: [data.txt, b.txt]}}"], "data.train.a.files[1]: no such file or folder: b.txt ..."),
    (None, ["data.train={a.b: {files: data.txt}}"],
     "data.train.a.b: must be a name of letters, digits, _ and -; got 'a.b'"),
    (None, ["data.validation={a: b.txt}"], "data.validation.a[0]: no such file or folder: b.txt ..."),
    (None, ["data.packing=false", "batch.micro_batch_tokens=4096", "batch.micro_batch_size=8"],
     "batch.micro_batch_tokens=4096: batch.micro_batch_size is given too; set one to null: "
     "batch.micro_batch_size=null or batch.micro_batch_tokens=null"),
    (None, ["run.epochs=2", "run.max_steps=3"],
     "run.epochs=2: run.max_steps is given too; set one to null: run.max_steps=null or run.epochs=null"),
    (None, ["batch.micro_batch_size=null", "batch.micro_batch_tokens=4096"],
     "batch.micro_batch_tokens=4096: needs data.packing=false; packed sequences are all as long"),
    (None, ["batch.micro_batch_size=null", "data.packing=false", "batch.micro_batch_tokens=40"],
     "batch.micro_batch_tokens=40: 40 does not hold a sequence of 2048 tokens ..."),
    (None, ["data.streaming=true", "run.max_steps=null", "run.epochs=1"],
     "run.epochs=1: not available with data.streaming"),
    (None, ["data.shard_size=1GiB"], "data.shard_size=1GiB: needs data.streaming"),
    (None, ["data.streaming=true", "data.shard_size=many"],
     "data.shard_size=many: must be a size such as 64MiB; got 'many'"),
    (None, ["data.shuffle_buffer=10"],
     "data.shuffle_buffer=10: unknown key; not needed: data.shuffle shuffles each shard of a stream whole"),
    (None, ["data.train={a: {files: data.txt, weight: 1.0e308}}"],
     "data.train.a.weight: must be at most 1e30; got 1e+308"),
    (None, ["data.train={a: {files: data.txt, weight: most}}"],
     "data.train.a.weight: must be a number or size; got 'most'"),
    (None, ["data.train={a: {files: data.txt, weight: 3}, b: {files: data.txt}}"],
     "data.train.b.weight: size does not mix with the numbers of other sources; give each a number, or none"),
    (None, ["data.train={a: {files: data.txt, limit: 0}}"], "data.train.a.limit: must be at least 1, or null; got 0"),
    (None, ["data.train={a: {files: data.txt, messages_column: x, kind: text}}"],
     "data.train.a.messages_column: needs kind=chat or preference or unpaired"),
    (None, ["data.train={a: {files: data.txt, text_column: x, kind: chat}}"],
     "data.train.a.text_column: needs kind=text or classification"),
    (None, ["data.limit=-1"], "data.limit=-1: must be at least 1; got -1"),
    (None, ["data.train=me/set:train[:5]", "data.streaming=true"],
     "data.train=me/set:train[:5]: me/set:train[:5]: a slice is not available with data.streaming"),
    (None, ["data.train=me/set:train[5]"], "data.train[0]: no such file or folder: me/set:train[5] ..."),
    (None, ["data.system=x"], "data.system=x: needs data.kind=chat or instruct or preference or unpaired; it is text, as data.txt..."),
    (None, ["data.kind=chat", "data.system=' '"], "data.system=' ': must not be empty; got ' '"),
    (None, ["data.columns=3"], "data.columns=3: must be a section; got 3"),
    (None, ["data.columns={}"], "data.columns={}: must not be empty"),
    (None, ["data.kind=instruct", "data.columns={colour: a}"],
     "data.columns.colour: no column of a row is called so; known here: messages, prompt, ..."),
    (None, ["data.kind=chat", "data.columns={prompt: a}"], "data.columns.prompt: needs data.kind=instruct or preference or unpaired"),
    (None, ["data.kind=tokens", "data.columns={weights: a}"], "data.columns.weights: has a key of its own: data.weights_column"),
    (None, ["data.kind=instruct", "data.columns={answer: a, output: b}"],
     "data.columns.output: is another name for answer; give one of them"),
    (None, ["data.kind=instruct", "data.columns={response: a}", "data.response_column=b"],
     "data.columns.response: data.response_column is given too; give one of them"),
    (None, ["data.train={a: {files: data.txt, columns: {messages: x}, kind: text}}"],
     "data.train.a.columns.messages: needs data.kind=chat or preference or unpaired"),
    (None, ["data.ignore_columns=3"], "data.ignore_columns=3: must be a list; got 3"),
    (None, ["data.prompt_format=chat"],
     "data.prompt_format=chat: needs data.kind=instruct or preference or unpaired; it is text, as data.txt..."),
    (None, ["data.overlong=split"], "data.overlong=split: must be cut, drop or error; got 'split'"),
    (None, [*PREFER, "data.overlong=cut"], "data.overlong=cut: not for kind preference, whose answers must be whole; use drop"),
    (None, ["data.kind=classification", "model.task=sequence_classification", "model.num_labels=2", "data.overlong=drop"],
     "data.overlong=drop: not for kind classification, whose texts are cut"),
    (None, ["data.system_column=x"],
     "data.system_column=x: needs data.kind=chat or instruct or preference or unpaired; it is text, as data.txt..."),
    (None, ["data.loss_on=all"], "data.loss_on=all: needs data.kind=chat or instruct; it is text, as data.txt..."),
    (None, ["data.kind=chat", "data.loss_on=first"], "data.loss_on=first: must be assistant, last or all; got 'first'"),
    (None, ["data.kind=chat", "data.loss_on=all", "data.validation=data.txt", "evaluation.generate={}"],
     "evaluation.generate={}: needs data.loss_on=assistant or last"),
    (None, ["data.chat_template_kwargs={enable_thinking: false}"],
     "data.chat_template_kwargs...: needs data.kind=chat or instruct or preference or unpaired; it is text, as data.txt..."),
    (None, ["data.kind=chat", "data.chat_template_kwargs={add_generation_prompt: true, eos_token: x}"],
     "data.chat_template_kwargs.add_generation_prompt: is set by the launcher; ...\n"
     "data.chat_template_kwargs.eos_token: is set by the launcher; ..."),
    (None, ["data.kind=chat", "data.chat_template_kwargs=x"], "data.chat_template_kwargs=x: must be a section; got 'x'"),
    (None, ["data.train=/proc"], "data.train[0]: /proc holds files of the system, not data"),
    (None, ["data.validation=[data.txt, /sys/*]"], "data.validation[1]: /sys/* holds files of the system, not data"),
    (None, ["activation_checkpointing={mode: selective, budget: 40}"],
     "activation_checkpointing.budget: must be at most 1; got 40"),
    (None, ["activation_checkpointing={mode: selective, budget: 40G}"],
     "activation_checkpointing.budget: must be a size such as 40GiB, ..."),
    (None, ["activation_checkpointing={mode: full, budget: 0.5}"],
     "activation_checkpointing.budget: needs activation_checkpointing.mode=selective"),
    (None, ["activation_checkpointing={mode: selective, budget: 0.5, every_n_blocks: 2}"],
     "activation_checkpointing.budget: needs ..."),
    (None, ["optimizer.momentum=0.5"], "optimizer.momentum=0.5: needs optimizer.name=sgd or muon"),
    (None, ["optimizer.name=adafactor", "strategy.cpu_offload.what=optimizer"],
     "strategy.cpu_offload.what=optimizer: needs optimizer.name=adamw or sgd"),
    (None, ["optimizer={name: sgd, momentum: 0}", "strategy.cpu_offload.optimizer_path=/a"],
     "strategy.cpu_offload.optimizer_path=/a: needs optimizer.momentum"),
    (None, ["model.compile=maybe"], "model.compile=maybe: must be true or false or auto; got 'maybe'"),
    (None, ["strategy.kind=ddp", "strategy.reshard_after_forward=false"],
     "strategy.reshard_after_forward=false: needs strategy.kind=fsdp or auto"),
    (None, ["strategy.shard_optimizer=true"], "strategy.shard_optimizer=true: needs strategy.kind=ddp or auto"),
    (None, ["schedule.decay_steps=4"], "schedule.decay_steps=4: needs schedule.kind=wsd"),
    (
        None,
        ["schedule.warmup_ratio=0.1", "schedule.warmup_steps=4"],
        "schedule.warmup_steps=4: not available with schedule.warmup_ratio; set "
        "schedule.warmup_ratio=null, or schedule.warmup_steps=100, its default",
    ),
    (None, ["schedule.warmup_ratio=0"], "schedule.warmup_ratio=0: must be greater than 0, or null; got 0"),
    (None, ["checkpoint.keep_best=eval_loss"], "checkpoint.keep_best=eval_loss: needs data.validation or ..."),
    (None, ["data.validation=data.txt", "checkpoint.keep_best=eval_f1"],
     "checkpoint.keep_best=eval_f1: no such metric: eval_f1; this run has eval_loss"),
    (None, ["data.validation=data.txt", "evaluation.generate={}"],
     "evaluation.generate={}: needs data.kind=chat or instruct; it is text, as data.txt..."),
    (None, ["data.train={a: {files: data.txt, kind: chat}}", "data.validation=data.txt", "evaluation.generate={}"],
     "evaluation.generate={}: needs data.kind=... which ..."),
    (None, ["data.kind=chat", "data.validation=data.txt", "evaluation.generate.max_new_tokens=4096"],
     "evaluation.generate.max_new_tokens=4096: 4096 leaves no room ..."),
    (None, ["data.kind=chat", "data.validation=data.txt", "evaluation.generate={metrics: [exact]}"],
     "evaluation.generate.metrics[0]: must be ..."),
    (None, ["checkpoint.resume=runs/a"],
     "checkpoint.resume=runs/a: no such folder: runs/a (looked for in CWD); give auto, never, or a checkpoint such as "
     "runs/NAME/checkpoints/..."),
    (None, ["checkpoint.every_steps=null", "run.on_divergence=rewind"],
     "run.on_divergence=rewind: needs checkpoint.every_steps or checkpoint.every_epochs"),
    (None, ["checkpoint.export_dtype=bfloat16"], "checkpoint.export_dtype=bfloat16: needs checkpoint.export=at_end or best"),
    (None, ["checkpoint={export: at_end, export_merged: true}"], "checkpoint.export_merged: needs lora"),
    (None, ["checkpoint.export=best"], "checkpoint.export=best: needs checkpoints of which the best is kept: "
     "checkpoint.keep_best=eval_loss"),
    (None, ["checkpoint={every_steps: 100, every_epochs: 0.5}"],
     "checkpoint.every_steps: not available with checkpoint.every_epochs; set one of them to null: "
     "checkpoint.every_epochs=null or checkpoint.every_steps=null"),
    (None, ["evaluation.every_epochs=0"], "evaluation.every_epochs=0: ..."),
    (None, ["lora={}", "model.freeze=a.*"], "model.freeze=a.*: not available with lora"),
    (None, ["lora={quantize: int4}"], "lora.quantize: must be nf4; got 'int4'"),
    (None, ["lora={dora: 1}"], "lora.dora: must be true or false; got 1"),
    (None, ["lora={b_ratio: 0}"], "lora.b_ratio: must be greater than 0; got 0"),
    (None, ["lora={rank_stabilised: true}"], "lora.rank_stabilised: unknown key; did you mean rank_stabilized?"),
    (None, ["lora={target_modules: []}"],
     "lora.target_modules: must name a layer, unless lora.target_parameters names experts"),
    (None, ["lora={target_parameters: 3}"], "lora.target_parameters: ..."),
    (None, ["lora={target_parameters: [down_proj], dropout: 0.1}"],
     "lora.dropout: not available with lora.target_parameters: it cannot be computed for experts without a whole "
     "weight of each"),
    (None, ["lora={target_parameters: down_proj, dora: true}"],
     "lora.dora: not available with lora.target_parameters: it cannot be computed for experts without a whole "
     "weight of each"),
    (None, ["lora={modules_to_save: {a: b}}"], "lora.modules_to_save: ..."),
    (None, ["lora.path=gone"],
     "lora.path=gone: no such folder with an adapter_config.json: gone (looked for in CWD)"),
    (None, ["lora.path=data.txt"], "lora.path=data.txt: data.txt/adapter_config.json cannot be read: Not a directory"),
    (None, ["lora.path=[a]"], "lora.path=[a]: ..."),
    (None, ["lora={dora: true}", "strategy.tensor_parallel_size=2"],
     "strategy.tensor_parallel_size=2: not available with lora.dora; FSDP, strategy.context_parallel_size and "
     "strategy.expert_parallel_size are"),
    (None, ["checkpoint={export: at_end, export_merged: true, export_base: quantized}", "lora={}"],
     "checkpoint.export_base: needs lora.quantize"),
    (None, ["checkpoint={export: at_end, export_base: quantized}", "lora={quantize: nf4}"],
     "checkpoint.export_base: needs checkpoint.export_merged"),
    (None, ["slurm.time=soon"], "slurm.time=soon: must be minutes, HOURS:MINUTES:SECONDS or DAYS-HOURS; got 'soon'"),
    (None, ["slurm.nodes=4-2"], "slurm.nodes=4-2: must be a number, or a range such as 2-4; got '4-2'"),
    (None, ["slurm.environment={A B: x}"],
     "slurm.environment.A B: must be the name of an environment variable; got 'A B'"),
    (None, ["model.config=${model.config}"],
     "model.config=${model.config}: cannot be interpolated: Recursive interpolation detected"),
    (None, ["data.cache=None", "run.dir=None"],
     "data.cache=None: is text, not the value null; a folder of that name is written ./None; got 'None'\n"
     "run.dir=None: is text, not the value null; a folder of that name is written ./None; got 'None'"),
    (None, ["run.seed"], "run.seed: an override is key=value, such as batch.micro_batch_size=4"),
    (None, ["data.txt"], "data.txt: an override is key=value; write data.train=data.txt"),
    (None, ["owner/name"], "owner/name: an override is key=value; write model.path=owner/name"),
    (None, ["model={path: null, config: null}", "data.tokenizer=null"],
     "model.path: missing; give model.path or model.config or model.builder"),
    (None, ["=3"], "=3: an override is key=value, ..."),
    (None, ["run.seed=[1"],
     "run.seed=[1: not a value: expected ',' or ']', but got '<stream end>'; is it indented right, ..."),
]
# fmt: on
KNOWN = ", ".join(sorted(path.stem for path in (REPOSITORY / "recipes").glob("*.yaml")))
NO_RECIPE = f"no recipe given; give recipe=NAME ({KNOWN}) or recipe=path/to/file.yaml"
RECIPES = {
    "": NO_RECIPE,
    "recipe= run.seed=3": NO_RECIPE,
    "quickstart": "no recipe given; write recipe=quickstart",
    "quickstart run.seed=3 data.txt": "no recipe given; write recipe=quickstart data.train=data.txt",
    "data.txt run.seed=3": "no recipe given; write recipe=sft data.train=data.txt",
    "owner/name data.txt": "no recipe given; write recipe=sft model.path=owner/name data.train=data.txt",
    "base data.txt": "no recipe given; write recipe=sft model.path=base data.train=data.txt",
    "recipe=ddp recipe=fsdp": "2 recipes given; give recipe=NAME (...) or ...",
    "recipe=quikstart": "recipe=quikstart: no recipe of that name; did you mean quickstart?...",
    "recipe=zzz": f"recipe=zzz: no recipe of that name; known: {KNOWN}; or give the path of a .yaml file",
    "recipe=y.yaml": "recipe=y.yaml: no such file",
    f"recipe={'a' * 300}.yaml": "recipe=aaa...: no such file",
    "recipe=./": "recipe=./: a folder, not a file",
}


def problems_of(arguments, ranks=None):
    with pytest.raises(RecipeError) as refused:
        load_recipe(arguments, ranks=ranks)
    return refused.value.problems


def check(expected, problems):
    expected = [line.replace("CWD", str(Path.cwd())) for line in expected]
    assert len(problems) == len(expected), problems
    for pattern, line in zip(expected, problems, strict=True):
        assert says(pattern, line), f"\nexpected: {pattern}\nmessage:  {line}"


@pytest.mark.parametrize(("line", "text", "expected"), MISTAKES_IN_A_FILE)
def test_mistakes_in_a_file_are_reported(folder, line, text, expected):
    lines = SMALL.splitlines()
    lines[line - 1 : line] = text.splitlines() or [""]
    (folder / "x.yaml").write_text("\n".join(lines) + "\n")
    check([f"x.yaml:{message}" for message in expected.split("\n")], problems_of(["recipe=x.yaml"]))


def test_mistakes_in_the_config_of_a_text_model_are_reported(folder):
    """Of a model of images and text, whose config has a section for each."""
    config = "{vocab_size: 256, num_hidden_layers: 0, num_attention_heads: 4, "
    config += "num_key_value_heads: 3, eos_token_id: 300, attention_dropout: 2}"
    (folder / "x.yaml").write_text(
        SMALL.replace("llama", "qwen3_vl").replace(
            "    vocab_size: 300\n", f"    vocab_size: 300\n    text_config: {config}\n"
        )
    )
    start = "x.yaml:8: model.config.text_config"
    expected = {
        f"{start}.vocab_size: 256 is too small; the tokenizer `bytes` needs 257: ...",
        f"{start}.num_hidden_layers: must be at least 1; got 0",
        f"{start}.num_key_value_heads: 3 does not divide 4 (num_attention_heads)",
        f"{start}.eos_token_id: 300 is beyond the vocabulary of 256 (model.config...vocab_size)",
        f"{start}.attention_dropout: must be from 0 to 1; got 2",
    }
    problems = problems_of(["recipe=x.yaml"])
    assert len(problems) == len(expected), problems
    assert all(any(says(each, line) for line in problems) for each in expected), problems


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            "vision_config: {attention_dropout: 7}",
            ["vision_config.attention_dropout: must be from 0 to 1; got 7"],
        ),
        (
            "hidden_size: 8",
            ["hidden_size: cannot change: the weights in model.path are made for ..."],
        ),
        (
            "text_config: {vocab_size: 9}",
            ["text_config.vocab_size: cannot change: the weights ..."],
        ),
        ("num_labels: 3", ["num_labels: is set by model.num_labels or data.labels"]),
        ("dtype: float16", ["dtype: is set by strategy.mixed_precision"]),
        ("attention_dropout: 7", ["attention_dropout: must be from 0 to 1; got 7"]),
        (
            "rope_theta: .inf, x_dropout: 2",
            ["x_dropout: must ...", "rope_theta: must be a number greater than 0; got inf"],
        ),
        ("rope_theta: null", ["rope_theta: must be a number greater than 0; got None"]),
        ("rope_theta: x", ["rope_theta: must be a number greater than 0; got 'x'"]),
        (
            "rope_scaling: {rope_type: linear, factor: -1}",
            ["rope_scaling.factor: must be a number of at least 1; got -1"],
        ),
        (
            "text_config: {rope_scaling: {factor: '2'}}",
            ["text_config.rope_scaling.factor: must be a number of at least 1; got '2'"],
        ),
        (
            "rope_parameters: {full_attention: {rope_type: yarn, factor: .nan, rope_theta: 0}}",
            [
                "rope_parameters.full_attention.factor: must be a number of at least 1; got nan",
                "rope_parameters.full_attention.rope_theta: must be a number greater than 0; got 0",
            ],
        ),
        (
            "rope_scaling: {type: other, factor: 0.5}, rope_theta: 1, x: {factor: -1}, y_dropout: 2",
            ["y_dropout: must be from 0 to 1; got 2"],
        ),
    ],
)
def test_wrong_changes_of_a_config_are_reported(folder, changes, expected):
    lines = SMALL.splitlines()
    lines[3:7] = [f"model: {{path: owner/name, config: {{{changes}}}}}"]
    (folder / "x.yaml").write_text("\n".join(lines) + "\n")
    expected = [f"x.yaml:4: model.config.{message}" for message in expected]
    check(expected, problems_of(["recipe=x.yaml"]))


def test_an_adapter_does_not_hold_a_changed_config(folder):
    lines = SMALL.splitlines()
    lines[3:7] = ["model: {path: owner/name, config: {rope_theta: 1.0e+6}}", "lora: {}"]
    (folder / "x.yaml").write_text("\n".join(lines) + "\n")
    message = "command line: checkpoint.export_merged: must be true with model.config and ..."
    check([message], problems_of(["recipe=x.yaml", "checkpoint.export=at_end"]))


@pytest.mark.parametrize(("ranks", "arguments", "expected"), MISTAKES_IN_ARGUMENTS)
def test_mistakes_in_an_argument_are_reported(folder, ranks, arguments, expected):
    expected = [f"command line: {message}" for message in expected.split("\n")]
    check(expected, problems_of(["recipe=x.yaml", *arguments], ranks))


def test_missing_or_unknown_recipe_is_refused(folder):
    (folder / "base").mkdir()
    (folder / "base/config.json").write_text("{}")
    for arguments, expected in RECIPES.items():
        check([f"command line: {expected}"], problems_of(arguments.split()))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"", "must be sections (run:, model:, ...)..."),
        (b"- run\n", "must be sections (run:, model:, ...)..."),
        (b"# no recipe\n" * 100_000, "larger than 1 MiB, so it is no recipe"),
        (b"[" * 1000, "not YAML: more than 50 levels of keys in one section or list"),
        (SMALL.encode() + b"# \xff\n", "not YAML: unacceptable character ..."),
        (SMALL.encode() + b"# \0\n", "not YAML: unacceptable character ..."),
    ],
)
def test_files_without_sections_are_refused(folder, text, expected):
    (folder / "x.yaml").write_bytes(text)
    check([f"x.yaml: {expected}"], problems_of(["recipe=x.yaml"]))


def test_few_aliases_cannot_stand_for_billions_of_values(folder):
    """Each line names the one before ten times: as lists, and merged into sections."""
    for first, line in (("[x]", "[{}]"), ("{x: 1}", "{{<<: [{}]}}")):
        bomb = f"a0: &a0 {first}\n" + "".join(
            f"a{n + 1}: &a{n + 1} {line.format(', '.join([f'*a{n}'] * 10))}\n" for n in range(12)
        )
        (folder / "x.yaml").write_text(SMALL + bomb)
        expected = "x.yaml:...: not YAML: more than 100,000 values in one section or list"
        check([expected], problems_of(["recipe=x.yaml"]))
    for nested in ("[" * 300 + "]" * 300, "{a: " * 300 + "1" + "}" * 300):
        (folder / "x.yaml").write_text(SMALL + f"lora: {nested}\n")
        expected = "x.yaml:14: not YAML: more than 50 levels of keys in one section or list"
        check([expected], problems_of(["recipe=x.yaml"]))


def test_few_interpolations_cannot_stand_for_billions(folder):
    """Each key names the one after it twice, by its whole name or by its name in the section."""
    for reference in ("${model.config.a%d}", "${.a%d}"):
        lines = [f"    a{n}: {reference % (n + 1)}{reference % (n + 1)}\n" for n in range(40)]
        text = SMALL.replace("    vocab_size", "".join(lines) + "    a40: x\n    vocab_size")
        (folder / "x.yaml").write_text(text)
        expected = "x.yaml:7: model.config.a0: more than 500 interpolations up to here"
        check([expected], problems_of(["recipe=x.yaml"]))


def test_new_run_needs_a_divisible_batch_size(folder):
    """Only a resumed run may have a smaller last micro-batch."""
    (folder / "runs/small/checkpoints").mkdir(parents=True)
    refused = "x.yaml:12: batch.global_batch_size: 64 is not a multiple of 8 (micro-batch) x 3 "
    refused += "(ranks) = 24; try 48 or 72"
    assert problems_of(["recipe=x.yaml"], 3) == [refused]
    (folder / "runs/small/checkpoints/step_00000005").mkdir()
    load_recipe(["recipe=x.yaml"], ranks=3)
    load_recipe(["recipe=x.yaml", "run.dir=a", "checkpoint.resume=runs/small"], ranks=3)
    assert "60 is not" in problems_of(["recipe=x.yaml", "batch.global_batch_size=60"], 3)[0]
    for override in ("checkpoint.resume=never", "run.dir=runs/other"):
        assert problems_of(["recipe=x.yaml", override], 3) == [refused]


def test_all_problems_are_reported_in_order(folder):
    text = SMALL.replace("max_steps: 10", "max_stepz: 10")
    text = text.replace("vocab_size: 300", "dtype: float16").replace("64", "65")
    text += "strategy: {kind: dp, replicate: 0}\noptimiser: {}\nschedule: {warmup_steps: -3}\n"
    (folder / "x.yaml").write_text(text)
    wrong = ["foo.bar=3", "run.seed", "run.name=3", "data.train=3", "data.workers=-1"]
    problems = problems_of([wrong[0], "recipe=x.yaml", *wrong[1:]], 2)
    assert [" ".join(problem.split(": ")[:2]) for problem in problems] == [
        "x.yaml:3 run.max_stepz",
        "x.yaml:7 model.config.dtype",
        "x.yaml:12 batch.global_batch_size",
        "x.yaml:14 strategy.kind",
        "x.yaml:14 strategy.replicate",
        "x.yaml:15 optimiser",
        "x.yaml:16 schedule.warmup_steps",
        "command line foo",
        *(f"command line {argument}" for argument in wrong[1:]),
    ]


def test_messages_use_relative_file_names(folder, monkeypatch):
    (folder / "deep").mkdir()
    (folder / "deep" / "x.yaml").write_text(SMALL.replace("64", "63"))
    check(
        ["deep/x.yaml:12: batch.global_batch_size: 63 is not..."],
        problems_of(["recipe=deep/x.yaml"]),
    )
    monkeypatch.chdir(folder / "deep")
    expected = ["x.yaml:12: batch.global_batch_size: ..."]
    check(expected, problems_of(["recipe=../deep/x.yaml", "data.train=../data.txt"]))


# fmt: off
SCRAPS = [
    "null", "???", "${", "${run.name}", "*", "&a ", "*a", "!!int ", "!!binary ", "{", "}",
    "[", "]", ": ", "- ", "\n", "\n  ", "\t", "'", '"', "#", "<<: ",
]
# fmt: on


def test_random_edits_cause_no_traceback(folder):
    """Deletes and inserts text at random positions.

    The recipe is still valid or is refused with a message that names the file.
    """
    generator = random.Random(7)
    refused = []
    for _ in range(80):
        text = SMALL
        for _ in range(generator.choice([1, 2])):
            at = generator.randrange(len(text))
            cut = text[at + generator.randrange(1, 9) :]
            text = text[:at] + generator.choice([cut, generator.choice(SCRAPS) + text[at:]])
        (folder / "x.yaml").write_text(text)
        try:
            load_recipe(["recipe=x.yaml"], ranks=2)
        except RecipeError as error:
            refused.append(error.problems)
    assert len(refused) > 40
    assert all(problem.startswith("x.yaml") for problems in refused for problem in problems)


# fmt: off
HOSTILE = [
    ".nan", "-.inf", "1e400", "-1", str(2**64), "9" * 5000, "0x" + "f" * 5000, '"a\\0b"',
    '"\\ud800"', '"\\e[31m"', "a" * 5000, "/" + "b/" * 3000, "[[[1]]]", "{a: {b: 1}}",
    '{"²": 1}', "!!python/object:os.system {}", "&a [*a]", "=", "2026-01-01", "1:30", "１２",
    "0GiB", "${oc.env:NO_SUCH}", "${run.name", "???", "~", "[]", "{}",
]
DECODED = [
    None, True, -1, 2**64, 10**99, float("nan"), float("inf"), 1e300, "", "a" * 5000, "²", "0GiB",
    [], {}, [[1]], {"a": {"b": 1}}, {"²": 1},
]
# fmt: on


def hostile_values_are_refused_or_usable(arguments):
    """A recipe that is accepted can be written and read again. A message is about the recipe or
    the arguments, has no character that a terminal obeys, and is short."""
    try:
        loaded = load_recipe(arguments, ranks=2)
    except RecipeError as error:
        for problem in error.problems:
            assert problem.startswith(("x.yaml", "command line: ")), problem
            assert problem.isprintable(), problem
            assert len(problem) < 3500, problem
        return
    Path("again.yaml").write_text(to_yaml(loaded.recipe))
    assert load_recipe(["recipe=again.yaml"], ranks=2).recipe == loaded.recipe


@pytest.mark.slow
def test_hostile_values_of_every_key_cause_no_traceback(folder):
    """One value for each key through all of the loading, and all values through the decoding."""
    for path, value in zip(keys(), itertools.cycle(HOSTILE)):
        hostile_values_are_refused_or_usable(["recipe=x.yaml", f"{dotted(path)}={value}"])
    small = yaml.safe_load(SMALL)
    for path in keys():
        for value in DECODED:
            plain = value
            for key in reversed(path):
                plain = {key: plain}
            _, problems, _ = decode(merged(small, plain))
            assert all(dotted(problem.path).isprintable() for problem in problems)
