"""A protocol is a folder that can be deleted: here several at a time, so that each is without each other."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.gateway import protocols

ROOT = Path(__file__).parents[2]
# Of each protocol's own tests, one or two that are run without the others. Their files import no maker's client, which
# takes longer than all else.
TESTS = {
    "openai": ("openai/test_http_chat.py", "test_a_stream_has_role_then_text_then_one_finish_then_usage_then_done"),
    "rerank": ("rerank/test_rerank.py", "test_scores_come_in_the_order_of_the_pairs"),
    "responses": ("responses/test_responses.py", "test_a_response_that_is_not_to_be_stored_is_not"),
    "batches": ("batches/test_without_a_store.py", "test_each_endpoint_says_how_to_get_one"),
    "anthropic": ("anthropic/test_messages.py", "test_a_message_has_the_text_and_the_account"),
    "ollama": ("ollama/test_ollama.py", "test_the_context_of_an_answer_is_continued"),
    "tgi": ("tgi/test_tgi.py", "test_details_have_all_tokens_with_their_texts"),
    "llamacpp": ("llamacpp/test_llamacpp.py", "test_an_answer_has_its_text_its_counts_and_its_timings"),
    "kserve": ("kserve/test_http.py", "test_server_and_models_are_described"),
    "adapters": ("adapters/test_adapters.py", "test_what_is_wrong_is_named"),
    "grpc_text": ("grpc_text/test_service.py", "test_a_completion_takes_text_or_tokens_and_all_parameters"),
    "console": ("console/test_console.py", "test_the_fleet_is_told_with_hosts_nodes_states_and_counters"),
}
# A server that is collected while the interpreter ends is not what these tests are about.
LENIENT = ("-W", "default::pytest.PytestUnraisableExceptionWarning")
# Run tests, and then start the gateway's command; it has no option of an absent protocol. One process, because most of
# its time is the import of the gateway.
TESTS_AND_HELP = """
import runpy, sys, pytest
if status := pytest.main(sys.argv[1:]):
    sys.exit(status)
print("the help:")
sys.argv[1:] = ["--help"]
runpy.run_module("headrace.gateway", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source of the gateway and its tests. Each test puts back what it took."""
    copy = tmp_path_factory.mktemp("gateway")
    for name in (
        "protos",
        "common",
        "gateway",
        "tests/gateway",
        "tests/__init__.py",
        "tests/patience.py",
        "pyproject.toml",
    ):
        if (ROOT / name).is_dir():
            # With their bytecode, but not with what another process is about to write.
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("*.pyc.*"))
        elif (ROOT / name).exists():
            shutil.copy(ROOT / name, copy / name)
    (copy / "links").mkdir()
    (copy / "links" / "headrace").symlink_to("..")
    return copy


@contextmanager
def without(tree: Path, absent: Sequence[str]) -> Iterator[None]:
    """Context manager: the protocols' folders, their tests and their lines in the table are gone. The folders come back
    with their bytecode."""
    table = tree / "gateway" / "protocols.py"
    whole = table.read_text()
    remaining = "".join(line for line in whole.splitlines(True) if line.strip(' ",\n') not in absent)
    assert whole.count("\n") == remaining.count("\n") + len(absent)
    folders = [tree / Path(*place, protocol) for place in (("gateway",), ("tests", "gateway")) for protocol in absent]
    aside = tree / "absent"
    aside.mkdir()
    table.write_text(remaining)
    for number, folder in enumerate(folders):
        folder.rename(aside / str(number))
    yield
    for number, folder in enumerate(folders):
        (aside / str(number)).rename(folder)
    aside.rmdir()
    table.write_text(whole)


def run_in(tree: Path, *arguments: str) -> str:
    """The output of a Python process that imports the copy."""
    ran = subprocess.run(
        [sys.executable, *arguments],
        cwd=tree,
        # With bytecode of the process before, modules need not be compiled again.
        env={**os.environ, "PYTHONPATH": str(tree / "links"), "PYTHONDONTWRITEBYTECODE": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-3000:]
    return ran.stdout


def test_each_protocol_has_tests() -> None:
    assert set(TESTS) == set(protocols.NAMES)


def absences() -> list[list[str]]:
    """Lists of absent protocols, as few as possible such that for every two protocols one list has the first alone.

    Each protocol is in half of the lists, and no two are in the same lists, so that none is in all lists of another.
    """
    names = list(protocols.NAMES)
    num_lists = next(number for number in itertools.count(2) if math.comb(number, number // 2) >= len(names))
    # The first and the last of the rest in turn, so that the lists are of like lengths.
    places = _from_both_ends(itertools.combinations(range(num_lists), num_lists // 2))
    lists_of = dict(zip(names, places, strict=False))
    return [[name for name in names if number in lists_of[name]] for number in range(num_lists)]


def _from_both_ends(values: Iterable[tuple[int, ...]]) -> Iterator[tuple[int, ...]]:
    rest = deque(values)
    while rest:
        yield rest.popleft()
        if rest:
            yield rest.pop()


def test_any_protocol_is_there_without_any_other() -> None:
    found = {
        (present, gone) for absent in absences() for gone in absent for present in set(protocols.NAMES) - set(absent)
    }
    assert found == set(itertools.permutations(protocols.NAMES, 2))


@pytest.mark.parametrize("absent", absences(), ids=" ".join)
def test_without_some_of_the_protocols_the_others_work(tree: Path, absent: list[str]) -> None:
    others = [f"tests/gateway/{path}::{test}" for name, (path, test) in TESTS.items() if name not in absent]
    flags = {flag for name in absent for option in protocols.PROTOCOLS[name].options for flag in option.opts}
    with without(tree, absent):
        own = ("-q", "-x", "-n", "0", "-p", "no:cacheprovider", *LENIENT, *others)
        report, _, shown = run_in(tree, "-c", TESTS_AND_HELP, *own).partition("\nthe help:\n")
    assert " passed" in report
    assert "--grpc-port" in shown
    assert not {flag for flag in flags if flag in shown}
