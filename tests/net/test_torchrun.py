"""The example under the guide's own command lines, one node on each host."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hosts import Host, Network, Process

pytestmark = pytest.mark.net

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_ddp.py"
TORCHRUN = Path(sys.executable).with_name("torchrun")


def torchrun(
    hosts: Sequence[Host], master_addr: str, *arguments: str, env: Mapping[str, str] | None = None
) -> list[Process]:
    """Starts the guide's line on every host; only --node_rank differs."""
    pytest.importorskip("sklearn")
    assert TORCHRUN.exists()
    return [
        host.start(
            str(TORCHRUN), "--nproc_per_node=1", f"--nnodes={len(hosts)}", f"--node_rank={rank}",
            f"--master_addr={master_addr}", "--master_port=29500", str(EXAMPLE), *arguments,
            env={"MCCL_LOG_LEVEL": "INFO", **(env or {})}, stdout=subprocess.PIPE,
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def finish(nodes: Sequence[Process]) -> str:
    """Output of the first node, once all have ended well."""
    output = [node.communicate()[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0] * len(nodes)
    return output[0]


def peers_of(node: Process) -> set[str]:
    """By which addresses this node's data went, according to its log."""
    return set(re.findall(r"data link to rank \d+ by (\S+):\d+(?:, \w+)?\n", node.stderr_text()))


@pytest.mark.limit(120)
def test_guide(network: Network) -> None:
    """169.254 addresses, all epochs. Names as they are: one is 127.0.1.1, one is known to nobody."""
    a, b = network.host("a", ipv6=True), network.host("b", ipv6=True)
    network.cable(a, b, ("169.254.7.1/16", "169.254.9.2/16"))
    b.file("hosts", "127.0.0.1 localhost\n")
    nodes = torchrun([a, b], "169.254.7.1")
    output = finish(nodes)
    accuracy = re.search(r"held-out accuracy ([\d.]+) %", output)
    assert accuracy and float(accuracy[1]) >= 95, output
    assert re.search(r"weights bit-identical on all 2 ranks: sha256 [0-9a-f]{64}\n", output), output
    assert peers_of(nodes[0]) == {"169.254.9.2"}
    assert peers_of(nodes[1]) == {"169.254.7.1"}


@pytest.mark.limit(60)
def test_ipv6_only(network: Network) -> None:
    a, b = network.host("a", ipv6=True), network.host("b", ipv6=True)
    network.cable(a, b, ("fd00::1/64", "fd00::2/64"))
    for host in (a, b):
        host.ip("addr del 127.0.0.1/8 dev lo")
    nodes = torchrun([a, b], "fd00::1", "--epochs=1")
    assert "weights bit-identical on all 2 ranks" in finish(nodes)
    assert peers_of(nodes[1]) == {"[fd00::1]"}


@pytest.mark.limit(90)
def test_three_hosts_by_ifname(network: Network) -> None:
    """The store is reached by one network, the data goes by the one that is named; 29600 is taken on c."""
    hosts = network.switch("10.9.0.1/24", "10.9.0.2/24", "10.9.0.3/24")
    for number, (host, other) in enumerate(zip(hosts, hosts[1:] + hosts[:1])):
        network.cable(host, other, (f"10.{number}.0.1/24", f"10.{number}.0.2/24"))
    taken = "import socket, time; held = socket.create_server(('', 29600)); time.sleep(600)"
    hosts[2].start(sys.executable, "-c", taken)
    nodes = torchrun(hosts, "10.9.0.1", "--epochs=1", env={"MCCL_IFNAME": "cable1,cable2"})
    assert "weights bit-identical on all 3 ranks" in finish(nodes)
    assert [peers_of(node) for node in nodes] == [
        {"10.0.0.2", "10.2.0.1"},
        {"10.0.0.1", "10.1.0.2"},
        {"10.1.0.1", "10.2.0.2"},
    ]
    assert re.search(r"listening on 10\.1\.0\.2:29601\n", nodes[2].stderr_text())


@pytest.mark.limit(60)
def test_ifname_wrong(network: Network) -> None:
    """Both nodes end soon after torch is loaded, with an error that names variable and interfaces."""
    a, b = network.host("a"), network.host("b")
    network.cable(a, b, ("169.254.7.1/16", "169.254.9.2/16"))
    nodes = torchrun([a, b], "169.254.7.1", env={"MCCL_IFNAME": "en5"})
    nodes[0].communicate()
    started = time.monotonic()
    nodes[1].communicate()
    assert time.monotonic() - started < 10
    for node in nodes:
        assert node.returncode == 1
    assert "MCCL_IFNAME=en5: no interface that is up fits." in nodes[0].stderr_text()
    assert "cable0 169.254.7.1" in nodes[0].stderr_text()
