"""MCCL_IFNAME: every accepted form, every way to get it wrong, each with an error that helps."""

from __future__ import annotations

import pytest
from hosts import Host, Network, wait_until
from team import QUICK_S, Seat, Team, fail_alone, listens_on, seats

pytestmark = pytest.mark.net


@pytest.fixture
def pair(network: Network) -> list[Host]:
    """Two cables: cable0 is 10.9.0.0/24, cable1 169.254.0.0/16; and docker0 on the first host."""
    a, b = network.host("a"), network.host("b")
    network.cable(a, b, ("10.9.0.1/24", "10.9.0.2/24"))
    network.cable(a, b, ("169.254.7.1/16", "169.254.9.2/16"))
    network.bridge(a, "docker0", "172.17.0.1/16")
    return [a, b]


@pytest.mark.parametrize("ifname", ["cable1", "=cable1", "169.254.0.0/16", "^lo,docker,cable0"])
def test_right(pair: list[Host], ifname: str) -> None:
    """Two ranks on each host, so that links inside a host are there as well."""
    a, b = pair
    team = Team(*seats([a, b, a, b], MCCL_IFNAME=ifname)).join()
    assert a.listeners() == {"169.254.7.1:29600", "169.254.7.1:29601"}
    assert a.peers(29600) == {"169.254.7.1", "169.254.9.2"}
    team.leave()


CABLE0, CABLE1, DOCKER0, LO = "10.9.0.1", "169.254.7.1", "172.17.0.1", "127.0.0.1"


@pytest.mark.parametrize(
    ("ifname", "addresses"),
    [
        ("", {LO, CABLE0, CABLE1}),
        (" ", {LO, CABLE0, CABLE1}),
        ("cable", {CABLE0, CABLE1}),
        ("cable0,cable1", {CABLE0, CABLE1}),
        ("cable0, cable1", {CABLE0, CABLE1}),
        ("nosuch,cable1", {CABLE1}),
        ("=cable0,169.254.7.1", {CABLE0, CABLE1}),
        ("169.254.7.1", {CABLE1}),
        ("10.9.0.0/24", {CABLE0}),
        ("10.9.0.77/24", {CABLE0}),
        ("10.8.0.0/15", {CABLE0}),
        ("0.0.0.0/0", {LO, CABLE0, CABLE1, DOCKER0}),
        ("^lo,docker", {CABLE0, CABLE1}),
        ("^lo,^docker", {CABLE0, CABLE1}),
        ("^=cable", {LO, CABLE0, CABLE1, DOCKER0}),
        ("^127.0.0.0/8,172.17.0.1", {CABLE0, CABLE1}),
        ("docker0", {DOCKER0}),
        ("lo", {LO}),
    ],
)
def test_forms(pair: list[Host], ifname: str, addresses: set[str]) -> None:
    assert listens_on(pair[0], MCCL_IFNAME=ifname) == {f"{address}:29600" for address in addresses}


@pytest.mark.parametrize(
    "ifname",
    ["nosuch0", "=cable", "10.9.0.2", "10.9.1.0/24", "fd00::/64", "^lo,docker,cable", ",", "^"]
    + ["10.9.0.0/", "10.9.0.0/x", "10.9.0.0/24x", "10.9.0.0/33", "10.9.0.0/-1", "cable0/24", "cable0:29600"],
)
def test_wrong(pair: list[Host], ifname: str) -> None:
    """At once; names the variable, its value, the accepted forms, and what there is to choose from."""
    error = fail_alone(pair[0], MCCL_IFNAME=ifname)
    assert error.startswith("MCCLConfigError: ")
    assert f"MCCL_IFNAME={ifname}: " in error
    for offer in ("lo 127.0.0.1", "cable0 10.9.0.1", "cable1 169.254.7.1", "docker0 172.17.0.1"):
        assert offer in error
    for form in ("prefix", "=exact", "^excluded", "address", "10.0.0.0/24"):
        assert form in error


def test_interface_that_is_down(pair: list[Host]) -> None:
    a, _ = pair
    a.ip("link set cable0 down")
    error = fail_alone(a, MCCL_IFNAME="cable0")
    assert "MCCL_IFNAME=cable0: " in error
    assert "cable0 10.9.0.1 (down)" in error
    assert "cable1 169.254.7.1," in error


def test_interface_whose_other_end_is_down(pair: list[Host]) -> None:
    """No carrier: the cable is out."""
    a, b = pair
    b.ip("link set cable0 down")
    wait_until(lambda: "NO-CARRIER" in a.ip("link show cable0"))
    assert "cable0 10.9.0.1 (down)" in fail_alone(a, MCCL_IFNAME="cable0")


def test_interface_without_address(pair: list[Host]) -> None:
    a, _ = pair
    a.ip("addr flush dev cable0")
    error = fail_alone(a, MCCL_IFNAME="cable0")
    assert "MCCL_IFNAME=cable0: " in error
    assert "cable1 169.254.7.1" in error


def test_wrong_on_one_host_only(pair: list[Host]) -> None:
    """The one that is wrong says so at once; the other one names who is missing when its time is over."""
    a, b = pair
    team = Team(Seat(a, {}), Seat(b, {"MCCL_IFNAME": "nosuch0"}), timeout_s=2)
    wrong = team.ranks[1].listen()
    assert wrong["type"] == "MCCLConfigError"
    assert "MCCL_IFNAME=nosuch0" in wrong["error"]
    assert wrong["seconds"] < QUICK_S
    waited = team.ranks[0].listen()
    assert waited["type"] == "MCCLTimeoutError"
    assert "rank 1 to check in" in waited["error"]
    assert 1.5 < waited["seconds"] < 4


def test_wrong_in_a_way_that_only_the_other_host_can_notice(network: Network, pair: list[Host]) -> None:
    """An interface that exists and leads nowhere: the error has the address that was tried."""
    a, b = pair
    network.dead_end(a, "aside", "10.0.0.1/24")
    team = Team(Seat(a, {"MCCL_IFNAME": "aside"}), Seat(b, {}), timeout_s=3)
    failed = team.ranks[1].listen()
    assert "10.0.0.1:29600: " in failed["error"]
    assert "MCCL_IFNAME" in failed["error"]


def test_listen_addr_wrong(pair: list[Host]) -> None:
    error = fail_alone(pair[0], MCCL_LISTEN_ADDR="10.9.0.2")
    assert "MCCL_LISTEN_ADDR=10.9.0.2: " in error
    assert "cable0 10.9.0.1" in error
