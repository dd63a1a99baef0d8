"""Gateways call for the first worker of a model that has none."""

from __future__ import annotations

import asyncio
import importlib.util
from types import SimpleNamespace

import pytest

from headrace.ray.signals import Signal

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="make .venv/.ray installs it"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def signal(workers: float, wanted: float) -> Signal:
    return {"workers": workers, "workers_wanted": wanted, "queue_wait_s": 0.0, "kv_pressure": 0.0}


async def test_one_call_waits_for_each_model_that_lacks_a_worker_until_it_has_one() -> None:
    from headrace.ray.actors import Awakening

    calls: dict[str, list[asyncio.Future[None]]] = {"worker-a": [], "worker-b": []}

    def handle(name: str) -> SimpleNamespace:
        def remote() -> asyncio.Future[None]:
            calls[name].append(asyncio.get_running_loop().create_future())
            return calls[name][-1]

        return SimpleNamespace(awaken=SimpleNamespace(remote=remote))

    def made() -> list[int]:
        return [len(found) for found in calls.values()]

    awakening = Awakening({name: handle(name) for name in calls})
    # No deployment of this application serves the third.
    await awakening.follow({"a": signal(0, 1), "b": signal(1, 2), "other": signal(0, 1)})
    await asyncio.sleep(0)
    assert made() == [1, 0]
    await awakening.follow({"a": signal(0, 1), "b": signal(0, 0)})
    await asyncio.sleep(0)
    assert made() == [1, 0], "it still waits"
    # Serve could not start one: the next period calls again.
    calls["worker-a"][0].set_exception(RuntimeError("no node has the resource"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    await awakening.follow({"a": signal(0, 1), "b": signal(0, 1)})
    await asyncio.sleep(0)
    assert made() == [2, 1]
    # One has come, and nobody asks for the other any more.
    await awakening.follow({"a": signal(1, 1), "b": signal(0, 0)})
    assert calls["worker-a"][1].cancelled()
    assert calls["worker-b"][0].cancelled()
    await awakening.follow({"b": signal(0, 1)})
    await asyncio.sleep(0)
    await awakening.close()
    assert calls["worker-b"][1].cancelled()
