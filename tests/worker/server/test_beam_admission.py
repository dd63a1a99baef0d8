"""A beam search is refused by the name of the field that it cannot have."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.protos.inference_pb2 import EARLY_STOPPING_NEVER, BeamSearch, GenerateRequest, SamplingParams
from headrace.protos.status import Reason, StatusError
from headrace.worker.kv.beams import BeamLimits
from headrace.worker.request.params import BeamParams, EarlyStopping
from headrace.worker.request.request import Request
from headrace.worker.server.admission import DecodedRequest, ModelLimits, admit

BEAMS = BeamLimits(max_width=8, num_blocks=40, block_size=4)
LIMITS = ModelLimits("m", "f" * 64, 100, 400, frozenset({2}), beams=BEAMS)


def admitted(limits: ModelLimits = LIMITS, *, num_prompt_tokens: int = 10, **fields: Any) -> Request:
    """A request for four beams of up to 20 tokens, with other fields."""
    sampling = SamplingParams(**{"max_tokens": 20, "beam_search": BeamSearch(width=4), **fields})
    request = GenerateRequest(token_ids=range(num_prompt_tokens), sampling=sampling)
    return admit(DecodedRequest.of(request), limits, request_id="r", arrival_s=0.0)


def test_its_fields_arrive() -> None:
    search = BeamSearch(width=3, length_penalty=0.5, early_stopping=EARLY_STOPPING_NEVER)
    request = admitted(beam_search=search, seed=5, temperature=0.0, min_tokens=2, logprobs=1, stop_token_ids=[7])
    sampling = request.sampling
    assert sampling.beam_search == BeamParams(3, 0.5, EarlyStopping.NEVER)
    assert (sampling.temperature, sampling.min_tokens, sampling.num_logprobs) == (0.0, 2, 1)
    assert sampling.stop_token_ids == {2, 7}
    assert admitted().sampling.beam_search == BeamParams(4, 1.0, EarlyStopping.HEURISTIC)
    ended = BeamSearch(width=3, stop=["a", "é"], shown_token_ids=[9], shows_special_tokens=True)
    search = admitted(beam_search=ended).sampling.beam_search
    assert search is not None
    assert (search.stop, search.shown_token_ids, search.shows_special_tokens) == (("a", "é"), frozenset({9}), True)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"beam_search": BeamSearch()}, "sampling.beam_search.width"),
        ({"beam_search": BeamSearch(width=9)}, "sampling.beam_search.width"),
        ({"beam_search": BeamSearch(width=2, length_penalty=10.5)}, "sampling.beam_search.length_penalty"),
        ({"beam_search": BeamSearch(width=2, length_penalty=float("nan"))}, "sampling.beam_search.length_penalty"),
        ({"beam_search": BeamSearch(width=2, early_stopping=9)}, "sampling.beam_search.early_stopping"),
        ({"beam_search": BeamSearch(width=2, stop=["a"] * 65)}, "sampling.beam_search.stop"),
        ({"beam_search": BeamSearch(width=2, stop=["a" * 4097])}, "sampling.beam_search.stop"),
        ({"beam_search": BeamSearch(width=2, stop=[""])}, "sampling.beam_search.stop"),
        ({"beam_search": BeamSearch(width=2, shown_token_ids=[100])}, "sampling.beam_search.shown_token_ids"),
        ({"temperature": 0.5}, "sampling.temperature"),
        ({"top_k": 4}, "sampling.top_k"),
        ({"presence_penalty": 0.5}, "sampling.presence_penalty"),
        ({"mirostat": 2}, "sampling.mirostat"),
        ({"logit_bias": {3: 1.0}}, "sampling.logit_bias"),
        ({"allowed_token_ids": [3]}, "sampling.allowed_token_ids"),
        ({"bad_words": [{"token_ids": [3]}]}, "sampling.bad_words"),
        ({"samplers": ["SAMPLER_TOP_K"]}, "sampling.samplers"),
        ({"constraint": {"regex": "a"}}, "sampling.constraint"),
        ({"cache_eviction": {"max_cache_size": 64}}, "sampling.cache_eviction"),
    ],
)
def test_what_has_no_effect_or_is_out_of_range_is_named(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(StatusError) as raised:
        admitted(**fields)
    assert (raised.value.reason, raised.value.field) == (Reason.INVALID_FIELD, name)


def test_the_largest_answer_that_fits_the_cache_is_named() -> None:
    """Two full blocks of the prompt are shared; the other two tokens are in each beam's own."""
    assert admitted(max_tokens=34).sampling.max_tokens == 34
    with pytest.raises(StatusError, match="at most 34 with 4 beams") as raised:
        admitted(max_tokens=35)
    assert raised.value.field == "sampling.max_tokens"


def test_log_probabilities_of_an_answer_too_large_for_a_message_are_refused() -> None:
    limits = ModelLimits("m", "f" * 64, 100, 1 << 20, frozenset(), beams=BeamLimits(8, 1 << 20, 4))
    assert admitted(limits, max_tokens=1 << 17).num_sequences == 4
    with pytest.raises(StatusError, match="ask for fewer") as raised:
        admitted(limits, max_tokens=1 << 17, logprobs=1)
    assert raised.value.field == "sampling.logprobs"


def test_models_whose_layers_share_nothing_take_none() -> None:
    with pytest.raises(StatusError, match="not available for this model") as raised:
        admitted(ModelLimits("m", "f" * 64, 100, 400, frozenset({2})))
    assert raised.value.reason is Reason.UNSUPPORTED


def test_nothing_is_resumed() -> None:
    sampling = SamplingParams(max_tokens=20, beam_search=BeamSearch(width=2))
    request = GenerateRequest(token_ids=[1], sampling=sampling, resume_token_ids=[5])
    with pytest.raises(StatusError) as raised:
        admit(DecodedRequest.of(request), LIMITS, request_id="r", arrival_s=0.0)
    assert raised.value.field == "resume_token_ids"
