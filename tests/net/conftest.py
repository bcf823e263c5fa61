"""The `network` fixture, and a limit for every test: when it passes, what the test started is killed."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from hosts import Network, remove_leftovers

LIMIT_S = 30


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"limit(seconds): wall-clock limit of a test instead of {LIMIT_S} s")


@pytest.fixture(scope="session", autouse=True)
def _root_and_iproute2() -> None:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("ss"):
        pytest.skip("needs root and iproute2 for network namespaces")
    signal.signal(signal.SIGTERM, lambda *_: pytest.exit("terminated"))
    remove_leftovers()


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


@pytest.fixture(autouse=True)
def _limit(request: pytest.FixtureRequest, network: Network) -> Iterator[None]:
    # It asks for the network so that the clock stops before the network is taken down.
    marker = request.node.get_closest_marker("limit")
    seconds = marker.args[0] if marker else LIMIT_S

    def expire(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"{request.node.name} took longer than its limit of {seconds} s")

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
