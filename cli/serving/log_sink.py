"""Writes the log lines of many processes to one stream, each with its process's name, without blocking a process.

text  worker-0 | 2026-01-31 12:00:00,000 INFO headrace.worker [-] listening on unix:/tmp/...
json  {"process":"worker-0","time":"2026-01-31T12:00:00.000Z","level":"info", ...}
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
from datetime import UTC, datetime
from typing import BinaryIO

_MAX_WAITING_LINES = 10_000
_COLOURS = (b"\x1b[36m", b"\x1b[33m", b"\x1b[32m", b"\x1b[35m", b"\x1b[34m")


class LogSink:
    """Writes lines in a background thread. With `as_json`, every line becomes a JSON object, even if the process
    printed plain text.

    If the reader of the stream is too slow, lines are dropped, and their number is reported.
    """

    def __init__(self, stream: BinaryIO, *, colour: bool = False, as_json: bool = False) -> None:
        self._stream = stream
        self._colour = colour and not as_json
        self._as_json = as_json
        self._seen: dict[str, bytes] = {}
        self._num_dropped = 0
        self._queue: queue.Queue[bytes | None] = queue.Queue(_MAX_WAITING_LINES)
        self._thread = threading.Thread(target=self._write_all, name="log-sink", daemon=True)
        self._thread.start()

    def line(self, name: str, text: bytes | str) -> None:
        """Queue one line, without its line break."""
        raw = text.encode() if isinstance(text, str) else text
        entry = self._entry(name, raw)
        if self._num_dropped:
            entry = self._entry("serve", b"%d lines were dropped" % self._num_dropped) + entry
        try:
            self._queue.put_nowait(entry)
            self._num_dropped = 0
        except queue.Full:
            self._num_dropped += 1

    def close(self, timeout_s: float = 1.0) -> None:
        """Write the queued lines, for at most `timeout_s`."""
        with contextlib.suppress(queue.Full):
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)

    def _entry(self, name: str, raw: bytes) -> bytes:
        if not self._as_json:
            return self._prefix(name) + raw + b"\n"
        if raw.startswith(b'{"time":') and raw.endswith(b"}"):
            return b'{"process":"%s",%s\n' % (name.encode(), raw[1:])
        fields = {
            "process": name,
            "time": datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": "error" if raw.startswith(b"error: ") else "info",
            "logger": "headrace.serve" if name == "serve" else "stderr",
            "message": raw.decode(errors="replace"),
        }
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"

    def _prefix(self, name: str) -> bytes:
        prefix = self._seen.get(name)
        if prefix is None:
            prefix = f"{name} | ".encode()
            if self._colour:
                prefix = _COLOURS[len(self._seen) % len(_COLOURS)] + prefix + b"\x1b[0m"
            self._seen[name] = prefix
        return prefix

    def _write_all(self) -> None:
        while (entry := self._queue.get()) is not None:
            # The reader of the stream may be gone. The processes continue.
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(entry)
                if self._queue.empty():
                    self._stream.flush()
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()
