"""Field reports as tests. Fixture `pool` as in tests/python; its ranks also import modules of this folder."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))

from zygote import Zygote  # noqa: E402

from ranks import Pool  # noqa: E402


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    pool = Pool.with_modules(HERE)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    zygote = Zygote()
    yield zygote
    zygote.close()
