"""Results that one rank computes for the others: on a shared file system, a thousand ranks that look at
the same thousands of files are a load for everybody."""

from __future__ import annotations

import hashlib
import pickle
import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import Store

from launcher.distributed.environment import Environment
from launcher.errors import RecipeError

_LONGEST_PAUSE_SECONDS = 1.0
"""Between two looks at the store."""
# Keys of the store
_PLACE = "shared/place"
_WHOLE, _OF_NODE = "shared/{}".format, "shared/{}/node_{}".format
_SAME = b"same"
"""In the place of a result of a node: it is that of rank 0."""
_PART_BYTES = 4 << 20
"""A result is in parts of this size, under keys that end in their numbers. A TCPStore closes the
connection of a rank that sets a value of more than 8 MiB (torch 2.13)."""

_T = TypeVar("_T")


class SharedResults:
    """Rank 0 computes a result. The first rank of each other node takes it if it holds on that node, and
    else computes its own. All other ranks take that of their node.

    Not a collective: ranks may ask at different times, and rank 0 for more. Each rank remembers what
    it asked for. Methods raise RuntimeError if the store fails.
    """

    def __init__(self, store: Store, environment: Environment, *, place: str) -> None:
        """place: what the keys depend on. Nodes on which it differs from that of rank 0 compute
        their own results."""
        self._store, self._place = store, place.encode()
        self._main, self._first = environment.main, environment.local_rank == 0
        self._node = environment.rank - environment.local_rank  # a node's ranks are consecutive
        self._known: dict[str, Any] = {}
        if self._main:
            store.set(_PLACE, place)

    def result(self, key: str, make: Callable[[], _T], holds: Callable[[_T], bool]) -> _T:
        """The result with this key.

        make: computes it. holds: whether the result of rank 0 holds on this node. Raises RecipeError
        if the rank that computes it does.
        """
        name = hashlib.sha256(key.encode()).hexdigest()[:24]
        if name not in self._known:
            self._known[name] = self._obtain(name, make, holds)
        outcome: _T | RecipeError = self._known[name]
        if isinstance(outcome, RecipeError):
            raise RecipeError(outcome.problems, rules=outcome.rules)
        return outcome

    def _obtain(
        self, name: str, make: Callable[[], _T], holds: Callable[[_T], bool]
    ) -> _T | RecipeError:
        whole, of_node = _WHOLE(name), _OF_NODE(name, self._node)
        outcome: _T | RecipeError
        if not self._first:
            found = self._wait(of_node)
            outcome = self._taken(whole if found == _SAME else of_node)
            return outcome
        if not self._main and self._wait(_PLACE) == self._place:
            outcome = self._taken(whole)
            if isinstance(outcome, RecipeError) or holds(outcome):
                self._set(of_node, _SAME)
                return outcome
        try:
            outcome = make()
        except RecipeError as error:
            outcome = error
        self._put(whole if self._main else of_node, outcome)
        if self._main:
            self._set(of_node, _SAME)
        return outcome

    def _put(self, key: str, outcome: object) -> None:
        """The key has the number of parts, and is set last."""
        packed = zlib.compress(pickle.dumps(outcome), level=1)
        starts = range(0, len(packed), _PART_BYTES)
        for number, start in enumerate(starts):
            self._set(f"{key}/{number}", packed[start : start + _PART_BYTES])
        self._set(key, str(len(starts)).encode())

    def _taken(self, key: str) -> Any:
        parts = range(int(self._wait(key)))
        packed = b"".join(self._store.get(f"{key}/{number}") for number in parts)
        return pickle.loads(zlib.decompress(packed))

    def _set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)  # type: ignore[arg-type]  # which takes bytes, too

    def _wait(self, key: str) -> bytes:
        """The value of a key. It may take longer than a call of the store: rank 0 may tokenize first. If
        it fails instead, it ends this rank."""
        pause = 0.01
        while not self._store.check([key]):
            time.sleep(pause)
            pause = min(_LONGEST_PAUSE_SECONDS, 1.5 * pause)
        return self._store.get(key)
