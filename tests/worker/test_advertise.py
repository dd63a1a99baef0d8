"""The address that a worker gives out."""

from __future__ import annotations

import pytest

from headrace.worker.advertise import advertised_address


@pytest.mark.parametrize("listen", ["127.0.0.1:5", "unix:/run/w.sock", "worker-3:50061", "[fe80::1]:7"])
def test_an_address_that_others_can_use_is_given_out_as_it_is(listen: str) -> None:
    assert advertised_address(listen, "127.0.0.1:1") == listen


@pytest.mark.parametrize("listen", ["0.0.0.0:50061", "[::]:50061"])
def test_every_address_becomes_the_one_on_the_way_to_the_router(listen: str) -> None:
    assert advertised_address(listen, "127.0.0.1:1") == "127.0.0.1:50061"


def test_without_a_router_over_the_network_there_is_nothing_to_choose_by() -> None:
    assert advertised_address("0.0.0.0:1", None) == "0.0.0.0:1"
    assert advertised_address("0.0.0.0:1", "unix:/r.sock") == "0.0.0.0:1"
