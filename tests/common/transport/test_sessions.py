"""Sessions over a real channel: each call behaves like a separate RPC."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from headrace.common.tasks import end_tasks
from headrace.common.transport import session_client, session_server, sessions
from headrace.common.transport.channels import CHANNEL_OPTIONS, SERVER_OPTIONS
from headrace.common.transport.session_client import SessionClient
from headrace.common.transport.session_server import SessionServer
from headrace.common.transport.sessions import Call, CallContext
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos.answer_bounds import MAX_REQUEST_BYTES
from headrace.protos.status import Reason, StatusError, abort, error_of
from tests.patience import patience

INFERENCE = "headrace.v1.Inference"


class Server:
    """Handlers for the tests. The request selects the behaviour as `verb:argument`."""

    def __init__(self) -> None:
        self.sessions = SessionServer(self.handle)
        self.num_sessions = 0
        self.num_messages = 0
        self.num_single = 0
        self.cancelled: list[bytes] = []
        self.metadata: list[dict[str, Any]] = []
        self.going = asyncio.Event()
        self.received: list[list[int]] = []  # of each message of a session, the sizes of its requests
        self.poison = b""
        self.shared: list[SharedPart] = []
        self.num_empty = 0
        self.promises = True
        self.lives = asyncio.Event()
        self.lives.set()

    async def handle(self, wire: WireRequest, context: CallContext) -> None:
        self.shared.extend(wire.shared)
        raw = wire.joined()
        verb, _, argument = raw.decode().partition(":")
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            if verb == "count":
                for number in range(int(argument)):
                    await context.write(b"%d" % number)
                    await asyncio.sleep(0)
            elif verb == "together":
                await self.going.wait()
                await context.write(raw)
            elif verb == "refuse":
                error = StatusError(Reason.QUEUE_FULL, argument, retry_after_s=2.0)
                await abort(context, error)
            elif verb == "break":
                raise RuntimeError(argument)
            elif verb == "remaining":
                await context.write(str(context.time_remaining()).encode())
            elif verb == "padded":
                await context.write(b"%d" % len(raw))
            elif verb == "large":
                for _ in range(8):
                    await context.write(b"x" * int(argument))
            elif verb == "hang":
                await context.write(b"begun")
                await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.append(raw)
            raise

    async def session(self, requests: Any, context: Any) -> None:
        self.num_sessions += 1
        server = self

        class Counting:
            async def write(self, message: Any) -> None:
                await server.lives.wait()
                if message.parts:
                    server.num_messages += 1
                else:
                    server.num_empty += 1
                if not server.promises:
                    message.heartbeat_ms = 0
                await context.write(message)

            async def abort(self, *error: Any) -> None:
                await context.abort(*error)

            def peer(self) -> str:
                return str(context.peer())

        await self.sessions.serve(self.read(requests), Counting())

    async def read(self, requests: Any) -> AsyncIterator[Any]:
        async for message in requests:
            self.received.append([*map(len, message.shared), *(len(begin.request) for begin in message.begins)])
            if any(begin.request == self.poison for begin in message.begins):
                raise RuntimeError("the session breaks")
            yield message

    async def single(self, raw: bytes, context: Any) -> None:
        self.num_single += 1
        await self.handle(WireRequest(raw), context)


@asynccontextmanager
async def serving(server: Server, *, has_sessions: bool = True) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    method = server.sessions.method()
    methods: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(server.single)}
    if has_sessions:
        methods["Session"] = grpc.stream_stream_rpc_method_handler(
            server.session, method.request_deserializer, method.response_serializer
        )
    grpc_server = grpc.aio.server(options=SERVER_OPTIONS)
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, methods),))
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    await grpc_server.start()
    try:
        yield f"127.0.0.1:{port}", grpc_server
    finally:
        await grpc_server.stop(None)


async def all_of(call: Call) -> list[bytes]:
    messages = []
    async with asyncio.timeout(patience(10)):
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
    return messages


async def failure_of(call: Call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await all_of(call)
    return raised.value


async def until(condition: Any) -> None:
    async with asyncio.timeout(patience(10)):
        while not condition():
            await asyncio.sleep(0.005)


async def test_calls_of_one_session_keep_their_messages_apart_and_in_order() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        answers = await asyncio.gather(*(all_of(client.generate(b"count:%d" % n)) for n in range(50)))
    assert answers == [[b"%d" % number for number in range(n)] for n in range(50)]
    assert server.num_sessions == 1
    assert server.num_single == 0


async def test_what_is_written_in_one_turn_travels_in_one_message() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        calls = [client.generate(b"together:%d" % n) for n in range(64)]
        await until(lambda: len(server.metadata) == 64)
        server.going.set()
        answers = await asyncio.gather(*(all_of(call) for call in calls))
    assert answers == [[b"together:%d" % n] for n in range(64)]
    assert server.num_messages == 1


async def test_an_error_comes_with_its_details_and_harms_no_other_call() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        other = client.generate(b"hang:1")
        assert await other.read() == b"begun"
        refused = await failure_of(client.generate(b"refuse:no room"))
        assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        error = error_of(refused)
        assert (error.reason, error.message, error.retry_after_s) == (Reason.QUEUE_FULL, "no room", 2.0)
        broken = await failure_of(client.generate(b"break:secret"))
        assert broken.code() is grpc.StatusCode.UNKNOWN
        assert "secret" not in (broken.details() or "")
        assert await all_of(client.generate(b"count:2")) == [b"0", b"1"]
        assert not server.cancelled
        other.cancel()


async def test_a_cancelled_call_is_cancelled_at_the_server_and_its_reader_is_told() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        call = client.generate(b"hang:1")
        assert await call.read() == b"begun"
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        assert call.cancel()
        assert not call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: server.cancelled == [b"hang:1"])
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        assert server.num_sessions == 1


async def test_a_call_that_is_cancelled_in_the_turn_of_its_beginning_leaves_nothing() -> None:
    server = Server()
    async with serving(server) as (address, grpc_server), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        client.generate(b"hang:1").cancel()
        assert await all_of(client.generate(b"count:2")) == [b"0", b"1"]
        assert server.cancelled == []  # it never ran
        server.sessions.end_when_idle()
        async with asyncio.timeout(patience(10)):
            await grpc_server.stop(60)


async def test_metadata_and_deadline_are_the_calls_own() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        assert await all_of(client.generate(b"remaining:", metadata=(("x-request-id", "r1"),))) == [b"None"]
        (left,) = await all_of(client.generate(b"remaining:", timeout=60))
        assert 50 < float(left) <= 60
        assert server.metadata == [{"x-request-id": "r1"}, {}]
        late = await failure_of(client.generate(b"hang:1", timeout=0.05))
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: server.cancelled == [b"hang:1"])


async def test_the_loss_of_a_session_fails_its_calls_and_the_next_call_begins_another() -> None:
    server = Server()
    async with serving(server) as (address, grpc_server):
        port = address.rpartition(":")[2]
        async with grpc.aio.insecure_channel(address) as channel:
            client = SessionClient(channel)
            calls = [client.generate(b"hang:%d" % n) for n in range(3)]
            for call in calls:
                assert await call.read() == b"begun"
            await grpc_server.stop(None)
            for call in calls:
                assert (await failure_of(call)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert len(server.cancelled) == 3
            assert (await failure_of(client.generate(b"count:1"))).code() is grpc.StatusCode.UNAVAILABLE
            again = Server()
            second = grpc.aio.server()
            methods = {"Session": again.sessions.method()}
            second.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(INFERENCE, methods),))
            assert second.add_insecure_port(f"127.0.0.1:{port}") == int(port)
            await second.start()
            await channel.channel_ready()
            assert await all_of(client.generate(b"count:2")) == [b"0", b"1"]
            await second.stop(None)


async def test_the_loss_of_the_caller_cancels_its_calls() -> None:
    server = Server()
    async with serving(server) as (address, _):
        async with grpc.aio.insecure_channel(address) as channel:
            call = SessionClient(channel).generate(b"hang:1")
            assert await call.read() == b"begun"
        await until(lambda: server.cancelled == [b"hang:1"])


async def test_a_server_without_sessions_is_called_one_by_one() -> None:
    server = Server()
    async with (
        serving(server, has_sessions=False) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        client = SessionClient(channel)
        first = await asyncio.gather(*(all_of(client.generate(b"count:%d" % n)) for n in range(5)))
        assert first == [[b"%d" % number for number in range(n)] for n in range(5)]
        call = client.generate(b"hang:1", metadata=(("x-request-id", "r1"),))
        assert await call.read() == b"begun"
        call.cancel()
        await until(lambda: server.cancelled == [b"hang:1"])
        assert (await failure_of(client.generate(b"refuse:x"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server.num_single == 7
    assert server.metadata[5]["x-request-id"] == "r1"


async def test_a_session_that_breaks_inside_grpc_before_a_word_came_is_taken_for_unknown() -> None:
    server = Server()

    async def broken(requests: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.INTERNAL, "Internal error from Core")

    server.session = broken  # type: ignore[method-assign]
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        assert await all_of(client.generate(b"count:2")) == [b"0", b"1"]
    assert server.num_single == 1


async def test_a_server_that_ends_lets_calls_end_and_does_not_wait_for_sessions() -> None:
    server = Server()
    async with serving(server) as (address, grpc_server), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        call = client.generate(b"together:1")
        await until(lambda: server.metadata)
        server.sessions.end_when_idle()
        stopping = asyncio.create_task(grpc_server.stop(60))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        server.going.set()
        assert await all_of(call) == [b"together:1"]
        async with asyncio.timeout(patience(10)):
            await stopping


async def test_an_old_session_takes_no_new_calls_and_ends_with_its_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_client, "MAX_AGE_S", 0.0)
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel, 2)
        old = [client.generate(b"together:%d" % n) for n in range(2)]
        await until(lambda: len(server.metadata) == 2)
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        assert server.num_sessions == 3
        server.going.set()
        assert [await all_of(call) for call in old] == [[b"together:0"], [b"together:1"]]


@pytest.mark.parametrize(("num_sessions", "most"), [(1, 1), (4, 8)])
async def test_long_answers_do_not_pile_sessions_up(
    monkeypatch: pytest.MonkeyPatch, num_sessions: int, most: int
) -> None:
    monkeypatch.setattr(session_client, "MAX_AGE_S", 0.0)  # stands for a minute between two calls
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel, num_sessions)
        calls = [client.generate(b"hang:%d" % n) for n in range(100)]
        for call in calls:
            assert await call.read() == b"begun"
        assert server.sessions.num_sessions == most
        for call in calls[:50]:
            call.cancel()
        # With the last call of an old session there is room for the next one.
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        await until(lambda: server.sessions.num_sessions <= most)


async def test_many_requests_of_one_turn_are_split_by_bytes() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        client = SessionClient(channel)
        innocent = client.generate(b"hang:1")
        assert await innocent.read() == b"begun"
        calls = [client.generate(b"padded:" + b"x" * 200_000) for _ in range(128)]  # 25 MB: more than a message has
        assert [await all_of(call) for call in calls] == [[b"200007"]] * 128
        assert server.num_sessions == 1
        assert not server.cancelled
        assert sum(map(len, server.received)) == 129
        assert max(map(sum, server.received)) <= sessions.MAX_MESSAGE_BYTES


async def test_a_large_request_travels_on_a_session_of_its_own() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        client = SessionClient(channel)
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        large = client.generate(b"padded:" + b"x" * session_client.LARGE_BYTES)
        assert await all_of(large) == [b"%d" % (session_client.LARGE_BYTES + 7)]
        assert server.num_sessions == 2
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        assert server.num_sessions == 2
        await until(lambda: server.sessions.num_sessions == 1)


@pytest.mark.parametrize("size", [100, 200_000, 2_000_000])
async def test_what_requests_share_is_sent_once_and_is_one_object(size: int) -> None:
    server = Server()
    part, other = SharedPart(b"padded:" + b"x" * (size - 7)), SharedPart(b"y" * 10)
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        client = SessionClient(channel)
        calls = [client.generate(WireRequest(b"%03d" % n, (part, other))) for n in range(128)]
        calls.append(client.generate(b"padded:1"))
        answers = [await all_of(call) for call in calls]
        assert answers == [*[[b"%d" % (size + 13)]] * 128, [b"8"]]
        assert sum(map(sum, server.received)) == size + 10 + 128 * 3 + 8
        assert len({id(shared) for shared in server.shared}) == 2
        assert [shared.raw for shared in server.shared[:2]] == [part.raw, other.raw]
        assert server.num_sessions == (1 if size <= session_client.LARGE_BYTES else 2)
        await until(lambda: server.sessions.held.total == 0)


async def test_what_requests_share_counts_once_until_the_last_of_them_ends() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        client = SessionClient(channel)
        part = SharedPart(b"hang:" + b"x" * 1000)
        calls = [client.generate(WireRequest(b"%d" % number, (part,))) for number in range(2)]
        await until(lambda: server.sessions.num_open_calls == 2)
        calls.append(client.generate(WireRequest(b"2", (part,))))
        for left, call in zip((2, 1, 0), calls, strict=True):
            assert await call.read() == b"begun"
            assert server.sessions.held.total == (left + 1) + 1005 or left == 2
            call.cancel()
            await until(lambda: server.sessions.num_open_calls == left)  # noqa: B023
            assert server.sessions.held.total == (left + 1005 if left else 0)


async def test_what_requests_share_is_one_object_though_it_is_sent_several_times() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        client = SessionClient(channel)
        part = SharedPart(b"together:" + b"x" * 1000)
        calls = []
        for number in range(3):
            calls.append(client.generate(WireRequest(b"%d" % number, (part,))))
            await until(lambda: len(server.shared) == len(calls))
        assert len(server.received) == 3
        assert len({id(shared) for shared in server.shared}) == 1
        server.going.set()
        for number, call in enumerate(calls):
            assert await all_of(call) == [part.raw + b"%d" % number]
        # Nothing is kept of it behind the last call.
        server.shared.clear()
        await until(lambda: not len(server.sessions._shared))


async def test_shared_parts_are_joined_where_there_are_no_sessions() -> None:
    server = Server()
    async with (
        serving(server, has_sessions=False) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        client = SessionClient(channel)
        part = SharedPart(b"padded:")
        assert await all_of(client.generate(WireRequest(b"123", (part,)))) == [b"10"]
        assert await all_of(client.generate(WireRequest(b"1234", (part,)))) == [b"11"]
    assert server.num_single == 2


async def test_a_request_that_no_message_holds_fails_alone() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address, CHANNEL_OPTIONS) as channel:
        client = SessionClient(channel)
        innocent = client.generate(b"together:1")
        await until(lambda: server.metadata)
        failure = await failure_of(client.generate(b"x" * (MAX_REQUEST_BYTES + 1)))
        assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        server.going.set()
        assert await all_of(innocent) == [b"together:1"]
        assert not server.cancelled


async def test_a_session_that_breaks_retries_its_calls_one_by_one() -> None:
    server = Server()
    server.poison = b"break:poison"
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        begun = client.generate(b"hang:1")
        assert await begun.read() == b"begun"
        silent = client.generate(b"together:1")
        poison = client.generate(server.poison)
        assert (await failure_of(begun)).code() is grpc.StatusCode.UNAVAILABLE  # its reader resumes it
        assert (await failure_of(poison)).code() is grpc.StatusCode.UNKNOWN
        # What is resumed is not put together with the poison again.
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        server.going.set()
        assert await all_of(silent) == [b"together:1"]
        assert (server.num_sessions, server.num_single) == (1, 3)


async def test_a_message_of_an_answer_that_is_too_large_fails_its_call_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "MAX_RESPONSE_BYTES", 1000)
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        innocent = client.generate(b"hang:1")
        assert await innocent.read() == b"begun"
        failure = error_of(await failure_of(client.generate(b"large:1001")))
        assert failure.reason is Reason.INVALID_FIELD
        assert "1001 bytes" in failure.message
        assert await all_of(client.generate(b"large:1000")) == [b"x" * 1000] * 8
        assert server.num_sessions == 1
        innocent.cancel()


@pytest.mark.parametrize("bound", ["MAX_OPEN_CALLS_OF_HOST", "MAX_OPEN_CALLS_OF_SERVER", "max_request_bytes"])
async def test_calls_of_a_host_and_of_all_are_bounded_over_sessions(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    server = Server()
    if bound == "max_request_bytes":
        server.sessions = SessionServer(server.handle, 13)
    else:
        monkeypatch.setattr(session_server, bound, 2)
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel, 3)
        calls = [client.generate(b"hang:%d" % n) for n in range(2)]
        for call in calls:
            assert await call.read() == b"begun"
        refused = error_of(await failure_of(client.generate(b"count:1")))
        assert (refused.reason, refused.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
        calls[0].cancel()
        await until(lambda: server.cancelled)
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        calls[1].cancel()
        await until(lambda: (server.sessions.num_open_calls, server.sessions.held.total) == (0, 0))


async def test_writers_wait_while_too_much_is_unsent_and_messages_stay_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_UNSENT_BYTES", 100_000)
    monkeypatch.setattr(sessions, "MAX_MESSAGE_BYTES", 50_000)
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        answers = await asyncio.gather(*(all_of(client.generate(b"large:60000")) for _ in range(4)))
    assert [len(b"".join(answer)) for answer in answers] == [480_000] * 4
    assert server.num_messages >= 32


async def test_more_calls_than_a_session_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_server, "MAX_OPEN_CALLS", 2)
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        calls = [client.generate(b"hang:%d" % n) for n in range(2)]
        for call in calls:
            assert await call.read() == b"begun"
        assert (await failure_of(client.generate(b"count:1"))).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        await until(lambda: server.cancelled)
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        calls[1].cancel()


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silence is noticed ten times as fast."""
    monkeypatch.setattr(sessions, "HEARTBEAT_MS", 50)


