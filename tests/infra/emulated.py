"""A machine with two NUMA nodes, emulated: QEMU without KVM, a kernel, and a root file system in memory.

The root file system has this Python, what headrace depends on, headrace itself and a model, each under its own path.
Its first process is `guest.py`, which leaves what it found on the second serial port.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tests.patience import patience

ROOT = Path(__file__).parent.parent.parent
GUEST_ROOT = "/headrace"
_PACKAGES = ("bench", "cli", "client", "common", "gateway", "plan", "protos", "router", "sim", "worker")
EMULATOR = "qemu-system-x86_64"
# Parts of the dependencies that no worker loads, and that are most of their size.
_LEFT_OUT = re.compile(
    r"libopenvino_(intel_gpu|intel_npu|onnx|paddle|pytorch|tensorflow|jax|gguf)|/openvino/frontend/[^/]+/|/tests?/|/cache\.json$|\.(cpp|hpp|h|a)$"
)
_STDLIB_LEFT_OUT = re.compile(r"/(test|idlelib|tkinter|lib2to3|ensurepip|turtledemo|site-packages|config-3[^/]*)(/|$)")
_NEWC_MAGIC = b"070701"


def write_initramfs(path: Path, model_directory: Path, init: Path) -> None:
    """An uncompressed cpio archive; the format is in Documentation/driver-api/early-userspace/buffer-format.rst."""
    python = Path(sys.executable).resolve()
    places = {str(file): file for file in _stdlib()} | {str(file): file for file in _distributions("headrace")}
    places |= {str(library): library for library in _libraries([python, *places.values()])}
    places |= {f"{GUEST_ROOT}/headrace/{name}": ROOT / name for name in _sources()}
    places |= {f"/model/{file.name}": file for file in model_directory.iterdir()}
    places[str(python)] = python
    places["/guest.py"] = init
    with path.open("wb") as archive:
        made: set[str] = set()
        for directory in ("/proc", "/sys", "/dev", "/tmp", "/etc", "/root"):
            _directories(archive, f"{directory}/x", made)
        _entry(archive, "/dev/console", stat.S_IFCHR | 0o600, device=(5, 1))
        _entry(archive, "/etc/passwd", stat.S_IFREG | 0o644, b"root:x:0:0:root:/root:/bin/sh\n")
        _entry(archive, "/etc/hosts", stat.S_IFREG | 0o644, b"127.0.0.1 localhost\n")
        _directories(archive, f"{GUEST_ROOT}/headrace.dist-info/x", made)
        metadata = f"Metadata-Version: 2.1\nName: headrace\nVersion: {importlib.metadata.version('headrace')}\n"
        _entry(archive, f"{GUEST_ROOT}/headrace.dist-info/METADATA", stat.S_IFREG | 0o644, metadata.encode())
        _entry(archive, "/init", stat.S_IFREG | 0o755, _init_script(python))
        for name, source in sorted(places.items()):
            _directories(archive, name, made)
            status = source.stat()
            _entry(archive, name, status.st_mode, source.read_bytes(), mtime=int(status.st_mtime))
        _entry(archive, "/TRAILER!!!", 0)


def boot(kernel: Path, initramfs: Path, directory: Path, timeout_s: float) -> str:
    """Run the machine until it powers off. Returns the output of its second serial port; `console` gets the
    console's."""
    result = directory / "result"
    nodes = [
        argument
        for node in (0, 1)
        for argument in (
            *("-object", f"memory-backend-ram,id=memory{node},size=1536M"),
            *("-numa", f"node,nodeid={node},cpus={2 * node}-{2 * node + 1},memdev=memory{node}"),
        )
    ]
    command = [EMULATOR, "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "4,sockets=2,cores=2,threads=1"]
    command += ["-m", "3072M", *nodes, "-numa", "dist,src=0,dst=1,val=21"]
    command += ["-kernel", str(kernel), "-initrd", str(initramfs), "-append", "console=ttyS0 panic=-1 quiet"]
    command += ["-nodefaults", "-no-user-config", "-display", "none", "-no-reboot"]
    command += ["-serial", f"file:{directory / 'console'}", "-serial", f"file:{result}"]
    subprocess.run(command, timeout=patience(timeout_s), check=True, capture_output=True)
    return result.read_text()


def _init_script(python: Path) -> bytes:
    environment = {
        "PYTHONPATH": f"{GUEST_ROOT}:{sysconfig.get_path('purelib')}:{sysconfig.get_path('platlib')}",
        "PATH": "/bin",
        "HOME": "/root",
    }
    program = f"import os\nos.execve({str(python)!r}, [{str(python)!r}, '/guest.py'], {environment!r})\n"
    return f"#!{python} -S\n{program}".encode()


def _stdlib() -> Iterator[Path]:
    for name in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        for file in _files(Path(name).resolve()):
            if not _STDLIB_LEFT_OUT.search(str(file)):
                yield file


def _sources() -> Iterator[str]:
    for package in _PACKAGES:
        for file in _files(ROOT / package):
            if "__pycache__" not in file.parts:
                yield str(file.relative_to(ROOT))


def _distributions(name: str, seen: set[str] | None = None) -> Iterator[Path]:
    """The files of all requirements of a distribution, without its own."""
    seen = set() if seen is None else seen
    for requirement in importlib.metadata.requires(name) or ():
        found = re.match(r"[A-Za-z0-9._-]+", requirement)
        assert found is not None
        required = found[0].lower()
        if "extra ==" in requirement or required in seen:
            continue
        seen.add(required)
        try:
            files = importlib.metadata.files(required)
        except importlib.metadata.PackageNotFoundError:
            # For another platform or another Python.
            continue
        for file in files or ():
            place = Path(str(file.locate())).resolve()
            if place.is_file() and not _LEFT_OUT.search(str(place)):
                yield place
        yield from _distributions(required, seen)


def _libraries(files: list[Path]) -> Iterator[Path]:
    """Shared libraries that the loader finds for programs and extension modules, and the loader, by their own paths."""
    binaries = [str(file) for file in files if ".so" in file.name or file.name.startswith("python3")]
    done = subprocess.run(["ldd", *binaries], capture_output=True, text=True, check=False)
    for name in {os.path.normpath(found) for found in re.findall(r"(/\S+) \(0x", done.stdout)}:
        yield Path(name)


def _files(directory: Path) -> Iterator[Path]:
    for parent, _, names in os.walk(directory):
        for name in names:
            yield Path(parent, name)


def _directories(archive: BinaryIO, name: str, made: set[str]) -> None:
    for parent in reversed(Path(name).parents):
        if str(parent) not in made and str(parent) != "/":
            made.add(str(parent))
            _entry(archive, str(parent), stat.S_IFDIR | 0o755)


def _entry(
    archive: BinaryIO, name: str, mode: int, data: bytes = b"", *, mtime: int = 0, device: tuple[int, int] = (0, 0)
) -> None:
    path = name.lstrip("/").encode() + b"\0"
    fields = (0, mode, 0, 0, 1, mtime, len(data), 0, 0, *device, len(path), 0)
    header = _NEWC_MAGIC + b"".join(b"%08x" % value for value in fields) + path
    archive.write(header + bytes(-len(header) % 4) + data + bytes(-len(data) % 4))
