"""The address that a worker gives out."""

from __future__ import annotations

import pytest

from headrace.worker.host.advertise import advertised_address, fleet_address


@pytest.mark.parametrize("listen", ["127.0.0.1:5", "unix:/run/w.sock", "worker-3:50061", "[fe80::1]:7"])
def test_an_address_that_others_can_use_is_given_out_as_it_is(listen: str) -> None:
    assert advertised_address(listen, "127.0.0.1:1") == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:50061", "[::]:50061"])
def test_every_address_becomes_the_one_on_the_way_to_the_router(listen: str) -> None:
    assert advertised_address(listen, "127.0.0.1:1") == "127.0.0.1:50061"


def test_without_a_router_over_the_network_there_is_nothing_to_choose_by() -> None:
    assert advertised_address("0.0.0.0:1", None) == "0.0.0.0:1"
    assert advertised_address("0.0.0.0:1", "unix:/r.sock") == "0.0.0.0:1"


@pytest.mark.parametrize(
    ("redis_url", "way"),
    [
        ("redis://10.0.0.5:6380/0", "10.0.0.5:6380"),
        ("rediss://user:secret@10.0.0.5/1", "10.0.0.5:6379"),
        ("redis+sentinel://:secret@10.0.0.5:26379,10.0.0.6:26379/headrace/0", "10.0.0.5:26379"),
        ("redis://[fd00::5]:6379", "[fd00::5]:6379"),
        ("unix:///run/redis.sock", "unix:/run/redis.sock"),
        (None, None),
    ],
)
def test_without_a_router_the_way_to_redis_decides(redis_url: str | None, way: str | None) -> None:
    assert fleet_address((), redis_url) == way
    assert fleet_address(("10.0.0.9:50051", "10.0.0.8:50051"), redis_url) == "10.0.0.9:50051"


def test_a_worker_that_knows_redis_alone_gives_out_the_address_on_the_way_there() -> None:
    assert advertised_address("0.0.0.0:7", fleet_address((), "redis://127.0.0.1:6379/0")) == "127.0.0.1:7"
