"""`headrace explain`: which worker a prompt would go to now, and the cost of each worker in the terms of the policy."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import grpc
import httpx

from headrace.cli.fleet.completers import complete_served_models
from headrace.cli.fleet.fleet_access import OPEN, ApiAccess, access_options, transport_of
from headrace.cli.fleet.gateway_access import FleetClient, default_url, operator_options
from headrace.cli.fleet.run_state import ServeRecord, running_serves
from headrace.cli.fleet.tables import console_for
from headrace.cli.http_client import is_same_server, server_url, tls_problem
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.transport.channels import PLAIN, Transport
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.protos import router_pb2, router_pb2_grpc, worker_pb2
from headrace.protos.cache_scope import cache_scope, scoped_salt
from headrace.protos.status import error_of, is_peer_lost

_TIMEOUT_S = 10.0
# How much of two prompts is shown around their first difference.
_TOKENS_BEFORE = 12
_TOKENS_BEHIND = 12
# The terms of the policy, and then the sums.
_SUMS = ("total", "ttft")
_TERMS = (
    *(
        name
        for field in router_pb2.CostTerms.DESCRIPTOR.fields
        if (name := field.name.removesuffix("_ms")) not in _SUMS
    ),
    *_SUMS,
)
_REASONS = {
    router_pb2.PLACEMENT_REASON_UNSPECIFIED: "no worker takes requests",
    router_pb2.PLACEMENT_REASON_ONLY: "there is no other worker",
    router_pb2.PLACEMENT_REASON_PREFIX: "it is the cheapest, and none has more of the prompt cached",
    router_pb2.PLACEMENT_REASON_LOAD: "it is the cheapest, for its load",
    router_pb2.PLACEMENT_REASON_SESSION: "it is the session's, and near enough to the cheapest",
}
_ROLES = {worker_pb2.ROLE_PREFILL: " (prefill)", worker_pb2.ROLE_DECODE: " (decode)"}
_STATES = {
    router_pb2.WORKER_STATE_UNREACHABLE: "unreachable",
    router_pb2.WORKER_STATE_READY: "ready",
    router_pb2.WORKER_STATE_DRAINING: "draining",
    router_pb2.WORKER_STATE_SUSPECT: "suspect",
}


def tokens_of(text: str) -> list[int]:
    """Token ids separated by commas or white space. Raises CommandError."""
    words = text.replace(",", " ").split()
    if not words or not all(re.fullmatch("[0-9]{1,10}", word) and int(word) < 1 << 32 for word in words):
        raise CommandError(f"--tokens wants token ids such as 1,2,3, not {text[:100]!r}")
    return [int(word) for word in words]


def body_of(text: str) -> dict[str, object]:
    """The fields for /tokenize: a chat with this one message of the user, or, of @FILE, the conversation in a request's
    body. Raises CommandError."""
    if not text.startswith("@"):
        return {"messages": [{"role": "user", "content": text}]}
    path = Path(text[1:])
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise CommandError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise CommandError(f"{path} is not the body of a request: it is not JSON") from None
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list):
        raise CommandError(f"{path} is not the body of a chat: it has no messages")
    system = content.get("system")  # of the Messages API
    if isinstance(system, list):
        parts = [part.get("text", "") for part in system if isinstance(part, dict)]
        system = "\n".join(part for part in parts if isinstance(part, str))
    if isinstance(system, str) and system:
        messages = [{"role": "system", "content": system}, *messages]
    fields: dict[str, object] = {"messages": messages}
    return fields | {name: content[name] for name in ("tools", "chat_template_kwargs") if content.get(name)}


def tokenize(url: str, model: str, text: str, access: ApiAccess = OPEN) -> list[int]:
    """Ask the gateway for the tokens of a chat, as caches compare them; see `body_of`. Raises CommandError."""
    url = server_url(url)
    body = {**body_of(text), "return_image_identities": True}
    try:
        body |= {"model": model} if model else {}
        with access.client(url, _TIMEOUT_S) as client:
            response = client.post(f"{url}/tokenize", json=body)
        answer = response.json()
        if response.status_code != 200:
            raise CommandFailed(f"{url}/tokenize refused: {answer['error']['message']}")
        return [int(token_id) for token_id in answer["tokens"]]
    except httpx.HTTPError as error:
        if (problem := tls_problem(error)) is not None:
            raise CommandFailed(f"{url}: {problem}") from None
        if not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
            raise CommandFailed(f"{url} did not answer: {str(error) or type(error).__name__}") from None
        raise CommandFailed(f"no gateway at {url}; name one with --url, or give token ids with --tokens") from None
    except UnicodeEncodeError:  # of the text, not of the answer
        raise
    except (ValueError, KeyError, TypeError):
        raise CommandError(f"{url} is not a headrace gateway: its /tokenize is not valid") from None


def detokenize(url: str, model: str, tokens: Sequence[int], access: ApiAccess = OPEN) -> str:
    """Ask the gateway for the text of tokens; empty if it does not answer."""
    url = server_url(url)
    body: dict[str, object] = {"tokens": list(tokens)} | ({"model": model} if model else {})
    try:
        with access.client(url, _TIMEOUT_S) as client:
            return str(client.post(f"{url}/detokenize", json=body).json()["prompt"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return ""


def difference(tokens: Sequence[int], others: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> Sequence[str]:
    """Lines that say where two prompts part, with the texts around."""
    most = min(len(tokens), len(others))
    position = next((i for i in range(most) if tokens[i] != others[i]), most)
    if len(tokens) == len(others) == position:
        return [f"The prompts are the same: {position} tokens."]
    lines = [
        f"The prompts, of {len(tokens)} and {len(others)} tokens, have their first difference at token {position}; "
        "the cache of one serves the other up to there."
    ]
    start = max(0, position - _TOKENS_BEFORE)
    for name, prompt in (("this one", tokens), ("the other", others)):
        before = _words(prompt[start:position], text_of)
        behind = _words(prompt[position : position + _TOKENS_BEHIND], text_of)
        lines.append(f"  {name:>9}: {before!r} then {behind!r}")
    return lines


def _words(tokens: Sequence[int], text_of: Callable[[Sequence[int]], str]) -> str:
    """The text of tokens. Those of images have none."""
    runs = [(kind, list(run)) for kind, run in itertools.groupby(tokens, lambda token: token >= FIRST_PSEUDO_TOKEN)]
    return "".join(f"<{len(run)} tokens of images>" if is_image else text_of(run) for is_image, run in runs)


def ask(router: str, request: router_pb2.ExplainRequest, transport: Transport = PLAIN) -> router_pb2.ExplainResponse:
    """Send the request to a router. Raises CommandError."""
    with transport.blocking_channel(router) as channel:
        try:
            explained: router_pb2.ExplainResponse = router_pb2_grpc.RouterStub(channel).Explain(
                request, timeout=_TIMEOUT_S
            )
        except grpc.RpcError as error:
            if is_peer_lost(error):
                look = "check the address, and give --tls-dir if the fleet has TLS"
                raise CommandFailed(f"no router answers at {router}; {look}") from None
            status = error_of(error)
            raise CommandFailed(f"the router at {router} does not explain this: {status.message}") from None
    return explained


def rows_of(explained: router_pb2.ExplainResponse) -> list[list[str]]:
    """Cells of the table, one row for each worker: name and role, state, cached tokens, and terms in milliseconds."""
    rows = []
    for worker in explained.workers:
        mark = "-> " if worker.worker_id == explained.worker_id else "   "
        role = _ROLES.get(worker.role, "")
        row = [f"{mark}{worker.worker_id}{role}", _STATES.get(worker.state, "unknown")]
        if worker.HasField("cost"):
            fetched = f", {worker.num_transferred_tokens} fetched" if worker.num_transferred_tokens else ""
            fetched += f", {worker.num_disk_tokens} from disk" if worker.num_disk_tokens else ""
            row.append(f"{worker.num_cached_tokens} of {explained.num_prompt_tokens}{fetched}")
            row += [f"{getattr(worker.cost, f'{term}_ms'):.1f}" for term in _TERMS]
        else:
            row += [""] * (1 + len(_TERMS))
        rows.append(row)
    return rows


def _print(explained: router_pb2.ExplainResponse) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), title="Expected milliseconds", title_justify="left")
    for column in ("worker", "state"):
        table.add_column(column, no_wrap=True)
    for column in ("cached", *_TERMS):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows_of(explained):
        table.add_row(*row)
    console_for(table).print(table)
    chosen = f"{explained.worker_id}: " if explained.worker_id else ""
    click.echo(f"{chosen}{_REASONS[explained.reason]}")


def _serve_here(url: str | None) -> ServeRecord | None:
    """The serve of this host at this URL, or the only one on this host. None if the URL is that of another gateway.
    Raises CommandError without a URL if there is not exactly one."""
    wanted = None if url is None else server_url(url)
    records = [record for record in running_serves() if wanted is None or is_same_server(wanted, record.url)]
    if len(records) == 1:
        return records[0]
    if url is not None:
        return None
    known = "no headrace serve" if not records else "several of headrace serve"
    raise CommandError(f"this host runs {known}; name a gateway with --url, or a router with --router ADDR")


@click.command()
@click.argument("text", required=False)
@click.option("--prompt", help="The same as TEXT.")
@click.option("--tokens", help="Token ids of the prompt, such as 1,2,3, instead of a text.")
@click.option("--against", help="Another prompt, a text or @FILE: show where the two have their first difference.")
@click.option("--router", help="Router to ask, HOST:PORT or unix:PATH.  [default: that of the running headrace serve]")
@click.option("--url", help="Gateway to ask, from anywhere.  [default: the one on this host]")
@click.option(
    "--model", default="", shell_complete=complete_served_models, help="Model to ask for.  [default: the only one]"
)
@click.option("--adapter", default="", help="LoRA adapter.")
@click.option("--cache-salt", default="", help="Salt of the prompt's cache blocks.")
@click.option("--tenant", help="Tenant of the API key to predict for (headrace keys list).")
@click.option("--cache-group", help="Cache group of that key, if it has one.")
@click.option("--session-key", default="", help="Session that the request belongs to.")
@click.option("--max-tokens", type=click.IntRange(1), help="Longest answer.")
@click.option("--json", "as_json", is_flag=True, help="The router's answer as JSON.")
@access_options
@operator_options
def explain(
    text: str | None,
    prompt: str | None,
    tokens: str | None,
    against: str | None,
    router: str | None,
    url: str | None,
    model: str,
    adapter: str,
    cache_salt: str,
    tenant: str | None,
    cache_group: str | None,
    session_key: str,
    max_tokens: int | None,
    as_json: bool,
    tls_dir: Path | None,
    join_token_file: Path | None,
    access: ApiAccess,
) -> None:
    """Show where a chat that begins with TEXT would go now, and why.

    One row for each worker of the model, in expected milliseconds, the cheapest first; the arrow marks the choice.
    Nothing is placed. TEXT may be @FILE, the body of a chat.
    """
    asked_for = [given for given in (text, prompt, tokens) if given is not None]
    if len(asked_for) != 1:
        raise CommandError("give a prompt: either TEXT, or --prompt, or --tokens")
    record = _serve_here(url) if router is None else None
    token_ids = _tokens(tokens, text if text is not None else prompt, url, model, access)
    asked: dict[str, Any] = {
        "model": model,
        "adapter": adapter,
        "cache_salt": cache_salt,
        "session_key": session_key,
        "max_tokens": max_tokens,
    }
    if router is None and record is None:
        with FleetClient(url or default_url(), access) as client:
            explained = client.explain({**asked, "tokens": token_ids, "tenant": tenant, "cache_group": cache_group})
    else:
        if tenant is not None or cache_group is not None:  # as a gateway with keys sends them
            scope = cache_scope(tenant or "", cache_group)
            asked["cache_salt"] = scoped_salt(scope, cache_salt)
            asked["session_key"] = scoped_salt(scope, session_key) if session_key else ""
        if record is None:
            assert router is not None
            transport = transport_of(tls_dir, join_token_file)
        else:
            router, transport = record.router_address, transport_of(record.tls_dir, record.join_token_file)
        explained = ask(router, router_pb2.ExplainRequest(token_ids=token_ids, **asked), transport)
    if against is not None and not as_json:
        if tokens is not None:
            raise CommandError("--against compares texts; give TEXT instead of --tokens")
        gateway = url or default_url()
        others = tokenize(gateway, model, against, access)
        for line in difference(token_ids, others, lambda several: detokenize(gateway, model, several, access)):
            click.echo(line)
    if as_json:
        from google.protobuf.json_format import MessageToJson

        click.echo(
            MessageToJson(explained, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
        )
    else:
        _print(explained)


def _tokens(tokens: str | None, text: str | None, url: str | None, model: str, access: ApiAccess) -> Sequence[int]:
    if tokens is not None:
        return tokens_of(tokens)
    assert text is not None
    return tokenize(url or default_url(), model, text, access)
