"""Decides whether web pages of other origins may use the API. By default, they may not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from headrace.gateway.edge.exchange import Message, Receive, Send

PREFLIGHT_AGE_S = 600
_METHODS = b"GET, POST, DELETE"
_EXPOSED = (
    b"x-request-id, request-id, retry-after, retry-after-ms, "
    b"x-ratelimit-limit-requests, x-ratelimit-remaining-requests, x-ratelimit-reset-requests, "
    b"x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, x-headrace-ignored"
)
_MAX_ECHO_BYTES = 2048

Application: TypeAlias = Callable[[Message, Receive, Send], Awaitable[None]]


def with_cors(application: Application, origins: Sequence[str]) -> Application:
    """The application, also for pages of these origins (`*`: of any); unchanged if there are none.

    Cookies are never allowed, because the API uses none. A page sends a key only if its script has one.
    """
    if not origins:
        return application
    allowed = frozenset(origin.encode("latin-1") for origin in origins)

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        origin = headers.get(b"origin", b"")
        if not origin or not (b"*" in allowed or origin in allowed):
            await application(scope, receive, send)
            return
        told = [(b"access-control-allow-origin", b"*" if b"*" in allowed else origin), (b"vary", b"origin")]
        if scope["method"] == "OPTIONS" and b"access-control-request-method" in headers:
            wanted = headers.get(b"access-control-request-headers", b"authorization, content-type")
            told += [
                (b"access-control-allow-methods", _METHODS),
                (b"access-control-allow-headers", wanted[:_MAX_ECHO_BYTES]),
                (b"access-control-max-age", b"%d" % PREFLIGHT_AGE_S),
            ]
            await send({"type": "http.response.start", "status": 204, "headers": told})
            await send({"type": "http.response.body", "body": b""})
            return

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                told.append((b"access-control-expose-headers", _EXPOSED))
                message["headers"] = [*message["headers"], *told]
            await send(message)

        await application(scope, receive, send_with_origin)

    return answer
