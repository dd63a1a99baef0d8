"""Records the delivered part of one answer over all attempts, and makes the request that continues it. Pure.

    attempt 0   t0 t1 t2 |x                 the worker, the router or the connection is lost
    attempt 1            | t3 t4 ...        resume_token_ids = [t0, t1, t2], start_pos = 3

Gateways and routers keep one ledger for each answer. So each of them can continue the answer elsewhere, and its reader
sees a pause, but no gap and no repetition.
"""

from __future__ import annotations

from array import array

from headrace.protos.answer_bounds import closing_message
from headrace.protos.inference_pb2 import FINISH_REASON_LENGTH, GenerateRequest, GenerateResponse
from headrace.protos.worker_pb2 import ModelCard


class FencedError(Exception):
    """A message does not continue the delivered tokens. Nothing of it may reach the client."""


class Ledger:
    """The delivered tokens of one answer, the model that generated them, and whether the finish was delivered."""

    def __init__(self, request: GenerateRequest, num_prompt_tokens: int) -> None:
        """`request` may lack its prompt, which has `num_prompt_tokens` tokens. Its `resume_token_ids` count as
        delivered."""
        self.num_prompt_tokens = num_prompt_tokens
        self.token_ids = array("I", request.resume_token_ids)
        """The tokens so far."""
        self.max_context_tokens: int | None = None
        """The most tokens of prompt and answer together at the current worker; None: unknown."""
        self.model_identity = request.model_identity
        """The model that generated the tokens, as its worker reported it; empty if unknown."""
        self.is_finished = False
        self._request = request
        self._mirostat_mu = request.mirostat_mu if request.HasField("mirostat_mu") else None
        self._num_cached_tokens = 0
        self._num_before_attempt = 0
        self._longest_hypothesis = 0

    @property
    def num_delivered(self) -> int:
        """Tokens that were delivered by this process."""
        return len(self.token_ids) - len(self._request.resume_token_ids)

    @property
    def num_answer_tokens(self) -> int:
        """The length of the answer so far; of a beam search, that of its longest one."""
        return len(self.token_ids) or self._longest_hypothesis

    @property
    def has_progressed(self) -> bool:
        """Whether the current attempt has delivered a token."""
        return len(self.token_ids) > self._num_before_attempt

    def begin_attempt(self) -> None:
        """Begin a new attempt, which has delivered nothing yet and continues after the delivered tokens."""
        self._num_before_attempt = len(self.token_ids)

    def record(self, message: GenerateResponse) -> None:
        """Record a message that is about to be delivered.

        Raises FencedError if it does not start right after the delivered tokens, follows a finish, or makes the answer
        longer than the context of the current worker.
        """
        num_tokens = len(self.token_ids)
        token_ids = message.token_ids
        if self.is_finished:
            raise FencedError("it continued after its finish")
        if message.start_pos != num_tokens:
            raise FencedError(f"it sent position {message.start_pos} where {num_tokens} was expected")
        most = self.max_context_tokens
        if most is not None and self.num_prompt_tokens + num_tokens + len(token_ids) > most:
            raise FencedError(f"it sent more than the {most} tokens of the context hold")
        if message.HasField("num_cached_tokens"):  # the first message of an attempt
            self.model_identity = message.model_identity or self.model_identity
            if not self.num_delivered:  # clients get the number of the attempt that began the answer
                self._num_cached_tokens = message.num_cached_tokens
        if message.HasField("mirostat_mu"):
            self._mirostat_mu = message.mirostat_mu
        self.token_ids.extend(token_ids)
        self.is_finished = message.HasField("finish")
        if message.hypotheses:
            self._longest_hypothesis = message.finish.num_generated_tokens

    def take_early_end(self, message: GenerateResponse, longest: int) -> bool:
        """Remove the finish of a message if its worker ends the answer only because the context of that worker ends.
        Prompt and answer may have `longest` tokens together. Returns whether the finish was removed."""
        num_tokens = len(self.token_ids) + len(message.token_ids)
        is_at_end = self.num_prompt_tokens + num_tokens >= (self.max_context_tokens or 0)
        room = longest - self.num_prompt_tokens
        if self._request.sampling.HasField("max_tokens"):
            room = min(room, self._request.sampling.max_tokens)
        if message.finish.reason != FINISH_REASON_LENGTH or not is_at_end or num_tokens >= room:
            return False
        message.ClearField("finish")
        return True

    def resumption(self, request: GenerateRequest, attempt: int) -> GenerateRequest:
        """A copy of `request` that continues after the delivered tokens, with the model that began the answer."""
        again = GenerateRequest()
        again.CopyFrom(request)
        del again.resume_token_ids[:]
        again.resume_token_ids.extend(self.token_ids)
        if self.token_ids:
            again.model_identity = self.model_identity
        if self._mirostat_mu is not None:
            again.mirostat_mu = self._mirostat_mu
        again.attempt = attempt
        return again

    def closing_message(self, card: ModelCard) -> GenerateResponse | None:
        """The message with the finish, if the delivered tokens are a complete answer of the card's model; else None."""
        message = closing_message(self._request, self.num_prompt_tokens, self.token_ids, self._num_cached_tokens, card)
        if message is not None and self.num_delivered == 0:
            message.num_cached_tokens = self._num_cached_tokens
        return message
