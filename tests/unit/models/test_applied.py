"""The record of what has been done to a model, which replaces looking at forward methods."""

import copy
import functools
import re

from torch import nn

from launcher.models.applied import applied
from tests import REPOSITORY


class _Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module


def test_a_wrapped_model_has_the_record_of_its_model_and_a_copy_has_its_own():
    model = nn.Linear(2, 2)
    applied(model).chunked_head = head = object()
    assert applied(_Wrapper(model)).chunked_head is head
    copied = copy.deepcopy(model)
    applied(copied).chunked_head = None
    assert applied(model).chunked_head is head


def test_the_record_is_found_behind_another_forward_method():
    """As a trace replaces it: a forward method is no place to look for a change."""
    model = nn.Linear(2, 2)
    applied(model).chunked_head = head = object()
    model.forward = functools.partial(model.forward)
    assert applied(model).chunked_head is head


def test_no_change_finds_another_through_a_forward_method():
    found = [
        str(file)
        for file in (REPOSITORY / "launcher").rglob("*.py")
        if re.search(r"\.__self__", file.read_text())
    ]
    assert found == []
