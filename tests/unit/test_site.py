"""Generated pages of the site, documented messages, the README and the container files."""

import ast
import json
import re

import pytest

from docs import hooks
from launcher.cli.app import Command
from launcher.recipe.decode import dotted, keys
from tests import REPOSITORY, browser
from tests.unit.test_documents import COMMANDS, DOCUMENTS


def test_files_in_the_documents_exist():
    named = set()
    for document in DOCUMENTS:
        pattern = r"`((?:tests|benchmarks|docs|recipes|slurm|launcher)/[\w/]+\.\w+)`"
        named |= set(re.findall(pattern, document.read_text()))
    assert len(named) > 20
    assert [name for name in sorted(named) if not (REPOSITORY / name).is_file()] == []


def test_reference_lists_every_key_and_option():
    """The site generates these pages from the schema and from the command line."""
    pages = {
        name: hooks.on_page_markdown((REPOSITORY / f"docs/reference/{name}.md").read_text())
        for name in ("recipe", "commands")
    }
    section = None
    found = set()
    for line in pages["recipe"].splitlines():
        if line.startswith("## "):
            section = line.removeprefix("## ").removesuffix(".NAME")
        elif match := re.match(r"\| `(\w+)`\{ #(\S+) \} \|(.*)", line):
            found.add(f"{section}.{match[1]}")
            assert match[2].removesuffix(match[1]).replace(".NAME", "") == f"{section}."
            assert match[3].count(" | ") == 2, line  # no cell contains the separator
    leaves = {dotted(path) for path in keys() if len(path) > 1}
    assert leaves <= found
    assert {"data.train.files", "slurm.partition", "strategy.mixed_precision.param_dtype"} <= found
    for name, command in COMMANDS.items():
        assert isinstance(command, Command)
        part = pages["commands"].split(f"## launcher {name}\n")[1].split("\n## ")[0]
        for option in [*(f"{value}=" for value in command.values()), *command.switches()]:
            assert f"`{option}" in part or f" {option}" in part, (name, option)


def strings_of_the_launcher():
    """Yields every string in the code of the launcher, with … for each inserted value."""
    for file in (REPOSITORY / "launcher").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(
                    getattr(part, "value", "…") if isinstance(part, ast.Constant) else "…"
                    for part in node.values
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


@pytest.mark.slow
def test_troubleshooting_messages_exist_in_the_code():
    text = (REPOSITORY / "docs/troubleshooting.md").read_text()
    heads = [line for line in text.splitlines() if line.startswith("- `")]
    known = list(strings_of_the_launcher())
    messages = [message for head in heads for message in re.findall(r"`([^`]+)`", head)]
    assert len(messages) > 45
    patterns = {message: ".*".join(map(re.escape, message.split("…"))) for message in messages}
    assert [
        message
        for message, pattern in patterns.items()
        if not any(re.search(pattern, string, re.DOTALL) for string in known)
    ] == []


def test_each_page_is_in_the_navigation_and_linked_from_another_page():
    """Engineering notes are in the list of their folder in place of the navigation."""
    docs = REPOSITORY / "docs"
    navigation = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    notes = (docs / "engineering/index.md").read_text()
    linked = {}
    for page in docs.rglob("*.md"):
        for name in re.findall(r"\]\((?!http)([^)#]+\.md)", page.read_text()):
            linked.setdefault((page.parent / name).resolve(), set()).add(page)
    for page in docs.rglob("*.md"):
        name = page.relative_to(docs).as_posix()
        if name.startswith("engineering/") and page.name != "index.md":
            assert f"]({page.name})" in notes, name
            assert linked[page] - {page, docs / "engineering/index.md"}, name
        else:
            assert re.search(rf"[ :]{name}$", navigation, re.MULTILINE), name
            assert name == "index.md" or linked[page] - {page}, name


def test_readme_is_short_and_its_picture_exists():
    readme = (REPOSITORY / "README.md").read_text()
    assert len(readme.splitlines()) <= 200
    (picture,) = re.findall(r"!\[[^]]+\]\((.*?)\)", readme)
    assert (REPOSITORY / picture).is_file()


def test_containers_share_one_base_image():
    """`make lint` runs hadolint on the Dockerfile."""
    image = json.loads((REPOSITORY / ".devcontainer/devcontainer.json").read_text())["image"]
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    assert re.findall(r"^FROM (.*)", dockerfile, re.MULTILINE) == [image]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24.04", image)
    assert re.findall(r"^USER (.*)", dockerfile, re.MULTILINE)[-1] not in ("root", "0")
    copied = re.findall(r"^COPY (.*)", dockerfile, re.MULTILINE)
    sources = {word.rstrip("/") for line in copied for word in line.split()[:-1]}
    kept = re.findall(r"^!(.*)", (REPOSITORY / ".dockerignore").read_text(), re.MULTILINE)
    assert {source.split("/")[0] for source in sources} == set(kept)
    assert all((REPOSITORY / source).exists() for source in sources)


SITE = REPOSITORY / "build/site"
HIDDEN_SIDEWAYS = """
    [...document.querySelectorAll(".highlight:not(.language-output) pre > code")]
        .filter(code => code.scrollWidth > code.clientWidth + 1).length
    + (document.documentElement.scrollWidth > document.documentElement.clientWidth)
"""


def is_built():
    """Whether `make docs` has built the site after the last change; CI does so before the tests."""
    kinds = ("*.md", "*.css", "hooks.py")
    sources = [file for kind in kinds for file in (REPOSITORY / "docs").rglob(kind)]
    index = SITE / "index.html"
    return index.is_file() and index.stat().st_mtime >= max(f.stat().st_mtime for f in sources)


@pytest.mark.skipif(browser.unavailable() is not None, reason=str(browser.unavailable()))
@pytest.mark.skipif(not is_built(), reason="needs `make docs`")
def test_pages_fit_the_window():
    """Code wraps. At 390 pixels, the cells of a key in the reference are below each other."""
    names = (
        "index",
        "models",
        "migrating",
        "memory",
        "gpu",
        "troubleshooting",
        "reference/data",
        "reference/recipe",
    )
    with browser.Browser() as opened:
        for name in names:
            for width in (1280, 390):
                opened.open(SITE / f"{name}.html", width=width)
                assert opened.evaluate(HIDDEN_SIDEWAYS) == 0, (name, width)
        wide = "[...document.querySelectorAll('.md-typeset__scrollwrap')]"
        assert opened.evaluate(f"{wide}.every(e => e.scrollWidth <= e.clientWidth)")


@pytest.mark.skipif(not is_built(), reason="needs `make docs`")
def test_the_search_finds_words_of_other_tools():
    pages = json.loads((SITE / "search/search_index.json").read_text())["docs"]
    page = " ".join(each["text"] for each in pages if each["location"].startswith("migrating"))
    words = "max_samples flash_attn unsloth NEFTune gradio GRPO PPO vLLM KTO DeepSpeed ORPO"
    assert [word for word in [*words.split(), "pipeline parallelism"] if word not in page] == []
