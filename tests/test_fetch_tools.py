"""Programs for tests, from packages that are unpacked and not installed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests import fetch_tools
from tests.fetch_tools import TOOLS, Unavailable, fetch, planned, write_script

SIMULATION = """\
Reading package lists...
Inst liblzf1 (3.6-3 Debian:12.11/stable [amd64])
Inst libc6 [2.36-9+deb12u9] (2.36-9+deb12u10 Debian-Security:12/stable-security [amd64])
Inst redis-server [5:7.0.14-1] (5:7.0.15-1 Debian:12.11/stable [amd64])
Conf liblzf1 (3.6-3 Debian:12.11/stable [amd64])
"""


def test_what_this_machine_has_is_not_fetched_again() -> None:
    assert planned(SIMULATION, ("redis-server",)) == ["liblzf1=3.6-3", "redis-server=5:7.0.15-1"]


def test_a_script_runs_the_program_with_the_libraries_beside_it(tmp_path: Path) -> None:
    root = tmp_path / "tool"
    program, library = root / "usr/bin/mill", root / "usr/lib/x86_64-linux-gnu/sound/libwheel.so.1"
    for path in (program, library):
        path.parent.mkdir(parents=True)
    library.write_text("")
    program.write_text('#!/bin/sh\necho "$LD_LIBRARY_PATH" "$@"\n')
    program.chmod(0o755)
    write_script(tmp_path / "bin/mill", root, "usr/bin/mill")
    environment = {"PATH": os.environ["PATH"], "LD_LIBRARY_PATH": "/own"}
    done = subprocess.run([tmp_path / "bin/mill", "a b"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{library.parent}:/own a b\n"


def test_a_machine_without_apt_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(fetch_tools.shutil, "which", lambda _: None)
    with pytest.raises(Unavailable, match="there is no apt-get"):
        fetch("redis", tmp_path)
    assert set(TOOLS) >= {"prometheus", "redis", "chromium"}
