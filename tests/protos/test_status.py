"""Errors cross gRPC unharmed and have one row for each wire."""

from __future__ import annotations

import grpc
import pytest

from headrace.protos.status import MAX_MESSAGE_CHARS, TABLE, Reason, StatusError, abort, error_of


async def raised_through_grpc(error: StatusError) -> StatusError:
    """Raise the error in a real server; give back what the client makes of it."""

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


async def test_a_status_without_details_is_read_by_its_code() -> None:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/t.T/Gone")(b"", timeout=5)
    assert error_of(caught.value).reason is Reason.WORKER_LOST


def test_a_long_message_is_cut() -> None:
    assert len(StatusError(Reason.INTERNAL, "x" * 10_000).message) == MAX_MESSAGE_CHARS
