"""MCCL_CHANNELS: two cables between two hosts carry one message."""

from __future__ import annotations

import re

import pytest
from hosts import Host, Network
from team import Team, seats

pytestmark = pytest.mark.net

BIG = 8 << 20  # int64: 64 MiB
BYTES = BIG * 8  # what each of two ranks sends for it


@pytest.fixture
def pair(network: Network) -> list[Host]:
    """Two cables of 1 Gbit/s, each with a subnet of its own."""
    a, b = network.host("a"), network.host("b")
    for subnet in ("10.1.0", "10.2.0"):
        for host, name in zip((a, b), network.cable(a, b, (f"{subnet}.1/24", f"{subnet}.2/24"))):
            host.shape(name, "1gbit")
    return [a, b]


def shares(pair: list[Host], **env: str) -> list[float]:
    """Which part of a big all-reduce's bytes left rank 1 by cable0, cable1."""
    _, b = pair
    before = [b.sent(name) for name in ("cable0", "cable1")]
    team = Team(*seats(pair, MCCL_LOG_LEVEL="INFO", **env), big=BIG).join()
    found = [(b.sent(name) - old) / BYTES for name, old in zip(("cable0", "cable1"), before)]
    team.leave()
    seconds = max(rank.said["big_seconds"] for rank in team.ranks)
    print(f"{env}: {seconds:.3f} s, shares {found[0]:.2f} and {found[1]:.2f}")
    print(sorted(re.findall(r"data link to rank 0 by [\d.]+", team.logs())))
    return found


def test_one_channel(pair: list[Host]) -> None:
    by_cable0, by_cable1 = shares(pair)
    assert by_cable0 > 1.0
    assert by_cable1 < 0.01


@pytest.mark.parametrize("channels", ["2", "4"])
@pytest.mark.parametrize("ifname", ["", "cable0,cable1"], ids=["no-setting", "ifname"])
def test_both_cables(pair: list[Host], channels: str, ifname: str) -> None:
    by_cable0, by_cable1 = shares(pair, MCCL_CHANNELS=channels, MCCL_IFNAME=ifname)
    assert 0.45 < by_cable0 < 0.75
    assert 0.45 < by_cable1 < 0.75


def test_named_cable(pair: list[Host]) -> None:
    """Channels keep to the interface that was asked for."""
    by_cable0, by_cable1 = shares(pair, MCCL_CHANNELS="2", MCCL_IFNAME="cable1")
    assert by_cable0 < 0.01
    assert by_cable1 > 1.0


def test_dead_cable(network: Network, pair: list[Host]) -> None:
    """Both hosts have 10.3.0.0/24 too, and nothing between: its channel takes a cable that works."""
    for host, address in zip(pair, ("10.3.0.1/24", "10.3.0.2/24")):
        network.dead_end(host, "aside", address)
    by_cable0, by_cable1 = shares(pair, MCCL_CHANNELS="3")
    assert by_cable0 + by_cable1 > 1.0
    assert min(by_cable0, by_cable1) > 0.3


def test_two_addresses_of_one_cable(network: Network) -> None:
    """IPv4 and IPv6 on the same cable count once: the other cable gets its channel."""
    a, b = network.host("a", ipv6=True), network.host("b", ipv6=True)
    network.cable(a, b, ("10.1.0.1/24", "10.1.0.2/24"), ("fd00:1::1/64", "fd00:1::2/64"))
    network.cable(a, b, ("10.2.0.1/24", "10.2.0.2/24"), ("fd00:2::1/64", "fd00:2::2/64"))
    assert all(0.45 < share < 0.75 for share in shares([a, b], MCCL_CHANNELS="2"))
