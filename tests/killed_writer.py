"""A process that is killed while it writes."""

import os
import sys


def killed(write, folder, moment):
    """Calls `write` in a child process that exits before one of the operations on files of a folder:
    the first one has the number 0. Returns its exit status: 9, or 0 if there are fewer operations.
    """
    left = [moment]

    def hook(event, arguments):
        if event in ("open", "os.rename", "os.mkdir") and str(folder) in str(arguments[0]):
            left[0] -= 1
            if left[0] < 0:
                os._exit(9)

    child = os.fork()
    if child == 0:
        try:
            sys.addaudithook(hook)
            write()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
