"""Tests leave nothing behind: no process, no environment variable, no file outside tmp_path."""

import os

import pytest


@pytest.fixture(autouse=True)
def _same_environment():
    before = dict(os.environ)
    yield
    assert {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} == {
        k: v for k, v in before.items() if not k.startswith("PYTEST_")
    }


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Tokenized data of tests goes where they go."""
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    yield
    patch.undo()
