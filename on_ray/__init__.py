"""A fleet on Ray: `serve.run(headrace.ray.build_app(...))`, `serve deploy`, and `headrace ray up|status|down`.

The folder has another name than the package: a folder `ray` at the root would hide the library from everything that
runs there. Ray Serve is the shell: it places, restarts, scales and replaces actors. Requests do not pass through it:
each actor owns processes of headrace, which talk to each other as in any other fleet.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.ray.app import build_app, build_openai_app
    from headrace.ray.settings import Fleet, Model, Scaling

__all__ = ["Fleet", "Model", "Scaling", "build_app", "build_openai_app"]

_MODULES = {
    "Fleet": "settings",
    "Model": "settings",
    "Scaling": "settings",
    "build_app": "app",
    "build_openai_app": "app",
}


def __getattr__(name: str) -> Any:
    """Import late: to import Ray takes seconds, which `headrace ray --help` does not need."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
