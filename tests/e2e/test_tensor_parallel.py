"""`headrace serve --tensor-parallel 2`: one model in two processes. One of them dies, or stops, under load.

`make test` disturbs a few times. With `python -m tests.soak ranks` there are two groups, and it is 200 times, or
HEADRACE_SOAK_ROUNDS, in one run or in several (see `soak_tally`). HEADRACE_SEED repeats the choices.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np
import openvino as ov
import pytest

from headrace.worker.model.adapted_linears import find_linears
from headrace.worker.model.paging import read_paged
from tests.e2e.groups import (
    IS_SOAK,
    NUM_ROUNDS,
    Fault,
    Group,
    Scene,
    hang_any,
    hang_last,
    joining_worker,
    kept,
    kill_any,
    kill_last,
    nothing_left,
    ranks_behind,
    served_worker,
    slow_down_any,
    survive,
    tally_of,
)
from tests.e2e.serving import HTTP, MODEL, Serve, headrace, serving
from tests.e2e.small_model import small_model
from tests.e2e.streams import Stream, chat_body, run_streams
from tests.patience import patience, until
from tests.worker.adapters.files import tensors_of, write_adapter
from tests.worker.draft_heads.files import TARGET_SIZE, VOCAB_SIZE, write_heads

# A rank needs a CPU of its own.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs"),
]

NUM_STREAMS, MAX_TOKENS = 8, 40
# Names and ranks of adapters.
ADAPTERS = {"low": 4, "high": 20}
ADMIN_KEY = "an admin key of some length"
# Of log-probabilities, which sums over ranks change in their low bits.
TOLERANCE = 1e-3
PROMPTS = [[(7 * number + 13 * place) % 40_000 for place in range(20 + 50 * number)] for number in range(4)]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 30, 200]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Token(NamedTuple):
    """A token of an answer, and the log-probabilities of the likeliest."""

    token_id: int
    likeliest: dict[str, float]


def answer(base_url: str, prompt: list[int], model: str = MODEL) -> tuple[list[Token], int]:
    """The greedy answer, and how many tokens of the prompt were cached."""
    asked = {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    response = HTTP.post(f"{base_url}/v1/completions", json={**asked, "logprobs": 3, "return_token_ids": True})
    assert response.status_code == 200, response.text
    body = response.json()
    (choice,) = body["choices"]
    tokens = map(Token, choice["token_ids"], choice["logprobs"]["top_logprobs"])
    return list(tokens), body["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the small model, the second of a higher rank."""
    linears = find_linears(read_paged(ov.Core(), small_model()).graph)
    made, found = tmp_path_factory.mktemp("adapters"), {}
    for seed, (name, rank) in enumerate(ADAPTERS.items()):
        tensors = {key: values / 16 for key, values in tensors_of(rank, seed, linears).items()}
        found[name] = write_adapter(made / name, rank=rank, tensors=tensors)
    return found


def structured(base_url: str) -> list[tuple[str, float]]:
    """The greedy answer in a schema: its tokens and their log-probabilities."""
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 60}
    response = HTTP.post(f"{base_url}/v1/chat/completions", json={**asked, "logprobs": True, "response_format": wanted})
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]


class Whole(NamedTuple):
    """The answers of the undivided model, and with each adapter, and the answer in a schema."""

    answers: dict[str, list[list[Token]]]
    structured: list[tuple[str, float]]


@pytest.fixture(scope="module")
def of_whole(adapters: dict[str, Path]) -> Whole:
    named = [part for name, path in adapters.items() for part in ("--adapter", f"{name}={path}")]
    flags = ("--workers", "1", "--threads", "1", "--execution-mode", "accuracy")
    with serving(*flags, *named, model=small_model()) as system:
        answers = {
            model: [answer(system.base_url, prompt, model)[0] for prompt in PROMPTS] for model in (MODEL, *ADAPTERS)
        }
        return Whole(answers, structured(system.base_url))


def flags_of_groups() -> tuple[str, ...]:
    """Those of a worker of two ranks whose KV cache is too small for all streams of these tests at once, and which
    counts as stuck soon."""
    flags = ("--tensor-parallel", "2", "--execution-mode", "accuracy", "--kv-cache-gb", "0.003")
    return (*flags, "--stuck-after-s", f"{patience(3):.1f}", "--max-adapters", "2")


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serve]:
    """One worker of two ranks."""
    key = tmp_path_factory.mktemp("keys") / "admin.key"
    key.write_text(ADMIN_KEY + "\n")
    # Requests wait: on a crowded machine a step takes a second.
    flags = ("--workers", "1", "--admin-key-file", str(key), "--max-ttft", "600", *flags_of_groups())
    with nothing_left(), serving(*flags, model=small_model()) as system:
        yield system


