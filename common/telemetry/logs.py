"""Log lines of every process: one record, one line, with the id of the request that it belongs to.

    text  2026-01-31 12:00:00,000 INFO headrace.router [req_1f...] placed on worker-0 (prefix)
    json  {"time":"2026-01-31T12:00:00.000Z","level":"info","logger":"headrace.router","message":"...","request_id":"."}

In JSON, an exception is the field `exception` of its record; in text, it follows the line. All processes share this
module, so that the logs of a fleet have one format.
"""

from __future__ import annotations

import contextvars
import faulthandler
import json
import logging
import re
import sys
import threading
from collections.abc import Iterable
from datetime import UTC, datetime
from types import TracebackType

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
NO_REQUEST = "-"
REQUEST_ID_KEY = "x-request-id"
"""gRPC metadata key and HTTP header of a request's id."""

request_id_var: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default=NO_REQUEST)
"""Id of the request that the running task answers."""

# By number, because a fault is written without Python.
_STANDARD_ERROR = 2
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# Passwords in URLs, tokens of Authorization headers, and keys: ours begin with hr-, those of others with sk-.
_SECRETS = re.compile(
    r"(?P<url>://[^/\s:@]*:)[^@\s/]+(?=@)|(?P<scheme>\b[Bb]earer\s+)[^\s'\",]+|(?P<key>\b(?:sk|hr)-)[\w-]{16,}"
)


def without_secrets(text: str) -> str:
    """The text with passwords in URLs, bearer tokens and API keys replaced by ***."""
    return _SECRETS.sub(lambda found: f"{found['url'] or found['scheme'] or found['key']}***", text)


def request_id_of(metadata: Iterable[tuple[str, str | bytes]] | None) -> str | None:
    """The request's id in the metadata of a call; None if there is none, or if it is not a printable word."""
    for key, value in metadata or ():
        if key == REQUEST_ID_KEY and isinstance(value, str) and _REQUEST_ID.fullmatch(value):
            return value
    return None


class TextFormatter(logging.Formatter):
    """Formats a record as readable text on one line, followed by the traceback of an exception."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        """One line for any message, so that a caller's text cannot look like other records."""
        return super().formatMessage(record).replace("\n", "\\n").replace("\r", "\\r")

    def format(self, record: logging.LogRecord) -> str:
        """See the module."""
        return without_secrets(super().format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object on one line for any message."""

    def format(self, record: logging.LogRecord) -> str:
        """See the module."""
        moment = datetime.fromtimestamp(record.created, UTC)
        fields = {
            "time": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": without_secrets(record.getMessage()),
        }
        request_id = getattr(record, "request_id", NO_REQUEST)
        if request_id != NO_REQUEST:
            fields["request_id"] = request_id
        if record.exc_info:
            fields["exception"] = without_secrets(self.formatException(record.exc_info))
        elif record.stack_info:
            fields["exception"] = without_secrets(record.stack_info)
        return json.dumps(fields, separators=(",", ":"), ensure_ascii=False)


class _WithRequestId(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = request_id_var.get()
        return True


def configure_logging(level: str, log_format: str = "text") -> None:
    """Send this process's log records of at least this level (one of `LEVELS`) to standard error in one of `FORMATS`.
    This includes records of libraries, warnings and uncaught exceptions. A fault in native code, which ends the process
    at once, leaves the stacks of all threads there, as plain text."""
    handler = logging.StreamHandler(sys.stderr)
    handler.addFilter(_WithRequestId())
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    # Its records are about connections, not requests. Below the level of warnings, they add nothing to our records.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    # A line for each call, so two a minute and more for each watch; our records say what the calls have brought.
    logging.getLogger("httpx").setLevel(logging.WARNING)
    # At debug level, gRPC writes several lines for each call that do not describe the call.
    logging.getLogger("grpc").setLevel(max(logging.INFO, logging.getLogger().level))
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread
    if not faulthandler.is_enabled():
        faulthandler.enable(_STANDARD_ERROR)


def _uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, traceback)
        return
    logging.getLogger("headrace").critical(
        "the process ends because of an exception", exc_info=(kind, error, traceback)
    )


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is None or issubclass(args.exc_type, SystemExit):
        return
    name = args.thread.name if args.thread is not None else "that is gone"
    exc_info = (args.exc_type, args.exc_value, args.exc_traceback)
    logging.getLogger("headrace").critical("thread %s ends because of an exception", name, exc_info=exc_info)
