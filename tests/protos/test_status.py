"""Errors cross gRPC unharmed and have one row for each wire."""

from __future__ import annotations

import grpc
import pytest

from headrace.protos import worker_pb2
from headrace.protos.status import (
    MAX_FIELD_BYTES,
    MAX_MESSAGE_BYTES,
    TABLE,
    Reason,
    StatusError,
    abort,
    detail_of,
    error_of,
    is_peer_lost,
)


async def raised_through_grpc(error: StatusError) -> StatusError:
    """Raise the error in a real server, and return the error that the client gets."""

    async def fail(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await abort(context, error)

    server = grpc.aio.server()
    handler = grpc.unary_unary_rpc_method_handler(fail)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Fail": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/t.T/Fail")(b"")
            assert caught.value.code() is error.row.grpc_code
            return error_of(caught.value)
    finally:
        await server.stop(None)


def test_every_reason_has_a_row() -> None:
    assert set(TABLE) == set(Reason)


@pytest.mark.parametrize("reason", Reason)
async def test_an_error_arrives_as_it_was_raised(reason: Reason) -> None:
    error = StatusError(reason, "what is wrong", field="sampling.top_p", retry_after_s=1.25)
    arrived = await raised_through_grpc(error)
    assert (arrived.reason, arrived.message) == (reason, "what is wrong")
    assert (arrived.field, arrived.retry_after_s) == ("sampling.top_p", 1.25)


async def test_field_and_retry_are_absent_when_not_given() -> None:
    arrived = await raised_through_grpc(StatusError(Reason.INTERNAL, "m"))
    assert (arrived.field, arrived.retry_after_s) == (None, None)


def test_a_detail_is_read_by_its_kind() -> None:
    error = StatusError(Reason.GIVEN_BACK, "m", detail=worker_pb2.GivenBack(epoch=3))
    metadata = grpc.aio.Metadata(*error.trailing_metadata())
    failed = grpc.aio.AioRpcError(error.row.grpc_code, grpc.aio.Metadata(), metadata)
    assert detail_of(failed, worker_pb2.GivenBack) == worker_pb2.GivenBack(epoch=3)
    assert detail_of(failed, worker_pb2.Load) is None
    bare = grpc.aio.AioRpcError(grpc.StatusCode.ABORTED, grpc.aio.Metadata(), grpc.aio.Metadata())
    assert detail_of(bare, worker_pb2.GivenBack) is None


async def test_a_status_without_details_is_read_by_its_code() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Gone")(b"", timeout=5)
    assert error_of(caught.value).reason is Reason.WORKER_LOST


@pytest.mark.parametrize("char", ["x", "%", "ñ", "日", "😀"])
async def test_a_long_message_and_a_long_field_are_cut_and_arrive(char: str) -> None:
    """A client refuses headers that are too large, and then knows nothing of the error."""
    error = StatusError(Reason.UNSUPPORTED, char * 10_000, field=char * 10_000, retry_after_s=1.0)
    assert error.field is not None
    assert MAX_MESSAGE_BYTES - 4 < len(error.message.encode()) <= MAX_MESSAGE_BYTES
    assert MAX_FIELD_BYTES - 4 < len(error.field.encode()) <= MAX_FIELD_BYTES
    arrived = await raised_through_grpc(error)
    assert (arrived.reason, arrived.message, arrived.field) == (error.reason, error.message, error.field)


@pytest.mark.parametrize(
    ("code", "message", "is_lost"),
    [
        (grpc.StatusCode.UNAVAILABLE, "", True),
        (grpc.StatusCode.CANCELLED, "", True),
        (grpc.StatusCode.UNKNOWN, "Stream removed", True),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", True),
        (grpc.StatusCode.INTERNAL, "Socket closed", True),
        (grpc.StatusCode.UNKNOWN, "Unexpected RuntimeError", False),
        (grpc.StatusCode.INTERNAL, "", False),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "Received message larger than max", False),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", False),
        (grpc.StatusCode.UNIMPLEMENTED, "Method not found!", False),
    ],
)
def test_a_lost_peer_is_known_by_a_status_of_the_transport(code: grpc.StatusCode, message: str, is_lost: bool) -> None:
    bare = grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details=message)
    assert is_peer_lost(bare) is is_lost
    ours = grpc.aio.Metadata(*StatusError(Reason.NO_CAPACITY, "m").trailing_metadata())
    assert not is_peer_lost(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), ours, details=message))
