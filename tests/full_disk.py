"""A small file system that a test fills."""

import errno
import os
import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def full_disk(folder, *, mebibytes):
    """A folder on a file system of its own. Skips the test where mounting is not possible; in CI
    (CI_REQUIRES_MOUNT) it then fails."""
    folder.mkdir(parents=True)
    options = ["-t", "tmpfs", "-o", f"size={mebibytes}m,nr_inodes=500", "none", folder]
    mounted = subprocess.run(["mount", *options], capture_output=True, text=True)
    if mounted.returncode:
        message = f"no file system of its own can be mounted: {mounted.stderr.strip()}"
        assert os.environ.get("CI_REQUIRES_MOUNT") != "1", message
        pytest.skip(message)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(folder):
    """Fills the file system. Returns a function that frees the space again."""
    file = folder / "filler"
    with file.open("wb", buffering=0) as filler:
        try:
            while True:
                filler.write(b"x" * 4096)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
    return file.unlink
