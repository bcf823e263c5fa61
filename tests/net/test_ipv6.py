"""Hosts that have IPv6 and nothing else."""

from __future__ import annotations

import pytest
from hosts import Host, Network, wait_until
from team import Team, seats

pytestmark = pytest.mark.net


def ipv6_pair(network: Network, *addresses: tuple[str, str], loopback4: bool) -> tuple[Host, Host]:
    a, b = network.host("a", ipv6=True), network.host("b", ipv6=True)
    network.cable(a, b, *addresses)
    for host in (a, b):
        if not loopback4:
            host.ip("addr del 127.0.0.1/8 dev lo")
        assert ("127.0.0.1" in host.ip("addr show")) == loopback4
    return a, b


@pytest.mark.parametrize("loopback4", [True, False], ids=["with-127.0.0.1", "without-127.0.0.1"])
def test_unique_local_addresses(network: Network, loopback4: bool) -> None:
    """fd00::/64 between the hosts; two ranks on each, whose link may not count on 127.0.0.1."""
    a, b = ipv6_pair(network, ("fd00::1/64", "fd00::2/64"), loopback4=loopback4)
    team = Team(*seats([a, b, a, b])).join()
    assert "[fd00::1]:29600" in a.listeners()
    assert "[fd00::2]" in a.peers(29600)
    team.leave()


def test_ifname(network: Network) -> None:
    a, b = ipv6_pair(network, ("fd00::1/64", "fd00::2/64"), loopback4=False)
    team = Team(*seats([a, b], MCCL_IFNAME="fd00::/64")).join()
    assert a.listeners() == {"[fd00::1]:29600"}
    assert b.peers(29600) == {"[fd00::1]"}
    team.leave()


def test_link_local_addresses(network: Network) -> None:
    """fe80::/64 on every interface: the address does not say which of them leads to the peer."""
    a, b = ipv6_pair(network, loopback4=True)
    for host in (a, b):
        host.ip("link add aside type veth peer name aside-end")
        host.ip("link set aside up")
        host.ip("link set aside-end up")
        # The kernel makes them once the link is there, up to a second later.
        wait_until(lambda host=host: host.ip("-6 -o addr show scope link").count("fe80::") == 3)
    team = Team(*seats([a, b])).join(within_s=3)
    assert all(peer.startswith("[fe80::") for peer in a.peers(29600))
    team.leave()


def test_job_on_one_host_without_ipv4(network: Network) -> None:
    """The launcher says that all ranks are here, and the only loopback address is ::1."""
    a = network.host("a", ipv6=True)
    a.ip("addr del 127.0.0.1/8 dev lo")
    team = Team(*seats([a, a], LOCAL_WORLD_SIZE="2", WORLD_SIZE="2")).join()
    assert a.listeners() == {"[::1]:29600", "[::1]:29601"}
    team.leave()


def test_host_without_ipv6(network: Network) -> None:
    """A group of one host that has no IPv6 and one that has both."""
    a, b = network.host("a"), network.host("b", ipv6=True)
    network.cable(a, b, ("10.9.0.1/24", "10.9.0.2/24"))
    b.ip("addr add fd00::2/64 dev cable0")
    for order in ([a, b], [b, a]):
        team = Team(*seats(order)).join()
        assert b.peers(29600) == {"10.9.0.1"}
        team.leave()
