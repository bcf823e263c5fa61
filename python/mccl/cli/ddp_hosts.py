"""Two hosts played by network namespaces, joined by a cable of a given rate. Linux, root, iproute2.

    +------- host 0 --------+                    +------- host 1 --------+
    | lo   cable0 10.73.0.1 ----- tbf, RATE ------ 10.73.0.2 cable0   lo |
    +-----------------------+                    +-----------------------+

The namespaces have no names: each lives as long as processes in it. One that waits for the end of its input
keeps it alive, so when the maker ends, also by kill -9, the kernel takes namespaces and cable away.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence

INTERFACE = "cable0"
# One interval of a slow timer's worth of bytes at 5 Gbit/s: a small burst would let the shaper, which has no
# timer of its own per packet, fall behind its rate.
BURST = "4mb"
LATENCY = "50ms"  # of the queue before it drops; 30 MB at 5 Gbit/s, more than any socket has in flight
_LIMIT_S = 10


def rate_of(text: str) -> float:
    """Bits a second from '5gbit', '800mbit', '100kbit'."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.strip().lower())
    if not match or float(match[1]) <= 0:
        raise ValueError(f"{text!r}: expected a rate such as 5gbit or 800mbit")
    return float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]


def missing() -> str:
    """What is absent for shaped links; empty if nothing."""
    if not sys.platform.startswith("linux"):
        return "Linux"
    if os.geteuid() != 0:
        return "root"
    absent = [name for name in ("ip", "tc", "unshare", "nsenter") if not shutil.which(name)]
    return "the commands " + ", ".join(absent) + " (packages iproute2, util-linux)" if absent else ""


class Hosts:
    """Both hosts; close() takes them down."""

    def __init__(self, rate: str) -> None:
        self._keepers: list[subprocess.Popen[bytes]] = []
        try:
            for _ in range(2):
                self._keepers.append(self._keeper())
            self._join(rate)
        except BaseException:
            self.close()
            raise

    def _keeper(self) -> subprocess.Popen[bytes]:
        # /sys shows the interfaces of the namespace in which it was mounted.
        script = "mount -t sysfs sysfs /sys; ip link set lo up; echo; exec cat"
        keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "sh", "-ec", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the maker
        )
        assert keeper.stdout is not None
        if not keeper.stdout.readline():
            raise RuntimeError("cannot make a network namespace; what unshare or mount said is above")
        return keeper

    def _join(self, rate: str) -> None:
        first, second = self._keepers
        self._run(
            0, "ip", "link", "add", INTERFACE, "type", "veth", "peer", INTERFACE, "netns", str(second.pid)
        )
        for host in range(2):
            self._run(host, "ip", "addr", "add", f"10.73.0.{host + 1}/24", "dev", INTERFACE)
            self._run(host, "ip", "link", "set", INTERFACE, "up")
            shaper = f"tbf rate {rate} burst {BURST} latency {LATENCY}"
            self._run(host, "tc", "qdisc", "add", "dev", INTERFACE, "root", *shaper.split())
        assert first.poll() is None

    def inside(self, host: int) -> Sequence[str]:
        """What to put before a command so that it runs on this host."""
        return "nsenter", f"--target={self._keepers[host].pid}", "--net", "--mount", "--"

    def _run(self, host: int, *command: str) -> None:
        done = subprocess.run(
            [*self.inside(host), *command], capture_output=True, text=True, timeout=_LIMIT_S
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")

    def close(self) -> None:
        """Ends what keeps the namespaces; processes in them have ended before."""
        for keeper in self._keepers:
            assert keeper.stdin and keeper.stdout
            keeper.stdin.close()
            keeper.stdout.close()
            try:
                keeper.wait(_LIMIT_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()
        self._keepers = []
