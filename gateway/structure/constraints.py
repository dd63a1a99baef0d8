"""Reads the constraints of requests in a thread: a grammar in GBNF takes up to a second to translate."""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor

from headrace.gateway.structure.fields import ConstraintFields, Gbnf, Structure, structure_of
from headrace.protos.status import Reason, StatusError

MAX_PENDING = 32


class Constraints:
    """Reads constraints. At most `MAX_PENDING` grammars wait for the threads; more are refused."""

    def __init__(self, executor: Executor) -> None:
        """`executor` translates grammars."""
        self._executor = executor
        self._num_pending = 0

    async def of(self, request: ConstraintFields) -> Structure | None:
        """The constraint that a request sets for its answer; None for any text. Raises `StatusError`."""
        found = structure_of(request)
        return await self._translated(found) if isinstance(found, Gbnf) else found

    async def _translated(self, gbnf: Gbnf) -> Structure:
        if self._num_pending >= MAX_PENDING:
            raise StatusError(Reason.QUEUE_FULL, "too many grammars are being translated", retry_after_s=1.0)
        self._num_pending += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._executor, gbnf.translated)
        finally:
            self._num_pending -= 1
