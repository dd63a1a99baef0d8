"""The flag that keeps a command off the network."""

from __future__ import annotations

import click

offline_option = click.option(
    "--offline",
    is_flag=True,
    envvar="HF_HUB_OFFLINE",
    help="Take models from the cache and from files only; fetch nothing.",
)
