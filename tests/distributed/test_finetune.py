"""Fine-tuning on chats: `make finetune`, generation, early stopping, `launcher rows`, exports."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from launcher.cli.main import main
from launcher.cli.rows import _losses, _open, _recipe
from launcher.data.origins import trained_rows
from launcher.models.micro_batch import IGNORED
from tests import REPOSITORY
from tests.distributed.launching import run, torchrun
from tests.distributed.layouts import MODELS
from tests.run_files import read_lines, write_lines

pytestmark = pytest.mark.long  # tests/unit/training and tests/unit/cli have the parts


@pytest.mark.long
def test_make_finetune_learns_to_add(tmp_path):
    """Trains the quickstart from scratch, exports it and fine-tunes the export on chats.

    The accuracy is measured on questions that are not in the training data.
    """
    copy = tmp_path / "copy"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, copy], check=True)
    (
        copy / ".venv"
    ).mkdir()  # looks like a new installation; the environment of this checkout must not change
    for part in (REPOSITORY / ".venv").iterdir():
        if part.name != ".installed":
            os.symlink(part, copy / ".venv" / part.name)
    (copy / ".venv/.installed").touch()
    output = run(["make", "finetune"], cwd=copy, timeout=900, PYTHONPATH=str(copy)).check().output
    steps = [
        json.loads(line)
        for line in (copy / "runs/quickstart/metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in steps if "loss" in line]
    assert 5.3 < losses[0] < 5.8
    assert sum(losses[-10:]) / 10 < 2.0
    before, after = (
        float(share)
        for share in re.findall(r"accuracy of runs/\S+: ([\d.]+)% of 81 questions", output)
    )
    assert before < 5
    assert after > 80
    assert (copy / "runs/make_finetune/hf/tokenizer.json").exists()


RECIPE = """
run: {name: chat, max_steps: 20}
model: {path: base}
lora: {rank: 4}
data: {kind: chat, train: [train.jsonl], validation: {near: [train.jsonl], far: [far.jsonl]}, tokenizer: bytes, sequence_length: 48,
  workers: 0, cache: cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {mixed_precision: null}
optimizer: {learning_rate: 2.0e-2}
schedule: {warmup_steps: 1}
evaluation: {every_steps: 2, stop_after: 2, generate: {prompts: 5, max_new_tokens: 4, metrics: [exact_match, f1, rouge_l, "mine:never"]}}
checkpoint: {every_steps: 2, keep_last: 1, keep_best: eval_never, export: at_end}
"""
TRAIN = REPOSITORY / "launcher/train.py"


def sum_of(first, second):
    turns = [("user", f"{first} + {second}"), ("assistant", str(first + second))]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """A folder with two runs of the recipe.

    The first one uses two context parallel ranks and FSDP. The second one uses one rank and DDP
    and resumes from step 2 of the first.
    """
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("tuned")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 256}
    config = transformers.LlamaConfig(**sizes, **heads, **tokens)
    transformers.LlamaForCausalLM(config).save_pretrained(folder / "base")
    sums = [sum_of(first, second) for first in range(8) for second in range(8)]
    write_lines(folder / "train.jsonl", sums)
    far = [sum_of(9, second) for second in range(3)]
    write_lines(folder / "far.jsonl", far)
    (folder / "chat.yaml").write_text(RECIPE)
    (folder / "mine.py").write_text("def never(answer, reference):\n    return 0.25\n")
    shared = ["strategy.kind=fsdp", "strategy.context_parallel_size=2"]
    torchrun(TRAIN, "recipe=chat.yaml", *shared, ranks=2, cwd=folder).check()
    shutil.copytree(folder / "runs/chat", folder / "runs/alone")
    shutil.rmtree(folder / "runs/alone/checkpoints/step_00000006")
    run(
        [sys.executable, TRAIN, "recipe=chat.yaml", "strategy.kind=ddp", "run.dir=runs/alone"],
        cwd=folder,
    ).check()
    return folder


@pytest.mark.long
def test_generated_answers_are_independent_of_rank_count(tuned):
    samples = read_lines(tuned / "runs/chat/samples.jsonl")
    assert samples == read_lines(tuned / "runs/alone/samples.jsonl")
    assert [(line["step"], line["set"]) for line in samples] == [
        (step, name) for step in (2, 4, 6) for name in ["near"] * 5 + ["far"] * 3
    ]
    assert samples[0]["prompt"] == "<|user|>0 + 0<|end|><|assistant|>"
    assert [line["reference"] for line in samples[5:8]] == ["9", "10", "11"]
    assert any(line["answer"] for line in samples)
    evaluations = [
        line for line in read_lines(tuned / "runs/chat/metrics.jsonl") if "eval_loss" in line
    ]
    for number, line in enumerate(evaluations):
        mine = samples[8 * number : 8 * number + 8]
        for name in ("exact_match", "f1", "rouge_l", "never"):
            mean = sum(sample[name] for sample in mine) / 8
            assert line[f"eval_{name}"] == pytest.approx(mean)
    assert evaluations[0]["eval_scores"]["far"]["never"] == 0.25


@pytest.mark.long
@pytest.mark.parametrize("key", ["context_parallel_size", "replicate"])
def test_generated_answers_are_independent_of_tensor_parallelism(tuned, key):
    words = ["strategy.kind=fsdp", "strategy.tensor_parallel_size=2", f"strategy.{key}=2"]
    words += [f"run.dir=runs/divided_{key}", "batch.micro_batch_size=1"]
    torchrun(TRAIN, "recipe=chat.yaml", *words, ranks=4, cwd=tuned).check()
    samples = read_lines(tuned / f"runs/divided_{key}/samples.jsonl")
    assert samples == read_lines(tuned / "runs/alone/samples.jsonl")


@pytest.mark.parametrize("name", ["chat", "alone"])
def test_early_stopping_ends_the_run(tuned, name):
    """The metric never changes, so the first evaluation remains the best."""
    status = json.loads((tuned / "runs" / name / "status.json").read_text())
    assert (status["state"], status["step"], status["reason"]) == ("finished", 6, "early_stopping")
    kept = sorted(path.name for path in (tuned / "runs" / name / "checkpoints").iterdir())
    assert kept == ["step_00000002", "step_00000006"]
    assert (tuned / "runs" / name / "hf/adapter_model.safetensors").is_file()


def test_rows_command_shows_the_losses_of_a_step(tuned, monkeypatch, capsys):
    """The mean loss per token of the rows equals the loss of the step."""
    monkeypatch.chdir(tuned)
    assert main(["rows", "runs/chat", "step=3", "--loss"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "losses with the weights of runs/chat/checkpoints/step_00000002" in printed[1]
    cells = [
        re.fullmatch(r" *(\d+) +([\d.]+) +(\d+) +train.jsonl:(\d+) +(\d) \+ (\d)", line)
        for line in printed[3:]
    ]
    shown = [float(cell[2]) for cell in cells]
    assert shown == sorted(shown, reverse=True)
    assert {int(cell[1]) for cell in cells} == set(range(1, 9))
    assert all(int(cell[4]) == 8 * int(cell[5]) + int(cell[6]) + 1 for cell in cells)
    run_dir = tuned / "runs/chat"
    recipe = _recipe(run_dir, 3)
    with _open(run_dir, recipe, 16) as opened:
        rows = trained_rows(opened, range(16, 24), tokenizer="bytes")
    assert len(rows) == len(shown)
    targets = [int((row.sample["targets"] != IGNORED).sum()) for row in rows]
    losses, _ = _losses(run_dir, recipe, 3, rows, trust_run=False)
    mean = sum(loss * count for loss, count in zip(losses, targets, strict=True)) / sum(targets)
    logged = read_lines(run_dir / "metrics.jsonl")[3]
    assert logged["step"] == 3
    assert mean == pytest.approx(logged["loss"], rel=1e-5)


@pytest.mark.long
def test_export_verification_names_each_planted_fault(tuned, monkeypatch, capsys):
    from safetensors.torch import load_file, save_file

    monkeypatch.chdir(tuned)
    assert main(["export", "runs/chat", "out=runs/chat/hf", "--verify"]) == 0
    assert capsys.readouterr().out == "runs/chat/hf matches runs/chat/checkpoints/step_00000006\n"
    assert main(["export", "runs/chat", "out=merged", "--merged", "dtype=bfloat16"]) == 0
    shutil.copytree("merged", "faulty")
    weights = load_file("faulty/model.safetensors")
    names = [f"model.layers.{layer}.self_attn.q_proj.weight" for layer in (0, 1)]
    weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]
    save_file(weights, "faulty/model.safetensors", metadata={"format": "pt"})
    (tuned / "faulty/chat_template.jinja").write_text("{{ messages }}")
    settings = json.loads((tuned / "faulty/tokenizer_config.json").read_text())
    del settings["eos_token"]
    (tuned / "faulty/tokenizer_config.json").write_text(json.dumps(settings))
    generation = json.loads((tuned / "faulty/generation_config.json").read_text())
    (tuned / "faulty/generation_config.json").write_text(
        json.dumps(generation | {"eos_token_id": 5})
    )
    capsys.readouterr()
    assert main(["export", "runs/chat", "out=faulty", "--verify"]) == 3
    printed = capsys.readouterr().out.splitlines()
    named = [line.removeprefix("differs: ").rpartition(": ")[0] for line in printed[:-1]]
    named = [line.partition(": their")[0] for line in named]
    assert sorted(named) == sorted(
        [
            *names,
            "logits",
            "generation_config.json: eos_token_id",
            "tokenizer: eos_token",
            "chat template",
        ]
    )
    assert printed[-1] == "faulty does not match runs/chat/checkpoints/step_00000006"


TP, EP, CP = (f"strategy.{name}_parallel_size=2" for name in ("tensor", "expert", "context"))
LORA = "lora={rank: 4}"


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "overrides"),
    [
        ("qwen3, one key head, tied", [TP, "lora=null"]),
        ("qwen3, one key head, tied", [TP, CP, LORA]),
        ("qwen3_moe", [EP, "lora=null"]),
        ("qwen3_moe", [EP, CP, LORA]),
        ("gpt_oss", [EP, "lora=null", "data.packing=false"]),
        ("llama", [CP, "lora=null"]),
    ],
)
def test_exports_of_divided_runs_are_those_of_one_rank(tuned, tmp_path, capsys, model, overrides):
    """A pretrained folder is read into divided weights, trained and exported: at the end of the run,
    from its checkpoint, and merged."""
    import torch
    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = yaml.safe_load(MODELS[model]) | {"vocab_size": 260, "eos_token_id": 256}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**config)).save_pretrained(
        tmp_path / "base"
    )
    common = [f"model.path={tmp_path}/base", "run.max_steps=4", "optimizer.learning_rate=0.005"]
    common += ["evaluation={every_steps: 9, stop_after: null}", "checkpoint.keep_best=null"]
    common += [word for word in overrides if "strategy" not in word]
    run_dirs = {}
    for ranks, more in ((1, ["strategy.kind=ddp"]), (4, ["strategy.kind=fsdp", *overrides])):
        run_dirs[ranks] = tmp_path / f"run_{ranks}"
        words = [*common, *more, "batch.micro_batch_size=1", f"run.dir={run_dirs[ranks]}"]
        torchrun(TRAIN, "recipe=chat.yaml", *words, ranks=ranks, cwd=tuned).check()
    (alone, divided), out = run_dirs.values(), tmp_path / "out"
    exports = {divided / "hf": [], tmp_path / "from_checkpoint": []}
    if LORA in overrides:
        exports[tmp_path / "merged"] = ["--merged"]
    for folder, options in exports.items():
        checkpoint = str(divided / "checkpoints/step_00000004")
        assert main(["export", checkpoint, f"out={folder}", *options, "--verify"]) == 0
        assert f"{folder} matches" in capsys.readouterr().out
    assert main(["export", str(alone), f"out={out}", *options]) == 0
    for written, expected in ((divided / "hf", alone / "hf"), (folder, out)):
        found = weights_in(written)
        assert found.keys() == weights_in(expected).keys()
        for name, tensor in weights_in(expected).items():
            assert (found[name] - tensor).abs().max() <= 1e-5, name


def weights_in(folder):
    from safetensors.torch import load_file

    (file,) = folder.glob("*.safetensors")
    return load_file(file)
