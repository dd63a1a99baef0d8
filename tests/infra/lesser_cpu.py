"""Run a program as on a CPU with fewer vector extensions: `python -m tests.infra.lesser_cpu avx2 COMMAND...`

The CPU may be avx2, avx2-vnni, avx512 or avx512-bf16. Ends with status 77 where it cannot be pretended. lesser_cpu.c
says how it works.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headrace.cli.models.model_cache import cache_directory

CPUS = ("avx2", "avx2-vnni", "avx512", "avx512-bf16")
CANNOT_PRETEND = 77
_SOURCE = Path(__file__).with_suffix(".c")
_CPUID, _UD2 = b"\x0f\xa2", b"\x0f\x0b"
# Bytes of code that are disassembled before one, and no-operations behind it, longer than any instruction.
_BEFORE, _BETWEEN = 256, b"\x90" * 16
_ASKING = ("libopenvino.so*", "libopenvino_intel_cpu_plugin.so", "libtbb.so*")


def why_not(cpu: str) -> str:
    """Why `cpu`, one of CPUS, cannot be pretended on this machine; empty if it can."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "only Linux on x86-64 can hide what the CPU has"
    for tool in ("gcc", "objdump"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    needed = {"avx2": "avx2", "avx2-vnni": "avx_vnni", "avx512": "avx512_vnni", "avx512-bf16": "avx512_bf16"}[cpu]
    if needed not in Path("/proc/cpuinfo").read_text().split():
        return f"this CPU does not have {needed}"
    return ""


def environment_of(cpu: str, directory: Path) -> dict[str, str]:
    """The environment for a program that should see `cpu`, one of CPUS. The preloaded library is built in
    `directory`."""
    library = directory / "lesser_cpu.so"
    subprocess.run(["gcc", "-O2", "-shared", "-fPIC", "-o", library, _SOURCE, "-ldl"], check=True)
    path = os.pathsep.join(filter(None, (str(_patched_openvino()), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "LD_PRELOAD": str(library), "HEADRACE_CPU": cpu, "PYTHONPATH": path}


def _patched_openvino() -> Path:
    """The directory of a copy of the package openvino whose libraries trap where they ask for the CPU.

    The copy is kept. It has no links, so that it outlives the environment that it was made from.
    """
    spec = importlib.util.find_spec("openvino")
    assert spec is not None
    assert spec.origin is not None
    package = Path(spec.origin).parent
    directory = cache_directory() / "test-models" / f"openvino-{importlib.metadata.version('openvino')}-with-traps"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            part = directory.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            copied = Path(shutil.copytree(package, part / "openvino"))
            for pattern in _ASKING:
                for library in (copied / "libs").glob(pattern):
                    _replace_cpuid(library)
            part.rename(directory)
    return directory


def _replace_cpuid(library: Path) -> None:
    """Write UD2 for every CPUID of a library."""
    code = bytearray(library.read_bytes())
    for offset in _cpuid_offsets(library):
        assert code[offset : offset + 2] == _CPUID, f"{library}: no CPUID at {offset:#x}"
        code[offset : offset + 2] = _UD2
    library.write_bytes(code)


def _cpuid_offsets(library: Path) -> list[int]:
    """The offsets of CPUID instructions in the file, in bytes.

    Most places with the bytes of one are parts of other instructions. To disassemble all of a library takes half a
    minute, so only what is before each place is: after a few instructions, it does not matter where one has begun.
    """
    code = library.read_bytes()
    places = [place for start, end in _code_of(library) for place in _found(code, start, end)]
    pieces = b"".join(code[place - _BEFORE : place + len(_CPUID)] + _BETWEEN for place in places)
    with tempfile.NamedTemporaryFile() as file:
        file.write(pieces)
        file.flush()
        command = ["objdump", "-D", "-b", "binary", "-m", "i386:x86-64", file.name]
        shown = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    length = _BEFORE + len(_CPUID) + len(_BETWEEN)
    found = [int(number, 16) for number in re.findall(r"^ *([0-9a-f]+):\t0f a2 +\tcpuid", shown, re.MULTILINE)]
    return [places[number // length] for number in found if number % length == _BEFORE]


def _code_of(library: Path) -> list[tuple[int, int]]:
    """Where the sections with code begin and end in the file."""
    sections = subprocess.run(["objdump", "-h", library], check=True, capture_output=True, text=True).stdout
    # Lines like: 13 .text  0123abcd  <address>  <load address>  <offset in the file>  2**6, each before one of flags.
    lines = r"^ *\d+ \S+ +([0-9a-f]+) +[0-9a-f]+ +[0-9a-f]+ +([0-9a-f]+) .*\n(.*)$"
    found = re.findall(lines, sections, re.MULTILINE)
    return [(int(offset, 16), int(offset, 16) + int(size, 16)) for size, offset, flags in found if "CODE" in flags]


def _found(code: bytes, start: int, end: int) -> Iterator[int]:
    """The places of CPUID's bytes in a part of a file."""
    while (start := code.find(_CPUID, start, end)) >= 0:
        yield start
        start += 1


def main() -> int:
    """Build the preloaded library and run the command. Returns its exit status."""
    if len(sys.argv) < 3 or sys.argv[1] not in CPUS:
        print(f"usage: python -m tests.infra.lesser_cpu {'|'.join(CPUS)} COMMAND...", file=sys.stderr)
        return 2
    if reason := why_not(sys.argv[1]):
        print(f"cannot pretend another CPU: {reason}", file=sys.stderr)
        return CANNOT_PRETEND
    with tempfile.TemporaryDirectory() as directory:
        return subprocess.run(sys.argv[2:], env=environment_of(sys.argv[1], Path(directory)), check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
