"""The recipe's section `evaluation`."""

from __future__ import annotations

from pydantic import StrictBool

from launcher.recipe.section import PositiveInt, Section, TextList


class Generate(Section):
    """Greedy answers to the prompts of data.validation, for kinds chat and instruct."""

    prompts: PositiveInt = 32
    """Prompts of each validation set: its first ones that leave room for an answer."""
    max_new_tokens: PositiveInt = 64
    """Tokens of the longest answer; each takes a forward pass over the whole sequence."""
    metrics: TextList = ("exact_match",)
    """exact_match, f1 and rouge_l (of words), or functions of yours, `package.module:function`,
    which get answer and reference as text and return a number (larger is better)."""


class Evaluation(Section):
    """Loss and other metrics on data.validation."""

    every_steps: PositiveInt | None = 200
    """Optimizer steps between evaluations; the last step is always evaluated. null: only that."""
    max_batches: PositiveInt | None = None
    """Micro-batches per rank of one evaluation; null: all."""
    at_start: StrictBool = False
    """Evaluate before the first step, too."""
    generate: Generate | None = None
    """{prompts: 32, max_new_tokens: 64, metrics: [exact_match]}: score generated answers."""
    stop_after: PositiveInt | None = None
    """End the run after this many evaluations in a row without a better value of
    checkpoint.keep_best (null: eval_loss); null: never."""
