"""The table of what each reader read, at the end of a session."""

import pytest

_FIGURES: list[tuple[str, ...]] = []


@pytest.fixture
def figures():
    """Adds a line to the table: reader, model, export, figure."""
    return lambda *line: _FIGURES.append(line)


def pytest_terminal_summary(terminalreporter):
    if _FIGURES:
        terminalreporter.section("what the readers read")
        for line in _FIGURES:
            terminalreporter.write_line(f"| {' | '.join(line)} |")
