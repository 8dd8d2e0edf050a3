"""Fixtures for all tests: unchanged environment variables and logging, a temporary cache.

Also time limits for tests, the logs of failed runs, and a check for processes left behind.
"""

import contextlib
import gc
import logging
import operator
import os
import random
import sys
import time
import zlib
from pathlib import Path

import pytest

from tests import limits

# Idle OpenMP threads must not spin: several test processes share a few cores, and more than half of
# the CPU time of tests that compute was spinning. Read when torch is loaded, also by child processes
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
limits.take_signals()
SET_BY_LIBRARIES = ("PYTEST_", "TORCHINDUCTOR_", "KMP_", "TOKENIZERS_PARALLELISM")
LONGEST = (
    "test_golden.py",
    "test_train.py",
    "test_resumed_runs.py",
    "test_equivalence.py",
    "test_cluster.py",
)
_time_limit = None


SHARE = os.environ.get("LONG_SHARE")
"""Set by `make test-share`: any text. It decides which files of long tests come first."""
SHARE_SECONDS = int(os.environ.get("SHARE_SECONDS", "360"))
"""In such a session tests that would start later are skipped."""
CHANGED = {Path(name).stem.removeprefix("test_") for name in os.environ.get("CHANGED", "").split()}
"""Names of modules and tests that the last commits changed."""
_begun = time.monotonic()


SHARE_OF_FILE = 3
"""One in so many long tests of a file is in a share, each time others. A file of tests runs in one process:
if all of them ran, those at the end of a long file would always come too late."""


def _changed(item):
    return item.path.stem.removeprefix("test_") in CHANGED or item.path.parent.name in CHANGED


def _number(text):
    """A number that follows from the share and the text."""
    return zlib.crc32(f"{SHARE} {text}".encode())


def _in_share(item):
    """Whether a test is in a share: all tests of changed modules are, and some of the others."""
    return _changed(item) or _number(item.nodeid) % SHARE_OF_FILE == 0


def _place(item):
    """Where a file of tests stands in a share: a random place, of tests of changed modules in the first
    half."""
    return _number(item.path.name) >> _changed(item)


def pytest_collection_modifyitems(config, items):
    """The files that take longest come first, so that none of them runs alone at the end."""
    if SHARE is None:
        items.sort(key=lambda item: item.path.name not in LONGEST)
        return
    config.hook.pytest_deselected(items=[item for item in items if not _in_share(item)])
    items[:] = sorted(filter(_in_share, items), key=_place)


def pytest_collection_finish():
    """Garbage collections do not scan what was imported, and come less often: they took a fifth of the
    CPU time of `make check`."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


def pytest_runtest_setup(item):
    """Ends a share of the long tests when its time is over."""
    if SHARE is not None and time.monotonic() - _begun > SHARE_SECONDS:
        pytest.skip("not in this share: its time is over")


def variables():
    return {
        name: value for name, value in os.environ.items() if not name.startswith(SET_BY_LIBRARIES)
    }


SLOW_SECONDS = 2 if "CHECK" in os.environ else 8
"""CPU seconds, with those of child processes, that a unit test takes at most without a mark: by `make
check` two. In other sessions more processes share the cores, which makes CPU time longer."""
MARKS = ("slow", "long", "gpu")


def cpu_seconds():
    """CPU time of this process and of its children that have ended: it hardly depends on what else
    the machine does."""
    return sum(os.times()[:4])


def forget_files():
    """Empties the caches of what was read from files, such as tokenizers. Their keys are names as a recipe
    has them: `model` is another folder in the test that comes next."""
    modules = [
        name for name in sys.modules if name.startswith(("launcher.data.", "launcher.sources."))
    ]
    for name in modules:
        for value in vars(sys.modules[name]).values():
            if callable(clear := getattr(value, "cache_clear", None)):
                clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fails a unit test without a mark that takes long: `make check` runs it."""
    begun = cpu_seconds()
    result = yield
    spent = cpu_seconds() - begun
    if Path.cwd() != item.config.invocation_params.dir:
        forget_files()
    marked = any(item.get_closest_marker(mark) for mark in MARKS)
    if "unit" in item.path.parts and not marked and spent > SLOW_SECONDS:
        pytest.fail(f"took {spent:.1f} s of CPU time: mark it slow, or make it faster")
    return result


@pytest.fixture(autouse=True)
def _same_environment():
    before = variables()
    yield
    assert variables() == before


@pytest.fixture(autouse=True)
def _same_random_numbers():
    """Tests draw the same numbers in any order."""
    random.seed(1)
    for name, seed in {"numpy": "random.seed", "torch": "manual_seed"}.items():
        if name in sys.modules:
            operator.attrgetter(seed)(sys.modules[name])(1)


@pytest.fixture(autouse=True)
def _same_logging():
    """A command in this process may configure the launcher's log messages."""
    logger = logging.getLogger("launcher")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory):
    """Puts the cache of tokenized data into a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_processes_left():
    os.environ[limits.MARK] = limits.SESSION
    yield
    left = limits.left_behind(limits.SESSION)
    assert not left, f"tests of this session left processes behind: {left}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Limits the time of a test with its fixtures. Long tests have the limits of their commands."""
    global _time_limit
    if _time_limit is None:
        # Capturing begins after this hook, so this is the stream of the terminal
        stream = sys.__stderr__.fileno()
        _time_limit = limits.TimeLimit(os.fdopen(os.dup(stream), "w"))
    if item.get_closest_marker("long") is None:
        _time_limit.begin(item.nodeid)
    try:
        return (yield)
    finally:
        _time_limit.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    """Adds the logs of the run folders to the report of a failed test."""
    report = yield
    if report.failed:
        values = getattr(item, "funcargs", {}).values()
        folders = {getattr(value, "folder", value) for value in values if _has_folder(value)}
        for folder in sorted(folders):
            with contextlib.suppress(OSError):
                if text := limits.logs(folder):
                    report.sections.append((f"logs in {folder}", text))
        # Once more at the end, where only the last lines of the output of CI are kept
        report.sections.append(("error", report.longreprtext[-2000:]))
    return report


def _has_folder(value):
    """Whether the value of a fixture is a temporary folder or has one."""
    folder = getattr(value, "folder", value)
    return isinstance(folder, Path) and folder.is_dir() and "pytest-" in str(folder)


@pytest.fixture
def messages(caplog):
    """A function that returns the messages that the launcher has logged so far."""
    caplog.set_level(logging.INFO, logger="launcher")
    return lambda: [
        record.getMessage() for record in caplog.records if record.name.startswith("launcher")
    ]


@pytest.fixture(scope="module")
def server():
    """An S3 server with an empty bucket (`tests/object_store.py`)."""
    from tests.object_store import object_store

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    with object_store() as store:
        yield store
