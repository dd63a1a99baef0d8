"""TLS towards clients: certificate files, and TLS contexts that follow their changes.

With a client authority, a client certificate must be signed by it. gRPC requires one in the handshake. HTTP requires
one for all paths but /health, which probes without certificates need.
"""

from __future__ import annotations

import logging
import ssl
import time
from pathlib import Path
from typing import Any

import grpc

from headrace.common.stores.watched_files import WatchedFiles

_LOG = logging.getLogger(__name__)


class TlsError(ValueError):
    """The files cannot be used; the message says why and what to do."""


class EdgeTls:
    """Certificate, key and client authority, from files that are checked at most once a second.

    Existing connections keep their certificate. Files that do not fit together are ignored.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """Raises TlsError."""
        self._paths = (certificate, key, *([client_ca] if client_ca is not None else []))
        self._files = WatchedFiles(self._paths, time.monotonic)
        self._context = self._load()
        self._raw = self._read()
        # The context of the listening socket. Each handshake switches from it to the current context.
        self.context = self._load()
        self.context.sni_callback = self._turn

    @property
    def wants_client_certificate(self) -> bool:
        """Whether clients have to show a certificate."""
        return len(self._paths) > 2

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Credentials for a gRPC server. They follow changes of the files too."""
        return grpc.dynamic_ssl_server_credentials(
            self._grpc_configuration(), self._grpc_configuration, self.wants_client_certificate
        )

    def _grpc_configuration(self) -> grpc.ServerCertificateConfiguration:
        self._look()
        certificate, key, *client_ca = self._raw
        return grpc.ssl_server_certificate_configuration([(key, certificate)], client_ca[0] if client_ca else None)

    def _turn(self, connection: Any, name: str | None, context: ssl.SSLContext) -> None:
        self._look()
        connection.context = self._context

    def _look(self) -> None:
        if not self._files.changed():
            return
        try:
            self._context, self._raw = self._load(), self._read()
        except TlsError as error:
            _LOG.warning("the certificate stays as it was: %s", error)
        else:
            _LOG.info("the certificate was read again from %s", self._paths[0])

    def _load(self) -> ssl.SSLContext:
        certificate, key, *client_ca = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(certificate, key, password=_no_password)
            if client_ca:
                context.load_verify_locations(cafile=client_ca[0])
                context.verify_mode = ssl.CERT_OPTIONAL
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            named = ", ".join(map(str, self._paths))
            raise TlsError(f"{named} must be PEM files that fit together ({reason[:200]})") from None
        return context

    def _read(self) -> tuple[bytes, ...]:
        try:
            return tuple(path.read_bytes() for path in self._paths)
        except OSError as error:
            raise TlsError(f"{error.filename} cannot be read: {error.strerror}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted, and there is nobody to ask for its password")
