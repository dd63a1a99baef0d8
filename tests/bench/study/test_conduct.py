"""A study over scripted servers: it keeps each run, goes on where it stopped, and leaves out who cannot take part."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest

from headrace.bench import benchmark
from headrace.bench.study import recipes
from headrace.bench.study.conduct import counted
from headrace.bench.study.directory import DirectoryError, Settings, StudyDirectory
from headrace.bench.study.processes import ServerError
from headrace.bench.study.recipes import EXPERIMENTS, GENAI, LLAMA_CPP, OURS, VLLM, Experiment
from headrace.bench.tokens import WordCounter
from tests.bench.study.scripted import ScriptedKind, study

BY_NAME = {experiment.name: experiment for experiment in EXPERIMENTS}
THIRD = [BY_NAME["3"]]


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer: one token a word."""

    async def counter(*_: object) -> WordCounter:
        return WordCounter()

    monkeypatch.setattr(benchmark.tokens, "counter_for", counter)
    monkeypatch.setattr(benchmark.gc, "collect", lambda: 0)  # of all that tests have loaded, it takes long


def keys(directory: StudyDirectory, experiment: str) -> set[tuple[str, str, int]]:
    runs = (finished.run for finished in directory.all())
    return {(run.server, run.rate_name, run.repetition) for run in runs if run.experiment == experiment}


def test_each_run_is_kept_with_its_result_and_what_its_server_did(tmp_path: Path) -> None:
    ours, theirs = ScriptedKind(), ScriptedKind(GENAI)
    conducted, directory, said = study(tmp_path, ours, theirs)
    outcome = asyncio.run(conducted.conduct(THIRD))
    assert (outcome.num_run, outcome.num_wrong, outcome.left_out) == (8, 0, [])
    rates = {finished.run.rate_name for finished in directory.all() if finished.run.experiment == "3"}
    assert len(rates) == 2
    assert keys(directory, "3") == {(s, r, n) for s in (OURS, GENAI) for r in rates for n in (1, 2)}
    (file,) = tmp_path.glob("runs/3_scripted_headrace_rate-inf_*_r2.json")
    saved = json.loads(file.read_text())
    assert saved["result"]["completed"] == saved["run"]["num_prompts"] >= 12
    assert saved["result"]["headrace"]["finish_reasons"] == {"length": saved["result"]["completed"]}
    assert saved["server"]["command"] == "A=b headrace"
    assert saved["server"]["memory_bytes"] == 1 << 20
    assert any("run 8 of 8" in words for words in said)


def test_servers_take_turns_and_the_first_one_alternates(tmp_path: Path) -> None:
    conducted, _, said = study(tmp_path, ScriptedKind(), ScriptedKind(GENAI))
    asyncio.run(conducted.conduct(THIRD))
    order = [words.split(", ")[2] for words in said if words.startswith("run ")]
    assert order == [OURS, GENAI, OURS, GENAI, GENAI, OURS, GENAI, OURS]


def test_all_servers_get_the_same_requests_and_repetitions_get_others(tmp_path: Path) -> None:
    conducted, directory, _ = study(tmp_path, ScriptedKind(), ScriptedKind(GENAI))
    asyncio.run(conducted.conduct(THIRD))
    tokens: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for finished in directory.all():
        if finished.run.experiment == "3":
            lengths = (finished.result["total_input_tokens"], finished.result["total_output_tokens"])
            tokens.setdefault((finished.run.rate_name, finished.run.repetition), set()).add(lengths)
    assert all(len(lengths) == 1 for lengths in tokens.values())
    assert tokens["inf", 1] != tokens["inf", 2]


