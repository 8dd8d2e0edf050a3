"""Rounds of distillation: their steps, prompts, draws, answers in files and those of a server."""

import itertools
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.data.batching import NO_SAMPLE, Position, SampleOrder
from launcher.data.rounds import round_at, round_bounds
from launcher.errors import RecipeError, TrainingError
from launcher.training import endpoint, rounds
from launcher.training.endpoint import Answer, Endpoint, Question

few = settings(max_examples=100, deadline=None, derandomize=True)


@few
@given(steps=st.integers(1, 60), count=st.integers(1, 60))
def test_rounds_divide_the_steps(steps, count):
    if count > steps:
        with pytest.raises(RecipeError, match=f"{count} is more than the {steps} steps"):
            round_bounds(steps, count)
        return
    bounds = round_bounds(steps, count)
    sizes = np.diff(bounds)
    assert (bounds[0], bounds[-1], len(sizes)) == (0, steps, count)
    assert sizes.max() - sizes.min() <= 1


@few
@given(samples=st.integers(1, 40), epochs=st.integers(1, 3), size=st.integers(1, 7), data=st.data())
def test_a_round_has_its_samples_wherever_the_run_is_in_it(samples, epochs, size, data):
    """All rounds together have those of the run, in its order."""
    steps = -(-samples * epochs // size)
    count = data.draw(st.integers(1, steps))
    order = SampleOrder(samples=samples, seed=3, shuffle=True, epochs=epochs)
    found = []
    for step in range(steps):
        start = Position(step, step * size)
        run = SimpleNamespace(
            steps=steps, order=order, start=start, sampler=SimpleNamespace(global_batch_size=size)
        )
        part = round_at(run, step, rounds=count)
        assert part.first_step <= step < part.end_step
        assert part.first_sample == part.first_step * size
        if step == part.first_step:
            assert part.number == len(found) + 1
            found.append(part.samples.tolist())
        assert part.samples.tolist() == found[-1]
    whole = [order.sample(position) for position in range(steps * size)]
    assert list(itertools.chain(*found)) == [each for each in whole if each != NO_SAMPLE]


def test_tokens_are_drawn_by_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0, 9.0]]).expand(4000, 5)
    draws = torch.from_numpy(np.random.default_rng(1).random((4000, 1)))
    choose = rounds._Choose(draws, temperature=2.0, vocabulary=4)  # the last entry is spare
    shares = torch.bincount(choose(logits, 0), minlength=5) / 4000
    wanted = (logits[0, :4] / 2).softmax(0)
    assert shares[2] == shares[4] == 0
    torch.testing.assert_close(shares[:4], wanted, atol=0.03, rtol=0)
    choose = rounds._Choose(draws, temperature=0.0, vocabulary=4)
    assert set(choose(logits, 0).tolist()) == {3}
    edge = torch.tensor([[0.0], [1 - 2**-53]], dtype=torch.float64)
    last = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]]).expand(2, 4)
    found = rounds._Choose(edge, temperature=1.0, vocabulary=4)(last, 0)
    assert found.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("7", "row"),
        ("{", "row"),
        ('{"sample": 5}', "row"),
        ('{"sample": "5", "answer": "a"}', "types"),
        ('{"sample": 4, "answer": "a"}', "twice"),
        ('{"sample": 6, "answer": "a"}', "unknown"),
        ("", "missing"),
    ],
)
def test_answers_in_a_file(tmp_path, words, line, rule):
    file = tmp_path / "round_0001.jsonl"
    file.write_text('{"sample": 4, "answer": "one\u2028line"}\n' + line + "\n", encoding="utf-8")
    with words.refused(rule):
        rounds.read_answers(file, range(4, 6), prompts="p")
    if not line:
        assert rounds.read_answers(file, range(4, 5), prompts="p") == ["one\u2028line"]


