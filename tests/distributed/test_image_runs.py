"""Runs on rows with images, from their start to their end: strategies, adapters, kills, faults of files."""

import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file

from launcher.cli.main import main
from tests import REPOSITORY
from tests.distributed.launching import forked
from tests.image_models import make_image, make_model
from tests.run_files import read_lines, status, write_lines

RECIPE = """
run: {name: images, max_steps: 4, seed: 3}
model: {path: FOLDER/model}
data: {train: [FOLDER/train.jsonl], sequence_length: 160, workers: 1, cache: FOLDER/cache}
images: {train: all}
batch: {global_batch_size: 4, micro_batch_size: 1}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-3}
schedule: {kind: constant, warmup_steps: 1}
checkpoint: {every_steps: 2, keep_last: 20, export: at_end}
"""
BUDGET = ["activation_checkpointing={mode: selective, budget: 0.5}", "model.compile=true"]
NF4 = ["lora.quantize=nf4", "model.path=FOLDER/wide"]
STAGES, DEEP = "strategy.pipeline_parallel_size=2", ["model.path=FOLDER/deep"]
LORA = ["images.train=none", "lora={rank: 4, modules_to_save: [merger]}"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Twelve rows, one or two images in most of them, and a small model."""
    folder = tmp_path_factory.mktemp("image_runs")
    make_model(folder / "model", "qwen2_5_vl")
    wide = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}
    sections = {"text_config": wide, "vision_config": {"out_hidden_size": 64}}
    make_model(folder / "wide", "qwen2_5_vl", sections=sections)
    make_model(folder / "deep", "qwen3_vl", sections={"text_config": {"num_hidden_layers": 8}})
    rows = []
    for number in range(12):
        names = [f"{number}_{part}.png" for part in range(number % 3)]
        for seed, name in enumerate(names):
            make_image(folder / name, size=(60 + 8 * number, 90), seed=100 * seed + number)
        user = {"role": "user", "content": "<image>" * len(names) + "What is it?"}
        answer = {"role": "assistant", "content": f"Number {number}, with {len(names)}."}
        rows.append({"messages": [user, answer]} | ({"images": names} if names else {}))
    write_lines(folder / "train.jsonl", rows)
    (folder / "recipe.yaml").write_text(RECIPE.replace("FOLDER", str(folder)))
    return folder


def train(folder, name, *words, ranks=2, expected=0, **variables):
    run = folder / f"runs/{name}"
    script = REPOSITORY / "tests/distributed/kill_train.py"
    words = [f"recipe={folder}/recipe.yaml", f"run.dir={run}", *words]
    words = [word.replace("FOLDER", str(folder)) for word in words]
    result = forked(script, *words, ranks=ranks, timeout=150, **variables)
    assert result.status == expected, result.output[-6000:]
    return run


def losses(run):
    return [line["loss"] for line in read_lines(run / "metrics.jsonl") if "loss" in line]


def weights(run):
    return load_file(run / "hf/model.safetensors")


@pytest.fixture(scope="module")
def whole(folder):
    return train(folder, "whole")


@pytest.mark.parametrize(
    "words",
    [
        ["strategy.cpu_offload={}", "activation_checkpointing={mode: full}"],
        ["strategy.replicate=2"],
        ["strategy={kind: ddp, shard_optimizer: true}", "batch.micro_batch_size=2"],
        pytest.param(BUDGET, marks=pytest.mark.long),
    ],
    ids=lambda words: words[0],
)
def test_strategies_train_alike(folder, whole, words):
    run = train(folder, "other", *words)
    assert losses(run) == pytest.approx(losses(whole), abs=1e-5)
    shutil.rmtree(run)


@pytest.fixture(scope="module")
def deep(folder):
    return train(folder, "deep", *DEEP, ranks=1)


def numbers(run, *, first=1):
    lines = [line for line in read_lines(run / "metrics.jsonl") if line["step"] >= first]
    return [line[key] for line in lines for key in ("loss", "grad_norm", "tokens") if key in line]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, []),
        pytest.param(4, [], marks=pytest.mark.long),
        pytest.param(2, ["strategy.pipeline_schedule=interleaved_1f1b"], marks=pytest.mark.long),
        pytest.param(4, ["strategy.context_parallel_size=2"], marks=pytest.mark.long),
    ],
)
def test_the_first_stage_of_a_pipeline_has_the_tower(folder, deep, ranks, words):
    """Losses and norms are those of one rank, also after a resume on one."""
    run = train(folder, "stages", *DEEP, STAGES, *words, ranks=ranks)
    assert numbers(run) == pytest.approx(numbers(deep), rel=2e-6)
    mine, expected = weights(run), weights(deep)
    assert mine.keys() == expected.keys()
    assert max((mine[name] - expected[name]).abs().max().item() for name in expected) < 2e-5
    start = f"checkpoint.resume={run}/checkpoints/step_00000002"
    resumed = train(folder, "resumed", *DEEP, start, ranks=1)
    assert numbers(resumed, first=3) == pytest.approx(numbers(deep, first=3), rel=2e-6)
    shutil.rmtree(run), shutil.rmtree(resumed)


@pytest.mark.long
@pytest.mark.parametrize("train_tower", ["none", "all"])
def test_stages_with_images_are_planned(folder, train_tower, capsys):
    words = [f"recipe={folder}/recipe.yaml", *DEEP, STAGES, f"images.train={train_tower}"]
    words = [word.replace("FOLDER", str(folder)) for word in words]
    assert main(["plan", *words, "gpu=cpu", "gpus=2", "--no-search"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    found = re.search(r"start of the pipeline needs ([\d.]+) MiB .* its end ([\d.]+) MiB", output)
    first, last = map(float, found.groups())
    assert first > last + 8, "the first stage has the tower"


def test_features_must_be_added_within_the_first_stage(folder):
    words = [*DEEP, STAGES, "strategy.pipeline_blocks=[1, 7]"]
    run = train(folder, "refused", *words, expected=2)
    error = status(run)["error"]
    assert "features of images behind its first 2 blocks, of which the first stage has 1" in error


@pytest.mark.long
def test_a_killed_run_resumes(folder, whole):
    """With the same bits on two ranks, and with the same losses on one and on four."""
    run = train(folder, "killed", expected=-9, KILL="1,6")
    assert len(losses(run)) == 2
    copies = {ranks: shutil.copytree(run, folder / f"runs/on_{ranks}") for ranks in (1, 4)}
    train(folder, "killed")
    assert losses(run) == losses(whole)
    mine, expected = weights(run), weights(whole)
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[name], expected[name]) for name in expected)
    for ranks, copy in copies.items():
        train(folder, copy.name, ranks=ranks)
        assert losses(copy) == pytest.approx(losses(whole), abs=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("words", [["strategy.kind=ddp"], [], NF4], ids=["ddp", "fsdp", "nf4"])
def test_adapters_and_the_projector(folder, words, capsys):
    run = train(folder, "lora", *LORA, *words, "optimizer.learning_rate=0.02")
    assert losses(run)[-1] < losses(run)[0] - 0.1
    saved = load_file(run / "hf/adapter_model.safetensors")
    before = load_file(folder / ("wide" if words is NF4 else "model") / "model.safetensors")
    merger = [name for name in saved if "merger" in name]
    assert len(merger) == 5
    for name in merger:
        own = before[name.removeprefix("base_model.model.").replace("model.visual", "visual")]
        assert not torch.equal(saved[name], own)
    out = str(folder / "runs/lora_out")
    for merged in ((), ("--merged",)):
        assert main(["export", str(run), f"out={out}", "--verify", *merged]) == 0, (
            capsys.readouterr()
        )
        shutil.rmtree(out)
    shutil.rmtree(run)


@pytest.mark.long
def test_adapters_and_a_projector_resume(folder, capsys):
    """With the same bits in the adapter's files, whose export has the weights of the last checkpoint."""
    words = [*LORA, "optimizer.learning_rate=0.02"]
    expected = train(folder, "lora_whole", *words)
    run = train(folder, "lora_killed", *words, expected=-9, KILL="1,6")
    assert len(losses(run)) == 2
    train(folder, "lora_killed", *words)
    assert losses(run) == losses(expected)
    mine, other = (load_file(one / "hf/adapter_model.safetensors") for one in (run, expected))
    assert sum("merger" in name for name in mine) == 5
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)
    for number, merged in enumerate(((), ("--merged",))):
        out = str(folder / f"runs/lora_resumed_{number}")
        assert main(["export", str(run), f"out={out}", "--verify", *merged]) == 0, (
            capsys.readouterr()
        )


