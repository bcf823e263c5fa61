"""Three hosts: on a switch, and as a triangle of cables in which no address is known to all."""

from __future__ import annotations

import itertools

import pytest
from hosts import Network
from team import Team, seats

pytestmark = pytest.mark.net


@pytest.mark.parametrize("ranks_per_host", [1, 2])
@pytest.mark.parametrize("ifname", ["", "cable0"], ids=["no-setting", "ifname"])
def test_switch(network: Network, ranks_per_host: int, ifname: str) -> None:
    hosts = network.switch("10.9.0.1/24", "10.9.0.2/24", "10.9.0.3/24")
    # Several ranks on each host: long all-reduces go in two levels.
    team = Team(*seats(hosts * ranks_per_host, MCCL_IFNAME=ifname, MCCL_LOG_LEVEL="INFO")).join()
    assert {"10.9.0.2", "10.9.0.3"} <= hosts[0].peers(29600)
    assert {"10.9.0.1", "10.9.0.2"} <= hosts[2].peers(29600)
    team.leave()
    assert team.logs().count("on 3 hosts") == 3 * ranks_per_host


@pytest.mark.parametrize(
    "order", list(itertools.permutations(range(3))), ids=lambda o: "".join("abc"[i] for i in o)
)
@pytest.mark.parametrize("ifname", ["", "cable0,cable1"], ids=["no-setting", "ifname"])
def test_triangle(network: Network, order: tuple[int, ...], ifname: str) -> None:
    hosts = network.triangle()
    team = Team(*seats([hosts[i] for i in order], MCCL_IFNAME=ifname)).join()
    assert hosts[0].peers(29600) == {"10.1.0.2", "10.2.0.3"}
    assert hosts[1].peers(29600) == {"10.1.0.1", "10.3.0.3"}
    assert hosts[2].peers(29600) == {"10.2.0.1", "10.3.0.2"}
    team.leave()
