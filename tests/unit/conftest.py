import pytest

from tests.unit.small_recipe import SMALL


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to be in, with SMALL as x.yaml and the data it names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL)
    (tmp_path / "data.txt").write_text("some text\n")
    return tmp_path
