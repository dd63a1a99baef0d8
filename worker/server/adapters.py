"""Adapter functions of the worker's services: requests hold adapters, and callers load, list and unload them."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import time
from collections.abc import Callable
from pathlib import Path

from headrace.protos import worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.worker.adapters.library import Adapter, AdapterLibrary
from headrace.worker.request.request import Request, RequestState

log = logging.getLogger(__name__)

# The longest time that a request waits for a slot and until its adapter is read, if it names no time itself.
_MAX_WAIT_S = 600.0
_LOOK_S = 0.005
_NAME = re.compile(r"[\w.:/@+-]{1,200}")
_NOT_READ = "the request's adapter was not read into memory in time; try again later"
_NO_ADAPTERS = "this worker was started without adapters; start it with --adapter or --max-adapters"


class AdapterDesk:
    """The adapters of one worker for its services. Without a library it refuses all adapters. `model` is the name of
    the base model. No request waits longer than `max_wait_s` for its adapter and for others together."""

    def __init__(self, library: AdapterLibrary | None, model: str, max_wait_s: float = math.inf) -> None:
        self._library = library
        self._model = model
        self._max_wait_s = max_wait_s
        self._releases: set[asyncio.Task[None]] = set()

    def find(self, name: str) -> Adapter | None:
        """The adapter that a request names; None without one. StatusError (MODEL_NOT_FOUND)."""
        if not name:
            return None
        if self._library is None:
            raise StatusError(Reason.MODEL_NOT_FOUND, f"no adapter '{name[:100]}': {_NO_ADAPTERS}", field="adapter")
        return self._library.find(name)

    async def hold(self, adapter: Adapter | None, request: Request) -> None:
        """Keep the adapter in memory for a request, until `let_go`. Time spent here shortens how long the request may
        wait for others. StatusError."""
        if adapter is None:
            return
        assert self._library is not None
        now_s = time.monotonic()
        most_s = min(request.max_wait_s, self._max_wait_s)
        patience_s = math.inf if request.is_resumed else most_s
        timeout_s = max(min(patience_s, request.deadline_s - now_s, _MAX_WAIT_S), 0.0)
        try:
            async with asyncio.timeout(max(min(request.deadline_s - now_s, _MAX_WAIT_S), 0.0)):
                request.adapter_slot = await self._library.acquire(adapter, timeout_s)
        except TimeoutError:
            raise StatusError(Reason.QUEUE_FULL, _NOT_READ, retry_after_s=1.0) from None
        held_s = time.monotonic() - now_s
        request.max_wait_s = max(most_s - held_s, 0.0)
        request.preparing_s += held_s  # so that it counts once

    def let_go(self, adapter: Adapter | None, request: Request, *, was_submitted: bool = True) -> None:
        """Release the adapter of a request, once the engine has ended the request: a step may still be computing it."""
        if adapter is None:
            return
        assert self._library is not None
        if not was_submitted or request.state is RequestState.FINISHED:
            self._library.release(adapter)
            return
        task = asyncio.create_task(self._release_when_ended(adapter, request))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release_when_ended(self, adapter: Adapter, request: Request) -> None:
        assert self._library is not None
        while request.state is not RequestState.FINISHED:  # noqa: ASYNC110  the engine thread has no event for it
            await asyncio.sleep(_LOOK_S)
        self._library.release(adapter)

    async def load(self, message: worker_pb2.LoadAdapterRequest) -> worker_pb2.LoadAdapterResponse:
        """See the proto. Raises StatusError."""
        if self._library is None:
            raise StatusError(Reason.UNSUPPORTED, _NO_ADAPTERS)
        check_name(message.name, self._model)
        path = Path(message.path)
        if not path.is_absolute():
            problem = "lora_path must be absolute: a directory or a GGUF file on the worker's host"
            raise StatusError(Reason.INVALID_FIELD, problem, field="lora_path")
        return worker_pb2.LoadAdapterResponse(
            adapter=message_of(await self._library.load(message.name, path, in_place=message.in_place))
        )

    def unload(self, name: str) -> None:
        """See the proto. Raises StatusError."""
        if self._library is None:
            raise StatusError(Reason.UNSUPPORTED, _NO_ADAPTERS)
        self._library.unload(name)

    def list(self) -> worker_pb2.AdapterList:
        """All known adapters, by name, and how many fit into memory. Empty without a library."""
        if self._library is None:
            return worker_pb2.AdapterList()
        adapters = map(message_of, self._library.adapters())
        return worker_pb2.AdapterList(adapters=adapters, max_in_memory=self._library.num_slots)

    def describe(self, name: str) -> worker_pb2.Adapter | None:
        """The adapter of this name as a message; None if it is unknown."""
        adapter = None if self._library is None else self._library.known(name)
        return None if adapter is None else message_of(adapter)

    def in_memory(self) -> worker_pb2.AdapterNames:
        """The names of the adapters in memory."""
        return worker_pb2.AdapterNames(names=[] if self._library is None else self._library.in_memory())

    def counters(self) -> dict[str, int]:
        """Totals of loads and evictions since the start, as fields of `Counters`; empty without a library."""
        if self._library is None:
            return {}
        counters = self._library.counters
        return {"adapter_loads": counters.num_loads, "adapter_evictions": counters.num_evictions}

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` on changes; see `AdapterLibrary.listen`."""
        if self._library is not None:
            self._library.listen(listener)


def check_name(name: str, model: str) -> None:
    """Raise StatusError (INVALID_FIELD) unless an adapter of this model may have this name."""
    if not _NAME.fullmatch(name):
        problem = "lora_name must have 1 to 200 letters, digits and characters of _.:/@+-"
        raise StatusError(Reason.INVALID_FIELD, problem, field="lora_name")
    if name == model:
        raise StatusError(
            Reason.INVALID_FIELD, f"lora_name must not be {model!r}, which is the model's own name", field="lora_name"
        )


def message_of(adapter: Adapter) -> worker_pb2.Adapter:
    """The message that describes an adapter to routers and callers."""
    return worker_pb2.Adapter(
        name=adapter.name,
        sha256=adapter.sha256,
        path=str(adapter.path),
        rank=adapter.rank,
        num_bytes=adapter.num_bytes,
        is_in_memory=adapter.is_in_memory,
        created_s=adapter.created_s,
    )