class Server(ThreadingHTTPServer):
    """A server with the replies of a test."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.replies: list[tuple[int | None, bytes, dict[str, str]]] = []
        self.requests, self.lock = 0, threading.Lock()
        self.waits: list[float] = []


class Replies(BaseHTTPRequestHandler):
    """Replies with the `replies` of the server, in turn, and the last one again and again."""

    server: Server

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        with self.server.lock:
            replies, self.server.requests = self.server.replies, self.server.requests + 1
            code, content, headers = replies.pop(0) if len(replies) > 1 else replies[0]
        if code is None:  # the connection is closed
            return
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(endpoint, "time", SimpleNamespace(sleep=waits.append))
    with Server(("127.0.0.1", 0), Replies) as server:
        server.waits = waits
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def answer(text, reason="stop"):
    return 200, json.dumps({"choices": [{"text": text, "finish_reason": reason}]}).encode(), {}


def client(server, **options):
    url = f"http://127.0.0.1:{server.server_port}/v1/"
    return Endpoint(url, **{"model": "m", "temperature": 1.0, "environment": {}, **options})


QUESTION = Question(17, [1, 2, 3], 5, 9)


def test_a_busy_server_is_asked_again(server):
    """Also one that closes the connection. After each attempt the wait is twice as long."""
    server.replies = [(500, b"", {}), (429, b"", {}), (None, b"", {}), answer("a", "length")]
    assert client(server).answers([QUESTION]) == [Answer("a", False)]
    assert server.waits == [1.0, 2.0, 4.0]


@pytest.mark.parametrize(
    ("reply", "problem", "requests"),
    [
        ((503, b"down", {}), "did not come in 6 attempts: status 503: down; start the server", 6),
        ((401, b"no", {}), "status 401: no; set OPENAI_API_KEY in the environment", 1),
        ((400, b"too long", {}), "the answer to sample 17: status 400: too long", 1),
        ((200, b"<html>", {}), "the answer to sample 17 is no JSON: <html>", 1),
        ((200, b"[]", {}), "the answer to sample 17 has no choices[0].text: []", 1),
        ((200, b'{"choices": []}', {}), "the answer to sample 17 has no choices[0].text", 1),
        ((302, b"", {"Location": "http://127.0.0.1:9/"}), "to sample 17: status 302", 1),
    ],
)
def test_what_a_server_does_wrong(server, reply, problem, requests):
    server.replies = [reply]
    with pytest.raises(TrainingError) as error:
        client(server).answers([QUESTION])
    assert str(error.value).startswith("distillation.endpoint: http://127.0.0.1:")
    assert problem in str(error.value)
    assert error.value.reason == "endpoint"
    assert server.requests == requests


def test_a_server_that_is_not_there(server):
    found = client(server)
    server.server_close()
    with pytest.raises(TrainingError, match=r"did not come in 6 attempts: .*start the server"):
        found.answers([QUESTION])


def test_no_message_has_the_key(server):
    """Not if the server sends it back, nor if it cannot be sent."""
    server.replies = [(400, b"wrong key: secret-key", {})]
    found = client(server, environment={"OPENAI_API_KEY": "secret-key"})
    with pytest.raises(TrainingError, match=r"wrong key: \*\*\*"):
        found.answers([QUESTION])
    assert "secret-key" not in repr(found)
    found = client(server, environment={"OPENAI_API_KEY": "secret\nkey"})
    with pytest.raises(TrainingError) as error:
        found.answers([QUESTION])
    assert "secret" not in str(error.value)


def test_the_first_model_of_the_server(server):
    server.replies = [(200, b'{"data": [{"id": "first"}]}', {}), answer("a")]
    found = client(server, model=None)
    assert found.answers([QUESTION]) == [Answer("a", True)]
    assert found.model == "first"
    server.replies = [(200, b'{"data": []}', {})]
    with pytest.raises(TrainingError, match=r"give distillation\.endpoint_model"):
        client(server, model=None).answers([QUESTION])
