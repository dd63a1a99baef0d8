"""Fetches programs that tests need and pip does not bring: `python -m tests.fetch_tools DIRECTORY NAME...`

They are Debian's packages, with the packages that they need and this machine does not have, unpacked into DIRECTORY and
not installed: nothing outside of it changes. Each program gets a script in DIRECTORY/bin that finds its libraries.
A program that is installed already is not fetched. Without apt-get nothing is fetched, and the tests that need it skip.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

FETCHED = Path(__file__).parents[1] / ".make/tools/bin"
"""Where the Makefile has the programs put."""


@dataclass(frozen=True)
class Tool:
    """Programs by where they are in the packages that bring them."""

    packages: tuple[str, ...]
    programs: dict[str, str]


TOOLS = {
    "prometheus": Tool(("prometheus",), {"prometheus": "usr/bin/prometheus", "promtool": "usr/bin/promtool"}),
    "redis": Tool(("redis-server",), {"redis-server": "usr/bin/redis-server"}),
    "chromium": Tool(
        ("chromium", "chromium-driver", "fonts-dejavu-core"),
        {"chromium": "usr/lib/chromium/chromium", "chromedriver": "usr/bin/chromedriver"},
    ),
    "systemd": Tool(("systemd",), {"systemd-analyze": "usr/bin/systemd-analyze"}),
    "qemu": Tool(("qemu-system-x86",), {"qemu-system-x86_64": "usr/bin/qemu-system-x86_64"}),
    "iproute2": Tool(("iproute2",), {"ip": "bin/ip"}),
}


class Unavailable(Exception):
    """A tool cannot be fetched here. The message says why."""


def is_there(tool: Tool) -> bool:
    """Whether all its programs are installed on this machine."""
    return all(shutil.which(program) for program in tool.programs)


def fetch(name: str, directory: Path) -> None:
    """Unpack a tool, one of TOOLS, and write its scripts. Raises `Unavailable`."""
    tool = TOOLS[name]
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        raise Unavailable("there is no apt-get")
    root, packages = directory / name, directory / f"{name}.packages"
    for leftover in (root, packages):
        shutil.rmtree(leftover, ignore_errors=True)
        leftover.mkdir(parents=True)
    wanted = _missing_packages(tool.packages)
    _run("apt-get", "download", "-qq", *wanted, cwd=packages)
    for package in sorted(packages.glob("*.deb")):
        _run("dpkg-deb", "-x", str(package), str(root))
    shutil.rmtree(packages)
    for program, path in tool.programs.items():
        if not (root / path).exists():
            raise Unavailable(f"the packages have no {path}")
        write_script(directory / "bin" / program, root.resolve(), path)


def write_script(script: Path, root: Path, program: str) -> None:
    """A script that runs a program of an unpacked package with the libraries, fonts and units beside it."""
    folders = {
        library.parent for pattern in ("lib*.so", "lib*.so.*") for library in root.glob(f"**/lib/*/**/{pattern}")
    }
    libraries = ":".join(map(str, sorted(folders)))
    lines = ["#!/bin/sh", f'export LD_LIBRARY_PATH="{libraries}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"']
    if (root / "etc/fonts").exists():
        lines += [f'export FONTCONFIG_SYSROOT="{root}" FONTCONFIG_PATH="/etc/fonts"']
    if (root / "lib/systemd/system").exists():
        lines += [f'export SYSTEMD_UNIT_PATH="{root}/lib/systemd/system:"']
    script.parent.mkdir(parents=True, exist_ok=True)
    script.write_text("\n".join([*lines, f'exec "{root / program}" "$@"', ""]))
    script.chmod(0o755)


def _missing_packages(packages: tuple[str, ...]) -> list[str]:
    """These packages and those that they need and that are not installed, each as NAME=VERSION."""
    plan = ["apt-get", "-s", "-o", "Debug::NoLocking=1", "--no-install-recommends", "--reinstall", "install"]
    done = subprocess.run([*plan, *packages], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        # The lists of a new container are empty.
        subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=False)
        done = subprocess.run([*plan, *packages], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable((done.stderr or done.stdout).strip().splitlines()[-1])
    return planned(done.stdout, packages)


def planned(simulation: str, packages: tuple[str, ...]) -> list[str]:
    """The packages, each as NAME=VERSION, that a simulation of apt-get would install anew, and `packages` themselves.
    Others that it would replace are here already, and an older version does."""
    found = re.findall(r"^Inst (\S+) (\[\S+\] )?\((\S+) ", simulation, re.MULTILINE)
    return [f"{name}={version}" for name, installed, version in found if not installed or name in packages]


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"{command[0]} {command[1]} fails: {(done.stderr or done.stdout).strip()[-500:]}")


def main() -> int:
    """Fetch what is missing. Ends with 0 too where something cannot be fetched, and says so."""
    if len(sys.argv) < 2 or not set(sys.argv[2:]) <= set(TOOLS):
        print(f"usage: python -m tests.fetch_tools DIRECTORY [{'|'.join(TOOLS)}]...", file=sys.stderr)
        return 2
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:]:
        if is_there(TOOLS[name]):
            continue
        print(f"fetching {name} into {directory}", file=sys.stderr)
        try:
            fetch(name, directory)
        except Unavailable as error:
            print(f"{name} cannot be fetched, and tests that need it will be skipped: {error}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
