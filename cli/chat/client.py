"""A client of the chats of a server, for one conversation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from headrace.cli.fleet.fleet_access import OPEN, ApiAccess
from headrace.cli.http_client import server_url, tls_problem
from headrace.common.commands import CommandError, CommandFailed


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer, or of the reasoning before it; `num_tokens` comes with the last one."""

    text: str
    num_tokens: int | None = None
    is_reasoning: bool = False


class ChatClient:
    """A client of one server. Every failure is a CommandError with the server's message."""

    def __init__(self, url: str, model: str | None = None, access: ApiAccess = OPEN) -> None:
        self.url = server_url(url)
        # A slow prompt gives no output for a long time. Only an unreachable server should fail fast.
        self._http = access.client(self.url, httpx.Timeout(600.0, connect=5.0))
        self.model = model or self.models()[0]

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def answer(self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any]) -> Iterator[Chunk]:
        """Stream the answer to the last of the messages; `fields` are further ones of the request. Closing the iterator
        cancels it on the server."""
        body = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            **fields,
        }
        try:
            with self._http.stream("POST", f"{self.url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    if response.status_code == 401:
                        response.raise_for_status()
                    raise CommandFailed(_message_of(response.text) or f"the server answered {response.status_code}")
                yield from _chunks(_lines(response.iter_text()))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def models(self) -> Sequence[str]:
        """The models of the server. Raises CommandFailed if it has none."""
        try:
            response = self._http.get(f"{self.url}/v1/models")
            models = [str(model["id"]) for model in response.raise_for_status().json()["data"]]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, KeyError, TypeError):
            raise CommandError(f"{self.url} is not a headrace server: its /v1/models is not valid") from None
        if not models:
            raise CommandFailed(f"{self.url} serves no model at the moment; headrace status shows why")
        return models

    def _unreachable(self, error: httpx.HTTPError) -> CommandFailed:
        if isinstance(error, httpx.HTTPStatusError):
            if error.response.status_code == 401:
                return CommandFailed(f"{self.url} accepts no request without a valid key; give one with --api-key")
            said = _message_of(error.response.text)
            return CommandFailed(f"{self.url} answered {error.response.status_code}" + (f": {said}" if said else ""))
        if (problem := tls_problem(error)) is not None:
            return CommandFailed(f"{self.url}: {problem}")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return CommandFailed(f"no server at {self.url}; start one with headrace serve, or name another with --url")
        return CommandFailed(f"the connection to {self.url} broke: {str(error) or type(error).__name__}")


def _lines(pieces: Iterator[str]) -> Iterator[str]:
    """The lines of a stream of events. httpx would also end them at U+2028 and others, which JSON has in texts."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
    yield rest


def _chunks(lines: Iterator[str]) -> Iterator[Chunk]:
    """Read server-sent events: text of each delta, then the usage. Raises CommandFailed on an error event, or
    on one that is not valid."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
            chunks = _chunks_of(event)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise CommandFailed(f"the answer broke off: the server sent {data[:80]!r}") from None
        if "error" in event:
            raise CommandFailed(_message_of(data) or "the answer broke off")
        yield from chunks
    raise CommandFailed("the answer broke off: the server closed the stream before its end")


def _chunks_of(event: Any) -> list[Chunk]:
    """The chunks of an event. Raises KeyError, TypeError or AttributeError if it is not a chunk of a chat."""
    chunks = []
    for choice in event.get("choices", ()):
        delta = choice.get("delta", {})
        if reasoning := delta.get("reasoning_content"):
            chunks.append(Chunk(reasoning, is_reasoning=True))
        if text := delta.get("content"):
            chunks.append(Chunk(text))
    if event.get("usage"):
        chunks.append(Chunk("", event["usage"]["completion_tokens"]))
    return chunks


def _message_of(raw: str) -> str | None:
    try:
        parsed: Any = json.loads(raw)
        return str(parsed["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None
