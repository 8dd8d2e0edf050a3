"""Losses of targets, as a user writes them: the examples of docs/extend.md, and broken ones."""

import torch


def dynamic_fine_tuning(log_probabilities):
    """Each cross-entropy times the probability of its own target (Wu et al., 2025)."""
    return -log_probabilities.detach().exp() * log_probabilities


def focal(log_probabilities, gamma=2.0):
    """Targets that the model knows count less (Lin et al., 2017)."""
    return -((1 - log_probabilities.exp()) ** gamma) * log_probabilities


def label_smoothing(logits, targets, amount=0.1):
    """A part of the target's probability goes to all tokens alike (Szegedy et al., 2016)."""
    log_probabilities = logits.log_softmax(-1)
    of_targets = log_probabilities.gather(1, targets[:, None])[:, 0]
    return -(1 - amount) * of_targets - amount * log_probabilities.mean(-1)


label_smoothing.needs = "logits"  # type: ignore[attr-defined]


def mean(log_probabilities):
    return -log_probabilities.mean()


def divided(log_probabilities):
    return -log_probabilities / len(log_probabilities)


def divided_logits(logits, targets):
    return -logits.log_softmax(-1).gather(1, targets[:, None])[:, 0] / len(targets)


divided_logits.needs = "logits"  # type: ignore[attr-defined]


def centered(log_probabilities):
    return log_probabilities.mean() - log_probabilities


def noisy(log_probabilities):
    return -log_probabilities * torch.rand(len(log_probabilities))


def without_gradient(log_probabilities):
    return -log_probabilities.detach()


def as_number(log_probabilities):
    return log_probabilities.sum().item()


def infinite(log_probabilities):
    return log_probabilities / 0


def fails(log_probabilities):
    return log_probabilities + torch.ones(3)


def wrong_needs(log_probabilities):
    return -log_probabilities


wrong_needs.needs = "hidden"  # type: ignore[attr-defined]
