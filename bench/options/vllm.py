"""Flags of `vllm bench serve` that change nothing here."""

from __future__ import annotations

import click

from headrace.bench.options.parsing import options

FLAGS = options(
    *(
        click.option(f"--{name}", is_flag=True, expose_value=False, help=f"Accepted for scripts; {why}.")
        for name, why in (
            ("trust-remote-code", "no code of models is run"),
            ("skip-tokenizer-init", "no tokenizer is needed"),
            ("skip-chat-template", "the server applies templates"),
            ("no-stream", "files are read as a whole"),
        )
    ),
    click.option("--tokenizer-mode", expose_value=False, help="Accepted for scripts; tokenizers have one mode."),
)
