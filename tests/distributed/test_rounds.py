"""Distillation in rounds: answers of the model, of a server and of files, and resumes."""

import json

import pytest

from tests import REPOSITORY
from tests.distributed.launching import forked
from tests.run_files import read_lines, status, write_lines

TRAIN = REPOSITORY / "launcher/train.py"
KILL_TRAIN = REPOSITORY / "tests/distributed/kill_train.py"
RECIPE = """
run: {name: rounds, epochs: 1, seed: 7}
model: {path: base}
data: {kind: chat, train: [train.jsonl], validation: [far.jsonl], tokenizer: bytes, sequence_length: 48,
  packing: false, workers: 0, cache: cache}
batch: {global_batch_size: 8, micro_batch_size: 2}
strategy: {kind: fsdp, mixed_precision: null}
optimizer: {learning_rate: 2.0e-2, ema: 0.9}
schedule: {warmup_steps: 2}
evaluation: {every_steps: 3}
checkpoint: {every_steps: 2, keep_last: 10}
distillation: {teacher: teacher, top_k: 8, weight: 0.9, rounds: 3, answers: student, max_new_tokens: 6}
"""
COMPARED = ("step", "loss", "cross_entropy", "kl", "grad_norm", "eval_loss", "loss_tokens", "lr")


def sum_of(first, second):
    turns = [("user", f"{first} + {second}"), ("assistant", str(first + second))]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


def train(folder, name, *overrides, ranks=2, status=0, script=TRAIN, **variables):
    words = ["recipe=rounds.yaml", f"run.dir=runs/{name}", *overrides]
    return forked(script, *words, ranks=ranks, cwd=folder, **variables).check(status).output


def lines(folder, name):
    """The losses; of a repeated step the last ones."""
    found = {}
    for line in read_lines(folder / "runs" / name / "metrics.jsonl"):
        kept = {key: value for key, value in line.items() if key in COMPARED}
        found[line["step"], "loss" in line] = kept
    return found


def assert_close(some, others):
    assert some.keys() == others.keys()
    for at, line in some.items():
        assert line == pytest.approx(others[at], rel=1e-5, abs=1e-6), at


def rounds_of(folder, name):
    return [
        (folder / f"runs/{name}/rounds/round_{number:04}.jsonl").read_text() for number in (1, 2, 3)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of three rounds on two ranks."""
    import torch
    import transformers

    folder = tmp_path_factory.mktemp("rounds")
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"vocab_size": 260, "bos_token_id": None, "eos_token_id": 256}
    for name, layers in (("base", 2), ("teacher", 1)):
        config = transformers.LlamaConfig(**sizes, **heads, **tokens, num_hidden_layers=layers)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    write_lines(folder / "train.jsonl", [sum_of(a, b) for a in range(9) for b in range(7)])
    write_lines(folder / "far.jsonl", [sum_of(9, second) for second in range(3)])
    (folder / "rounds.yaml").write_text(RECIPE)
    train(folder, "whole")
    return folder


@pytest.mark.long
def test_the_model_answers_before_each_round(folder):
    """63 rows in 8 steps of 8, in rounds of 2, 3 and 3 steps."""
    rows = [[json.loads(line) for line in text.splitlines()] for text in rounds_of(folder, "whole")]
    assert [len(each) for each in rows] == [16, 24, 23]
    assert [row["sample"] for each in rows for row in each] == list(range(63))
    for row in (row for each in rows for row in each):
        answer = [label for label in row["labels"] if label != -100]
        assert 1 <= len(answer) <= 6
        assert row["input_ids"][-len(answer) :] == answer
    trained = [line for line in lines(folder, "whole").values() if "loss" in line]
    assert [line["step"] for line in trained] == list(range(1, 9))
    assert trained[0]["loss"] == pytest.approx(
        0.1 * trained[0]["cross_entropy"] + 0.9 * trained[0]["kl"]
    )
    # Each target is a token of an answer
    counts = [sum(label != -100 for row in each for label in row["labels"]) for each in rows]
    steps = [line["loss_tokens"] for line in trained]
    assert [sum(steps[:2]), sum(steps[2:5]), sum(steps[5:])] == counts
    files = {path.name for path in (folder / "runs/whole/rounds").glob("*_top_k.npy")}
    assert files == {"round_0003_top_k.npy"}
    assert "_top_k" not in str(list((folder / "runs/whole").glob("*.npy")))


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "number", "saved"),
    [
        ("answers,3,9", 0, "round 1 of 3: answers to 16 prompts; those of the first 8 are there"),
        ("answers,7,9", 2, "round 2 of 3: answers to 24 prompts; those of the first 8 are there"),
        ("answers,7,15", 2, "round 2 of 3: answers to 24 prompts; those of the first 8 are there"),
        ("teacher,6,9", 2, "from an earlier start"),
        ("loss,8,9", 2, None),
        ("loss,13,9", 5, None),
    ],
)
def test_an_interrupted_run_trains_the_same(folder, at, number, saved):
    """Killed or stopped (15) in the answers of the first and the second round, in the teacher's pass
    of the second, in its first step, and in the middle of the third round."""
    name = at.replace(",", "_")
    stopped = at.endswith("15")
    output = train(folder, name, status=75 if stopped else -9, script=KILL_TRAIN, END_AT=at)
    if stopped:
        what = f"the next start continues with what has been computed in runs/{name}/rounds"
        assert f"stopped by SIGTERM after step 2: {what}" in output
        assert status(folder / "runs" / name)["state"] == "stopped"
    kept = sorted(path.name for path in (folder / f"runs/{name}/checkpoints").glob("step_*"))
    assert kept[-1:] >= ([f"step_{number:08}"] if number else [])
    output = train(folder, name)
    assert saved is None or saved in output
    assert rounds_of(folder, name) == rounds_of(folder, "whole")
    assert lines(folder, name) == lines(folder, "whole")
