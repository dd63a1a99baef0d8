"""`headrace chat`: a conversation in the terminal over the OpenAI HTTP API. If standard input is a pipe, each line is a
question. Images go with the next question."""

from __future__ import annotations

import difflib
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import httpx

from headrace.cli.fleet.completers import complete_served_models
from headrace.cli.fleet.fleet_access import OPEN, ApiAccess, api_options
from headrace.cli.fleet.gateway_access import default_url
from headrace.cli.fleet.image_files import chat_options, image_url
from headrace.cli.http_client import server_url, tls_problem
from headrace.common.commands import CommandError, CommandFailed

_HELP = (
    "/image FILE shows the model an image with your next question, /reset forgets the conversation, /exit or Ctrl-D "
    "leaves, Ctrl-C stops an answer"
)
_COMMANDS = ("/help", "/image", "/reset", "/exit")
# Text that looks like a command. A path such as /etc/hosts does not, and a space before the slash makes any line a
# question.
_LIKE_A_COMMAND = re.compile(r"/[A-Za-z?]\w*(?=\s|$)")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of an answer, or of the reasoning before it; `num_tokens` comes with the last one."""

    text: str
    num_tokens: int | None = None
    is_reasoning: bool = False


@dataclass(slots=True)
class Conversation:
    """The messages so far, and the images for the next question, as data URLs. A turn is added only when its answer has
    arrived, in whole or in part; then, or when the server refuses the question, its images are used up."""

    system: str | None = None
    images: list[str] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)

    def messages_with(self, question: str) -> list[dict[str, Any]]:
        """The messages to send for the next answer."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        return [*head, *self.turns, self._user_turn(question)]

    def add(self, question: str, answer: str) -> None:
        """Keep a turn."""
        self.turns += [self._user_turn(question), {"role": "assistant", "content": answer}]
        self.images.clear()

    def reset(self) -> None:
        """Forget all turns, and the images for the next question."""
        self.turns.clear()
        self.images.clear()

    def _user_turn(self, question: str) -> dict[str, Any]:
        if not self.images:
            return {"role": "user", "content": question}
        parts: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
        return {"role": "user", "content": [*parts, {"type": "text", "text": question}]}


class ChatClient:
    """A client of one server. Every failure is a CommandError with the server's message."""

    def __init__(
        self, url: str, model: str | None = None, access: ApiAccess = OPEN, *, max_tokens: int | None = None
    ) -> None:
        self._max_tokens = max_tokens
        self._url = server_url(url)
        # A slow prompt gives no output for a long time. Only an unreachable server should fail fast.
        self._http = access.client(self._url, httpx.Timeout(600.0, connect=5.0))
        self.model = model or self._only_model()

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def answer(self, messages: list[dict[str, Any]]) -> Iterator[Chunk]:
        """Stream the answer to the last of the messages. Closing the iterator cancels it on the server."""
        body: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._max_tokens is not None:
            body["max_completion_tokens"] = self._max_tokens
        try:
            with self._http.stream("POST", f"{self._url}/v1/chat/completions", json=body) as response:
                if response.status_code != 200:
                    response.read()
                    if response.status_code == 401:
                        response.raise_for_status()
                    raise CommandFailed(_message_of(response.text) or f"the server answered {response.status_code}")
                yield from _chunks(_lines(response.iter_text()))
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None

    def _only_model(self) -> str:
        try:
            response = self._http.get(f"{self._url}/v1/models")
            models = [model["id"] for model in response.raise_for_status().json()["data"]]
        except httpx.HTTPError as error:
            raise self._unreachable(error) from None
        except (ValueError, KeyError, TypeError):
            raise CommandError(f"{self._url} is not a headrace server: its /v1/models is not valid") from None
        if not models:
            raise CommandFailed(f"{self._url} serves no model at the moment; headrace status shows why")
        return str(models[0])

    def _unreachable(self, error: httpx.HTTPError) -> CommandFailed:
        if isinstance(error, httpx.HTTPStatusError):
            if error.response.status_code == 401:
                return CommandFailed(f"{self._url} accepts no request without a valid key; give one with --api-key")
            said = _message_of(error.response.text)
            return CommandFailed(f"{self._url} answered {error.response.status_code}" + (f": {said}" if said else ""))
        if (problem := tls_problem(error)) is not None:
            return CommandFailed(f"{self._url}: {problem}")
        if isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout)):
            return CommandFailed(f"no server at {self._url}; start one with headrace serve, or name another with --url")
        return CommandFailed(f"the connection to {self._url} broke: {str(error) or type(error).__name__}")


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


