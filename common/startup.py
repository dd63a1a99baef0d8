"""Start a process without searches for garbage.

While modules are imported, Python would search what has been imported so far for garbage again and again, and all of
it once more when the process ends: a third of the CPU time of a start and an orderly end. What is imported lives as
long as the process, so that no later search need look at it either.

A module calls `before_imports` only as the main program: the objects of a process that imports it are not ours to
keep.
"""

from __future__ import annotations

import gc


def before_imports() -> None:
    """Search for no garbage until `after_imports`."""
    gc.disable()


def after_imports() -> None:
    """Leave what there is by now out of all searches, and search from now on. Without `before_imports`, do nothing."""
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
