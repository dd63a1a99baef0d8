"""Runs a request of a batch at the endpoint for such requests, without a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from headrace.common.telemetry.logs import request_id_var
from headrace.gateway.access.admission import Authorization
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Bodies, Exchange, Message
from headrace.gateway.edge.failures import HttpError
from headrace.protos.status import Reason, StatusError


@dataclass(slots=True)
class Answer:
    """The answer of an endpoint: an HTTP status and a body in JSON. `error` is the reason of a failure, if it has
    one."""

    request_id: str
    status: int = 0
    body: bytes = b""
    error: StatusError | None = None
    headers: Mapping[bytes, bytes] = field(default_factory=dict)


async def run_inside(endpoint: Endpoint, body: bytes, authorization: Authorization | None, bodies: Bodies) -> Answer:
    """Answer a request in the background. Call it in a task of its own: it sets the task's context."""
    answer = Answer("")
    unread = [body]

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the client never leaves
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
        else:
            answer.body += message.get("body", b"")

    scope = {"type": "http", "method": "POST", "path": endpoint.path, "headers": [], "query_string": b""}
    exchange = Exchange({**scope, "path_params": {}}, receive, send, endpoint.errors, bodies)
    answer.request_id = exchange.caller.request_id
    request_id_var.set(exchange.caller.request_id)
    exchange.enter(authorization)
    exchange.caller = replace(exchange.caller, is_background=True)
    try:
        await endpoint.handler(exchange)
    except StatusError as error:
        answer.error = error
        await exchange.fail(error)
    except HttpError as error:
        await exchange.fail(error)
    except Exception as error:
        internal = StatusError(Reason.INTERNAL, "the gateway failed; its log has the reason")
        internal.__cause__ = error
        answer.error = internal
        await exchange.fail(internal)
    finally:
        await exchange.close()
    return answer
