"""Ends the process of a worker that cannot continue: logs the reason, and exits even if other threads hang."""

from __future__ import annotations

import logging
import os
import sys
import threading

log = logging.getLogger(__name__)

# EX_SOFTWARE of sysexits.h. Status 2 would mean wrong flags.
EXIT_ENGINE_FAILED = 70
# The process exits after this time even if the log cannot be written.
_LAST_WORDS_S = 3.0


def end_process(why: str, error: BaseException | None = None) -> None:
    """Log the reason and exit with EXIT_ENGINE_FAILED. May be called from any thread; does not return."""
    in_any_case = threading.Timer(_LAST_WORDS_S, os._exit, (EXIT_ENGINE_FAILED,))
    in_any_case.daemon = True
    in_any_case.start()
    try:
        log.critical("%s; the process exits and has to be restarted", why, exc_info=error)
        sys.stderr.flush()
    finally:
        os._exit(EXIT_ENGINE_FAILED)
