"""Reads facts about this host from the kernel's files in /proc and /sys. `root` is "/" except in tests."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

ROOT = Path("/")


def read_text(path: Path) -> str:
    """The content of a file, without white space around it; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def parse_list(text: str) -> frozenset[int]:
    """Parse a list of numbers in the kernel's format, such as `0-2,8`."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def format_list(numbers: Iterable[int]) -> str:
    """Write numbers in the kernel's format, such as `0-2,8`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def cpu_flags(root: Path = ROOT) -> frozenset[str]:
    """The kernel's names of the CPU's features; empty if they are not known."""
    for line in read_text(root / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def cgroup_places(root: Path, controller: str) -> list[Path]:
    """The directories of this process's cgroup and its ancestors for a controller, v1 or v2."""
    places: list[Path] = []
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            bases = [root / "sys/fs/cgroup"]
        elif controller in controllers.split(","):
            bases = [root / "sys/fs/cgroup" / name for name in (controllers, controller)]
        else:
            continue
        for base in bases:
            directory = base / path.lstrip("/")
            # Inside a container, the path may be the host's. Then only the container's root exists.
            directory = directory if directory.is_dir() else base
            places += [place for place in (directory, *directory.parents) if place.is_relative_to(base)]
    return places


def cpu_quota(root: Path = ROOT) -> float | None:
    """The tightest CPU quota of this process's cgroups, in CPUs. None means no limit."""
    quotas = []
    for place in cgroup_places(root, "cpu"):
        limit, period = (read_text(place / "cpu.max") or "max 0").split()
        if limit == "max":
            limit = read_text(place / "cpu.cfs_quota_us") or "-1"
            period = read_text(place / "cpu.cfs_period_us") or "0"
        if int(limit) > 0 and int(period) > 0:
            quotas.append(int(limit) / int(period))
    return min(quotas, default=None)
