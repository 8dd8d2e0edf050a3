"""Distillation in rounds: before each one its prompts are answered, and the teacher predicts the
tokens of the answers.

Both are kept in RUN_DIR/rounds, so that a start that is interrupted continues. What a round trains
does not depend on where a run was interrupted: its answers are of the weights after the last step
of the round before, and a checkpoint is saved there.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launcher.console import seconds_as_text, task
from launcher.data.dataset import SequenceDataset
from launcher.data.rounds import Prompt, Round, RoundPrompts, round_at, round_bounds, round_data
from launcher.data.run_data import RunData
from launcher.data.token_store import values_of_documents
from launcher.data.tokenizer import hugging_face_tokenizer
from launcher.distributed.process_group import from_rank_0, gather
from launcher.errors import RecipeError, TrainingError
from launcher.files import checksum_of, replace_file
from launcher.models.micro_batch import IGNORED
from launcher.models.philox import derived_seed
from launcher.objectives.base import BeforeTraining, Objective
from launcher.objectives.kept_files import AnswersFile, TeacherFile
from launcher.recipe import schema
from launcher.reliability.json_files import Json
from launcher.strategies.base import WrappedModel
from launcher.training.endpoint import TOGETHER, Endpoint, Question
from launcher.training.generation import complete, most_likely
from launcher.training.random_states import random_states_kept

logger = logging.getLogger(__name__)

_WINDOW = 2 * TOGETHER
"""Prompts that are sent to a server before the ranks meet."""

Answers = list[list[int]]
"""The tokens of answers, each with the token that ends it, unless it was cut."""


@dataclass(frozen=True)
class Rounds:
    """The rounds of a run. Every rank has them, and makes the same calls."""

    settings: schema.Distillation
    data: schema.Data
    batch: schema.Batch
    seed: int
    folder: Path
    """RUN_DIR/rounds."""
    objective: Objective
    wrapped: WrappedModel
    about: BeforeTraining
    """Its file is that of a run without rounds."""

    def ends_at(self, steps: int) -> frozenset[int]:
        """The last step of each round, of a run with so many steps."""
        return frozenset(round_bounds(steps, self.settings.rounds)[1:])

    def forget_after(self, data: RunData) -> None:
        """Removes the answers of the model to rounds that begin after the position of the run: the
        steps until there will be trained again, perhaps otherwise."""
        if self.settings.answers != "student" or self.about.ranks.rank:
            return
        bounds = round_bounds(data.steps, self.settings.rounds)
        for number, first in enumerate(bounds[:-1], start=1):
            if first > data.start.step:
                self._answers_file(number).remove()

    def prepare(self, data: RunData, *, heartbeat: Callable[[str], None]) -> RunData:
        """The data of the round of the next step, from the position of the run on. Every rank must
        call it. Random states stay as they are. Raises RecipeError and TrainingError."""
        part = round_at(data, data.start.step, rounds=self.settings.rounds)
        assert isinstance(data.training, SequenceDataset)
        prompts = RoundPrompts(data.training, part.samples)
        ranks, file = self.about.ranks, self._answers_file(part.number)
        about = self._describe(part, data.training)
        # A teacher's model draws numbers when it is built, and a resumed run may not build it
        with random_states_kept(ranks.device):
            done = 0
            if ranks.rank == 0:
                file.path.parent.mkdir(parents=True, exist_ok=True)
                done = file.read(about)
            done = from_rank_0(done, ranks.group)
            if done < len(prompts):
                self._answer(file, part, prompts, about, done, heartbeat)
            heartbeat("data")
            of_round = round_data(
                data,
                self.batch,
                part,
                file.path,
                objective=self.objective.with_seed(self.seed),
                unused=self.settings.teacher_column,
                model=self.about.model,
                build=self.about.tokenizes,
            )
            if ranks.rank == 0:  # a resume from an earlier checkpoint computes them again
                for number in range(1, part.number):
                    for of_teacher in self._teacher_files(number).values():
                        of_teacher.remove()
            about_round = replace(self.about, file=self._teacher_files(part.number))
            heartbeat("teacher")
            return self.objective.before_model(of_round, about_round)

    def _answers_file(self, number: int) -> AnswersFile:
        return AnswersFile(self.folder / f"round_{number:04}.jsonl")

    def _teacher_files(self, number: int) -> dict[str, TeacherFile]:
        assert isinstance(self.about.file, dict)
        files = {}
        for name, file in self.about.file.items():
            of = f"_{name}" if name else ""
            path = self.folder / f"round_{number:04}{of}_top_k.npy"
            files[name] = replace(file, path=path)
        return files

    def _describe(self, part: Round, dataset: SequenceDataset) -> Json:
        """What the answers of a round depend on beside the weights."""
        settings, content = self.settings, str(dataset.fingerprint["content"])
        about: Json = {"round": part.number, "first_sample": part.first_sample}
        about |= {"answers": settings.answers, "rows": len(part.samples)}
        about["prompts"] = checksum_of([content.encode(), part.samples.tobytes()])
        about["sequence_length"] = dataset.length
        if settings.answers != "folder":
            about |= {"temperature": settings.answer_temperature, "seed": self.seed}
            about["max_new_tokens"] = settings.max_new_tokens
        return about

    def _answer(
        self,
        file: AnswersFile,
        part: Round,
        prompts: RoundPrompts,
        about: Json,
        done: int,
        heartbeat: Callable[[str], None],
    ) -> None:
        """Answers the prompts from number `done` on, and writes the rows on rank 0."""
        ranks, started = self.about.ranks, time.monotonic()
        title = f"round {part.number} of {self.settings.rounds}"
        if ranks.rank == 0:
            had = f"; those of the first {done:,} are there, from an earlier start" if done else ""
            logger.info(f"{title}: answers to {len(prompts):,} prompts{had}")
        match self.settings.answers:
            case "student":
                found = self._by_student(part, prompts, done, heartbeat)
            case "endpoint":
                found = self._by_endpoint(part, prompts, done)
            case _:
                found = self._from_folder(part, prompts, done)
        names = self._teacher_names(prompts) if ranks.rank == 0 else {}
        rows = self._rows(found, part, prompts, done, names)
        if ranks.rank == 0:
            file.write(rows, len(prompts), about, done=done)
        for _ in rows:  # the other ranks; none is left on rank 0
            pass
        gather(None, ranks.group)  # the file is complete
        if ranks.rank == 0:
            logger.info(f"{title}: answered in {seconds_as_text(time.monotonic() - started)}")

    def _teacher_names(self, prompts: RoundPrompts) -> dict[int, Any]:
        """What the rows say in distillation.teacher_column, by where their documents begin; empty: there is
        one teacher."""
        column, store = self.settings.teacher_column, prompts.dataset.store
        if column is None:
            return {}
        [source] = self.data.sources().values()
        rows = values_of_documents(store, source, column, tokenizer=self.about.model.tokenizer)
        return {int(store.offsets[document]): value for document, _, value in rows}

    def _rows(
        self,
        found: Iterator[Answers],
        part: Round,
        prompts: RoundPrompts,
        done: int,
        teachers: Mapping[int, Any],
    ) -> Iterator[list[Json]]:
        """The rows of kind tokens, from answers in the order of the prompts. teachers: the value of
        distillation.teacher_column by where a document begins."""
        decode = self._tokenizer.decode
        for answers in found:
            rows: list[Json] = []
            for answer in answers:
                prompt = prompts[done]
                rows.append(
                    {
                        "sample": part.first_sample + done,
                        "answer": decode(answer, skip_special_tokens=True),
                        "input_ids": [*prompt.ids, *answer],
                        "labels": [*[IGNORED] * len(prompt.ids), *answer],
                    }
                )
                if prompt.start in teachers:
                    assert self.settings.teacher_column is not None
                    rows[-1][self.settings.teacher_column] = teachers[prompt.start]
                done += 1
            yield rows

    @property
    def _tokenizer(self) -> Any:
        assert self.about.model.tokenizer is not None
        return hugging_face_tokenizer(self.about.model.tokenizer)

    def _limit(self, prompts: RoundPrompts, prompt: Prompt) -> int:
        return min(self.settings.max_new_tokens, prompts.room(prompt))

    def _by_student(
        self,
        part: Round,
        prompts: RoundPrompts,
        done: int,
        heartbeat: Callable[[str], None],
    ) -> Iterator[Answers]:
        """Answers of the model. Which rows share a micro-batch, and its width, do not depend on the
        number of ranks, and each row draws from a generator of its own."""
        ranks, rows, settings = self.about.ranks, self.about.micro_batch_size, self.settings
        number, parts, tokenizer = ranks.computing_group, ranks.computing_groups, self._tokenizer

        def proceed() -> bool:
            heartbeat("answers")
            return True

        with self.wrapped.evaluating(), task("answers", len(prompts) - done) as advance:
            for first in range(done, len(prompts), rows * parts):
                mine = first + rows * number
                chunk = prompts[mine : mine + rows]
                limits = [self._limit(prompts, prompt) for prompt in chunk]
                draws = np.zeros((rows, settings.max_new_tokens))
                for row in range(len(chunk)):
                    name = f"answer {part.first_sample + mine + row}"
                    generator = np.random.default_rng(derived_seed(self.seed, name))
                    draws[row] = generator.random(settings.max_new_tokens)
                choose = _Choose(
                    torch.from_numpy(draws),
                    temperature=settings.answer_temperature,
                    vocabulary=len(tokenizer),
                )
                ends = zip(chunk, limits, strict=True)
                tokens = complete(
                    self.wrapped,
                    prompts.dataset,
                    chunk,
                    ranks,
                    proceed,
                    tokenizer=tokenizer,
                    rows=rows,
                    width=max((len(p.ids) + limit - 1 for p, limit in ends), default=1),
                    limits=limits,
                    choose=choose,
                    with_end=True,
                )
                assert tokens is not None
                # Tokens plus 1; 0: no token, so that a sum over the ranks gathers the rows
                shape = rows * parts, settings.max_new_tokens
                all_tokens = torch.zeros(shape, dtype=torch.int64, device=ranks.device)
                if ranks.counts:
                    own = all_tokens[rows * number :][: len(chunk), : tokens.shape[1]]
                    own.copy_(tokens[: len(chunk)] + 1)
                dist.all_reduce(all_tokens, group=ranks.group)
                found = all_tokens[: len(prompts) - first].tolist()
                advance(len(found))
                yield [[token - 1 for token in row if token] for row in found]

    def _by_endpoint(self, part: Round, prompts: RoundPrompts, done: int) -> Iterator[Answers]:
        """Answers of the server, which rank 0 asks. The other ranks get none."""
        settings, ranks = self.settings, self.about.ranks
        assert settings.endpoint is not None
        server = Endpoint(settings.endpoint, settings.endpoint_model, settings.answer_temperature)
        with task("answers", len(prompts) - done) as advance:
            for first in range(done, len(prompts), _WINDOW):
                chunk, answers = prompts[first : first + _WINDOW], Answers()
                if ranks.rank == 0:
                    questions = [
                        Question(
                            sample := part.first_sample + first + number,
                            prompt.ids,
                            self._limit(prompts, prompt),
                            derived_seed(self.seed, f"answer {sample}"),
                        )
                        for number, prompt in enumerate(chunk)
                    ]
                    for question, prompt, answer in zip(
                        questions, chunk, server.answers(questions), strict=True
                    ):
                        where = f"distillation.endpoint: the answer to sample {question.sample}"
                        text, limit = answer.text, question.limit
                        answers.append(self._ids(text, prompt, limit, answer.complete, where))
                gather(None, ranks.group)  # none waits longer than for a part
                advance(len(chunk))
                yield answers

    def _from_folder(self, part: Round, prompts: RoundPrompts, done: int) -> Iterator[Answers]:
        """The answers in a file of the user, on rank 0."""
        if self.about.ranks.rank:
            yield []
            return
        assert self.settings.folder is not None
        file = Path(self.settings.folder) / f"round_{part.number:04}.jsonl"
        kept = self._write_prompts(part, prompts)
        if not file.is_file():
            raise TrainingError(
                f"distillation.folder: there is no {file}: write the answers to the prompts in {kept} "
                'there, a line {"sample": number, "answer": text} for each, and start the run again; '
                f"the model of this round is that of step {part.first_step}",
                reason="no_answers",
            )
        texts = read_answers(
            file, range(part.first_sample, part.first_sample + len(prompts)), prompts=kept
        )
        for number, text in enumerate(texts[done:], start=done):
            prompt, where = prompts[number], f"{file}: sample {part.first_sample + number}"
            yield [self._ids(text, prompt, prompts.room(prompt), True, where)]

    def _write_prompts(self, part: Round, prompts: RoundPrompts) -> Path:
        """Writes the prompts of a round for the user: RUN_DIR/rounds/round_0001_prompts.jsonl."""
        file = self.folder / f"round_{part.number:04}_prompts.jsonl"
        with replace_file(file, only_writer=True) as scratch, scratch.open("wb") as out:
            for number, prompt in enumerate(prompts):
                line = {
                    "sample": part.first_sample + number,
                    "prompt": self._tokenizer.decode(prompt.ids),
                    "input_ids": prompt.ids,
                }
                out.write((json.dumps(line, ensure_ascii=False) + "\n").encode("utf-8", "replace"))
        return file

    def _ids(self, text: str, prompt: Prompt, limit: int, complete: bool, where: str) -> list[int]:
        """The tokens of a text as an answer to a prompt, cut to the limit; of a complete one with the
        token that ends the answers of the data. Raises RecipeError if it has no token."""
        tokenizer = self._tokenizer
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        last = prompt.reference[-1]
        end = last if last in tokenizer.all_special_ids else tokenizer.eos_token_id
        if complete and end is not None and ids[-1:] != [end]:
            ids = [*ids, end]
        if not ids:
            raise RecipeError(f"{where} is empty, and the tokenizer has no token that ends a text")
        return ids[:limit]


@dataclass(frozen=True)
class _Choose:
    """Draws the tokens of rows."""

    draws: torch.Tensor
    """A number in [0, 1) for each token, (rows, steps), float64, on the CPU."""
    temperature: float
    vocabulary: int
    """Tokens that the tokenizer knows. Models have spare entries behind them."""

    def __call__(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        known = logits[:, : self.vocabulary]
        if not self.temperature or step >= self.draws.shape[1]:
            return most_likely(known, step)
        # On the CPU: sums of a GPU depend on its kind, and are refused by run.deterministic
        sums = (known.cpu().double() / self.temperature).softmax(-1).cumsum(-1)
        drawn = self.draws[:, step, None] * sums[:, -1:]
        # The first token whose sum is larger: it has a probability above 0
        found = torch.searchsorted(sums, drawn, right=True)[:, 0]
        return found.clamp(max=known.shape[1] - 1).to(logits.device)


def read_answers(file: Path, samples: Sequence[int], *, prompts: Path) -> list[str]:
    """The answers of a file of the user, in the order of `samples`. prompts: the file with these.
    Raises RecipeError if a line is no answer, or if not each sample has one."""
    found: dict[int, str] = {}
    try:
        lines = file.read_text(encoding="utf-8").split("\n")  # a text may have other line ends
    except (OSError, ValueError) as error:
        raise RecipeError(f"distillation.folder: {file} cannot be read: {error}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where, need = f"distillation.folder: {file}: line {number}", ""
        try:
            row = json.loads(line)
            sample, answer = row["sample"], row["answer"]
        except (ValueError, KeyError, TypeError):
            need = 'is no {"sample": number, "answer": text}'
        else:
            if type(sample) is not int or not isinstance(answer, str):
                need = "needs a number as sample, and a text as answer"
            elif sample in found:
                need = f"answers sample {sample} again"
            elif sample not in samples:
                need = f"answers sample {sample}, which is none of those in {prompts}"
        if need:
            raise RecipeError(f"{where} {need}")
        found[sample] = answer
    if missing := [sample for sample in samples if sample not in found]:
        what = f"{len(missing):,} prompts of {prompts} have no answer, such as sample {missing[0]}"
        raise RecipeError(f"distillation.folder: {file}: {what}")
    return [found[sample] for sample in samples]
