"""The flags that name the server, its API and the model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from headrace.bench.apis import BACKENDS, Api, api_of
from headrace.bench.options import vllm
from headrace.bench.options.parsing import Section
from headrace.bench.options.values import OneOf, Pair
from headrace.bench.target import Target, key_header, target_of
from headrace.common.commands import CommandError
from headrace.common.flags import FiniteRange

FLAGS = Section(
    "The server",
    click.argument("url", required=False),
    click.option("--base-url", help="URL of the server, instead of URL."),
    click.option("--host", help="Host of the server, instead of URL. Default: 127.0.0.1, if --port is given."),
    click.option(
        "--port",
        type=click.IntRange(1, 65535),
        help="Port of the server, instead of URL. Default: 8000, if --host is given.",
    ),
    click.option(
        "--backend",
        "--endpoint-type",
        "backend",
        type=OneOf(BACKENDS, vllm.BACKENDS),
        default="openai",
        help="The server's API. openai: POST /v1/completions; openai-chat: POST /v1/chat/completions; "
        "openai-responses: POST /v1/responses; vllm: as openai. --endpoint-type is its older name.",
    ),
    click.option(
        "--endpoint",
        help="Path of the API, if it is not the usual one. The path of a chat API selects --backend openai-chat.",
    ),
    click.option("--model", help="Model to request. Default: the first that the server lists."),
    click.option("--served-model-name", help="Name of --model on the server, if it differs."),
    click.option(
        "--header",
        "headers",
        type=Pair(),
        multiple=True,
        help="Header of every request, such as X-Team=search; may be repeated. An API key is taken from "
        "OPENAI_API_KEY.",
    ),
    click.option(
        "--ca-file", type=click.Path(path_type=Path), help="File with the certificate authority of the server."
    ),
    click.option("--insecure", is_flag=True, help="Do not verify the server's certificate."),
    click.option(
        "--request-timeout",
        type=FiniteRange(0, min_open=True),
        default=600.0,
        help="Seconds after which a request counts as failed.",
    ),
)


def target(flags: Mapping[str, Any]) -> Target:
    """The server that the flags name. Raises CommandError."""
    url = flags["url"] or flags["base_url"]
    if flags["url"] is not None and any(flags[name] is not None for name in ("base_url", "host", "port")):
        raise CommandError("the server is named twice; give either URL, or --base-url, or --host and --port")
    if url is None:
        if flags["host"] is None and flags["port"] is None:
            raise CommandError("name the server by its URL, such as http://127.0.0.1:8000")
        host = flags["host"] or "127.0.0.1"
        url = f"http://{f'[{host}]' if ':' in host else host}:{flags['port'] or 8000}"
    headers = dict(flags["headers"])
    if not any(name.lower() == "authorization" for name in headers):
        headers |= key_header()
    try:
        return target_of(url, headers, flags["ca_file"], flags["insecure"])
    except ValueError as error:
        raise CommandError(str(error)) from None


def api(flags: Mapping[str, Any]) -> Api:
    """The API that the flags name."""
    return api_of(flags["backend"], flags["endpoint"])
