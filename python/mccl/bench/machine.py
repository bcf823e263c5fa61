"""Where and with what figures are made."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mccl.bench.libraries import processors
from mccl.bench.team import Team


@dataclass
class About:
    """What libraries say of themselves, for the report; collected over sessions."""

    versions: dict[str, str] = field(default_factory=dict)
    congestion: dict[str, list[str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, team: Team) -> None:
        """A team's version and congestion control."""
        name = team.library.name
        self.versions[name] = team.version
        found = team.use_common_congestion_control() | set(self.congestion.get(name, []))
        self.congestion[name] = sorted(found)


def describe(about: About) -> dict[str, Any]:
    """The machine now, and the libraries."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S"),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cpus": processors(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": about.versions,
        "congestion_control": about.congestion,
        "notes": about.notes,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
