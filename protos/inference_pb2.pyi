from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ImageDetail(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    IMAGE_DETAIL_UNSPECIFIED: _ClassVar[ImageDetail]
    IMAGE_DETAIL_LOW: _ClassVar[ImageDetail]
    IMAGE_DETAIL_HIGH: _ClassVar[ImageDetail]

class Task(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TASK_UNSPECIFIED: _ClassVar[Task]
    TASK_EMBED: _ClassVar[Task]
    TASK_RANK: _ClassVar[Task]

class EarlyStopping(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EARLY_STOPPING_UNSPECIFIED: _ClassVar[EarlyStopping]
    EARLY_STOPPING_ALWAYS: _ClassVar[EarlyStopping]
    EARLY_STOPPING_NEVER: _ClassVar[EarlyStopping]

class Sampler(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SAMPLER_UNSPECIFIED: _ClassVar[Sampler]
    SAMPLER_TEMPERATURE: _ClassVar[Sampler]
    SAMPLER_TOP_N_SIGMA: _ClassVar[Sampler]
    SAMPLER_TOP_K: _ClassVar[Sampler]
    SAMPLER_TYPICAL_P: _ClassVar[Sampler]
    SAMPLER_TOP_P: _ClassVar[Sampler]
    SAMPLER_MIN_P: _ClassVar[Sampler]
    SAMPLER_XTC: _ClassVar[Sampler]

class AggregationMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    AGGREGATION_MODE_UNSPECIFIED: _ClassVar[AggregationMode]
    AGGREGATION_MODE_SUM: _ClassVar[AggregationMode]
    AGGREGATION_MODE_NORM_SUM: _ClassVar[AggregationMode]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ENCODED: _ClassVar[FinishReason]
IMAGE_DETAIL_UNSPECIFIED: ImageDetail
IMAGE_DETAIL_LOW: ImageDetail
IMAGE_DETAIL_HIGH: ImageDetail
TASK_UNSPECIFIED: Task
TASK_EMBED: Task
TASK_RANK: Task
EARLY_STOPPING_UNSPECIFIED: EarlyStopping
EARLY_STOPPING_ALWAYS: EarlyStopping
EARLY_STOPPING_NEVER: EarlyStopping
SAMPLER_UNSPECIFIED: Sampler
SAMPLER_TEMPERATURE: Sampler
SAMPLER_TOP_N_SIGMA: Sampler
SAMPLER_TOP_K: Sampler
SAMPLER_TYPICAL_P: Sampler
SAMPLER_TOP_P: Sampler
SAMPLER_MIN_P: Sampler
SAMPLER_XTC: Sampler
AGGREGATION_MODE_UNSPECIFIED: AggregationMode
AGGREGATION_MODE_SUM: AggregationMode
AGGREGATION_MODE_NORM_SUM: AggregationMode
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ENCODED: FinishReason

class SessionRequest(_message.Message):
    __slots__ = ("begins", "cancelled_call_ids", "shared")
    BEGINS_FIELD_NUMBER: _ClassVar[int]
    CANCELLED_CALL_IDS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    begins: _containers.RepeatedCompositeFieldContainer[BeginCall]
    cancelled_call_ids: _containers.RepeatedScalarFieldContainer[int]
    shared: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, begins: _Optional[_Iterable[_Union[BeginCall, _Mapping]]] = ..., cancelled_call_ids: _Optional[_Iterable[int]] = ..., shared: _Optional[_Iterable[bytes]] = ...) -> None: ...

class BeginCall(_message.Message):
    __slots__ = ("call_id", "request", "metadata", "timeout_ms", "shared")
    class MetadataEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    METADATA_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    SHARED_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    request: bytes
    metadata: _containers.ScalarMap[str, str]
    timeout_ms: int
    shared: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, call_id: _Optional[int] = ..., request: _Optional[bytes] = ..., metadata: _Optional[_Mapping[str, str]] = ..., timeout_ms: _Optional[int] = ..., shared: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("parts", "heartbeat_ms", "server_id")
    PARTS_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    SERVER_ID_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedCompositeFieldContainer[CallPart]
    heartbeat_ms: int
    server_id: str
    def __init__(self, parts: _Optional[_Iterable[_Union[CallPart, _Mapping]]] = ..., heartbeat_ms: _Optional[int] = ..., server_id: _Optional[str] = ...) -> None: ...

class CallPart(_message.Message):
    __slots__ = ("call_id", "response", "end")
    CALL_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call_id: int
    response: bytes
    end: CallEnd
    def __init__(self, call_id: _Optional[int] = ..., response: _Optional[bytes] = ..., end: _Optional[_Union[CallEnd, _Mapping]] = ...) -> None: ...

class CallEnd(_message.Message):
    __slots__ = ("code", "message", "details")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    details: bytes
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ..., details: _Optional[bytes] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "adapter", "token_ids", "sampling", "resume_token_ids", "attempt", "cache_salt", "session_key", "tenant", "priority", "model_identity", "max_wait_ms", "belief", "tokenizer_sha256", "prediction_token_ids", "task", "num_first_text_tokens", "kv_source", "kv_source_tokens", "images", "mirostat_mu", "image_view_pixels")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESUME_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    SESSION_KEY_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    MAX_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    BELIEF_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_SHA256_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    NUM_FIRST_TEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_FIELD_NUMBER: _ClassVar[int]
    KV_SOURCE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_MU_FIELD_NUMBER: _ClassVar[int]
    IMAGE_VIEW_PIXELS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    adapter: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: SamplingParams
    resume_token_ids: _containers.RepeatedScalarFieldContainer[int]
    attempt: int
    cache_salt: str
    session_key: str
    tenant: str
    priority: int
    model_identity: str
    max_wait_ms: int
    belief: Belief
    tokenizer_sha256: str
    prediction_token_ids: _containers.RepeatedScalarFieldContainer[int]
    task: Task
    num_first_text_tokens: int
    kv_source: str
    kv_source_tokens: int
    images: _containers.RepeatedCompositeFieldContainer[Image]
    mirostat_mu: float
    image_view_pixels: int
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., adapter: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., resume_token_ids: _Optional[_Iterable[int]] = ..., attempt: _Optional[int] = ..., cache_salt: _Optional[str] = ..., session_key: _Optional[str] = ..., tenant: _Optional[str] = ..., priority: _Optional[int] = ..., model_identity: _Optional[str] = ..., max_wait_ms: _Optional[int] = ..., belief: _Optional[_Union[Belief, _Mapping]] = ..., tokenizer_sha256: _Optional[str] = ..., prediction_token_ids: _Optional[_Iterable[int]] = ..., task: _Optional[_Union[Task, str]] = ..., num_first_text_tokens: _Optional[int] = ..., kv_source: _Optional[str] = ..., kv_source_tokens: _Optional[int] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., mirostat_mu: _Optional[float] = ..., image_view_pixels: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("data", "detail")
    DATA_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    detail: ImageDetail
    def __init__(self, data: _Optional[bytes] = ..., detail: _Optional[_Union[ImageDetail, str]] = ...) -> None: ...

class Belief(_message.Message):
    __slots__ = ("watcher_id", "placement_id", "num_cached_tokens", "slack_ms", "num_requests", "num_uncached_tokens", "ms_per_token", "ms_per_request")
    WATCHER_ID_FIELD_NUMBER: _ClassVar[int]
    PLACEMENT_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SLACK_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MS_PER_TOKEN_FIELD_NUMBER: _ClassVar[int]
    MS_PER_REQUEST_FIELD_NUMBER: _ClassVar[int]
    watcher_id: int
    placement_id: int
    num_cached_tokens: int
    slack_ms: float
    num_requests: int
    num_uncached_tokens: int
    ms_per_token: float
    ms_per_request: float
    def __init__(self, watcher_id: _Optional[int] = ..., placement_id: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., slack_ms: _Optional[float] = ..., num_requests: _Optional[int] = ..., num_uncached_tokens: _Optional[int] = ..., ms_per_token: _Optional[float] = ..., ms_per_request: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "min_tokens", "ignore_eos", "stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "allowed_token_ids", "bad_words", "constraint", "prompt_logprobs", "cache_eviction", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold", "dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta", "dry_multiplier", "dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_breaker_token_ids", "dry_breakers", "samplers", "thinking_budget", "beam_search")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    CONSTRAINT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    CACHE_EVICTION_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_P_FIELD_NUMBER: _ClassVar[int]
    XTC_PROBABILITY_FIELD_NUMBER: _ClassVar[int]
    XTC_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    DYNATEMP_RANGE_FIELD_NUMBER: _ClassVar[int]
    DYNATEMP_EXPONENT_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_TAU_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_ETA_FIELD_NUMBER: _ClassVar[int]
    DRY_MULTIPLIER_FIELD_NUMBER: _ClassVar[int]
    DRY_BASE_FIELD_NUMBER: _ClassVar[int]
    DRY_ALLOWED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    DRY_PENALTY_LAST_N_FIELD_NUMBER: _ClassVar[int]
    DRY_BREAKER_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRY_BREAKERS_FIELD_NUMBER: _ClassVar[int]
    SAMPLERS_FIELD_NUMBER: _ClassVar[int]
    THINKING_BUDGET_FIELD_NUMBER: _ClassVar[int]
    BEAM_SEARCH_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    constraint: Constraint
    prompt_logprobs: int
    cache_eviction: CacheEviction
    top_n_sigma: float
    typical_p: float
    xtc_probability: float
    xtc_threshold: float
    dynatemp_range: float
    dynatemp_exponent: float
    mirostat: int
    mirostat_tau: float
    mirostat_eta: float
    dry_multiplier: float
    dry_base: float
    dry_allowed_length: int
    dry_penalty_last_n: int
    dry_breaker_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dry_breakers: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    samplers: _containers.RepeatedScalarFieldContainer[Sampler]
    thinking_budget: ThinkingBudget
    beam_search: BeamSearch
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., ignore_eos: bool = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., constraint: _Optional[_Union[Constraint, _Mapping]] = ..., prompt_logprobs: _Optional[int] = ..., cache_eviction: _Optional[_Union[CacheEviction, _Mapping]] = ..., top_n_sigma: _Optional[float] = ..., typical_p: _Optional[float] = ..., xtc_probability: _Optional[float] = ..., xtc_threshold: _Optional[float] = ..., dynatemp_range: _Optional[float] = ..., dynatemp_exponent: _Optional[float] = ..., mirostat: _Optional[int] = ..., mirostat_tau: _Optional[float] = ..., mirostat_eta: _Optional[float] = ..., dry_multiplier: _Optional[float] = ..., dry_base: _Optional[float] = ..., dry_allowed_length: _Optional[int] = ..., dry_penalty_last_n: _Optional[int] = ..., dry_breaker_token_ids: _Optional[_Iterable[int]] = ..., dry_breakers: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., samplers: _Optional[_Iterable[_Union[Sampler, str]]] = ..., thinking_budget: _Optional[_Union[ThinkingBudget, _Mapping]] = ..., beam_search: _Optional[_Union[BeamSearch, _Mapping]] = ...) -> None: ...

class BeamSearch(_message.Message):
    __slots__ = ("width", "length_penalty", "early_stopping", "stop", "shown_token_ids", "shows_special_tokens")
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    LENGTH_PENALTY_FIELD_NUMBER: _ClassVar[int]
    EARLY_STOPPING_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SHOWN_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SHOWS_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    width: int
    length_penalty: float
    early_stopping: EarlyStopping
    stop: _containers.RepeatedScalarFieldContainer[str]
    shown_token_ids: _containers.RepeatedScalarFieldContainer[int]
    shows_special_tokens: bool
    def __init__(self, width: _Optional[int] = ..., length_penalty: _Optional[float] = ..., early_stopping: _Optional[_Union[EarlyStopping, str]] = ..., stop: _Optional[_Iterable[str]] = ..., shown_token_ids: _Optional[_Iterable[int]] = ..., shows_special_tokens: bool = ...) -> None: ...

class ThinkingBudget(_message.Message):
    __slots__ = ("max_tokens", "opening", "closing", "is_open", "ends")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    IS_OPEN_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    opening: _containers.RepeatedScalarFieldContainer[int]
    closing: int
    is_open: bool
    ends: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, max_tokens: _Optional[int] = ..., opening: _Optional[_Iterable[int]] = ..., closing: _Optional[int] = ..., is_open: bool = ..., ends: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class CacheEviction(_message.Message):
    __slots__ = ("max_cache_size", "start_size", "recent_size", "aggregation_mode")
    MAX_CACHE_SIZE_FIELD_NUMBER: _ClassVar[int]
    START_SIZE_FIELD_NUMBER: _ClassVar[int]
    RECENT_SIZE_FIELD_NUMBER: _ClassVar[int]
    AGGREGATION_MODE_FIELD_NUMBER: _ClassVar[int]
    max_cache_size: int
    start_size: int
    recent_size: int
    aggregation_mode: AggregationMode
    def __init__(self, max_cache_size: _Optional[int] = ..., start_size: _Optional[int] = ..., recent_size: _Optional[int] = ..., aggregation_mode: _Optional[_Union[AggregationMode, str]] = ...) -> None: ...

class Constraint(_message.Message):
    __slots__ = ("json_schema", "json_object", "regex", "choice", "grammar")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    JSON_OBJECT_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    json_object: JsonObject
    regex: str
    choice: Choices
    grammar: str
    def __init__(self, json_schema: _Optional[str] = ..., json_object: _Optional[_Union[JsonObject, _Mapping]] = ..., regex: _Optional[str] = ..., choice: _Optional[_Union[Choices, _Mapping]] = ..., grammar: _Optional[str] = ...) -> None: ...

class JsonObject(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("start_pos", "token_ids", "logprobs", "num_cached_tokens", "finish", "prompt_logprobs", "model_identity", "num_drafted_tokens", "num_accepted_tokens", "vector", "num_disk_tokens", "num_peer_tokens", "mirostat_mu", "hypotheses")
    START_POS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MODEL_IDENTITY_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VECTOR_FIELD_NUMBER: _ClassVar[int]
    NUM_DISK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PEER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIROSTAT_MU_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    start_pos: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    num_cached_tokens: int
    finish: Finish
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    model_identity: str
    num_drafted_tokens: int
    num_accepted_tokens: int
    vector: bytes
    num_disk_tokens: int
    num_peer_tokens: int
    mirostat_mu: float
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    def __init__(self, start_pos: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., num_cached_tokens: _Optional[int] = ..., finish: _Optional[_Union[Finish, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., model_identity: _Optional[str] = ..., num_drafted_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., vector: _Optional[bytes] = ..., num_disk_tokens: _Optional[int] = ..., num_peer_tokens: _Optional[int] = ..., mirostat_mu: _Optional[float] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("token_ids", "logprobs", "score", "stop_token_id")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    score: float
    stop_token_id: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., score: _Optional[float] = ..., stop_token_id: _Optional[int] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "rank", "top_token_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top_token_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top_token_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("reason", "stop_token_id", "num_prompt_tokens", "num_cached_tokens", "num_generated_tokens", "timings")
    REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    reason: FinishReason
    stop_token_id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    timings: Timings
    def __init__(self, reason: _Optional[_Union[FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ..., num_generated_tokens: _Optional[int] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_us", "prefill_us", "decode_us")
    QUEUE_US_FIELD_NUMBER: _ClassVar[int]
    PREFILL_US_FIELD_NUMBER: _ClassVar[int]
    DECODE_US_FIELD_NUMBER: _ClassVar[int]
    queue_us: int
    prefill_us: int
    decode_us: int
    def __init__(self, queue_us: _Optional[int] = ..., prefill_us: _Optional[int] = ..., decode_us: _Optional[int] = ...) -> None: ...
