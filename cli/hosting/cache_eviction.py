"""The option --cache-eviction: whether long requests may evict their own KV blocks."""

from __future__ import annotations

import click


def checked_eviction(_context: click.Context, _parameter: click.Parameter, text: str | None) -> str | None:
    """The value of --cache-eviction, checked. BadParameter if it is wrong."""
    if text is None:
        return None
    # Imported late: this takes a while.
    from headrace.protos.cache_eviction import parse_eviction

    try:
        parse_eviction(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return text


cache_eviction_option = click.option(
    "--cache-eviction",
    callback=checked_eviction,
    help="Let long requests evict the tokens that they attend to least, so that answers may be longer than the KV "
    "cache. on-request: requests that ask for it. max_cache_size=TOKENS[,start_size=TOKENS][,recent_size=TOKENS]"
    "[,aggregation_mode=sum|norm_sum]: all requests that do not set cache_eviction to false.  [default: off]",
)
