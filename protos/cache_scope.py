"""The cache scope of an API key, and the salt that separates the prefix caches of different scopes.

Cache hits are visible in the latency and usage of an answer. So tenants with a common cache could guess each other's
prompts, token by token. Gateways with keys and `headrace explain` must compute the same salt; routers and workers pass
it on unchanged.
"""

from __future__ import annotations

from hashlib import sha256


def cache_scope(tenant: str, cache_group: str | None) -> str:
    """The scope of a key: its tenant, or the cache group that several tenants have chosen to share."""
    return f"tenant/{tenant}" if cache_group is None else f"group/{cache_group}"


def scoped_salt(scope: str, salt: str) -> str:
    """The salt of a prompt in this scope. `salt` is the caller's and may be empty. Different scopes never collide."""
    digest = sha256(len(scope.encode()).to_bytes(4, "little"))
    digest.update(scope.encode())
    digest.update(salt.encode())
    return digest.hexdigest()
