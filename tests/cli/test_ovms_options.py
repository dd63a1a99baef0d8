"""What becomes of each option of OVMS: applied, named or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.cli.hosting.settings import ModelOptions, ModelRules, ModelSettings
from headrace.cli.ovms import options as tables
from headrace.cli.ovms.configuration import model_of_graph, read_configuration
from headrace.cli.ovms.graphs import CALCULATORS, parse_graph
from headrace.cli.ovms.options import Draft, Fate, Option, OptionError
from headrace.common.commands import CommandError
from tests.cli import ovms_files
from tests.cli.ovms_files import embeddings_graph, llm_graph, rerank_graph

# A value of each option that is applied, and where it is found.
LLM_APPLIED: dict[str, tuple[str, Any]] = {
    "max_num_batched_tokens": ("512", ("options", "max_num_batched_tokens", 512)),
    "cache_size": ("3", ("options", "kv_total_gb", 3.0)),
    "max_num_seqs": ("64", ("options", "max_num_seqs", 64)),
    "best_of_limit": ("4", ("rules", "best_of_limit", 4)),
    "max_tokens_limit": ("99", ("rules", "max_tokens_limit", 99)),
    "tool_parser": ('"hermes3"', ("rules", "tool_parser", "hermes")),
    "reasoning_parser": ('"qwen3"', ("rules", "reasoning_parser", "think")),
    "response_parser": ('"phi4"', ("rules", "tool_parser", "phi4")),
    "draft_models_path": ('"draft"', ("options", "draft_model", Path("draft"))),
    "draft_eagle3_mode": ("true", ("options", "speculation", "eagle3")),
    "cache_eviction_config": (
        "{start_size: 32, recent_size: 64, max_cache_size: 512, aggregation_mode: SUM}",
        (
            "options",
            "cache_eviction",
            "max_cache_size=512,start_size=32,recent_size=64,aggregation_mode=sum",
        ),
    ),
}
EMBEDDINGS_APPLIED: dict[str, tuple[str, Any]] = {
    "normalize_embeddings": ("false", ("options", "normalizes", False)),
    "pooling": ("MEAN", ("options", "pooling", "mean")),
    "truncate": ("true", ("rules", "truncates_texts", True)),
}
RERANK_APPLIED: dict[str, tuple[str, Any]] = {
    "max_allowed_chunks": ("7", ("rules", "max_documents", 7)),
    "max_position_embeddings": ("300", ("settings", "max_context_tokens", 300)),
}
# They are applied by checks of their own.
CHECKED = {"models_path", "device", "draft_device", "target_device", "plugin_config", "pipeline_type"}
PLUGIN_APPLIED: dict[str, tuple[Any, Any]] = {
    "KV_CACHE_PRECISION": ("u4", ("options", "kv_precision", "u4")),
    "EXECUTION_MODE_HINT": ("ACCURACY", ("options", "execution_mode", "accuracy")),
    "INFERENCE_PRECISION_HINT": ("f32", ("options", "execution_mode", "accuracy")),
    "INFERENCE_NUM_THREADS": ("3", ("settings", "threads", 3)),
    "prompt_lookup": (True, ("options", "speculation", "ngram")),
}
VALUES = {"string": '"X"', "bool": "true", "uint32": "5", "uint64": "5", "float": "0.5"}


def name_of(option: Option) -> str:
    return option.name


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory of a model, with one of a draft model in it."""
    ovms_files.model(tmp_path)
    (tmp_path / "draft").mkdir()
    return tmp_path


def read(text: str, directory: Path) -> tuple[ModelSettings, list[str]]:
    return model_of_graph("m", parse_graph(text), directory)


def found(model: ModelSettings, where: str, name: str) -> Any:
    part: Any = {"options": model.options, "rules": model.rules, "settings": model}[where]
    return model.options.worker.get(name) if where == "options" and not hasattr(part, name) else getattr(part, name)


def assert_applied(model: ModelSettings, directory: Path, expected: tuple[str, str, Any]) -> None:
    where, name, value = expected
    assert found(model, where, name) == (directory / value if isinstance(value, Path) else value)


