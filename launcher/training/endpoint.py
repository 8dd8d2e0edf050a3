"""Answers of a server that speaks OpenAI's API, such as vLLM, for distillation in rounds.

The prompts are sent as token ids, so the server must have the tokenizer of the run. A key is read
from the environment variable OPENAI_API_KEY. It is in no message and no file.
"""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from launcher.console import advanced
from launcher.errors import TrainingError

KEY = "OPENAI_API_KEY"
"""The environment variable with the key of the server."""
TOGETHER = 16
"""Requests at the same time."""
_ATTEMPTS = 6
_FIRST_WAIT = 1.0
"""Seconds after the first attempt; twice as many after each further one."""
_TIMEOUT = 200.0
"""Seconds that an answer may take."""
_AGAIN = (408, 429)
"""Statuses, beside those from 500 on, after which a request is sent again."""
_SHOWN = 200
"""Characters of a server's message that are shown."""


class Question(NamedTuple):
    """A prompt for the server."""

    sample: int
    """Names the prompt in messages."""
    prompt: list[int]
    limit: int
    """Most tokens of the answer."""
    seed: int


class Answer(NamedTuple):
    """What the server answers."""

    text: str
    complete: bool
    """Whether the answer has ended before the limit."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would send the key to another place."""

    def redirect_request(self, *_: Any) -> None:
        """No request: the redirect is an error."""


@dataclass
class Endpoint:
    """A server at a URL (distillation.endpoint)."""

    url: str
    model: str | None
    """None: the first one that the server lists."""
    temperature: float
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ, repr=False)

    def answers(self, questions: Sequence[Question]) -> list[Answer]:
        """The answers, in the order of the questions. Raises TrainingError if the server cannot be
        reached, or answers something else."""
        if self.model is None:
            self.model = self._first_model()
        pool = ThreadPoolExecutor(TOGETHER, thread_name_prefix="endpoint")
        try:
            return list(pool.map(self._answer, questions))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _first_model(self) -> str:
        found = self._send("models", None, what="the list of models")
        try:
            return str(found["data"][0]["id"])
        except (LookupError, TypeError):
            what = "its list of models has none; give distillation.endpoint_model"
            raise self._refusal(what) from None

    def _answer(self, question: Question) -> Answer:
        body = {
            "model": self.model,
            "prompt": question.prompt,
            "max_tokens": question.limit,
            "temperature": self.temperature,
            "seed": question.seed % 2**31,
        }
        what = f"the answer to sample {question.sample}"
        found = self._send("completions", body, what=what)
        try:
            choice = found["choices"][0]
            text, reason = choice["text"], choice.get("finish_reason")
        except (LookupError, TypeError, AttributeError):
            text = reason = None
        if not isinstance(text, str):
            raise self._refusal(f"{what} has no choices[0].text: {self._shown(json.dumps(found))}")
        advanced()
        return Answer(text, reason == "stop")

    def _send(self, path: str, body: Mapping[str, Any] | None, *, what: str) -> Any:
        """The JSON that the server answers. what: names it in messages."""
        headers = {"Content-Type": "application/json"}
        if key := self.environment.get(KEY):
            if not (key.isascii() and key.isprintable()):  # its exception would show the key
                raise self._refusal(f"{KEY} has a line break, or other characters that no key has")
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url.rstrip('/')}/{path}", data, headers)
        opener, problem = urllib.request.build_opener(_NoRedirect), ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(_FIRST_WAIT * 2 ** (attempt - 1))
                advanced()
            try:
                with opener.open(request, timeout=_TIMEOUT) as response:
                    content = response.read()
            except urllib.error.HTTPError as error:
                with error:
                    text = self._shown(error.read(4096).decode("utf-8", "replace"))
                problem = f"status {error.code}: {text}"
                if error.code in (401, 403):
                    raise self._refusal(
                        f"{problem}; set {KEY} in the environment of the run"
                    ) from None
                if error.code < 500 and error.code not in _AGAIN:
                    raise self._refusal(f"{what}: {problem}") from None
                continue
            except (OSError, http.client.HTTPException) as error:  # of the network, or a timeout
                problem = self._shown(str(getattr(error, "reason", error)) or type(error).__name__)
                continue
            try:
                return json.loads(content)
            except ValueError:
                text = self._shown(content.decode("utf-8", "replace"))
                raise self._refusal(f"{what} is no JSON: {text}") from None
        raise self._refusal(
            f"{what} did not come in {_ATTEMPTS} attempts: {problem}; start the server, or correct "
            "the URL, and start the run again: it continues with the answers that it has"
        )

    def _shown(self, text: str) -> str:
        """The beginning of a text of the server, without the key."""
        key = self.environment.get(KEY)
        return (text.replace(key, "***") if key else text)[:_SHOWN]

    def _refusal(self, problem: str) -> TrainingError:
        return TrainingError(f"distillation.endpoint: {self.url}: {problem}", reason="endpoint")
