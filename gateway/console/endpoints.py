"""The web console: a page at / with a chat and the fleet, and the figures for it.

The files are in `console/page`, read once and served unchanged. The styles and the script of the theme are inside of
the page, so that a browser paints it without asking for more. Nothing is loaded from other hosts. The page uses the
public API, GET /console/fields (the sampling fields, from the table that the checks follow) and GET /console/fleet. The
answers of these two may change with the page.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args, get_type_hints

from headrace.common.version import headrace_version
from headrace.gateway.chat.fields import APPLIED, OF_CHATS
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import query_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.fields import Applied
from headrace.gateway.services import Services
from headrace.gateway.telemetry.recent import FAULTS, INTERVAL_S, RANGES, Figures, Interval, Recent, percentile
from headrace.gateway.text.models import Models
from headrace.gateway.upstream.routers import Upstream
from headrace.protos.router_pb2 import WorkerInfo, WorkerState
from headrace.protos.sampling_fields import NUMBERS, SamplingNumbers
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard, Rank, Role, StepCost

FILES = Path(__file__).parent / "page"
MIN_INTERVAL_S = 0.9
"""The minimum interval between two requests to the router, for all open consoles together."""

_CONTENT_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
}
_FILE_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"vary", b"accept-encoding"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
)
INSIDE = {
    "theme.js": b'<script src="console/theme.js"></script>',
    "style.css": b'<link rel="stylesheet" href="console/style.css">',
}
"""The files that are inside of the page as it is served, and what names them in its source."""
_COUNTS = ("max_tokens", "min_tokens")
_LISTS = ("stop", "samplers", "dry_sequence_breakers")
"""Sampling fields that are not numbers: the page sends lists of texts for them."""
_SWITCHES = ("ignore_eos",)
_LOCAL_HOSTS = frozenset({"", "localhost", "127.0.0.1", "::1"})
_MINUTE = int(60 / INTERVAL_S)
_MAX_KEPT_TIMES = 256


def endpoints(services: Services) -> Sequence[Endpoint]:
    """The endpoints GET / and /console/... The files of the console need no API key. The data that it shows do."""
    figures = _Figures(FleetView(services.upstream), services.metrics.recent, services.models)
    kept = {"index.html", *INSIDE}
    files = [
        file_of(path) for path in sorted(FILES.iterdir()) if path.suffix in _CONTENT_TYPES and path.name not in kept
    ]
    files.append(page(FILES))
    files.append(_File("/console/fields", b"application/json", encode(sampling_fields())))
    return [
        Endpoint("GET", "/console/fleet", "fleet", figures.answer),
        *(Endpoint("GET", file.url_path, "console", file.answer, is_open=True) for file in files),
    ]


class _File:
    """A static file, compressed once. Browsers cache it and ask each time whether it has changed. `inside` are the
    scripts and styles in it, which its policy allows beside those in files of their own."""

    def __init__(
        self, url_path: str, content_type: bytes, content: bytes, inside: Mapping[str, bytes] = MappingProxyType({})
    ) -> None:
        self.url_path = url_path
        self._plain = content
        self._compressed = gzip.compress(self._plain, mtime=0)
        self._content_type = content_type
        self._digest = hashlib.sha256(self._plain).hexdigest()[:24].encode()
        self._policy = _policy(inside)

    async def answer(self, exchange: Exchange) -> None:
        asked = dict(exchange.scope["headers"])
        compressed = b"gzip" in asked.get(b"accept-encoding", b"")
        etag = b'"%s%s"' % (self._digest, b"-gzip" if compressed else b"")
        headers = [(b"etag", etag), (b"content-security-policy", self._policy), *_FILE_HEADERS]
        if compressed:
            headers.append((b"content-encoding", b"gzip"))
        body = self._compressed if compressed else self._plain
        status = 200
        if etag in (tag.strip().removeprefix(b"W/") for tag in asked.get(b"if-none-match", b"").split(b",")):
            body = b""
            status = 304
        await exchange.respond(body, status=status, content_type=self._content_type, headers=headers)


def file_of(path: Path) -> _File:
    """A file that the page loads."""
    return _File(f"/console/{path.name}", _CONTENT_TYPES[path.suffix], path.read_bytes())


def page(folder: Path) -> _File:
    """The page itself, with the files of `INSIDE` in it."""
    content = (folder / "index.html").read_bytes()
    inside = {}
    for name, mark in INSIDE.items():
        tag = "script" if name.endswith(".js") else "style"
        inside[tag] = (folder / name).read_bytes()
        assert content.count(mark) == 1, f"the page names {name} once"
        content = content.replace(mark, b"<%s>%s</%s>" % (tag.encode(), inside[tag], tag.encode()))
    return _File("/", _CONTENT_TYPES[".html"], content, inside)


def _policy(inside: Mapping[str, bytes]) -> bytes:
    """The content security policy of a file with this script and these styles inside."""

    def allowed(tag: str) -> bytes:
        if tag not in inside:
            return b"'self'"
        return b"'self' 'sha256-%s'" % base64.b64encode(hashlib.sha256(inside[tag]).digest())

    return (
        b"default-src 'none'; script-src %s; style-src %s; img-src 'self' data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'" % (allowed("script"), allowed("style"))
    )


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
        self._times: dict[tuple[int, str | None], tuple[int, dict[str, Any]]] = {}

    async def answer(self, exchange: Exchange) -> None:
        since, length_s, model = _asked(exchange)
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
            "recent": self._recent_value(since, length_s, model),
        }
        await exchange.respond(encode(body), headers=[(b"cache-control", b"no-store")])

    def _recent_value(self, since: int, length_s: int, model: str | None) -> dict[str, Any]:
        """Intervals from `since` on, and the times to the first token: of the last minute, or of all intervals that are
        longer."""
        present = self._recent.number_of(length_s)
        known = self._times.get((length_s, model))
        if known is None or known[0] != present:
            # Sorting the times of a day takes milliseconds, and a page asks every second.
            first = present - _MINUTE if length_s == INTERVAL_S else 0
            shown = self._recent.complete(first, length_s)
            known = (present, times_value([one.figures(model) for one in shown]))
            if len(self._times) >= _MAX_KEPT_TIMES:
                self._times.clear()
            self._times[length_s, model] = known
        return {
            "interval_s": float(length_s),
            "num_intervals": RANGES[length_s],
            "lengths_s": sorted(RANGES),
            "next": present,
            "ttft_ms": known[1],
            "intervals": [_interval_value(one, model) for one in self._recent.complete(since, length_s)],
        }


def _asked(exchange: Exchange) -> tuple[int, int, str | None]:
    """The parameters `since`, a number of an interval; `interval_s`, its length; and `model`, for the figures of one.
    Raises `StatusError` (INVALID_FIELD)."""
    query = query_of(exchange)
    since = query.get("since", "0")
    if not (since.isascii() and since.isdigit() and len(since) <= 18):
        raise StatusError(Reason.INVALID_FIELD, "since: the number of an interval is expected", field="since")
    length_s = query.get("interval_s", str(int(INTERVAL_S)))
    if length_s not in {str(known) for known in RANGES}:
        lengths = ", ".join(str(known) for known in sorted(RANGES))
        raise StatusError(Reason.INVALID_FIELD, f"interval_s: one of {lengths} is expected", field="interval_s")
    return int(since), int(length_s), query.get("model")


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
    """A model: its default values for the page, and the figures that are needed to plan a fleet."""
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
    """The default sampling of a request: what the model's authors recommend, and the meaning of an absent field for the
    rest. A field without a value has no default."""
    defaults = card.default_sampling
    found: dict[str, float] = {name: number.default for name, number in NUMBERS.items() if number.default is not None}
    for name in (*NUMBERS, *_COUNTS):
        if name != "seed" and defaults.HasField(name):
            found[name] = round(getattr(defaults, name), 4)
    return found


def sampling_fields() -> list[dict[str, Any]]:
    """The sampling fields that the page offers, from the tables that the checks and the reference follow: name, kind,
    range, values and meaning of each, in Markdown."""
    hints = get_type_hints(SamplingNumbers)
    numbers = [
        {
            "name": name,
            "kind": "whole" if int in get_args(hints[name]) else "number",
            "least": number.least,
            "greatest": number.greatest,
            "values": number.values,
            "meaning": number.meaning,
        }
        for name, number in NUMBERS.items()
    ]
    kinds = {**dict.fromkeys(_COUNTS, "whole"), **dict.fromkeys(_LISTS, "texts"), **dict.fromkeys(_SWITCHES, "switch")}
    rows = {**APPLIED, **OF_CHATS}
    others = []
    for name, kind in kinds.items():
        row = rows[name]
        assert isinstance(row, Applied)
        bounds = {"least": 0 if name == "min_tokens" else 1, "greatest": 2**31 - 1} if kind == "whole" else {}
        others.append({"name": name, "kind": kind, **bounds, "values": row.values, "meaning": row.meaning})
    return [*numbers, *others]


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
        "transfer_bytes_per_s": load.transfer_bytes_per_s,
        "step_costs": {
            name: {one.name: getattr(getattr(load, f"{name}_steps"), one.name) for one in StepCost.DESCRIPTOR.fields}
            for name in ("prompt", "decode")
            if load.HasField(f"{name}_steps")
        },
        "counters": counters,
        "ranks": _rank_values(load.ranks),
        "stages": [
            {
                "address": stage.address,
                "first_layer": stage.first_layer,
                "num_layers": stage.num_layers,
                "compute_seconds": stage.compute_seconds,
                "wait_seconds": stage.wait_seconds,
                "ranks": _rank_values(stage.ranks),
            }
            for stage in load.stages
        ],
    }


def _rank_values(ranks: Iterable[Rank]) -> list[dict[str, Any]]:
    return [
        {
            "numa_node": rank.numa_node if rank.HasField("numa_node") else None,
            "cpus": rank.cpus,
            "step_seconds": rank.step_seconds,
            "wait_seconds": rank.wait_seconds,
        }
        for rank in ranks
    ]


def times_value(figures: Sequence[Figures]) -> dict[str, Any]:
    """Median, 95th percentile and number of the times to the first token, in milliseconds."""
    times = [ms for one in figures for ms in one.ttft_ms]
    return {"p50": percentile(times, 0.5), "p95": percentile(times, 0.95), "count": len(times)}


def _interval_value(interval: Interval, model: str | None) -> dict[str, Any]:
    figures = interval.figures(model)
    return {
        "number": interval.number,
        "tokens": figures.num_tokens,
        "prompt_tokens": figures.num_prompt_tokens,
        "cached_tokens": figures.num_cached_tokens,
        "answered": interval.num_answered,
        "cancelled": interval.num_cancelled,
        "refused": interval.num_refused,
        "failed": interval.num_failed,
        "reasons": {
            "refused": {name: count for name, count in interval.reasons.items() if name not in FAULTS},
            "failed": {name: count for name, count in interval.reasons.items() if name in FAULTS},
        },
        "ttft_p50_ms": percentile(figures.ttft_ms, 0.5),
        "ttft_p95_ms": percentile(figures.ttft_ms, 0.95),
    }
