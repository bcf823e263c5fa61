"""Fixtures: `pool` of processes for ranks, for all tests of a session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
