"""A tiny real tokenizer, a fake router that speaks the real protocol, and a real gateway between them and a test."""

from __future__ import annotations

import asyncio
import hashlib
import io
import tarfile
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import openvino
import openvino_tokenizers  # noqa: F401  # registers its operations
import pytest
import pytest_asyncio
from openvino_tokenizers import tokenizer_pipeline as pipeline
from openvino_tokenizers.utils import change_inputs_type, change_outputs_type

from headrace.common.aliases import Aliases
from headrace.common.transport.session_server import SessionServer
from headrace.common.transport.sessions import CallContext
from headrace.common.transport.wire_request import WireRequest
from headrace.gateway.edge.cors import with_cors
from headrace.gateway.edge.grpc_edge import start_grpc_server
from headrace.gateway.edge.http import HttpEdge, HttpServer, bound_socket
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.images.loading import ImageLoader
from headrace.gateway.protocol import Setup
from headrace.gateway.protocols import PROTOCOLS, endpoints
from headrace.gateway.server import Threads, services_behind
from headrace.gateway.text.models import Models, TextSide, load_text_side
from headrace.gateway.upstream.routers import Upstream
from headrace.protos import (
    inference_pb2,
    inference_pb2_grpc,
    router_pb2,
    router_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from headrace.protos.status import Reason, StatusError, abort  # Reason is for tests
from tests.gateway import encoder_model
from tests.gateway.served import default_flags
from tests.patience import patience

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
MERGES = [(b"h", b"e"), (b"l", b"l"), (b"he", b"ll"), (b"hell", b"o"), (b" ", b"w")]
VOCAB = [text.encode() for text in SPECIAL] + [bytes([i]) for i in range(256)] + [a + b for a, b in MERGES]
EOS = 2
MODEL = "tiny"
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# In the manner of Qwen 3: tools, calls, reasoning that can be switched off.
TOOL_TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{{- '<tool_call>{"name": ..., "arguments": ...}</tool_call><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- if open_think is defined %}{{- '<think>\\n' }}{%- endif %}{%- endif %}"""
MAX_CONTEXT = 4096
core = openvino.Core()  # kept: nodes of the extension must not outlive it


def token_of(byte: int) -> int:
    """Id of the token of a single byte."""
    return len(SPECIAL) + byte


def tokens_of(text: str) -> list[int]:
    """A text as tokens of single bytes."""
    return [token_of(byte) for byte in text.encode()]


def tiny_graphs(add_bos: bool, more_special: Sequence[str] = ()) -> dict[str, bytes]:
    """OpenVINO files of a byte-level tokenizer with a few merges and special tokens. Those of `more_special` are at the
    end of the vocabulary."""
    vocab = [*VOCAB, *(text.encode() for text in more_special)]
    steps: list[Any] = [
        pipeline.SpecialTokensSplit.from_string_iter([*SPECIAL, *more_special]),
        pipeline.RegexSplitStep(split_pattern=r" ?[^\s]+|\s+", behaviour="isolate"),
        pipeline.BPETokenizationStep(vocab=vocab, merges=MERGES),
    ]
    if add_bos:
        bos = pipeline.AddToken(token=SPECIAL[0], _token_id=0)
        steps.append(pipeline.CombineSegmentsStep([bos, pipeline.Sequence()]))
    steps += [
        pipeline.PaddingStep(token=SPECIAL[EOS], _token_id=EOS, pad_right=False),
        pipeline.VocabDecoderStep(vocab=vocab),
        pipeline.FuseStep(),
        pipeline.UTF8ValidateStep(),
    ]
    skipped = [0, 1, 2, *range(len(VOCAB), len(vocab))]
    whole = pipeline.TokenizerPipeline(vocab=vocab, skip_tokens=skipped)
    whole.add_steps(steps)
    return graphs_of(whole)


def graphs_of(whole: Any) -> dict[str, bytes]:
    """OpenVINO files of a tokenizer in steps."""
    encoder, decoder = whole.get_tokenizer_ov_subgraph(), whole.get_detokenizer_ov_subgraph()
    change_outputs_type(encoder, openvino.Type.i64)
    change_inputs_type(decoder, openvino.Type.i64)
    files = {}
    with tempfile.TemporaryDirectory() as folder:
        for graph, name in ((encoder, "openvino_tokenizer"), (decoder, "openvino_detokenizer")):
            openvino.save_model(graph, f"{folder}/{name}.xml", compress_to_fp16=False)
            for suffix in ("xml", "bin"):
                files[f"{name}.{suffix}"] = Path(f"{folder}/{name}.{suffix}").read_bytes()
    return files


def tar_of(files: dict[str, bytes]) -> bytes:
    """The files as an uncompressed tar."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


@pytest.fixture(scope="session")
def tiny_files() -> dict[str, bytes]:
    """The files of the tiny model's bundle. By default, its tokenizer adds a beginning-of-sequence token."""
    return {**tiny_graphs(add_bos=True), "chat_template.jinja": CHATML.encode()}


@pytest.fixture(scope="session")
def tiny_bundle(tiny_files: dict[str, bytes]) -> bytes:
    """The tiny model's bundle."""
    return tar_of(tiny_files)


@pytest.fixture(scope="session")
def tiny_text(tiny_bundle: bytes) -> Iterator[TextSide]:
    """The tiny model's tokenizer and template, loaded."""
    text = load_text_side(tiny_bundle)
    yield text
    text.tokenizer.close()


@dataclass
class Stream:
    """One Generate call at the fake router."""

    request: inference_pb2.GenerateRequest
    metadata: dict[str, str]
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)


Send = Callable[..., Awaitable[None]]
Script = Callable[["FakeRouter", Stream, Send], Awaitable[None]]


async def speak(router: FakeRouter, stream: Stream, send: Send) -> None:
    """The default script: the tokens of `router.answer` one by one, then the model's end of sequence."""
    request = stream.request
    tokens = [*tokens_of(router.answer), EOS]
    start = len(request.resume_token_ids)
    most = request.sampling.max_tokens
    for position in range(start, min(len(tokens), most)):
        token = tokens[position]
        last = position + 1 == min(len(tokens), most)
        reason = inference_pb2.FINISH_REASON_STOP if token == EOS else inference_pb2.FINISH_REASON_LENGTH
        await send([token], position, reason if last else None, request)


class _Writing:
    """The context of a call in a session, for a handler that writes messages rather than bytes."""

    def __init__(self, call: CallContext) -> None:
        self._call = call
        self.invocation_metadata, self.time_remaining = call.invocation_metadata, call.time_remaining
        self.abort = call.abort

    async def write(self, message: inference_pb2.GenerateResponse) -> None:
        await self._call.write(message.SerializeToString())


class FakeRouter(inference_pb2_grpc.InferenceServicer, router_pb2_grpc.RouterServicer, worker_pb2_grpc.WorkerServicer):
    """Speaks Inference and Router (or, with `is_worker`, Inference and Worker); a script makes the tokens."""

    def __init__(self, bundle: bytes, is_worker: bool = False, max_context_tokens: int = 256) -> None:
        self.bundle = bundle
        self.is_worker = is_worker
        self.max_context_tokens = max_context_tokens
        self.address = ""  # once it is served
        self.reset()

    def reset(self) -> None:
        """Clear the recorded requests, and restore the default script and answer."""
        self.script: Script = speak
        self.answer = "Hello, wörld 😀!"
        self.num_cached = 0
        self.num_from_disk = self.num_from_peers = 0
        self.streams: list[Stream] = []
        self._contexts: dict[int, Any] = {}
        self.num_lists = 0
        self.lacks_tokenizer = False
        self.num_sessions = 0
        self.workers: list[router_pb2.WorkerInfo] = []
        self.redis = router_pb2.REDIS_STATE_UNSPECIFIED
        self.cards = [self.card()]
        self.adapters: list[router_pb2.ServedAdapter] = []
        self.drains: list[tuple[str, bool]] = []
        self.explained: list[router_pb2.ExplainRequest] = []

    def card(self, **changes: Any) -> worker_pb2.ModelCard:
        """The tiny model's card."""
        values: dict[str, Any] = {
            "name": MODEL,
            "fingerprint": "0123456789abcdef" * 4,
            "tokenizer_sha256": hashlib.sha256(self.bundle).hexdigest(),
            "max_context_tokens": self.max_context_tokens,
            "vocab_size": 270,
            "block_size": 1,
            "eos_token_ids": [EOS],
            "created_s": 1_700_000_000,
        }
        return worker_pb2.ModelCard(**{**values, **changes})

    @property
    def prompt(self) -> str:
        """The text of the last prompt."""
        return b"".join(VOCAB[token] for token in self.streams[-1].request.token_ids).decode()

    @property
    def sampling(self) -> inference_pb2.SamplingParams:
        """The sampling of the last request."""
        return self.streams[-1].request.sampling

    def context_of(self, stream: Stream) -> Any:
        """The gRPC context of a call, for statuses that are no `StatusError`."""
        return self._contexts[id(stream)]

    async def Generate(self, request: Any, context: Any) -> None:
        stream = Stream(request, dict(context.invocation_metadata()))
        self.streams.append(stream)
        self._contexts[id(stream)] = context

        async def send(tokens: list[int], position: int, reason: Any, _: Any = None, logprobs: bool = True) -> None:
            message = inference_pb2.GenerateResponse(start_pos=position, token_ids=tokens)
            if position == len(request.resume_token_ids):
                message.num_cached_tokens = self.num_cached
                message.num_disk_tokens, message.num_peer_tokens = self.num_from_disk, self.num_from_peers
                message.model_identity = f"identity of {self.answer}"
                if request.sampling.HasField("prompt_logprobs") and position == 0:
                    for token in request.token_ids[1:]:
                        top = list(range(request.sampling.prompt_logprobs))
                        message.prompt_logprobs.add(
                            logprob=-token / 128, rank=9, top_token_ids=top, top_logprobs=[-i / 4 for i in top]
                        )
            if request.sampling.HasField("logprobs") and logprobs:
                for token in tokens:
                    top = list(range(request.sampling.logprobs))
                    message.logprobs.add(
                        logprob=-token / 128, rank=1, top_token_ids=top, top_logprobs=[-i / 4 for i in top]
                    )
            if reason is not None:
                message.finish.reason = reason
                message.finish.num_prompt_tokens = len(request.token_ids)
                message.finish.num_generated_tokens = position + len(tokens)
                if reason == inference_pb2.FINISH_REASON_STOP:
                    message.finish.stop_token_id = tokens[-1]
            await context.write(message)

        try:
            await self.script(self, stream, send)
        except asyncio.CancelledError:
            stream.cancelled.set()
            raise
        except StatusError as error:
            await abort(context, error)

    async def Session(self, request_iterator: Any, context: Any) -> None:
        self.num_sessions += 1

        async def handle(wire: WireRequest, call: CallContext) -> None:
            await self.Generate(inference_pb2.GenerateRequest.FromString(wire.joined()), _Writing(call))

        await SessionServer(handle).serve(request_iterator, context)

    async def ListModels(self, request: Any, context: Any) -> Any:
        self.num_lists += 1
        if self.is_worker:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        return router_pb2.ListModelsResponse(models=self.cards, redis=self.redis, adapters=self.adapters)

    async def LoadAdapter(self, request: Any, context: Any) -> Any:
        if not request.path.startswith("/"):
            await abort(context, StatusError(Reason.INVALID_FIELD, "lora_path must be absolute", field="lora_path"))
        adapter = worker_pb2.Adapter(name=request.name, path=request.path, sha256="a" * 64, rank=8, created_s=7)
        self.adapters.append(router_pb2.ServedAdapter(model=MODEL, adapter=adapter, num_workers=2, num_in_memory=1))
        return router_pb2.RouterLoadAdapterResponse(adapter=self.adapters[-1])

    async def UnloadAdapter(self, request: Any, context: Any) -> Any:
        kept = [served for served in self.adapters if served.adapter.name != request.name]
        if len(kept) == len(self.adapters):
            await abort(context, StatusError(Reason.MODEL_NOT_FOUND, "no such adapter", field="lora_name"))
        self.adapters = kept
        return router_pb2.RouterUnloadAdapterResponse()

    async def ListWorkers(self, request: Any, context: Any) -> Any:
        return router_pb2.ListWorkersResponse(workers=self.workers)

    async def DrainWorker(self, request: Any, context: Any) -> Any:
        self.drains.append((request.worker, request.undo))
        if request.worker == "nosuch":
            problem = "there is no worker 'nosuch'; there is w0"
            await abort(context, StatusError(Reason.INVALID_FIELD, problem, field="worker"))
        return router_pb2.DrainWorkerResponse(worker_id="w0", num_running=2)

    async def Explain(self, request: Any, context: Any) -> Any:
        self.explained.append(request)
        return router_pb2.ExplainResponse(worker_id="w0", num_prompt_tokens=len(request.token_ids))

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        if self.lacks_tokenizer:
            await abort(context, StatusError(Reason.NOT_FOUND, "no live worker has that tokenizer bundle"))
        kind = worker_pb2.GetTokenizerResponse if self.is_worker else router_pb2.RouterGetTokenizerResponse
        for start in range(0, len(self.bundle), 1000):
            yield kind(chunk=self.bundle[start : start + 1000])

    async def GetModelCard(self, request: Any, context: Any) -> Any:
        self.num_lists += 1
        return worker_pb2.GetModelCardResponse(card=self.cards[0], worker_id="w", epoch=1)


@asynccontextmanager
async def serving_router(router: FakeRouter, address: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, Any]]:
    """The fake router on a port; gives its address and the server."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    inference_pb2_grpc.add_InferenceServicer_to_server(router, server)
    if router.is_worker:
        worker_pb2_grpc.add_WorkerServicer_to_server(router, server)
    else:
        router_pb2_grpc.add_RouterServicer_to_server(router, server)
    router.address = f"127.0.0.1:{server.add_insecure_port(address)}"
    await server.start()
    try:
        yield router.address, server
    finally:
        await server.stop(None)


@asynccontextmanager
async def serving_model(files: dict[str, bytes], template: str) -> AsyncIterator[FakeRouter]:
    """The fake router on a port, with this chat template and a context of `MAX_CONTEXT` tokens."""
    bundle = tar_of({**files, "chat_template.jinja": template.encode()})
    fake = FakeRouter(bundle, max_context_tokens=MAX_CONTEXT)
    async with serving_router(fake):
        yield fake


@dataclass
class Gateway:
    """A running gateway."""

    url: str
    grpc_address: str
    http: httpx.AsyncClient
    models: Models
    edge: HttpEdge
    protocols: dict[str, Any]
    """The open protocols by name."""
    upstream: Upstream


@asynccontextmanager
async def serving_gateway(
    *routers: str,
    controls: EdgeControls | None = None,
    plain_grpc: bool = False,
    flags: Mapping[str, Any] | None = None,
    model_host: str | None = None,
    await_model_host: bool = False,
    aliases: Aliases | None = None,
    chat_templates: Mapping[str, str] | None = None,
    images: Callable[[Threads], ImageLoader] | None = None,
) -> AsyncIterator[Gateway]:
    """A ready gateway in front of the routers, over real HTTP and gRPC.

    `images` makes the loader of images; by default one without URLs. `flags` are the protocols' flags by parameter
    name, `model_host` is the address of a host of models.
    """
    controls = controls or EdgeControls(EdgeSettings())
    threads = Threads()
    services = services_behind(
        routers,
        threads,
        plain_grpc=plain_grpc,
        model_host=model_host,
        await_model_host=await_model_host,
        aliases=aliases,
        chat_templates=chat_templates,
        images=None if images is None else images(threads),
    )
    models, metrics, shadows = services.models, services.metrics, services.shadows
    upstream, host = services.upstream, services.host
    following = asyncio.create_task(host.run())
    opened = {
        name: protocol.open(Setup(services, {**default_flags(protocol), **(flags or {})}, admission=controls.admission))
        for name, protocol in PROTOCOLS.items()
    }
    edge = HttpEdge(
        endpoints(services, [*opened.values()]), metrics, admission=controls.admission, bodies=controls.bodies
    )
    bound = bound_socket("127.0.0.1", 0)
    url = f"{'http' if controls.tls is None else 'https'}://127.0.0.1:{bound.getsockname()[1]}"
    application = with_cors(edge, controls.cors_origins)
    http_server = HttpServer(application, 2, controls.connections, controls.tls)
    serving = asyncio.create_task(http_server.serve(sockets=[bound]))
    grpc_services = [service for protocol in opened.values() for service in protocol.grpc_services]
    grpc_server, grpc_port = await start_grpc_server(grpc_services, "127.0.0.1:0", controls.admission)
    await models.listed()
    try:
        async with httpx.AsyncClient(base_url=url, timeout=patience(20), verify=False) as http:
            yield Gateway(url, f"127.0.0.1:{grpc_port}", http, models, edge, opened, upstream)
    finally:
        http_server.should_exit = True
        await asyncio.gather(serving, grpc_server.stop(None))
        for protocol in opened.values():
            await protocol.drain(0)
        following.cancel()
        await shadows.close()
        await upstream.close()
        await host.close()
        for protocol in opened.values():
            await protocol.close()
        models.close()
        threads.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tiny_bundle: bytes) -> AsyncIterator[FakeRouter]:
    """The fake router of the module's gateway."""
    fake = FakeRouter(tiny_bundle)
    async with serving_router(fake):
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(router: FakeRouter) -> AsyncIterator[Gateway]:
    """The module's gateway, in front of `router`."""
    async with serving_gateway(router.address) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def encoders(router: FakeRouter, gateway: Gateway) -> None:
    """Gives the module's router models that encode texts, see `encoder_model`."""
    router.reset()
    router.script, router.cards = encoder_model.encode, encoder_model.cards(router)
    await gateway.models.refresh()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def model(tiny_files: dict[str, bytes]) -> AsyncIterator[FakeRouter]:
    """A fake router with a model that has tools and reasoning."""
    async with serving_model(tiny_files, TOOL_TEMPLATE) as fake:
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(model: FakeRouter) -> AsyncIterator[Gateway]:
    """The gateway in front of `model`."""
    async with serving_gateway(model.address) as running:
        yield running


@pytest.fixture
def kit() -> Any:
    """Helpers for test modules, which do not import one another."""
    import sys

    return sys.modules[__name__]


@pytest.fixture(scope="module")
def kit_of_module() -> Any:
    """As `kit`, for module fixtures."""
    import sys

    return sys.modules[__name__]
