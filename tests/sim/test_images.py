"""Images in simulated fleets: how long they take, and what is encoded once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.sim import step_cost
from headrace.sim.images import FAMILIES, IMAGE_TOKENS, ImageSettings
from headrace.sim.router import POLICIES
from headrace.sim.simulation import FleetSettings, Outcome, Simulation
from headrace.sim.trace import Generated, Job, at_rate
from headrace.sim.worker import WorkerSettings

FAMILY = FAMILIES["smolvlm:low"]
IMAGES = ImageSettings(FAMILY)
WORKER = WorkerSettings(step_cost.default(), kv_tokens=40_000, block_size=16, images=IMAGES)
TEXT_S = 0.5
"""Time of a prompt of these tests without its image, at most."""


def run(jobs: list[Job], fleet: FleetSettings) -> Outcome:
    return Simulation([job.hashed(WORKER.block_size) for job in jobs], POLICIES["headrace"], fleet).run()


def job_of(number: int, arrival_s: float, picture: int, *, output: int = 4) -> Job:
    """A request whose text is its own, behind this picture."""
    return Job(number, arrival_s, ((IMAGE_TOKENS + picture, FAMILY.num_tokens), (number, 100)), output)


def test_an_image_takes_its_core_seconds_on_the_cores_of_its_worker() -> None:
    record = run([job_of(0, 0.0, 0)], FleetSettings(WORKER, num_workers=1)).records[0]
    alone_s = FAMILY.core_s / IMAGES.cores
    assert alone_s < record.first_token_s < alone_s + TEXT_S


def beside_image(num_streams: int) -> tuple[float, float]:
    """How many times as long an image takes beside so many streams, and how many seconds later the first of them
    ends."""
    texts = [Job(number, 0.0, ((number, 10),), 1000) for number in range(num_streams)]
    alone = run(texts, FleetSettings(WORKER, num_workers=1)).records[0]
    outcome = run([*texts, job_of(num_streams, 1.0, num_streams)], FleetSettings(WORKER, num_workers=1))
    stream, image = outcome.records[0], outcome.records[-1]
    image_s = image.first_token_s - image.arrived_s
    return image_s / (FAMILY.core_s / IMAGES.cores), stream.ended_s - alone.ended_s


def test_a_stream_makes_room_for_an_image() -> None:
    times, later_s = beside_image(1)
    assert 1.0 < times < 1.4
    assert 0.8 * FAMILY.core_s / IMAGES.cores < later_s < 1.2 * FAMILY.core_s / IMAGES.cores + TEXT_S


def test_many_streams_lose_little_time_beside_an_image() -> None:
    times, later_s = beside_image(32)
    assert 2.0 < times < 4.0
    assert later_s < times * FAMILY.core_s / IMAGES.cores / 2


def test_hosts_that_encode_take_no_time_from_streams() -> None:
    worker = replace(WORKER, images=replace(IMAGES, num_hosts=1))
    text = Job(0, 0.0, ((0, 100),), 1000)
    alone = run([text], FleetSettings(worker, num_workers=1)).records[0]
    stream, _ = run([text, job_of(1, 1.0, 0)], FleetSettings(worker, num_workers=1)).records
    assert stream.ended_s < alone.ended_s + TEXT_S


def test_workers_encode_themselves_what_hosts_would_have_later() -> None:
    """Two images at once: the host takes one, and the worker, which has no steps, the other."""
    jobs = [job_of(number, 0.0, number) for number in range(2)]
    alone_s = FAMILY.core_s / IMAGES.cores
    ended = []
    for workers_encode in (False, True):
        worker = replace(WORKER, images=replace(IMAGES, num_hosts=1, workers_encode=workers_encode))
        records = run(jobs, FleetSettings(worker, num_workers=1)).records
        ended.append(max(record.first_token_s for record in records))
    assert 2 * alone_s < ended[0] < 2 * alone_s + TEXT_S
    assert alone_s < ended[1] < alone_s + TEXT_S


def test_a_stream_makes_no_room_for_images_that_hosts_encode() -> None:
    """Its worker's encoder is busy enough that the host is always first."""
    worker = replace(WORKER, images=replace(IMAGES, num_hosts=1, workers_encode=True))
    text = Job(0, 0.0, ((0, 100),), 1000)
    alone = run([text], FleetSettings(worker, num_workers=1)).records[0]
    stream, _ = run([text, job_of(1, 1.0, 0)], FleetSettings(worker, num_workers=1)).records
    assert stream.ended_s < alone.ended_s + TEXT_S


def test_equal_images_in_flight_are_encoded_once_and_found_again() -> None:
    jobs = [job_of(number, 0.01 * number, 7) for number in range(6)] + [job_of(6, 100.0, 7), job_of(7, 101.0, 8)]
    outcome = run(jobs, FleetSettings(WORKER, num_workers=1))
    assert outcome.num_images_encoded == 2
    late = outcome.records[6]
    assert late.cached_tokens == FAMILY.num_tokens
    assert late.first_token_s - late.arrived_s < TEXT_S


def test_states_that_do_not_fit_are_encoded_again() -> None:
    """Two pictures by turns, behind texts of their own, so that the KV cache never has them."""
    jobs = [
        Job(number, 20.0 * number, ((number, 100), (IMAGE_TOKENS + number % 2, FAMILY.num_tokens), (90, 20)), 4)
        for number in range(6)
    ]
    small = replace(IMAGES, cache_bytes=FAMILY.num_tokens * IMAGES.bytes_per_token)
    assert run(jobs, FleetSettings(WORKER, num_workers=1)).num_images_encoded == 2
    fleet = FleetSettings(replace(WORKER, images=small), num_workers=1)
    assert run(jobs, fleet).num_images_encoded == 6


def test_a_router_gives_images_to_the_encoder_that_has_fewest() -> None:
    jobs = [job_of(number, 0.2 * number, number) for number in range(4)]
    records = run(jobs, FleetSettings(WORKER, num_workers=4)).records
    assert {record.worker for record in records} == {0, 1, 2, 3}


@pytest.mark.parametrize("num_hosts", [0, 1, 2])
def test_hosts_encode_for_all_workers_and_streams_do_not_notice(num_hosts: int) -> None:
    trace = Generated(60, 2, 64, prompt_median=60.0, output_mean=30.0, image_share=0.5, image_tokens=FAMILY.num_tokens)
    jobs = at_rate(trace.jobs(random.Random(3)), 1.0)
    worker = replace(WORKER, images=replace(IMAGES, num_hosts=num_hosts))
    simulation = Simulation(
        [job.hashed(WORKER.block_size) for job in jobs], POLICIES["headrace"], FleetSettings(worker, num_workers=3)
    )
    outcome = simulation.run()
    pictures = {job.number for job in jobs if job.image_places is not None}
    assert 15 < len(pictures) < 45
    assert outcome.num_images_encoded == len(pictures)
    assert all(record.num_tokens == record.job.num_output_tokens for record in outcome.records)
    if simulation.encode_hosts is not None:
        assert simulation.encode_hosts.busy_s == pytest.approx(len(pictures) * FAMILY.core_s / IMAGES.cores)
