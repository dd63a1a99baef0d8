from headrace.protos import inference_pb2 as _inference_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HostedModelState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HOSTED_MODEL_STATE_UNSPECIFIED: _ClassVar[HostedModelState]
    HOSTED_MODEL_STATE_UNLOADED: _ClassVar[HostedModelState]
    HOSTED_MODEL_STATE_LOADING: _ClassVar[HostedModelState]
    HOSTED_MODEL_STATE_LOADED: _ClassVar[HostedModelState]
    HOSTED_MODEL_STATE_UNLOADING: _ClassVar[HostedModelState]
    HOSTED_MODEL_STATE_FAILED: _ClassVar[HostedModelState]
HOSTED_MODEL_STATE_UNSPECIFIED: HostedModelState
HOSTED_MODEL_STATE_UNLOADED: HostedModelState
HOSTED_MODEL_STATE_LOADING: HostedModelState
HOSTED_MODEL_STATE_LOADED: HostedModelState
HOSTED_MODEL_STATE_UNLOADING: HostedModelState
HOSTED_MODEL_STATE_FAILED: HostedModelState

class WatchModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WatchModelsResponse(_message.Message):
    __slots__ = ("models", "aliases", "shadows")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[HostedModel]
    aliases: _containers.RepeatedScalarFieldContainer[str]
    shadows: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, models: _Optional[_Iterable[_Union[HostedModel, _Mapping]]] = ..., aliases: _Optional[_Iterable[str]] = ..., shadows: _Optional[_Iterable[str]] = ...) -> None: ...

class HostedModel(_message.Message):
    __slots__ = ("name", "state", "problem", "directory", "num_workers", "task", "is_on_demand", "num_bytes", "idle_ms", "loaded_ms", "last_used_ms", "adapters", "rules", "is_created")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    NUM_WORKERS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    IS_ON_DEMAND_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    IDLE_MS_FIELD_NUMBER: _ClassVar[int]
    LOADED_MS_FIELD_NUMBER: _ClassVar[int]
    LAST_USED_MS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    RULES_FIELD_NUMBER: _ClassVar[int]
    IS_CREATED_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: HostedModelState
    problem: str
    directory: str
    num_workers: int
    task: _inference_pb2.Task
    is_on_demand: bool
    num_bytes: int
    idle_ms: int
    loaded_ms: int
    last_used_ms: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    rules: ServingRules
    is_created: bool
    def __init__(self, name: _Optional[str] = ..., state: _Optional[_Union[HostedModelState, str]] = ..., problem: _Optional[str] = ..., directory: _Optional[str] = ..., num_workers: _Optional[int] = ..., task: _Optional[_Union[_inference_pb2.Task, str]] = ..., is_on_demand: bool = ..., num_bytes: _Optional[int] = ..., idle_ms: _Optional[int] = ..., loaded_ms: _Optional[int] = ..., last_used_ms: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., rules: _Optional[_Union[ServingRules, _Mapping]] = ..., is_created: bool = ...) -> None: ...

class ServingRules(_message.Message):
    __slots__ = ("tool_parser", "reasoning_parser", "max_tokens_limit", "best_of_limit", "truncates_texts", "max_documents")
    TOOL_PARSER_FIELD_NUMBER: _ClassVar[int]
    REASONING_PARSER_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_LIMIT_FIELD_NUMBER: _ClassVar[int]
    BEST_OF_LIMIT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATES_TEXTS_FIELD_NUMBER: _ClassVar[int]
    MAX_DOCUMENTS_FIELD_NUMBER: _ClassVar[int]
    tool_parser: str
    reasoning_parser: str
    max_tokens_limit: int
    best_of_limit: int
    truncates_texts: bool
    max_documents: int
    def __init__(self, tool_parser: _Optional[str] = ..., reasoning_parser: _Optional[str] = ..., max_tokens_limit: _Optional[int] = ..., best_of_limit: _Optional[int] = ..., truncates_texts: bool = ..., max_documents: _Optional[int] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("name", "model", "by_operator", "is_created", "keeps")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BY_OPERATOR_FIELD_NUMBER: _ClassVar[int]
    IS_CREATED_FIELD_NUMBER: _ClassVar[int]
    KEEPS_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: str
    by_operator: bool
    is_created: bool
    keeps: bool
    def __init__(self, name: _Optional[str] = ..., model: _Optional[str] = ..., by_operator: bool = ..., is_created: bool = ..., keeps: bool = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: HostedModel
    def __init__(self, model: _Optional[_Union[HostedModel, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: HostedModel
    def __init__(self, model: _Optional[_Union[HostedModel, _Mapping]] = ...) -> None: ...

class RemoveModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetAliasRequest(_message.Message):
    __slots__ = ("alias", "models", "shadow", "by_client")
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    BY_CLIENT_FIELD_NUMBER: _ClassVar[int]
    alias: str
    models: str
    shadow: str
    by_client: bool
    def __init__(self, alias: _Optional[str] = ..., models: _Optional[str] = ..., shadow: _Optional[str] = ..., by_client: bool = ...) -> None: ...

class SetAliasResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadConfigurationRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReloadConfigurationResponse(_message.Message):
    __slots__ = ("has_changed", "problems", "models")
    HAS_CHANGED_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    has_changed: bool
    problems: _containers.RepeatedScalarFieldContainer[str]
    models: _containers.RepeatedCompositeFieldContainer[HostedModel]
    def __init__(self, has_changed: bool = ..., problems: _Optional[_Iterable[str]] = ..., models: _Optional[_Iterable[_Union[HostedModel, _Mapping]]] = ...) -> None: ...