@pytest.mark.usefixtures("hasty")
async def test_a_call_may_be_silent_for_long_while_its_server_is_not() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        call = client.generate(b"together:1")
        await until(lambda: server.num_empty > 20)  # more than thrice the silence that gives a server up
        server.going.set()
        assert await all_of(call) == [b"together:1"]
        assert not client.is_silent


@asynccontextmanager
async def narrow(address: str, is_open: asyncio.Event, num_bytes: int) -> AsyncIterator[str]:
    """The address of a link to `address` that passes only so many bytes of callers until it is open."""
    ends: list[asyncio.Task[None]] = []

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, left: float) -> None:
        while raw := await reader.read(16_384):
            left -= len(raw)
            if left < 0:
                await is_open.wait()
            writer.write(raw)
            await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        host, port = address.split(":")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        ends.append(asyncio.create_task(pass_on(reader, far_writer, num_bytes)))
        ends.append(asyncio.create_task(pass_on(far_reader, writer, math.inf)))

    listening = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{listening.sockets[0].getsockname()[1]}"
    finally:
        listening.close()
        await end_tasks(*ends)


@pytest.mark.usefixtures("hasty")
async def test_a_server_is_not_given_up_while_a_large_request_is_on_its_way() -> None:
    server = Server()
    is_open = asyncio.Event()
    async with (
        serving(server) as (address, _),
        narrow(address, is_open, 200_000) as link,
        grpc.aio.insecure_channel(link, CHANNEL_OPTIONS) as channel,
    ):
        client = SessionClient(channel)
        assert await all_of(client.generate(b"count:1")) == [b"0"]  # the client knows now what is promised
        large = client.generate(b"padded:" + b"x" * 1_000_000)
        before = server.num_empty
        await until(lambda: server.num_empty > before + 20)  # more than thrice the silence that gives a server up
        assert server.received == [[7]]
        is_open.set()
        assert await all_of(large) == [b"1000007"]
        assert server.num_single == 0


