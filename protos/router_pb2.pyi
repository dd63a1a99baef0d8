from headrace.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RedisState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REDIS_STATE_UNSPECIFIED: _ClassVar[RedisState]
    REDIS_STATE_OK: _ClassVar[RedisState]
    REDIS_STATE_UNWRITABLE: _ClassVar[RedisState]
    REDIS_STATE_UNREACHABLE: _ClassVar[RedisState]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_UNREACHABLE: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_SUSPECT: _ClassVar[WorkerState]
    WORKER_STATE_NOT_ANSWERING: _ClassVar[WorkerState]

class PlacementReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PLACEMENT_REASON_UNSPECIFIED: _ClassVar[PlacementReason]
    PLACEMENT_REASON_ONLY: _ClassVar[PlacementReason]
    PLACEMENT_REASON_PREFIX: _ClassVar[PlacementReason]
    PLACEMENT_REASON_LOAD: _ClassVar[PlacementReason]
    PLACEMENT_REASON_SESSION: _ClassVar[PlacementReason]
REDIS_STATE_UNSPECIFIED: RedisState
REDIS_STATE_OK: RedisState
REDIS_STATE_UNWRITABLE: RedisState
REDIS_STATE_UNREACHABLE: RedisState
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_UNREACHABLE: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_SUSPECT: WorkerState
WORKER_STATE_NOT_ANSWERING: WorkerState
PLACEMENT_REASON_UNSPECIFIED: PlacementReason
PLACEMENT_REASON_ONLY: PlacementReason
PLACEMENT_REASON_PREFIX: PlacementReason
PLACEMENT_REASON_LOAD: PlacementReason
PLACEMENT_REASON_SESSION: PlacementReason

class PickRequest(_message.Message):
    __slots__ = ("request", "hosts", "served_host")
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    SERVED_HOST_FIELD_NUMBER: _ClassVar[int]
    request: ExplainRequest
    hosts: _containers.RepeatedScalarFieldContainer[str]
    served_host: str
    def __init__(self, request: _Optional[_Union[ExplainRequest, _Mapping]] = ..., hosts: _Optional[_Iterable[str]] = ..., served_host: _Optional[str] = ...) -> None: ...

class PickResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[PickedWorker]
    def __init__(self, workers: _Optional[_Iterable[_Union[PickedWorker, _Mapping]]] = ...) -> None: ...

