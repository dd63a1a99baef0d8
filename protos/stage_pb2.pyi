from headrace.protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StageState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STAGE_STATE_UNSPECIFIED: _ClassVar[StageState]
    STAGE_STATE_WAITING: _ClassVar[StageState]
    STAGE_STATE_LOADING: _ClassVar[StageState]
    STAGE_STATE_READY: _ClassVar[StageState]
STAGE_STATE_UNSPECIFIED: StageState
STAGE_STATE_WAITING: StageState
STAGE_STATE_LOADING: StageState
STAGE_STATE_READY: StageState

class JoinRequest(_message.Message):
    __slots__ = ("name", "address", "model", "outline")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    OUTLINE_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    model: str
    outline: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., model: _Optional[str] = ..., outline: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("worker", "num_stages", "joined")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    NUM_STAGES_FIELD_NUMBER: _ClassVar[int]
    JOINED_FIELD_NUMBER: _ClassVar[int]
    worker: str
    num_stages: int
    joined: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, worker: _Optional[str] = ..., num_stages: _Optional[int] = ..., joined: _Optional[_Iterable[str]] = ...) -> None: ...

class ComputeRequest(_message.Message):
    __slots__ = ("setup", "layers", "allocate", "step", "states", "end_warm_up")
    SETUP_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    ALLOCATE_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    END_WARM_UP_FIELD_NUMBER: _ClassVar[int]
    setup: StageSetup
    layers: StageLayers
    allocate: StageAllocate
    step: StageStep
    states: bytes
    end_warm_up: StageEndWarmUp
    def __init__(self, setup: _Optional[_Union[StageSetup, _Mapping]] = ..., layers: _Optional[_Union[StageLayers, _Mapping]] = ..., allocate: _Optional[_Union[StageAllocate, _Mapping]] = ..., step: _Optional[_Union[StageStep, _Mapping]] = ..., states: _Optional[bytes] = ..., end_warm_up: _Optional[_Union[StageEndWarmUp, _Mapping]] = ...) -> None: ...

class ComputeResponse(_message.Message):
    __slots__ = ("offer", "compiled", "allocated", "result", "progress")
    OFFER_FIELD_NUMBER: _ClassVar[int]
    COMPILED_FIELD_NUMBER: _ClassVar[int]
    ALLOCATED_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    offer: StageOffer
    compiled: StageCompiled
    allocated: StageAllocated
    result: StageResult
    progress: StageProgress
    def __init__(self, offer: _Optional[_Union[StageOffer, _Mapping]] = ..., compiled: _Optional[_Union[StageCompiled, _Mapping]] = ..., allocated: _Optional[_Union[StageAllocated, _Mapping]] = ..., result: _Optional[_Union[StageResult, _Mapping]] = ..., progress: _Optional[_Union[StageProgress, _Mapping]] = ...) -> None: ...

class StageSetup(_message.Message):
    __slots__ = ("later_stages", "kv_precision", "execution_mode", "max_context_tokens", "speculates", "worker", "hangs_after_seconds")
    LATER_STAGES_FIELD_NUMBER: _ClassVar[int]
    KV_PRECISION_FIELD_NUMBER: _ClassVar[int]
    EXECUTION_MODE_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SPECULATES_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    HANGS_AFTER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    later_stages: _containers.RepeatedScalarFieldContainer[str]
    kv_precision: str
    execution_mode: str
    max_context_tokens: int
    speculates: bool
    worker: str
    hangs_after_seconds: float
    def __init__(self, later_stages: _Optional[_Iterable[str]] = ..., kv_precision: _Optional[str] = ..., execution_mode: _Optional[str] = ..., max_context_tokens: _Optional[int] = ..., speculates: bool = ..., worker: _Optional[str] = ..., hangs_after_seconds: _Optional[float] = ...) -> None: ...

