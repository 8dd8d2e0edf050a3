import pytest

from tests.unit.small_recipe import SMALL


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder. It contains SMALL as x.yaml and the data file that SMALL names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.yaml").write_text(SMALL)
    (tmp_path / "data.txt").write_text("some text\n")
    return tmp_path
