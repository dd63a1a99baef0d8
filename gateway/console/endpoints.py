"""The web console: a page at / with a chat and the fleet, and the figures for it.

The files are in `console/page`, read once and served unchanged; nothing is loaded from other hosts. The page uses the
public API and GET /console/fleet, whose answer may change with the page.
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.common.version import headrace_version
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import query_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.services import Services
from headrace.gateway.telemetry.recent import FAULTS, INTERVAL_S, NUM_INTERVALS, Interval, Recent, percentile
from headrace.gateway.text.models import Models
from headrace.gateway.upstream.routers import Upstream
from headrace.protos.router_pb2 import WorkerInfo, WorkerState
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard, Role, StepCost

FILES = Path(__file__).parent / "page"
MIN_INTERVAL_S = 0.9
"""The minimum interval between two requests to the router, for all open consoles together."""

_CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_FILE_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept-encoding"),
    (b"content-security-policy", _POLICY),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
_LOCAL_HOSTS = frozenset({"", "localhost", "127.0.0.1", "::1"})
_MINUTE = int(60 / INTERVAL_S)


def endpoints(services: Services) -> Sequence[Endpoint]:
    """The endpoints GET / and /console/... The files of the console need no API key. The data that it shows do."""
    figures = _Figures(FleetView(services.upstream), services.metrics.recent, services.models)
    files = [_File(path) for path in sorted(FILES.iterdir()) if path.suffix in _CONTENT_TYPES]
    return [
        Endpoint("GET", "/console/fleet", "fleet", figures.answer),
        *(Endpoint("GET", file.url_path, "console", file.answer, is_open=True) for file in files),
    ]


class _File:
    """A static file, compressed once. Browsers cache it and ask each time whether it has changed."""

    def __init__(self, path: Path) -> None:
        self.url_path = "/" if path.name == "index.html" else f"/console/{path.name}"
        self._plain = path.read_bytes()
        self._compressed = gzip.compress(self._plain, mtime=0)
        self._content_type = _CONTENT_TYPES[path.suffix]
        self._digest = hashlib.sha256(self._plain).hexdigest()[:24].encode()

    async def answer(self, exchange: Exchange) -> None:
        asked = dict(exchange.scope["headers"])
        compressed = b"gzip" in asked.get(b"accept-encoding", b"")
        etag = b'"%s%s"' % (self._digest, b"-gzip" if compressed else b"")
        headers = [(b"etag", etag), *_FILE_HEADERS]
        if compressed:
            headers.append((b"content-encoding", b"gzip"))
        body = self._compressed if compressed else self._plain
        status = 200
        if etag in (tag.strip().removeprefix(b"W/") for tag in asked.get(b"if-none-match", b"").split(b",")):
            body = b""
            status = 304
        await exchange.respond(body, status=status, content_type=self._content_type, headers=headers)


class FleetView:
    """The router's list of workers. Consoles that ask at the same time share one request to the router."""

    def __init__(self, upstream: Upstream, clock: Callable[[], float] = time.monotonic) -> None:
        self._upstream = upstream
        self._clock = clock
        self._asked_s = float("-inf")
        self._asking: asyncio.Task[None] | None = None
        self.workers: Sequence[WorkerInfo] = ()
        """The latest list."""
        self.problem = ""
        """Why there is no newer list; empty if the list is current."""

    async def refresh(self) -> None:
        """Fetch a list that is at most `MIN_INTERVAL_S` old, if the router answers."""
        if self._asking is None and self._clock() - self._asked_s >= MIN_INTERVAL_S:
            self._asked_s = self._clock()
            self._asking = asyncio.create_task(self._ask())
        if self._asking is not None:
            # A console that disconnects must not cancel the request of the others.
            await asyncio.shield(self._asking)

    def routers(self) -> list[dict[str, Any]]:
        """The addresses of routers or workers, and whether the gateway is connected to them."""
        return [{"address": address, "connected": connected} for address, connected in self._upstream.addresses()]

    async def _ask(self) -> None:
        try:
            self.workers = await self._upstream.list_workers()
            self.problem = ""
        except StatusError as error:
            self.problem = error.message
        finally:
            self._asking = None


class _Figures:
    """GET /console/fleet: the workers and routers now, and the gateway's intervals."""

    def __init__(self, fleet: FleetView, recent: Recent, models: Models) -> None:
        self._fleet = fleet
        self._recent = recent
        self._models = models
        self._instance = secrets.token_hex(8)
        self._version = headrace_version()

    async def answer(self, exchange: Exchange) -> None:
        since = _since(exchange)
        await self._fleet.refresh()
        routers = self._fleet.routers()
        host = socket.gethostname()
        through = routers[0]["address"]
        body = {
            # Each instance numbers its intervals by itself.
            "gateway": {"host": host, "version": self._version, "instance": self._instance},
            "routers": [{**router, "host": host_of(router["address"], host)} for router in routers],
            "problem": self._fleet.problem,
            "workers": [worker_value(worker, host_of(through, host)) for worker in self._fleet.workers],
            "models": [model_value(card) for card in self._models.cards],
            "recent": recent_value(self._recent, since),
        }
        await exchange.respond(encode(body), headers=[(b"cache-control", b"no-store")])


