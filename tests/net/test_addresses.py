"""Without any setting the group uses a path that works, whatever else the hosts have, and no other."""

from __future__ import annotations

import pytest
from hosts import Network
from team import Seat, Team, listens_on, seats

pytestmark = pytest.mark.net

LINK_LOCAL = ("169.254.7.1/16", "169.254.9.2/16")


def test_link_local_cable_beside_a_dead_end(network: Network) -> None:
    """Only 169.254 leads to the other host; 10.0.0.0/24, which both have too, leads nowhere."""
    a, b = network.host("a"), network.host("b")
    network.dead_end(a, "aside", "10.0.0.1/24")
    network.dead_end(b, "aside", "10.0.0.2/24")
    network.cable(a, b, LINK_LOCAL)
    team = Team(*seats([a, b])).join(within_s=3)
    assert a.peers(29600) == {"169.254.9.2"}
    assert b.peers(29600) == {"169.254.7.1"}
    team.leave()


def test_bridges_with_equal_addresses(network: Network) -> None:
    """docker0 and virbr0 have the same addresses everywhere and join nothing."""
    a, b = network.host("a"), network.host("b")
    for host in (a, b):
        network.bridge(host, "docker0", "172.17.0.1/16")
        network.bridge(host, "virbr0", "192.168.122.1/24")
    network.cable(a, b, ("10.9.0.1/24", "10.9.0.2/24"))
    team = Team(*seats([a, b])).join()
    assert a.listeners() == {"127.0.0.1:29600", "10.9.0.1:29600"}
    assert a.peers(29600) == {"10.9.0.2"}
    team.leave()


def test_two_interfaces_with_equal_addresses(network: Network) -> None:
    """The same, where the address that both hosts have sits on an ordinary interface."""
    a, b = network.host("a"), network.host("b")
    for host in (a, b):
        network.dead_end(host, "aside", "192.168.1.1/24")
    network.cable(a, b, ("10.9.0.1/24", "10.9.0.2/24"))
    team = Team(*seats([a, b])).join()
    assert b.peers(29600) == {"10.9.0.1"}
    team.leave()


@pytest.mark.parametrize("picky", [0, 1])
def test_two_cables_and_one_host_that_names_one(network: Network, picky: int) -> None:
    """Each listener publishes where it listens, so the ranks need not have the same idea."""
    a, b = network.host("a"), network.host("b")
    network.cable(a, b, ("10.1.0.1/24", "10.1.0.2/24"))
    network.cable(a, b, ("10.2.0.1/24", "10.2.0.2/24"))
    env: list[dict[str, str]] = [{}, {}]
    env[picky] = {"MCCL_IFNAME": "cable1"}
    team = Team(Seat(a, env[0]), Seat(b, env[1])).join()
    assert a.peers(29600) == {"10.2.0.2"}
    assert b.peers(29600) == {"10.2.0.1"}
    assert (a, b)[picky].listeners() == {("10.2.0.1:29600", "10.2.0.2:29600")[picky]}
    team.leave()


def test_routed_peer(network: Network) -> None:
    """No subnet in common: a router between the hosts, and an interface that looks nearer but is not."""
    a, router, b = network.host("a"), network.host("r"), network.host("b")
    router.sysctl("ipv4/ip_forward", "1")
    network.cable(a, router, ("10.1.0.1/24", "10.1.0.254/24"))
    network.cable(router, b, ("10.2.0.254/24", "10.2.0.2/24"))
    a.ip("route add default via 10.1.0.254")
    b.ip("route add default via 10.2.0.254")
    network.dead_end(a, "aside", "10.77.0.1/24")
    network.dead_end(b, "aside", "10.77.0.2/24")
    team = Team(*seats([a, b])).join(within_s=3)
    assert b.peers(29600) == {"10.1.0.1"}
    team.leave()


def test_local_job_stays_on_loopback(network: Network) -> None:
    """Where the launcher says that all ranks are here, nobody else can reach them."""
    a, b = network.host("a"), network.host("b")
    network.cable(a, b, LINK_LOCAL)
    for env in ({"MASTER_ADDR": "127.0.0.1"}, {"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "2"}):
        team = Team(*seats([a, a], **env)).join()
        assert a.listeners() == {"127.0.0.1:29600", "127.0.0.1:29601"}
        team.leave()


def test_listeners_are_no_more_than_needed(network: Network) -> None:
    """One socket for each published address; never the wildcard, and no loopback beside a named interface."""
    a, b = network.host("a", ipv6=True), network.host("b", ipv6=True)
    network.cable(a, b, LINK_LOCAL)
    a.ip("addr add fd00::1/64 dev cable0")
    assert listens_on(a, MCCL_IFNAME="169.254.7.1") == {"169.254.7.1:29600"}
    assert listens_on(a, MCCL_LISTEN_ADDR="fd00::1") == {"[fd00::1]:29600"}
    assert listens_on(a, MCCL_LISTEN_ADDR="loopback") == {"127.0.0.1:29600"}
    link_local = a.ip("-6 -o addr show dev cable0 scope link").split()[3].split("/")[0]
    everything = {"127.0.0.1", "169.254.7.1", "[fd00::1]", f"[{link_local}]%cable0"}
    assert listens_on(a) == {f"{address}:29600" for address in everything}


def test_host_without_network(network: Network) -> None:
    """lo and nothing else, and a launcher that says nothing."""
    a = network.host("a")
    Team(*seats([a, a])).join().leave()
