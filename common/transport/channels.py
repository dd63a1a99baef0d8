"""gRPC between the processes of a fleet: options of channels and servers, mutual TLS, the join token.

Connections are plain unless a process has a directory with three PEM files:

    ca.pem     the fleet's own certificate authority; it signs the certificates of all members
    cert.pem   this process's certificate, for the name `FLEET_NAME`, for serving and for calling
    key.pem    its private key

Then both sides show a certificate signed by the authority, and callers check that the server's name is `FLEET_NAME`,
independent of its address. Workers have unknown addresses, so the name proves membership and not a location. With a
join token, every call except health presents it too. A file of several tokens, one a line, lets a fleet change to
another one: a process presents the first of them, and accepts all. A join token alone protects against callers that can
reach a port, but not against eavesdroppers. Without either, a process serves on loopback and unix sockets only, unless
it may be insecure.

The files are checked for changes at most once a second. Servers use new files from the next handshake on, callers from
the next channel on (see `Transport.version`). Open connections stay open. Files that do not fit together, as between
the writing of a certificate and of its key, are ignored until they do.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import ssl
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, TypeAlias, cast

import grpc

from headrace.common.stores.watched_files import WatchedFiles
from headrace.protos.answer_bounds import MAX_REQUEST_BYTES
from headrace.protos.status import Reason, StatusError, abort

FLEET_NAME = "headrace.internal"
JOIN_TOKEN_KEY = "x-headrace-join-token"
MIN_TOKEN_CHARS = 16
MAX_TOKEN_CHARS = 4096

Options: TypeAlias = tuple[tuple[str, "int | str"], ...]

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of an answer. Requests may have images, and are as large as `MAX_REQUEST_BYTES`."""
COMMON_OPTIONS: Options = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC starts no timer for the keepalive's timeout alone. A ping has its own, which is a minute unless it is set.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Of every channel and every server. A connection ends after 20 s of silence: 10 s until a ping, and 10 s for its
answer. What stands still for less than 10 s loses nothing."""


def channel_options(longest_pause_ms: int = 1_000) -> Options:
    """Options of a channel that reconnects with pauses of at most `longest_pause_ms`. gRPC's default pauses grow to two
    minutes, which would delay reconnecting to a process that was down for long."""
    return (
        *COMMON_OPTIONS,
        ("grpc.max_send_message_length", MAX_REQUEST_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", 50),
        ("grpc.max_reconnect_backoff_ms", longest_pause_ms),
        ("grpc.min_reconnect_backoff_ms", 2_000),  # despite its name, the time limit of one attempt to connect
    )


CHANNEL_OPTIONS = channel_options()
SERVER_OPTIONS: Options = (
    *COMMON_OPTIONS,
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_REQUEST_BYTES),
    # Two servers on one port would share its calls. The second one must fail to start instead.
    ("grpc.so_reuseport", 0),
    # Callers ping every 10 s, with and without calls. Do not treat that as abuse.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
)

_FILES = ("ca.pem", "cert.pem", "key.pem")
_MAX_FLIGHTS = 4  # for messages in both directions, until a handshake is done
_HEALTH = "/grpc.health.v1.Health/"
_LOG = logging.getLogger(__name__)

_Method: TypeAlias = "grpc.RpcMethodHandler[Any, Any] | None"
_Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[_Method]]"


class TransportError(ValueError):
    """The files cannot be used. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a process in its fleet, as PEM: the authority, the certificate chain, and the key."""

    ca: bytes
    certificate: bytes
    key: bytes


def read_identity(directory: Path) -> Identity:
    """The three files of a directory. Raises TransportError if one is missing or if they do not fit together."""
    try:
        found = _read(directory)
        _rehearse(directory)
        if _read(directory) != found:
            raise ValueError("they are being written")
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        reason = getattr(error, "verify_message", None) or getattr(error, "strerror", None) or str(error)
        problem = f"{directory} must have ca.pem, cert.pem (for {FLEET_NAME}) and key.pem that fit together"
        raise TransportError(f"{problem} ({reason[:200]}); headrace certs create DIR makes some") from None
    return found


def _read(directory: Path) -> Identity:
    return Identity(*((directory / name).read_bytes() for name in _FILES))


def _rehearse(directory: Path) -> None:
    """Do a handshake between two ends with these files. Raises OSError or ValueError if it fails."""
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.verify_mode = ssl.CERT_REQUIRED
    for context in (client, server):
        context.load_verify_locations(cafile=directory / "ca.pem")
        context.load_cert_chain(directory / "cert.pem", directory / "key.pem", password=_no_password)
    up = ssl.MemoryBIO()
    down = ssl.MemoryBIO()
    ends = [
        client.wrap_bio(down, up, server_hostname=FLEET_NAME),
        server.wrap_bio(up, down, server_side=True),
    ]
    for _ in range(_MAX_FLIGHTS):
        for end in ends:
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()
    # Raises ValueError if the handshake is not done.
    assert all(end.getpeercert() for end in ends), "each end has shown a certificate"


def _no_password() -> str:
    raise ValueError("key.pem is encrypted, and there is nobody to ask for its password")


def read_tokens(path: Path) -> tuple[str, ...]:
    """The join tokens in a file, one a line, without white space around them: the first is the one to present. Raises
    TransportError if there is none, or one is not valid."""
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not ASCII"
        raise TransportError(f"the join token in {path} cannot be read ({reason})") from None
    tokens = tuple(token for line in lines if (token := line.strip()))
    if not tokens or not all(map(_is_token, tokens)):
        problem = f"the join token in {path} must have {MIN_TOKEN_CHARS} to {MAX_TOKEN_CHARS} printable characters"
        raise TransportError(f"{problem}; openssl rand -hex 32 makes one")
    return tokens


def _is_token(text: str) -> bool:
    return MIN_TOKEN_CHARS <= len(text) <= MAX_TOKEN_CHARS and text.isprintable() and " " not in text


class Transport:
    """The channels and servers of one process in a fleet. Without a directory, connections are plain.

    Thread-safe, because gRPC requests certificates from its own threads.
    """

    def __init__(
        self,
        tls_dir: Path | None = None,
        join_token_file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises TransportError if the files cannot be used."""
        self._tls_dir = tls_dir
        self._token_file = join_token_file
        self._lock = threading.Lock()
        self._version = 0
        paths = [] if tls_dir is None else [tls_dir / name for name in _FILES]
        if join_token_file is not None:
            paths.append(join_token_file)
        self._files = WatchedFiles(paths, clock)
        self._identity = None if tls_dir is None else read_identity(tls_dir)
        self._tokens: tuple[str, ...] = () if join_token_file is None else read_tokens(join_token_file)

    @property
    def version(self) -> int:
        """How often the certificate files have changed. A channel keeps the files with which it was made."""
        self._look()
        return self._version

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata to send with every call: the join token, if there is one."""
        self._look()
        return tuple((JOIN_TOKEN_KEY, token) for token in self._tokens[:1])

    @property
    def has_certificates(self) -> bool:
        """Whether connections are TLS, with the certificates of the fleet."""
        return self._tls_dir is not None

    @property
    def knows_callers(self) -> bool:
        """Whether all callers must authenticate as members of the fleet."""
        return self._tls_dir is not None or self._token_file is not None

    def refuse_strangers(self, listen: str, insecure: bool) -> None:
        """Raise TransportError if anyone in the network could register, drain and name tenants at this address."""
        if insecure or self.knows_callers or stays_on_host(listen):
            return
        raise TransportError(
            f"anyone who reaches {listen} could register workers, drain them and name tenants: "
            "give all processes --join-token-file FILE (headrace certs secrets makes one) or --tls-dir DIR, "
            "listen on 127.0.0.1 or a unix socket, or set --insecure"
        )

    # --- calling ----------------------------------------------------------------------------------------------------

    def channel(self, address: str, options: Options = CHANNEL_OPTIONS) -> grpc.aio.Channel:
        """A channel to another process, for asyncio."""
        if self._tls_dir is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            channel = grpc.aio.secure_channel(address, self._channel_credentials(), options=self._named(options))
        return cast("grpc.aio.Channel", _Presenting(channel, self)) if self._token_file is not None else channel

    def blocking_channel(self, address: str) -> grpc.Channel:
        """A channel to another process, for code without asyncio. Close it, or use it in a `with`."""
        if self._tls_dir is None:
            channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            options = self._named(CHANNEL_OPTIONS)
            channel = grpc.secure_channel(address, self._channel_credentials(), options=options)
        return cast("grpc.Channel", _Presenting(channel, self)) if self._token_file is not None else channel

    def _channel_credentials(self) -> grpc.ChannelCredentials:
        self._look()
        assert self._identity is not None
        return grpc.ssl_channel_credentials(self._identity.ca, self._identity.key, self._identity.certificate)

    def _named(self, options: Options) -> Options:
        return (*options, ("grpc.ssl_target_name_override", FLEET_NAME))

    # --- serving ----------------------------------------------------------------------------------------------------

    def bind(self, server: grpc.aio.Server, address: str, *, is_mutual: bool = True) -> int:
        """Let a server listen. Returns its port (1 for a unix socket). Raises RuntimeError if that is not possible.
        With `is_mutual`, callers must show a certificate of the fleet if there are certificates."""
        if self._tls_dir is None:
            return server.add_insecure_port(address)
        credentials = grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), self._server_configuration, require_client_authentication=is_mutual
        )
        return server.add_secure_port(address, credentials)

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        """The certificates for the next handshake. gRPC calls this before each."""
        self._look()
        identity = self._identity
        assert identity is not None
        pair = (identity.key, identity.certificate)
        return grpc.ssl_server_certificate_configuration([pair], root_certificates=identity.ca)

    def interceptors(self) -> Sequence[grpc.aio.ServerInterceptor]:
        """The interceptors of a server that refuses callers without the join token."""
        return () if self._token_file is None else (_TokenInterceptor(self),)

    def admits(self, presented: str | bytes | None) -> bool:
        """Whether this is a join token of the fleet, or none is required. Compares in constant time."""
        self._look()
        if not self._tokens:
            return True
        given = presented.encode() if isinstance(presented, str) else presented or b""
        # All of them, so that the time does not tell which is right.
        return sum(hmac.compare_digest(given, token.encode()) for token in self._tokens) > 0

    # --- files ------------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Read the files again if they have changed, at most once a second."""
        if not self.knows_callers or not self._files.is_due:
            return
        with self._lock:
            if not self._files.changed():
                return
            try:
                identity = None if self._tls_dir is None else read_identity(self._tls_dir)
                tokens = () if self._token_file is None else read_tokens(self._token_file)
            except TransportError as error:
                _LOG.warning("certificates and join token stay unchanged: %s", error)
                return
            if identity != self._identity:
                self._identity = identity
                self._version += 1
                _LOG.info("certificates were read again from %s", self._tls_dir)
            self._tokens = tokens