@pytest.fixture(scope="module")
def groups(group: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Group]]:
    """The same worker. In a soak there is another one, whose cache is a file in the shared memory."""
    found = [Group("worker-0", lambda: served_worker(group), ranks_behind)]
    with contextlib.ExitStack() as stack:
        if IS_SOAK:
            memory = ("--kv-memory", stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
            joined = joining_worker(group, "worker-b", tmp_path_factory.mktemp("b"), *flags_of_groups(), *memory)
            stack.enter_context(kept([joined]))
            found.append(Group("worker-b", lambda: joined.pid, ranks_behind))
            until(lambda: len(group.workers()) == 2, "both workers are there", 60)
        yield found


def ranks_of(system: Serve) -> list[int]:
    """The processes of the ranks besides the worker's own."""
    return ranks_behind(served_worker(system))


def test_greedy_answers_are_those_of_the_undivided_model(of_whole: Whole, group: Serve) -> None:
    assert len(ranks_of(group)) == 1
    for prompt, expected in zip(PROMPTS, of_whole.answers[MODEL], strict=True):
        assert_like(answer(group.base_url, prompt)[0], expected)


def test_structured_output_is_that_of_the_undivided_model(of_whole: Whole, group: Serve) -> None:
    found = structured(group.base_url)
    assert [token for token, _ in found] == [token for token, _ in of_whole.structured]
    assert all(abs(mine - other) < TOLERANCE for (_, mine), (_, other) in zip(found, of_whole.structured, strict=True))
    assert json.loads("".join(token for token, _ in found)).keys() == SCHEMA["properties"].keys()


def assert_like(found: list[Token], expected: list[Token]) -> None:
    """Two answers have the same tokens and log-probabilities, up to low bits."""
    assert len(found) == len(expected)
    for mine, other in zip(found, expected, strict=True):
        common = mine.likeliest.keys() & other.likeliest.keys()
        assert len(common) >= 2
        assert all(abs(mine.likeliest[name] - other.likeliest[name]) < TOLERANCE for name in common)
        if mine.token_id != other.token_id:
            # Two tokens are equally likely. What follows is another text.
            first, second = sorted(other.likeliest.values(), reverse=True)[:2]
            assert first - second < TOLERANCE
            break


def test_adapters_come_and_go_while_a_group_serves(of_whole: Whole, group: Serve, adapters: dict[str, Path]) -> None:
    """Requests with two adapters and without any, at the same time, answer as on the undivided model. The second has a
    higher rank, so both ranks get other memory while requests run."""
    asked = [(model, number) for number in range(len(PROMPTS)) for model in (MODEL, *ADAPTERS)]
    answer(group.base_url, PROMPTS[3])
    with ThreadPoolExecutor(len(asked)) as pool:

        def answers(models: tuple[str, ...]) -> list[Future[tuple[list[Token], int]]]:
            return [pool.submit(answer, group.base_url, PROMPTS[number], model) for model, number in asked
                    if model in models]  # fmt: skip

        first, second = ADAPTERS
        load(group, first, adapters[first])
        assert answer(group.base_url, PROMPTS[3], first)[1] == 0, "no block of the model without adapter"
        assert answer(group.base_url, PROMPTS[3], first)[1] > 0
        early = answers((MODEL, first))
        load(group, second, adapters[second])
        together = answers((MODEL, first, second))
        for models, futures in (((MODEL, first), early), ((MODEL, first, second), together)):
            wanted = [of_whole.answers[model][number] for model, number in asked if model in models]
            for future, expected in zip(futures, wanted, strict=True):
                assert_like(future.result()[0], expected)
    different = [tokens[0].likeliest for tokens in (of_whole.answers[model][3] for model in (MODEL, first, second))]
    assert different[0] != different[1] != different[2]
    for name in ADAPTERS:
        assert operate(group, "unload_lora_adapter", {"lora_name": name}).status_code == 200
    refused = HTTP.post(f"{group.base_url}/v1/completions", json={"model": first, "prompt": PROMPTS[0]})
    assert refused.status_code == 404
    assert_like(answer(group.base_url, PROMPTS[1])[0], of_whole.answers[MODEL][1])


def operate(system: Serve, what: str, body: dict[str, str]) -> httpx.Response:
    """Send what only operators may."""
    return HTTP.post(f"{system.base_url}/v1/{what}", json=body, headers={"authorization": f"Bearer {ADMIN_KEY}"})


def load(system: Serve, name: str, path: Path) -> None:
    loaded = operate(system, "load_lora_adapter", {"lora_name": name, "lora_path": str(path)})
    assert loaded.status_code == 200, loaded.text


def test_cached_prefixes_are_found_and_change_nothing(group: Serve) -> None:
    prompt = [(11 * place) % 40_000 for place in range(200)]
    first, second = answer(group.base_url, prompt), answer(group.base_url, prompt)
    assert (first[1], second[1]) == (0, 192)
    assert [token.token_id for token in first[0]] == [token.token_id for token in second[0]]


def test_status_and_metrics_show_one_worker_with_its_ranks(group: Serve) -> None:
    first, second = group.process_of("worker-0")["ranks"]
    assert first["cpus"] != second["cpus"]
    assert first["step_s"] > first["wait_s"] >= 0
    name = "headrace_worker_rank_step_seconds_total"
    ranks = [f'{name}{{rank="{rank}",stage="",worker="worker-0"}} ' for rank in (0, 1)]
    page = HTTP.get(f"{group.base_url}/metrics").text
    assert all(any(line.startswith(rank) for line in page.splitlines()) for rank in ranks)


def test_a_draft_model_on_the_first_rank_changes_no_token(group: Serve) -> None:
    prompt = [(19 * place) % 40_000 for place in range(90)]
    expected, _ = answer(group.base_url, prompt)
    flags = ("--tensor-parallel", "2", "--workers", "1", "--execution-mode", "accuracy", "--kv-cache-gb", "0.01")
    draft = ("--speculation", "draft", "--draft-model", str(small_model()))
    with serving(*flags, *draft, model=small_model()) as system:
        # Whether it is asked for tokens depends on measured costs of steps; test_division.py sets them.
        found, _ = answer(system.base_url, prompt)
    assert [token.token_id for token in found] == [token.token_id for token in expected]


def head_for(token_id: int, directory: Path) -> Path:
    """A head in the format of Medusa that always proposes this token."""
    tensors = {
        "0.0.linear.weight": np.zeros((TARGET_SIZE, TARGET_SIZE), np.float32),
        "0.0.linear.bias": np.full(TARGET_SIZE, 30, np.float32),
        "0.1.weight": np.zeros((VOCAB_SIZE, TARGET_SIZE), np.float32),
    }
    tensors["0.1.weight"][token_id] = 1
    return write_heads(directory, {"medusa_num_heads": 1, "medusa_num_layers": 1}, tensors)


def test_heads_on_the_first_rank_draft_and_change_no_token(of_whole: Whole, tmp_path: Path) -> None:
    """The head proposes the token that is in most places of the answers, so it is right in some places and wrong in
    others."""
    expected = of_whole.answers[MODEL]
    ((token_id, _),) = Counter(token.token_id for tokens in expected for token in tokens).most_common(1)
    heads = ("--draft-model", str(head_for(token_id, tmp_path / "heads")))
    flags = ("--tensor-parallel", "2", "--workers", "1", "--execution-mode", "accuracy", "--kv-cache-gb", "0.01")
    with serving(*flags, *heads, model=small_model()) as system:

        def has_drafted() -> bool:
            """Drafts begin when the costs of steps are known."""
            for prompt, tokens in zip(PROMPTS, expected, strict=True):
                assert_like(answer(system.base_url, prompt)[0], tokens)
            drafts = system.process_of("worker-0")["draft_tokens_by_proposer"].get("medusa")
            return drafts is not None and drafts["drafted"] > drafts["accepted"] > 0

        until(has_drafted, "some tokens of the head are right, and others wrong", 60)
        assert len(ranks_of(system)) == 1


def bodies(**sampling: Any) -> list[dict[str, Any]]:
    return [chat_body(number, MAX_TOKENS, **sampling) for number in range(NUM_STREAMS)]


def results(streams: list[Stream]) -> list[Any]:
    return [stream.result for stream in streams]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.9, "top_p": 0.95, "seed": 11}])
