"""What starts on several nodes keep of compiled code."""

import tempfile
from pathlib import Path

import pytest
import torch

from launcher.distributed.environment import Environment, set_compile_cache
from launcher.recipe.load import load_recipe
from launcher.reliability.progress import Progress
from launcher.run.compilation import Compilation, shared_file

CPU = torch.device("cpu")


def test_on_several_nodes_the_cache_is_on_each_node(tmp_path, monkeypatch):
    """Hundreds of ranks that replace files of one folder fail with stale file handles."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    several = Environment(world_size=16, local_world_size=8)
    set_compile_cache(tmp_path / "shared", several, found := {})
    folder = Path(found["TORCHINDUCTOR_CACHE_DIR"])
    assert folder.parent.parent == tmp_path
    assert folder.parent.stat().st_mode & 0o077 == 0, "code is loaded from it"
    set_compile_cache(tmp_path / "shared", several, own := {"TORCHINDUCTOR_CACHE_DIR": "mine"})
    assert own == {"TORCHINDUCTOR_CACHE_DIR": "mine"}


@pytest.fixture
def artifacts(monkeypatch):
    """What torch has loaded; it saves b"code"."""
    loaded = []
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", loaded.append)
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"code", None))
    return loaded


def compiled(file, *, graphs=(2, 0), rank=0, monkeypatch):
    """A start that compiles, and finds some of the graphs in the cache."""
    monkeypatch.setattr("launcher.run.compilation.graphs", lambda: graphs)
    compilation = Compilation(Progress(), rank=rank, shared=file)
    with compilation.observed():
        compilation._begin()
        compilation._end()
        compilation._seconds = 1.0
        compilation.report(1)


def test_a_node_gets_what_an_earlier_start_compiled(tmp_path, artifacts, monkeypatch):
    file = tmp_path / "compiled" / "a.bin"
    compiled(file, rank=1, monkeypatch=monkeypatch)
    assert not file.exists()
    compiled(file, monkeypatch=monkeypatch)
    assert (artifacts, file.read_bytes()) == ([], b"code")
    file.write_bytes(b"older code")
    compiled(file, graphs=(2, 2), monkeypatch=monkeypatch)
    assert (artifacts, file.read_bytes()) == ([b"older code"], b"older code")


def test_a_damaged_file_costs_a_compilation_only(tmp_path, artifacts, monkeypatch, caplog):
    def refuse(data):
        raise ValueError("truncated")

    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", refuse)
    file = tmp_path / "a.bin"
    file.write_bytes(b"damaged")
    compiled(file, monkeypatch=monkeypatch)
    assert f"compile: {file} cannot be used: truncated" in caplog.text
    assert file.read_bytes() == b"code"
    (tmp_path / "no_folder").touch()
    compiled(tmp_path / "no_folder/a.bin", monkeypatch=monkeypatch)
    assert "no_folder/a.bin cannot be" in caplog.text


def test_recipes_that_compile_other_code_have_files_of_their_own(tmp_path):
    recipes = [
        load_recipe(["recipe=fsdp", *more], ranks=1).recipe
        for more in ([], ["run.name=b"], ["batch.micro_batch_size=2"])
    ]
    files = [shared_file(tmp_path, recipe, device=CPU) for recipe in recipes]
    assert files[0] == files[1] != files[2]
