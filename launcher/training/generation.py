"""Greedy answers of the model in training, the same under every strategy and number of ranks.

The model is called on the whole sequence for each new token: caches of keys and values differ from
architecture to architecture, and answers are short. What it computes of attachments does not depend on
the answer, and is computed once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypedDict

import torch
import torch.distributed as dist

from launcher.data.dataset import SequenceDataset
from launcher.data.loader import to_device
from launcher.data.rounds import Prompt, last_prompt
from launcher.data.token_store import TokenStore
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.distributed.rank_layout import RankLayout
from launcher.errors import RecipeError, RowError
from launcher.models.hugging_face_files import end_ids
from launcher.models.predictions import logits
from launcher.models.row_division import whole_rows
from launcher.models.towers import features_kept
from launcher.recipe import schema
from launcher.recipe.functions import import_function
from launcher.strategies.base import WrappedModel
from launcher.training import scores


class Scored(TypedDict, total=False):
    """Fields of `Evaluated`."""

    scores: dict[str, float]
    scored: int
    samples: list[dict[str, str | float]]


def find_prompts(store: TokenStore, *, prompts: int, longest: int) -> list[Prompt]:
    """The first prompts of a token store with up to `longest` tokens. The answer is the last part
    of a document with loss."""
    chosen: list[Prompt] = []
    for start, end in zip(store.offsets[:-1].tolist(), store.offsets[1:].tolist(), strict=True):
        if len(chosen) == prompts:
            break
        prompt = last_prompt(store, start, end)
        if prompt is not None and len(prompt.ids) <= longest:
            chosen.append(prompt)
    return chosen


class Generator:
    """Answers the prompts of validation sets, and scores the answers."""

    def __init__(
        self, settings: schema.Generate, *, tokenizer: str, rows: int, longest: int
    ) -> None:
        """`rows` is the number of rows of a micro-batch, `longest` the number of tokens of a prompt
        with its answer. Raises RecipeError if a user's metric does not exist."""
        self._settings, self._rows, self._longest = settings, rows, longest
        self._tokenizer = hugging_face_tokenizer(tokenizer)
        self._scores: dict[str, Callable[[str, str], float]] = {}
        for metric in settings.metrics:
            _, colon, name = metric.rpartition(":")
            key = "evaluation.generate.metrics"
            function = import_function(metric, key=key) if colon else getattr(scores, name)
            self._scores[name] = function

    @property
    def longest(self) -> int:
        """Most tokens of a prompt."""
        return self._longest - self._settings.max_new_tokens

    def prompts(self, store: TokenStore) -> list[Prompt]:
        """The prompts of a token store that are answered."""
        return find_prompts(store, prompts=self._settings.prompts, longest=self.longest)

    def answer(
        self,
        wrapped: WrappedModel,
        dataset: SequenceDataset,
        ranks: RankLayout,
        proceed: Callable[[], bool],
    ) -> Scored | None:
        """`scores`, `scored` and `samples` (see `Evaluated`) of the prompts of a data set. Calls
        `proceed` before each token, and returns None if it is false on any rank. Every rank must
        call it. Raises RecipeError if a prompt cannot be read."""
        most, rows = self._settings.max_new_tokens, self._rows
        prompts = self.prompts(dataset.store)
        width = max((len(prompt.ids) for prompt in prompts), default=0) + most
        # Tokens plus 1; 0: no token, so that a sum over the ranks gathers the rows
        answers = torch.zeros(len(prompts) + rows, most, dtype=torch.int64, device=ranks.device)
        # Context parallel ranks have rows of their own here
        number, parts = ranks.computing_group, ranks.computing_groups
        for first in range(0, len(prompts), rows * parts):  # micro-batches, in turn
            mine = first + rows * number
            chunk = prompts[mine : mine + rows]
            with features_kept(wrapped.module):
                tokens = complete(
                    wrapped,
                    dataset,
                    chunk,
                    ranks,
                    proceed,
                    tokenizer=self._tokenizer,
                    rows=rows,
                    width=width,
                    limits=[most] * len(chunk),
                )
            if tokens is None:
                return None
            if ranks.counts:
                answers[mine : mine + len(chunk), : tokens.shape[1]] = tokens[: len(chunk)] + 1
        dist.all_reduce(answers, group=ranks.group)
        samples = [
            self._score(dataset, prompt, [token - 1 for token in row if token])
            for prompt, row in zip(prompts, answers.tolist(), strict=False)
            if ranks.rank == 0  # a user's function may draw random numbers
        ]
        count = len(prompts)
        means = [sum(s[name] for s in samples) / max(1, count) for name in self._scores]
        agreed = torch.tensor(means, dtype=torch.float64, device=ranks.device)
        dist.broadcast(agreed, group=ranks.group, group_src=0)
        agreed_scores = dict(zip(self._scores, agreed.tolist(), strict=True))
        return {"scores": agreed_scores, "scored": count, "samples": samples}

    def _score(self, dataset: SequenceDataset, prompt: Prompt, answer: list[int]) -> dict[str, Any]:
        """A line of samples.jsonl, with the names of the attachments of the prompt, each of which
        stands in it as one of its tokens."""
        inputs, runs = dataset.inputs.attachments, itertools.groupby(prompt.ids)
        given, end = inputs.placeholder_token_ids, prompt.start + len(prompt.ids)
        ids = [token for token, run in runs for _ in ([0] if token in given else run)]
        found = list(dataset.store.attachments_between(prompt.start, end))
        names = {
            modality.nouns: [one.name for one in found if one.kind == modality.kind]
            for modality in inputs.modalities
        }
        decode = self._tokenizer.decode
        reference = decode(prompt.reference, skip_special_tokens=True).strip()
        answered = decode(answer, skip_special_tokens=True).strip()
        scored = {name: float(score(answered, reference)) for name, score in self._scores.items()}
        texts = {"prompt": decode(ids), "reference": reference, "answer": answered}
        return texts | names | scored


