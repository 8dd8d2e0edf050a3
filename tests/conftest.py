"""Fixtures for all tests: unchanged environment variables, a temporary cache, logged messages."""

import logging
import os

import pytest

SET_BY_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "KMP_", "TOKENIZERS_PARALLELISM")


def variables():
    return {
        name: value for name, value in os.environ.items() if not name.startswith(SET_BY_LIBRARIES)
    }


@pytest.fixture(autouse=True)
def _same_environment():
    before = variables()
    yield
    assert variables() == before


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Puts the cache of tokenized data into a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def messages(caplog):
    """A function that returns the messages that the launcher has logged so far."""
    caplog.set_level(logging.INFO, logger="launcher")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name.startswith("launcher")
    ]
