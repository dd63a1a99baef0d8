"""Makes what every run of all tests needs of PyTorch, in one process: `python -m tests.architectures.every_run`.

`make test` runs it beside the first tests. A test waits for what is being made, and makes what is still missing.
"""

from __future__ import annotations

from tests.architectures import (
    exports,
    test_adapters,
    test_architectures,
    test_beams,
    test_encoders,
    test_gguf,
    test_ranks,
)
from tests.e2e import test_by_name, test_embeddings, test_encoders_by_name, test_rerank


def jobs() -> list[exports.Job]:
    """The jobs, in about the order in which tests need what they make."""
    return [
        *exports.checkpoints([test_by_name.CHECKPOINT]),
        *exports.encoders([test_embeddings.NAME, test_rerank.NAME]),
        *exports.encoder_checkpoints([*test_encoders_by_name.EMBEDDERS, *test_encoders_by_name.RERANKERS]),
        *exports.adapters([*test_adapters.NAMES, *test_ranks.ADAPTED]),
        *exports.exports(test_architectures.NAMES),
        *exports.beams(test_beams.NAMES),
        *exports.small_encoders(test_encoders.NAMES),
        *exports.gguf_weights(test_gguf.NAMES),
    ]


if __name__ == "__main__":
    exports.make(jobs())