class Choose(Protocol):
    """Chooses the next token of each row, (rows,), from their logits, (rows, vocabulary), for the
    `step`-th new token, from 0."""

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor: ...


def most_likely(logits: torch.Tensor, step: int) -> torch.Tensor:
    """The tokens with the largest logits."""
    return logits.argmax(-1)


def complete(
    wrapped: WrappedModel,
    dataset: SequenceDataset,
    chunk: Sequence[Prompt],
    ranks: RankLayout,
    proceed: Callable[[], bool],
    *,
    tokenizer: Any,
    rows: int,
    width: int,
    limits: Sequence[int],
    choose: Choose = most_likely,
    with_end: bool = False,
) -> torch.Tensor | None:
    """The new tokens of each row, (rows, largest limit), -1 after the end; None if `proceed`, which
    is called before each token, is false on any rank. Every rank must call it, with a chunk of its
    own, and makes as many forward passes as the rank with the longest answer. What a row gets
    depends on the chunk, on `rows` and on `width`, and not on other ranks.

    dataset: of the prompts. rows: of the micro-batch. width: its tokens, at least those of a prompt
    and its answer but the last one. limits: most tokens of each answer. with_end: an answer includes
    the token that ends it. Raises RecipeError if a prompt cannot be read.
    """
    most = max(limits, default=0)
    ids = torch.zeros(rows, width, dtype=torch.int64)
    lengths = torch.ones(rows, dtype=torch.int64)
    limit = torch.zeros(rows, dtype=torch.int64)
    limit[: len(chunk)] = torch.tensor(limits, dtype=torch.int64)
    ends = {tokenizer.eos_token_id, *end_ids(wrapped.module)} - {None}
    for row, (prompt, reference, _) in enumerate(chunk):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        lengths[row] = len(prompt)
        if reference[-1] in tokenizer.all_special_ids:  # such as an end of turn
            ends.add(reference[-1])
    given = dataset.inputs.attachments.placeholder_token_ids
    never = torch.tensor(given, dtype=torch.int64, device=ranks.device)
    pieces = [[(0, prompt.start, prompt.start + len(prompt.ids))] for prompt in chunk]
    pieces += [[]] * (rows - len(chunk))
    try:
        made = dataset.inputs.of_prompts(ids.numpy(), dataset.store, pieces)
    except RowError as error:
        raise RecipeError(f"data: {error}") from None
    inputs = to_device(dict(made.micro_batch.inputs), ranks.device)
    del inputs["input_ids"]
    stop_ids = torch.tensor(sorted(ends), device=ranks.device)
    ids, lengths, limit = (each.to(ranks.device) for each in (ids, lengths, limit))
    at = torch.arange(rows, device=ranks.device)
    going = limit > 0
    new = torch.full((rows, most), -1, device=ranks.device)
    for step in itertools.count():
        flags = torch.tensor([int(going.any()), int(not proceed())], device=ranks.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=ranks.group)
        any_going, stop = flags.tolist()
        if stop or not any_going:
            return None if stop else new
        # A row that is complete computes something, too, which is not used
        last = (lengths - 1).clamp(max=width - 1)
        logits = _next_logits(wrapped, ids, at, last, inputs, never)
        token = choose(logits, step)
        before, going = going, going & ~torch.isin(token, stop_ids)
        if step < most:
            new[:, step] = torch.where(before if with_end else going, token, -1)
        ids[at, lengths.clamp(max=width - 1)] = torch.where(going, token, 0)
        lengths = lengths + going
        going = going & (step + 1 < limit)
    raise AssertionError  # the loop has no other end


def _next_logits(
    wrapped: WrappedModel,
    ids: torch.Tensor,
    rows: torch.Tensor,
    last: torch.Tensor,
    inputs: Mapping[str, Any],
    never: torch.Tensor,
) -> torch.Tensor:
    """The logits after position `last` of each row, -inf for the tokens in `never`: those of
    attachments, which only a prompt has. What comes after it does not matter: attention is causal."""

    with whole_rows():
        at = rows * ids.shape[1] + last
        following = wrapped.without_gradients(logits, {"input_ids": ids, **inputs}, at)
    return following.index_fill(-1, never, -torch.inf)