@pytest.mark.usefixtures("hasty")
async def test_nothing_is_said_while_no_call_is_open() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        num_empty = server.num_empty
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await until(lambda: server.num_empty > num_empty)
        # And silence without calls is no reason to give anyone up.
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        assert server.num_sessions == 1


@pytest.mark.usefixtures("hasty")
async def test_a_server_that_hangs_is_given_up_for_its_silence_and_known_to_be_back_without_a_call() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        calls = [client.generate(b"hang:%d" % n) for n in range(3)]
        for call in calls:
            assert await call.read() == b"begun"
        server.lives.clear()
        for call in calls:
            lost = await failure_of(call)
            assert lost.code() is grpc.StatusCode.UNAVAILABLE
            assert "silent" in (lost.details() or "")
        assert client.is_silent
        # A call that is made all the same is given up as well, by what was promised before.
        assert "silent" in ((await failure_of(client.generate(b"count:1"))).details() or "")
        assert client.is_silent
        server.lives.set()
        await until(lambda: not client.is_silent)
        assert await all_of(client.generate(b"count:2")) == [b"0", b"1"]


@pytest.mark.usefixtures("hasty")
async def test_with_several_sessions_those_whose_server_is_heard_are_used() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel, 2)
        call = client.generate(b"hang:1")
        assert await call.read() == b"begun"
        server.lives.clear()
        await failure_of(call)
        assert not client.is_silent  # the other session was not begun yet
        server.lives.set()
        assert [await all_of(client.generate(b"count:1")) for _ in range(4)] == [[b"0"]] * 4