def test_a_study_goes_on_with_the_runs_that_are_left(tmp_path: Path) -> None:
    asyncio.run(study(tmp_path, ScriptedKind(), ScriptedKind(GENAI))[0].conduct(THIRD))
    gone = sorted(tmp_path.glob("runs/3_*"))[:3]
    for file in gone:
        file.unlink()
    kept = {file: file.read_bytes() for file in tmp_path.glob("runs/*.json")}
    ours, theirs = ScriptedKind(), ScriptedKind(GENAI)
    conducted, _, said = study(tmp_path, ours, theirs)
    assert asyncio.run(conducted.conduct(THIRD)).num_run == 3
    assert len(ours.started) + len(theirs.started) == 3
    assert all(file.exists() for file in gone)
    assert all(file.read_bytes() == before for file, before in kept.items())
    assert said[0] == "5 of 8 runs are done already"


def test_what_a_study_would_do_is_told_without_doing_it(tmp_path: Path) -> None:
    def kinds() -> list[ScriptedKind]:
        peers = ScriptedKind(GENAI, to_install="to be installed"), ScriptedKind(VLLM, cannot="it needs a checkpoint")
        return [ScriptedKind(), *peers, ScriptedKind(LLAMA_CPP, missing="it is not there")]

    preview, directory, said = study(tmp_path, *kinds())
    lines = preview.preview([*THIRD, BY_NAME["5"]])
    assert lines[:4] == [
        "headrace: installed, version 1",
        "openvino-genai: to be installed",
        "vllm: left out: it needs a checkpoint",
        "llama.cpp: left out: it is not there",
    ]
    assert lines[4] == "capacity of this host with scripted, of which rates are shares: 1 run"
    assert lines[5].startswith("experiment 3, servers side by side: 8 runs, about ")
    assert lines[6] == "experiment 5 compares models; name a second one with another --model"
    assert lines[7].startswith("in all 9 runs to do, about ")
    assert (directory.all(), said) == ([], [])
    conducted, *_ = study(tmp_path, *kinds()[:2])
    asyncio.run(conducted.conduct(THIRD))
    preview, *_ = study(tmp_path, *kinds())
    assert preview.preview(THIRD)[-2:] == [
        "experiment 3, servers side by side: 8 runs, of which 8 are done",
        "in all 0 runs to do",
    ]


