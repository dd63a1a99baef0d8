"""The requests of a simulation with their arrival times. They are read from a file or generated.

A prompt is a sequence of segments, each an id and a number of tokens. Segments with the same id have the same tokens,
so two prompts share a prefix as long as their segments are equal. Token ids exist only while a request is in flight;
block hashes are computed once.

Pure, except for `read`.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np

from headrace.protos.block_hash import block_hashes
from headrace.router.placement.candidates import Places
from headrace.sim.images import IMAGE_TOKENS, placed_images
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request

ROOT_HASH = 0
# Token ids of answers start here. Token ids of prompts are smaller.
_ANSWER_TOKENS = 1 << 31
# Tokens per block in Mooncake traces.
MOONCAKE_BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Job:
    """A request of a trace. `number` is its index in the trace, and `arrival_s` the seconds from the trace's beginning.
    The prompt consists of `segments`, pairs of a token id and how many times it follows. `hashes` are those of the
    prompt's full blocks for the fleet's block size; `hashed` sets them."""

    number: int
    arrival_s: float
    segments: tuple[tuple[int, int], ...]
    num_output_tokens: int
    hashes: tuple[int, ...] = ()
    follows: int | None = None
    """The number of the job at whose end it arrives, `think_s` later, if `arrival_s` does not say when."""
    think_s: float = 0.0

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return sum(length for _, length in self.segments)

    @property
    def answer_token_id(self) -> int:
        """The token that this request's answer repeats. It occurs in no other answer."""
        return _ANSWER_TOKENS + self.number

    @property
    def image_places(self) -> Places | None:
        """The places of image tokens in the prompt, rising; None if there are none."""
        images = placed_images(self.segments)
        return np.concatenate([image.places for image in images]) if images else None

    def token_ids(self) -> array[int]:
        """Make the token ids of the prompt from its segments."""
        tokens = array("I")
        for segment, length in self.segments:
            tokens += array("I", (segment,)) * length
        return tokens

    def hashed(self, block_size: int) -> Job:
        """The same job with the hashes of its prompt's full blocks of `block_size` tokens."""
        return replace(self, hashes=tuple(block_hashes(ROOT_HASH, self.token_ids(), block_size)))

    def request(self, arrival_s: float, num_resumed: int = 0) -> Request:
        """The request for a worker's engine. `num_resumed` tokens of the answer are there already."""
        return Request(
            request_id=str(self.number),
            prompt_token_ids=self.token_ids(),
            sampling=SamplingParams(max_tokens=self.num_output_tokens, seed=0, temperature=0.0),
            root_hash=ROOT_HASH,
            resume_token_ids=(self.answer_token_id,) * num_resumed,
            arrival_s=arrival_s,
            block_hashes=list(self.hashes),
            images=placed_images(self.segments),
        )


