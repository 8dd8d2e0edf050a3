"""Linear layers whose weights the code of another module reads, as fused kernels of Mamba do.

An adapter of such a layer would be passed by, and a weight in another form (NF4, float8) would not be
understood. On CPUs the same code may call the layer, so a test there cannot tell.
"""

from __future__ import annotations

import inspect
import re
from functools import cache
from typing import Any

from torch import nn

_READ = re.compile(r"\bself\.(\w+)\.weight\b(?!\.(?:dtype|device|shape)|\[|, torch\.Tensor)")
"""A weight that is passed on. What is known of it without its numbers, and slices of it, which is the
`pretraining_tp` of old models, do not count."""
_INITIAL = ("init", "reset")
"""Parts of the names of methods that run before training."""


def read_by_weight(model: nn.Module) -> dict[nn.Module, str]:
    """The linear layers whose weight another module reads; for each, the name of that module's
    class."""
    found: dict[nn.Module, str] = {}
    for module in model.modules():
        kind: Any = type(module)
        for name in _names(kind):
            child = getattr(module, name, None)
            if isinstance(child, nn.Linear):
                found[child] = kind.__name__
    return found


@cache
def _names(kind: Any) -> frozenset[str]:
    """The attributes whose weights the methods of a class read."""
    names = set[str]()
    for base in kind.__mro__:
        if base.__module__.startswith("torch."):
            continue
        for name, method in vars(base).items():
            if not callable(method) or any(part in name for part in _INITIAL):
                continue
            function: Any = inspect.unwrap(method)
            code = getattr(function, "__code__", None)
            if code is None or "weight" not in code.co_names:
                continue
            try:
                names |= set(_READ.findall(inspect.getsource(function)))
            except (OSError, TypeError):  # without a file, such as code of a notebook
                continue
    return frozenset(names)
