"""Remembers which worker got each session's last request. Pure."""

from __future__ import annotations

from collections import OrderedDict


class SessionWorkers:
    """Worker addresses by model and session key. The least recently used sessions are forgotten."""

    def __init__(self, max_sessions: int) -> None:
        self.max_sessions = max_sessions
        self._addresses: OrderedDict[tuple[str, str], str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._addresses)

    def get(self, model: str, session_key: str) -> str | None:
        """The address of the session's worker. None if the key is empty or unknown."""
        return self._addresses.get((model, session_key)) if session_key else None

    def put(self, model: str, session_key: str, address: str) -> None:
        """Record that the session's newest request goes to this worker."""
        self._addresses[model, session_key] = address
        self._addresses.move_to_end((model, session_key))
        if len(self._addresses) > self.max_sessions:
            self._addresses.popitem(last=False)
