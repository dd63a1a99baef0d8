"""Every flag of `vllm bench serve` is honoured, accepted as a hint, or refused by name with the remedy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from headrace.bench.__main__ import main
from headrace.bench.options import reporting, requests, server, vllm
from headrace.bench.serve import plan_of, serve
from tests.bench.beside_vllm import NoVllmError, Theirs, ours, prompts, shared_args, theirs, tokenizer, vllm_client
from tests.bench.scripted_server import scripted_server

SHAREGPT = ("--dataset-name", "sharegpt", "--dataset-path", "f")
CUSTOM = ("--dataset-name", "custom", "--dataset-path", "f")
SPEC = ("--dataset-name", "spec_bench", "--dataset-path", "f")
TRACE = ("--dataset-name", "timed_trace", "--dataset-path", "f")
PREFIXES = ("--dataset-name", "prefix_repetition")
RAMP = ("--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "5")
CHAT = ("--backend", "openai-chat")
# flag -> its values, and the flags beside which it changes something
HONOURED: dict[str, tuple[Sequence[str], Sequence[str]]] = {
    "--append-result": ((), ()),
    "--backend": (("openai-chat",), ()),
    "--base-url": (("http://other",), ("NO URL",)),
    "--burstiness": (("0.5",), ("--request-rate", "3")),
    "--chat-template-kwargs": (('{"enable_thinking": false}',), CHAT),
    "--custom-output-len": (("7",), CUSTOM),
    "--dataset-name": (("prefix_repetition",), ()),
    "--dataset-path": (("g",), SHAREGPT),
    "--disable-shuffle": ((), SHAREGPT),
    "--disable-tqdm": ((), ()),
    "--endpoint": (("/x/completions",), ()),
    "--extra-body": (('{"priority": 1}',), ()),
    "--frequency-penalty": (("0.5",), ()),
    "--goodput": (("ttft:5", "tpot:6"), ()),
    "--header": (("x-a=1", "x-b=2"), ()),
    "--host": (("other",), ("NO URL",)),
    "--ignore-eos": ((), SHAREGPT),
    "--input-len": (("9",), ()),
    "--insecure": ((), ("NO URL", "--base-url", "https://a")),
    "--label": (("mine",), ()),
    "--logprobs": (("3",), ()),
    "--lora-assignment": (("round-robin",), ()),
    "--lora-modules": (("a", "b"), ()),
    "--max-concurrency": (("4",), ()),
    "--metadata": (("a=1", "b=2"), ()),
    "--metric-percentiles": (("50,90",), ()),
    "--min-p": (("0.1",), ()),
    "--model": (("other",), ()),
    "--no-oversample": ((), SHAREGPT),
    "--num-prompts": (("5",), ()),
    "--num-warmups": (("5",), ()),
    "--output-len": (("9",), ()),
    "--percentile-metrics": (("e2el",), ()),
    "--plot-dataset-stats": ((), ()),
    "--plot-timeline": ((), ()),
    "--port": (("81",), ("NO URL", "--host", "a")),
    "--prefix-repetition-num-prefixes": (("3",), PREFIXES),
    "--prefix-repetition-output-len": (("3",), PREFIXES),
    "--prefix-repetition-prefix-len": (("3",), PREFIXES),
    "--prefix-repetition-suffix-len": (("3",), PREFIXES),
    "--presence-penalty": (("0.5",), ()),
    "--probe-request-rate": (("2",), ()),
    "--profile": ((), ()),
    "--ramp-up-end-rps": (("9",), RAMP),
    "--ramp-up-start-rps": (("2",), RAMP),
    "--ramp-up-strategy": (("exponential",), RAMP),
    "--random-input-len": (("3",), ()),
    "--random-output-len": (("3",), ()),
    "--random-prefix-len": (("3",), ()),
    "--random-range-ratio": (('{"input": 0.5}',), ()),
    "--ready-check-timeout-sec": (("3",), ()),
    "--repetition-penalty": (("1.1",), ()),
    "--request-id-prefix": (("a-",), ()),
    "--request-rate": (("3",), ()),
    "--result-dir": (("d",), ()),
    "--result-filename": (("n",), ()),
    "--save-detailed": ((), ()),
    "--save-result": ((), ()),
    "--seed": (("3",), ()),
    "--self-timed": ((), ()),  # see below
    "--served-model-name": (("other",), ()),
    "--sharegpt-output-len": (("3",), SHAREGPT),
    "--spec-bench-category": (("qa",), SPEC),
    "--spec-bench-output-len": (("3",), SPEC),
    "--temperature": (("0",), ()),
    "--timed-trace-chunk-hash-size": (("16",), TRACE),
    "--timed-trace-label-hash-ids": (("h",), TRACE),
    "--timed-trace-label-input-length": (("h",), TRACE),
    "--timed-trace-label-output-length": (("h",), TRACE),
    "--timed-trace-label-timestamp": (("h",), TRACE),
    "--timed-trace-sec-multiplier": (("1",), TRACE),
    "--timeline-itl-thresholds": (("10,20",), ("--plot-timeline",)),
    "--tokenizer": (("m",), ()),
    "--top-k": (("3",), ()),
    "--top-p": (("0.5",), ()),
}
REFUSED_BY_VALUE = {"--random-batch-size": "2"}
ONLY_IN_RUST = {"--no-steady-state", *(f"--{name}" for name in vllm.REFUSED_OF_RUST)}
VLLM = {*HONOURED, *REFUSED_BY_VALUE, *(f"--{name}" for name in (*vllm.HINTS, *vllm.REFUSED))} - ONLY_IN_RUST
NUM_FLAGS = 101
"""Of vLLM 0.33."""


def flags_of(args: Sequence[str]) -> dict[str, Any]:
    target = [] if "NO URL" in args else ["http://a"]
    given = [arg for arg in args if arg != "NO URL"]
    context = serve.make_context("serve", [*target, "--model", "m", *given], auto_envvar_prefix="NONE")
    return context.params


def meaning(args: Sequence[str]) -> Any:
    """Everything that is made of the flags."""
    flags = flags_of(args)
    api = server.api(flags)
    target = server.target(flags) if "NO URL" not in args or len(args) > 1 else None
    where = target and (target.url, target.headers, target.tls and target.tls.verify_mode)
    options = requests.request_options(flags, api, flags["served_model_name"] or flags["model"])
    # Handed on as they are; test_main.py and test_sender.py hold what they do.
    handed = [flags[name] for name in ("tokenizer", "lora_modules", "lora_assignment", "request_id_prefix")]
    return plan_of(flags), where, type(api), api.path("m"), options, reporting.outputs(flags), handed


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of datasets, in the present directory."""
    for name in ("f", "g"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)


