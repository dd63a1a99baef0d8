"""The documents say something of every field that a request may have, and tests do something with every one."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from headrace.gateway.anthropic.fields import COUNT_TOKENS, MESSAGES
from headrace.gateway.anthropic.types import MessagesRequest, OutputConfig, PromptFields
from headrace.gateway.chat.request import AnswerFields, ChatMessage
from headrace.gateway.fields import FieldTable
from headrace.gateway.ollama import fields as ollama
from headrace.gateway.ollama.types import (
    OllamaChat,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaMessage,
    OllamaOptions,
    OllamaPull,
    OllamaShow,
)
from headrace.gateway.openai.fields import CHAT, COMPLETION, DETOKENIZE, EMBEDDING, TOKENIZE
from headrace.gateway.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    StreamOptions,
    TokenizeRequest,
)
from headrace.gateway.rerank.fields import RERANK, SCORE
from headrace.gateway.rerank.types import DocumentText, RerankRequest, ScoreRequest
from headrace.gateway.responses.fields import FIELDS as RESPONSES
from headrace.gateway.responses.types import ResponsesRequest
from headrace.gateway.tgi import fields as tgi
from headrace.gateway.tgi.types import TgiGrammar, TgiParameters, TgiRequest
from headrace.protos import text_pb2

ROOT = Path(__file__).parents[3]
# type -> its table, and where its fields are in the body
TABLES: dict[type[msgspec.Struct], tuple[FieldTable, str]] = {
    ChatRequest: (CHAT, ""),
    ChatMessage: (CHAT, "messages[]."),
    CompletionRequest: (COMPLETION, ""),
    ResponsesRequest: (RESPONSES, ""),
    StreamOptions: (CHAT, "stream_options."),
    TokenizeRequest: (TOKENIZE, ""),
    DetokenizeRequest: (DETOKENIZE, ""),
    EmbeddingRequest: (EMBEDDING, ""),
    RerankRequest: (RERANK, ""),
    DocumentText: (RERANK, "documents[]."),
    ScoreRequest: (SCORE, ""),
    MessagesRequest: (MESSAGES, ""),
    AnswerFields: (MESSAGES, ""),
    PromptFields: (COUNT_TOKENS, ""),
    OutputConfig: (COUNT_TOKENS, "output_config."),
    OllamaChat: (ollama.CHAT, ""),
    OllamaMessage: (ollama.CHAT, "messages[]."),
    OllamaGenerate: (ollama.GENERATE, ""),
    OllamaOptions: (ollama.OPTIONS, ""),
    OllamaEmbed: (ollama.EMBED, ""),
    OllamaEmbeddings: (ollama.EMBEDDINGS, ""),
    OllamaPull: (ollama.PULL, ""),
    OllamaShow: (ollama.SHOW, ""),
    TgiRequest: (tgi.REQUEST, ""),
    TgiParameters: (tgi.PARAMETERS, ""),
    TgiGrammar: (tgi.PARAMETERS, "grammar."),
}


def fields() -> list[tuple[type[msgspec.Struct], str]]:
    return [(kind, field.encode_name) for kind in TABLES for field in msgspec.structs.fields(kind)]


def text_of_all_tests() -> str:
    own = Path(__file__)
    return "".join(path.read_text() for path in sorted(own.parents[1].rglob("test_*.py")) if path != own)


TESTS = text_of_all_tests()


@pytest.mark.parametrize(("kind", "name"), fields(), ids=lambda value: getattr(value, "__name__", value))
def test_every_field_is_in_the_reference(kind: type[msgspec.Struct], name: str) -> None:
    table, place = TABLES[kind]
    assert place + name in table.rows


@pytest.mark.parametrize(("kind", "name"), fields(), ids=lambda value: getattr(value, "__name__", value))
def test_every_field_is_used_by_a_test(kind: type[msgspec.Struct], name: str) -> None:
    assert re.search(rf'"{name}"|\b{name}=', TESTS), f"{name} of {kind.__name__}"


@pytest.mark.parametrize("message", ["ChatRequest", "CompleteRequest", "TextParams", "ChatMessage", "ChatTool"])
def test_every_field_of_the_grpc_edge_is_used_by_a_test(message: str) -> None:
    for field in text_pb2.DESCRIPTOR.message_types_by_name[message].fields:
        assert re.search(rf'"{field.name}"|\b{field.name}=', TESTS), f"{field.name} of {message}"