async def test_streams_that_are_preempted_are_the_same(group: Serve, sampling: dict[str, Any]) -> None:
    alone = [(await run_streams(group.base_url, [body]))[0] for body in bodies(**sampling)]
    before = group.metric("headrace_worker_preemptions_total")
    together = await run_streams(group.base_url, bodies(**sampling))
    assert results(together) == results(alone)
    assert all(stream.is_done for stream in together)
    until(lambda: group.metric("headrace_worker_preemptions_total") > before, "a preemption")


def kill_rank(system: Serve) -> None:
    """A rank dies."""
    os.kill(ranks_of(system)[0], signal.SIGKILL)


def kill_worker_of_a_stopped_rank(scene: Scene) -> None:
    """The worker dies while a rank cannot notice it."""
    worker, rank = scene.processes
    os.kill(rank, signal.SIGSTOP)
    os.kill(worker, signal.SIGKILL)


def assert_restored(scene: Scene) -> None:
    """The blocks of the ranks have outlived the worker."""
    info = scene.info()
    assert info is not None
    assert not scene.num_cached_blocks or info.load.counters.blocks_restored > 0


@pytest.mark.timeout(300 + 60 * NUM_ROUNDS)
async def test_streams_survive_what_happens_to_a_rank(group: Serve, groups: list[Group]) -> None:
    faults = [
        Fault("a death", kill_last, replaces=True, check=assert_restored),
        Fault("a death beside a stopped rank", kill_worker_of_a_stopped_rank, replaces=True, check=assert_restored),
        Fault("a hang", hang_last, replaces=False),
        Fault("a slow-down", slow_down_any, replaces=False),
    ]
    of_any = [
        Fault("any death", kill_any, replaces=True, check=assert_restored),
        Fault("any hang", hang_any, replaces=False),
    ]
    faults += of_any if IS_SOAK else []
    asked = bodies(temperature=0.9, top_p=0.95, seed=7)
    await survive(group, groups, faults, asked, NUM_ROUNDS or len(faults), tally_of("ranks"))


