"""Tests of packages that only some runs need: what a message says where one is missing."""

import os
import subprocess
import sys
import tomllib

import pytest

from launcher.cli.main import main
from launcher.errors import RecipeError
from launcher.libraries.extras import EXTRAS, missing_extra
from launcher.recipe.load import load_recipe
from launcher.sources.finding import find_parts
from launcher.sources.hub import load_data_set
from tests import REPOSITORY

BLOCKED = f"import sys; sys.modules.update(dict.fromkeys({list(EXTRAS)}))\n"
"""What sitecustomize.py does so that no module of an extra can be imported."""


OF_STORES = ("s3", "gcs", "azure", "http")
"""A machine needs one of them, and their libraries pin versions of many others."""


@pytest.fixture
def nothing_installed(monkeypatch):
    for module in EXTRAS:
        monkeypatch.setitem(sys.modules, module, None)


def test_extras_are_those_of_the_package():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for package, extra in EXTRAS.values():
        assert any(name.startswith(package) for name in extras[extra])
        assert not any(name.startswith(package) for name in project["dependencies"])
        assert (extra in extras["all"][0]) == (extra not in OF_STORES)


def test_installed_packages_are_not_missing():
    installed = [module for module, (_, extra) in EXTRAS.items() if extra not in ("gcs", "azure")]
    assert [missing_extra(module) for module in installed] == [None] * len(installed)


def test_a_folder_in_the_working_folder_is_no_package(tmp_path, monkeypatch):
    """wandb writes a folder of its name wherever another program starts it."""
    (tmp_path / "not_a_package").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(EXTRAS, "not_a_package", ("some-package", "some"))
    assert missing_extra("not_a_package").endswith("pip install 'launcher[some]'")


@pytest.mark.parametrize(
    ("overrides", "key", "extra"),
    [
        (["lora={}"], "lora", "lora"),
        (
            ["images={}", "data.kind=chat", "model.config=null", "model.path=a/b"],
            "images",
            "images",
        ),
        (["logging.tensorboard=true"], "logging.tensorboard", "tensorboard"),
    ],
)
def test_a_key_names_its_extra(overrides, key, extra, nothing_installed):
    with pytest.raises(RecipeError) as error:
        load_recipe(["recipe=quickstart", *overrides], ranks=1, files=False)
    assert any(
        f"{key}" in line and line.endswith(f"not installed: pip install 'launcher[{extra}]'")
        for line in error.value.problems
    ), error.value.problems


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl.zst"])
def test_a_file_names_its_extra(name, nothing_installed, tmp_path):
    (tmp_path / name).write_bytes(b"0")
    with pytest.raises(RecipeError, match=r"launcher\[datasets\]"):
        find_parts((str(tmp_path / name),), kind="text")


@pytest.mark.parametrize(
    ("scheme", "extra"),
    [("s3", "s3"), ("gs", "gcs"), ("az", "azure"), ("abfs", "azure"), ("https", "http")],
)
def test_a_store_names_its_extra(scheme, extra, nothing_installed):
    name = f"{scheme}://bucket/a.jsonl"
    with pytest.raises(RecipeError, match=rf"{name}: needs .*'launcher\[{extra}\]'"):
        find_parts((name,), kind="text")
    with pytest.raises(RecipeError, match=rf"{name}: needs .*'launcher\[{extra}\]'"):
        load_recipe(["recipe=quickstart", f"data.train={name}"], ranks=1)


def test_a_hub_data_set_names_its_extra(nothing_installed):
    load_data_set.cache_clear()
    with pytest.raises(RecipeError, match=r"launcher\[datasets\]"):
        load_data_set("owner/name")


def test_a_report_names_its_extra(nothing_installed, tmp_path, capsys):
    (tmp_path / "status.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "pip install 'launcher[report]'" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_needs_no_extra(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(BLOCKED)
    (tmp_path / "rows.jsonl").write_text('{"text": "one two three"}\n' * 4000)
    path = f"{tmp_path}:{REPOSITORY}"
    recipe = ["recipe=quickstart", "data.train=rows.jsonl", "data.validation=null"]
    small = [
        "run.max_steps=2",
        "run.device=cpu",
        f"run.dir={tmp_path}/run",
        "evaluation.every_steps=null",
    ]
    command = [sys.executable, "-m", "launcher", "train", *recipe, *small, "gpus=1"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        timeout=240,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after 2 of 2 steps" in done.stdout + done.stderr
