"""Fixtures: `pool` of processes for ranks, as in tests/python, whose helpers can be imported here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "python"))

from ranks import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool.with_modules(HERE)
    yield pool
    pool.close()
