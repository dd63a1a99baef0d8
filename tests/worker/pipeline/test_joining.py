"""Stages that offer themselves to the worker that is their first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import SERVER_OPTIONS, Transport
from headrace.protos import stage_pb2, stage_pb2_grpc
from headrace.protos.stage_pb2 import ComputeResponse, JoinRequest
from headrace.protos.status import Reason, StatusError
from headrace.worker.__main__ import config_of_arguments
from headrace.worker.config import ConfigurationError
from headrace.worker.model.fingerprint import outline_of
from headrace.worker.pipeline import joining as joining_module
from headrace.worker.pipeline.joining import Joining, StageOffers, StagesService, Taken
from headrace.worker.pipeline.link import StageLink
from tests.patience import patience, until

OUTLINE = "0" * 64


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining_module, "RETRY_S", 0.01)


def offers_of(num_stages: int) -> StageOffers:
    return StageOffers("w", num_stages, "m", OUTLINE, "unix:here")


def request(name: str, *, outline: str = OUTLINE) -> JoinRequest:
    return JoinRequest(name=name, address=f"unix:{name}", model="other", outline=outline)


@asynccontextmanager
async def serving(offers: StageOffers, directory: Path, transport: Transport | None = None) -> AsyncIterator[str]:
    """Take offers at the address that this yields."""
    transport, address = transport or Transport(), f"unix:{directory}/joins.sock"
    server = grpc.aio.server(interceptors=transport.interceptors(), options=SERVER_OPTIONS)
    stage_pb2_grpc.add_StagesServicer_to_server(StagesService(offers), server)
    transport.bind(server, address)
    await server.start()
    try:
        yield address
    finally:
        await server.stop(0)


class Offering:
    """A process that offers itself while this is open."""

    def __init__(self, address: str, name: str, transport: Transport | None = None, **request_fields: Any) -> None:
        self.taken = Taken()
        joining = Joining(address, request(name, **request_fields), transport or Transport(), self.taken)
        self.task = asyncio.create_task(joining.run())

    async def withdraw(self) -> None:
        await end_tasks(self.task)


async def told(caplog: pytest.LogCaptureFixture, text: str) -> None:
    """Wait until the log has a text."""
    await asyncio.to_thread(until, lambda: text in caplog.text, text)


async def test_stages_come_in_any_order_and_are_taken_in_that_of_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    offers = offers_of(2)
    async with serving(offers, tmp_path) as address:
        addresses = asyncio.create_task(asyncio.to_thread(offers.addresses))
        await told(caplog, "waiting at unix:here for 2 of 2 other stages: run headrace serve --join on another host")
        second = Offering(address, "b")
        await told(caplog, f"joined the pipeline of w at {address}, whose other stages are b; 1 more of 2 have to join")
        await told(caplog, "waiting at unix:here for 1 of 2 other stages (b joined): run headrace serve --join")
        first = Offering(address, "a")
        assert await addresses == ("unix:a", "unix:b")
        await told(caplog, f"joined the pipeline of w at {address}, whose other stages are a, b\n")
        assert "the stages are this worker, a at unix:a, b at unix:b" in caplog.text
        await first.withdraw()
        await told(caplog, "the stage a at unix:a has left")
        await second.withdraw()


async def test_a_stage_too_many_is_a_spare(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    offers = offers_of(1)
    async with serving(offers, tmp_path) as address:
        first = Offering(address, "a")
        await told(caplog, "the stage a at unix:a has joined")
        spare = Offering(address, "c")
        await told(caplog, f"waiting for the worker at {address}: the pipeline of w has its 2 stages already, with a")
        await first.withdraw()
        await told(caplog, "the stage c at unix:c has joined")
        assert offers.addresses() == ("unix:c",)
        await spare.withdraw()


def test_two_stages_of_one_name_are_told_so() -> None:
    offers = offers_of(2)
    offers.join(request("a"))
    with pytest.raises(StatusError, match="a stage of the name a has joined already, at unix:a; .*its own --worker-id"):
        offers.join(request("a"))


async def test_another_model_is_refused_for_good(tmp_path: Path) -> None:
    async with serving(offers_of(1), tmp_path) as address:
        offering = Offering(address, "a", outline="1" * 64)
        problem = rf"--join {address}: the stage a has other files of a model \(other\) than the worker w \(m\)"
        with pytest.raises(ConfigurationError, match=problem):
            await offering.task


async def test_a_wrong_join_token_is_refused_for_good(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("0123456789abcdef")
    wrong.write_text("fedcba9876543210")
    async with serving(offers_of(1), tmp_path, Transport(None, right)) as address:
        offering = Offering(address, "a", Transport(None, wrong))
        with pytest.raises(ConfigurationError, match=f"--join {address}: the join token is missing or wrong"):
            await offering.task


async def test_who_awaits_no_stages_is_told_by_name(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/other.sock"
    server = grpc.aio.server()
    server.add_insecure_port(address)
    await server.start()
    with pytest.raises(ConfigurationError, match=f"--join {address}: no worker awaits stages there; name the --await-"):
        await Offering(address, "a").task
    await server.stop(0)


async def test_a_worker_that_is_not_there_yet_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    offering = Offering(f"unix:{tmp_path}/joins.sock", "a")
    await told(caplog, f"waiting for the worker at unix:{tmp_path}/joins.sock: ")
    offers = offers_of(1)
    async with serving(offers, tmp_path):
        assert await asyncio.to_thread(offers.addresses) == ("unix:a",)
        await offering.withdraw()


@pytest.mark.parametrize("worker", ["w", "another"])
async def test_an_offer_ends_when_another_worker_takes_the_stage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, worker: str
) -> None:
    caplog.set_level("INFO")
    offers = offers_of(1)
    async with serving(offers, tmp_path) as address:
        offering = Offering(address, "a")
        await told(caplog, "the stage a at unix:a has joined")
        offering.taken.by(worker)
        if worker == "another":
            await told(caplog, f"it is a stage of another, so the offer to {address} is withdrawn")
            await offering.task
            await told(caplog, "the stage a at unix:a has left")
        else:
            await told(caplog, "joined the pipeline of w")
            with offers.present(pytest.fail):
                assert offers.addresses() == ("unix:a",)
    # The end of the worker is not the end of the process: that starts again when the call to it ends.
    await asyncio.wait_for(offering.task, patience(10.0))


class SilentStage(stage_pb2_grpc.StageServicer):
    """A stage that takes a call and answers when it is told to."""

    def __init__(self, directory: Path, name: str, *, answers: bool) -> None:
        self.address = f"unix:{directory}/{name}.sock"
        self.setups: list[stage_pb2.StageSetup] = []
        self._answers = answers
        self._server = grpc.server(ThreadPoolExecutor(2))
        stage_pb2_grpc.add_StageServicer_to_server(self, self._server)
        self._server.add_insecure_port(self.address)
        self._server.start()

    def Compute(self, requests: Iterator[stage_pb2.ComputeRequest], context: Any) -> Iterator[ComputeResponse]:
        self.setups.append(next(requests).setup)
        if self._answers:
            yield ComputeResponse(offer=stage_pb2.StageOffer())
        ended = threading.Event()
        if context.add_callback(ended.set):
            ended.wait()

    def close(self) -> None:
        self._server.stop(0)


def test_while_stages_are_called_one_that_goes_is_replaced(tmp_path: Path) -> None:
    """The worker then takes those that are there."""
    first, second = SilentStage(tmp_path, "a", answers=False), SilentStage(tmp_path, "b", answers=True)
    offers = offers_of(2)
    offers.join(JoinRequest(name="a", address=first.address, outline=OUTLINE))
    offers.join(JoinRequest(name="z", address="unix:z", outline=OUTLINE))
    link = StageLink(offers, Transport(), lambda _: None, "w", hangs_after_s=60)
    with closing(first), closing(second), ThreadPoolExecutor(1) as executor, closing(link):
        opening = executor.submit(link.open, stage_pb2.StageSetup(execution_mode="accuracy"))
        until(lambda: bool(first.setups), "the first stage is called")
        offers.leave("a")
        offers.join(JoinRequest(name="b", address=second.address, outline=OUTLINE))
        opening.result(patience(30.0))
        assert link.addresses == (second.address, "unix:z")
    (setup,) = second.setups
    assert (setup.worker, setup.execution_mode, list(setup.later_stages)) == ("w", "accuracy", ["unix:z"])


def test_a_stage_that_has_left_before_it_is_called_is_noticed() -> None:
    offers = offers_of(1)
    offers.join(request("a"))
    assert offers.addresses() == ("unix:a",)
    offers.leave("a")
    left: list[str] = []
    with offers.present(left.append):
        pass
    assert left == ["the stage a has left"]


def test_an_outline_tells_models_apart_without_their_weights(tmp_path: Path) -> None:
    found = []
    for name, network, weights in (("a", "x", b"12"), ("b", "x", b"34"), ("c", "y", b"12"), ("d", "x", b"123")):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "openvino_model.xml").write_text(network)
        (directory / "openvino_model.bin").write_bytes(weights)
        found.append(outline_of(directory))
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_a_stage_is_reached_where_it_reaches_the_worker() -> None:
    listen = ["--listen", "0.0.0.0:50071", "--join", "127.0.0.1:50070"]
    config = config_of_arguments(["--model", "m", "--name", "m", "--serve-stage", *listen])
    assert (config.join, config.advertise) == ("127.0.0.1:50070", "127.0.0.1:50071")


def test_a_pipeline_awaits_stages_unless_they_are_named() -> None:
    def awaits(*flags: str) -> str | None:
        return config_of_arguments(["--model", "m", "--name", "m", *flags]).await_stages

    assert awaits() is None
    assert awaits("--pipeline", "2") == "0.0.0.0:50070"
    assert awaits("--pipeline", "2", "--await-stages", "10.0.0.5:7") == "10.0.0.5:7"
    assert awaits("--pipeline", "2", "--stage", "b:1") is None


def test_reasons_that_pass_are_waited_for_and_others_end_it(caplog: pytest.LogCaptureFixture) -> None:
    waiting = joining_module.Waiting("the worker at a:1", "--join a:1")
    waiting.tell(StatusError(Reason.WORKER_LOST, "refused"))
    waiting.tell(StatusError(Reason.QUEUE_FULL, "full"))
    assert [record.message for record in caplog.records] == ["waiting for the worker at a:1: refused"]
    with pytest.raises(ConfigurationError, match="--join a:1: no"):
        waiting.tell(StatusError(Reason.INVALID_FIELD, "no"))
