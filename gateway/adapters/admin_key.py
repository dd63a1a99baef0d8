"""The key of operators."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from headrace.gateway.edge.endpoint import API, Endpoint, under
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

    def check(self, exchange: Exchange) -> None:
        """Raise StatusError unless the caller is an operator."""
        if not self._key:
            raise StatusError(
                Reason.PERMISSION_DENIED,
                "models and adapters cannot be changed over HTTP here: start the gateway with --admin-key-file, or use "
                "`headrace models` and `headrace adapters`",
            )
        scheme, _, key = exchange.header("authorization").partition(" ")
        # The bytes as they were sent.
        if scheme.lower() != "bearer" or not hmac.compare_digest(key.encode("latin-1").strip(), self._key):
            raise StatusError(Reason.UNAUTHENTICATED, "this needs the admin key, as Authorization: Bearer KEY")


def for_operators(*endpoints: Endpoint) -> Sequence[Endpoint]:
    """The endpoints of the API, without the check of API keys, because no API key replaces the operators' key."""
    return [replace(endpoint, is_open=True, makes_work=False) for endpoint in under(API, *endpoints)]