@pytest.mark.parametrize("name", LLM_APPLIED)
def test_an_option_of_text_generation_is_applied(directory: Path, name: str) -> None:
    text, expected = LLM_APPLIED[name]
    model, notes = read(llm_graph(f'models_path: "./", {name}: {text}'), directory)
    assert_applied(model, directory.resolve(), expected)
    assert (model.name, Path(model.model), notes) == ("m", directory.resolve(), [])


@pytest.mark.parametrize("name", EMBEDDINGS_APPLIED)
def test_an_option_of_embeddings_is_applied(directory: Path, name: str) -> None:
    ovms_files.model(directory, "embeddings")
    text, expected = EMBEDDINGS_APPLIED[name]
    model, notes = read(embeddings_graph(f'models_path: "./", {name}: {text}'), directory)
    assert_applied(model, directory, expected)
    assert notes == []


def test_embeddings_have_ovmss_defaults(directory: Path) -> None:
    ovms_files.model(directory, "embeddings")
    model, _ = read(embeddings_graph(), directory)
    assert model.options == ModelOptions(pooling="cls", normalizes=True)


@pytest.mark.parametrize("name", RERANK_APPLIED)
def test_an_option_of_reranking_is_applied(directory: Path, name: str) -> None:
    ovms_files.model(directory, "rerank")
    text, expected = RERANK_APPLIED[name]
    model, notes = read(rerank_graph(f'models_path: "./", {name}: {text}'), directory)
    assert_applied(model, directory, expected)
    assert notes == []


@pytest.mark.parametrize("name", PLUGIN_APPLIED)
def test_a_property_is_applied(directory: Path, name: str) -> None:
    value, expected = PLUGIN_APPLIED[name]
    draft = Draft(directory, {"model": str(directory)})
    tables.take_plugin_config(draft, {name: value})
    assert_applied(draft.finished("m"), directory, expected)
    assert draft.notes == []


def test_every_option_that_is_applied_has_a_case() -> None:
    tested = (LLM_APPLIED, EMBEDDINGS_APPLIED, RERANK_APPLIED)
    for calculator, cases in zip(CALCULATORS, tested, strict=True):
        applied = {option.name for option in calculator.options if option.fate is Fate.APPLIED}
        assert applied - CHECKED == set(cases)
    assert {one.name for one in tables.PLUGIN_CONFIG if one.fate is Fate.APPLIED} == set(PLUGIN_APPLIED)


def value_of(option: Option) -> str:
    """A value in a graph that is not one without effect."""
    if not isinstance(option.kind, str):
        return next(str(value) for value in option.kind if value not in option.without_effect)
    return "false" if option.kind == "bool" and True in option.without_effect else VALUES[option.kind]


@pytest.mark.parametrize(
    "option", [one for one in tables.TEXT_GENERATION if one.fate is Fate.NAMED], ids=lambda one: str(one.name)
)
def test_an_option_without_effect_is_named_with_what_to_use(directory: Path, option: Option) -> None:
    model, notes = read(llm_graph(f'models_path: "./", {option.name}: {value_of(option)}'), directory)
    assert notes == [f"{option.name} has no effect: {option.what}"]
    assert (model.options, model.rules) == (ModelOptions(), ModelRules())


@pytest.mark.parametrize(
    "option", [one for one in tables.PLUGIN_CONFIG if one.fate is Fate.NAMED], ids=lambda one: str(one.name)
)
def test_a_property_without_effect_is_named(directory: Path, option: Option) -> None:
    draft = Draft(directory, {"model": "m"})
    value = not option.without_effect or True not in option.without_effect if option.kind == "bool" else "X"
    tables.take_plugin_config(draft, {option.name: value})
    assert draft.notes == [f"plugin_config: {option.name} has no effect: {option.what}"]
    for value in option.without_effect:
        draft = Draft(directory, {"model": "m"})
        tables.take_plugin_config(draft, {option.name: value})
        assert draft.notes == []


