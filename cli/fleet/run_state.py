"""The files of a running `headrace serve`. `headrace status` and `headrace chat` find it by them.

    RUNTIME/serve-PORT.json     its processes; replaced as a whole at each change
    RUNTIME/PORT/*.sock         the sockets between them
    RUNTIME/stages-PID.json     the stages of `headrace serve --join`

RUNTIME is $XDG_RUNTIME_DIR/headrace or /tmp/headrace-UID, readable by its user only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

from headrace.common.commands import CommandError

# A socket's path may have 107 bytes; the longest name in the directory is worker-NNN.sock.
_MAX_SOCKET_DIRECTORY_BYTES = 90


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process as its supervisor sees it. `started_s` is Unix time; `pid` is None while there is none."""

    name: str
    role: str
    pid: int | None
    address: str
    state: str
    restarts: int
    started_s: float


@dataclass(frozen=True, slots=True)
class ServeRecord:
    """One `headrace serve`. `start_ticks` distinguishes its process from a later one with the same pid."""

    pid: int
    start_ticks: int
    url: str
    host: str
    port: int
    grpc_port: int
    models: tuple[str, ...]
    router_address: str
    socket_directory: str
    processes: tuple[ProcessRecord, ...]
    tls_dir: str | None = None
    join_token_file: str | None = None
    host_address: str = ""


@dataclass(frozen=True, slots=True)
class JoinRecord:
    """One `headrace serve --join`, whose processes are stages of `model` for the worker at the address `join`."""

    pid: int
    start_ticks: int
    model: str
    join: str
    processes: tuple[ProcessRecord, ...]
    tls_dir: str | None = None
    join_token_file: str | None = None


_Record = TypeVar("_Record", ServeRecord, JoinRecord)


def runtime_directory() -> Path:
    """The directory for records and sockets; made if missing. Raises CommandError if it is not the user's alone."""
    shared = os.environ.get("XDG_RUNTIME_DIR")
    if shared and os.path.isdir(shared) and os.access(shared, os.W_OK):
        directory = Path(shared).absolute() / "headrace"
    else:
        directory = Path("/tmp") / f"headrace-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise CommandError(
            f"{directory} must be a directory that belongs to this user alone (mode 0700); "
            "correct its mode or remove it, or set XDG_RUNTIME_DIR"
        )
    return directory


def own_start_ticks() -> int:
    """Start time of this process in clock ticks since boot."""
    ticks = _start_ticks(os.getpid())
    assert ticks is not None
    return ticks


def make_socket_directory(port: int) -> Path:
    """Make an empty directory for the sockets of the `headrace serve` on `port`. Its path leaves room for the names of
    sockets, whose paths the kernel limits."""
    _sweep()
    directory = runtime_directory() / str(port)
    if len(os.fsencode(directory)) > _MAX_SOCKET_DIRECTORY_BYTES or _in_use(directory):
        return Path(tempfile.mkdtemp(prefix="headrace-", dir="/tmp"))
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(mode=0o700)
    return directory


def _sweep() -> None:
    """Remove the records of runs that were killed."""
    for record in _swept("serve-*.json", ServeRecord):
        if _is_socket_directory(Path(record.socket_directory)):
            shutil.rmtree(record.socket_directory, ignore_errors=True)


def _swept(pattern: str, kind: type[_Record]) -> list[_Record]:
    """Remove the records of processes that have ended, and those that cannot be read. Returns the former."""
    ended = []
    for path in runtime_directory().glob(pattern):
        record = _read(path, kind)
        if not _live(record):
            path.unlink(missing_ok=True)
            if record is not None:
                ended.append(record)
    return ended


def _running(pattern: str, kind: type[_Record]) -> list[_Record]:
    """The records of processes that are alive."""
    records = (_read(path, kind) for path in runtime_directory().glob(pattern))
    return [record for record in records if record is not None and _live(record)]


def _is_socket_directory(directory: Path) -> bool:
    return directory.parent == runtime_directory() or directory.match("/tmp/headrace-*")


def _in_use(directory: Path) -> bool:
    return any(record.socket_directory == str(directory) for record in running_serves())


class RunState:
    """The record of this process's own serve: written at each change, removed at the end."""

    def __init__(self, port: int) -> None:
        directory = runtime_directory()
        self._path = directory / f"serve-{port}.json"
        # Another host address may serve on the same port.
        if self._path.exists() and _live(_read(self._path, ServeRecord)):
            self._path = directory / f"serve-{port}-{os.getpid()}.json"

    def write(self, record: ServeRecord) -> None:
        """Replace the record. Readers see the old or the new one."""
        _replace(self._path, record)

    def remove(self, record: ServeRecord) -> None:
        """Remove the record and the sockets."""
        self._path.unlink(missing_ok=True)
        shutil.rmtree(record.socket_directory, ignore_errors=True)


class JoinState:
    """The record of this process's own stages: written at each change, removed at the end."""

    def __init__(self) -> None:
        _swept("stages-*.json", JoinRecord)
        self._path = runtime_directory() / f"stages-{os.getpid()}.json"

    def write(self, record: JoinRecord) -> None:
        """Replace the record. Readers see the old or the new one."""
        _replace(self._path, record)

    def remove(self) -> None:
        """Remove the record."""
        self._path.unlink(missing_ok=True)


def running_joins() -> list[JoinRecord]:
    """Records of the stages of this user that are alive, by process."""
    return sorted(_running("stages-*.json", JoinRecord), key=lambda record: record.pid)


def running_serves(port: int | None = None) -> list[ServeRecord]:
    """Records of the serves of this user that are alive, by port; of one port only if given."""
    live = _running("serve-*.json", ServeRecord)
    return sorted((record for record in live if port in (None, record.port)), key=lambda record: record.port)


def only_serve(port: int | None, *, if_none: str, if_several: str) -> ServeRecord:
    """The record of the only serve of this user, or of the one on this port. Raises CommandError with a remedy if there
    is none, or if there are several."""
    records = running_serves(port)
    if len(records) == 1:
        return records[0]
    problem = "no `headrace serve` runs here" if not records else "several `headrace serve` run here"
    raise CommandError(f"{problem}; {if_several if records else if_none}")


def _replace(path: Path, record: ServeRecord | JoinRecord) -> None:
    fresh = path.with_suffix(f".{os.getpid()}.tmp")
    fresh.write_text(json.dumps(asdict(record)))
    fresh.replace(path)


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    try:
        raw = json.loads(path.read_text())
        processes = tuple(ProcessRecord(**process) for process in raw.pop("processes"))
        lists = {name: tuple(value) for name, value in raw.items() if isinstance(value, list)}
        return kind(**{**raw, **lists}, processes=processes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _live(record: ServeRecord | JoinRecord | None) -> bool:
    return record is not None and _start_ticks(record.pid) == record.start_ticks


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _start_ticks(pid: int) -> int | None:
    """Field 22 of /proc/PID/stat (proc(5)), None for a process that is gone or a zombie (field 3)."""
    try:
        # The name in field 2 may contain anything, so count from its end.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