class PickedWorker(_message.Message):
    __slots__ = ("worker_id", "address", "num_cached_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    num_cached_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class ListScalingSignalsRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class ListScalingSignalsResponse(_message.Message):
    __slots__ = ("signals",)
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    signals: _containers.RepeatedCompositeFieldContainer[ScalingSignal]
    def __init__(self, signals: _Optional[_Iterable[_Union[ScalingSignal, _Mapping]]] = ...) -> None: ...

class ScalingSignal(_message.Message):
    __slots__ = ("model", "workers_ready", "workers_wanted", "queue_wait_ms", "backlog_seconds", "kv_pressure", "requests_waiting", "requests_at_workers", "requests_refused")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WORKERS_READY_FIELD_NUMBER: _ClassVar[int]
    WORKERS_WANTED_FIELD_NUMBER: _ClassVar[int]
    QUEUE_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_SECONDS_FIELD_NUMBER: _ClassVar[int]
    KV_PRESSURE_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_WAITING_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_AT_WORKERS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_REFUSED_FIELD_NUMBER: _ClassVar[int]
    model: str
    workers_ready: int
    workers_wanted: int
    queue_wait_ms: float
    backlog_seconds: float
    kv_pressure: float
    requests_waiting: int
    requests_at_workers: int
    requests_refused: int
    def __init__(self, model: _Optional[str] = ..., workers_ready: _Optional[int] = ..., workers_wanted: _Optional[int] = ..., queue_wait_ms: _Optional[float] = ..., backlog_seconds: _Optional[float] = ..., kv_pressure: _Optional[float] = ..., requests_waiting: _Optional[int] = ..., requests_at_workers: _Optional[int] = ..., requests_refused: _Optional[int] = ...) -> None: ...

class AwaitModelRequest(_message.Message):
    __slots__ = ("model", "keeps")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    model: str
    keeps: bool
    def __init__(self, model: _Optional[str] = ..., keeps: bool = ...) -> None: ...

class AwaitModelResponse(_message.Message):
    __slots__ = ("card",)
    CARD_FIELD_NUMBER: _ClassVar[int]
    card: _worker_pb2.ModelCard
    def __init__(self, card: _Optional[_Union[_worker_pb2.ModelCard, _Mapping]] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker", "undo")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    worker: str
    undo: bool
    def __init__(self, worker: _Optional[str] = ..., undo: bool = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ("worker_id", "num_running")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    num_running: int
    def __init__(self, worker_id: _Optional[str] = ..., num_running: _Optional[int] = ...) -> None: ...

class ServedAdapter(_message.Message):
    __slots__ = ("model", "adapter", "num_workers", "num_in_memory")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_MEMORY_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: _worker_pb2.Adapter
    num_workers: int
    num_in_memory: int
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[_Union[_worker_pb2.Adapter, _Mapping]] = ..., num_workers: _Optional[int] = ..., num_in_memory: _Optional[int] = ...) -> None: ...

class RouterLoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "in_place", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    IN_PLACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    in_place: bool
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., in_place: bool = ..., model: _Optional[str] = ...) -> None: ...

class RouterLoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: ServedAdapter
    def __init__(self, adapter: _Optional[_Union[ServedAdapter, _Mapping]] = ...) -> None: ...

class RouterUnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RouterUnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models", "redis", "adapters", "on_demand")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    REDIS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[_worker_pb2.ModelCard]
    redis: RedisState
    adapters: _containers.RepeatedCompositeFieldContainer[ServedAdapter]
    on_demand: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, models: _Optional[_Iterable[_Union[_worker_pb2.ModelCard, _Mapping]]] = ..., redis: _Optional[_Union[RedisState, str]] = ..., adapters: _Optional[_Iterable[_Union[ServedAdapter, _Mapping]]] = ..., on_demand: _Optional[_Iterable[str]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "address", "state", "model", "load", "report_age_ms", "num_in_flight", "detail", "num_indexed_blocks", "indexed_digest", "adapters", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    state: WorkerState
    model: str
    load: _worker_pb2.Load
    report_age_ms: int
    num_in_flight: int
    detail: str
    num_indexed_blocks: int
    indexed_digest: int
    adapters: _worker_pb2.AdapterList
    role: _worker_pb2.Role
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., model: _Optional[str] = ..., load: _Optional[_Union[_worker_pb2.Load, _Mapping]] = ..., report_age_ms: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., detail: _Optional[str] = ..., num_indexed_blocks: _Optional[int] = ..., indexed_digest: _Optional[int] = ..., adapters: _Optional[_Union[_worker_pb2.AdapterList, _Mapping]] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ...) -> None: ...

class RouterGetTokenizerRequest(_message.Message):
    __slots__ = ("sha256",)
    SHA256_FIELD_NUMBER: _ClassVar[int]
    sha256: str
    def __init__(self, sha256: _Optional[str] = ...) -> None: ...

class RouterGetTokenizerResponse(_message.Message):
    __slots__ = ("chunk",)
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    chunk: bytes
    def __init__(self, chunk: _Optional[bytes] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("worker_id", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_ms",)
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    def __init__(self, lease_ms: _Optional[int] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("worker_id", "address")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("model", "adapter", "token_ids", "cache_salt", "session_key", "max_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    adapter: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    session_key: str
    max_tokens: int
    def __init__(self, model: _Optional[str] = ..., adapter: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., session_key: _Optional[str] = ..., max_tokens: _Optional[int] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("workers", "worker_id", "reason", "num_prompt_tokens")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[ExplainedWorker]
    worker_id: str
    reason: PlacementReason
    num_prompt_tokens: int
    def __init__(self, workers: _Optional[_Iterable[_Union[ExplainedWorker, _Mapping]]] = ..., worker_id: _Optional[str] = ..., reason: _Optional[_Union[PlacementReason, str]] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

class ExplainedWorker(_message.Message):
    __slots__ = ("worker_id", "address", "state", "detail", "num_cached_tokens", "cost", "num_transferred_tokens", "num_disk_tokens", "role")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    state: WorkerState
    detail: str
    num_cached_tokens: int
    cost: CostTerms
    num_transferred_tokens: int
    num_disk_tokens: int
    role: _worker_pb2.Role
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., detail: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., cost: _Optional[_Union[CostTerms, _Mapping]] = ..., num_transferred_tokens: _Optional[int] = ..., num_disk_tokens: _Optional[int] = ..., role: _Optional[_Union[_worker_pb2.Role, str]] = ...) -> None: ...

class CostTerms(_message.Message):
    __slots__ = ("queue_ms", "backlog_ms", "prefill_ms", "decode_ms", "eviction_ms", "pressure_ms", "total_ms", "ttft_ms", "adapter_ms", "transfer_ms", "image_ms")
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    BACKLOG_MS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_MS_FIELD_NUMBER: _ClassVar[int]
    DECODE_MS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_MS_FIELD_NUMBER: _ClassVar[int]
    PRESSURE_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    TTFT_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_MS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_MS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_MS_FIELD_NUMBER: _ClassVar[int]
    queue_ms: float
    backlog_ms: float
    prefill_ms: float
    decode_ms: float
    eviction_ms: float
    pressure_ms: float
    total_ms: float
    ttft_ms: float
    adapter_ms: float
    transfer_ms: float
    image_ms: float
    def __init__(self, queue_ms: _Optional[float] = ..., backlog_ms: _Optional[float] = ..., prefill_ms: _Optional[float] = ..., decode_ms: _Optional[float] = ..., eviction_ms: _Optional[float] = ..., pressure_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., ttft_ms: _Optional[float] = ..., adapter_ms: _Optional[float] = ..., transfer_ms: _Optional[float] = ..., image_ms: _Optional[float] = ...) -> None: ...
