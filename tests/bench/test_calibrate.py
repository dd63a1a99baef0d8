"""Calibrating: what is made of records and logs, and of a running fleet."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.bench.__main__ import main
from headrace.bench.calibrating import (
    CELLS,
    CalibrateError,
    _cpu_costs,
    _without,
    front_s,
    learned_of,
    loaded_front_s,
    resolved,
)
from headrace.bench.calibration import this_host
from headrace.bench.connection import Client, ExchangeError
from headrace.bench.fleet import fleet_in, fleet_of
from headrace.bench.record import Record
from headrace.bench.serving import sizes_in
from headrace.bench.target import target_of
from headrace.cli.serving.machine import describe_plan
from headrace.cli.serving.placement import WorkerPlace
from headrace.common.commands import run
from headrace.sim.step_logs import LoggedStep

COST = {
    "step_ms": 8.0,
    "token_ms": 0.2,
    "attended_ms": 0.1,
    "read_ms": 2.0,
    "sequence_ms": 0.1,
    "change_ms": 1.0,
    "num_steps": 40,
}


def worker(name: str = "w0", host: str = "a", **load: Any) -> dict[str, Any]:
    own = {
        "num_blocks": 100,
        "num_window_slots": 0,
        "max_num_seqs": 64,
        "step_costs": {"prompt": COST, "decode": COST},
        **load,
    }
    return {"worker_id": name, "host": host, "state": "ready", "model": "m", "load": own}


def fleet(*workers: dict[str, Any], intervals: list[dict[str, int]] | None = None) -> dict[str, Any]:
    model = {
        "id": "m",
        "fingerprint": "0",
        "max_context_tokens": 2048,
        "block_size": 32,
        "kv_block_bytes": 3200,
        "kv_part_bytes": 0,
        "window_tokens": 0,
        "kv_precision": "u8",
        "vocab_size": 1000,
    }
    recent = {
        "interval_s": 2.0,
        "next": 9,
        "num_intervals": 150,
        "ttft_ms": {"p50": None},
        "intervals": intervals or [],
    }
    return {"workers": list(workers), "models": [model], "recent": recent}


def interval(number: int, answered: int, tokens: int) -> dict[str, int]:
    counts = {"answered": answered, "tokens": tokens, "prompt_tokens": 100 * answered, "cached_tokens": 40 * answered}
    return {"number": number, "refused": 0, "failed": 0, **counts}


def step(start_s: float, ms: float, prompt_tokens: int = 0) -> LoggedStep:
    return LoggedStep("w", start_s, ms, "main", max(1, prompt_tokens), 0, 0, 0, 1, prompt_tokens, False)


def test_the_front_takes_what_is_before_the_first_step_and_after_the_first_token() -> None:
    record = Record(0, 64, 3, sent_s=10.0, times=[10.113, 10.13], ended_s=10.15)
    steps = [step(10.01, 60.0, 64), step(10.07, 40.0, 32), step(10.112, 9.0), step(20.0, 9.0, 64)]
    inward_s, outward_s = front_s([record], steps)
    assert inward_s == pytest.approx(0.01)
    assert outward_s == pytest.approx(0.003)
    assert front_s([], steps) == (0.0, 0.0)


def test_under_load_the_front_takes_the_time_with_which_most_requests_agree() -> None:
    """Steps of 50 ms without a pause; a request takes 8 ms to its worker and a token 3 ms back."""
    rng = random.Random(1)
    lengths = {place: 100 + place for place in rng.sample(range(1, 400), 60)}
    steps = [step(0.05 * place, 49.0, lengths.get(place, 0)) for place in range(400)]
    records = []
    for place, length in lengths.items():
        came_s = 0.05 * (place - 1) + rng.uniform(0.0, 0.05)
        record = Record(0, length, 3, sent_s=came_s - 0.008, times=[0.05 * place + 0.049 + 0.003])
        records.append(record)
    found = loaded_front_s(records, steps)
    assert found is not None
    assert found[0] == pytest.approx(0.008, abs=0.004)
    assert found[1] == pytest.approx(0.003)
    late = Record(0, 500, 3, sent_s=5.0, times=[6.0])
    assert loaded_front_s([*records, late], steps) == found, "a prompt whose step is not found"
    assert loaded_front_s(records[:10], steps) is None


def test_a_worker_that_was_idle_began_when_the_request_came() -> None:
    lengths = range(100, 130)
    steps = [step(float(place), 40.0, length) for place, length in enumerate(lengths)]
    records = [
        Record(0, length, 1, sent_s=place - 0.006, times=[place + 0.042]) for place, length in enumerate(lengths)
    ]
    assert loaded_front_s(records, steps) == pytest.approx((0.006, 0.002))


def test_cpu_time_is_divided_among_requests_and_tokens() -> None:
    per_request, per_token = _cpu_costs((100 * 0.004 + 3000 * 0.0002, 100, 3000), (96 * 0.004 + 96 * 0.0002, 96, 96))
    assert per_request == pytest.approx(0.004)
    assert per_token == pytest.approx(0.0002)
    assert _cpu_costs((1.0, 0, 0), (1.0, 0, 0)) == (0.0, 0.0)


def test_flags_of_the_layout_are_not_said_twice() -> None:
    flags = ["--workers", "2", "--kv-cache-gb", "1", "--threads=1", "--speculation", "off"]
    assert _without(flags, "--workers", "--threads") == ("--kv-cache-gb", "1", "--speculation", "off")


@pytest.mark.parametrize(
    ("flags", "num_ranks", "expected"),
    [
        (("--tensor-parallel", "auto", "--kv-cache-gb", "1"), 2, ("--kv-cache-gb", "1", "--tensor-parallel", "2")),
        (("--kv-cache-gb", "1", "--tensor-parallel=auto"), 4, ("--kv-cache-gb", "1", "--tensor-parallel", "4")),
        (("--tensor-parallel", "auto"), 1, ()),
        (("--tensor-parallel", "2"), 2, ("--tensor-parallel", "2")),
        (("--name", "auto"), 1, ("--name", "auto")),
    ],
)
def test_the_number_of_ranks_that_was_chosen_is_written(
    flags: tuple[str, ...], num_ranks: int, expected: tuple[str, ...]
) -> None:
    """Not that it was chosen here: `headrace worker` takes no `auto`, and on another host it may be another number."""
    assert resolved(flags, num_ranks) == expected


def test_the_sizes_of_workers_are_those_that_serve_plans() -> None:
    places = [WorkerPlace(0, (0, 1, 2, 3), 4, 2, (1,)), WorkerPlace(2, (8, 9), 2)]
    assert sizes_in(describe_plan(places)) == [(4, 2), (2, 1)]


def test_cells_begin_with_small_ones() -> None:
    assert CELLS[0].work == min(cell.work for cell in CELLS)
    assert {cell.batch for cell in CELLS} >= {1, 2, 4, 8, 16, 32, 64, 128}


def test_this_host_has_cores_memory_and_a_name() -> None:
    host = this_host()
    assert host.cpu
    assert 1 <= host.cores <= host.cpus
    assert host.memory_bytes > 1 << 28


def test_siblings_count_as_one_core(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "\n\n".join(f"processor: {n}\nmodel name: A chip\nphysical id: 0\ncore id: {n // 2}" for n in (0, 1, 99, 100))
    )
    host = this_host(tmp_path, tmp_path)
    assert (host.cpu, host.cores, host.nodes) == ("A chip", 1, 1)


def test_a_running_fleet_tells_what_its_workers_have_learned() -> None:
    fast, slow = (worker(name, transfer_bytes_per_s=speed) for name, speed in (("w1", 3e8), ("w3", 1e8)))
    found = fleet_in(fleet(worker("w0"), fast, worker("w2", "b", num_blocks=80), slow), None)
    assert (found.num_workers, found.num_hosts, found.kv_tokens, found.max_num_seqs) == (4, 2, 80 * 32, 64)
    made = learned_of(found)
    assert made.peer_bytes_per_s == 2e8
    assert learned_of(fleet_in(fleet(worker()), None)).peer_bytes_per_s == 0
    assert made.source == "learned"
    assert made.layout.workers == 2
    assert made.model.kv_token_bytes == 100
    assert made.steps.decode.base == pytest.approx((8.2, 8.4))
    assert made.steps.prompts.per_attended == pytest.approx(0.0001)


def test_its_load_is_that_of_the_intervals_with_answers() -> None:
    intervals = [interval(4, 0, 10), interval(5, 3, 50), interval(8, 5, 20)]
    load = fleet_in(fleet(worker(), intervals=intervals), None).load
    assert load is not None
    assert load.seconds == 10
    assert (load.per_s, load.prompt, load.cached, load.answer) == (0.8, 100, 40, 10)
    assert (load.num_refused, load.ttft_p50_ms) == (0, None)
    told = fleet(worker(), intervals=[{**interval(4, 2, 10), "refused": 3}])
    told["recent"]["ttft_ms"] = {"p50": 12.5, "p95": 80.0}
    load = fleet_in(told, None).load
    assert load is not None
    assert (load.num_refused, load.ttft_p50_ms, load.ttft_p95_ms) == (3, 12.5, 80.0)
    assert fleet_in(fleet(worker()), None).load is None


@pytest.mark.parametrize(
    ("body", "model", "problem"),
    [
        (fleet(), None, "no worker of m is ready"),
        (fleet(worker()), "other", "no model 'other' that generates text; it has m"),
        (fleet({**worker(), "state": "draining"}), None, "no worker of m is ready"),
    ],
)
def test_what_cannot_be_planned_for_is_named(body: dict[str, Any], model: str | None, problem: str) -> None:
    with pytest.raises(ExchangeError, match=problem):
        fleet_in(body, model)


def test_a_gateway_that_does_not_answer_is_named() -> None:
    class Silent(Client):
        async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
            raise ExchangeError("timeout", "no whole answer within 15 s")

    with pytest.raises(ExchangeError, match="http://a:80 does not tell of its fleet: no whole answer within 15 s"):
        asyncio.run(fleet_of(Silent(target_of("http://a", {}, None, False), 15.0)))


def test_workers_that_have_learned_nothing_are_named_with_the_remedy() -> None:
    with pytest.raises(CalibrateError, match="send some requests first"):
        learned_of(fleet_in(fleet(worker(step_costs={})), None))


@pytest.mark.parametrize(
    ("args", "status", "problem"),
    [
        (["-o", f"{__file__}/c.json"], 2, f"cannot write to {__file__}/c.json: {__file__} is not a directory"),
        (["--seconds", "3"], 2, "is not in the range x>=5"),
        (["--url", "http://127.0.0.1:9", "--workers", "2"], 2, "--url measures nothing here"),
        (["--url", "localhost:9"], 2, "did you mean http://localhost:9?"),
        (["m", "--kv-cache-gb", "4"], 2, "--kv-cache-gb is a flag of headrace serve; write it after --"),
        (["--url", "http://127.0.0.1:9"], 1, "cannot connect to http://127.0.0.1:9"),
        (["no-such-model", "--seconds", "20"], 1, "no-such-model"),
        (["--", "--no-such-flag"], 1, "no such option"),
    ],
)
def test_wrong_flags_are_refused(args: list[str], status: int, problem: str) -> None:
    result = CliRunner().invoke(main, ["calibrate", *args])
    assert result.exit_code == status, result.output
    assert problem.lower() in " ".join(result.stderr.split()).lower()


def test_a_busy_host_is_told_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for load, is_told in ((2.25, True), (0.25, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        stderr = CliRunner().invoke(main, ["calibrate", "no-such-model"]).stderr
        assert ("this host is busy (load 2.2): stop other programs" in stderr) == is_told


def test_ctrl_c_says_that_nothing_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.bench.calibrating.measured", interrupted)
    assert run(main, "headrace bench", ["calibrate", "-o", str(tmp_path / "c.json")]) == 130
    assert "stopped; no file was written" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_schema_is_printed() -> None:
    result = CliRunner().invoke(main, ["calibrate", "--schema"])
    assert '"Calibration"' in result.stdout
