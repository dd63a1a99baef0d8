"""The cache scope of an API key, and the salt that keeps the prefix caches of different scopes apart.

Cache hits show in the latency and the usage of an answer, so tenants with a common cache could guess each other's
prompts, token by token. Gateways with keys and `headrace explain` agree on the salt byte for byte; routers and workers
pass it on unchanged.
"""

from __future__ import annotations

from hashlib import sha256


def cache_scope(tenant: str, cache_group: str | None) -> str:
    """The scope of a key: its tenant, or the group that several tenants share by choice."""
    return f"tenant/{tenant}" if cache_group is None else f"group/{cache_group}"


def scoped_salt(scope: str, salt: str) -> str:
    """The salt of a prompt of this scope whose caller gave `salt`, possibly empty. Scopes never meet."""
    digest = sha256(len(scope.encode()).to_bytes(4, "little"))
    digest.update(scope.encode())
    digest.update(salt.encode())
    return digest.hexdigest()
