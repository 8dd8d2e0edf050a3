"""Captures log messages of the launcher in processes without pytest fixtures."""

import contextlib
import logging


@contextlib.contextmanager
def logged():
    """Yields a list that collects the messages logged by the launcher inside the context."""
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
