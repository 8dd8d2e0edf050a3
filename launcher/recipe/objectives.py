"""What a run may learn from its rows, as the recipe sees it: one entry for each objective.

An entry names the rows that an objective learns from, and the class that computes it
(`launcher/objectives`), which is imported only for training. `rules.py` has what its keys need.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from launcher.recipe.schema import Recipe
from launcher.sources.layouts import TOKEN_KINDS


@dataclass(frozen=True)
class ObjectiveRules:
    """An objective, as the recipe sees it."""

    implementation: str
    """`module:class`, below `launcher.objectives`."""
    task: str = "causal_lm"
    """model.task"""
    kinds: tuple[str, ...] = TOKEN_KINDS
    """The values of data.kind that it learns from."""
    section: str | None = None
    """The section of the recipe with its settings."""
    required_key: str = ""
    """`key=value` of the section, for the error if the section is missing. Empty: it may be missing."""
    scores: tuple[str, ...] = ()
    """Metrics of an evaluation beside its loss, for checkpoint.keep_best."""
    passes: int = 1
    """Forward passes of a micro-batch in a step: 2 if its loss needs those of the others first."""
    no_row_losses: str | None = None
    """Why `launcher rows --loss` cannot show the loss of a row; None: it can."""


_PAIRS = (
    "kind preference: the loss of a pair is not that of its tokens; see rewards/* in metrics.jsonl"
)
_OF_BATCH = "the loss of a query is one of the whole global batch"
OBJECTIVES = (
    ObjectiveRules(
        "next_token:NextToken",
        section="objective",
    ),
    ObjectiveRules(
        "masked:Masked",
        task="masked_lm",
        kinds=("text", "tokens"),
        no_row_losses="model.task masked_lm: which tokens are predicted differs from epoch to epoch",
    ),
    ObjectiveRules(
        "classification:Classification",
        task="sequence_classification",
        kinds=("classification",),
        scores=("accuracy", "f1"),
    ),
    ObjectiveRules(
        "preference:Preference",
        kinds=("preference",),
        section="preference",
        required_key="preference.loss=dpo",
        scores=("rewards/accuracies", "rewards/margins"),
        no_row_losses=_PAIRS,
    ),
    ObjectiveRules(
        "kto:Kto",
        kinds=("unpaired",),
        section="kto",
        required_key="kto.beta=0.1",
        scores=("rewards/accuracies",),
        no_row_losses="kind unpaired: the loss of an answer is not that of its tokens",
    ),
    ObjectiveRules(
        "reward:Reward",
        task="reward",
        kinds=("preference",),
        scores=("accuracy", "margin"),
        no_row_losses=_PAIRS,
    ),
    ObjectiveRules(
        "embedding:EmbeddingObjective",
        task="embedding",
        kinds=("retrieval",),
        section="embedding",
        scores=("recall@1", "recall@10", "mrr@10", "ndcg@10", "spearman"),
        passes=2,
        no_row_losses=f"model.task embedding: {_OF_BATCH}",
    ),
    *(
        ObjectiveRules(
            "reranker:RerankerObjective",
            task=task,
            kinds=("reranking",),
            section="reranker",
            scores=("accuracy", "mrr@10", "ndcg@10"),
            no_row_losses="kind reranking: the loss is one of a whole document",
        )
        for task in ("reranker", "causal_lm")
    ),
    ObjectiveRules(
        "distillation:Distillation",
        section="distillation",
    ),
)
CUSTOM = ObjectiveRules("custom:Custom")
"""data.builder: the loss of the user's data."""
SECTIONS = tuple(dict.fromkeys(rules.section for rules in OBJECTIVES if rules.section))
"""The sections of a recipe with the settings of an objective."""


def objective_of(recipe: Recipe) -> ObjectiveRules:
    """The objective of a recipe, which may have mistakes: that of data.builder, of a section that is
    given, or of model.task and data.kind."""
    if recipe.data.builder is not None:
        return CUSTOM
    given = [name for name in SECTIONS if getattr(recipe, name) is not None]
    return _first(recipe.model.task, given, recipe.data.kind)


def kinds_of_objective(plain: Mapping[str, Any]) -> tuple[str, ...]:
    """The values of data.kind that the objective of a recipe, which is not decoded yet, learns
    from."""
    model = plain.get("model")
    task = model.get("task") if isinstance(model, dict) else None
    given = [name for name in SECTIONS if plain.get(name) is not None]
    wanted = [_first(task or "causal_lm", [name]).kinds for name in given]
    # Sections that exclude each other have an error of their own
    return tuple(itertools.chain(*wanted)) or _first(task or "causal_lm", ()).kinds


def _first(task: object, sections: Collection[str], kind: str = "") -> ObjectiveRules:
    of_task = [rules for rules in OBJECTIVES if rules.task == task]
    given = [rules for rules in of_task if rules.section in sections]
    fitting = [rules for rules in of_task if kind in rules.kinds]
    return [*given, *fitting, *of_task, *OBJECTIVES][0]
