"""Checks and chooses the ports to listen on before any process starts."""

from __future__ import annotations

import errno
import secrets
import socket
from pathlib import Path

from headrace.common.commands import CommandError

_FREE_PAIR_TRIES = 50
_MIN_PORT, _MAX_PORT = 20_000, 65_535
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def chosen_port(host: str, port: int) -> int:
    """The port, or a free one for 0. Raises CommandError if a server cannot listen there."""
    if not port:
        return free_port(host)
    check_port(host, port, "--port")
    return port


def check_port(host: str, port: int, flag: str) -> None:
    """Raise CommandError with a remedy unless a server can listen on the port. `flag` is the option that set it."""
    error = _bind_error(host, port)
    if error is None:
        return
    if error.errno == errno.EADDRINUSE:
        raise CommandError(
            f"port {port} on {host} is already in use; stop what listens there or choose another port with {flag}"
        )
    if error.errno == errno.EACCES:
        raise CommandError(f"this user may not listen on port {port}; choose 1024 or higher with {flag}")
    raise CommandError(
        f"{host} is not an address of this machine ({error.strerror}); set --host, for example to 127.0.0.1 or 0.0.0.0"
    )


def is_free(host: str, port: int) -> bool:
    """Whether a server can listen on the port."""
    return 0 < port <= _MAX_PORT and _bind_error(host, port) is None


def free_port(host: str) -> int:
    """A free port. If possible, the next higher port is free, too, and neither is one that the system gives to outgoing
    connections: it could be taken before the server listens."""
    check_port(host, 0, "--port")
    end = _first_outgoing_port() - 1
    if end > _MIN_PORT:
        for _ in range(_FREE_PAIR_TRIES):
            port = _MIN_PORT + secrets.randbelow(end - _MIN_PORT)
            if is_free(host, port) and is_free(host, port + 1):
                return port
    port = 0
    for _ in range(_FREE_PAIR_TRIES):
        with _socket_for(host) as listener:
            listener.bind((host, 0))
            port = listener.getsockname()[1]
        if is_free(host, port + 1):
            break
    return port


def _first_outgoing_port() -> int:
    """The lowest port that the system gives to outgoing connections; 0 if it is not known."""
    try:
        return int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0


def _bind_error(host: str, port: int) -> OSError | None:
    try:
        with _socket_for(host) as listener:
            # Servers also set this. Without it, recently closed connections would make the port look taken.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
    except OSError as error:
        return error
    return None


def _socket_for(host: str) -> socket.socket:
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.socket(family, socket.SOCK_STREAM)
