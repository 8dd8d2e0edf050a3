"""What the launcher logs, in processes without pytest's fixtures."""

import contextlib
import logging


@contextlib.contextmanager
def logged():
    """Messages that the launcher logs inside."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("launcher")
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