def test_the_losses_of_rows(folder, whole, capsys):
    """With a learning rate of almost 0, their mean over tokens is the loss in training."""
    run = train(folder, "still", "optimizer.learning_rate=1e-12", "checkpoint.export=null")
    capsys.readouterr()
    assert main(["rows", str(run), "step=2", "--loss"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"the step's loss in training was {losses(run)[1]:.4f}" in lines[1]
    found = [line.split()[1] for line in lines if "train.jsonl:" in line]
    assert len(found) > 4
    assert any("<image>What is it?" in line for line in lines)
    answers = {n: len(f"Number {n}, with {n % 3}.") + 1 for n in range(12)}
    numbers = [
        int(line.split("train.jsonl:")[1].split()[0]) - 1
        for line in lines
        if "train.jsonl:" in line
    ]
    tokens = [answers[number] for number in numbers]
    mean = sum(float(loss) * count for loss, count in zip(found, tokens, strict=True))
    assert mean / sum(tokens) == pytest.approx(losses(run)[1], abs=2e-4)


def test_other_commands_on_such_a_run(folder, whole, tmp_path, capsys):
    recipe = f"recipe={folder}/recipe.yaml"
    assert main(["prepare", recipe, f"data.cache={tmp_path}/cache"]) == 0
    assert main(["plan", recipe, "gpu=h100"]) == 0
    assert "images on 1 node x 1 H100" in capsys.readouterr().out
    assert main(["report", str(whole), f"out={tmp_path}/report.html"]) == 0
    assert main(["status", str(whole)]) == 0


def test_rows_with_faults_are_skipped(folder):
    """data.on_error: skip: the rows of images that are missing or damaged, by name."""
    lines = read_lines(folder / "train.jsonl")
    (folder / "damaged.png").write_bytes((folder / "1_0.png").read_bytes()[:200])
    lines[1]["images"], lines[4]["images"] = ["damaged.png"], ["none.png"]
    write_lines(folder / "faults.jsonl", lines)
    words = [
        "data.train=[FOLDER/faults.jsonl]",
        "checkpoint.export=null",
        "data.repeat_in_step=true",
    ]
    run = train(folder, "faults", *words, "data.on_error=skip")
    skipped = read_lines(run / "skipped_rows.jsonl")
    assert [row["where"].rpartition(":")[2] for row in skipped] == ["2", "5"]
    assert "damaged.png: cannot be decoded" in skipped[0]["problem"]
    assert "none.png: no such file" in skipped[1]["problem"]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_that_changes_during_training_ends_the_run(folder, tmp_path, workers):
    """Without an answer from the ranks that have read other images, and with a line that names it."""
    lines = read_lines(folder / "train.jsonl")
    for line in lines:
        line["images"] = [str(folder / name) for name in line.get("images", ())]
    make_image(tmp_path / "changing.png", seed=1)
    lines[4]["images"] = [str(tmp_path / "changing.png")]
    write_lines(tmp_path / "train.jsonl", lines)
    words = [f"data.train=[{tmp_path}/train.jsonl]", f"data.workers={workers}", "run.max_steps=1"]
    words += ["checkpoint.export=null", f"data.cache={tmp_path}/cache", "checkpoint.every_steps=1"]
    train(folder, f"changing{workers}", *words)
    make_image(tmp_path / "changing.png", seed=2)
    run = folder / f"runs/changing{workers}"
    train(folder, run.name, *words, "run.max_steps=9", expected=2)
    stopped = json.loads((run / "status.json").read_text())
    assert "changing.png: has changed since its row was tokenized" in json.dumps(stopped)


@pytest.mark.parametrize(
    "workers", [0, pytest.param(1, marks=pytest.mark.long)], ids="workers={}".format
)
def test_a_file_that_is_removed_during_training(folder, tmp_path, workers):
    """The rank that needs it ends the run and names it. When it is back, the run resumes with the same
    losses. Each step reads all images."""
    lines = read_lines(folder / "train.jsonl")
    for line in lines:
        line["images"] = [str(folder / name) for name in line.get("images", ())]
    picture = make_image(tmp_path / "removed.png", seed=1)
    content = picture.read_bytes()
    lines[4]["images"] = [str(picture)]
    write_lines(tmp_path / "train.jsonl", lines)
    words = [f"data.train=[{tmp_path}/train.jsonl]", f"data.workers={workers}", "run.max_steps=12"]
    words += ["checkpoint.export=null", f"data.cache={tmp_path}/cache"]
    expected = train(folder, f"undisturbed{workers}", *words)
    name = f"removed{workers}"
    run = train(folder, name, *words, expected=2, REMOVE=f"4,{picture}")
    status = json.loads((run / "status.json").read_text())
    reached = len(losses(run))
    assert 3 <= reached < 12
    assert status["reason"] == "recipe"
    assert status["error"].startswith(f"data: {picture}: no such file")
    picture.write_bytes(content)
    train(folder, name, *words)
    assert losses(run) == losses(expected)


@pytest.mark.long
def test_a_stream_trains_and_resumes(folder):
    """Exactly, after a kill; one rank has the losses of two."""
    words = ["data.streaming=true", "checkpoint.export=null"]
    run = train(folder, "stream", *words)
    killed = train(folder, "stream_killed", *words, expected=-9, KILL="1,6")
    train(folder, "stream_killed", *words)
    assert losses(killed) == losses(run)
    alone = train(folder, "stream_alone", *words, ranks=1)
    assert losses(alone) == pytest.approx(losses(run), abs=1e-5)
