"""The chain of a request's full blocks: each is identified by the hash of its tokens and of the block before it."""

from __future__ import annotations

from typing import NamedTuple

from headrace.protos.block_hash import next_hash, token_bytes_of
from headrace.worker.request.request import Request

TOKEN_BYTES = 4


class Content(NamedTuple):
    """The content of a findable block. `block_hash` is None while the block is not full. The `parent_hash` of a chain's
    first block is the chain's root hash."""

    block_hash: int | None
    parent_hash: int
    token_bytes: bytes
    is_first: bool


class BlockKey(NamedTuple):
    """Identifies a block, and a state of recurrent layers after it. Comparing all of it rules out hash collisions."""

    block_hash: int
    parent_hash: int
    token_bytes: bytes


def hash_of(request: Request, index: int, block_size: int) -> int:
    """The chained hash of the request's block `index`. All tokens of the block must be known."""
    hashes, of_prompt = request.block_hashes, request.prompt_hashes
    if len(hashes) <= index:
        hashes.extend(of_prompt[len(hashes) :])
    while len(hashes) <= index:
        parent = hashes[-1] if hashes else request.root_hash
        hashes.append(next_hash(parent, content_of(request, len(hashes), block_size)))
        if len(hashes) * block_size <= request.num_prompt_tokens:
            of_prompt.append(hashes[-1])
    return hashes[index]


def parent_of(request: Request, index: int, block_size: int) -> int:
    """The hash before the request's block `index`: that of the block before, or the root of its chain."""
    return hash_of(request, index - 1, block_size) if index else request.root_hash


def content_of(request: Request, index: int, block_size: int) -> bytes:
    """The tokens of the request's block `index`, as far as they are known."""
    return token_bytes_of(request.token_ids[index * block_size : (index + 1) * block_size])


def key_of(request: Request, index: int, block_size: int) -> BlockKey:
    """The hash, the hash before it and the tokens of the request's block `index`, all of whose tokens must be known."""
    return BlockKey(
        hash_of(request, index, block_size),
        parent_of(request, index, block_size),
        content_of(request, index, block_size),
    )
