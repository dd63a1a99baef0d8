"""A pipeline whose first stage, the worker, is divided among ranks.

`PipelineRunner` and `GroupRunner` each add something to the runner that is their base, and leave the rest to it. Here
the pipeline's base is the group: what the pipeline lets this stage compute, all of its ranks compute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.worker.pipeline.runner import Link, PipelineRunner
from headrace.worker.ranks.group import GroupRunner
from headrace.worker.ranks.members import Cpus


class StagedGroupRunner(PipelineRunner, GroupRunner):
    """A pipeline as by `PipelineRunner`, whose first stage is divided among ranks as by `GroupRunner`: one rank for
    each entry of `cpus`. `ranks` are those of this stage."""

    def __init__(
        self,
        model_dir: Path,
        num_stages: int,
        link: Link,
        cpus: Sequence[Cpus],
        *,
        most_tokens: int,
        hangs_after_s: float,
        on_lost: Callable[[str], None],
        **asked: Any,
    ) -> None:
        """`asked` is as for `PipelineRunner`. ConfigurationError if the model cannot be divided so."""
        of_group = {"cpus": cpus, "most_tokens": most_tokens, "hangs_after_s": hangs_after_s, "on_lost": on_lost}
        super().__init__(model_dir, num_stages, link, on_lost=on_lost, of_base=of_group, **asked)
