"""The identity of a model: its weights and its tokenizer, as one value. Worker and router agree on it byte for byte.

An answer names the identity that it began with, and only a worker of the same identity continues it. The precision of
the KV cache and the execution mode are no part of it: they round the same model differently, and may turn a near tie
between two tokens, but the text stays an answer of one model.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace.protos.worker_pb2 import ModelCard


def model_identity(card: ModelCard, adapter_sha256: str = "") -> str:
    """The identity of the card's model, with an adapter if its hash is given; see `identity_of`."""
    return identity_of(card.fingerprint, card.tokenizer_sha256, adapter_sha256)


def identity_of(fingerprint: str, tokenizer_sha256: str, adapter_sha256: str = "") -> str:
    """SHA-256 over the fingerprint, the hash of the tokenizer bundle, and that of the adapter if there is one, hex."""
    adapter = f"\n{adapter_sha256}" if adapter_sha256 else ""
    return sha256(f"{fingerprint}\n{tokenizer_sha256}{adapter}".encode()).hexdigest()
