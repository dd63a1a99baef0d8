"""Logs when the models cannot be listed for a while, and when they can be listed again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

GRACE_S = 5.0
_LOG = logging.getLogger(__name__)


@dataclass(slots=True)
class Outage:
    """The time for which every attempt to list the models has failed. Processes of a fleet start in any order, so short
    outages are not logged."""

    clock: Callable[[], float]
    _since_s: float | None = None
    _is_logged: bool = False

    def failed(self, problem: str) -> None:
        """Record a failed attempt."""
        if self._since_s is None:
            self._since_s = self.clock()
        lasts_s = self.clock() - self._since_s
        if not self._is_logged and lasts_s >= GRACE_S:
            _LOG.warning("no router answers, so no model is known to be ready; still trying: %s", problem)
            self._is_logged = True

    def over(self) -> None:
        """Record a successful attempt."""
        if self._is_logged and self._since_s is not None:
            _LOG.info("a router answers again after %.0f s", self.clock() - self._since_s)
        self._since_s, self._is_logged = None, False