class _Line(msgspec.Struct):
    """A line of a Mooncake trace: time in milliseconds, numbers of tokens, and the ids of 512-token prompt blocks."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def read(path: Path, limit: int | None = None) -> list[Job]:
    """Read the first `limit` requests of a Mooncake trace: one JSON object per line, in order of arrival.

    Raises OSError, or ValueError with the number of the line.
    """
    decode = msgspec.json.Decoder(_Line).decode
    jobs: list[Job] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if limit is not None and len(jobs) == limit:
                break
            try:
                jobs.append(_job_of(decode(line)))
            except (msgspec.DecodeError, ValueError) as error:
                raise ValueError(f"{path}, line {number}: {error}") from None
    jobs.sort(key=lambda job: job.arrival_s)
    return [replace(job, number=number) for number, job in enumerate(jobs)]


def _job_of(line: _Line) -> Job:
    if line.input_length < 1 or line.output_length < 1:
        raise ValueError("input_length and output_length must be at least 1")
    if not 0 <= len(line.hash_ids) * MOONCAKE_BLOCK_TOKENS - line.input_length < MOONCAKE_BLOCK_TOKENS:
        raise ValueError(f"{len(line.hash_ids)} hash_ids do not fit {line.input_length} tokens")
    segments = []
    left = line.input_length
    for block in line.hash_ids:
        if not 0 <= block < _ANSWER_TOKENS:
            raise ValueError(f"hash id {block} is not between 0 and 2^31 - 1")
        segments.append((block, min(left, MOONCAKE_BLOCK_TOKENS)))
        left -= MOONCAKE_BLOCK_TOKENS
    return Job(0, line.timestamp / 1000, tuple(segments), line.output_length)


@dataclass(frozen=True, slots=True)
class Generated:
    """A generated trace. Lengths are in tokens.

    Arrivals are a Poisson process. A prompt is a shared system prompt, chosen by Zipf's law, and a unique part of
    log-normal length. The lengths of answers are exponential.

    Conversations have `turns` turns on average (geometric). The prompt of a later turn is the previous turn's prompt
    and answer, and a unique part. `num_conversations` conversations are open at any time, and each request continues a
    random one. If its prompt would exceed `max_prompt_tokens`, the conversation ends and a new one starts.

    Requests arrive in bursts of `burst` on average (uniform from 1). The requests of a burst arrive at the same time
    and belong to different conversations.

    A share `image_share` of the requests bring a picture of `image_tokens` tokens in front of their unique part: one of
    `num_pictures`, chosen by Zipf's law, or with 0 a new one each.
    """

    num_requests: int = 2000
    num_system_prompts: int = 32
    system_prompt_tokens: int = 1024
    prompt_median: float = 400.0
    prompt_sigma: float = 1.0
    output_mean: float = 128.0
    max_prompt_tokens: int = 32_768
    max_output_tokens: int = 2048
    turns: float = 1.0
    num_conversations: int = 200
    burst: int = 1
    image_share: float = 0.0
    image_tokens: int = 576
    num_pictures: int = 0

    def __post_init__(self) -> None:
        if self.turns > 1 and self.num_conversations < 2 * self.burst - 1:
            raise ValueError(
                f"{self.num_conversations} conversations are too few for bursts of up to {2 * self.burst - 1} "
                "requests, because the requests of a burst belong to different conversations"
            )

    def jobs(self, rng: random.Random) -> list[Job]:
        """Generate the requests, one per second on average."""
        weights = [1 / (rank + 1) for rank in range(self.num_system_prompts)]
        pictures = [1 / (rank + 1) for rank in range(self.num_pictures)]
        jobs: list[Job] = []
        conversations: list[tuple[tuple[int, int], ...]] = [()] * self.num_conversations
        speakers: list[int] = []
        now_s = 0.0
        num_left = 0
        for number in range(self.num_requests):
            if num_left == 0:
                now_s += rng.expovariate(1 / self.burst)
                num_left = rng.randint(1, 2 * self.burst - 1) if self.burst > 1 else 1
                speakers = rng.sample(range(self.num_conversations), num_left) if self.turns > 1 else []
            num_left -= 1
            past = conversations[speakers[num_left]] if speakers else ()
            own = round(self.prompt_median * rng.lognormvariate(0.0, self.prompt_sigma))
            segments = [(self.num_system_prompts + number, min(max(own, 1), self.max_prompt_tokens))]
            if self.image_share and rng.random() < self.image_share:
                picture = rng.choices(range(self.num_pictures), pictures)[0] if pictures else number
                segments.insert(0, (IMAGE_TOKENS + picture, self.image_tokens))
            if sum(length for _, length in (*past, *segments)) > self.max_prompt_tokens:
                past = ()
            if past:
                segments[:0] = past
            elif weights:
                system = rng.choices(range(self.num_system_prompts), weights)[0]
                segments.insert(0, (system, self.system_prompt_tokens))
            output = min(1 + round(rng.expovariate(1 / self.output_mean)), self.max_output_tokens)
            job = Job(number, now_s, tuple(segments), output)
            jobs.append(job)
            if speakers:
                goes_on = rng.random() >= 1 / self.turns
                conversations[speakers[num_left]] = (*segments, (job.answer_token_id, output)) if goes_on else ()
        return jobs


def at_rate(jobs: Sequence[Job], per_s: float) -> list[Job]:
    """Scale the arrival times to `per_s` requests per second on average, starting at time 0."""
    first_s = jobs[0].arrival_s
    span_s = jobs[-1].arrival_s - first_s
    scale = (len(jobs) - 1) / per_s / span_s if span_s > 0 else 0.0
    return [replace(job, arrival_s=(job.arrival_s - first_s) * scale) for job in jobs]
