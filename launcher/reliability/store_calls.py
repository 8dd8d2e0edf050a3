"""Calls of the ranks' store about keys of many ranks."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch.distributed import Store


def absent(store: Store, keys: Sequence[str], *, seconds: float) -> list[str]:
    """Waits until the store has all keys, and returns those that it does not have after this time.
    Each look is one request. Raises RuntimeError if the store fails."""
    deadline = time.monotonic() + seconds
    while keys and not store.check(list(keys)):
        if time.monotonic() >= deadline:
            return [key for key in keys if not store.check([key])]
        time.sleep(0.1)
    return []
