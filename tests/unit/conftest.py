import pytest

from launcher.sources import store_requests
from tests.object_store import forget
from tests.unit.small_recipe import SMALL
from tests.unit.words import WRITE, Words


def pytest_collection_modifyitems(items):
    """`make golden` runs the tests whose words are in a file."""
    if WRITE:
        items[:] = [
            each for each in items if "unit" not in each.path.parts or "words" in each.fixturenames
        ]


@pytest.fixture
def words(request, tmp_path_factory):
    """The words of messages (`tests/unit/words.py`)."""
    return Words(request.path, tmp_path_factory.getbasetemp())


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder. It contains SMALL as x.yaml and the data file that SMALL names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL)
    (tmp_path / "data.txt").write_text("some text\n")
    return tmp_path


@pytest.fixture
def store(server, monkeypatch):
    """The server with an empty bucket, and pauses that take no time."""
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    monkeypatch.setattr(store_requests, "FIRST_PAUSE", 0.001)
    server.empty()
    forget()
    yield server
    forget()
    server.fault = None
