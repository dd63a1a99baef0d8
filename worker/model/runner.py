"""Computes steps with OpenVINO: a model with PagedAttention and the tensors of its KV cache.

stateful IR --(paged_attention_transformation)--> inputs of batch.Batch + key_cache.N, value_cache.N
            --(fused_projections)--> fewer products
            --(vocabulary_head)--> logits of the sampled rows only, and their summary for sampling
            --(compile)--> the cache's layout and precision, read from the compiled inputs

Decode steps of few sequences may use a separate graph, compiled for other kernels, with the same cache (see
`decode_graph`). So do steps with adapters, whose graph has more inputs (see `adapter_graph`).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.worker.config import ConfigurationError
from headrace.worker.host.binding import RankReport, StageReport
from headrace.worker.host.precision import computes_in_bfloat16, core_for
from headrace.worker.kv.arena import KVArena
from headrace.worker.kv.block_bytes import BlockBytes, BlockShape
from headrace.worker.kv.layers import LayerGroup, LayerKind
from headrace.worker.model.adapted_linears import find_linears
from headrace.worker.model.adapter_graph import PLACES, ROWS, add_adapters
from headrace.worker.model.adapter_memory import RANK_STEP, UNDIVIDED, AdapterMemory, AdapterPart, Linear, rows_of
from headrace.worker.model.batch import Batch, Graph, StatesType, graph_of
from headrace.worker.model.decode_graph import SMALL_DECODE
from headrace.worker.model.eviction_tables import BLOCK_TABLES, SCORE_WINDOWS, SCORES, layer_of
from headrace.worker.model.exact_rows import exact_rows
from headrace.worker.model.fused_projections import fuse_projections
from headrace.worker.model.lm_head import GraphEnd, InputTensors, VocabularyHead
from headrace.worker.model.paging import BLOCK_INDICES, STATE_INPUTS, STEP_INPUTS, read_paged, reason_of
from headrace.worker.model.scored import add_scores, score_windows, tables_of
from headrace.worker.model.state_tables import StateTables, bytes_of, dims_of, has_states, has_sums
from headrace.worker.model.step_images import arrays_of
from headrace.worker.model.step_limits import MIN_PROMPT_STEP
from headrace.worker.model.window_tables import WINDOW_BLOCK_INDICES, add_window_tables, window_layers
from headrace.worker.sampling.logits import Logits
from headrace.worker.weights.file_memory import FileMemory
from headrace.worker.weights.scales import widen_scales

IntArray = npt.NDArray[np.int32]
KV_PRECISIONS = {"u8": ov.Type.u8, "u4": ov.Type.u4, "bf16": ov.Type.bf16, "f32": ov.Type.f32}
_UNQUANTISED = {"bf16", "f32"}
# The input of graphs that begin with hidden states.
HIDDEN_STATES = "hidden_states"
# With this, products in the graph of small decode steps quantise their inputs to 8 bits in groups.
_FLOAT32 = {"INFERENCE_PRECISION_HINT": "f32"}


class StateReader(Protocol):
    """Reads hidden states from the model's steps. If it `computes_all_states`, `prepare` makes the graph compute the
    last hidden states of all tokens, not only of the sampled ones. The other ranks of a divided model must do the same.
    """

    computes_all_states: bool

    def add_outputs(self, model: ov.Model) -> None:
        """Add outputs to a graph of the model that is about to be compiled. Raises ConfigurationError."""
        ...

    def prepare(self, model: ov.Model) -> None:
        """Change the graph before adapters are added and before its end is replaced by one that computes only the
        sampled rows. Raises ConfigurationError."""
        ...

    def read(self, batch: Batch, request: ov.InferRequest) -> None:
        """Read the outputs of the step that was just computed."""
        ...


class Part(NamedTuple):
    """What makes a graph a part of a divided model. `keeps` is an object that must live as long as the graph. `run` is
    the length of the runs in its part of the vocabulary: 0 for none, None if the graph has the whole vocabulary.
    `adapters` has this rank's part of adapters first, then those of the ranks whose adapters it writes.

    A stage of a pipeline has the layers `layers`, and its graph ends with hidden states, as `end` makes it. The first
    stage also has `head`, the graph that computes logits from the hidden states that come back.
    """

    keeps: object
    run: int | None = None
    adapters: Sequence[AdapterPart] = UNDIVIDED
    layers: Layers | None = None
    end: GraphEnd | None = None
    head: ov.Model | None = None


class Layers(NamedTuple):
    """The layers of a stage: from `first` up to but not including `end`. With `end` None, all layers from `first`
    on. With `bfloat16_states`, hidden states are exchanged with other stages as bfloat16, otherwise as float32."""

    first: int
    end: int | None
    bfloat16_states: bool = False


WHOLE = Part(None)


class OpenVINOModelRunner:
    """A compiled model. `block_size` (tokens), `block_bytes` (over all layers), `num_kv_heads`, `vocab_size` and
    `kv_precision` are read from it; `allocate` must come before `bind`. A second graph computes decode steps of up to
    `small_decode` sequences; 0 without `decode_graph`. Prompts are exact in steps of up to `exact_rows` tokens (see
    `exact_rows`). `depends_on_context`: answers depend on `max_context_tokens` (see `positions`). `adapters` is the
    memory of `max_adapters` adapters of the `linears`; None without any.

    Decode steps have at least `least_decode` tokens and sampled rows: two in accuracy mode and with `speculates`,
    because other kernels compute a single one. A token then does not depend on how many others its step has, in
    performance mode only on some CPUs (docs/decisions/speculation.md). `states` reads hidden states of every step. With
    `evicts`, requests may evict their own KV blocks. With `has_parts`, layers with a sliding window have their parts of
    blocks in separate slots of `part_bytes` bytes. `block_bytes` then counts only the other layers. `layer_groups` says
    what the cache has to keep for which layers. `image_inputs` is what the graph takes of images; None if it takes
    none. `divide` makes the graph with PagedAttention a part of it, such as that of one rank.
    """

    num_ranks = 1
    """Among how many ranks the model is divided."""
    num_stages = 1
    """Among how many stages of a pipeline its layers are divided."""
    bfloat16_states = False
    """Whether these stages exchange hidden states as bfloat16."""
    _batch: Batch | None = None

    def __init__(
        self,
        model_dir: Path,
        *,
        threads: int,
        kv_precision: str,
        execution_mode: str,
        decode_graph: bool = False,
        max_context_tokens: int | None = None,
        max_adapters: int = 0,
        speculates: bool = False,
        states: StateReader | None = None,
        evicts: bool = False,
        has_parts: bool = False,
        divide: Callable[[ov.Model], Part] | None = None,
    ) -> None:
        core = core_for(execution_mode)
        paged = read_paged(core, model_dir, max_context_tokens, evicts=evicts)
        model, self.depends_on_context, self.image_inputs = paged
        # As adapters know them: whole, and not fused.
        self.linears: Sequence[Linear] = find_linears(model) if max_adapters else []
        self._part = WHOLE if divide is None else divide(model)
        head = self._part.head
        has_parts = has_parts and not has_states(model)
        self.windows = add_window_tables(model) if has_parts else window_layers(model)
        self._in_slots: Collection[int] = self.windows.layers if has_parts else ()
        memory = FileMemory()
        fuse_projections(model, memory)
        computed = [model] if head is None else [model, head]
        for each in computed:
            widen_scales(each, memory)
        # Its states would have another precision.
        of_decode = model.clone() if decode_graph and not has_states(model) else None
        of_adapters = model.clone() if max_adapters else None
        # Without this, states have no defined precision in accuracy mode, and sums over all tokens are in bfloat16.
        needs_float32 = has_states(model) and (execution_mode == "accuracy" or has_sums(model))
        asked = _Asked(threads, kv_precision, execution_mode, needs_float32)
        is_bfloat16 = not needs_float32 and computes_in_bfloat16(core)
        _check_cache(asked, "bf16" if is_bfloat16 else "f32")
        self.exact_rows = min(exact_rows(core, each, asked.properties) for each in computed)
        self._states = states
        for graph in (model, of_decode, of_adapters):
            if states is not None and graph is not None:
                states.prepare(graph)
        end = self._part.end
        main = _Graph(core, model, asked, is_bfloat16=is_bfloat16, states=states, part=self._part, end=end)
        self._graphs = {Graph.MAIN: main}
        if head is not None:
            self._graphs[Graph.HEAD] = _Graph(core, head, asked, is_bfloat16=is_bfloat16, states=None, part=self._part)
        if of_decode is not None:
            decode = _Graph(
                core, of_decode, asked, is_bfloat16=False, states=states, part=self._part, properties=_FLOAT32
            )
            self._graphs[Graph.SMALL_DECODE] = decode
        self.adapters: AdapterMemory | None = None
        """The weights of adapters. Any thread may replace it between two calls of `bind`."""
        if of_adapters is not None:
            self._make_adapters(core, of_adapters, asked, max_adapters, is_bfloat16=is_bfloat16)
        self.small_decode = 0 if of_decode is None else SMALL_DECODE
        self.least_decode = 2 if execution_mode == "accuracy" or speculates else 1
        self._describe(core, main, execution_mode, evicts=evicts)

    def _describe(self, core: ov.Core, main: _Graph, execution_mode: str, *, evicts: bool) -> None:
        """Read the shapes and types of the KV cache, which has no memory yet."""
        self._evicts = evicts
        self._graph, self._slot = main, main.slots[0]
        self.infer_s = 0.0
        self._cache_tensors: list[ov.Tensor] = []
        self._cache_views: list[npt.NDArray[np.uint8]] = []
        # The same for layers with whole blocks, and for layers whose parts are in slots.
        self._divided_views: tuple[list[npt.NDArray[np.uint8]], ...] = ([], [])
        caches = self._caches = main.caches
        self.state_tables = main.state_tables
        self.state_bytes = 0 if self.state_tables is None else self.state_tables.slot_bytes
        """The size of a slot for the states of recurrent layers; 0 if there are none."""
        self.vocab_size = self._graphs.get(Graph.HEAD, main).vocab_size
        self._check_layouts()
        self._num_layers = 1 + max(map(layer_of, caches))
        key = next(port for port in caches if port.any_name.startswith("key_cache."))
        value = next(port for port in caches if port.any_name.startswith("value_cache."))
        self.num_kv_heads, self.block_size = dims_of(value)[:2]
        self.block_bytes = sum(bytes_of(port) for port in caches if layer_of(port) not in self._in_slots)
        self.part_bytes = sum(map(bytes_of, caches)) - self.block_bytes
        self.layer_groups = self._group_layers()
        self.kv_precision = str(key.element_type.get_type_name())
        parts = [ov.get_version(), core.get_property("CPU", "FULL_DEVICE_NAME"), execution_mode, self.kv_precision]
        self.numerics = " ".join([*parts, "evicts"] if evicts else parts)

    def _group_layers(self) -> Sequence[LayerGroup]:
        """The groups of layers, with what the cache has to keep for each."""
        whole = tuple(port.any_name for port in self._caches if layer_of(port) not in self._in_slots)
        groups = [LayerGroup(LayerKind.FULL, self.block_bytes, names=whole)]
        if self._in_slots:
            names = tuple(port.any_name for port in self._caches if layer_of(port) in self._in_slots)
            groups.append(LayerGroup(LayerKind.WINDOW, self.part_bytes, self.windows.num_tokens, names))
        if self.state_tables is not None:
            names = tuple(port.any_name for port in self.state_tables.ports)
            groups.append(LayerGroup(LayerKind.RECURRENT, self.state_bytes, names=names))
        return groups

    def _check_layouts(self) -> None:
        """ConfigurationError unless all graphs have the same KV cache."""
        layouts = {kind: _layout(graph.caches) for kind, graph in self._graphs.items()}
        main = layouts[Graph.MAIN]
        if layouts.get(Graph.SMALL_DECODE, main) != main:
            raise ConfigurationError("the graph of decode steps has another KV cache; choose --decode-graph off")
        if layouts.get(Graph.ADAPTERS, main) != main:
            raise ConfigurationError("the graph with adapters has another KV cache; serve this model without adapters")

    @property
    def has_parts(self) -> bool:
        """Whether some layers have their parts of blocks in slots."""
        return bool(self._in_slots)

    def allocate_states(self, num_slots: int, *, huge_pages: bool = True) -> str:
        """Make `num_slots` slots for the states of recurrent layers. Must come before `bind` if there are any. Returns
        the names of their types."""
        assert self.state_tables is not None, "the model has no recurrent layers"
        requests = [slot.request for graph in self._graphs.values() for slot in graph.slots]
        self.state_tables.allocate(num_slots, requests, huge_pages=huge_pages)
        return self.state_tables.precisions

    @property
    def block_shapes(self) -> tuple[BlockShape, ...]:
        """The part of a block in each of the arena's pieces."""
        shapes = []
        for port in self._caches:
            heads, tokens, size = dims_of(port)
            shapes.append(BlockShape(heads, tokens, size * port.element_type.bitwidth // 8))
        return tuple(shapes)

    @property
    def in_slots(self) -> tuple[bool, ...]:
        """For each of the arena's pieces, whether it has parts of blocks in slots; empty if none has."""
        return tuple(layer_of(port) in self._in_slots for port in self._caches) if self._in_slots else ()

    @property
    def block_bytes_of(self) -> BlockBytes:
        """The bytes of the blocks of the cache that was allocated, without parts in slots."""
        return self._bytes_of(in_slots=False)

    @property
    def part_bytes_of(self) -> BlockBytes:
        """The bytes of the parts in slots."""
        return self._bytes_of(in_slots=True)

    def _bytes_of(self, *, in_slots: bool) -> BlockBytes:
        found = [
            (view.reshape(-1), shape)
            for port, view, shape in zip(self._caches, self._cache_views, self.block_shapes, strict=True)
            if (layer_of(port) in self._in_slots) is in_slots
        ]
        return BlockBytes([view for view, _ in found], [shape for _, shape in found])

    def allocate(
        self,
        num_blocks: int,
        num_slots: int = 0,
        *,
        huge_pages: bool = True,
        make_arena: Callable[[], KVArena] | None = None,
    ) -> KVArena:
        """Make the KV cache: `num_blocks` blocks of `block_bytes` bytes, `num_slots` slots of `part_bytes`, and one of
        each for padding, in the arena that `make_arena` gives, or in one of its own. Pages are touched as they come
        into use, in steps: by OpenVINO's threads, or by the caller's where blocks are copied. ConfigurationError if
        there is no memory for it."""
        num_blocks, num_slots = num_blocks + 1, num_slots + 1
        counts = [num_slots if layer_of(port) in self._in_slots else num_blocks for port in self._caches]
        size_bytes = sum(count * bytes_of(port) for count, port in zip(counts, self._caches, strict=True))
        try:
            if make_arena is None:
                arena = KVArena(size_bytes, len(self._caches), huge_pages=huge_pages)
            else:
                arena = make_arena()
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"no memory for a KV cache of {size_bytes / (1 << 30):.1f} GiB; ask for less with --kv-cache-gb"
            ) from error
        for count, port in zip(counts, self._caches, strict=True):
            piece = arena.take(count * bytes_of(port))
            tensor = ov.Tensor(piece, ov.Shape([count, *dims_of(port)]), port.element_type)
            for slot in (slot for graph in self._graphs.values() if graph.caches for slot in graph.slots):
                slot.request.set_tensor(port.any_name, tensor)
            self._cache_tensors.append(tensor)
            # They own the memory that the tensors refer to.
            self._cache_views.append(piece.reshape(count, -1))
            self._divided_views[layer_of(port) in self._in_slots].append(self._cache_views[-1])
        return arena

    def touch(self) -> None:
        """Touch the first page of each cache. The kernel clears new pages when they are touched, which takes
        milliseconds for huge pages. Existing content stays, because it may come from the previous process."""
        for cache in self._cache_views:
            cache[0, 0] = cache[0, 0]

    @property
    def hidden_width(self) -> int:
        """How many numbers the hidden states of a token have that come from another stage of a pipeline; 0 without
        any."""
        shapes = (graph.hidden_shape for graph in self._graphs.values())
        return next((math.prod(shape) for shape in shapes if shape is not None), 0)

    @property
    def hidden_dtype(self) -> StatesType:
        """The type of these numbers: float32, or uint16 for the bits of bfloat16."""
        kinds = (graph.hidden_type for graph in self._graphs.values())
        return np.dtype(np.uint16) if ov.Type.bf16 in kinds else np.dtype(np.float32)

    @property
    def gives_logits(self) -> bool:
        """Whether the latest bound step returns logits; False if it returns hidden states for another stage of a
        pipeline."""
        return self._graph.vocab_size > 0

    @property
    def ranks_of_stages(self) -> Sequence[int]:
        """The number of ranks among which each stage of a pipeline divides its layers. A model without stages has one
        entry."""
        return (self.num_ranks,)

    @property
    def has_whole_blocks(self) -> bool:
        """Whether the blocks of this process have the keys and values of all layers, so that they can be exchanged."""
        return self.num_stages == 1

    def ranks(self) -> Sequence[RankReport]:
        """The ranks of a divided model; none for a whole one."""
        return ()

    def stages(self) -> Sequence[StageReport]:
        """The stages of a pipeline, this process first; none for a model whose layers are all here."""
        return ()

    def end_warm_up(self) -> None:
        """Release memory that was needed only for loading and first steps, such as the pages of weight files. Called
        once, after the warm-up."""

    def most_blocks(self, _node_share: float, _kept_bytes: int = 0) -> int | None:
        """The maximum number of KV blocks, apart from the room of a single NUMA node; None for no limit."""
        return None

    def close(self) -> None:
        """End the other processes that compute parts of the model."""

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Set the inputs of the next step. With `keeps_logits`, the logits of the last step stay valid while it runs.
        This alternates two inference requests, and costs 2 % of a step of one sequence."""
        for copies, caches in zip((batch.copies, batch.part_copies), self._divided_views, strict=True):
            for source, destination in copies:
                for cache in caches:
                    cache[destination] = cache[source]
        for sources, destinations in batch.moves:
            for port, cache in zip(self._caches, self._cache_views, strict=True):
                cache[destinations] = cache[sources[layer_of(port)]]
        graph = self._graph = self._graph_for(batch)
        if keeps_logits:
            graph.slots.rotate()
        slot = self._slot = graph.slots[0]
        self._batch = batch
        for name in graph.step_inputs:
            if name != BLOCK_INDICES or not self._evicts:
                slot.inputs.set(name, getattr(batch, name))
        if self._evicts:
            slot.inputs.set(BLOCK_TABLES, tables_of(batch.block_indices, batch.block_tables, self._num_layers))
            slot.inputs.set(SCORE_WINDOWS, score_windows(batch.scored, len(batch.past_lens)))
        if batch.part_slots is not None:
            slot.inputs.set(WINDOW_BLOCK_INDICES, batch.part_slots[batch.block_indices])
        if batch.states is not None:
            for name, values in zip(STATE_INPUTS, batch.states, strict=True):
                slot.inputs.set(name, values)
        if batch.hidden is not None:
            assert graph.hidden_shape is not None, "the graph begins with tokens"
            hidden = batch.hidden.reshape(len(batch.hidden), *graph.hidden_shape)
            slot.inputs.set(HIDDEN_STATES, hidden, graph.hidden_type)
        if batch.adapter_slots is not None:
            self._bind_adapters(slot, batch.adapter_slots)
        if self.image_inputs is not None and (batch.images is not None or slot.has_images):
            for name, array in arrays_of(batch.images, self.image_inputs).items():
                slot.inputs.set(name, array)
            slot.has_images = batch.images is not None
        least = self.least_rows(batch)
        slot.head.bind(batch.sampled_tokens_indices, batch.inverse_temperatures, batch.sums, least=least)

    def least_rows(self, batch: Batch) -> int:
        """The smallest number of rows that are computed in a step that samples any."""
        return batch.least_rows or (self.least_decode if batch.is_decode else MIN_PROMPT_STEP)

    def _graph_for(self, batch: Batch) -> _Graph:
        if batch.hidden is None:
            return self._graphs[graph_of(batch, self.small_decode)]
        # They come back to the first stage from the last one, and to others from the one before.
        return self._graphs.get(Graph.HEAD, self._graphs[Graph.MAIN])

    def _make_adapters(
        self, core: ov.Core, model: ov.Model, asked: _Asked, max_adapters: int, *, is_bfloat16: bool
    ) -> None:
        parts = self._part.adapters
        groups = add_adapters(model, self.linears, is_bfloat16=is_bfloat16, part=parts[0])
        if not groups:
            raise ConfigurationError(
                "the linear layers of this model's graph have names that no adapter uses, so it can have no adapters; "
                "export the model again with optimum-intel, or serve it without adapters"
            )
        self._graphs[Graph.ADAPTERS] = _Graph(
            core, model, asked, is_bfloat16=is_bfloat16, states=self._states, part=self._part
        )
        self.adapters = AdapterMemory(groups, max_adapters, RANK_STEP, is_bfloat16=is_bfloat16, parts=parts)

    def _bind_adapters(self, slot: _Slot, adapter_slots: npt.NDArray[np.int32]) -> None:
        """Set the inputs of adapters. The inputs with weights change only if other slots are needed than before."""
        assert self.adapters is not None
        memory, num_slots = self.adapters, int(adapter_slots.max()) + 1
        if slot.adapters is not memory or not num_slots <= slot.num_adapters <= 2 * num_slots:
            for name, tensor in memory.tensors(num_slots).items():
                slot.request.set_tensor(name, tensor)
            slot.adapters, slot.num_adapters = memory, num_slots
        found = rows_of(adapter_slots, slot.num_adapters)
        slot.inputs.set(ROWS, found.rows)
        slot.inputs.set(PLACES, found.places)

    def run(self) -> Logits:
        """Compute the step. Returns logits `[rows, vocab_size]` for the rows of the batch, or in their place the hidden
        states `[tokens or rows, numbers]` for another stage of a pipeline. They are views that the next run overwrites,
        or the run after that if the next step keeps them. Releases the GIL."""
        head = self._slot.head
        start_s = time.perf_counter()
        head.run()
        self.infer_s = time.perf_counter() - start_s
        if self._states is not None and self._batch is not None:
            self._states.read(self._batch, self._slot.request)
        if self._batch is not None and self._batch.scored:
            batch, scores = self._batch, self._slot.request.get_tensor(SCORES).data
            add_scores(batch.scored, batch.past_lens, batch.subsequence_begins, scores)
        return head.logits()


class _Asked(NamedTuple):
    """The requested settings of the computation."""

    threads: int
    kv_precision: str
    execution_mode: str
    needs_float32: bool

    @property
    def properties(self) -> dict[str, object]:
        """Properties for the OpenVINO plugin."""
        return {
            **(_FLOAT32 if self.needs_float32 else {}),
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": self.threads,
            "EXECUTION_MODE_HINT": self.execution_mode.upper(),
            "KV_CACHE_PRECISION": KV_PRECISIONS[self.kv_precision],
            # By token, a token's cache entry does not depend on its neighbours: any chunking gives the same bits.
            "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        }


class _Graph:
    """A compiled model with a replaced end (`end`; the vocabulary's product by default) and two `slots`, which
    alternate. `part` describes the graph if it is a part of a divided model; `properties` add to the requested ones.
    `hidden_shape` and `hidden_type` are those of the hidden states of one token that are the graph's input; None if its
    input is tokens."""

    def __init__(
        self,
        core: ov.Core,
        model: ov.Model,
        asked: _Asked,
        *,
        is_bfloat16: bool,
        states: StateReader | None,
        part: Part = WHOLE,
        end: GraphEnd | None = None,
        properties: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        if end is None:
            end = VocabularyHead(asked.threads, run=part.run, same_sums=asked.execution_mode == "accuracy")
        end.replace(model, is_bfloat16=is_bfloat16)
        if states is not None:
            states.add_outputs(model)
        compiled = _compile(core, model, asked, properties)
        end.prepare(compiled)
        self.caches = [port for port in compiled.inputs if "_cache." in port.any_name]
        self.state_tables = StateTables(compiled) if has_states(model) else None
        self.vocab_size = end.vocab_size
        hidden = next((port for port in compiled.inputs if HIDDEN_STATES in port.get_names()), None)
        self.hidden_shape = None if hidden is None else lengths_of(hidden)[1:]
        self.hidden_type = None if hidden is None else hidden.element_type
        names = frozenset().union(*(port.get_names() for port in compiled.inputs))
        self.step_inputs = [name for name in STEP_INPUTS if name in names]
        self.slots = deque(_Slot(compiled.create_infer_request(), end) for _ in range(2))


class _Slot:
    """An inference request with its inputs and outputs. Each graph has two, so that the results of one step can be read
    while the next one runs."""

    def __init__(self, request: ov.InferRequest, end: GraphEnd) -> None:
        self.request = request
        self.inputs = InputTensors(request)
        self.head = end.open(request)
        # The memory of adapters that the request's inputs are in, and how many slots of it they have.
        self.adapters: AdapterMemory | None = None
        self.num_adapters = 0
        # Whether the inputs for images have to be emptied before a step without any.
        self.has_images = True


def lengths_of(port: ov.Output) -> list[int]:
    """The lengths of a port's axes, with 1 for those that vary."""
    return [1 if length.is_dynamic else length.get_length() for length in port.get_partial_shape()]


def _layout(caches: Sequence[ov.Output]) -> list[tuple[str, str, list[int]]]:
    return sorted((port.any_name, port.element_type.get_type_name(), dims_of(port)) for port in caches)


def _check_cache(asked: _Asked, precision: str) -> None:
    """Check that a cache without quantisation has the precision of the computation, as attention requires."""
    if asked.kv_precision in _UNQUANTISED and asked.kv_precision != precision:
        other_mode = "; f32 goes with --execution-mode accuracy" if asked.kv_precision == "f32" else ""
        raise ConfigurationError(
            f"--kv-precision {asked.kv_precision} is not possible: this CPU computes in {precision} with "
            f"--execution-mode {asked.execution_mode}; choose u8, u4 or {precision}{other_mode}"
        )


def _compile(core: ov.Core, model: ov.Model, asked: _Asked, more: Mapping[str, object]) -> ov.CompiledModel:
    properties = {**asked.properties, **more}
    try:
        compiled = core.compile_model(model, "CPU", properties)
        # OpenVINO chooses the attention kernels for the first request. An unsupported combination fails here.
        compiled.create_infer_request()
        return compiled
    except RuntimeError as error:
        raise ConfigurationError(
            f"OpenVINO cannot compile the model with --kv-precision {asked.kv_precision} and --execution-mode "
            f"{asked.execution_mode} on this CPU: {reason_of(error)}; choose others"
        ) from error
