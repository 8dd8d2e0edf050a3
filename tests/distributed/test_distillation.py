"""Distillation: strategies, the predictions of a teacher in the run folder, and resumes."""

import json
import math
import shutil
import signal
import sys

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests import REPOSITORY
from tests.distributed.launching import run, torchrun, wait_until
from tests.run_files import read_lines, status, write_lines
from tests.unit.objectives.test_masked_lm import save_tokenizer

KILL_TRAIN = REPOSITORY / "tests/distributed/kill_train.py"
TRAIN = REPOSITORY / "launcher/train.py"
RECIPE = """
run: {name: taught, max_steps: 6, seed: 7}
model: {config: {model_type: llama, vocab_size: 257, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 256}}
data: {kind: text, train: [texts.jsonl], validation: [far.jsonl], tokenizer: bytes, sequence_length: 48,
  workers: 0, cache: cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-3}
schedule: {warmup_steps: 2, kind: constant}
evaluation: {every_steps: 3}
checkpoint: {every_steps: 3}
"""
TEACHER = "distillation={teacher: runs/teacher/hf, top_k: 8, temperature: 2.0}"
COMPARED = ("loss", "cross_entropy", "kl", "grad_norm", "eval_loss")


def text(number):
    return {
        "text": f"def f{number}(x):\n"
        + "    x += 1\n" * (number % 7)
        + f"    return x + {number}\n"
    }


def train(folder, name, *overrides, ranks, status=0):
    words = ["recipe=taught.yaml", f"run.dir=runs/{name}", *overrides]
    if ranks == 1:
        return run([sys.executable, TRAIN, *words], cwd=folder).check(status).output
    return torchrun(TRAIN, *words, ranks=ranks, cwd=folder).check(status).output


def lines(folder, name):
    kept = ("step", "loss_tokens", *COMPARED)
    return [
        {key: value for key, value in line.items() if key in kept}
        for line in read_lines(folder / "runs" / name / "metrics.jsonl")
    ]


