"""The flags of the edge, and the objects made from them: admission control, limits, TLS on both sides."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import click

from headrace.common.flags import FiniteRange
from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import Transport, TransportError
from headrace.gateway.access.admission import AdmissionBounds, AdmissionControl, Limits, OwnLimits
from headrace.gateway.access.keys import KeyFile, KeyRing, KeysError, KeyTable
from headrace.gateway.access.limits import LocalLimits
from headrace.gateway.access.quota import SharedLimits
from headrace.gateway.edge.connections import ConnectionBounds
from headrace.gateway.edge.exchange import Bodies
from headrace.gateway.edge.tls import EdgeTls, TlsError

_MIB = 1024 * 1024
_FILE = click.Path(path_type=Path)


class EdgeSettingsError(ValueError):
    """The flags are wrong. The message is a sentence with the remedy."""


def _flag(flag: str = "", *, default: Any = None, **option: Any) -> Any:
    """A field with its flag, which by default has the field's name."""
    return field(default=default, metadata={"flag": flag, "option": {**option, "default": default}})


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    """The values of the command line, each with its flag. Sizes in MiB or KiB as named, times in seconds."""

    api_keys: Path | None = _flag(
        type=_FILE, metavar="FILE", help="Require one of the API keys in this file; see headrace keys."
    )
    api_keys_redis: bool = _flag(
        default=False, is_flag=True, help="Require one of the API keys in the Redis of --redis."
    )
    redis_url: str | None = _flag(
        "--redis",
        envvar="HEADRACE_GATEWAY_REDIS",
        metavar="URL",
        help="Redis that gateways share: redis://HOST:PORT/DB, or redis+sentinel://HOST:PORT,.../SERVICE.",
    )
    open_metrics: bool = _flag(default=False, is_flag=True, help="Serve /metrics without a key.")
    vllm_metrics: bool = _flag(
        default=False,
        is_flag=True,
        help="Publish the metrics of models under the names of vLLM too, for schedulers that read them.",
    )
    tls_cert: Path | None = _flag(
        type=_FILE, metavar="FILE", help="Serve HTTPS, and gRPC over TLS, with this certificate chain."
    )
    tls_key: Path | None = _flag(type=_FILE, metavar="FILE", help="The private key of --tls-cert.")
    tls_client_ca: Path | None = _flag(
        type=_FILE, metavar="FILE", help="Require client certificates signed by this authority."
    )
    tls_dir: Path | None = _flag(
        type=_FILE,
        envvar="HEADRACE_TLS_DIR",
        metavar="DIR",
        help="Mutual TLS with routers: directory with ca.pem, cert.pem, key.pem, read again when they change.",
    )
    join_token_file: Path | None = _flag(
        type=_FILE,
        envvar="HEADRACE_JOIN_TOKEN_FILE",
        metavar="FILE",
        help="File with the secret to present to routers.",
    )
    cors_origins: tuple[str, ...] = _flag(
        "--cors-origin",
        default=(),
        multiple=True,
        envvar="HEADRACE_GATEWAY_CORS_ORIGIN",
        metavar="ORIGIN",
        help="Allow pages of this origin to use the API, such as https://chat.example; * for all; may be repeated.",
    )
    max_requests: int = _flag(default=4096, type=click.IntRange(min=1), help="Maximum number of concurrent requests.")
    request_timeout: float = _flag(
        default=3600.0,
        type=FiniteRange(min=0, min_open=True),
        help="Maximum seconds from the arrival of a request to the end of its answer.",
    )
    early_headers: float | None = _flag(
        type=FiniteRange(min=0, min_open=True),
        help="Begin the response to a streaming request after this many seconds even without a token, for proxies that "
        "close silent connections. Errors after that are events, not statuses. Default: never.",
    )
    max_connections: int = _flag(default=10_000, type=click.IntRange(min=1), help="Maximum number of HTTP connections.")
    head_timeout: float = _flag(
        default=15.0,
        type=FiniteRange(min=0, min_open=True),
        help="Maximum seconds until the headers of a request are complete.",
    )
    max_head_kb: int = _flag(
        default=64, type=click.IntRange(min=1), help="Maximum size of the headers of a request, in KiB."
    )
    body_timeout: float = _flag(
        default=60.0,
        type=FiniteRange(min=0, min_open=True),
        help="Maximum seconds until the body of a request is complete.",
    )
    max_body_mb: int = _flag(
        default=32, type=click.IntRange(min=1), help="Maximum size of the body of a request, in MiB."
    )
    max_bodies_mb: int = _flag(
        default=1024, type=click.IntRange(min=1), help="Maximum size of all bodies together, in MiB."
    )
    send_timeout: float = _flag(
        default=60.0,
        type=FiniteRange(min=0.001, max=2_000_000),
        help="Seconds after which the connection of a client that reads nothing of its answer is closed.",
    )


