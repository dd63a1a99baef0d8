"""The model card that a worker gives to routers, gateways and callers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.protos import inference_pb2, worker_pb2
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.kv.cache import GroupBudget, KVCache
from headrace.worker.kv.groups.recurrent import StateBudget
from headrace.worker.model.directory import ModelDir
from headrace.worker.tiers import Tiers

if TYPE_CHECKING:
    from headrace.worker.model.runner import OpenVINOModelRunner

log = logging.getLogger("headrace.worker")
_ROLES = {"both": worker_pb2.ROLE_UNSPECIFIED, "prefill": worker_pb2.ROLE_PREFILL, "decode": worker_pb2.ROLE_DECODE}


def card_of(
    config: WorkerConfig,
    kv_cache: KVCache,
    model_dir: ModelDir,
    fingerprint: str,
    runner: OpenVINOModelRunner,
    groups: Sequence[GroupBudget],
    tiers: Tiers,
) -> worker_pb2.ModelCard:
    """The model card, with the properties of the KV cache that routers need. ConfigurationError for a --role if blocks
    cannot be sent."""
    card = model_card(
        config, kv_cache, model_dir, fingerprint, kv_precision=runner.kv_precision, vocab_size=runner.vocab_size
    )
    card.kv_block_bytes = runner.block_bytes + runner.part_bytes
    card.kv_part_bytes = runner.part_bytes
    card.window_tokens = 0 if kv_cache.windows is None else kv_cache.windows.window
    card.state_interval_tokens = next((group.interval for group in groups if isinstance(group, StateBudget)), 0)
    if tiers.handover is not None:
        card.kv_layout = tiers.handover.source.layout
    elif config.role != "both":
        raise ConfigurationError(
            f"--role {config.role} does not work with this model: its KV blocks of {runner.block_bytes} bytes are too "
            "large to be sent to other workers; leave the flag out"
        )
    card.role = _ROLES[config.role]
    return card


def model_card(
    config: WorkerConfig,
    kv_cache: KVCache,
    model_dir: ModelDir,
    fingerprint: str,
    *,
    kv_precision: str,
    vocab_size: int,
) -> worker_pb2.ModelCard:
    """The model card for callers. Its context is never longer than the whole KV cache."""
    longest = config.max_context_tokens or model_dir.max_context_tokens
    whole = ("top_k", "max_tokens")
    sampling = {name: int(value) if name in whole else value for name, value in model_dir.sampling.items()}
    return worker_pb2.ModelCard(
        name=config.name,
        fingerprint=fingerprint,
        tokenizer_sha256=model_dir.tokenizer_sha256,
        max_context_tokens=min(longest, kv_cache.num_blocks * kv_cache.block_size),
        vocab_size=vocab_size,
        block_size=kv_cache.block_size,
        eos_token_ids=known_tokens(model_dir.eos_token_ids, vocab_size),
        default_sampling=inference_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        created_s=model_dir.created_s,
        kv_precision=kv_precision,
    )


def known_tokens(eos_token_ids: Sequence[int], vocab_size: int) -> list[int]:
    """Those end-of-sequence tokens that the model can choose."""
    unknown = [token_id for token_id in eos_token_ids if token_id >= vocab_size]
    if unknown:
        log.warning(
            "the model's files name the end-of-sequence tokens %s, which its vocabulary of %d does not have; they are "
            "not used",
            unknown[:8],
            vocab_size,
        )
    return [token_id for token_id in eos_token_ids if token_id < vocab_size]
