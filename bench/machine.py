"""What kind of host this is."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from headrace.bench.calibration import Host


def this_host(proc: Path = Path("/proc"), nodes: Path = Path("/sys/devices/system/node")) -> Host:
    """The host of this process, with the cores that it may use."""
    usable = os.sched_getaffinity(0)
    name = ""
    cores: set[tuple[str, str]] = set()
    fields: dict[str, str] = {}
    for line in [*(proc / "cpuinfo").read_text().splitlines(), ""]:
        if line.strip():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        elif fields:
            if int(fields.get("processor", "0")) in usable:
                name = name or fields.get("model name", "")
                cores.add((fields.get("physical id", "0"), fields.get("core id", fields.get("processor", "0"))))
            fields = {}
    return Host(
        cpu=name or platform.machine(),
        cores=len(cores),
        cpus=len(usable),
        nodes=max(1, sum(1 for _ in nodes.glob("node[0-9]*"))),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
