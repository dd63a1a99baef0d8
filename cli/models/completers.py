"""Completes the names of models."""

from __future__ import annotations

from collections.abc import Iterable

import click

from headrace.cli.completion import quietly


def _cached_models(_ctx: click.Context) -> Iterable[str]:
    from headrace.cli.models.model_cache import cached_names

    return cached_names()


def _known_models(ctx: click.Context) -> Iterable[str]:
    from headrace.cli.models.catalogue import CATALOGUE
    from headrace.cli.models.short_names import SHORT_NAMES

    return [*_cached_models(ctx), *CATALOGUE, *SHORT_NAMES]


complete_cached_models = quietly(_cached_models)
"""Models in the cache."""
complete_known_models = quietly(_known_models)
"""Models in the cache and those with short names."""
