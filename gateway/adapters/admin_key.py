"""The key of operators."""

from __future__ import annotations

import hmac
from pathlib import Path

from headrace.gateway.edge.exchange import Exchange
from headrace.protos.status import Reason, StatusError

_MIN_KEY_CHARS = 16


class AdminKey:
    """The key that operators send as `Authorization: Bearer KEY`."""

    def __init__(self, path: Path | None) -> None:
        """Without a key file, no caller is an operator. Raises ValueError with a readable message if the file has no
        key."""
        self._key = b""
        if path is None:
            return
        try:
            self._key = path.read_bytes().strip()
        except OSError as error:
            raise ValueError(f"--admin-key-file {path} cannot be read: {error.strerror}") from None
        if len(self._key) < _MIN_KEY_CHARS:
            raise ValueError(f"--admin-key-file {path} must have a key of at least {_MIN_KEY_CHARS} characters")

    def admits(self, exchange: Exchange) -> bool:
        """Whether the caller is an operator."""
        scheme, _, key = exchange.header("authorization").partition(" ")
        # The bytes as they were sent.
        sent = key.encode("latin-1").strip()
        return bool(self._key) and scheme.lower() == "bearer" and hmac.compare_digest(sent, self._key)

    def check(self, exchange: Exchange) -> None:
        """Raise StatusError unless the caller is an operator."""
        if not self._key:
            raise StatusError(
                Reason.PERMISSION_DENIED,
                "models, adapters and workers cannot be changed over HTTP here: start the gateway with "
                "--admin-key-file, or use `headrace models`, `headrace adapters` and `headrace drain` on the host",
            )
        if not self.admits(exchange):
            raise StatusError(Reason.UNAUTHENTICATED, "this needs the admin key, as Authorization: Bearer KEY")