@pytest.mark.usefixtures("hasty")
async def test_a_server_that_promises_nothing_is_not_given_up() -> None:
    server = Server()
    server.promises = False
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        call = client.generate(b"together:1")
        await until(lambda: server.num_empty > 0)
        server.lives.clear()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await call.read()
        server.lives.set()
        server.going.set()
        assert await all_of(call) == [b"together:1"]


async def test_an_answer_that_nobody_reads_is_given_up_before_too_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_client, "MAX_UNREAD_BYTES", 200_000)
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        unread = client.generate(b"large:60000")
        little = client.generate(b"large:1000")
        await until(lambda: client.num_unread_bytes == 8 * 1000)
        assert (await failure_of(unread)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [len(message) for message in await all_of(little)] == [1000] * 8
        assert client.num_unread_bytes == 0


async def test_what_is_unread_of_a_call_that_was_left_is_not_kept() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        call = client.generate(b"large:1000")
        await until(lambda: client.num_unread_bytes == 8 * 1000)
        call.cancel()
        assert client.num_unread_bytes == 0


@pytest.mark.parametrize("bound", ["MAX_SESSIONS", "MAX_SESSIONS_OF_HOST"])
async def test_where_a_server_takes_no_more_sessions_calls_go_one_by_one(
    monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(session_server, bound, 1)
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel, 2)
        first = client.generate(b"together:1")
        await until(lambda: server.sessions.num_sessions == 1)
        assert await all_of(client.generate(b"count:1")) == [b"0"]
        assert server.num_single == 1
        server.going.set()
        assert await all_of(first) == [b"together:1"]
        assert server.sessions.num_sessions == 1


async def test_a_whole_answer_that_nobody_reads_is_given_up_before_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_client, "MAX_UNREAD_BYTES", 200_000)
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel)
        whole = client.generate(b"large:20000")
        await until(lambda: client.num_unread_bytes == 8 * 20_000)
        later = client.generate(b"large:15000")
        await until(lambda: client.num_unread_bytes == 8 * 15_000)
        assert (await failure_of(whole)).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert [len(message) for message in await all_of(later)] == [15_000] * 8


@pytest.mark.usefixtures("hasty")
async def test_several_sessions_with_one_server_that_hangs_are_given_up_as_one() -> None:
    server = Server()
    async with serving(server) as (address, _), grpc.aio.insecure_channel(address) as channel:
        client = SessionClient(channel, 4)
        calls = [client.generate(b"hang:%d" % n) for n in range(4)]
        for call in calls:
            assert await call.read() == b"begun"
        assert server.num_sessions == 4
        assert [len(streams) for streams in client.silences._peers.values()] == [4]
        server.lives.clear()
        for call in calls:
            assert "silent" in ((await failure_of(call)).details() or "")
        server.lives.set()