def test_the_flags_are_those_of_vllm() -> None:
    ours = {name for param in serve.params for name in (*param.opts, *param.secondary_opts)}
    assert ours >= VLLM
    assert len(VLLM) == NUM_FLAGS


@pytest.mark.usefixtures("files")
@pytest.mark.parametrize("flag", sorted(HONOURED.keys() - {"--self-timed"}))
def test_an_honoured_flag_changes_what_is_done(flag: str) -> None:
    values, beside = HONOURED[flag]
    assert meaning([*beside, flag, *values]) != meaning(beside)


@pytest.mark.usefixtures("files")
def test_a_trace_is_sent_at_its_own_times_unless_they_are_turned_off() -> None:
    assert plan_of(flags_of(TRACE)).is_self_timed
    assert plan_of(flags_of([*TRACE, "--self-timed"])).is_self_timed
    assert not plan_of(flags_of([*TRACE, "--no-self-timed"])).is_self_timed


@pytest.mark.parametrize("name", sorted(vllm.HINTS))
def test_a_hint_changes_nothing(name: str) -> None:
    is_switch, _ = vllm.HINTS[name]
    assert meaning([f"--{name}", *(() if is_switch else ("auto",))]) == meaning([])


@pytest.mark.parametrize(
    "flag", sorted({f"--{name}" for name in (*vllm.REFUSED, *vllm.REFUSED_OF_RUST)} | REFUSED_BY_VALUE.keys())
)
def test_another_flag_is_refused_by_name_with_the_remedy(flag: str) -> None:
    refused = {**vllm.REFUSED, **vllm.REFUSED_OF_RUST}
    is_switch, remedy = refused.get(flag.removeprefix("--"), (False, "a request has one prompt"))
    value = () if is_switch else (REFUSED_BY_VALUE.get(flag, "1"),)
    done = CliRunner().invoke(main, ["http://a", flag, *value])
    assert done.exit_code == 2
    assert f"'{flag}'" in done.stderr
    assert remedy in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("flag", "name"),
    [
        *(("--backend", name) for name in vllm.BACKENDS),
        *(("--endpoint-type", name) for name in vllm.BACKENDS),
        *(("--dataset-name", name) for name in vllm.DATASETS),
    ],
)
def test_other_names_of_vllm_are_taken_or_refused_with_the_remedy(flag: str, name: str) -> None:
    others = vllm.DATASETS if flag == "--dataset-name" else vllm.BACKENDS
    other = others[name]
    param = "dataset_name" if flag == "--dataset-name" else "backend"
    if not isinstance(other, str):
        assert flags_of([flag, name, *(TRACE[2:] if other.name == "timed_trace" else ())])[param] == other.name
        return
    with pytest.raises(click.BadParameter, match="is not measured here") as refused:
        flags_of([flag, name])
    assert other in refused.value.format_message()


