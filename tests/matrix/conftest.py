"""What the tests found, as a table at the end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

TABLE = pytest.StashKey[dict[str, str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TABLE] = {}


@pytest.fixture(scope="session")
def table(pytestconfig: pytest.Config) -> dict[str, str]:
    """Lines, by version."""
    return pytestconfig.stash[TABLE]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    lines = config.stash[TABLE].values()
    if lines:
        terminalreporter.section("what torch asks of groups, Works, backends and options")
        terminalreporter.write_line("torch    calls  names  C++  new since the version before")
    for line in lines:
        terminalreporter.write_line(line)
