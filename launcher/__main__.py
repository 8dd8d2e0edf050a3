"""The console script, and `python -m launcher`."""

import signal
import sys


def main() -> int:
    """Runs the command. Ctrl-C ends it without a traceback, also while modules are imported."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from launcher.cli.main import main

    signal.signal(signal.SIGINT, handler)
    return main()


if __name__ == "__main__":
    sys.exit(main())