def stays_on_host(address: str) -> bool:
    """Whether only processes of this host reach a gRPC address: a unix socket or loopback. Names other than localhost
    may resolve to anything."""
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class _Presenting:
    """A channel whose calls present the join token."""

    def __init__(self, channel: Any, transport: Transport) -> None:
        self._channel = channel
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._presenting(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._presenting(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._presenting(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._presenting(self._channel.stream_stream(*args, **options))

    def _presenting(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def presenting(*args: Any, metadata: Iterable[tuple[str, str]] | None = None, **options: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *self._transport.metadata), **options)

        return presenting

    async def __aenter__(self) -> _Presenting:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._channel.close()

    def __enter__(self) -> _Presenting:
        return self

    def __exit__(self, *error: object) -> None:
        self._channel.close()


class _TokenInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without the join token. Health checks need none, because probes have only a certificate."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Method:
        """See grpc.aio."""
        if not handler_call_details.method.startswith(_HEALTH):
            presented = dict(handler_call_details.invocation_metadata or ()).get(JOIN_TOKEN_KEY)
            if not self._transport.admits(presented):
                problem = "the join token is missing or wrong: give all processes the same --join-token-file"
                return refusing(StatusError(Reason.UNAUTHENTICATED, problem))
        return await continuation(handler_call_details)


def refusing(error: StatusError) -> grpc.RpcMethodHandler[Any, Any]:
    """A handler that ends a call of any kind before its first message is read."""

    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


PLAIN = Transport()
"""The transport without TLS."""
