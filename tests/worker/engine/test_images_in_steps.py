"""Images in steps: in chunks where the model allows that, else whole; and what samples and drafts beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headrace.worker.engine.step_budget import with_whole_images
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, make_engine
from tests.worker.fake_runner import expected_tokens
from tests.worker.images import Picture, Prompt, prompt_of, ready


def ask(engine: EngineUnderTest, prompt: Prompt, max_tokens: int = 4, **options: object) -> Request:
    return engine.request(prompt.token_ids, max_tokens, images=prompt.images, **options)


def run(engine: EngineUnderTest, requests: Sequence[Request]) -> None:
    """Run to the end. No step ends inside of an image that has to be whole, and all answers are right."""
    while engine.scheduler.has_requests or engine.engine.has_outputs:
        engine.step()
        for request in requests:
            assert request.whole_until(request.num_computed_tokens) == request.num_computed_tokens
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert engine.tokens[request] == expected_tokens(prompt, request.sampling.max_tokens, VOCAB_SIZE)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_answers_depend_on_every_token_of_every_image(seed: int, is_whole: bool) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=80, max_num_seqs=4, max_num_batched_tokens=16)
    beginnings = [[rng.randrange(9) for _ in range(rng.randrange(1, 9))] for _ in range(3)]
    requests = []
    for _ in range(30):
        parts: list[Sequence[int] | Picture] = [rng.choice(beginnings)]
        for _ in range(rng.randrange(4)):
            number = rng.randrange(5)
            parts += [Picture(number, 2 + 7 * number), [5] * rng.randrange(3)]
        prompt = ready(prompt_of(*parts, [8]), is_whole=is_whole)
        requests.append(ask(engine, prompt, rng.randrange(1, 12)))
    run(engine, requests)
    assert any(request.num_cached_tokens for request in requests)


def test_an_image_larger_than_a_step_is_computed_whole_beside_streams() -> None:
    engine = make_engine(num_blocks=200, max_num_seqs=4, max_num_batched_tokens=16)
    stream = engine.request([1, 2], 60)
    engine.step()
    prompts = [ready(prompt_of([number] * 5, Picture(number, 50), [3] * 20), is_whole=True) for number in range(3)]
    requests = [ask(engine, prompt) for prompt in prompts]
    run(engine, [stream, *requests])


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_cached_prefix_ends_at_the_border_of_an_image_that_is_whole(is_whole: bool) -> None:
    engine = make_engine()
    prompt = prompt_of([1, 2, 3], Picture(1, 13), [4])
    first = ask(engine, ready(prompt, is_whole=is_whole))
    run(engine, [first])
    second = ask(engine, ready(prompt, is_whole=is_whole))
    run(engine, [second])
    # All but the last two tokens are in the cache. The image has all but the first three and the last one.
    assert second.num_cached_tokens == (3 if is_whole else 15)
    longer = ask(engine, ready(prompt_of([1, 2, 3], Picture(1, 13), [4, 5, 6, 7]), is_whole=is_whole))
    run(engine, [longer])
    assert longer.num_cached_tokens >= 16


@pytest.mark.parametrize(
    ("start", "num_tokens", "may_exceed", "expected"),
    [
        (0, 4, True, 4),
        (0, 5, True, 5),
        (0, 7, True, 5),
        (5, 3, True, 10),
        (5, 3, False, 0),
        (4, 6, True, 11),
        (4, 6, False, 0),
        (3, 6, False, 2),
        (5, 10, False, 10),
        (5, 12, False, 10),
        (15, 2, False, 0),
        (15, 2, True, 7),
    ],
)
def test_chunks_end_before_or_behind_images(start: int, num_tokens: int, may_exceed: bool, expected: int) -> None:
    """Tokens 5 to 15 and 15 to 21 are images, and token 21 is the last."""
    prompt = ready(prompt_of([1] * 5, Picture(1, 10), Picture(2, 6), [2]), is_whole=True)
    request = Request("r", prompt.token_ids, SamplingParams(max_tokens=1, seed=0), 1, images=prompt.images)
    request.num_computed_tokens = start
    assert with_whole_images(request, num_tokens, may_exceed=may_exceed) == expected


@pytest.mark.parametrize("speculation", ["auto", "ngram"])
def test_drafts_of_earlier_text_have_no_tokens_of_images(speculation: str) -> None:
    engine = make_engine(speculation=speculation)
    plain = expected_tokens([*prompt_of([1, 2, 3], Picture(1, 9), [4, 5]).token_ids], 3, VOCAB_SIZE)
    prompt = ready(prompt_of([1, 2, 3], Picture(1, 9), [*plain, *plain, 4, 5], Picture(2, 5), [6]))
    request = ask(engine, prompt, 20)
    run(engine, [request])


def test_penalties_and_log_probabilities_do_not_read_tokens_of_images() -> None:
    engine = make_engine()
    prompt = ready(prompt_of([1, 2, 3], Picture(1, 9), [4, 5, 6]))
    request = ask(
        engine, prompt, 6, repetition_penalty=1.3, presence_penalty=0.5, num_prompt_logprobs=2, num_logprobs=1
    )
    engine.run()
    assert engine.last[request].error is None
    entries = list(request.prompt_logprobs)
    assert len(entries) == len(prompt.token_ids) - 1
    of_image = entries[2:11]
    assert {(entry.logprob, entry.rank) for entry in of_image} == {(0.0, 0)}
    assert all(len(entry.top_token_ids) == 2 for entry in entries)
    assert all(entry.rank > 0 for entry in (*entries[:2], *entries[11:]))
    assert max(token_id for entry in entries for token_id in entry.top_token_ids) < VOCAB_SIZE


@pytest.mark.parametrize(("end", "expected"), [(1, 0), (3, 0), (4, 4), (5, 5)])
def test_blocks_of_tiers_are_fetched_up_to_the_border_of_an_image_that_is_whole(end: int, expected: int) -> None:
    """The image has tokens 3 to 16, and a block 4."""
    cache = make_engine().scheduler.kv_cache
    prompt = ready(prompt_of([1, 2, 3], Picture(1, 13), [4] * 9), is_whole=True)
    request = Request("r", prompt.token_ids, SamplingParams(max_tokens=1, seed=0), 1, images=prompt.images)
    assert cache.num_fetchable(request, end, lambda block_hash: True) == expected
    request.images = ready(prompt).images
    assert cache.num_fetchable(request, end, lambda block_hash: True) == end
