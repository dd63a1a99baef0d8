"""The load of a plan, and its requests for the simulator. Lengths are in tokens. Pure."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headrace.bench.lengths import Lengths, Shape
from headrace.sim.trace import Job

# Sigma of log-normal lengths: a tenth is shorter than 0.36 of the median, a tenth longer than 2.8 times it.
_SIGMA = 0.8
# Token ids of prompts below this are those of shared prefixes.
_FIRST_OWN = 1 << 20
# After so many times the mean length of conversations, seven of eight that began with a run have ended.
_SETTLED = 2
# Those of answers that came back as other tokens.
_RETOLD = 1 << 30


def lengths(shape: Shape, mean: float, most: int) -> Lengths:
    """The distribution of lengths with this mean."""
    if shape == "lognormal":
        return Lengths(shape, mean / math.exp(_SIGMA**2 / 2), _SIGMA, most)
    return Lengths(shape, mean, 0.5 if shape == "uniform" else 0.0, most)


@dataclass(frozen=True, slots=True)
class Requests:
    """The requests of a load. Each conversation begins with one of `num_prefixes` prefixes of `prefix` tokens, unless
    that is 0, and has `turns` turns on average (geometric). A turn appends a prompt to the conversation so far. It
    repeats a share `reuse` of the answer before it token by token, so that a cache may have it; the rest of the answer
    has other tokens, as if it were text that is tokenized in another way. No request exceeds `most` tokens."""

    prompt: Lengths
    answer: Lengths
    mean_prompt: float
    mean_answer: float
    prefix: int = 0
    num_prefixes: int = 1
    turns: float = 1.0
    most: int = 1 << 20
    reuse: float = 1.0

    def __str__(self) -> str:
        told = [f"prompts of {self.mean_prompt:g} tokens and answers of {self.mean_answer:g} on average"]
        if self.prefix:
            of = f"one of {self.num_prefixes} prefixes" if self.num_prefixes > 1 else "a shared prefix"
            told.append(f"behind {of} of {self.prefix} tokens")
        if self.turns > 1:
            told.append(f"in conversations of {self.turns:g} turns")
        if self.reuse < 1:
            told.append(f"which repeat {self.reuse:.0%} of answers token by token")
        return ", ".join(told)

    def conversation(self, rng: random.Random, number: int) -> list[tuple[tuple[tuple[int, int], ...], int]]:
        """The turns of a conversation whose first request has this number: the segments of each prompt, and the length
        of its answer."""
        past: tuple[tuple[int, int], ...] = ()
        if self.prefix:
            past = ((rng.randrange(self.num_prefixes), self.prefix),)
        found: list[tuple[tuple[tuple[int, int], ...], int]] = []
        while not found or rng.random() >= 1 / self.turns:
            prompt, answer = self.prompt.draw(rng), self.answer.draw(rng)
            room = self.most - sum(length for _, length in past)
            if found and prompt + answer > room:
                break
            prompt = max(1, min(prompt, room // 2))
            answer = max(1, min(answer, room - prompt))
            segments = (*past, (_FIRST_OWN + number + len(found), prompt))
            found.append((segments, answer))
            answer_token = Job(number + len(found) - 1, 0.0, (), 0).answer_token_id
            same = round(self.reuse * answer)
            told = ((answer_token, same), (_RETOLD + number + len(found) - 1, answer - same))
            past = (*segments, *((token, length) for token, length in told if length))
        return found


@dataclass(frozen=True, slots=True)
class Load:
    """A load. Either requests come at random, `per_s` of them a second, or `users` ask, wait for the answer and think
    for `think_s` on average before they ask again, or a `trace` has the requests and their times."""

    requests: Requests | None = None
    per_s: float | None = None
    users: float | None = None
    think_s: float = 0.0
    trace: tuple[Job, ...] = ()
    name: str = ""
    """How the caller said it; empty to say it here."""

    def __str__(self) -> str:
        asked = self.name or (f"{self.per_s:.3g} requests/s" if self.per_s is not None else "a trace")
        if self.users is not None:
            asked = f"{self.users:g} users who think for {self.think_s:g} s after each answer"
        if self.requests is not None:
            return f"{asked}; {self.requests}"
        return asked

    def scaled(self, factor: float) -> Load:
        """This load multiplied by a factor."""
        return replace(
            self,
            per_s=None if self.per_s is None else factor * self.per_s,
            users=None if self.users is None else max(1.0, factor * self.users),
            trace=tuple(replace(job, arrival_s=job.arrival_s / factor) for job in self.trace),
            name=f"{self.name}, {factor:g} times as fast" if self.trace else "",
        )

    @property
    def offered_per_s(self) -> float:
        """The number of requests per second. For users, the number if answers took no time."""
        if self.per_s is not None:
            return self.per_s
        if self.users is not None:
            return self.users / max(self.think_s, 0.1)
        span_s = self.trace[-1].arrival_s - self.trace[0].arrival_s
        return (len(self.trace) - 1) / span_s if span_s > 0 else math.inf

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Tokens of a request on average: those of its prompt that no cache has, and those of its answer. Of a trace,
        any token of a prompt may be in a cache."""
        if self.requests is not None:
            return self.requests.mean_prompt, self.requests.mean_answer
        return 0.0, sum(job.num_output_tokens for job in self.trace) / len(self.trace)

    def settle_s(self, token_s: float) -> float:
        """The time after which nearly as many conversations end as begin, if a token of an answer takes `token_s`; 0
        without later turns."""
        if self.per_s is None or self.requests is None:
            return 0.0
        turn_s = self.think_s + self.requests.mean_answer * token_s
        return _SETTLED * (self.requests.turns - 1) * turn_s  # lengths of conversations are geometric

    def jobs(self, count: int, seed: int) -> list[Job]:
        """About `count` requests in order of arrival, the same for the same seed."""
        if self.trace:
            return list(self.trace)
        assert self.requests is not None
        rng = random.Random(seed)
        return self._of_users(self.requests, count, rng) if self.users is not None else self._open(count, rng)

    def _open(self, count: int, rng: random.Random) -> list[Job]:
        """Conversations that begin at random. Later turns come when the one before is answered and the user has
        thought."""
        assert self.requests is not None
        assert self.per_s is not None
        jobs: list[Job] = []
        now_s = 0.0
        while len(jobs) < count:
            now_s += rng.expovariate(self.per_s / self.requests.turns)
            first = len(jobs)
            for turn, (segments, answer) in enumerate(self.requests.conversation(rng, first)):
                follows = None if turn == 0 else first + turn - 1
                think_s = rng.expovariate(1 / self.think_s) if self.think_s and turn else 0.0
                jobs.append(Job(first + turn, now_s if turn == 0 else 0.0, segments, answer, (), follows, think_s))
        return jobs

    def _of_users(self, requests: Requests, count: int, rng: random.Random) -> list[Job]:
        assert self.users is not None
        users = round(self.users)
        each = max(2, -(-count // users))
        jobs: list[Job] = []
        for _ in range(users):
            previous: int | None = None
            end = len(jobs) + each
            while len(jobs) < end:
                for segments, answer in requests.conversation(rng, len(jobs))[: end - len(jobs)]:
                    at_s = rng.uniform(0.0, self.think_s) if previous is None and self.think_s else 0.0
                    think_s = rng.expovariate(1 / self.think_s) if self.think_s else 0.0
                    jobs.append(Job(len(jobs), at_s, segments, answer, (), previous, think_s))
                    previous = len(jobs) - 1
        return jobs


def chain_ends(jobs: Sequence[Job]) -> set[int]:
    """The numbers of the last requests of all chains of requests that follow each other."""
    followed = {job.follows for job in jobs if job.follows is not None}
    return {job.number for job in jobs if job.number not in followed}
