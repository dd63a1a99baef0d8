"""A scripted API server of Kubernetes: lists and watches of EndpointSlices over HTTP, with the faults of real ones.

It numbers changes, keeps a history from which watches continue, sends bookmarks, and answers 410 for a version that it
has compacted. Tests change its slices and turn its faults on and off by attributes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

Object = dict[str, Any]
_PATH = "/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices"


@dataclass(frozen=True)
class Pod:
    """A pod as a slice has it."""

    name: str
    ip: str
    ready: bool | None = True
    terminating: bool | None = False
    ips: Sequence[str] = field(default=())

    def entry(self) -> Object:
        serving = self.ready is not False or bool(self.terminating)
        ready = self.ready if not self.terminating else False
        return {
            "addresses": [self.ip, *self.ips],
            "conditions": {"ready": ready, "serving": serving, "terminating": self.terminating},
            "targetRef": {"kind": "Pod", "name": self.name, "uid": f"uid-{self.name}-{self.ip}", "namespace": "fleet"},
            "nodeName": "n0",
        }


class ApiServer:
    """See the module. One event loop."""

    def __init__(self, namespace: str = "fleet", token: str | None = None, tls: ssl.SSLContext | None = None) -> None:
        self.namespace = namespace
        self.token = token
        self.port = 0
        self.revision = 100
        self.slices: dict[str, Object] = {}
        self.history: list[tuple[int, str, Object]] = []
        self.compacted = 0  # watches from an older revision are answered with 410
        self.is_frozen = False  # accepts connections and requests, and sends nothing
        self.ends_watches = True  # at timeoutSeconds
        self.status: tuple[int, Mapping[str, str]] | None = None  # answer of every request
        self.watch_status: int | None = None  # answer of every watch
        self.garbage: bytes | None = None  # the next line of every watch
        self.page: int | None = None  # items of a list, whatever its limit
        self.lists: list[dict[str, str]] = []  # parameters
        self.watches: list[dict[str, str]] = []
        self.tokens: list[str] = []
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._watching: set[asyncio.StreamWriter] = set()
        self._changed = asyncio.Event()

    @property
    def url(self) -> str:
        return f"{'http' if self._tls is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def num_watching(self) -> int:
        """Watches that are open now."""
        return len(self._watching)

    # -- life and faults ------------------------------------------------------------------------------------------

    async def start(self) -> ApiServer:
        """Listen, at the same port as before."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port, ssl=self._tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def stop(self) -> None:
        """Refuse connections, and break off those that there are."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self.drop(self._connections)
        await asyncio.gather(*self._tasks)

    def drop(self, connections: Iterable[asyncio.StreamWriter] | None = None) -> None:
        """Break off all watches, or these connections."""
        for writer in list(self._watching if connections is None else connections):
            writer.transport.abort()

    def compact(self) -> None:
        """Forget the history."""
        self.compacted = self.revision
        self.history = []

    # -- changes --------------------------------------------------------------------------------------------------

    def put(self, name: str, pods: Sequence[Pod], *, service: str = "worker", **fields: Any) -> None:
        """Add or change a slice."""
        kind = "MODIFIED" if name in self.slices else "ADDED"
        self.revision += 1
        self.slices[name] = {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "resourceVersion": str(self.revision),
                "labels": {"kubernetes.io/service-name": service},
            },
            "addressType": "IPv4",
            "endpoints": [pod.entry() for pod in pods],
            "ports": [{"name": "grpc", "port": 50061, "protocol": "TCP"}],
            **fields,
        }
        self._tell(kind, self.slices[name])

    def delete(self, name: str) -> None:
        """Delete a slice."""
        self.revision += 1
        gone = self.slices.pop(name)
        gone = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self.revision)}}
        self._tell("DELETED", gone)

    def bookmark(self) -> None:
        """Move every watch to the newest revision, as a server does once a minute."""
        self.revision += 1
        metadata = {"name": "", "resourceVersion": str(self.revision)}
        self._tell("BOOKMARK", {"kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": metadata})

    def _tell(self, kind: str, one: Object) -> None:
        self.history.append((self.revision, kind, one))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    # -- HTTP -----------------------------------------------------------------------------------------------------

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._serve(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                while self.is_frozen and not writer.is_closing():
                    await asyncio.sleep(0.01)
                await self._answer(head, reader, writer)
        self._connections.discard(writer)
        writer.transport.abort()

    async def _answer(self, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        parts = urlsplit(request.split()[1])
        parameters = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        is_watch = parameters.get("watch") == "true"
        (self.watches if is_watch else self.lists).append(parameters)
        self.tokens.append(headers.get("authorization", "").removeprefix("Bearer "))
        if self.status is not None:
            await _send(writer, self.status[0], _status(self.status[0]), self.status[1])
        elif self.token is not None and self.tokens[-1] != self.token:
            await _send(writer, 401, _status(401))
        elif parts.path != _PATH.format(self.namespace):
            await _send(writer, 404, _status(404))
        elif is_watch and self.watch_status is not None:
            await _send(writer, self.watch_status, _status(self.watch_status))
        elif is_watch:
            await self._watch(parameters, reader, writer)
        else:
            await _send(writer, 200, self._list(parameters))

    def _list(self, parameters: Mapping[str, str]) -> Object:
        found = [one for one in self.slices.values() if _matches(one, parameters)]
        start = int(parameters.get("continue", "0"))
        size = self.page or int(parameters.get("limit", "1000"))
        metadata = {"resourceVersion": str(self.revision)}
        if start + size < len(found):
            metadata["continue"] = str(start + size)
        return {"kind": "EndpointSliceList", "metadata": metadata, "items": found[start : start + size]}

    async def _watch(
        self, parameters: Mapping[str, str], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Send the events after a revision, until the time is over."""
        after = int(parameters["resourceVersion"])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
        if after < self.compacted:
            await _chunk(writer, {"type": "ERROR", "object": _status(410)})
            await _chunk(writer, None)
            return
        loop = asyncio.get_running_loop()
        end_s = loop.time() + float(parameters["timeoutSeconds"])
        self._watching.add(writer)
        try:
            while not (writer.is_closing() or reader.at_eof()):
                changed = self._changed
                if not self.is_frozen:
                    if self.garbage is not None:
                        garbage, self.garbage = self.garbage, None
                        await _chunk(writer, garbage)
                    for revision, kind, one in list(self.history):
                        if revision > after and (kind == "BOOKMARK" or _matches(one, parameters)):
                            assert kind != "BOOKMARK" or parameters["allowWatchBookmarks"] == "true"
                            await _chunk(writer, {"type": kind, "object": one})
                            after = revision
                    if self.ends_watches and loop.time() >= end_s:
                        await _chunk(writer, None)
                        return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.02):
                        await changed.wait()
        finally:
            self._watching.discard(writer)
        raise ConnectionResetError


def _matches(one: Object, parameters: Mapping[str, str]) -> bool:
    name, _, value = parameters["labelSelector"].partition("=")
    return bool(one["metadata"]["labels"].get(name) == value)


def _status(code: int) -> Object:
    reason = {410: "Expired", 401: "Unauthorized", 403: "Forbidden"}.get(code, "Other")
    return {"kind": "Status", "apiVersion": "v1", "code": code, "reason": reason, "message": f"scripted {reason}"}


async def _send(writer: asyncio.StreamWriter, status: int, body: Object, headers: Mapping[str, str] = {}) -> None:
    raw = json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} Scripted", f"Content-Length: {len(raw)}", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    writer.write("\r\n".join([*lines, "", ""]).encode() + raw)
    await writer.drain()


async def _chunk(writer: asyncio.StreamWriter, line: Object | bytes | None) -> None:
    raw = b"" if line is None else line if isinstance(line, bytes) else json.dumps(line).encode() + b"\n"
    writer.write(f"{len(raw):x}\r\n".encode() + raw + b"\r\n")
    await writer.drain()
