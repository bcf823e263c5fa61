"""Hosts played by network namespaces, made and removed by the test itself. Needs root and iproute2.

    network.cable(a, b)              one veth pair; every call makes the next cable0, cable1, ...

        +--------- a ----------+              +---------- b ---------+
        | lo                   |              |                   lo |
        | cable0  169.254.7.1 ----------------- 169.254.9.2   cable0 |
        +----------------------+              +----------------------+

    network.switch(a, b, c)          a bridge in a namespace of its own

        +---- a ----+   +---- b ----+   +---- c ----+
        |  cable0   |   |  cable0   |   |  cable0   |
        +-----|-----+   +-----|-----+   +-----|-----+
              +---------------+---------------+
                         +--- s ---+
                         |   br0   |
                         +---------+

    network.triangle(a, b, c)        a cable for each pair, each with a subnet of its own

             a cable0 ------ cable0 b
             cable1             cable1
                  \\             /
                   cable0   cable1
                         c

Each host has a name, a hosts file and resolver files of its own. Whatever runs in a namespace is killed when
the network closes, also after a failure; namespaces of a run that was itself killed go when the next starts.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

PREFIX = "mccl"  # namespaces are called mccl-PID-HOST
COMMAND_LIMIT_S = 10


def output_of(*command: str) -> str:
    """Standard output of a short command; a failure shows what the command said."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)}: status {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def wait_until(condition: Callable[[], bool]) -> None:
    """Waits for something that the kernel does in its own time. The test's limit bounds it."""
    while not condition():
        time.sleep(0.02)


class Process(subprocess.Popen):  # type: ignore[type-arg]
    """A process on a host, with its standard error in a file."""

    def __init__(self, command: Sequence[str], label: str, stderr: IO[str], **options: Any) -> None:
        self.label = label
        self.stderr_file = stderr
        super().__init__(command, stderr=stderr, text=True, start_new_session=True, **options)

    def stderr_text(self) -> str:
        """What it has written to standard error so far."""
        self.stderr_file.flush()
        return Path(self.stderr_file.name).read_text(errors="replace")


