"""Log lines of the gateway: text on standard error, each with the id of the request it belongs to."""

from __future__ import annotations

import contextvars
import logging

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")
"""Id of the request that the running task answers."""

LEVELS = ("debug", "info", "warning", "error")


class _WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id_var.get()
        return True


def configure_logging(level: str) -> None:
    """Send log records of at least this level (one of `LEVELS`) to standard error."""
    handler = logging.StreamHandler()
    handler.addFilter(_WithRequestId())
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # Its records name connections, not requests, and say nothing that ours do not.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
