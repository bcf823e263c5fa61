"""Where a process listens, as pg_options say it: it has one endpoint, so the first group decides."""

from __future__ import annotations

from test_config import ALONE, run


def test_first_group_decides() -> None:
    """Also rank 0's, whose id is made before the library hears of the group's settings."""
    out = run(
        ALONE
        + """
import mccl
from mccl import _config
mccl.init(chunk_bytes=131072)
alone(pg_options=mccl.MCCLOptions(listen_addr="loopback", port_base="21700-21799", chunk_bytes=65536))
print(_config.current("listen_addr"), _config.current("port_base"), _config.current("chunk_bytes"))
table = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]
ports = [int(row[1].split(":")[1], 16) for row in table if row[3] == "0A" and row[1].startswith("0100007F")]
print(any(21700 <= port <= 21799 for port in ports))
dist.new_group([0])
try:
    dist.new_group([0], pg_options=mccl.MCCLOptions(port_base=21900))
except mccl.MCCLConfigError as error:
    print(error)
""",
        MCCL_PORT_BASE="21900",
    )
    lines = out.strip().splitlines()
    assert lines[:2] == ["('auto', 'default') ('21900', 'environment') ('131072', 'init')", "True"]
    for part in ("MCCL_PORT_BASE=21900", "MCCL_PORT_BASE=21700-21799", "mccl.init(port_base=...)"):
        assert part in lines[2]