def test_a_file_that_was_cut_off_is_named_with_the_remedy(tmp_path: Path) -> None:
    asyncio.run(study(tmp_path, ScriptedKind())[0].conduct(THIRD))
    file = next(tmp_path.glob("runs/3_*"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DirectoryError, match=r"is not valid JSON .* delete it"):
        asyncio.run(study(tmp_path, ScriptedKind())[0].conduct(THIRD))


def test_a_directory_of_another_study_is_refused(tmp_path: Path) -> None:
    study(tmp_path, ScriptedKind())
    with pytest.raises(DirectoryError, match="has a study with seed 0, not 1; continue it with its settings"):
        StudyDirectory(tmp_path).open(Settings("quick", 1, "scripted", "made up", "a machine"))


def test_peers_that_cannot_take_part_are_left_out_with_a_sentence(tmp_path: Path) -> None:
    kinds = (
        ScriptedKind(),
        ScriptedKind(GENAI, missing="openvino-genai is not installed; install it"),
        ScriptedKind(LLAMA_CPP, cannot="it needs a file"),
        ScriptedKind(VLLM, need_bytes=1 << 60),
    )
    conducted, directory, _ = study(tmp_path, *kinds)
    outcome = asyncio.run(conducted.conduct(THIRD))
    assert outcome.num_run == 4
    assert {server for server, _, _ in keys(directory, "3")} == {OURS}
    assert outcome.left_out[:2] == ["openvino-genai is not installed; install it", "llama.cpp: it needs a file"]
    assert "takes about 1073741824.0 GiB of memory" in outcome.left_out[2]
    assert "stop other programs" in outcome.left_out[2]


def test_a_study_without_headrace_fails(tmp_path: Path) -> None:
    conducted, _, _ = study(tmp_path, ScriptedKind(need_bytes=1 << 60))
    with pytest.raises(ServerError, match="name a smaller model with --model"):
        asyncio.run(conducted.conduct(THIRD))


def test_a_port_that_is_taken_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        conducted, _, _ = study(tmp_path, ScriptedKind(), port=port)
        with pytest.raises(ServerError, match=rf"port {port} on 127\.0\.0\.1 is already in use; stop what .* --port"):
            asyncio.run(conducted.conduct(THIRD))


def test_a_peer_that_ends_during_a_run_is_left_out_and_its_run_is_not_kept(tmp_path: Path) -> None:
    conducted, directory, _ = study(
        tmp_path, ScriptedKind(), ScriptedKind(GENAI), fails="openvino-genai ended with status 1"
    )
    outcome = asyncio.run(conducted.conduct(THIRD))
    assert outcome.left_out == ["openvino-genai ended with status 1"]
    assert {server for server, _, _ in keys(directory, "3")} == {OURS}


def test_wrong_answers_of_a_peer_are_marked(tmp_path: Path) -> None:
    conducted, directory, said = study(tmp_path, ScriptedKind(), models=("short=1",))
    outcome = asyncio.run(conducted.conduct(THIRD))
    assert outcome.num_wrong == outcome.num_run == 4
    assert all(finished.is_wrong for finished in directory.all())
    # How many requests a run has depends on how fast the host is.
    assert any(re.search(r"WRONG: [1-9]\d* answers shorter than asked for", words) for words in said)


def test_models_are_compared_only_if_there_are_two(tmp_path: Path) -> None:
    fifth: list[Experiment] = [BY_NAME["5"]]
    conducted, directory, _ = study(tmp_path / "one", ScriptedKind())
    outcome = asyncio.run(conducted.conduct(fifth))
    assert outcome.left_out == ["experiment 5 compares models; name a second one with another --model"]
    conducted, directory, _ = study(tmp_path / "two", ScriptedKind(), models=("a", "b"))
    assert asyncio.run(conducted.conduct(fifth)).num_run == 4
    assert {each.run.model for each in directory.all() if each.run.experiment == "5"} == {"a", "b"}


def test_requests_may_come_from_a_file_of_conversations(tmp_path: Path) -> None:
    turns = [{"value": "what is the capital of this country"}, {"value": "it is a city of some size"}]
    file = tmp_path / "sharegpt.json"
    file.write_text(json.dumps([{"conversations": turns}]))
    conducted, directory, _ = study(tmp_path / "study", ScriptedKind(), sharegpt=file)
    asyncio.run(conducted.conduct(THIRD))
    for finished in directory.all():
        lengths = (finished.result["total_input_tokens"], finished.result["total_output_tokens"])
        assert lengths == (12 * (7 + 1), 12 * 7)  # the server counts one token around a text


def test_a_counter_is_summed_over_its_labels() -> None:
    text = '# HELP a_total x\na_total{worker="1"} 2.0\na_total{worker="2"} 3\na_total_more 7\n'
    assert counted(text, "a_total") == 5
    assert counted(text, "b_total") is None


def test_rates_are_shares_of_the_capacity_and_bounded_loads_take_the_same_time() -> None:
    found = recipes.runs(BY_NAME["3"], recipes.FULL, ["m"], [OURS], {"m": 4.0})
    assert [run.rate_name for run in found[:4]] == ["1.2", "2.4", "3.6", "inf"]
    assert [run.num_prompts for run in found[:4]] == [30, 60, 90, 100]


def test_a_full_study_of_the_demo_model_takes_less_than_two_hours() -> None:
    """By the estimate that the command shows: at 4 requests per second, which two cores do, with all small peers."""
    kinds = {OURS: 6.0, GENAI: 6.0, LLAMA_CPP: 3.0}
    runs = [
        run
        for experiment in EXPERIMENTS
        for run in recipes.runs(experiment, recipes.FULL, ["m"], list(kinds), {"m": 4.0})
    ]
    seconds = sum(kinds[run.server] + run.num_prompts / min(run.rate, 4.0) + 10 for run in runs)
    assert seconds < 0.8 * 7200