class EdgeControls:
    """The objects made from the settings. Call `start` and `close` on one event loop."""

    def __init__(self, settings: EdgeSettings) -> None:
        """Raises EdgeSettingsError if settings contradict each other, or if a file cannot be used."""
        _check(settings)
        self.cors_origins = settings.cors_origins
        self.bodies = Bodies(settings.max_body_mb * _MIB, settings.body_timeout, settings.max_bodies_mb * _MIB)
        self.connections = ConnectionBounds(
            settings.max_connections,
            settings.head_timeout,
            settings.max_head_kb * 1024,
            settings.body_timeout,
            settings.send_timeout,
        )
        self.max_requests = settings.max_requests
        self._shared: SharedLimits | None = None
        self.keys: KeyRing | None = None
        self._following: asyncio.Task[None] | None = None
        try:
            self.transport = Transport(settings.tls_dir, settings.join_token_file)
            self.tls: EdgeTls | None = None
            if settings.tls_cert is not None and settings.tls_key is not None:
                self.tls = EdgeTls(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        except (TransportError, TlsError) as error:
            raise EdgeSettingsError(str(error)) from None
        wants_certificate = self.tls is not None and self.tls.wants_client_certificate
        bounds = AdmissionBounds(
            settings.max_requests,
            settings.request_timeout,
            settings.early_headers,
            settings.open_metrics,
            wants_certificate,
        )
        limits = self._limits(settings)
        self.admission = AdmissionControl(bounds, self._key_ring(settings, limits.retain), limits)

    def _limits(self, settings: EdgeSettings) -> Limits:
        local = LocalLimits(lambda: time.monotonic_ns() // 1000)
        has_keys = settings.api_keys is not None or settings.api_keys_redis
        if settings.redis_url is None or not has_keys:
            return OwnLimits(local)
        try:
            self._shared = SharedLimits(settings.redis_url, local)
        except ValueError as error:
            # Without the URL: it may have a password.
            raise EdgeSettingsError(f"--redis is not a Redis URL: {error}") from None
        return self._shared

    def _key_ring(self, settings: EdgeSettings, on_change: Callable[[Collection[str]], None]) -> KeyRing | None:
        if settings.api_keys is not None:
            self.keys = KeyRing(KeyFile(settings.api_keys), on_change)
        elif settings.api_keys_redis:
            assert settings.redis_url is not None
            self.keys = KeyRing(KeyTable(settings.redis_url), on_change)
        self._must_be_readable = settings.api_keys is not None
        return self.keys

    async def start(self) -> None:
        """Read the keys, and follow their changes. Raises EdgeSettingsError if a file of keys cannot be read."""
        if self._shared is not None:
            await self._shared.start()
        if self.keys is not None:
            if self._must_be_readable:
                try:
                    await self.keys.refresh()
                except KeysError as error:
                    problem = f"--api-keys: {error}; headrace keys create makes one"
                    raise EdgeSettingsError(problem) from None
            self._following = asyncio.create_task(self.keys.run(), name="API keys")

    async def close(self) -> None:
        """Stop following changes, and close all connections."""
        if self._following is not None:
            await end_tasks(self._following)
        if self.keys is not None:
            await self.keys.close()
        if self._shared is not None:
            await self._shared.close()


def _check(settings: EdgeSettings) -> None:
    if settings.api_keys is not None and settings.api_keys_redis:
        raise EdgeSettingsError("--api-keys and --api-keys-redis exclude each other; choose one")
    if settings.api_keys_redis and settings.redis_url is None:
        raise EdgeSettingsError("--api-keys-redis needs --redis URL")
    if (settings.tls_cert is None) != (settings.tls_key is None):
        raise EdgeSettingsError("--tls-cert and --tls-key go together")
    if settings.tls_client_ca is not None and settings.tls_cert is None:
        raise EdgeSettingsError("--tls-client-ca needs --tls-cert and --tls-key")
    for origin in settings.cors_origins:
        if origin != "*" and ("://" not in origin or origin.count("/") != 2 or not origin.isascii()):
            raise EdgeSettingsError(
                f"--cors-origin {origin[:100]!r} is not an origin: write SCHEME://HOST[:PORT], or *"
            )


def edge_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets their values as `controls`."""
    flags = fields(EdgeSettings)

    @functools.wraps(command)
    def with_settings(**options: Any) -> None:
        command(controls=EdgeSettings(**{flag.name: options.pop(flag.name) for flag in flags}), **options)

    wrapped: Callable[..., None] = with_settings
    for flag in reversed(flags):
        name = flag.metadata["flag"] or f"--{flag.name.replace('_', '-')}"
        wrapped = click.option(name, flag.name, **flag.metadata["option"])(wrapped)
    return wrapped
