from headrace.protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HandoverEnd(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HANDOVER_END_UNSPECIFIED: _ClassVar[HandoverEnd]
    HANDOVER_END_DONE: _ClassVar[HandoverEnd]
    HANDOVER_END_NO_TAKERS: _ClassVar[HandoverEnd]

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_PREFILL: _ClassVar[Role]
    ROLE_DECODE: _ClassVar[Role]
HANDOVER_END_UNSPECIFIED: HandoverEnd
HANDOVER_END_DONE: HandoverEnd
HANDOVER_END_NO_TAKERS: HandoverEnd
ROLE_UNSPECIFIED: Role
ROLE_PREFILL: Role
ROLE_DECODE: Role

class HandOverRequest(_message.Message):
    __slots__ = ("end",)
    END_FIELD_NUMBER: _ClassVar[int]
    end: HandoverEnd
    def __init__(self, end: _Optional[_Union[HandoverEnd, str]] = ...) -> None: ...

class HandOverResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[ChainedBlock]
    def __init__(self, blocks: _Optional[_Iterable[_Union[ChainedBlock, _Mapping]]] = ...) -> None: ...

class ChainedBlock(_message.Message):
    __slots__ = ("hash", "parent_hash", "is_first", "has_part")
    HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    IS_FIRST_FIELD_NUMBER: _ClassVar[int]
    HAS_PART_FIELD_NUMBER: _ClassVar[int]
    hash: int
    parent_hash: int
    is_first: bool
    has_part: bool
    def __init__(self, hash: _Optional[int] = ..., parent_hash: _Optional[int] = ..., is_first: bool = ..., has_part: bool = ...) -> None: ...

class TakeBlocksRequest(_message.Message):
    __slots__ = ("kv_layout", "source", "blocks")
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kv_layout: str
    source: str
    blocks: _containers.RepeatedCompositeFieldContainer[ChainedBlock]
    def __init__(self, kv_layout: _Optional[str] = ..., source: _Optional[str] = ..., blocks: _Optional[_Iterable[_Union[ChainedBlock, _Mapping]]] = ...) -> None: ...

class TakeBlocksResponse(_message.Message):
    __slots__ = ("num_blocks", "num_present")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_PRESENT_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    num_present: int
    def __init__(self, num_blocks: _Optional[int] = ..., num_present: _Optional[int] = ...) -> None: ...

class FetchBlocksRequest(_message.Message):
    __slots__ = ("kv_layout", "hashes", "host_id", "with_parts")
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    WITH_PARTS_FIELD_NUMBER: _ClassVar[int]
    kv_layout: str
    hashes: _containers.RepeatedScalarFieldContainer[int]
    host_id: str
    with_parts: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, kv_layout: _Optional[str] = ..., hashes: _Optional[_Iterable[int]] = ..., host_id: _Optional[str] = ..., with_parts: _Optional[_Iterable[bool]] = ...) -> None: ...

