"""How a worker ends that cannot go on: with a line that says why, and at once, whatever else hangs."""

from __future__ import annotations

import logging
import os
import sys
import threading

log = logging.getLogger(__name__)

# Status of a process whose engine failed: EX_SOFTWARE of sysexits.h. Not 2, which says that the flags are wrong.
EXIT_ENGINE_FAILED = 70
# The process ends after this time even if its last words cannot be written.
_LAST_WORDS_S = 3.0


def end_process(why: str, error: BaseException | None = None) -> None:
    """Log why and end the process at once, with EXIT_ENGINE_FAILED. From any thread; does not return."""
    in_any_case = threading.Timer(_LAST_WORDS_S, os._exit, (EXIT_ENGINE_FAILED,))
    in_any_case.daemon = True
    in_any_case.start()
    try:
        log.critical("%s; the process ends, to be started again", why, exc_info=error)
        sys.stderr.flush()
    finally:
        os._exit(EXIT_ENGINE_FAILED)
