"""`headrace keys`: make, list and revoke the API keys of gateways."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from headrace.cli.fleet.key_store import FileStore, KeyStore, RedisStore
from headrace.cli.fleet.tables import console_for
from headrace.common.commands import CommandError
from headrace.common.stores.api_keys import MAX_CONCURRENT, MAX_PER_MINUTE, ApiKey, new_id, new_secret, sha256_of


@click.group()
def keys() -> None:
    """Make, list and revoke API keys.

    Their hashes are stored in a file (--file) or in Redis (--redis). Gateways with the same file or Redis notice
    changes within about a second.
    """


def _place(command: Callable[..., Any]) -> Callable[..., Any]:
    file = click.option(
        "--file",
        "path",
        envvar="HEADRACE_GATEWAY_API_KEYS",
        type=click.Path(path_type=Path),
        help="File of keys; the gateway's --api-keys.",
    )
    redis = click.option(
        "--redis", "redis_url", help="Redis with the keys; the gateway's --redis, with --api-keys-redis."
    )
    return file(redis(command))


def _store(path: Path | None, redis_url: str | None) -> KeyStore:
    if redis_url is not None:
        return RedisStore(redis_url)
    if path is None:
        raise CommandError("give the place of the keys: --file FILE or --redis URL")
    return FileStore(path)


@keys.command()
@click.argument("name")
@_place
@click.option("--tenant", help="Tenant that the key's requests count for.  [default: the key's id]")
@click.option(
    "--cache-group",
    help="Share cached prefixes with all keys of this group; each can then find out what the others ask.  "
    "[default: with the keys of its tenant]",
)
@click.option(
    "--requests-per-minute",
    type=click.IntRange(1, MAX_PER_MINUTE),
    help="Requests a minute; an idle key may use them at once.",
)
@click.option(
    "--tokens-per-minute", type=click.IntRange(1, MAX_PER_MINUTE), help="Tokens of prompts and answers a minute."
)
@click.option("--max-concurrent", type=click.IntRange(1, MAX_CONCURRENT), help="Requests at a time.")
@click.option(
    "--max-priority", type=int, default=0, show_default=True, help="Highest priority that the key may ask for."
)
@click.option("--model", "models", multiple=True, help="Model that the key may use; may be repeated.  [default: all]")
@click.option("--json", "as_json", is_flag=True, help="Print key and id as a JSON object.")
def create(
    name: str, path: Path | None, redis_url: str | None, tenant: str | None, as_json: bool, **limits: Any
) -> None:
    """Make a key for NAME, and print it. It is not shown again."""
    if not name.strip():
        raise CommandError("NAME must not be empty: it says whose key it is")
    secret = new_secret()
    key_id = new_id()
    try:
        key = ApiKey(
            id=key_id,
            sha256=sha256_of(secret),
            name=name,
            tenant=key_id if tenant is None else tenant,
            created_s=int(time.time()),
            **limits,
        )
    except ValueError as error:
        raise CommandError(str(error)) from None
    _store(path, redis_url).add(key)
    if as_json:
        click.echo(json.dumps({"id": key_id, "key": secret}))
    else:
        click.echo(secret)
        click.echo(f"this is the key {key_id} for {name}; it is not shown again", err=True)


@keys.command(name="list")
@_place
@click.option("--json", "as_json", is_flag=True, help="Print the keys as a JSON list.")
def list_keys(path: Path | None, redis_url: str | None, as_json: bool) -> None:
    """Show all keys, without their secrets."""
    found = sorted(_store(path, redis_url).keys(), key=lambda key: (key.created_s, key.id))
    if as_json:
        values = [{name: value for name, value in asdict(key).items() if name != "sha256"} for key in found]
        click.echo(json.dumps(values, indent=2))
    else:
        _print(found)


def _print(found: Sequence[ApiKey]) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("id", "name", "tenant", "made", "requests/min", "tokens/min", "at a time", "priority", "models"):
        table.add_column(column, no_wrap=column != "models", justify="right" if "/min" in column else "left")
    for key in found:
        numbers = (key.requests_per_minute, key.tokens_per_minute, key.max_concurrent)
        cells = ["" if number is None else str(number) for number in numbers]
        made = time.strftime("%Y-%m-%d", time.gmtime(key.created_s))
        models = ", ".join(key.models) or "all"
        table.add_row(key.id, key.name, key.tenant, made, *cells, str(key.max_priority), models)
    console_for(table).print(table)


@keys.command()
@click.argument("key")
@_place
def revoke(key: str, path: Path | None, redis_url: str | None) -> None:
    """Revoke a key. KEY is its id, or its name if only one key has it."""
    store = _store(path, redis_url)
    known = store.keys()
    found = [one for one in known if one.id == key] or [one for one in known if one.name == key]
    if len(found) != 1:
        many = "several keys are" if found else "no key is"
        raise CommandError(f"{many} called {key[:100]!r}; headrace keys list shows their ids")
    store.remove(found[0].id)
    click.echo(f"revoked {found[0].id} of {found[0].name}", err=True)
