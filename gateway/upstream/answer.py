"""The answer of one generation, over all its attempts."""

from __future__ import annotations

from headrace.protos.answer_bounds import closing_message
from headrace.protos.inference_pb2 import GenerateRequest, GenerateResponse
from headrace.protos.worker_pb2 import ModelCard


class Answer:
    """The answer of one generation so far, over all attempts."""

    def __init__(self, request: GenerateRequest, num_prompt_tokens: int, card: ModelCard) -> None:
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._card = card
        self._identity = request.model_identity
        self._num_cached_tokens = 0
        self.delivered: list[int] = list(request.resume_token_ids)
        """The tokens so far."""

    def take(self, message: GenerateResponse) -> bool:
        """Add a message; False if it does not continue exactly after the delivered tokens: the stream is broken."""
        if token_ids := message.token_ids:
            if message.start_pos != len(self.delivered):
                return False
            self.delivered.extend(token_ids)
        if message.HasField("num_cached_tokens"):  # the first message of an attempt
            self._identity = message.model_identity or self._identity
            self._num_cached_tokens = self._num_cached_tokens or message.num_cached_tokens
        return True

    def closing(self) -> GenerateResponse | None:
        """The last message, if the answer is complete without it; see `closing_message`."""
        return closing_message(
            self._request, self._num_prompt_tokens, self.delivered, self._num_cached_tokens, self._card
        )

    def resumption(self, attempt: int) -> GenerateRequest:
        """The request that continues after the delivered tokens, with the model that began the answer."""
        resumption = GenerateRequest()
        resumption.CopyFrom(self._request)
        del resumption.resume_token_ids[:]
        resumption.resume_token_ids.extend(self.delivered)
        resumption.attempt = attempt
        if self.delivered:
            resumption.model_identity = self._identity
        return resumption
