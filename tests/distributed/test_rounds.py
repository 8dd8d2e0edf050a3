"""Distillation in rounds: answers of the model, of a server and of files, and resumes."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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
END = 256
"""The token that ends a turn."""
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
    for name, layers in (("start", 2), ("teacher", 1)):
        config = transformers.LlamaConfig(**sizes, **heads, **tokens, num_hidden_layers=layers)
        transformers.LlamaForCausalLM(config).save_pretrained(folder / name)
    write_lines(folder / "train.jsonl", [sum_of(a, b) for a in range(9) for b in range(7)])
    write_lines(folder / "far.jsonl", [sum_of(9, second) for second in range(3)])
    (folder / "rounds.yaml").write_text(RECIPE)
    words = ("distillation=null", "model.path=start", "run.epochs=3", "checkpoint.export=at_end")
    train(folder, "base", *words, ranks=1)
    (folder / "runs/base/hf").rename(folder / "base")
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
        assert END not in answer[:-1]
        assert len(answer) == 6 or answer[-1] == END
    ended = [row["input_ids"][-1] == END for each in rows for row in each]
    assert any(ended)
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
def test_a_model_in_stages_answers_as_on_one_rank(folder):
    teacher = "distillation.teacher=start"
    train(folder, "alone", teacher, "batch.micro_batch_size=1", ranks=1)
    stages = "strategy.pipeline_parallel_size=2"
    train(folder, "stages", teacher, "batch.micro_batch_size=1", stages, ranks=2)
    assert rounds_of(folder, "stages") == rounds_of(folder, "alone")
    assert_close(lines(folder, "stages"), lines(folder, "alone"))


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


@pytest.mark.long
def test_dropout_draws_the_same_numbers(folder):
    """A teacher that is loaded between two steps draws none of them. With adapters."""
    words = ("lora={rank: 4, dropout: 0.2}", "strategy.kind=ddp")
    train(folder, "dropout", *words)
    train(folder, "resumed", *words, status=-9, script=KILL_TRAIN, END_AT="teacher,6,9")
    train(folder, "resumed", *words)
    assert rounds_of(folder, "resumed") == rounds_of(folder, "dropout")
    assert lines(folder, "resumed") == lines(folder, "dropout")


@pytest.mark.long
def test_each_prompt_has_its_teacher(folder):
    """Two names of one teacher train as the teacher; another teacher trains otherwise."""
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    by = [row | {"by": "even" if number % 2 == 0 else "odd"} for number, row in enumerate(rows)]
    write_lines(folder / "by.jsonl", by)
    words = ["data.train=[by.jsonl]", "distillation.teacher=null", "distillation.teacher_column=by"]
    train(folder, "by", *words, "distillation.teachers={odd: teacher, even: teacher}")
    assert_close(lines(folder, "by"), lines(folder, "whole"))
    assert [*(folder / "runs/by/rounds").glob("round_0003_odd_top_k.npy")]
    assert not [*(folder / "runs/by/rounds").glob("round_0002_*_top_k.npy")]
    made = [json.loads(line) for line in rounds_of(folder, "by")[0].splitlines()]
    assert {row["by"] for row in made} == {"even", "odd"}
    train(folder, "other", *words, "distillation.teachers={odd: start, even: teacher}")
    first, second = (lines(folder, name)[1, True] for name in ("by", "other"))
    assert first["cross_entropy"] == pytest.approx(second["cross_entropy"], rel=1e-5)
    assert abs(first["kl"] - second["kl"]) > 1e-3


@pytest.mark.long
def test_answers_do_not_depend_on_the_number_of_ranks(folder):
    """Those of the first round to the bit. A run that goes on with another number of ranks has the
    answers that are there, and trains to the same losses but for rounding."""
    train(folder, "alone", "strategy.kind=ddp", ranks=1)
    assert rounds_of(folder, "alone")[0] == rounds_of(folder, "whole")[0]
    train(folder, "fewer", status=-9, script=KILL_TRAIN, END_AT="answers,7,9")
    output = train(folder, "fewer", "strategy.kind=ddp", ranks=1)
    assert "round 2 of 3: answers to 24 prompts; those of the first 8 are there" in output
    both = lines(folder, "fewer"), lines(folder, "alone")
    assert_close(*({at: line for at, line in each.items() if at[0] <= 2} for each in both))
    assert (
        rounds_of(folder, "fewer")[1].splitlines()[:8]
        == (rounds_of(folder, "whole")[1].splitlines()[:8])
    )


@pytest.mark.long
def test_answers_in_files_train_as_those_in_the_rows(folder):
    """A run in rounds whose files have the answers of the rows trains as a run without rounds."""
    sums = {sum_of(a, b)["messages"][0]["content"]: str(a + b) for a in range(9) for b in range(7)}
    words = (
        "distillation.answers=folder",
        "distillation.folder=mine",
        "distillation.max_new_tokens=256",
    )
    (folder / "mine").mkdir()
    for number in (1, 2, 3):
        output = train(folder, "files", *words, status=1)
        file = folder / f"runs/files/rounds/round_{number:04}_prompts.jsonl"
        assert f"distillation.folder: there is no mine/round_{number:04}.jsonl" in output
        answers = []
        for line in read_lines(file):
            prompt = line["prompt"].split("<|user|>")[1].split("<|end|>")[0]
            answers.append({"sample": line["sample"], "answer": sums[prompt]})
        write_lines(folder / f"mine/round_{number:04}.jsonl", answers[::-1])
    train(folder, "files", *words)
    one = ("distillation.answers=data", "distillation.rounds=1", "distillation.max_new_tokens=256")
    train(folder, "data", *one)
    assert_close(lines(folder, "files"), lines(folder, "data"))


class Server:
    """A server with OpenAI's API that answers with the number of tokens of the prompt."""

    def __init__(self):
        self.requests, self.failures = [], 1
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.reply(200, {"data": [{"id": "the-model"}]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append((self.path, self.headers["Authorization"], body))
                if outer.failures:
                    outer.failures -= 1
                    self.reply(500, {"error": "busy"})
                    return
                text, reason = str(len(body["prompt"])), "stop"
                self.reply(200, {"choices": [{"text": text, "finish_reason": reason}]})

            def reply(self, code, content):
                data = json.dumps(content).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"

    def close(self):
        self.server.shutdown()
        self.server.server_close()


@pytest.mark.long
def test_a_server_answers(folder):
    """Each prompt is sent once, unless the server is busy. The key is written nowhere."""
    server = Server()
    try:
        words = ("distillation.answers=endpoint", f"distillation.endpoint={server.url}")
        output = train(folder, "server", *words, OPENAI_API_KEY="the-secret")
    finally:
        server.close()
    assert len(server.requests) == 64
    assert {path for path, _, _ in server.requests} == {"/v1/completions"}
    assert {key for _, key, _ in server.requests} == {"Bearer the-secret"}
    body = server.requests[0][2]
    assert (body["model"], body["max_tokens"], body["temperature"]) == ("the-model", 6, 1.0)
    assert len({body["seed"] for _, _, body in server.requests}) == 63
    for text in rounds_of(folder, "server"):
        for row in map(json.loads, text.splitlines()):
            prompt = row["labels"].count(-100)
            assert row["answer"] == str(prompt)
            assert row["input_ids"][prompt:] == [*map(ord, row["answer"]), END]
    written = [path for path in (folder / "runs/server").rglob("*") if path.is_file()]
    assert not any(b"the-secret" in path.read_bytes() for path in written)
    assert "the-secret" not in output
