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


def model_identity(card: ModelCard) -> str:
    """SHA-256 over the card's fingerprint and the hash of its tokenizer bundle, hex."""
    return sha256(f"{card.fingerprint}\n{card.tokenizer_sha256}".encode()).hexdigest()