class FetchBlocksResponse(_message.Message):
    __slots__ = ("checksums", "blocks", "memory", "numbers", "token_bytes", "parts", "part_checksums")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_BYTES_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    PART_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[int]
    blocks: _containers.RepeatedScalarFieldContainer[bytes]
    memory: SharedMemory
    numbers: _containers.RepeatedScalarFieldContainer[int]
    token_bytes: _containers.RepeatedScalarFieldContainer[bytes]
    parts: _containers.RepeatedScalarFieldContainer[bytes]
    part_checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, checksums: _Optional[_Iterable[int]] = ..., blocks: _Optional[_Iterable[bytes]] = ..., memory: _Optional[_Union[SharedMemory, _Mapping]] = ..., numbers: _Optional[_Iterable[int]] = ..., token_bytes: _Optional[_Iterable[bytes]] = ..., parts: _Optional[_Iterable[bytes]] = ..., part_checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("pid", "file_descriptor", "device", "inode", "offset", "num_blocks")
    PID_FIELD_NUMBER: _ClassVar[int]
    FILE_DESCRIPTOR_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INODE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    pid: int
    file_descriptor: int
    device: int
    inode: int
    offset: int
    num_blocks: int
    def __init__(self, pid: _Optional[int] = ..., file_descriptor: _Optional[int] = ..., device: _Optional[int] = ..., inode: _Optional[int] = ..., offset: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class GetModelCardRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelCardResponse(_message.Message):
    __slots__ = ("card", "worker_id", "epoch", "adapters")
    CARD_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    card: ModelCard
    worker_id: str
    epoch: int
    adapters: AdapterList
    def __init__(self, card: _Optional[_Union[ModelCard, _Mapping]] = ..., worker_id: _Optional[str] = ..., epoch: _Optional[int] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ...) -> None: ...

class AdapterList(_message.Message):
    __slots__ = ("adapters", "max_in_memory")
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    max_in_memory: int
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., max_in_memory: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "sha256", "path", "rank", "num_bytes", "is_in_memory", "created_s")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHA256_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    name: str
    sha256: str
    path: str
    rank: int
    num_bytes: int
    is_in_memory: bool
    created_s: int
    def __init__(self, name: _Optional[str] = ..., sha256: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., num_bytes: _Optional[int] = ..., is_in_memory: bool = ..., created_s: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "in_place")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    in_place: bool
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., in_place: bool = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelCard(_message.Message):
    __slots__ = ("name", "fingerprint", "tokenizer_sha256", "max_context_tokens", "vocab_size", "block_size", "eos_token_ids", "default_sampling", "created_s", "kv_precision", "parent", "task", "dimensions", "pair_separator_token_ids", "kv_layout", "kv_block_bytes", "state_interval_tokens", "max_evicting_context_tokens", "cache_eviction", "role", "pair_prefix_token_ids", "pair_suffix_token_ids", "images", "window_tokens", "kv_part_bytes", "pair_query_before", "pair_query_after", "pair_document_before")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    CREATED_S_FIELD_NUMBER: _ClassVar[int]
    KV_PRECISION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    PAIR_SEPARATOR_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_INTERVAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_EVICTING_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVICTION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    PAIR_PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PAIR_SUFFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_PART_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAIR_QUERY_BEFORE_FIELD_NUMBER: _ClassVar[int]
    PAIR_QUERY_AFTER_FIELD_NUMBER: _ClassVar[int]
    PAIR_DOCUMENT_BEFORE_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    tokenizer_sha256: str
    max_context_tokens: int
    vocab_size: int
    block_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: _inference_pb2.SamplingParams
    created_s: int
    kv_precision: str
    parent: str
    task: _inference_pb2.Task
    dimensions: int
    pair_separator_token_ids: _containers.RepeatedScalarFieldContainer[int]
    kv_layout: str
    kv_block_bytes: int
    state_interval_tokens: int
    max_evicting_context_tokens: int
    cache_eviction: _inference_pb2.CacheEviction
    role: Role
    pair_prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    pair_suffix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    images: ImageLimits
    window_tokens: int
    kv_part_bytes: int
    pair_query_before: str
    pair_query_after: str
    pair_document_before: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ..., tokenizer_sha256: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[_inference_pb2.SamplingParams, _Mapping]] = ..., created_s: _Optional[int] = ..., kv_precision: _Optional[str] = ..., parent: _Optional[str] = ..., task: _Optional[_Union[_inference_pb2.Task, str]] = ..., dimensions: _Optional[int] = ..., pair_separator_token_ids: _Optional[_Iterable[int]] = ..., kv_layout: _Optional[str] = ..., kv_block_bytes: _Optional[int] = ..., state_interval_tokens: _Optional[int] = ..., max_evicting_context_tokens: _Optional[int] = ..., cache_eviction: _Optional[_Union[_inference_pb2.CacheEviction, _Mapping]] = ..., role: _Optional[_Union[Role, str]] = ..., pair_prefix_token_ids: _Optional[_Iterable[int]] = ..., pair_suffix_token_ids: _Optional[_Iterable[int]] = ..., images: _Optional[_Union[ImageLimits, _Mapping]] = ..., window_tokens: _Optional[int] = ..., kv_part_bytes: _Optional[int] = ..., pair_query_before: _Optional[str] = ..., pair_query_after: _Optional[str] = ..., pair_document_before: _Optional[str] = ...) -> None: ...

