"""The image's bill of materials: CycloneDX JSON of what is installed, to standard output.

    python deploy/sbom.py PYTHON requirements.lock

Python distributions are those that `pip inspect` finds for the interpreter PYTHON, with the SHA-256 of the wheel where
the lock names it. Packages of the operating system are those that dpkg knows here, where there is a dpkg.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

SPEC_VERSION = "1.5"
_LOCKED = re.compile(r"^(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})$", re.MULTILINE)
_DPKG_FORMAT = "${Package} ${Version} ${Architecture}\n"


def bill_of(inspected: dict[str, Any], lock: str, dpkg: str) -> dict[str, Any]:
    """The bill, from the report of `pip inspect` (version 1), the text of the lock and lines of dpkg-query."""
    assert inspected["version"] == "1", inspected["version"]
    hashes = {(name, version): sha256 for name, version, sha256 in _LOCKED.findall(lock)}
    found = [_distribution(item["metadata"], hashes) for item in inspected["installed"]]
    for line in dpkg.splitlines():
        name, version, architecture = line.split()
        purl = f"pkg:deb/debian/{name}@{version}?arch={architecture}"
        found.append({"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl})
    headrace = next((item for item in found if item["name"] == "headrace"), None)
    bill: dict[str, Any] = {"bomFormat": "CycloneDX", "specVersion": SPEC_VERSION, "version": 1}
    if headrace is not None:
        bill["metadata"] = {"component": {**headrace, "type": "application"}}
    components = sorted((item for item in found if item is not headrace), key=lambda item: str(item["purl"]))
    return {**bill, "components": components}


def _distribution(metadata: dict[str, Any], hashes: dict[tuple[str, str], str]) -> dict[str, Any]:
    name, version = re.sub(r"[-_.]+", "-", metadata["name"]).lower(), metadata["version"]
    purl = f"pkg:pypi/{name}@{version}"
    found: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    if (name, version) in hashes:
        found["hashes"] = [{"alg": "SHA-256", "content": hashes[name, version]}]
    if expression := metadata.get("license_expression"):
        found["licenses"] = [{"expression": expression}]
    elif (licence := metadata.get("license")) and "\n" not in licence and len(licence) <= 100:
        found["licenses"] = [{"license": {"name": licence}}]
    return found


def main(python: str, lock: str) -> None:
    """Write the bill of an interpreter's distributions and this system's packages."""
    inspect = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "inspect"]
    inspected = json.loads(subprocess.check_output(inspect, stderr=subprocess.DEVNULL))
    query = shutil.which("dpkg-query")
    dpkg = "" if query is None else subprocess.check_output([query, "-W", f"-f={_DPKG_FORMAT}"], text=True)
    json.dump(bill_of(inspected, Path(lock).read_text(), dpkg), sys.stdout, indent=1)


if __name__ == "__main__":
    main(*sys.argv[1:])
