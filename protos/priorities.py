"""Priorities with a meaning of their own, for gateway, router and worker. Pure."""

from __future__ import annotations

BACKGROUND_PRIORITY = -(2**31)
"""The lowest priority, that of batches. Such a request never waits in a router, takes at most half of the places of a
worker's batch, gives its place and its blocks to any other request, and is computed only where others are not slowed
(docs/decisions/scheduling.md#batches)."""
SHADOW_PRIORITY = BACKGROUND_PRIORITY + 1
"""The priority of copies for a shadow: after all requests of callers, but computed beside them."""
