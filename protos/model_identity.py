"""The identity of a model: one value for its weights and its tokenizer, on which worker and router must agree.

An answer names its identity in its first message, and only a worker with the same identity may continue it. The
precision of the KV cache and the execution mode are not included. They round differently and may decide a near tie
between two tokens, but the text remains an answer of the same model.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.protos.worker_pb2 import ModelCard


def model_identity(card: ModelCard, adapter_sha256: str = "") -> str:
    """The identity of the card's model, with an adapter unless its hash is empty; see `identity_of`."""
    return identity_of(card.fingerprint, card.tokenizer_sha256, adapter_sha256)


def identity_of(fingerprint: str, tokenizer_sha256: str, adapter_sha256: str = "") -> str:
    """SHA-256, in hex, over the fingerprint and the hashes of the tokenizer bundle and of the adapter, if any."""
    adapter = f"\n{adapter_sha256}" if adapter_sha256 else ""
    return sha256(f"{fingerprint}\n{tokenizer_sha256}{adapter}".encode()).hexdigest()