@pytest.fixture(scope="module")
def client() -> Iterator[Theirs]:
    python = os.environ.get("HEADRACE_VLLM_PYTHON")
    if python is None:
        pytest.skip("name a Python with vLLM in HEADRACE_VLLM_PYTHON")
    with ExitStack() as stack:
        try:
            found = stack.enter_context(vllm_client(python))
        except NoVllmError as error:
            pytest.skip(f"{python} has no client of vLLM: {error}")
        yield found


def test_the_table_is_that_of_an_installed_vllm(client: Theirs) -> None:
    assert {flag for flag in client.flags if flag.startswith("--")} - {"--help", "--no-self-timed"} <= VLLM


def types(value: Any) -> Any:
    """The type of a value, and of the elements of a list. JSON does not tell 5.0 from 5 in every writer."""
    if isinstance(value, list):
        return [types(value[0])] if value else []
    return "number" if isinstance(value, int | float) else type(value).__name__


@pytest.mark.parametrize("detailed", [(), ("--save-detailed",)])
@pytest.mark.parametrize("more", [(), ("--max-concurrency", "2", "--goodput", "ttft:900", "--metadata", "a=1")])
def test_the_json_has_the_keys_and_types_of_an_installed_vllm(
    client: Theirs, tmp_path: Path, detailed: Sequence[str], more: Sequence[str]
) -> None:
    with scripted_server() as url:
        args = [
            *shared_args(url, prompts(tmp_path / "p.jsonl", 4), 4, more),
            *("--model", "ttft=5,gap=5,joined=1", "--output-len", "4", "--request-rate", "50", "--seed", "1"),
            *("--burstiness", "2"),  # vLLM writes an infinite one as no JSON has it
        ]
        args = [arg for arg in args if arg != "--save-detailed"] + list(detailed)
        found = ours(args, tmp_path / "ours.json")
        del found["headrace"]
        wanted = theirs(client, args, tokenizer(tmp_path), tmp_path / "theirs.json")
    del wanted["tokenizer_id"], found["tokenizer_id"]  # vLLM's needs one, and ours none
    assert {key: types(value) for key, value in found.items()} == {key: types(value) for key, value in wanted.items()}
    for key in ("completed", "failed", "total_input_tokens", "total_output_tokens", "num_prompts", "request_rate"):
        assert found[key] == wanted[key]
