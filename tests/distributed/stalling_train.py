"""launcher/train.py on a file system that stalls once, and with a record of the memory of its own.

All calls of all ranks on files of the folder STALLS wait for STALL_SECONDS, from the first one on a file
whose path has STALL_AT in it. PRIVATE/RANK has the most bytes that were private to this process.
"""

import os
import re
import runpy
import sys
import threading
import time
from pathlib import Path

from tests import REPOSITORY

_FOLDER, _AT = os.environ["STALLS"], os.environ["STALL_AT"]
_SECONDS = float(os.environ["STALL_SECONDS"])
_UNTIL = Path(os.environ["STALL_UNTIL"])
"""Its time of change is the end of the pause."""
_OUT = Path(os.environ["PRIVATE"], os.environ["RANK"])
_SAMPLE_SECONDS = 10.0
_stat = os.stat


def _stall(path):
    if not isinstance(path, str | os.PathLike) or not os.fspath(path).startswith(_FOLDER):
        return
    try:
        until = _stat(_UNTIL).st_mtime
    except FileNotFoundError:
        if _AT not in os.fspath(path):
            return
        until = time.time() + _SECONDS
        new = _UNTIL.with_name(f"{_UNTIL.name}{os.getpid()}")
        new.touch()
        os.utime(new, (until, until))
        new.rename(_UNTIL)
    time.sleep(max(0.0, until - time.time()))


def _stalling(call):
    def stalling(path, *arguments, **options):
        _stall(path)
        return call(path, *arguments, **options)

    return stalling


def _record_memory():
    most = 0
    while True:
        text = Path("/proc/self/smaps_rollup").read_text()
        sizes = re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", text, re.MULTILINE)
        most = max(most, 1024 * sum(map(int, sizes)))
        new = _OUT.with_name(f"{_OUT.name}.new")
        new.write_text(str(most))
        new.rename(_OUT)  # whole at any time: this process may end now
        time.sleep(_SAMPLE_SECONDS)


sys.addaudithook(lambda _, arguments: _stall(arguments[0]) if arguments else None)
os.stat = _stalling(os.stat)
threading.Thread(target=_record_memory, daemon=True).start()
runpy.run_path(str(REPOSITORY / "launcher/train.py"), run_name="__main__")
