"""The key of operators."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Callable
from pathlib import Path

from headrace.common.stores.watched_files import WatchedFiles
from headrace.gateway.edge.exchange import Exchange
from headrace.protos.status import Reason, StatusError

_LOG = logging.getLogger(__name__)

_MIN_KEY_CHARS = 16


class AdminKey:
    """The key that operators send as `Authorization: Bearer KEY`. Its file is read again when it changes; one that has
    no key leaves the known key as it was."""

    def __init__(self, path: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Without a key file, no caller is an operator. Raises ValueError with a readable message if the file has no
        key."""
        self._path = path
        self._files = WatchedFiles([] if path is None else [path], clock)
        self._key = b"" if path is None else _key_in(path)

    def admits(self, exchange: Exchange) -> bool:
        """Whether the caller is an operator."""
        self._look()
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

    def _look(self) -> None:
        if self._path is None or not self._files.changed():
            return
        try:
            self._key = _key_in(self._path)
        except ValueError as error:
            _LOG.warning("the admin key stays unchanged: %s", error)
        else:
            _LOG.info("the admin key was read again from %s", self._path)


def _key_in(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ValueError(f"--admin-key-file {path} cannot be read: {error.strerror}") from None
    if len(key) < _MIN_KEY_CHARS:
        raise ValueError(f"--admin-key-file {path} must have a key of at least {_MIN_KEY_CHARS} characters")
    return key
