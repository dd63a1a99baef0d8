"""Follows the pods of a Service: a list of its EndpointSlices, then a watch from the list's version on.

    list --version--> watch --ends--> watch from the last version that was heard --410 Gone--> list

Every event, bookmarks included, moves the version on, so a watch that breaks off continues where it ended. A version
that the API server no longer has is answered with 410 Gone, and the list begins anew.

A watch may be silent because nothing changes, or because its connection or its server is frozen. The server is asked to
end each after `watch_s`; one that goes on for longer is ended here. While the API server cannot be reached, the last
known pods stay.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace.common.kubernetes.cluster import CallError, Cluster
from headrace.common.kubernetes.services import (
    Condition,
    Endpoint,
    Endpoints,
    EndpointSlice,
    Service,
    SliceList,
    Status,
    WatchEvent,
    decode,
    endpoints_of,
    ports_of,
)
from headrace.common.tasks import end_tasks

log = logging.getLogger(__name__)

_PAGE = 500  # slices
_LABEL = "kubernetes.io/service-name"


@dataclass(frozen=True, slots=True)
class Pace:
    """Times of a watch in seconds. A watch lasts `watch_s`, a quarter more or less at random, and `late_s` more until
    it is given up. Pauses after failures double from `first_pause_s` to `max_pause_s`."""

    watch_s: float = 30.0
    late_s: float = 5.0
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    steady_s: float = 1.0
    """A watch that lasts at least this long, or brings an event, ends a row of failures."""


PACE = Pace()


class ServiceWatch:
    """Reports the pods of a Service whenever they change. Start and close it in one event loop."""

    def __init__(
        self,
        service: Service,
        cluster: Cluster,
        seen: Callable[[Endpoints], None],
        *,
        ended: Callable[[str], None] = lambda reason: None,
        pace: Pace = PACE,
        rng: random.Random | None = None,
    ) -> None:
        """`seen` is called with all pods, first after the first list. `ended` is called with a word when a list or
        watch ends otherwise than it should: expired, silent, dropped, unreachable, refused or failed."""
        self.service = service
        self.name = f"{service.name}.{service.namespace or cluster.namespace}:{service.port}"
        self.endpoints: dict[str, Endpoint] = {}
        self.has_listed = False
        """Whether the pods are known: false until the first list."""
        self.is_current = False
        """Whether changes arrive: false while the API server cannot be reached or refuses."""
        self._cluster = cluster
        self._seen = seen
        self._ended = ended
        self._pace = pace
        self._rng = rng or random.Random()
        namespace = service.namespace or cluster.namespace
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"{_LABEL}={service.name}"}
        self._slices: dict[str, EndpointSlice] = {}
        self._version = ""  # empty: list first
        self._is_steady = False  # since the last failure
        self._has_warned = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start to follow the Service, until `close`."""
        assert self._task is None, "started twice"
        self._task = asyncio.create_task(self._run(), name=f"watch of {self.name}")

    async def close(self) -> None:
        """End the watch."""
        if self._task is not None:
            await end_tasks(self._task)

    def count(self, condition: Condition) -> int:
        """The number of pods in a condition."""
        return sum(one.condition is condition for one in self.endpoints.values())

    async def _run(self) -> None:
        num_failures = 0
        while True:
            self._is_steady = False
            failure: CallError | None = None
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except CallError as error:
                failure = error
            except Exception as error:
                log.exception("the watch of %s failed; it begins anew", self.name)
                self._version = ""
                failure = CallError("failed", type(error).__name__)
            if self._is_steady:
                num_failures = 0
            if failure is not None or not self._is_steady:
                num_failures += 1
            if failure is not None:
                self._failed(failure, num_failures)
            retry_after_s = 0.0 if failure is None else failure.retry_after_s
            await asyncio.sleep(max(self._pause_s(num_failures), retry_after_s))

    def _pause_s(self, num_failures: int) -> float:
        """A random pause, so that not all processes of a fleet come back at the same time; none without a failure."""
        if num_failures == 0:
            return 0.0
        longest_s = min(self._pace.first_pause_s * 2.0 ** min(num_failures - 1, 16), self._pace.max_pause_s)
        return longest_s * self._rng.uniform(0.5, 1.0)

    def _failed(self, error: CallError, num_failures: int) -> None:
        self._ended(error.reason)
        if error.reason == "expired":
            self._version = ""
            log.info("the watch of %s is too old; listing anew", self.name)
            if num_failures == 1:
                return
        # A connection that ends is an everyday event, and the next watch goes on from the same version.
        if num_failures > 1 or not self.has_listed or error.reason in ("refused", "failed"):
            self.is_current = False
            if not self._has_warned:
                self._has_warned = True
                log.warning("cannot watch the service %s; its known pods stay: %s", self.name, error)

    def _note_current(self) -> None:
        if self._has_warned:
            log.info("watching the service %s again: %d pods", self.name, len(self.endpoints))
        self._has_warned = False
        self.is_current = True

    async def _list(self) -> None:
        found: dict[str, EndpointSlice] = {}
        page = {"limit": str(_PAGE)}
        while True:
            raw = await self._cluster.get(self._path, {**self._selector, **page})
            listed: SliceList = self._decoded(raw, SliceList)
            found |= {one.metadata.name: one for one in listed.items or ()}
            if not listed.metadata.continue_:
                break
            page = {"limit": str(_PAGE), "continue": listed.metadata.continue_}
        self._slices = found
        self._version = listed.metadata.resource_version
        if not self.has_listed:
            log.info("watching the service %s: %d pods", self.name, len(endpoints_of(found.values(), 0)))
            self._check_port()
        self._tell()
        self._note_current()

    def _check_port(self) -> None:
        ports = ports_of(self._slices.values())
        if ports and self.service.port not in ports:
            log.warning(
                "the service %s names the ports %s, but not %d: is that where its pods listen?",
                self.name,
                ", ".join(map(str, sorted(ports))),
                self.service.port,
            )

    async def _watch(self) -> None:
        """Apply events until the server ends the watch. Raises CallError if it ends otherwise."""
        began_s = time.monotonic()
        watch_s = max(round(self._pace.watch_s * self._rng.uniform(0.75, 1.25)), 1)
        parameters = {
            **self._selector,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(watch_s),
        }
        try:
            async with (
                asyncio.timeout(watch_s + self._pace.late_s),
                self._cluster.lines(self._path, parameters) as parts,
            ):
                self._note_current()
                async for lines in parts:
                    changed = False
                    for line in filter(None, lines):
                        changed |= self._apply(line)
                        self._is_steady = True
                    if changed:
                        self._tell()
        except TimeoutError:
            raise CallError("silent", "the watch did not end in time") from None
        except CallError as error:
            if error.reason == "unreachable" and self._lasted(began_s):
                self._is_steady = True
                raise CallError("dropped", str(error)) from None
            raise
        self._is_steady |= self._lasted(began_s)

    def _lasted(self, began_s: float) -> bool:
        return time.monotonic() - began_s >= self._pace.steady_s

    def _apply(self, line: bytes) -> bool:
        """Apply an event. Returns whether a slice has changed. Raises CallError for an error of the server, after which
        the list begins anew."""
        event: WatchEvent = self._decoded(line, WatchEvent)
        if event.type == "ERROR":
            self._version = ""
            status: Status = self._decoded(bytes(event.object), Status)
            reason = "expired" if status.code == 410 else "failed"
            raise CallError(reason, f"{status.code} {status.reason} {status.message[:500]}")
        one: EndpointSlice = self._decoded(bytes(event.object), EndpointSlice)
        self._version = one.metadata.resource_version or self._version
        if event.type in ("ADDED", "MODIFIED"):
            self._slices[one.metadata.name] = one
            return True
        return event.type == "DELETED" and self._slices.pop(one.metadata.name, None) is not None

    def _decoded(self, raw: bytes, shape: type[Any]) -> Any:
        try:
            return decode(raw, shape)
        except ValueError as error:
            self._version = ""
            raise CallError("failed", f"the API server sent what cannot be read: {error}") from None

    def _tell(self) -> None:
        endpoints = endpoints_of(self._slices.values(), self.service.port)
        is_news = endpoints != self.endpoints or not self.has_listed
        self.endpoints = endpoints
        self.has_listed = True
        if is_news:
            self._seen(endpoints)
