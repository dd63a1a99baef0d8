"""The fingerprint of a model: SHA-256 over its networks and all of their weights.

    SHA-256( network || size of its weights || SHA-256(piece 0) || SHA-256(piece 1) || ... || next network || ... )

Every byte counts, because two fine-tunes of a model have the same sizes and may differ in a single layer. So do the
networks for images, whose states are in KV blocks. Several threads hash the pieces while the model is compiled. So no
hash needs to be cached between starts, where it could become outdated. Reading also brings the file into the page
cache, from which it is loaded.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

from headrace.common.model_files.networks import networks_in
from headrace.common.model_files.vision_networks import vision_networks_in

PIECE_BYTES = 16 << 20
_READ_BYTES = 1 << 20


def fingerprint_of(model_dir: Path, threads: int) -> str:
    """The fingerprint of the model in a directory, in hex, computed by `threads` threads. Raises OSError."""
    digest = sha256()
    for network in (*networks_in(model_dir), *vision_networks_in(model_dir)):
        digest.update(network.read_bytes())
        with network.with_suffix(".bin").open("rb") as file:
            descriptor = file.fileno()
            size = os.fstat(descriptor).st_size
            digest.update(size.to_bytes(8, "little"))
            with ThreadPoolExecutor(threads, thread_name_prefix="fingerprint") as executor:
                for piece in executor.map(functools.partial(_hash_piece, descriptor), range(0, size, PIECE_BYTES)):
                    digest.update(piece)
    return digest.hexdigest()


def outline_of(model_dir: Path) -> str:
    """A hash that distinguishes most models without reading their weights: SHA-256 over the networks and the sizes of
    their weights, in hex. Raises OSError."""
    digest = sha256()
    for network in (*networks_in(model_dir), *vision_networks_in(model_dir)):
        digest.update(network.read_bytes())
        digest.update(network.with_suffix(".bin").stat().st_size.to_bytes(8, "little"))
    return digest.hexdigest()


def for_context(fingerprint: str, max_context_tokens: int) -> str:
    """The fingerprint, in hex, of a model whose answers depend on the longest context that is served. Answers and
    cached prefixes of one context are not valid for another."""
    return sha256(f"{fingerprint}\n{max_context_tokens}".encode()).hexdigest()


def for_ranks(fingerprint: str, num_ranks: int) -> str:
    """The fingerprint, in hex, of a model that is divided among ranks. Sums have other low bits for each number of
    them, so an answer that has begun with one number cannot continue with another."""
    return sha256(f"{fingerprint}\nranks {num_ranks}".encode()).hexdigest()


def for_stages(fingerprint: str, ranks: Sequence[int], *, bfloat16_states: bool = False) -> str:
    """The fingerprint, in hex, of a model whose layers are divided among the stages of a pipeline, whose CPUs may have
    other kernels, and those of each stage among so many ranks. With `bfloat16_states`, they exchange hidden states as
    bfloat16, otherwise as float32, so these are rounded at other places."""
    of_ranks = f" ranks {' '.join(map(str, ranks))}" if max(ranks) > 1 else ""
    of_states = " bfloat16" if bfloat16_states else ""
    return sha256(f"{fingerprint}\nstages {len(ranks)}{of_ranks}{of_states}".encode()).hexdigest()


def _hash_piece(descriptor: int, start: int) -> bytes:
    digest = sha256()
    end, buffer = start + PIECE_BYTES, memoryview(bytearray(_READ_BYTES))
    while start < end:
        num_read = os.preadv(descriptor, [buffer], start)
        if not num_read:
            break
        digest.update(buffer[:num_read])
        start += num_read
    return digest.digest()
