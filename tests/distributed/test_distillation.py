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


STAGES = "strategy.pipeline_parallel_size=2"
DEEP = "model.config.num_hidden_layers=4"


@pytest.fixture(scope="module")
def deep(folder):
    """A run on one rank of a model of four blocks, with a teacher of five. Returns the overrides."""
    words = ("model.config.num_hidden_layers=5", "run.max_steps=10", "checkpoint.export=at_end")
    train(folder, "deep_teacher", *words, "optimizer.learning_rate=1.0e-2", ranks=1)
    words = (TEACHER.replace("runs/teacher", "runs/deep_teacher"), DEEP)
    train(folder, "deep", *words, ranks=1)
    return words


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ["strategy.pipeline_blocks=[1, 3]"]),
        (2, ["strategy.pipeline_schedule=interleaved_1f1b"]),
        (4, []),
    ],
)
def test_model_and_teacher_are_divided_into_stages(folder, deep, ranks, words):
    name = f"stages_{ranks}_{len(words and words[0])}"
    train(folder, name, *deep, STAGES, *words, ranks=ranks)
    for line, expected in zip(lines(folder, name), lines(folder, "deep"), strict=True):
        assert line == pytest.approx(expected, rel=2e-6)


def test_a_teacher_with_fewer_blocks_than_stages_is_named(folder):
    output = train(folder, "few", TEACHER, DEEP, STAGES, ranks=2, status=1)
    says = "distillation.teacher: strategy.pipeline_parallel_size: 2 stages, but the model has 1 blocks"
    assert says in output


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
    assert "distillation.teacher: its tokens cannot be compared with those of the run: " in output
    assert "it is not known how its tokens are written as text" in output
    hotter = TEACHER.replace("2.0", "3.0")
    output = train(folder, "one", hotter, "strategy.kind=ddp", ranks=1, status=2)
    assert "distillation.temperature" in output


WORDS = """
run: {name: taught, max_steps: 6, seed: 7}
model: {config: {model_type: llama, vocab_size: 300, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
  num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 256}}
data: {kind: chat, train: [chats.jsonl], tokenizer: words, sequence_length: 96, workers: 0, cache: cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 1.0e-3}
schedule: {warmup_steps: 2, kind: constant}
checkpoint: {every_steps: 3}
"""
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}"
    "{{ m.content }}<|end|>{% endgeneration %}\n{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
)


def chat(number):
    """Every third row has another teacher."""
    answer = f"def f{number}(x):\n    return x + {number}\n\n# \u00e9t\u00e9 {number * 7}"
    messages = [("user", f"Add {number}, please."), ("assistant", answer)]
    more = [("user", "Again"), ("assistant", f"x + {number}")] * (number % 2)
    said = [{"role": role, "content": content} for role, content in [*messages, *more]]
    return {"messages": said, "by": "first" if number % 3 else "second"}


def save_words(folder, rows):
    """A byte-level tokenizer of 300 tokens, with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    level = pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = level(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=special, initial_alphabet=level.alphabet()
    )
    texts = [message["content"] for row in rows for message in row["messages"]]
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=special[0], additional_special_tokens=special[1:]
    )
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A model with a tokenizer of its own, and two teachers: one with its tokens, and one of bytes."""
    folder = tmp_path_factory.mktemp("words")
    rows = [chat(number) for number in range(60)]
    write_lines(folder / "chats.jsonl", rows)
    save_words(folder / "words", rows)
    (folder / "taught.yaml").write_text(WORDS)
    steps = ("checkpoint.export=at_end", "strategy.kind=ddp", "run.max_steps=10")
    train(folder, "same", *steps, "optimizer.learning_rate=1.0e-2", ranks=1)
    of_bytes = ("data.tokenizer=bytes", "model.config.vocab_size=264", "data.sequence_length=192")
    train(folder, "bytes", *steps, *of_bytes, "optimizer.learning_rate=1.0e-2", ranks=1)
    return folder


OTHER = "distillation={teacher: runs/bytes/hf, top_k: 8, temperature: 2.0}"
BOTH = (
    "distillation={teachers: {first: runs/same/hf, second: runs/bytes/hf}, teacher_column: by, "
    "top_k: 8, temperature: 2.0}"
)


@pytest.mark.long
@pytest.mark.parametrize("teachers", [OTHER, BOTH], ids=["other", "both"])
def test_teachers_with_other_tokens(words, teachers):
    """The same losses on two ranks with FSDP and on one, packed or not, and resumed."""
    name = "both" if "teachers:" in teachers else "other"
    longer = "data.sequence_length=192"  # of which the teacher of bytes needs more than the model
    output = train(words, f"{name}-one", teachers, longer, "strategy.kind=ddp", ranks=1)
    assert "other tokens, of which " in output
    assert "100.0% of the targets have a prediction" in output
    train(words, f"{name}-two", teachers, longer, "run.max_steps=3", ranks=2)
    output = train(words, f"{name}-two", teachers, longer, "run.max_steps=6", ranks=2)
    assert "done in" not in output
    assert_close(lines(words, f"{name}-two"), lines(words, f"{name}-one"))
    whole = [line for line in lines(words, f"{name}-one") if "loss" in line]
    for line in whole:
        assert line["loss"] == pytest.approx(0.5 * line["cross_entropy"] + 0.5 * 4 * line["kl"])
    assert 0 < whole[-1]["kl"] < whole[0]["kl"]
    separate = (longer, "data.packing=false", "batch.micro_batch_size=1", "strategy.kind=ddp")
    train(words, f"{name}-wide", teachers, *separate, "run.max_steps=2", ranks=1)
    separate = (longer, "data.packing=false", "batch.micro_batch_size=4")
    train(words, f"{name}-narrow", teachers, *separate, "run.max_steps=2", ranks=2)
    assert_close(lines(words, f"{name}-narrow"), lines(words, f"{name}-wide"))


@pytest.mark.long
def test_each_row_has_its_teacher(words):
    """Teachers with the same tokens, by a column and by the sources of a mixture: the losses of one
    teacher where all of them are the same one."""
    ddp, one = "strategy.kind=ddp", "distillation={teacher: runs/same/hf, top_k: 8}"
    separate = (ddp, "data.packing=false")
    train(words, "alone", one, *separate, ranks=1)
    teachers = "distillation={teachers: {first: runs/same/hf, second: runs/same/hf}, top_k: 8}"
    column = "distillation.teacher_column=by"
    output = train(words, "column", teachers, column, *separate, ranks=2)
    assert "teacher second: the predictions of " in output
    assert_close(lines(words, "column"), lines(words, "alone"))
    mixture = "data.train={first: {files: [chats.jsonl]}, second: {files: [chats.jsonl]}}"
    train(words, "mixture", teachers, mixture, *separate, ranks=1)
    train(words, "mixture-alone", one, mixture, *separate, ranks=1)
    assert_close(lines(words, "mixture"), lines(words, "mixture-alone"))
    unknown = teachers.replace("second", "third")
    output = train(words, "unknown", unknown, column, *separate, ranks=1, status=2)
    assert (
        "chats.jsonl:1: column 'by' must name one of distillation.teachers (first, third)" in output
    )
    output = train(words, "missing", teachers, *separate, ranks=1, status=2)
    assert "distillation.teachers: needs distillation.teacher_column" in output
