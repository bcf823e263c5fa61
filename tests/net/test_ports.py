"""MCCL_PORT_BASE, ports that others hold, and firewalls between the hosts."""

from __future__ import annotations

import sys

import pytest
from hosts import Host, Network, firewall
from team import Seat, Team, fail_alone, listens_on, seats

pytestmark = pytest.mark.net

HOLD = """\
import socket, sys
held = [socket.create_server((sys.argv[1], int(port))) for port in sys.argv[2:]]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def pair(network: Network) -> list[Host]:
    a, b = network.host("a"), network.host("b")
    network.cable(a, b, ("10.9.0.1/24", "10.9.0.2/24"))
    return [a, b]


def hold(host: Host, address: str, *ports: int) -> None:
    """Another program on `host` listens on these ports."""
    command = [sys.executable, "-c", HOLD, address, *map(str, ports)]
    process = host.start(*command, stdin=-1, stdout=-1)
    assert process.stdout and process.stdout.readline() == "held\n"


def test_taken(pair: list[Host]) -> None:
    """On one host somebody holds the first two ports; it takes the third, the other host the first."""
    a, b = pair
    hold(a, "0.0.0.0", 29600, 29601)
    team = Team(*seats([a, b, a, b])).join()
    assert {"10.9.0.1:29602", "10.9.0.1:29603"} <= a.listeners()
    assert {"10.9.0.2:29600", "10.9.0.2:29601"} <= b.listeners()
    team.leave()


@pytest.mark.parametrize("held", ["127.0.0.1", "10.9.0.1"])
def test_taken_on_one_address(pair: list[Host], held: str) -> None:
    """A process has one port on all its addresses, so that firewalls need one rule."""
    a, _ = pair
    hold(a, held, 29600)
    team = Team(*seats(pair)).join()
    assert a.listeners() == {f"{held}:29600", "127.0.0.1:29601", "10.9.0.1:29601"}
    team.leave()


def test_range(pair: list[Host]) -> None:
    a, _ = pair
    assert listens_on(a, MCCL_IFNAME="cable0", MCCL_PORT_BASE="41000-41010") == {"10.9.0.1:41000"}
    hold(a, "0.0.0.0", 41000)
    assert listens_on(a, MCCL_IFNAME="cable0", MCCL_PORT_BASE="41000-41001") == {"10.9.0.1:41001"}


def test_range_with_none_left(pair: list[Host]) -> None:
    a, _ = pair
    hold(a, "10.9.0.1", 41000, 41001, 41002)
    error = fail_alone(a, MCCL_IFNAME="cable0", MCCL_PORT_BASE="41000-41002")
    for part in ("41000-41002", "10.9.0.1", "in use", "MCCL_PORT_BASE"):
        assert part in error
    # The culprit need not be the first address.
    error = fail_alone(a, MCCL_PORT_BASE="41000-41002")
    assert "10.9.0.1" in error


def test_bad_range(pair: list[Host]) -> None:
    for text in ("41010-41000", "0-10", "70000", "29600-", "-1"):
        error = fail_alone(pair[0], MCCL_PORT_BASE=text)
        assert error.startswith("MCCLConfigError: ")
        assert f"MCCL_PORT_BASE={text}" in error


@pytest.mark.parametrize("otherwise", ["blackhole", "prohibit"])
def test_firewall_with_a_range_open(pair: list[Host], otherwise: str) -> None:
    """One port for a process is all that has to be open."""
    for host in pair:
        firewall(host, "cable0", "41000-41001", otherwise)
    a, b = pair
    team = Team(*seats([a, b, a, b], MCCL_PORT_BASE="41000-41001")).join()
    team.leave()


@pytest.mark.parametrize("otherwise", ["blackhole", "prohibit"])
def test_firewall_without_the_setting(pair: list[Host], otherwise: str) -> None:
    """The error says which address and port could not be reached, and what to set."""
    for host in pair:
        firewall(host, "cable0", "41000-41001", otherwise)
    team = Team(*seats(pair), timeout_s=3)
    error = team.ranks[1].listen()["error"]
    for part in ("10.9.0.1:29600", "MCCL_PORT_BASE", "firewall"):
        assert part in error
    assert team.ranks[1].said["seconds"] < 5


def test_firewall_around_one_of_three(network: Network) -> None:
    """All reach rank 0, but rank 2 cannot reach rank 1: both say so within MCCL_CONNECT_TIMEOUT_MS."""
    hosts = network.switch("10.9.0.1/24", "10.9.0.2/24", "10.9.0.3/24")
    firewall(hosts[1], "cable0", "29600", "blackhole")
    env = {"MCCL_CONNECT_TIMEOUT_MS": "2000"}
    closed = Seat(hosts[1], {**env, "MCCL_PORT_BASE": "41000"})
    team = Team(Seat(hosts[0], env), closed, Seat(hosts[2], env))
    said = [rank.listen() for rank in team.ranks]
    assert all("error" in answer and answer["seconds"] < 5 for answer in said), said
    for part in ("rank 2", "rank 1", "10.9.0.2:41000", "MCCL_CONNECT_TIMEOUT_MS", "firewall"):
        assert part in said[2]["error"]