def test_prefixes_outlive_the_worker_on_a_disk(tmp_path: Path) -> None:
    """The file has whole blocks: the parts of both ranks. Those of the second come back into its memory."""
    flags = ("--tensor-parallel", "2", "--workers", "1", "--execution-mode", "accuracy", "--kv-cache-gb", "0.003")
    flags += ("--no-warm-restart",)
    prompt = [(13 * place) % 40_000 for place in range(300)]
    flags += ("--kv-disk", str(tmp_path), "--kv-disk-gb", "0.1")
    with serving(*flags, model=small_model()) as system:
        first, cached = answer(system.base_url, prompt)
        assert cached == 0
        for number in range(12):  # its blocks make room for others
            answer(system.base_url, [(17 * place + number) % 40_000 for place in range(500)])
        again, cached = answer(system.base_url, prompt)
        assert cached == 288
        before = system.metric("headrace_worker_prompt_tokens_from_disk_total")
        assert before > 0
        kill_rank(system)
        until(lambda: system.process_of("worker-0")["restarts"] == 1, "the worker is restarted", 120)
        until(lambda: system.process_of("worker-0")["state"] == "ready", "the worker is back", 120)
        after, cached = answer(system.base_url, prompt)
        assert cached == 288
    assert [token.token_id for token in again] == [token.token_id for token in first]
    assert [token.likeliest for token in after] == [token.likeliest for token in first]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (("--decode-graph", "on"), "--tensor-parallel 2 is not possible with --decode-graph on"),
        (("--cache-eviction", "on-request"), "--tensor-parallel 2 is not possible with --cache-eviction"),
    ],
)
def test_what_cannot_be_combined_is_refused_in_one_sentence(flags: tuple[str, ...], problem: str) -> None:
    done = headrace("serve", str(small_model()), "--port", "0", "--tensor-parallel", "2", *flags, timeout_s=60)
    assert done.returncode == 2
    assert problem in done.stderr.splitlines()[-1]


def test_the_plan_says_what_a_worker_gets() -> None:
    done = headrace("serve", MODEL, "--tensor-parallel", "2", "--workers", "1", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "in each of 2 ranks" in done.stdout
