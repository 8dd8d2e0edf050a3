"""Micro-batches as tests look at them."""

from __future__ import annotations

from typing import Any

from launcher.models.micro_batch import MicroBatch


def contents(micro_batch: MicroBatch) -> dict[str, Any]:
    """All that a micro-batch has, by name: the model's inputs, its own fields, and the objective's."""
    fields = {name: value for name, value in vars(micro_batch).items() if value is not None}
    inputs, extra = fields.pop("inputs"), fields.pop("extra")
    if not micro_batch.later:
        fields.pop("later")
    if "sources" not in fields:
        assert not fields.pop("source_count")
    found = {**inputs, **fields, **extra}
    assert len(found) == len(inputs) + len(fields) + len(extra), "two have the same name"
    return found