def _since(exchange: Exchange) -> int:
    text = query_of(exchange).get("since", "0")
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise StatusError(Reason.INVALID_FIELD, "since: the number of an interval is expected", field="since")
    return int(text)


def host_of(address: str, own_host: str) -> str:
    """The host in a gRPC target, for display; `own_host` if the target is local."""
    if address.startswith(("unix:", "unix-abstract:")):
        return own_host
    target = address.rpartition("/")[2]
    for scheme in ("ipv4:", "ipv6:", "dns:"):
        target = target.removeprefix(scheme)
    host = target[1:].partition("]")[0] if target.startswith("[") else target.rpartition(":")[0] or target
    return own_host if host in _LOCAL_HOSTS else host


def model_value(card: ModelCard) -> dict[str, Any]:
    """A model: its defaults for the page, and what plans of fleets need to know."""
    return {
        "id": card.name,
        "sampling": sampling_value(card),
        "fingerprint": card.fingerprint,
        "max_context_tokens": card.max_context_tokens,
        "block_size": card.block_size,
        "kv_block_bytes": card.kv_block_bytes,
        "kv_part_bytes": card.kv_part_bytes,
        "window_tokens": card.window_tokens,
        "kv_precision": card.kv_precision,
        "vocab_size": card.vocab_size,
    }


def sampling_value(card: ModelCard) -> dict[str, float]:
    """The default sampling of a request, for the parameters that the page has controls for."""
    defaults = card.default_sampling
    return {
        name: round(getattr(defaults, name), 4) if defaults.HasField(name) else 1.0 for name in ("temperature", "top_p")
    }


def worker_value(worker: WorkerInfo, router_host: str) -> dict[str, Any]:
    """A worker in the form that the page expects: states in lower case, the load as in the protocol."""
    load = worker.load
    return {
        "worker_id": worker.worker_id,
        "address": worker.address,
        "host": host_of(worker.address, router_host),
        "numa_node": load.numa_node if load.HasField("numa_node") else None,
        "state": WorkerState.Name(worker.state).removeprefix("WORKER_STATE_").lower().replace("_", " "),
        "detail": worker.detail,
        "model": worker.model,
        "role": Role.Name(worker.role).removeprefix("ROLE_").lower() if worker.role else "both",
        "report_age_ms": worker.report_age_ms,
        "num_in_flight": worker.num_in_flight,
        "load": _load_value(worker) if worker.HasField("load") else None,
    }


def _load_value(worker: WorkerInfo) -> dict[str, Any]:
    load = worker.load
    counters = {one.name: getattr(load.counters, one.name) for one in load.counters.DESCRIPTOR.fields}
    return {
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_blocks": load.num_blocks,
        "num_free_blocks": load.num_free_blocks,
        "num_cached_blocks": load.num_cached_blocks,
        "num_window_slots": load.num_window_slots,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "decode_step_ms": load.decode_step_ms,
        "max_num_seqs": load.max_num_seqs,
        "step_costs": {
            name: {one.name: getattr(getattr(load, f"{name}_steps"), one.name) for one in StepCost.DESCRIPTOR.fields}
            for name in ("prompt", "decode")
            if load.HasField(f"{name}_steps")
        },
        "counters": counters,
        "ranks": [
            {
                "numa_node": rank.numa_node if rank.HasField("numa_node") else None,
                "cpus": rank.cpus,
                "step_seconds": rank.step_seconds,
                "wait_seconds": rank.wait_seconds,
            }
            for rank in load.ranks
        ],
    }


def recent_value(recent: Recent, since: int) -> dict[str, Any]:
    """Intervals from `since` on, and the times to the first token of the last minute, in milliseconds."""
    minute = [ms for one in recent.complete(recent.number - _MINUTE) for ms in one.ttft_ms]
    return {
        "interval_s": INTERVAL_S,
        "num_intervals": NUM_INTERVALS,
        "next": recent.number,
        "ttft_ms": {"p50": percentile(minute, 0.5), "p95": percentile(minute, 0.95), "count": len(minute)},
        "intervals": [_interval_value(one) for one in recent.complete(since)],
    }


def _interval_value(interval: Interval) -> dict[str, Any]:
    return {
        "number": interval.number,
        "tokens": interval.num_tokens,
        "prompt_tokens": interval.num_prompt_tokens,
        "cached_tokens": interval.num_cached_tokens,
        "answered": interval.num_answered,
        "cancelled": interval.num_cancelled,
        "refused": interval.num_refused,
        "failed": interval.num_failed,
        "reasons": {
            "refused": {name: count for name, count in interval.reasons.items() if name not in FAULTS},
            "failed": {name: count for name, count in interval.reasons.items() if name in FAULTS},
        },
        "ttft_p50_ms": percentile(interval.ttft_ms, 0.5),
        "ttft_p95_ms": percentile(interval.ttft_ms, 0.95),
    }