def statistics(num_tokens: int | None, asked_s: float, first_s: float | None, last_s: float) -> str:
    """`42 tokens, 38.1 tokens/s, first after 0.12 s`. The rate is that between the first and the last token."""
    if first_s is None:
        return "no answer"
    first = f"first after {first_s - asked_s:.2f} s"
    if num_tokens is None:
        return first
    if num_tokens < 2 or last_s <= first_s:
        return f"{num_tokens} tokens, {first}"
    return f"{num_tokens} tokens, {(num_tokens - 1) / (last_s - first_s):.1f} tokens/s, {first}"


def _ask(client: ChatClient, conversation: Conversation, question: str) -> None:
    """Print the answer as it comes, and its reasoning and statistics on standard error. Ctrl-C ends the answer, not the
    chat."""
    asked_s = last_s = time.monotonic()
    first_s: float | None = None
    num_tokens: int | None = None
    is_reasoning = False
    pieces: list[str] = []
    answer = client.answer(conversation.messages_with(question))
    try:
        for chunk in answer:
            last_s = time.monotonic()
            num_tokens = chunk.num_tokens
            if not chunk.text:
                continue
            first_s = first_s if first_s is not None else last_s
            if chunk.is_reasoning:
                click.secho(chunk.text, nl=False, dim=True, err=True)
            else:
                if is_reasoning:
                    click.echo("\n", err=True)
                pieces.append(chunk.text)
                print(chunk.text, end="", flush=True)
            is_reasoning = chunk.is_reasoning
    except KeyboardInterrupt:
        click.echo(" [stopped]", nl=False, err=True)
    except CommandError:
        conversation.images.clear()  # a model of texts would refuse the next questions, too
        raise
    finally:
        answer.close()  # type: ignore[attr-defined]
        print(flush=True)
    if pieces:
        conversation.add(question, "".join(pieces))
    click.secho(f"[{statistics(num_tokens, asked_s, first_s, last_s)}]", dim=True, err=True)


def _questions(interactive: bool) -> Iterator[str]:
    """Lines to ask, until the end of the input. Ctrl-C at the prompt drops the line."""
    if not interactive:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    while True:
        try:
            yield input("> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print(f"\n{_HELP}")


def _converse(client: ChatClient, conversation: Conversation, interactive: bool) -> None:
    for line in _questions(interactive):
        try:
            if command := _LIKE_A_COMMAND.match(line):
                if not _obey(command.group(), line[command.end() :].strip(), conversation):
                    return
            elif question := line.strip():
                _ask(client, conversation, question)
        except CommandError as error:
            if not interactive:
                raise
            error.show()


def _obey(command: str, argument: str, conversation: Conversation) -> bool:
    """Execute a command. Returns False for the one that leaves. Raises CommandError for an unknown one."""
    if command == "/help":
        click.echo(_HELP, err=True)
    elif command == "/image":
        conversation.images.append(image_url(argument))
        click.secho(f"[{len(conversation.images)} for the next question]", dim=True, err=True)
    elif command == "/reset":
        conversation.reset()
    elif command != "/exit":
        near = difflib.get_close_matches(command, _COMMANDS, 1)
        meant = f"did you mean {near[0]}?" if near else f"there are {', '.join(_COMMANDS)}"
        raise CommandError(f"there is no command {command[:40]}; {meant} A space before the slash makes it a question.")
    return command != "/exit"


@click.command()
@click.option("--url", help="Server, such as http://127.0.0.1:8000.  [default: the one on this host]")
@click.option("--model", shell_complete=complete_served_models, help="Model to ask.  [default: the first one served]")
@chat_options
@api_options
def chat(
    url: str | None,
    model: str | None,
    system: str | None,
    max_tokens: int | None,
    images: list[str],
    access: ApiAccess,
) -> None:
    """Chat with a served model.

    /help shows the commands, /image FILE shows the model an image with the next question, /reset forgets the
    conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer. With a pipe as input, each line is a question and gets
    its answer. Reasoning and figures go to standard error.
    """
    talk(ChatClient(url or default_url(), model, access, max_tokens=max_tokens), Conversation(system, images))


def talk(client: ChatClient, conversation: Conversation, question: str | None = None) -> None:
    """Answer the given question, or the questions that are typed or piped in. Closes the client at the end."""
    interactive = sys.stdin.isatty()
    try:
        if question is not None:
            _ask(client, conversation, question)
            return
        if interactive:
            import readline  # noqa: F401  gives input() its editing and history

            click.secho(f"{client.model}; {_HELP}", dim=True, err=True)
        _converse(client, conversation, interactive)
    finally:
        client.close()
