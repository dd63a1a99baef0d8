"""What slices say about the pods of a Service."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.common.kubernetes.services import (
    Condition,
    Endpoint,
    EndpointSlice,
    Service,
    decode,
    endpoints_of,
    service_of,
    usable,
)
from tests.api_server import ApiServer, Pod


def slices(*given: tuple[str, list[Pod], dict[str, Any]]) -> list[EndpointSlice]:
    """The slices as the API shows them."""
    import json

    server = ApiServer()
    for name, pods, fields in given:
        server.put(name, pods, **fields)
    return [decode(json.dumps(one).encode(), EndpointSlice) for one in server.slices.values()]


@pytest.mark.parametrize(
    ("address", "service"),
    [
        ("kubernetes:///headrace-worker:50061", Service("headrace-worker", "", 50061)),
        ("kubernetes:///headrace-worker.prod:1", Service("headrace-worker", "prod", 1)),
    ],
)
def test_a_service_is_named_by_its_name_namespace_and_port(address: str, service: Service) -> None:
    assert service_of(address) == service


@pytest.mark.parametrize(
    "address",
    [
        "kubernetes:///worker",
        "kubernetes:///worker:grpc",
        "kubernetes:///worker:0",
        "kubernetes:///worker:65536",
        "kubernetes://cluster/worker:1",
        "kubernetes:///Worker:1",
        "kubernetes:///worker.prod.svc:1",
        "kubernetes:///:1",
    ],
)
def test_another_address_is_refused_with_the_form_to_write(address: str) -> None:
    with pytest.raises(ValueError, match=r"write kubernetes:///NAME\[.NAMESPACE\]:PORT"):
        service_of(address)


def test_conditions_that_are_absent_mean_ready_and_a_terminating_pod_is_never_ready() -> None:
    pods = [
        Pod("a", "10.0.0.1"),
        Pod("b", "10.0.0.2", ready=None, terminating=None),
        Pod("c", "10.0.0.3", ready=False),
        Pod("d", "10.0.0.4", terminating=True),
    ]
    found = endpoints_of(slices(("s", pods, {})), 7)
    assert {one.pod: one.condition for one in found.values()} == {
        "a": Condition.READY,
        "b": Condition.READY,
        "c": Condition.NOT_READY,
        "d": Condition.TERMINATING,
    }
    assert found["10.0.0.1:7"] == Endpoint("10.0.0.1:7", "a", Condition.READY)


def test_a_pod_with_addresses_of_both_families_is_one_worker() -> None:
    """Each family has a slice of its own."""
    six = [{**Pod("a", "fd00::1").entry(), "targetRef": Pod("a", "10.0.0.1").entry()["targetRef"]}]
    found = endpoints_of(
        slices(("six", [], {"addressType": "IPv6", "endpoints": six}), ("four", [Pod("a", "10.0.0.1")], {})), 7
    )
    assert list(found) == ["10.0.0.1:7"]
    only_six = endpoints_of(slices(("six", [], {"addressType": "IPv6", "endpoints": six})), 7)
    assert list(only_six) == ["[fd00::1]:7"]


def test_a_pod_in_two_slices_terminates_if_either_says_so_and_else_is_ready() -> None:
    first = [Pod("a", "10.0.0.1"), Pod("b", "10.0.0.2", ready=False)]
    second = [Pod("a", "10.0.0.1", terminating=True), Pod("b", "10.0.0.2")]
    for order in ((first, second), (second, first)):
        found = endpoints_of(slices(("1", order[0], {}), ("2", order[1], {})), 7)
        assert [one.condition for one in found.values()] == [Condition.TERMINATING, Condition.READY]


def test_slices_without_endpoints_and_of_names_are_passed_over() -> None:
    assert endpoints_of(slices(("empty", [], {"endpoints": None}), ("names", [], {"addressType": "FQDN"})), 7) == {}


def test_only_ready_pods_are_usable_and_all_of_them_where_none_is_ready() -> None:
    ready, not_ready = Endpoint("1", "a", Condition.READY), Endpoint("2", "b", Condition.NOT_READY)
    terminating = Endpoint("3", "c", Condition.TERMINATING)
    assert list(usable({"1": ready, "2": not_ready, "3": terminating})) == ["1"]
    assert list(usable({"2": not_ready, "3": terminating})) == ["2", "3"]
    assert list(usable({})) == []
