"""Scores of generated answers against references. They are functions of (answer, reference)."""

from __future__ import annotations

from collections import Counter


def exact_match(answer: str, reference: str) -> float:
    """1 if the texts are equal, apart from white space around them, else 0."""
    return float(answer.strip() == reference.strip())


def f1(answer: str, reference: str) -> float:
    """Harmonic mean of precision and recall of the words, in lower case and in any order."""
    answered, wanted = answer.lower().split(), reference.lower().split()
    return ratio((Counter(answered) & Counter(wanted)).total(), len(answered) + len(wanted))


def rouge_l(answer: str, reference: str) -> float:
    """ROUGE-L (Lin, 2004) of the words in lower case: F1 of the longest common subsequence."""
    answered, wanted = answer.lower().split(), reference.lower().split()
    longest = [0] * (len(wanted) + 1)  # of the answer so far, and the first words of the reference
    for word in answered:
        before = longest.copy()
        for at, other in enumerate(wanted):
            longest[at + 1] = before[at] + 1 if word == other else max(before[at + 1], longest[at])
    return ratio(longest[-1], len(answered) + len(wanted))


def ratio(common: float, both: float) -> float:
    """F1: twice the number of common items / the number of items of both; 1 if both are empty."""
    return 2 * common / both if both else 1.0