class StageProgress(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StageOffer(_message.Message):
    __slots__ = ("stages",)
    STAGES_FIELD_NUMBER: _ClassVar[int]
    stages: _containers.RepeatedCompositeFieldContainer[StageHost]
    def __init__(self, stages: _Optional[_Iterable[_Union[StageHost, _Mapping]]] = ...) -> None: ...

class StageHost(_message.Message):
    __slots__ = ("address", "threads", "speed", "num_ranks", "bfloat16")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    THREADS_FIELD_NUMBER: _ClassVar[int]
    SPEED_FIELD_NUMBER: _ClassVar[int]
    NUM_RANKS_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_FIELD_NUMBER: _ClassVar[int]
    address: str
    threads: int
    speed: float
    num_ranks: int
    bfloat16: bool
    def __init__(self, address: _Optional[str] = ..., threads: _Optional[int] = ..., speed: _Optional[float] = ..., num_ranks: _Optional[int] = ..., bfloat16: bool = ...) -> None: ...

class StageLayers(_message.Message):
    __slots__ = ("first_layers", "bfloat16_states")
    FIRST_LAYERS_FIELD_NUMBER: _ClassVar[int]
    BFLOAT16_STATES_FIELD_NUMBER: _ClassVar[int]
    first_layers: _containers.RepeatedScalarFieldContainer[int]
    bfloat16_states: bool
    def __init__(self, first_layers: _Optional[_Iterable[int]] = ..., bfloat16_states: bool = ...) -> None: ...

class StageCompiled(_message.Message):
    __slots__ = ("problem", "exact_rows", "most_blocks", "block_size", "numerics")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    EXACT_ROWS_FIELD_NUMBER: _ClassVar[int]
    MOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_FIELD_NUMBER: _ClassVar[int]
    problem: str
    exact_rows: int
    most_blocks: int
    block_size: int
    numerics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, problem: _Optional[str] = ..., exact_rows: _Optional[int] = ..., most_blocks: _Optional[int] = ..., block_size: _Optional[int] = ..., numerics: _Optional[_Iterable[str]] = ...) -> None: ...

class StageAllocate(_message.Message):
    __slots__ = ("num_blocks",)
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    def __init__(self, num_blocks: _Optional[int] = ...) -> None: ...

class StageAllocated(_message.Message):
    __slots__ = ("problem", "fingerprints")
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINTS_FIELD_NUMBER: _ClassVar[int]
    problem: str
    fingerprints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, problem: _Optional[str] = ..., fingerprints: _Optional[_Iterable[str]] = ...) -> None: ...

class StageStep(_message.Message):
    __slots__ = ("input_ids", "position_ids", "past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len", "rows", "copies", "least_rows")
    INPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    POSITION_IDS_FIELD_NUMBER: _ClassVar[int]
    PAST_LENS_FIELD_NUMBER: _ClassVar[int]
    SUBSEQUENCE_BEGINS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDICES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_INDICES_BEGINS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COPIES_FIELD_NUMBER: _ClassVar[int]
    LEAST_ROWS_FIELD_NUMBER: _ClassVar[int]
    input_ids: bytes
    position_ids: bytes
    past_lens: bytes
    subsequence_begins: bytes
    block_indices: bytes
    block_indices_begins: bytes
    max_context_len: int
    rows: bytes
    copies: bytes
    least_rows: int
    def __init__(self, input_ids: _Optional[bytes] = ..., position_ids: _Optional[bytes] = ..., past_lens: _Optional[bytes] = ..., subsequence_begins: _Optional[bytes] = ..., block_indices: _Optional[bytes] = ..., block_indices_begins: _Optional[bytes] = ..., max_context_len: _Optional[int] = ..., rows: _Optional[bytes] = ..., copies: _Optional[bytes] = ..., least_rows: _Optional[int] = ...) -> None: ...

class StageResult(_message.Message):
    __slots__ = ("states", "is_last", "busy_s", "stages")
    STATES_FIELD_NUMBER: _ClassVar[int]
    IS_LAST_FIELD_NUMBER: _ClassVar[int]
    BUSY_S_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    states: bytes
    is_last: bool
    busy_s: _containers.RepeatedScalarFieldContainer[float]
    stages: _containers.RepeatedCompositeFieldContainer[StageRanks]
    def __init__(self, states: _Optional[bytes] = ..., is_last: bool = ..., busy_s: _Optional[_Iterable[float]] = ..., stages: _Optional[_Iterable[_Union[StageRanks, _Mapping]]] = ...) -> None: ...

class StageRanks(_message.Message):
    __slots__ = ("ranks",)
    RANKS_FIELD_NUMBER: _ClassVar[int]
    ranks: _containers.RepeatedCompositeFieldContainer[_worker_pb2.Rank]
    def __init__(self, ranks: _Optional[_Iterable[_Union[_worker_pb2.Rank, _Mapping]]] = ...) -> None: ...

class StageEndWarmUp(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStageStateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStageStateResponse(_message.Message):
    __slots__ = ("state", "worker", "first_layer", "num_layers", "compute_seconds")
    STATE_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    state: StageState
    worker: str
    first_layer: int
    num_layers: int
    compute_seconds: float
    def __init__(self, state: _Optional[_Union[StageState, str]] = ..., worker: _Optional[str] = ..., first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., compute_seconds: _Optional[float] = ...) -> None: ...