class ImageLimits(_message.Message):
    __slots__ = ("max_images", "max_pixels", "max_bytes", "max_view_pixels")
    MAX_IMAGES_FIELD_NUMBER: _ClassVar[int]
    MAX_PIXELS_FIELD_NUMBER: _ClassVar[int]
    MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    MAX_VIEW_PIXELS_FIELD_NUMBER: _ClassVar[int]
    max_images: int
    max_pixels: int
    max_bytes: int
    max_view_pixels: int
    def __init__(self, max_images: _Optional[int] = ..., max_pixels: _Optional[int] = ..., max_bytes: _Optional[int] = ..., max_view_pixels: _Optional[int] = ...) -> None: ...

class GetTokenizerRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class GetTokenizerResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("heartbeat_ms", "min_interval_ms", "watcher_id")
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    WATCHER_ID_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ms: int
    min_interval_ms: int
    watcher_id: int
    def __init__(self, heartbeat_ms: _Optional[int] = ..., min_interval_ms: _Optional[int] = ..., watcher_id: _Optional[int] = ...) -> None: ...

class AdjustWatchRequest(_message.Message):
    __slots__ = ("watcher_id", "min_interval_ms")
    WATCHER_ID_FIELD_NUMBER: _ClassVar[int]
    MIN_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    watcher_id: int
    min_interval_ms: int
    def __init__(self, watcher_id: _Optional[int] = ..., min_interval_ms: _Optional[int] = ...) -> None: ...

class AdjustWatchResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("epoch", "sequence", "kv_events", "load", "num_watchers", "placement_ids", "adapters", "adapters_in_memory", "adapter_changes", "disk_events", "state_events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    KV_EVENTS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    NUM_WATCHERS_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_CHANGES_FIELD_NUMBER: _ClassVar[int]
    DISK_EVENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    sequence: int
    kv_events: KvEvents
    load: Load
    num_watchers: int
    placement_ids: _containers.RepeatedScalarFieldContainer[int]
    adapters: AdapterList
    adapters_in_memory: AdapterNames
    adapter_changes: AdapterChanges
    disk_events: KvEvents
    state_events: KvEvents
    def __init__(self, epoch: _Optional[int] = ..., sequence: _Optional[int] = ..., kv_events: _Optional[_Union[KvEvents, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., num_watchers: _Optional[int] = ..., placement_ids: _Optional[_Iterable[int]] = ..., adapters: _Optional[_Union[AdapterList, _Mapping]] = ..., adapters_in_memory: _Optional[_Union[AdapterNames, _Mapping]] = ..., adapter_changes: _Optional[_Union[AdapterChanges, _Mapping]] = ..., disk_events: _Optional[_Union[KvEvents, _Mapping]] = ..., state_events: _Optional[_Union[KvEvents, _Mapping]] = ...) -> None: ...

class AdapterChanges(_message.Message):
    __slots__ = ("known", "unloaded")
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    UNLOADED_FIELD_NUMBER: _ClassVar[int]
    known: _containers.RepeatedCompositeFieldContainer[Adapter]
    unloaded: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, known: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ..., unloaded: _Optional[_Iterable[str]] = ...) -> None: ...

class AdapterNames(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class GivenBack(_message.Message):
    __slots__ = ("epoch", "load", "placement_ids")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_IDS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    load: Load
    placement_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, epoch: _Optional[int] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., placement_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("reset", "stored", "evicted")
    RESET_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    reset: bool
    stored: _containers.RepeatedScalarFieldContainer[int]
    evicted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reset: bool = ..., stored: _Optional[_Iterable[int]] = ..., evicted: _Optional[_Iterable[int]] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("num_running", "num_waiting", "num_uncached_tokens", "num_blocks", "num_free_blocks", "num_cached_blocks", "prefill_tokens_per_s", "decode_step_ms", "max_num_seqs", "draining", "numa_node", "counters", "binding", "num_arrived", "arrived_tokens", "arrived_blocks", "age_ms", "version", "num_disk_slots", "num_disk_blocks", "transfer_bytes_per_s", "disk_bytes_per_s", "num_state_slots", "num_saved_states", "num_partial_blocks", "num_window_slots", "num_held_window_slots", "num_fetching", "num_encoding", "encoding_tokens", "image_tokens_per_s", "num_cached_images", "image_cache_bytes", "prompt_steps", "decode_steps", "num_running_background", "num_waiting_background", "ranks", "stages")
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_MS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    BINDING_FIELD_NUMBER: _ClassVar[int]
    NUM_ARRIVED_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ARRIVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_STATE_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAVED_STATES_FIELD_NUMBER: _ClassVar[int]
    NUM_PARTIAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_WINDOW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_WINDOW_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_FETCHING_FIELD_NUMBER: _ClassVar[int]
    NUM_ENCODING_FIELD_NUMBER: _ClassVar[int]
    ENCODING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_IMAGES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_CACHE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STEPS_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_BACKGROUND_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    num_waiting: int
    num_uncached_tokens: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    prefill_tokens_per_s: float
    decode_step_ms: float
    max_num_seqs: int
    draining: bool
    numa_node: int
    counters: Counters
    binding: Binding
    num_arrived: int
    arrived_tokens: int
    arrived_blocks: int
    age_ms: int
    version: int
    num_disk_slots: int
    num_disk_blocks: int
    transfer_bytes_per_s: float
    disk_bytes_per_s: float
    num_state_slots: int
    num_saved_states: int
    num_partial_blocks: int
    num_window_slots: int
    num_held_window_slots: int
    num_fetching: int
    num_encoding: int
    encoding_tokens: int
    image_tokens_per_s: float
    num_cached_images: int
    image_cache_bytes: int
    prompt_steps: StepCost
    decode_steps: StepCost
    num_running_background: int
    num_waiting_background: int
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    stages: _containers.RepeatedCompositeFieldContainer[PipelineStage]
    def __init__(self, num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_uncached_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., num_free_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., prefill_tokens_per_s: _Optional[float] = ..., decode_step_ms: _Optional[float] = ..., max_num_seqs: _Optional[int] = ..., draining: bool = ..., numa_node: _Optional[int] = ..., counters: _Optional[_Union[Counters, _Mapping]] = ..., binding: _Optional[_Union[Binding, _Mapping]] = ..., num_arrived: _Optional[int] = ..., arrived_tokens: _Optional[int] = ..., arrived_blocks: _Optional[int] = ..., age_ms: _Optional[int] = ..., version: _Optional[int] = ..., num_disk_slots: _Optional[int] = ..., num_disk_blocks: _Optional[int] = ..., transfer_bytes_per_s: _Optional[float] = ..., disk_bytes_per_s: _Optional[float] = ..., num_state_slots: _Optional[int] = ..., num_saved_states: _Optional[int] = ..., num_partial_blocks: _Optional[int] = ..., num_window_slots: _Optional[int] = ..., num_held_window_slots: _Optional[int] = ..., num_fetching: _Optional[int] = ..., num_encoding: _Optional[int] = ..., encoding_tokens: _Optional[int] = ..., image_tokens_per_s: _Optional[float] = ..., num_cached_images: _Optional[int] = ..., image_cache_bytes: _Optional[int] = ..., prompt_steps: _Optional[_Union[StepCost, _Mapping]] = ..., decode_steps: _Optional[_Union[StepCost, _Mapping]] = ..., num_running_background: _Optional[int] = ..., num_waiting_background: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[PipelineStage, _Mapping]]] = ...) -> None: ...

class PipelineStage(_message.Message):
    __slots__ = ("address", "first_layer", "num_layers", "compute_seconds", "wait_seconds", "ranks")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    address: str
    first_layer: int
    num_layers: int
    compute_seconds: float
    wait_seconds: float
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    def __init__(self, address: _Optional[str] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., compute_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("numa_node", "cpus", "step_seconds", "wait_seconds")
    NUMA_NODE_FIELD_NUMBER: _ClassVar[int]
    CPUS_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    WAIT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    numa_node: int
    cpus: str
    step_seconds: float
    wait_seconds: float
    def __init__(self, numa_node: _Optional[int] = ..., cpus: _Optional[str] = ..., step_seconds: _Optional[float] = ..., wait_seconds: _Optional[float] = ...) -> None: ...

class StepCost(_message.Message):
    __slots__ = ("step_ms", "token_ms", "attended_ms", "read_ms", "sequence_ms", "change_ms", "num_steps")
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MS_FIELD_NUMBER: _ClassVar[int]
    ATTENDED_MS_FIELD_NUMBER: _ClassVar[int]
    READ_MS_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_MS_FIELD_NUMBER: _ClassVar[int]
    CHANGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    step_ms: float
    token_ms: float
    attended_ms: float
    read_ms: float
    sequence_ms: float
    change_ms: float
    num_steps: int
    def __init__(self, step_ms: _Optional[float] = ..., token_ms: _Optional[float] = ..., attended_ms: _Optional[float] = ..., read_ms: _Optional[float] = ..., sequence_ms: _Optional[float] = ..., change_ms: _Optional[float] = ..., num_steps: _Optional[int] = ...) -> None: ...

class Binding(_message.Message):
    __slots__ = ("cpus_allowed", "memory_policy", "memory", "kv_huge_bytes")
    CPUS_ALLOWED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_POLICY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    KV_HUGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    cpus_allowed: str
    memory_policy: str
    memory: _containers.RepeatedCompositeFieldContainer[NodeMemory]
    kv_huge_bytes: int
    def __init__(self, cpus_allowed: _Optional[str] = ..., memory_policy: _Optional[str] = ..., memory: _Optional[_Iterable[_Union[NodeMemory, _Mapping]]] = ..., kv_huge_bytes: _Optional[int] = ...) -> None: ...

class NodeMemory(_message.Message):
    __slots__ = ("node", "resident_bytes", "kv_bytes", "anonymous_bytes")
    NODE_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    ANONYMOUS_BYTES_FIELD_NUMBER: _ClassVar[int]
    node: int
    resident_bytes: int
    kv_bytes: int
    anonymous_bytes: int
    def __init__(self, node: _Optional[int] = ..., resident_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., anonymous_bytes: _Optional[int] = ...) -> None: ...

class Counters(_message.Message):
    __slots__ = ("requests_admitted", "requests_finished", "requests_cancelled", "requests_failed", "prompt_tokens_computed", "prompt_tokens_cached", "tokens_generated", "steps", "infer_us", "overhead_us", "preemptions", "blocks_evicted", "padding_tokens", "blocks_restored", "ngram_tokens_drafted", "ngram_tokens_accepted", "prediction_tokens_drafted", "prediction_tokens_accepted", "grammar_tokens_drafted", "grammar_tokens_accepted", "blocks_written", "blocks_read", "adapter_loads", "adapter_evictions", "draft_tokens_drafted", "draft_tokens_accepted", "prompt_tokens_from_disk", "prompt_tokens_from_peers", "blocks_received", "blocks_sent", "blocks_taken_over", "eagle3_tokens_drafted", "eagle3_tokens_accepted", "medusa_tokens_drafted", "medusa_tokens_accepted", "blocks_given_up", "blocks_not_written", "images_encoded", "images_failed", "image_cache_hits", "image_cache_misses", "image_cache_evictions", "image_encoder_restarts", "image_encode_us", "mtp_tokens_drafted", "mtp_tokens_accepted")
    REQUESTS_ADMITTED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FINISHED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_CANCELLED_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FAILED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_COMPUTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_CACHED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_GENERATED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    INFER_US_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_US_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PADDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RESTORED_FIELD_NUMBER: _ClassVar[int]
    NGRAM_TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NGRAM_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_READ_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_LOADS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FROM_DISK_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FROM_PEERS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_RECEIVED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_SENT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TAKEN_OVER_FIELD_NUMBER: _ClassVar[int]
    EAGLE3_TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    EAGLE3_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MEDUSA_TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    MEDUSA_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_GIVEN_UP_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_NOT_WRITTEN_FIELD_NUMBER: _ClassVar[int]
    IMAGES_ENCODED_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FAILED_FIELD_NUMBER: _ClassVar[int]
    IMAGE_CACHE_HITS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_CACHE_MISSES_FIELD_NUMBER: _ClassVar[int]
    IMAGE_CACHE_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ENCODER_RESTARTS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_ENCODE_US_FIELD_NUMBER: _ClassVar[int]
    MTP_TOKENS_DRAFTED_FIELD_NUMBER: _ClassVar[int]
    MTP_TOKENS_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    requests_admitted: int
    requests_finished: int
    requests_cancelled: int
    requests_failed: int
    prompt_tokens_computed: int
    prompt_tokens_cached: int
    tokens_generated: int
    steps: int
    infer_us: int
    overhead_us: int
    preemptions: int
    blocks_evicted: int
    padding_tokens: int
    blocks_restored: int
    ngram_tokens_drafted: int
    ngram_tokens_accepted: int
    prediction_tokens_drafted: int
    prediction_tokens_accepted: int
    grammar_tokens_drafted: int
    grammar_tokens_accepted: int
    blocks_written: int
    blocks_read: int
    adapter_loads: int
    adapter_evictions: int
    draft_tokens_drafted: int
    draft_tokens_accepted: int
    prompt_tokens_from_disk: int
    prompt_tokens_from_peers: int
    blocks_received: int
    blocks_sent: int
    blocks_taken_over: int
    eagle3_tokens_drafted: int
    eagle3_tokens_accepted: int
    medusa_tokens_drafted: int
    medusa_tokens_accepted: int
    blocks_given_up: int
    blocks_not_written: int
    images_encoded: int
    images_failed: int
    image_cache_hits: int
    image_cache_misses: int
    image_cache_evictions: int
    image_encoder_restarts: int
    image_encode_us: int
    mtp_tokens_drafted: int
    mtp_tokens_accepted: int
    def __init__(self, requests_admitted: _Optional[int] = ..., requests_finished: _Optional[int] = ..., requests_cancelled: _Optional[int] = ..., requests_failed: _Optional[int] = ..., prompt_tokens_computed: _Optional[int] = ..., prompt_tokens_cached: _Optional[int] = ..., tokens_generated: _Optional[int] = ..., steps: _Optional[int] = ..., infer_us: _Optional[int] = ..., overhead_us: _Optional[int] = ..., preemptions: _Optional[int] = ..., blocks_evicted: _Optional[int] = ..., padding_tokens: _Optional[int] = ..., blocks_restored: _Optional[int] = ..., ngram_tokens_drafted: _Optional[int] = ..., ngram_tokens_accepted: _Optional[int] = ..., prediction_tokens_drafted: _Optional[int] = ..., prediction_tokens_accepted: _Optional[int] = ..., grammar_tokens_drafted: _Optional[int] = ..., grammar_tokens_accepted: _Optional[int] = ..., blocks_written: _Optional[int] = ..., blocks_read: _Optional[int] = ..., adapter_loads: _Optional[int] = ..., adapter_evictions: _Optional[int] = ..., draft_tokens_drafted: _Optional[int] = ..., draft_tokens_accepted: _Optional[int] = ..., prompt_tokens_from_disk: _Optional[int] = ..., prompt_tokens_from_peers: _Optional[int] = ..., blocks_received: _Optional[int] = ..., blocks_sent: _Optional[int] = ..., blocks_taken_over: _Optional[int] = ..., eagle3_tokens_drafted: _Optional[int] = ..., eagle3_tokens_accepted: _Optional[int] = ..., medusa_tokens_drafted: _Optional[int] = ..., medusa_tokens_accepted: _Optional[int] = ..., blocks_given_up: _Optional[int] = ..., blocks_not_written: _Optional[int] = ..., images_encoded: _Optional[int] = ..., images_failed: _Optional[int] = ..., image_cache_hits: _Optional[int] = ..., image_cache_misses: _Optional[int] = ..., image_cache_evictions: _Optional[int] = ..., image_encoder_restarts: _Optional[int] = ..., image_encode_us: _Optional[int] = ..., mtp_tokens_drafted: _Optional[int] = ..., mtp_tokens_accepted: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("undo",)
    UNDO_FIELD_NUMBER: _ClassVar[int]
    undo: bool
    def __init__(self, undo: bool = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("num_running",)
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    num_running: int
    def __init__(self, num_running: _Optional[int] = ...) -> None: ...
