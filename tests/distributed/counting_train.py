"""launcher/train.py, which counts the calls of the file system on files of data.

Each call adds a byte to COUNTS/RANK: `o` for an opened file, `l` for a listed folder, `s` for a stat.
"""

import os
import runpy
import sys

from tests import REPOSITORY

_DATA = os.environ["COUNTED"]
_OUT = os.open(
    f"{os.environ['COUNTS']}/{os.environ['RANK']}", os.O_WRONLY | os.O_CREAT | os.O_APPEND
)
_CALLS = {"open": b"o", "os.scandir": b"l", "os.listdir": b"l"}


def _count(path, mark):
    if isinstance(path, (str, os.PathLike)) and os.path.abspath(path).startswith(_DATA):
        os.write(_OUT, mark)


def _counted(call):
    def counted(path, *arguments, **options):
        _count(path, b"s")
        return call(path, *arguments, **options)

    return counted


sys.addaudithook(lambda event, arguments: event in _CALLS and _count(arguments[0], _CALLS[event]))
os.stat, os.lstat = _counted(os.stat), _counted(os.lstat)
runpy.run_path(str(REPOSITORY / "launcher/train.py"), run_name="__main__")
