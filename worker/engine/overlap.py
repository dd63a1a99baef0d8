"""Work that overlaps with the kernels: the next step does not depend on it, so it runs while the kernels compute that
step.

    engine thread   schedule, build | kernels                           | sample, account
    second thread                   | read log-probabilities of the last
                                    | step and deliver its outputs; record
                                    | what is in new blocks

The kernels release the GIL, so this takes no additional time if it is shorter than the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from msgspec.structs import replace

from headrace.protos.status import StatusError
from headrace.worker.engine.isolation import IsolatedSampler
from headrace.worker.kv.cache import KVCache
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.request import Request, RequestState
from headrace.worker.request.step import RequestOutput, Sampled
from headrace.worker.sampling.logits import Logits

Deliver = Callable[[list[RequestOutput]], None]


class _Unread(NamedTuple):
    """Sampled tokens whose log-probabilities have not been read from the logits yet."""

    requests: Sequence[Request]
    logits: Logits
    sampled: Sequence[Sampled]


class Overlap:
    """Holds the outputs of a step until the next one is computed, and does the work described above.

    The engine thread calls `begin` before the kernels and `finish` after them. Between the two it touches neither this
    object nor any request.
    """

    def __init__(self, sampler: IsolatedSampler, kv_cache: KVCache) -> None:
        self._sampler = sampler
        self._kv_cache = kv_cache
        self._outputs: list[RequestOutput] = []
        self._unread: _Unread | None = None
        self._failed: set[Request] = set()
        self._executor = ThreadPoolExecutor(1, "overlap")
        self._work: Future[None] | None = None

    @property
    def has_outputs(self) -> bool:
        """Whether outputs are held that have not been delivered."""
        return bool(self._outputs)

    @property
    def reads_logits(self) -> bool:
        """Whether the logits of the last step must stay valid while the next one is computed."""
        return self._unread is not None

    def hold(self, outputs: Sequence[RequestOutput]) -> None:
        """Keep these outputs, to deliver them with the next step."""
        self._outputs += outputs

    def read_later(self, requests: Sequence[Request], logits: Logits, sampled: Sequence[Sampled]) -> None:
        """Read the log-probabilities of these tokens with the next step, for requests that want them."""
        if any(request.sampling.num_logprobs is not None for request in requests):
            self._unread = _Unread(requests, logits, sampled)

    def begin(self, deliver: Deliver) -> None:
        """Start the work of a step, while the kernels are about to run: deliver the held outputs with `deliver`, and
        record new blocks. If there is little to do, it is done at once."""
        if self._unread is None and not self._kv_cache.has_unsealed:
            self.deliver(deliver)  # too little to wake a thread for
        else:
            self._work = self._executor.submit(self._run, deliver)

    def finish(self) -> None:
        """Wait for the work. Raises what `deliver` raised."""
        work, self._work = self._work, None
        if work is not None:
            work.result()

    def deliver(self, deliver: Deliver) -> None:
        """Deliver the kept outputs at once."""
        deliver(self._take())

    def take_failed(self) -> set[Request]:
        """Requests whose log-probabilities could not be read since the last call. Their error has been delivered, so
        deliver nothing more for them."""
        failed, self._failed = self._failed, set()
        return failed

    def _run(self, deliver: Deliver) -> None:
        self.deliver(deliver)
        self.seal()

    def seal(self) -> None:
        """Record the content of new blocks. No block may be taken while this runs."""
        if self._kv_cache.has_unsealed:
            self._kv_cache.seal()

    def _take(self) -> list[RequestOutput]:
        """The outputs that are held, with their log-probabilities."""
        outputs, self._outputs = self._outputs, []
        unread, self._unread = self._unread, None
        if unread is None:
            return outputs
        entries: dict[Request, list[TokenLogprobs | StatusError]] = {}
        for request, entry in zip(unread.requests, self._sampler.logprobs(*unread), strict=True):
            if entry is not None:
                entries.setdefault(request, []).append(entry)
        complete = []
        for output in outputs:
            request = output.request
            found = entries.get(request, ())[: len(output.token_ids)]
            read = tuple(entry for entry in found if not isinstance(entry, StatusError))
            if not found:
                complete.append(output)
            elif len(read) < len(found):
                error = next(entry for entry in found if isinstance(entry, StatusError))
                complete.append(RequestOutput(request, output.start_pos, (), error=error))
                if request.state is not RequestState.FINISHED:
                    self._failed.add(request)
            else:
                complete.append(replace(output, logprobs=read))
        return complete
