"""Loads an encoder: reads and compiles it, checks that padding does not change its vectors, and warms it up."""

from __future__ import annotations

import hashlib
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.protos.inference_pb2 import TASK_RANK, Task
from headrace.protos.worker_pb2 import ModelCard
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.encoder.batcher import Batcher, BatchLimits
from headrace.worker.encoder.encoder import Encoder
from headrace.worker.encoder.files import EncoderFiles, read_encoder_files
from headrace.worker.encoder.thread import EncoderThread
from headrace.worker.engine.mailbox import Mailbox
from headrace.worker.host.binding import Region
from headrace.worker.host.numa import num_threads_for
from headrace.worker.kv.fetch import Bell
from headrace.worker.model.directory import ModelDir, read_config, read_model_dir
from headrace.worker.model.fingerprint import fingerprint_of
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request

if TYPE_CHECKING:
    from headrace.worker.encoder.runner import EncoderRunner

log = logging.getLogger("headrace.worker")

# Flags that mean nothing without generation and a KV cache, by the field that they set.
_OF_GENERATION = {
    "kv_cache_bytes": "--kv-cache-gb",
    "kv_disk": "--kv-disk",
    "kv_disk_key": "--kv-disk-key",
    "decode_graph": "--decode-graph",
    "draft_model": "--draft-model",
    "cache_eviction": "--cache-eviction",
    "adapters": "--adapter",
    "max_adapters": "--max-adapters",
    "target_tpot_ms": "--target-tpot-ms",
    "max_num_mixed_tokens": "--max-num-mixed-tokens",
}
_NO_REGION = Region(0, 0)
# Lengths of the texts of the warm-up.
_WARM_UP_TOKENS = (8, 32, 128)
# Bounds the difference that padding makes, in a precision of eight bits.
_LEAST_COSINE = 0.999
_MOST_SCORE_ERROR = 0.02


@dataclass(frozen=True, slots=True)
class LoadedEncoder:
    """An encoder ready to serve. Everything that needs a KV cache is None."""

    runner: EncoderRunner
    batcher: Batcher
    card: ModelCard
    tokenizer_bundle: bytes
    bell: Bell
    kv_cache: Region = _NO_REGION
    kept: None = None
    handover: None = None
    adapters: None = None
    locate: None = None
    beams: None = None

    def close(self) -> None:
        """Does nothing: only the thread runs."""

    @property
    def max_num_seqs(self) -> int:
        """How many waiting texts the next batch is chosen from."""
        return self.batcher.limits.window

    def make_thread(self, mailbox: Mailbox, max_wait_s: float) -> EncoderThread:
        """A thread that encodes the mailbox's texts; the caller starts it. No text waits longer than `max_wait_s`."""
        return EncoderThread(Encoder(self.runner, self.batcher, max_wait_s), mailbox, self.runner.ended)


def load_encoder(config: WorkerConfig, task: Task) -> LoadedEncoder:
    """Load the encoder in the model directory. Raises ConfigurationError if it cannot be served."""
    _refuse_flags_of_generation(config)
    threads = num_threads_for(config.threads)
    model_dir = read_model_dir(config.model_dir)
    files = read_encoder_files(
        config.model_dir, task, config.max_context_tokens, pooling=config.pooling, normalizes=config.normalizes
    )
    vocab_size = _vocab_size(config)
    start = time.monotonic()
    hashing = ThreadPoolExecutor(1).submit(fingerprint_of, config.model_dir, threads)
    # Importing OpenVINO is slow, so refuse a wrong directory first.
    from headrace.worker.encoder.runner import EncoderRunner

    bell = Bell()
    runner = EncoderRunner(
        config.model_dir, files, threads=threads, execution_mode=config.execution_mode, on_end=bell.ring
    )
    limits = BatchLimits()
    batcher = Batcher(
        BatchLimits(config.max_num_seqs or limits.window, config.max_num_batched_tokens or limits.max_tokens)
    )
    warm_up(runner, files, vocab_size)
    fingerprint = fingerprint_for(hashing.result(), files)
    card = card_of(config, model_dir, files, vocab_size, runner.dimensions, fingerprint)
    log.info(
        "%s loaded in %.1f s: %s of %d dimensions, texts of up to %d tokens, %d batches at a time on %d cores in %s",
        config.name,
        time.monotonic() - start,
        "scores" if task == TASK_RANK else f"vectors ({files.pooling.value} pooling)",
        runner.dimensions,
        files.max_tokens,
        runner.num_streams,
        threads,
        runner.precision,
    )
    return LoadedEncoder(runner, batcher, card, model_dir.tokenizer_bundle, bell)


