"""`headrace ovms`: every flag of OVMS's command, and the files that it manages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from headrace.cli.hosting.settings import ModelOptions, ModelRules
from headrace.cli.main import cli
from headrace.cli.models import pull
from headrace.cli.ovms.configuration import read_configuration
from headrace.cli.ovms.flags import FLAGS, GRAPH_FLAGS, Flag
from headrace.cli.ovms.graphs import parse_graph, read_graph
from headrace.cli.ovms.options import Fate
from headrace.cli.ovms.repository import graph_text
from headrace.cli.serving.serve import Listening, Run
from headrace.common.stores.api_keys import read_keys, sha256_of
from tests.cli import ovms_files
from tests.cli.conftest import write_files
from tests.cli.ovms_files import llm_graph
from tests.hub import Hub


def ovms(*args: str) -> Result:
    return CliRunner().invoke(cli, ["ovms", *args])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return ovms_files.model(tmp_path / "models" / "smol")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Run, Any]]:
    """Returns the run that a command would begin, and its API keys."""
    monkeypatch.delenv("API_KEY", raising=False)
    runs: list[tuple[Run, Any]] = []

    def serve(run: Run) -> None:
        keys = run.given["api_keys"]
        runs.append((run, None if keys is None else read_keys(keys)))
        raise SystemExit(0)

    monkeypatch.setattr(Run, "serve", serve)

    def result_of(*args: str) -> tuple[Run, Any]:
        result = ovms(*args)
        assert result.exit_code == 0, result.output
        return runs[-1]

    return result_of


Served = Callable[..., tuple[Run, Any]]


def test_a_model_is_served_as_ovms_serves_it(served: Served, model: Path) -> None:
    run, keys = served("--model_path", str(model))
    (settings,) = run.settings.models
    assert (settings.name, Path(settings.model), settings.options, settings.rules) == (
        "smol",
        model.resolve(),
        ModelOptions(),
        ModelRules(),
    )
    assert (run.where, keys, run.file) == (Listening("0.0.0.0", 8000, 0), None, None)
    assert run.notes == [
        "all addresses of this host are served without a key, as by OVMS; --api_key_file or --rest_bind_address "
        "127.0.0.1 restrict it"
    ]
    assert run.given.keys() >= {"kv_cache_gb", "adapters", "warm_restart", "tool_parser"}


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (("--rest_port", "9001"), ("where", Listening("0.0.0.0", 9001, 0))),
        (("--rest_port=9001",), ("where", Listening("0.0.0.0", 9001, 0))),
        (("--port", "9000"), ("where", Listening("0.0.0.0", 8000, 9000))),
        (("--rest_bind_address", "127.0.0.1"), ("where", Listening("127.0.0.1", 8000, 0))),
        (("--grpc_bind_address", "127.0.0.1"), ("where", Listening("127.0.0.1", 8000, 0))),
        (("--model_name", "n"), ("name", "n")),
        (("--log_level", "TRACE"), ("log_level", "debug")),
        (("--log_level", "ERROR"), ("log_level", "error")),
        (("--allowed_origins", "https://a, https://b"), ("cors_origins", ("https://a", "https://b"))),
        (("--allowed_media_domains", "a.example,b.example"), ("allowed_media_domains", ("a.example,b.example",))),
        (("--allowed_local_media_path", "/pictures"), ("allowed_local_media_path", Path("/pictures"))),
        (("--plugin_config", '{"KV_CACHE_PRECISION": "u4"}'), ("kv_precision", "u4")),
        (("--kv_cache_precision", "u8"), ("kv_precision", "u8")),
        (("--max_num_seqs", "9"), ("max_num_seqs", 9)),
        (("--max_num_batched_tokens", "99"), ("max_num_batched_tokens", 99)),
        (("--cache_size", "2"), ("kv_total_gb", 2.0)),
        (("--tool_parser", "hermes3"), ("tool_parser", "hermes")),
        (("--reasoning_parser", "qwen3"), ("reasoning_parser", "think")),
        (("--task", "text_generation", "--target_device", "CPU"), ("kv_precision", None)),
    ],
)
def test_flags_are_applied(served: Served, model: Path, args: tuple[str, ...], expected: tuple[str, Any]) -> None:
    run, _ = served("--model_path", str(model), *args)
    name, value = expected
    (settings,) = run.settings.models
    found = {
        **run.given,
        **{one: getattr(settings.rules, one) for one in ("tool_parser", "reasoning_parser")},
        **{one: getattr(settings.options, one) for one in ("kv_total_gb", "pooling", "normalizes")},
        **settings.options.worker,
        "where": run.where,
        "name": settings.name,
    }
    assert found[name] == value


def test_the_one_key_is_required_of_all(served: Served, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (model / "key").write_text("our key \nother\n")
    _, (key,) = served("--model_path", str(model), "--api_key_file", str(model / "key"))
    assert key.sha256 == sha256_of("our key")
    monkeypatch.setenv("API_KEY", "another")
    run, (key,) = served("--model_path", str(model))
    assert key.sha256 == sha256_of("another")
    assert run.notes == []
    (model / "key").write_text("\n")
    assert (
        "has no key in its first line" in ovms("--model_path", str(model), "--api_key_file", str(model / "key")).output
    )


def test_log_lines_go_to_a_file_too(served: Served, model: Path, tmp_path: Path) -> None:
    run, _ = served("--model_path", str(model), "--log_path", str(tmp_path / "log"))
    assert run.stream is not None
    run.stream.write(b"a line\n")
    run.stream.flush()
    assert (tmp_path / "log").read_text() == "a line\n"
    result = ovms("--model_path", str(model), "--log_path", str(tmp_path / "no" / "log"))
    assert (result.exit_code, "cannot be opened" in result.output) == (2, True)


def test_a_configuration_is_followed(served: Served, tmp_path: Path) -> None:
    config = ovms_files.repository(tmp_path, {"a": llm_graph()})
    run, _ = served("--config_path", str(config))
    assert run.file is not None
    assert (run.file.path, run.file.poll_s, [model.name for model in run.settings.models]) == (config, 1.0, ["a"])
    run, _ = served("--config_path", str(tmp_path), "--file_system_poll_wait_seconds", "0")
    assert run.file is not None
    assert (run.file.path, run.file.poll_s) == (config, 0.0)


def test_a_graph_decides_unless_flags_describe_one(served: Served, model: Path) -> None:
    (model / "graph.pbtxt").write_text(llm_graph('models_path: "./" max_num_seqs: 5 enable_prefix_caching: false'))
    run, _ = served("--model_repository_path", str(model.parent), "--model_name", "smol", "--target_device", "CPU")
    assert run.settings.models[0].options.worker["max_num_seqs"] == 5
    assert run.notes[0].startswith("enable_prefix_caching has no effect: ")
    run, _ = served("--model_path", str(model), "--cache_size", "1", "--enable_prefix_caching", "true")
    assert run.settings.models[0].options == ModelOptions(kv_total_gb=1.0)


@pytest.mark.parametrize(
    ("task", "args", "options", "rules"),
    [
        ("embeddings", (), ModelOptions(pooling="cls", normalizes=True), ModelRules()),
        (
            "embeddings",
            ("--pooling", "LAST", "--normalize", "false", "--truncate", "true"),
            ModelOptions(pooling="last", normalizes=False),
            ModelRules(truncates_texts=True),
        ),
        ("rerank", ("--max_allowed_chunks", "3", "--num_streams", "1"), ModelOptions(), ModelRules(max_documents=3)),
    ],
)
def test_encoders_have_flags_of_their_own(
    served: Served, tmp_path: Path, task: str, args: tuple[str, ...], options: ModelOptions, rules: ModelRules
) -> None:
    directory = ovms_files.model(tmp_path / "m", task)
    for named in ((), ("--task", task)):
        run, _ = served("--model_path", str(directory), *named, *args)
        assert (run.settings.models[0].options, run.settings.models[0].rules) == (options, rules)
    result = ovms("--model_path", str(directory), "--max_num_seqs", "3")
    assert "--max_num_seqs is not for models of" in result.output


def test_a_gguf_file_is_a_model_for_texts(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "m-Q4_K_M.gguf"
    path.write_bytes(b"GGUF")
    run, _ = served("--model_path", str(path), "--cache_size", "1")
    (settings,) = run.settings.models
    assert (settings.name, settings.model, settings.options.kv_total_gb) == ("m-Q4_K_M", str(path), 1.0)
    (tmp_path / "graph.pbtxt").write_text(llm_graph(f'models_path: "{path.name}"'))
    run, _ = served("--model_path", str(tmp_path), "--model_name", "m")
    assert [(one.name, one.model) for one in run.settings.models] == [("m", str(path))]


def test_a_draft_model_is_a_directory_or_beside_the_model(served: Served, model: Path) -> None:
    draft = ovms_files.model(model / "org-draft")
    run, _ = served("--model_path", str(model), "--draft_source_model", "org/draft")
    assert run.settings.models[0].options.worker["draft_model"] == draft.resolve()
    run, _ = served("--model_path", str(model), "--draft_source_model", str(draft))
    assert run.settings.models[0].options.worker["draft_model"] == draft.resolve()


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (("--dynamic_split_fuse", "false"), "dynamic_split_fuse has no effect: "),
        (("--enable_prefix_caching", "false"), "enable_prefix_caching has no effect: "),
        (("--enable_tool_guided_generation", "true"), "enable_tool_guided_generation has no effect: "),
        (("--cache_interval_multiplier", "2"), "cache_interval_multiplier has no effect: "),
        (("--max_prompt_len", "2000"), "plugin_config: MAX_PROMPT_LEN has no effect: "),
        (
            ("--model_distribution_policy", "TENSOR_PARALLEL"),
            "plugin_config: MODEL_DISTRIBUTION_POLICY has no effect: ",
        ),
    ],
)
def test_options_of_graphs_without_effect_are_named(
    served: Served, model: Path, args: tuple[str, ...], named: str
) -> None:
    run, _ = served("--model_path", str(model), *args)
    assert run.notes[0].startswith(named)


@pytest.mark.parametrize("value", ["LM", "VLM", "LM_CB", "VLM_CB", "AUTO"])
def test_what_a_model_reads_is_not_a_matter_of_its_pipeline(served: Served, model: Path, value: str) -> None:
    plain, _ = served("--model_path", str(model))
    run, _ = served("--model_path", str(model), "--pipeline_type", value)
    assert (run.settings.models, run.notes) == (plain.settings.models, plain.notes)


VALUES = {"text": "x", "whole": "7", "switch": None}


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.fate is Fate.NAMED], ids=lambda flag: str(flag.name))
def test_a_flag_without_effect_is_named(served: Served, model: Path, flag: Flag) -> None:
    value = VALUES[flag.kind]
    run, _ = served("--model_path", str(model), f"--{flag.name}", *([value] if value else []))
    assert run.notes[0] == f"--{flag.name} has no effect: {flag.what}"
    for value in flag.without_effect:
        run, _ = served("--model_path", str(model), f"--{flag.name}", str(value))
        assert not run.notes[0].startswith(f"--{flag.name}")


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.fate is Fate.REFUSED], ids=lambda flag: str(flag.name))
def test_a_flag_that_cannot_be_is_refused(model: Path, flag: Flag) -> None:
    result = ovms("--model_path", str(model), f"--{flag.name}", "x")
    assert (result.exit_code, result.stderr) == (2, f"error: --{flag.name} is not supported: {flag.what}\n")


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ((), "no model is named; give --model_path and --model_name"),
        (("--model_path", "MODEL", "--target_device", "GPU"), "device GPU is not supported: headrace computes on CPUs"),
        (("--model_path", "MODEL", "--task", "image_generation"), "task image_generation is not supported"),
        (("--model_path", "MODEL", "--task", "embeddings"), "has a model for text_generation, and Embeddings"),
        (("--model_path", "MODEL", "--tool_parser", "onyx"), "tool_parser 'onyx' is no parser; there are auto"),
        (("--model_path", "MODEL", "--pipeline_type", "X"), "--pipeline_type must be one of LM, VLM"),
        (("--model_path", "MODEL", "--plugin_config", "["), "--plugin_config must be a JSON object"),
        (("--model_path", "MODEL", "--rest_bind_address", "a,b"), "has several addresses; give one"),
        (
            ("--model_path", "MODEL", "--rest_bind_address", "127.0.0.1", "--grpc_bind_address", "0.0.0.0"),
            "--grpc_bind_address must be 127.0.0.1",
        ),
        (("--model_path", "MODEL", "--log_level", "LOUD"), "--log_level must be one of TRACE"),
        (("--model_path", "MODEL/none"), "there is no model"),
        (("--config_path", "MODEL", "--model_name", "a"), "--model_name is for one model"),
        (("--config_path", "MODEL", "--cache_size", "1"), "--cache_size is for one model"),
        (("--list_models",), "--model_repository_path is missing"),
        (("--list_models", "--add_to_config"), "--list_models and --add_to_config exclude each other"),
        (("--pull", "--source_model", "x", "--model_repository_path", "MODEL"), "must be OWNER/NAME on the hub"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(model: Path, args: tuple[str, ...], problem: str) -> None:
    result = ovms(*(arg.replace("MODEL", str(model)) for arg in args))
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert problem in result.stderr


# -- repositories ---------------------------------------------------------------------------------------------------


def test_models_of_a_repository_are_listed(tmp_path: Path) -> None:
    ovms_files.model(tmp_path / "org" / "plain")
    (tmp_path / "org" / "graph").mkdir()
    (tmp_path / "org" / "graph" / "graph.pbtxt").write_text(llm_graph())
    (tmp_path / "resnet" / "1").mkdir(parents=True)
    (tmp_path / "resnet" / "1" / "model.xml").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "config.json").touch()
    result = ovms("--list_models", "--model_repository_path", str(tmp_path))
    assert result.stdout.split() == ["org/graph", "org/plain", "resnet"]


def test_models_are_added_to_a_configuration_and_removed(model: Path) -> None:
    repository = model.parent
    config = repository / "config.json"
    base = ("--config_path", str(config), "--model_name")
    more = ("--target_device", "CPU", "--plugin_config", '{"KV_CACHE_PRECISION": "u8"}')
    assert ovms("--add_to_config", *base, "smol", "--model_repository_path", str(repository), *more).exit_code == 0
    assert ovms("--add_to_config", *base, "again", "--model_path", "smol").exit_code == 0
    assert json.loads(config.read_text()) == {
        "model_config_list": [
            {
                "config": {
                    "name": "smol",
                    "base_path": "smol",
                    "target_device": "CPU",
                    "plugin_config": {"KV_CACHE_PRECISION": "u8"},
                }
            },
            {"config": {"name": "again", "base_path": "smol"}},
        ]
    }
    assert [one.name for one in read_configuration(config).models] == ["smol", "again"]
    assert "has a model 'again' already" in ovms("--add_to_config", *base, "again", "--model_path", "smol").stderr
    assert ovms("--remove_from_config", *base, "smol").stdout == f"smol is removed from {config}\n"
    assert [one.name for one in read_configuration(config).models] == ["again"]
    assert "has no model 'smol'; there are again" in ovms("--remove_from_config", *base, "smol").stderr
    assert "does not exist" in ovms("--add_to_config", *base, "x", "--model_path", "none").stderr
    assert "device GPU" in ovms("--add_to_config", *base, "x", "--model_path", "smol", "--target_device", "GPU").stderr


def test_the_repository_of_the_environment_has_the_configuration(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OVMS_MODEL_REPOSITORY_PATH", str(model.parent))
    assert ovms("--add_to_config", "--model_name", "smol").exit_code == 0
    assert [one.name for one in read_configuration(model.parent / "config.json").models] == ["smol"]


def test_graphs_are_removed_too(tmp_path: Path) -> None:
    config = ovms_files.repository(tmp_path, {"a": llm_graph(), "b": llm_graph()})
    assert ovms("--remove_from_config", "--config_path", str(config), "--model_name", "a").exit_code == 0
    assert [one.name for one in read_configuration(config).models] == ["b"]


def test_configure_writes_a_graph_that_is_read_again(model: Path) -> None:
    options = (
        "--max_num_seqs",
        "9",
        "--enable_prefix_caching",
        "true",
        "--tool_parser",
        "hermes3",
        "--cache_size",
        "2",
    )
    more = ("--kv_cache_precision", "u8", "--target_device", "CPU", "--pipeline_type", "LM_CB")
    assert ovms("--configure", "--model_path", str(model), *options, *more).stdout == f"wrote {model / 'graph.pbtxt'}\n"
    graph = read_graph(model / "graph.pbtxt")
    assert graph.values == {
        "models_path": "./",
        "max_num_seqs": 9,
        "enable_prefix_caching": True,
        "tool_parser": "hermes3",
        "cache_size": 2,
        "device": "CPU",
        "pipeline_type": "LM_CB",
        "plugin_config": '{"KV_CACHE_PRECISION": "u8"}',
    }
    assert ovms("--configure", "--model_path", str(model), "--target_device", "GPU").exit_code == 2
    assert read_graph(model / "graph.pbtxt") == graph


@pytest.mark.parametrize("task", ["text_generation", "embeddings", "rerank"])
def test_each_kind_of_graph_is_written_and_read(tmp_path: Path, task: str) -> None:
    directory = ovms_files.model(tmp_path / "m", task)
    assert ovms("--configure", "--model_path", str(directory)).exit_code == 0
    graph = read_graph(directory / "graph.pbtxt")
    assert graph.values == {"models_path": "./"}
    text = graph_text(graph.calculator, {"models_path": 'a "b"\\c\u00e9'})
    assert parse_graph(text).values == {"models_path": 'a "b"\\c\u00e9'}


def test_pull_puts_a_model_and_its_graph_into_the_repository(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path, served: Served
) -> None:
    model_files = {**model_files, "config.json": b'{"model_type": "llama"}'}
    hub.add("org/m-ov", model_files)
    hub.add("org/draft", model_files)
    repository = tmp_path / "models"
    base = ("--source_model", "org/m-ov", "--model_repository_path", str(repository))
    result = ovms(
        "--pull", *base, "--task", "text_generation", "--cache_size", "3", "--draft_source_model", "org/draft"
    )
    assert result.exit_code == 0, result.output
    assert result.stdout == f"org/m-ov is in {repository / 'org/m-ov'}\n"
    found = {path.name for path in (repository / "org/m-ov").iterdir()}
    assert found == {*(name for name in model_files if "/" not in name), "graph.pbtxt", "org-draft"}
    assert read_graph(repository / "org/m-ov/graph.pbtxt").values == {
        "models_path": "./",
        "cache_size": 3,
        "draft_models_path": "org-draft",
    }
    seen = len(hub.seen)
    run, _ = served(*base, "--model_name", "mine")
    (model,) = run.settings.models
    assert (model.name, Path(model.model)) == ("mine", (repository / "org/m-ov").resolve())
    assert model.options.kv_total_gb == 3.0
    assert len(hub.seen) == seen, "what is there is not fetched again"
    (repository / "org/m-ov/config.json").write_text("{}")
    assert ovms("--pull", *base, "--overwrite_models").exit_code == 0
    assert (repository / "org/m-ov/config.json").read_bytes() == model_files["config.json"]
    assert read_graph(repository / "org/m-ov/graph.pbtxt").values == {"models_path": "./"}


def test_a_gguf_file_of_a_repository_is_chosen_by_its_name(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = []

    def convert(_name: str, gguf: Path, directory: Path) -> None:
        files.append(gguf.name)
        write_files(directory, model_files)

    monkeypatch.setattr(pull, "_convert", convert)
    hub.add("org/m-GGUF", {"m-Q4_K_M.gguf": b"GGUF four", "m-Q8_0.gguf": b"GGUF eight"})
    base = ("--source_model", "org/m-GGUF", "--model_repository_path", str(tmp_path / "models"))
    result = ovms("--pull", *base, "--gguf_filename", "m-Q8_0.gguf")
    assert result.exit_code == 0, result.output
    assert files == ["m-Q8_0.gguf"]


@pytest.mark.parametrize(
    ("args", "weights"),
    [
        (("--weight-format", "int4"), ("int4", 128, 1.0)),
        (("--weight_format", "int8"), ("int8", 128, 1.0)),
        (("--weight-format", "fp16"), ("fp16", 128, 1.0)),
        (("--weight-format", "fp32"), ("bf16", 128, 1.0)),
        (("--extra_quantization_params", "--group-size 64 --ratio=0.8"), ("int4", 64, 0.8)),
    ],
)
def test_weights_of_an_export_are_as_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], weights: tuple[str, int, float]
) -> None:
    seen: list[pull.Source] = []

    def pulled(source: pull.Source, **_: Any) -> Path:
        seen.append(source)
        return ovms_files.model(tmp_path / "cached")

    monkeypatch.setattr(pull, "pull_model", pulled)
    result = ovms("--pull", "--source_model", "o/m", "--model_repository_path", str(tmp_path / "r"), *args)
    assert result.exit_code == 0, result.output
    (source,) = seen
    assert source.exported is not None
    assert (source.exported.kind, source.exported.group_size, source.exported.ratio) == weights


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("--weight-format", "nf4"), "--weight-format nf4 is not supported; say one of int4, int8, fp16, bf16"),
        (
            ("--extra_quantization_params", "--awq"),
            "--extra_quantization_params --awq is not supported; export the model",
        ),
        (("--extra_quantization_params", "--ratio x"), "--ratio must be a number, not x"),
    ],
)
def test_other_weights_are_refused(tmp_path: Path, args: tuple[str, ...], problem: str) -> None:
    result = ovms("--pull", "--source_model", "o/m", "--model_repository_path", str(tmp_path), *args)
    assert (result.exit_code, problem in result.stderr) == (2, True)


def test_every_flag_of_the_command_has_a_row_and_a_test() -> None:
    context = click.Context(cli)
    command = cli.get_command(context, "ovms")
    assert command is not None
    assert {option.name for option in command.params} == {flag.parameter for flag in FLAGS} | {
        flag.name for flag in GRAPH_FLAGS
    }
    text = Path(__file__).read_text()
    names = [flag.name for flag in FLAGS if flag.fate is Fate.APPLIED] + [flag.name for flag in GRAPH_FLAGS]
    assert [name for name in names if f'"--{name}' not in text] == []
