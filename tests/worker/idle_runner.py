"""A model of one layer that allocates its KV cache and computes nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.block_bytes import BlockShape
from headrace.worker.kv.layers import LayerGroup, LayerKind
from headrace.worker.model.runner import OpenVINOModelRunner

SHAPE = BlockShape(1, 8, 8)


def idle_runner(shape: BlockShape = SHAPE, adapters: object | None = None) -> OpenVINOModelRunner:
    """A model whose blocks have one piece of this shape."""

    def allocate(num_blocks: int, *, make_arena: Any) -> KVArena:
        arena: KVArena = make_arena()
        return arena

    runner = SimpleNamespace(
        numerics="version CPU performance u8",
        adapters=adapters,
        layer_groups=[LayerGroup(LayerKind.FULL, shape.num_bytes)],
        windows=SimpleNamespace(layers=()),
        block_shapes=(shape,),
        block_bytes=shape.num_bytes,
        block_size=shape.tokens,
        in_slots=(),
        most_blocks=lambda *_: None,
        allocate=allocate,
    )
    return cast("OpenVINOModelRunner", runner)
