"""The console script, and `python -m launcher`."""

import sys


def main() -> int:
    """Runs the command. A request to stop ends it without a traceback, also while modules are
    imported."""
    from launcher.cli.requests import handle_requests

    imported = handle_requests()
    from launcher.cli.main import main

    imported()
    return main()


if __name__ == "__main__":
    sys.exit(main())
