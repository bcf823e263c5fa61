"""Host names do not matter: no address comes from a look-up, and none delays the start."""

from __future__ import annotations

import pytest
from hosts import Network
from team import Seat, Team

pytestmark = pytest.mark.net


def test_own_name_is_loopback_in_hosts_file(network: Network) -> None:
    """Debian's default: the own name is 127.0.1.1, which is no good to others."""
    a, b = network.host("a"), network.host("b")
    network.cable(a, b, ("10.9.0.1/24", "10.9.0.2/24"))
    for host in (a, b):
        looked_up = host.start("getent", "hosts", host.name, stdout=-1).communicate()[0]
        assert looked_up.split()[0] == "127.0.1.1"
    team = Team(Seat(a, {}), Seat(b, {})).join()
    assert a.peers(29600) == {"10.9.0.2"}
    team.leave()


def test_name_that_nobody_knows(network: Network) -> None:
    """A .local name, and a name server that never answers: asking it would take 5 s and more."""
    a, b = network.host("a"), network.host("b")
    network.cable(a, b, ("10.9.0.1/24", "10.9.0.2/24"))
    for host in (a, b):
        host.file("hosts", "127.0.0.1 localhost\n")
        host.file("resolv.conf", "nameserver 10.9.0.99\n")
    name = "no.such.local"
    Team(Seat(a, {}, name), Seat(b, {}, name)).join().leave()
    local = {"MASTER_ADDR": "127.0.0.1"}
    Team(Seat(a, local, name), Seat(a, local, name)).join().leave()
