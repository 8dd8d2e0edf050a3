"""The time limit of tests, and processes that tests leave behind."""

import os
import subprocess
import sys
import uuid
from pathlib import Path
from types import SimpleNamespace

from tests import REPOSITORY, conftest, limits

FAILING = """
import subprocess, sys, time

def test_that_fails(tmp_path):
    (tmp_path / "run/log").mkdir(parents=True)
    (tmp_path / "run/log/rank_0.log").write_text("what rank 0 printed")
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    assert False
"""


def test_hanging_test_is_ended(tmp_path):
    """The test waits for a process. The stacks of the test are printed, and the process is ended."""
    mark = uuid.uuid4().hex
    waits = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with (tmp_path / "printed").open("w+") as printed:
        process = subprocess.Popen(waits, env=os.environ | {limits.MARK: mark})
        limit = limits.TimeLimit(printed, mark=mark, seconds=0)
        limit.begin("test_that_waits")
        try:
            assert process.wait(120) == -9
        finally:
            limit.end()
            process.kill()
        printed.seek(0)
        text = printed.read()
    assert "test_that_waits did not end in 0 s" in text
    assert "in test_hanging_test_is_ended" in text
    assert f"process: {sys.executable} -c import time" in text


def test_failed_test_shows_logs_and_leaves_no_process(tmp_path):
    """Runs pytest with the conftest.py of all tests."""
    early = "from tests import limits\nlimits.ENDING_SECONDS = 0.1\n"
    (tmp_path / "conftest.py").write_text(early)
    (tmp_path / "test_it.py").write_text(FAILING)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.conftest",
        "-c",
        REPOSITORY / "pyproject.toml",
        tmp_path,
    ]
    variables = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        command, env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1, done.stdout
    assert "rank_0.log:\nwhat rank 0 printed" in done.stdout
    assert "tests of this session left processes behind: " in done.stdout


def test_signals_that_the_shell_ignores_have_their_default_in_tests():
    """`nohup make test &` ignored SIGHUP and SIGINT, also in the programs that tests start."""
    shown = "import signal; print([signal.getsignal(n).name for n in (1, 15)], signal.getsignal(2))"
    code = (
        "import os, signal, subprocess, sys\n"
        "from tests.limits import take_signals\n"
        "take_signals()\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        f"subprocess.run([sys.executable, '-c', {shown!r}], check=True)"
    )
    script = 'trap \'\' HUP INT TERM; exec "$0" -c "$1"'
    printed = subprocess.run(
        ["bash", "-c", script, sys.executable, code],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    ).stdout
    assert printed.startswith("['SIG_DFL', 'SIG_DFL'] <built-in function default_int_handler>")


def test_some_share_has_each_long_test_of_a_file_among_the_first(monkeypatch):
    """Also with the last one, which would always come too late behind all others."""
    file = Path("tests/distributed/test_x.py")
    items = [SimpleNamespace(nodeid=f"{file}::test_{n}", path=file) for n in range(30)]
    hook = SimpleNamespace(pytest_deselected=lambda items: None)
    first = set()
    for commit in range(1000):
        monkeypatch.setattr(conftest, "SHARE", str(commit))
        chosen = list(items)
        conftest.pytest_collection_modifyitems(SimpleNamespace(hook=hook), chosen)
        assert chosen == [item for item in items if item in chosen], "the order of a file is kept"
        first |= {item.nodeid for item in chosen[:10]}
    assert len(first) == 30
