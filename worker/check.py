"""`python -m headrace.worker.check DIR`: checks whether a worker can serve the model, or use the heads, in a directory.
Compiles nothing.

The exit status is 0, or 2 with one line on standard error: `error:` and the message of a worker that refuses to start.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import openvino as ov

from headrace.common.model_files.heads import HeadsKind, heads_kind
from headrace.common.model_files.networks import has_network
from headrace.common.model_files.task import task_of
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_files import read_eagle
from headrace.worker.draft_heads.medusa_files import read_medusa
from headrace.worker.draft_heads.mtp_files import read_mtp
from headrace.worker.encoder.files import read_encoder_files, refuse_embedder_with_cache
from headrace.worker.encoder.runner import read_encoder
from headrace.worker.model.directory import read_model_dir
from headrace.worker.model.fused_projections import fuse_projections
from headrace.worker.model.lm_head import replace_head
from headrace.worker.model.paging import read_paged
from headrace.worker.weights.file_memory import FileMemory

_READERS = {HeadsKind.EAGLE3: read_eagle, HeadsKind.MEDUSA: read_medusa, HeadsKind.MTP: read_mtp}


def check_servable(model_dir: Path) -> None:
    """Raise ConfigurationError for a model that a worker would refuse to load, or for heads that cannot be read."""
    kind = heads_kind(model_dir)
    if kind is not None and not has_network(model_dir):
        _READERS[kind](model_dir)
        return
    read_model_dir(model_dir)
    if task := task_of(model_dir):
        read_encoder(ov.Core(), model_dir, read_encoder_files(model_dir, task, None))
        return
    refuse_embedder_with_cache(model_dir)
    graph = read_paged(ov.Core(), model_dir).graph
    fuse_projections(graph, FileMemory([]))
    replace_head(graph, is_bfloat16=False)


def main() -> None:
    """Entry point of the checking process."""
    logging.disable(logging.WARNING)
    try:
        check_servable(Path(sys.argv[1]))
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
