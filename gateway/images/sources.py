"""The flags that define from where images may be fetched."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from headrace.common.flags import FiniteRange, options_of
from headrace.gateway.images.loading import ImageLoader
from headrace.gateway.images.local import LocalImages
from headrace.gateway.images.urls import Domains

FETCH_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class ImageSources:
    """The values of the command line."""

    domains: Domains
    """Hosts from which images are fetched."""
    directory: LocalImages | None = None
    """Below which files are read."""
    timeout_s: float = FETCH_TIMEOUT_S

    def loader(self, executor: Executor) -> ImageLoader:
        """The loader of images from these sources, for the running event loop."""
        if not self.domains:
            return ImageLoader(executor, None, self.directory)
        from headrace.gateway.images.remote import RemoteImages  # its client of HTTP takes long to import

        return ImageLoader(executor, RemoteImages(self.domains, self.timeout_s), self.directory)


def image_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options to a command, which gets their values as `images`."""

    @functools.wraps(command)
    def with_sources(
        allowed_media_domains: tuple[str, ...],
        allowed_local_media_path: Path | None,
        media_timeout: float,
        **options: Any,
    ) -> None:
        try:
            domains = Domains(name for value in allowed_media_domains for name in value.split(",") if name)
        except ValueError as error:
            raise click.UsageError(f"--allowed-media-domains: {error}") from error
        directory = None
        if allowed_local_media_path is not None:
            try:
                directory = LocalImages(allowed_local_media_path)
            except OSError as error:
                raise click.UsageError(f"--allowed-local-media-path: {error}") from error
        command(images=ImageSources(domains, directory, media_timeout), **options)

    return _OPTIONS(with_sources)


_OPTIONS = options_of(
    click.option(
        "--allowed-media-domains",
        multiple=True,
        envvar="HEADRACE_GATEWAY_ALLOWED_MEDIA_DOMAINS",
        metavar="NAME[,NAME...]",
        help="Fetch images by http and https from these hosts: images.example.com, *.example.com for all below it, or "
        "all; with :PORT if it is not 80 or 443. Only public addresses are called. Default: none.",
    ),
    click.option(
        "--allowed-local-media-path",
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Read images of file: URLs from files below this directory. Default: none.",
    ),
    click.option(
        "--media-timeout",
        default=FETCH_TIMEOUT_S,
        type=FiniteRange(min=0, min_open=True),
        help="Maximum seconds to fetch an image.",
    ),
)
