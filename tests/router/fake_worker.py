"""A scripted worker on a real gRPC server: its tokens follow from prompt and position, so a resumption is checkable."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import count
from typing import Any

import grpc

from headrace.common.transport.channels import SERVER_OPTIONS
from headrace.common.transport.session_server import SessionServer, handler_of, whole
from headrace.protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.protos.answer_bounds import check_context
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.cache_eviction import longest_context_of
from headrace.protos.model_identity import model_identity
from headrace.protos.status import Reason, StatusError, abort
from tests.patience import patience

BLOCK_SIZE = 4
EOS = 2
BUNDLE = b"tokenizer" * 1000
_epochs = count(1)


def token_at(prompt: Sequence[int], position: int) -> int:
    """The token that the model generates at a position (from 0) after a prompt; never EOS."""
    return 10 + zlib.crc32(f"{list(prompt)}/{position}".encode()) % 10_000


def answer(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The whole answer to a prompt."""
    return [token_at(prompt, position) for position in range(num_tokens)]


async def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Return when the condition holds; fail when it does not in time."""
    async with asyncio.timeout(patience(timeout_s)):
        while not condition():
            await asyncio.sleep(0.005)


class FakeWorker(inference_pb2_grpc.InferenceServicer, worker_pb2_grpc.WorkerServicer):  # type: ignore[misc]
    """Speaks Inference and Worker. Tests script it through its attributes and end it with `kill`.

    Tokens flow one in a message. `budget` is how many messages may still be sent by all requests together (None: no
    bound); at 0 a stream waits, so a test decides where exactly a death falls.
    """

    def __init__(
        self, name: str = "w", *, model: str = "m", fingerprint: str = "f" * 64, tokenizer_sha256: str = "ab" * 32
    ) -> None:
        self.name = name
        self.card = worker_pb2.ModelCard(
            name=model,
            fingerprint=fingerprint,
            tokenizer_sha256=tokenizer_sha256,
            max_context_tokens=4096,
            vocab_size=20_000,
            block_size=BLOCK_SIZE,
            eos_token_ids=[EOS],
        )
        self.load = worker_pb2.Load(
            num_blocks=1000, num_free_blocks=1000, prefill_tokens_per_s=1000, decode_step_ms=10, max_num_seqs=16
        )
        self.address = ""
        self.epoch = 0
        self.budget: int | None = None
        self.token_s = 0.0  # seconds between tokens
        self.eos_at: int | None = None  # position at which EOS is generated
        self.error: StatusError | None = None  # answer of every Generate
        self.gives_back: worker_pb2.GivenBack | None = None  # answer of every Generate that may be given back
        self.num_watchers = 1  # as Watch tells it
        self.bare_error: tuple[grpc.StatusCode, str] | None = None
        self.start_pos_offset = 0
        self.withhold_finish = False
        self.end_without_finish = False
        self.talks_on = False  # sends a message after the finish
        self.ends_with_token = False  # sends the finish with the last token, if its context or max_tokens ends there
        self.cached: set[int] = set()
        self.on_disk: list[int] = []
        self.states: list[int] = []
        self.adapters: dict[str, worker_pb2.Adapter] = {}
        self.may_load = asyncio.Event()  # LoadAdapter waits for it
        self.tells_late_s = 0.0  # Reports of adapters come so long after the change
        self.may_load.set()
        self.requests: list[bytes] = []
        self.metadata: list[dict[str, str | bytes]] = []
        self.sent: list[bytes] = []
        self.num_running = 0
        self.num_cancelled = 0
        self.num_watches = 0
        self.drains: list[bool] = []  # whether each Drain was to be undone
        self.intervals_ms: list[int] = []  # as Watch and AdjustWatch asked for
        self.placed: dict[int, list[int]] = {}  # by watcher: placements that no report has named yet
        self.names_placements = True
        self._server: grpc.aio.Server | None = None
        self._watchers: list[asyncio.Queue[worker_pb2.WatchResponse]] = []
        self.is_silent = False
        self.has_sessions = True
        self.num_sessions = 0
        self.skip_sequence = False

    # -- life -------------------------------------------------------------------------------------------------------

    async def start(self, address: str = "127.0.0.1:0") -> FakeWorker:
        """Listen, as a new process with an empty cache would."""
        self.epoch = next(_epochs)
        self.cached = set()
        self._watchers = []
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        inference_pb2_grpc.add_InferenceServicer_to_server(self, self._server)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        port = self._server.add_insecure_port(address)
        self.address = f"{address.rpartition(':')[0]}:{port}"
        await self._server.start()
        return self

    @property
    def is_stuck(self) -> bool:
        """Whether a request is running here and has used up its budget."""
        return self._server is not None and self.num_running > 0 and self.budget == 0

    async def kill(self) -> None:
        """Stop abruptly: every call breaks off."""
        if self._server is not None:
            server, self._server = self._server, None
            await server.stop(None)

    async def restart(self) -> None:
        """Come back on the same address."""
        await self.start(self.address)

    # -- Worker -----------------------------------------------------------------------------------------------------

    async def GetModelCard(self, request: Any, context: Any) -> worker_pb2.GetModelCardResponse:
        if self.is_silent:
            await asyncio.Event().wait()
        return worker_pb2.GetModelCardResponse(card=self.card, worker_id=self.name, epoch=self.epoch)

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        for start in range(0, len(BUNDLE), 1000):
            yield worker_pb2.GetTokenizerResponse(chunk=BUNDLE[start : start + 1000])

    async def Watch(self, request: worker_pb2.WatchRequest, context: Any) -> Any:
        queue: asyncio.Queue[worker_pb2.WatchResponse] = asyncio.Queue()
        self._watchers.append(queue)
        self.num_watches += 1
        self.intervals_ms.append(request.min_interval_ms)
        sequence = 0
        report = worker_pb2.WatchResponse(
            kv_events=worker_pb2.KvEvents(reset=True, stored=sorted(self.cached)),
            disk_events=worker_pb2.KvEvents(reset=True, stored=self.on_disk),
            state_events=worker_pb2.KvEvents(reset=True, stored=self.states),
            load=self.load,
            adapters=self.adapter_list(),
        )
        while True:
            while self.is_silent:
                await asyncio.sleep(0.01)
            report.epoch, report.sequence, report.num_watchers = self.epoch, sequence, self.num_watchers
            if self.names_placements:
                report.placement_ids.extend(self.placed.pop(request.watcher_id, ()))
            yield report
            sequence += 1
            if self.skip_sequence:
                self.skip_sequence = False
                sequence += 1
            try:
                async with asyncio.timeout(request.heartbeat_ms / 1000):
                    report = await queue.get()
            except TimeoutError:
                report = worker_pb2.WatchResponse(load=self.load)

    async def Drain(self, request: worker_pb2.DrainRequest, context: Any) -> worker_pb2.DrainResponse:
        self.drains.append(request.undo)
        self.report(draining=not request.undo)
        return worker_pb2.DrainResponse(num_running=3)

    async def AdjustWatch(self, request: worker_pb2.AdjustWatchRequest, context: Any) -> Any:
        self.intervals_ms.append(request.min_interval_ms)
        return worker_pb2.AdjustWatchResponse()

    def report(
        self, stored: Sequence[int] = (), evicted: Sequence[int] = (), placement_ids: Sequence[int] = (), **load: Any
    ) -> None:
        """Report the changes at once."""
        self.cached = (self.cached - set(evicted)) | set(stored)
        for name, value in load.items():
            setattr(self.load, name, value)
        events = worker_pb2.KvEvents(stored=stored, evicted=evicted)
        for queue in self._watchers:
            queue.put_nowait(worker_pb2.WatchResponse(kv_events=events, load=self.load, placement_ids=placement_ids))

    def adapter_list(self) -> worker_pb2.AdapterList:
        """The adapters as they are reported."""
        return worker_pb2.AdapterList(adapters=self.adapters.values(), max_in_memory=4)

    def has_adapter(self, name: str, sha256: str = "a" * 64, *, in_memory: bool = True, path: str = "") -> None:
        """Know an adapter, and say so."""
        adapter = worker_pb2.Adapter(name=name, sha256=sha256, path=path, is_in_memory=in_memory, num_bytes=50_000_000)
        self.adapters[name] = adapter
        self._tell_adapters()

    def _tell_adapters(self) -> None:
        if not self._watchers:
            return
        message = worker_pb2.WatchResponse(load=self.load, adapters=self.adapter_list())
        for queue in self._watchers:
            asyncio.get_running_loop().call_later(self.tells_late_s, queue.put_nowait, message)

    async def LoadAdapter(self, request: worker_pb2.LoadAdapterRequest, context: Any) -> Any:
        await self.may_load.wait()
        if request.path == "/broken":
            await abort(context, StatusError(Reason.INVALID_FIELD, "no adapter there", field="lora_path"))
        standing = self.adapters.get(request.name)
        if standing is not None and standing.path != request.path and not request.in_place:
            await abort(context, StatusError(Reason.INVALID_FIELD, "it has other files", field="lora_name"))
        self.has_adapter(request.name, path=request.path)
        return worker_pb2.LoadAdapterResponse(adapter=self.adapters[request.name])

    async def UnloadAdapter(self, request: worker_pb2.UnloadAdapterRequest, context: Any) -> Any:
        del self.adapters[request.name]
        self._tell_adapters()
        return worker_pb2.UnloadAdapterResponse()

    def store(self, tokens: Sequence[int]) -> None:
        """Store the blocks of this prompt and report them."""
        self.report(stored=block_hashes(root_hash(self.card.fingerprint), tokens, BLOCK_SIZE))

    # -- Inference --------------------------------------------------------------------------------------------------

    async def Session(self, request_iterator: Any, context: Any) -> None:
        if not self.has_sessions:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "")
        self.num_sessions += 1
        await SessionServer(handler_of(self.Generate, whole)).serve(request_iterator, context)

    async def Generate(self, request: inference_pb2.GenerateRequest, context: Any) -> Any:
        self.requests.append(request.SerializeToString())
        self.metadata.append(dict(context.invocation_metadata() or ()))
        if self.error is not None:
            await abort(context, self.error)
        if self.gives_back is not None and request.belief.HasField("slack_ms"):
            self.gives_back.epoch = self.epoch
            await abort(context, StatusError(Reason.GIVEN_BACK, "it is busier", detail=self.gives_back))
        if self.bare_error is not None:
            await context.abort(*self.bare_error)
        longest = longest_context_of(self.card, request.sampling)
        try:
            check_context(len(request.token_ids), len(request.resume_token_ids), longest)
        except StatusError as error:
            await abort(context, error)
        self.placed.setdefault(request.belief.watcher_id, []).append(request.belief.placement_id)
        self.num_running += 1
        ended = False
        try:
            for message in self._messages(request):
                await self._allowance()
                self.sent.append(message.SerializeToString())
                yield message
            ended = True
        finally:
            self.num_running -= 1
            self.num_cancelled += not ended

    def _identity(self, request: inference_pb2.GenerateRequest) -> str:
        adapter = self.adapters.get(request.adapter, worker_pb2.Adapter())
        return model_identity(self.card, adapter.sha256)

    async def _allowance(self) -> None:
        while self.budget == 0:
            await asyncio.sleep(0.005)
        if self.budget is not None:
            self.budget -= 1
        await asyncio.sleep(self.token_s)

    def _messages(self, request: inference_pb2.GenerateRequest) -> Iterator[inference_pb2.GenerateResponse]:
        limit = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else 20
        limit = min(limit, longest_context_of(self.card, request.sampling) - len(request.token_ids))
        reason, position = inference_pb2.FINISH_REASON_LENGTH, len(request.resume_token_ids)
        first = True
        while position < limit:
            token = EOS if position == self.eos_at else token_at(request.token_ids, position)
            message = inference_pb2.GenerateResponse(start_pos=position + self.start_pos_offset, token_ids=[token])
            if first:
                message.num_cached_tokens, message.model_identity, first = 0, self._identity(request), False
            position += 1
            if self.ends_with_token and position == limit:
                message.finish.CopyFrom(self._finish(request, reason, position))
                yield message
                return
            yield message
            if token == EOS:
                reason = inference_pb2.FINISH_REASON_STOP
                break
        if self.end_without_finish:
            return
        yield inference_pb2.GenerateResponse(start_pos=position, finish=self._finish(request, reason, position))
        if self.talks_on:
            yield inference_pb2.GenerateResponse(start_pos=position)

    def _finish(
        self, request: inference_pb2.GenerateRequest, reason: inference_pb2.FinishReason, num_tokens: int
    ) -> inference_pb2.Finish:
        finish = inference_pb2.Finish(
            reason=reason, num_prompt_tokens=len(request.token_ids), num_generated_tokens=num_tokens
        )
        if reason == inference_pb2.FINISH_REASON_STOP:
            finish.stop_token_id = EOS
        return finish


Worker = Callable[..., Awaitable[FakeWorker]]