def assert_close(some, others):
    assert [line["step"] for line in some] == [line["step"] for line in others]
    for one, other in zip(some, others, strict=True):
        assert one.keys() == other.keys()
        for key in one.keys() & set(COMPARED):
            assert one[key] == pytest.approx(other[key], rel=1e-6, abs=1e-6), (one["step"], key)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A teacher of another size; a run on two ranks with FSDP, stopped after step 3, and one with
    DDP to the end."""
    folder = tmp_path_factory.mktemp("taught")
    write_lines(folder / "texts.jsonl", [text(number) for number in range(80)])
    write_lines(folder / "far.jsonl", [text(number) for number in range(80, 90)])
    (folder / "taught.yaml").write_text(RECIPE)
    words = ("model.config.num_hidden_layers=1", "model.config.hidden_size=64", "run.max_steps=20")
    words += ("checkpoint.export=at_end", "optimizer.learning_rate=1.0e-2", "strategy.kind=ddp")
    train(folder, "teacher", *words, ranks=1)
    train(folder, "two", TEACHER, "run.max_steps=3", ranks=2)
    train(folder, "one", TEACHER, "strategy.kind=ddp", "batch.micro_batch_size=4", ranks=1)
    return folder


@pytest.mark.long
def test_losses_do_not_depend_on_the_strategy(folder):
    """And the loss is what the metrics and the recipe say."""
    whole = lines(folder, "one")
    assert_close(lines(folder, "two"), [line for line in whole if line["step"] <= 3])
    trained = [line for line in whole if "loss" in line]
    for line in trained:
        assert line["loss"] == pytest.approx(0.5 * line["cross_entropy"] + 0.5 * 4 * line["kl"])
    assert 0 < trained[-1]["kl"] < trained[0]["kl"]
    stored = {name: np.load(folder / f"runs/{name}/teacher_top_k.npy") for name in ("one", "two")}
    assert np.array_equal(stored["one"]["id"], stored["two"]["id"])
    assert (stored["one"]["id"][:, 0] < 257).all()
    one, two = (stored[name]["log_probability"] for name in ("one", "two"))
    np.testing.assert_allclose(one, two, rtol=0, atol=1e-5)
    about = json.loads((folder / "runs/one/teacher_top_k.json").read_text())
    assert about["rows"] == len(stored["one"])
    assert about["top_k"] == 8


@pytest.mark.long
def test_a_resume_reads_the_predictions(folder):
    """On another number of ranks, with another strategy. A damaged file is computed again, and the
    losses are other ones if the file is."""
    path = folder / "runs/two"
    shutil.copytree(path, folder / "runs/damaged")
    output = train(folder, "two", TEACHER, "strategy.kind=ddp", "run.max_steps=6", ranks=1)
    assert "teacher:" not in output
    assert_close(lines(folder, "two"), lines(folder, "one"))
    file = folder / "runs/damaged/teacher_top_k.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    output = train(folder, "damaged", TEACHER, "strategy.kind=ddp", "run.max_steps=6", ranks=1)
    assert (
        "is damaged (its checksum differs): the teacher's predictions are computed again" in output
    )
    assert_close(lines(folder, "damaged"), lines(folder, "one"))


@pytest.mark.long
def test_a_resume_gives_the_same_bits(folder):
    """Of adapters, with packed documents and weights in bfloat16."""
    words = (TEACHER, "lora.rank=4", "data.packing=true", "strategy.mixed_precision={}")
    train(folder, "whole", *words, ranks=2)
    train(folder, "parts", *words, "run.max_steps=3", ranks=2)
    train(folder, "parts", *words, "run.max_steps=6", ranks=2)
    assert lines(folder, "parts") == lines(folder, "whole")
    assert all(math.isfinite(line["kl"]) for line in lines(folder, "parts") if "kl" in line)


@pytest.mark.long
def test_a_teacher_that_predicts_no_numbers_ends_the_run(folder):
    teacher = folder / "runs/broken/hf"
    shutil.copytree(folder / "runs/teacher/hf", teacher)
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, teacher / "model.safetensors", {"format": "pt"})
    output = train(
        folder, "unsound", TEACHER.replace("runs/teacher", "runs/broken"), ranks=2, status=1
    )
    assert "distillation.teacher: its predictions are not finite: check its weights" in output
    assert status(folder / "runs/unsound")["reason"] == "not_finite"


@pytest.mark.long
@pytest.mark.parametrize(
    ("number", "code", "state"),
    [
        (signal.SIGTERM, 75, "stopped"),
        (signal.SIGINT, 75, "stopped"),
        (signal.SIGKILL, -9, None),
    ],
)
def test_an_interrupted_pass_goes_on(folder, number, code, state):
    """With the same rows as a pass that was not interrupted, and on two ranks."""
    name, reached = f"signal_{number}", folder / f"reached_{number}"
    words = ["recipe=taught.yaml", f"run.dir=runs/{name}", TEACHER, "strategy.kind=ddp"]
    words += ["batch.micro_batch_size=4", "run.max_steps=3"]

    def during(process):
        assert wait_until(reached.exists, process=process), "the pass was not reached"
        process.send_signal(number)

    command = [sys.executable, KILL_TRAIN, *words]
    run(command, cwd=folder, during=during, SLOW_PASS=f"{reached}:3").check(code)
    assert state is None or status(folder / "runs" / name)["state"] == state
    about = json.loads((folder / f"runs/{name}/teacher_top_k.json").read_text())
    assert 0 < about["written"] < about["rows"]
    shutil.copytree(folder / "runs" / name, folder / f"runs/{name}-two")
    output = run([sys.executable, TRAIN, *words], cwd=folder).check().output
    assert f"teacher: those of the first {about['written']:,} tokens are there" in output
    for file in ("teacher_top_k.npy", "teacher_top_k.json"):
        same = (folder / "runs" / name / file).read_bytes()
        assert same == (folder / "runs/one" / file).read_bytes()
    if number == signal.SIGKILL:
        output = train(folder, f"{name}-two", TEACHER, "run.max_steps=3", ranks=2)
        assert "tokens are there, from an earlier start" in output
        whole = [line for line in lines(folder, "one") if line["step"] <= 3]
        assert_close(lines(folder, f"{name}-two"), whole)


@pytest.mark.long
def test_other_teachers_are_refused(folder):
    """Of another vocabulary; and a change of the teacher's section on a resume."""
    words = ("strategy.kind=ddp", "run.max_steps=3")
    small = TEACHER.replace("top_k: 8", "top_k: 258")
    output = train(folder, "refused", small, *words, ranks=1, status=2)
    assert "distillation.top_k: 258 is more than the vocabulary of 257" in output
    config = json.loads((folder / "runs/teacher/hf/config.json").read_text())
    other = folder / "runs/other"
    shutil.copytree(folder / "runs/teacher/hf", other)
    (other / "config.json").write_text(json.dumps(config | {"model_type": "x"}))
    output = train(
        folder, "refused", TEACHER.replace("teacher/hf", "other"), *words, ranks=1, status=2
    )
    assert "distillation.teacher: " in output
    save_tokenizer(other)
    (other / "config.json").write_text(json.dumps(config))
    output = train(
        folder, "refused", TEACHER.replace("teacher/hf", "other"), *words, ranks=1, status=2
    )
    assert (
        "distillation.teacher: its tokenizer has other tokens than that of the run, bytes" in output
    )
    hotter = TEACHER.replace("2.0", "3.0")
    output = train(folder, "one", hotter, "strategy.kind=ddp", ranks=1, status=2)
    assert "distillation.temperature" in output
