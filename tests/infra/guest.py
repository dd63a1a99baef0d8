"""The first process of the emulated machine: serves a model with a worker on each node, then with one worker that is
divided among both, and reports the kernel's view.

It uses only the standard library. It writes one JSON object to the second serial port, then powers off.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import socket
import struct
import subprocess
import sys
import time
import traceback
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1
_PORT = 8000
_READY_BOUND_S = 300.0
_POWER_OFF = 0x4321FEDC


def main() -> None:
    """Set up the machine, inspect it, and power it off in any case."""
    found: dict[str, Any] = {}
    try:
        _set_up()
        _look(found)
    except BaseException:
        found["error"] = traceback.format_exc()
    with open("/dev/ttyS1", "w") as port:
        json.dump(found, port)
    os.sync()
    ctypes.CDLL(None).reboot(ctypes.c_int(_POWER_OFF))


def _set_up() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, place in (("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp")):
        if libc.mount(b"none", place.encode(), kind.encode(), 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"mount {place}")
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))


def _look(found: dict[str, Any]) -> None:
    """Gather what /proc says of a worker on each node, and of a worker that is divided among both."""
    found["topology"] = _headrace("topology")
    with _serving() as found["ready_s"]:
        _until_all_workers_tell_their_binding()
        # Different prompts at once: as each worker is busy with one, the next goes to the other.
        with ThreadPoolExecutor(4) as pool:
            found["answers"] = list(pool.map(_complete, range(4)))
        found["status"] = _until_all_workers_tell_their_binding()
        found["metrics"] = urllib.request.urlopen(f"http://127.0.0.1:{_PORT}/metrics").read().decode()
        found["workers"] = {row["name"]: _process(row["pid"]) for row in found["status"]}
    with _serving("--tensor-parallel", "2"):
        found["divided_answer"] = _complete(0)
        (found["divided"],) = _until_all_workers_tell_their_binding()
        pid = found["divided"]["pid"]
        found["ranks"] = [_process(rank) for rank in (pid, *_children(pid))]


@contextmanager
def _serving(*more: str) -> Iterator[float]:
    """Serve the model with these flags. Gives the seconds until it was ready."""
    arguments = ["--port", str(_PORT), "--grpc-port", "0", "--name", "m", "--kv-cache-gb", "0.05", *more]
    with open("/dev/ttyS0", "w") as log:
        serve = subprocess.Popen(
            [sys.executable, "-m", "headrace.cli", "serve", "/model", *arguments],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    assert serve.stdout is not None
    try:
        started_s = time.monotonic()
        ready = serve.stdout.readline()
        assert ready.startswith("ready: "), f"{ready!r}, status {serve.poll()}"
        yield time.monotonic() - started_s
    finally:
        serve.terminate()
        serve.wait(_READY_BOUND_S)


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return sorted(int(child) for task in tasks for child in (task / "children").read_text().split())


def _complete(number: int) -> str:
    body = {"model": "m", "prompt": f"{number} " * 40, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"http://127.0.0.1:{_PORT}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    answer = json.load(urllib.request.urlopen(request, timeout=_READY_BOUND_S))
    return str(answer["choices"][0]["text"])


def _process(pid: int) -> dict[str, object]:
    process = Path(f"/proc/{pid}")
    threads = {}
    for thread in (process / "task").iterdir():
        # The 39th field of stat is the CPU that it ran on last; see proc(5).
        ran_on = (thread / "stat").read_text().rpartition(")")[2].split()[36]
        threads[thread.name] = {"status": (thread / "status").read_text(), "ran_on": int(ran_on)}
    return {
        "threads": threads,
        "numa_maps": (process / "numa_maps").read_text(),
        "smaps": (process / "smaps").read_text(),
    }


def _headrace(*arguments: str) -> str:
    command = [sys.executable, "-m", "headrace.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _workers() -> list[dict[str, Any]]:
    return [row for row in json.loads(_headrace("status", "--json")) if row["role"] == "worker"]


def _until_all_workers_tell_their_binding() -> list[dict[str, Any]]:
    """Their rows, once all of them can be reached."""
    deadline_s = time.monotonic() + _READY_BOUND_S
    while True:
        rows = _workers()
        if all(row["kv_resident_bytes"] for row in rows):
            return rows
        assert time.monotonic() < deadline_s, f"not within {_READY_BOUND_S:.0f} s: all workers tell their binding"


if __name__ == "__main__":
    main()
