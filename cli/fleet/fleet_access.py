"""Options with which commands authenticate to a fleet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from headrace.cli.http_client import http_client, is_on_this_host
from headrace.common.commands import CommandError

if TYPE_CHECKING:
    import ssl

    import httpx

    from headrace.common.transport.channels import Transport

_FILE = click.Path(path_type=Path)


def access_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --tls-dir and --join-token-file to a command, and the variables that all processes of a fleet read."""
    directory = click.option(
        "--tls-dir",
        envvar="HEADRACE_TLS_DIR",
        type=_FILE,
        help="Directory with ca.pem, cert.pem and key.pem, if the fleet uses mutual TLS.",
    )
    token = click.option(
        "--join-token-file",
        envvar="HEADRACE_JOIN_TOKEN_FILE",
        type=_FILE,
        help="File with the join token of the fleet.",
    )
    return directory(token(command))


def transport_of(tls_dir: Path | str | None, join_token_file: Path | str | None) -> Transport:
    """The transport to the fleet. Raises CommandError if the files cannot be used."""
    # Imported here, because it imports gRPC, which not every command needs.
    from headrace.common.transport.channels import Transport, TransportError

    try:
        return Transport(
            None if tls_dir is None else Path(tls_dir), None if join_token_file is None else Path(join_token_file)
        )
    except TransportError as error:
        raise CommandError(str(error)) from None


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Access to the HTTP API: a key, and the authority of the server's certificate."""

    api_key: str | None = None
    ca_file: Path | None = None

    def client(self, url: str, timeout: httpx.Timeout | float) -> httpx.Client:
        """A client of the server at `url` that sends the key. A server on this host is asked without a proxy. Close the
        client, or use it in a `with`. Raises CommandError for a bad key, a bad file or a bad variable."""
        if self.api_key is not None and not (self.api_key.isascii() and self.api_key.isprintable()):
            problem = "has characters that are not printable ASCII; was it copied with quotes or a line break?"
            raise CommandError(f"the key of --api-key (HEADRACE_API_KEY) {problem}")
        headers = {} if self.api_key is None else {"authorization": f"Bearer {self.api_key}"}
        return http_client(direct=is_on_this_host(url), timeout=timeout, headers=headers, verify=self._authorities(url))

    def _authorities(self, url: str) -> ssl.SSLContext | bool:
        """The certificates to trust; False without TLS."""
        if url.startswith("http:") and self.ca_file is None:
            return False
        import ssl

        import httpx

        if self.ca_file is None:
            try:
                return httpx.create_ssl_context()  # reads SSL_CERT_FILE and SSL_CERT_DIR
            except OSError as error:
                raise CommandError(f"SSL_CERT_FILE names no file of certificates: {error.strerror or error}") from None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:
            raise CommandError(f"--ca-file {self.ca_file}: {error.strerror or 'no certificates in it'}") from None


OPEN = ApiAccess()
"""Access to a gateway without keys and TLS."""


def api_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --api-key and --ca-file to a command, which gets them as `access`."""

    @functools.wraps(command)
    def with_access(*args: Any, api_key: str | None, ca_file: Path | None, **options: Any) -> Any:
        return command(*args, access=ApiAccess(api_key, ca_file), **options)

    key = click.option("--api-key", envvar="HEADRACE_API_KEY", help="API key, if the gateway requires one.")
    ca_file = click.option(
        "--ca-file", envvar="HEADRACE_CA_FILE", type=_FILE, help="File with the authority of the server's certificate."
    )
    return key(ca_file(with_access))