@pytest.mark.parametrize(
    "option", [one for one in tables.PLUGIN_CONFIG if one.fate is Fate.REFUSED], ids=lambda one: str(one.name)
)
def test_a_property_that_changes_answers_is_refused(directory: Path, option: Option) -> None:
    with pytest.raises(OptionError, match=f"^plugin_config: {option.name} is not supported: "):
        tables.take_plugin_config(Draft(directory), {option.name: "X"})


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("sparse_attention_config: {mode: TRISHAPE}", "sparse_attention_config is not supported: every token attends"),
        (
            "cache_eviction_config: {start_size: 1, recent_size: 1, max_cache_size: 9, apply_rotation: true}",
            r"cache_eviction_config\.apply_rotation is not supported",
        ),
        (
            "cache_eviction_config: {start_size: 1 recent_size: 1 max_cache_size: 9 kv_crush_config: {budget: 3}}",
            r"cache_eviction_config\.kv_crush_config\.budget is not supported",
        ),
        ("cache_eviction_config: {start_size: 1}", r"has no cache_eviction_config\.recent_size"),
        ('device: "GPU"', "device GPU is not supported: headrace computes on CPUs only"),
        ('device: "GPU.1"', "device GPU.1 is not supported"),
        ('device: "NPU"', "device NPU is not supported"),
        ('device: "HETERO:GPU,CPU"', "device HETERO:GPU,CPU is not supported"),
        ('draft_device: "GPU"', "device GPU is not supported"),
        ("pipeline_type: OMNI", "pipeline_type OMNI is not supported"),
        ("pipeline_type: FOO", "pipeline_type has no value FOO"),
        ('tool_parser: "onyx"', "tool_parser 'onyx' is no parser; there are auto, none, gpt-oss"),
        ('reasoning_parser: "hermes3"', "reasoning_parser 'hermes3' is no parser; there are auto, none"),
        ('plugin_config: \'{"KV_CACHE_PRECISION": "f8"}\'', "KV_CACHE_PRECISION f8 is not supported; say u8"),
        ("plugin_config: '{\"FOO\": 1}'", "plugin_config has FOO, which headrace does not know"),
        ("plugin_config: '{'", "plugin_config is not JSON"),
        ("plugin_config: '[]'", "plugin_config must be a JSON object"),
        ("max_num_batched_tokens: 8", "max_num_batched_tokens 8 is too small for headrace; say at least 9"),
        ("max_num_sequences: 8", "line \\d+, column .*LLMCalculatorOptions has no option max_num_sequences"),
        ("cache_size: -1", r"line \d+, column"),
        ('draft_models_path: "nowhere"', "draft_models_path nowhere does not exist"),
    ],
)
def test_what_would_change_answers_or_is_wrong_is_refused_by_name(directory: Path, options: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        read(llm_graph(f'models_path: "./"\n{options}'), directory)


@pytest.mark.parametrize("device", ["CPU", "", "AUTO"])
def test_the_cpu_is_the_device(directory: Path, device: str) -> None:
    _, notes = read(llm_graph(f'models_path: "./" device: "{device}"'), directory)
    assert notes == []


def test_of_several_devices_the_cpu_is_taken_and_named(directory: Path) -> None:
    _, notes = read(llm_graph('models_path: "./" device: "AUTO:GPU,CPU" pipeline_type: VLM_CB'), directory)
    assert notes == ["device AUTO:GPU,CPU is the CPU: headrace computes on CPUs only"]


def test_steps_have_room_for_prompts_beside_the_sequences(directory: Path) -> None:
    model, notes = read(llm_graph('models_path: "./" max_num_seqs: 256 max_num_batched_tokens: 256'), directory)
    assert (model.options.worker["max_num_seqs"], model.options.worker["max_num_batched_tokens"]) == (248, 256)
    assert notes == ["max_num_seqs is 248 instead of 256: steps of max_num_batched_tokens 256 need room for prompts"]


def test_a_graph_without_a_known_calculator_is_refused_with_the_remedy() -> None:
    for calculator, remedy in (
        ("ImageGenCalculator", "headrace generates no images; use OVMS for it"),
        ("EmbeddingsCalculator", "export the model again with OVMS's export_model.py"),
        ("OpenVINOInferenceCalculator", "there are HttpLLMCalculator"),
    ):
        with pytest.raises(OptionError, match=remedy):
            parse_graph(f'node {{ calculator: "{calculator}" }}')


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "it has 0 nodes"),
        (llm_graph() + embeddings_graph(), "it has 2 nodes"),
        ('node { name: "x" }', "its node has no calculator"),
        ('node { calculator: "HttpLLMCalculator" }', "must have LLMCalculatorOptions once"),
        (llm_graph("cache_size: 1"), "LLMCalculatorOptions has no models_path"),
        ("node {", "line 1, column 6: it is not a graph in protobuf's text format"),
    ],
)
def test_what_is_no_graph_is_refused(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse_graph(text)


def test_options_may_be_an_extension_and_comments_are_no_calculators() -> None:
    graph = parse_graph(
        '# calculator: "Foo"\nnode { calculator: "LLMCalculator" '
        'options { [mediapipe.LLMCalculatorOptions.ext] { models_path: "m" } } }'
    )
    assert graph.values == {"models_path": "m"}


def test_a_graph_for_another_kind_of_model_is_refused(directory: Path) -> None:
    with pytest.raises(OptionError, match="has a model for text_generation, and EmbeddingsCalculatorOV is for embedd"):
        read(embeddings_graph(), directory)


def test_properties_of_kv_caches_mean_nothing_to_encoders(directory: Path) -> None:
    ovms_files.model(directory, "rerank")
    options = 'models_path: "./" plugin_config: \'{"KV_CACHE_PRECISION": "u8", "NUM_STREAMS": "1"}\''
    model, notes = read(rerank_graph(options), directory)
    assert model.options == ModelOptions()
    assert notes == ["plugin_config: the kv_precision has no effect: the model has no KV cache"]


# -- config.json ----------------------------------------------------------------------------------------------------


def test_a_configuration_names_graphs_and_models_by_paths_of_its_own(tmp_path: Path) -> None:
    graphs = {"org/llm": llm_graph('models_path: "./" cache_size: 2'), "gte": embeddings_graph(), "bge": rerank_graph()}
    ovms_files.model(tmp_path / "plain")
    entry = {"name": "plain", "base_path": "plain", "plugin_config": {"KV_CACHE_PRECISION": "u4"}, "nireq": 3}
    found = read_configuration(ovms_files.repository(tmp_path, graphs, [entry]))
    assert found.problems == ()
    assert found.notes == ("plain: nireq has no effect: use `max_num_seqs` in the graph",)
    assert {model.name: Path(model.model) for model in found.models} == {
        name: (tmp_path / name).resolve() for name in ("org/llm", "gte", "bge", "plain")
    }
    options = {model.name: model.options for model in found.models}
    assert (options["org/llm"].kv_total_gb, options["plain"].worker["kv_precision"]) == (2.0, "u4")


def test_paths_have_ovmss_defaults(tmp_path: Path) -> None:
    ovms_files.model(tmp_path / "a")
    ovms_files.model(tmp_path / "elsewhere")
    (tmp_path / "a" / "graph.pbtxt").write_text(llm_graph())
    (tmp_path / "b" / "1").mkdir(parents=True)
    (tmp_path / "b" / "1" / "graph.pbtxt").write_text(llm_graph('models_path: "../../elsewhere"'))
    (tmp_path / "c.pbtxt").write_text(llm_graph('models_path: "elsewhere"'))
    config = tmp_path / "config.json"
    config.write_text(
        '\ufeff{"mediapipe_config_list": [{"name": "a"}, {"name": "b", "base_path": ""}, '
        '{"name": "c", "base_path": ".", "graph_path": "c.pbtxt"}]}'
    )
    found = read_configuration(config)
    assert (found.problems, found.notes) == ((), ())
    assert [Path(model.model).name for model in found.models] == ["a", "elsewhere", "elsewhere"]


def test_models_of_a_subconfig_are_served_too(tmp_path: Path) -> None:
    config = ovms_files.repository(tmp_path, {"a": llm_graph()})
    ovms_files.model(tmp_path / "a" / "inner")
    (tmp_path / "a" / "subconfig.json").write_text(
        '{"model_config_list": [{"config": {"name": "inner", "base_path": "inner"}}]}'
    )
    found = read_configuration(config)
    assert [model.name for model in found.models] == ["a", "inner"]


def test_a_model_that_cannot_be_served_does_not_keep_the_others_from_it(tmp_path: Path) -> None:
    (tmp_path / "resnet" / "1").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    ovms_files.model(tmp_path / "shaped")
    entries = [
        {"name": "resnet", "base_path": "resnet"},
        {"name": "empty", "base_path": "empty"},
        {"name": "none"},
        {"name": "cloud", "base_path": "s3://bucket/model"},
        {"name": "shaped", "base_path": "shaped", "shape": "auto"},
        {"name": "gpu", "base_path": "shaped", "target_device": "GPU"},
        {"name": "good"},
    ]
    graphs = {"good": llm_graph(), "bad": llm_graph('models_path: "nowhere"')}
    found = read_configuration(ovms_files.repository(tmp_path, graphs, entries))
    assert [model.name for model in found.models] == ["good"]
    problems = dict(problem.split(": ", 1) for problem in found.problems)
    assert "has versions of a model with tensors as inputs" in problems["resnet"]
    assert "has neither graph.pbtxt nor a model for texts" in problems["empty"]
    assert "there is no directory" in problems["none"]
    assert problems["cloud"].startswith("s3://bucket/model is not on this host")
    assert problems["shaped"].startswith("shape is not supported: ")
    assert problems["gpu"].startswith("device GPU is not supported")
    assert problems["bad"].startswith("models_path nowhere does not exist")
    assert problems["good"].startswith("the name is there twice")


@pytest.mark.parametrize(
    "option", [one for one in tables.MODEL_ENTRY if one.fate is not Fate.APPLIED], ids=lambda one: str(one.name)
)
def test_each_option_of_an_entry_is_named_or_refused(tmp_path: Path, option: Option) -> None:
    ovms_files.model(tmp_path / "m")
    value: Any = {"bool": True, "integer": 4}.get(str(option.kind), {"a": 1})
    found = read_configuration(ovms_files.repository(tmp_path, {}, [{"name": "m", option.name: value}]))
    if option.fate is Fate.NAMED:
        assert found.notes == (f"m: {option.name} has no effect: {option.what}",)
        assert len(found.models) == 1
    else:
        assert found.problems == (f"m: {option.name} is not supported: {option.what}",)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not JSON"),
        ("[]", "it must be a JSON object"),
        ("{}", "it has neither model_config_list nor mediapipe_config_list"),
        ('{"models": []}', "it has an unknown field 'models'; there are mediapipe_config_list, model_config_list"),
        ('{"model_config_list": {}}', "model_config_list must be a list"),
        ('{"model_config_list": [{"name": "a"}]}', r'model_config_list\[0\] must be an object with "config" alone'),
        ('{"mediapipe_config_list": [{}]}', r"mediapipe_config_list\[0\] has no name"),
        ('{"mediapipe_config_list": [{"name": "a", "x": 1}]}', "has an unknown field 'x'; there are name, base_path"),
        ('{"mediapipe_config_list": [{"name": "a", "base_path": 1}]}', "base_path must be a text"),
    ],
)
def test_what_is_no_configuration_is_refused_as_a_whole(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(CommandError, match=problem):
        read_configuration(tmp_path / "config.json")


def test_sections_without_effect_are_named(tmp_path: Path) -> None:
    ovms_files.repository(tmp_path, {"a": llm_graph()})
    (tmp_path / "config.json").write_text(
        '{"mediapipe_config_list": [{"name": "a"}], "monitoring": {"metrics": {"enable": true}}, '
        '"pipeline_config_list": [{"name": "p"}], "custom_loader_config_list": []}'
    )
    assert [note.split(" ", 1)[0] for note in read_configuration(tmp_path / "config.json").notes] == [
        "monitoring",
        "pipeline_config_list",
    ]