class Host:
    """One namespace: its interfaces and processes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.namespace = f"{PREFIX}-{os.getpid()}-{name}"
        self.processes: list[Process] = []
        self._folder = folder
        self._cables = itertools.count()
        self._files = {
            "hosts": f"127.0.0.1 localhost\n127.0.1.1 {name}.test {name}\n",
            "resolv.conf": "",
            "nsswitch.conf": "hosts: files dns\n",
        }

    def open(self, ipv6: bool) -> None:
        """Makes the namespace, with lo and nothing else."""
        output_of("ip", "netns", "add", self.namespace)
        # Addresses are ours to give: no second for duplicate detection, no family that hides a failure.
        self.sysctl("ipv6/conf/default/accept_dad", "0")
        for scope in ("all", "default"):
            self.sysctl(f"ipv6/conf/{scope}/disable_ipv6", "0" if ipv6 else "1")
        self.ip("link set lo up")

    def ip(self, command: str) -> str:
        """Runs `ip` inside."""
        return output_of("ip", "-n", self.namespace, *command.split())

    def sysctl(self, name: str, value: str) -> None:
        """Sets net/`name`."""
        path = f"/proc/sys/net/{name}"
        output_of("ip", "netns", "exec", self.namespace, "sh", "-c", f"echo {value} >{path}")

    def sent(self, interface: str) -> int:
        """Bytes that have left by an interface."""
        (link,) = json.loads(self.ip(f"-s -j link show {interface}"))
        return int(link["stats64"]["tx"]["bytes"])

    def shape(self, interface: str, rate: str) -> None:
        """Lets no more than `rate` (1gbit) leave by an interface."""
        # Tokens for some milliseconds, since the kernel hands them out by its clock; packets of 64 KiB.
        limits = f"rate {rate} burst 1mb latency 20ms"
        output_of("tc", "-n", self.namespace, *f"qdisc add dev {interface} root tbf {limits}".split())

    def next_cable(self) -> str:
        """A free interface name: cable0, cable1, ..."""
        return f"cable{next(self._cables)}"

    def file(self, name: str, text: str) -> None:
        """Sets the content of /etc/`name` (hosts, resolv.conf) for processes that start from now on."""
        self._files[name] = text

    def start(
        self, *command: str, env: Mapping[str, str] | None = None, hostname: str = "", **options: Any
    ) -> Process:
        """Starts a process here. `ip netns exec` gives it a mount table of its own for its /etc."""
        steps = [f"hostname {hostname or self.name}"]
        for name, text in self._files.items():
            path = self._folder / f"{self.name}-{name}"
            path.write_text(text)
            steps.append(f"[ ! -e /etc/{name} ] || mount --bind {path} /etc/{name}")
        inside = ["sh", "-ec", "\n".join([*steps, 'exec "$@"']), "sh", *command]
        stderr = tempfile.NamedTemporaryFile("w", dir=self._folder, delete=False)
        process = Process(
            ["ip", "netns", "exec", self.namespace, "unshare", "--uts", *inside],
            f"{Path(command[1]).name if len(command) > 1 else command[0]} on {self.name}",
            stderr,
            env={**clean_environment(), **(env or {})},
            **options,
        )
        self.processes.append(process)
        return process

    def listeners(self) -> set[str]:
        """Where processes of this host listen: "169.254.7.1:29600", "[::1]:80"."""
        return {line.split()[3] for line in self._ss("-ltn")}

    def peers(self, port: int) -> set[str]:
        """Addresses of other ends of connections from or to `port`."""
        lines = [line.split() for line in self._ss("-tn", "state", "established")]
        ends = [(local.rsplit(":", 1), remote.rsplit(":", 1)) for _, _, local, remote in lines]
        return {address for (_, own), (address, other) in ends if str(port) in (own, other)}

    def _ss(self, *options: str) -> list[str]:
        return output_of("ip", "netns", "exec", self.namespace, "ss", "-H", *options).splitlines()

    def close(self) -> None:
        """Kills what runs here, and removes the namespace with its interfaces."""
        remove_namespace(self.namespace)
        for process in self.processes:
            process.kill()  # does nothing if it has ended
            process.wait(COMMAND_LIMIT_S)
            if process.stdout:
                process.stdout.close()
            if process.stdin:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            # pytest shows it if the test failed.
            print(f"--- standard error of {process.label} (status {process.returncode})")
            print(process.stderr_text()[-4000:])
            process.stderr_file.close()


class Network:
    """All hosts of one test; use it with `with`."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._folder = tempfile.TemporaryDirectory(prefix="mccl-net-")

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:  # one that fails does not keep the others
            stack.callback(self._folder.cleanup)
            for host in self.hosts:
                stack.callback(host.close)

    def host(self, name: str, ipv6: bool = False) -> Host:
        """A host with lo and nothing else."""
        host = Host(name, Path(self._folder.name))
        self.hosts.append(host)
        host.open(ipv6)
        return host

    def cable(self, a: Host, b: Host, *addresses: tuple[str, str]) -> tuple[str, str]:
        """Joins two hosts; `addresses` are pairs with prefix lengths. Returns the interfaces' names."""
        names = a.next_cable(), b.next_cable()
        a.ip(f"link add {names[0]} type veth peer name {names[1]} netns {b.namespace}")
        for host, name, own in zip((a, b), names, zip(*addresses) if addresses else ((), ())):
            host.ip(f"link set {name} up")
            for address in own:
                host.ip(f"addr add {address} dev {name}")
        return names

    def bridge(self, host: Host, name: str, address: str) -> None:
        """A bridge that is up since something sits on it, as docker0 is while a container runs."""
        host.ip(f"link add {name} type bridge")
        host.ip(f"link add {name}-in type veth peer name {name}-out")
        host.ip(f"link set {name}-in master {name}")
        for link in (f"{name}-in", f"{name}-out", name):
            host.ip(f"link set {link} up")
        host.ip(f"addr add {address} dev {name}")

    def dead_end(self, host: Host, name: str, address: str) -> None:
        """An interface that is up and leads nowhere."""
        host.ip(f"link add {name} type veth peer name {name}-end")
        for link in (name, f"{name}-end"):
            host.ip(f"link set {link} up")
        host.ip(f"addr add {address} dev {name}")

    def switch(self, *addresses: str, ipv6: bool = False) -> list[Host]:
        """Hosts a, b, c, ... with one address each, on one switch."""
        switch = self.host("s")
        switch.ip("link add br0 type bridge")
        switch.ip("link set br0 up")
        hosts = [self.host(name, ipv6) for name, _ in zip("abcdefgh", addresses)]
        for host, address in zip(hosts, addresses):
            name, port = self.cable(host, switch)
            switch.ip(f"link set {port} master br0")
            host.ip(f"addr add {address} dev {name}")
        return hosts

    def triangle(self) -> list[Host]:
        """Hosts a, b, c with a cable for each pair: 10.1.0.0/24 a-b, 10.2.0.0/24 a-c, 10.3.0.0/24 b-c."""
        a, b, c = hosts = [self.host(name) for name in "abc"]
        self.cable(a, b, ("10.1.0.1/24", "10.1.0.2/24"))
        self.cable(a, c, ("10.2.0.1/24", "10.2.0.3/24"))
        self.cable(b, c, ("10.3.0.2/24", "10.3.0.3/24"))
        return hosts


def firewall(host: Host, interface: str, ports: str, otherwise: str) -> None:
    """Lets TCP from and to `ports` of this host pass; `otherwise` is blackhole (drop) or prohibit (reject).

    Made of routing rules, which every kernel with namespaces has, so it needs no nft. It keeps no state:
    answers to connections that this host opens are recognised by the other end's port.
    """
    for pref, side in ((10, "dport"), (11, "sport")):
        host.ip(f"rule add pref {pref} iif {interface} ipproto tcp {side} {ports} lookup local")
    host.ip(f"rule add pref 20 iif {interface} ipproto tcp type {otherwise}")
    host.ip("rule add pref 30 lookup local")
    host.ip("rule del pref 0")  # which looks into table local before all others


def clean_environment() -> dict[str, str]:
    """This process's, without what steers MCCL and launchers."""
    steering = re.compile(
        r"MCCL_|DDP_|MASTER_|SLURM_|OMPI_|PMI_|MPI_|TORCHELASTIC_|(LOCAL_)?(RANK|WORLD_SIZE)$"
    )
    kept = {name: value for name, value in os.environ.items() if not steering.match(name)}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}


def remove_namespace(name: str) -> None:
    """Kills every process in a namespace, and removes it."""
    for pid in output_of("ip", "netns", "pids", name).split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    output_of("ip", "netns", "del", name)


def remove_leftovers() -> None:
    """Removes namespaces whose maker is gone."""
    for line in output_of("ip", "netns", "list").splitlines():
        match = re.match(rf"({PREFIX}-(\d+)-\w+)", line)
        if match and not Path(f"/proc/{match[2]}").exists():
            remove_namespace(match[1])
