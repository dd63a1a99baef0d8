"""The commands that start a planned fleet."""

from __future__ import annotations

import shlex
from dataclasses import replace

import click
import msgspec
import pytest

from headrace.cli.serving.serve import serve
from headrace.plan.fleet import Fleet, Kind, Memory
from headrace.plan.start import commands, kv_gb_of
from headrace.router.__main__ import command as router
from headrace.worker.__main__ import command as worker
from tests.plan.calibrations import calibration


def fleet(hosts: int = 1, workers: int = 1) -> Fleet:
    return Fleet(Kind("small", calibration(workers=workers)), hosts)


def parsed(command: click.Command, words: list[str]) -> dict[str, object]:
    return command.make_context(command.name, words).params


def test_one_host_is_one_command_that_serve_takes() -> None:
    (line,) = commands(fleet(), 0.5)
    words = shlex.split(line)
    assert words[:3] == ["headrace", "serve", "small"]
    params = parsed(serve, words[2:])
    assert params["models"] == ("small",)
    assert (params["workers"], params["threads"], params["kv_cache_gb"]) == (1, 2, 0.5)


def test_flags_with_which_the_host_was_measured_are_kept_but_for_the_memory() -> None:
    found = calibration()
    flags = ("--speculation", "off", "--kv-cache-gb", "9")
    kept = msgspec.structs.replace(found, layout=msgspec.structs.replace(found.layout, serve_flags=flags))
    asked = Fleet(Kind("small", kept), 1, Memory(disk_gb=20), max_num_seqs=16)
    params = parsed(serve, shlex.split(commands(asked, 0.25)[0])[2:])
    assert params["speculation"] == "off"
    assert params["kv_cache_gb"] == 0.25
    assert params["max_num_seqs"] == 16
    assert params["kv_disk_gb"] == 20


def test_a_host_measured_with_ranks_is_started_with_ranks() -> None:
    found = calibration()
    flags = ("--tensor-parallel", "2")
    divided = msgspec.structs.replace(found, layout=msgspec.structs.replace(found.layout, serve_flags=flags))
    (line,) = commands(Fleet(Kind("small", divided), 1), 0.5)
    assert parsed(serve, shlex.split(line)[2:])["tensor_parallel"] == 2
    *_, last = commands(Fleet(Kind("small", divided), 2), 0.5)
    assert parsed(worker, shlex.split(last)[2:])["tensor_parallel"] == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_several_hosts_have_a_router_a_gateway_and_workers(workers: int) -> None:
    lines = commands(replace(fleet(workers=workers), hosts=3), 0.5)
    run = [shlex.split(line) for line in lines if not line.startswith("#")]
    assert [words[:2] for words in run].count(["headrace", "certs"]) == 3
    routers = [words for words in run if words[:2] == ["headrace", "router"]]
    assert parsed(router, routers[0][2:])["listen"] == "0.0.0.0:50051"
    own = [words[words.index("worker") + 1 :] for words in run if "worker" in words]
    assert len(own) == workers
    params = [parsed(worker, words) for words in own]
    assert len({one["listen"] for one in params}) == workers
    assert all(one["routers"] == ("host-1:50051",) for one in params)


def test_memory_is_rounded_up_to_a_hundredth_of_a_gib() -> None:
    assert kv_gb_of(fleet()) == 0.78
    assert kv_gb_of(replace(fleet(), kv_bytes=1)) == 0.01