def warm_up(runner: EncoderRunner, files: EncoderFiles, vocab_size: int) -> None:
    """Encode short texts, so that the first caller does not wait for one-time work. Raises ConfigurationError if a
    longer text in the batch changes the vector of a text."""
    # Ordinary tokens have higher ids than special ones.
    lengths = [min(length, files.max_tokens) for length in _WARM_UP_TOKENS]
    first = min(1000, vocab_size - max(lengths))
    sampling = SamplingParams(max_tokens=0, seed=0)
    texts = [Request("warm-up", range(first, first + length), sampling, 0) for length in lengths]
    alone = np.concatenate([runner.encode([text]) for text in texts])
    together = runner.encode(texts)
    if files.task == TASK_RANK:
        is_same = float(np.abs(alone - together).max()) < _MOST_SCORE_ERROR
    else:
        norms = np.linalg.norm(alone, axis=1) * np.linalg.norm(together, axis=1)
        is_same = bool(((alone * together).sum(axis=1) >= _LEAST_COSINE * norms).all())
    if not is_same:
        raise ConfigurationError(
            "the model gives a text another result when a longer one is beside it, so texts cannot be encoded in "
            "batches; export it again with the current optimum-intel and an attention_mask"
        )


def fingerprint_for(network: str, files: EncoderFiles) -> str:
    """The fingerprint, in hex, of the network and the processing of its output."""
    return hashlib.sha256(f"{network} {files}".encode()).hexdigest()


def card_of(
    config: WorkerConfig, model_dir: ModelDir, files: EncoderFiles, vocab_size: int, dimensions: int, fingerprint: str
) -> ModelCard:
    """The model card of an encoder. Encoders have no prefix cache, so `block_size` exceeds the longest text, and no
    text has a full block that routers could look for."""
    return ModelCard(
        name=config.name,
        fingerprint=fingerprint,
        tokenizer_sha256=model_dir.tokenizer_sha256,
        max_context_tokens=files.max_tokens,
        vocab_size=vocab_size,
        block_size=files.max_tokens + 1,
        created_s=model_dir.created_s,
        task=files.task,
        dimensions=dimensions,
        pair_separator_token_ids=files.pair.between,
        pair_prefix_token_ids=files.pair.before,
        pair_suffix_token_ids=files.pair.after,
        pair_query_before=files.pair.query_before,
        pair_query_after=files.pair.query_after,
        pair_document_before=files.pair.document_before,
    )


def _vocab_size(config: WorkerConfig) -> int:
    size = read_config(config.model_dir).get("vocab_size")
    if not isinstance(size, int) or size <= 0:
        path = config.model_dir / "config.json"
        raise ConfigurationError(f"{path} does not say how many tokens there are: vocab_size")
    return size


def _refuse_flags_of_generation(config: WorkerConfig) -> None:
    given = [flag for name, flag in _OF_GENERATION.items() if getattr(config, name)]
    given += ["--speculation"] if config.speculation not in (None, "off") else []
    given += ["--role"] if config.role != "both" else []
    if given:
        raise ConfigurationError(
            f"the model generates no text and has no KV cache: {', '.join(given)} cannot be used with it"
        )
