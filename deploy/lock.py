"""`make lock`: write requirements.lock, what the image installs: every wheel by version and SHA-256.

pip itself decides, within constraints.txt, for the interpreter and machine that this runs on (the image's: CPython 3.11
on x86-64); nothing is installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_HEAD = """\
# Written by `make lock`, for CPython 3.11 on x86-64: what the image installs. The last one builds the package.
"""
# redis wants it there; the image's Python may be older than the one that this runs on.
_BEFORE_3_11_3 = ("async-timeout",)


def resolve(*requirements: str) -> list[dict[str, Any]]:
    """The packages that pip would install, from its report (version 1 of the format)."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
    command += ["--ignore-installed", "--only-binary", ":all:", "--report", "-", "--constraint", "constraints.txt"]
    report = json.loads(subprocess.check_output([*command, *requirements]))
    assert report["version"] == "1", report["version"]
    found: list[dict[str, Any]] = report["install"]
    return found


def lock_of(found: list[dict[str, Any]]) -> str:
    """Lines of a requirements file with hashes, by name; the project itself left out."""
    lines = []
    for item in found:
        name, version = item["metadata"]["name"].lower().replace("_", "-"), item["metadata"]["version"]
        if name == "headrace":
            continue
        lines.append(f"{name}=={version} --hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}")
    return "".join(f"{line}\n" for line in sorted(lines))


def main() -> None:
    """Resolve and write."""
    locked = lock_of(resolve(".[convert,encryption,kv-events,otel]", *_BEFORE_3_11_3)) + lock_of(
        resolve("setuptools>=77")
    )
    Path("requirements.lock").write_text(_HEAD + locked)


if __name__ == "__main__":
    main()
