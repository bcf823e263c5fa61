"""Fixtures: `pool` for ordinary checks, `own_pool` for those that kill ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ranks import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def own_pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()
