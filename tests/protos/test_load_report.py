"""The load of workers: one type with the numbers of the message."""

from __future__ import annotations

import math
from dataclasses import fields

import pytest

from headrace.protos.load_report import LoadReport
from headrace.protos.worker_pb2 import Load

# Not numbers of the load, but what else a worker tells with it.
OTHER_FIELDS = {
    "draining",
    "numa_node",
    "counters",
    "binding",
    "age_ms",
    "version",
    "prompt_steps",
    "decode_steps",
    "ranks",
    "stages",
}


def test_it_has_each_number_of_the_message() -> None:
    names = {field.name for field in fields(LoadReport)} - {"as_of_s"}
    assert names == {field.name for field in Load.DESCRIPTOR.fields} - OTHER_FIELDS


def test_what_a_worker_reports_is_what_a_router_reads() -> None:
    numbers = {name: number for number, name in enumerate(LoadReport().numbers(), start=1)}
    message = Load(**numbers, age_ms=500)
    assert LoadReport.of(Load.FromString(message.SerializeToString()), 9.0) == LoadReport(**numbers, as_of_s=8.5)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf, -1.0, 1e-300])
def test_rates_that_one_cannot_divide_by_are_unknown(wrong: float) -> None:
    rates = {name: wrong for name, number in LoadReport().numbers().items() if isinstance(number, float)}
    names = ("prefill_tokens_per_s", "decode_step_ms", "transfer_bytes_per_s", "disk_bytes_per_s", "image_tokens_per_s")
    assert rates.keys() == set(names)
    assert LoadReport.of(Load(**rates), 0.0) == LoadReport()


def test_blocks_that_are_not_full_can_be_reused_too() -> None:
    assert LoadReport(num_cached_blocks=3, num_partial_blocks=2).num_reusable_blocks == 5


def test_requests_that_wait_for_their_blocks_do_not_make_a_worker_full() -> None:
    """A disk or another worker that is slow must not keep requests from idle cores."""
    full = LoadReport(max_num_seqs=16, num_waiting=2)
    assert not full.has_room(0), "the pool is full"
    assert LoadReport(max_num_seqs=16, num_waiting=2, num_fetching=1).has_room(0)
    busy = LoadReport(max_num_seqs=16, num_running=14, num_waiting=4, num_fetching=4)
    assert not busy.has_room(0), "they take their seats later"
