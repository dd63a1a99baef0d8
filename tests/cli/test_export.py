"""Checkpoints in safetensors form: which files are fetched, what is refused before they are, and how the exporter's
process is followed. tests/e2e/test_by_name.py exports one."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from headrace.cli.export import exporter as exporter_file
from headrace.cli.export import run as exporting
from headrace.cli.export.run import why_unservable
from headrace.cli.export.weights import (
    ExportedWeights,
    ExportSizes,
    bytes_per_weight,
    num_vision_weights,
    sizes_of,
    weights_named,
    why_unreadable,
)
from headrace.cli.main import cli
from headrace.cli.models import pull as pull_module
from headrace.cli.models.model_cache import model_directory, read_manifest
from headrace.cli.models.selection import HubFile, HubListing, choose_files
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.model_files.score_cap import WITHOUT_SCORE_CAP
from tests.architectures.families import FAMILIES
from tests.cli.conftest import write_files
from tests.hub import Hub

CONFIG = {"model_type": "llama", "torch_dtype": "bfloat16", "num_hidden_layers": 2, "num_attention_heads": 2}
PIECES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
MakeExporter = Callable[[str], None]


def pull(*args: str) -> Result:
    return CliRunner().invoke(cli, ["pull", *args])


def listing(*paths: str) -> HubListing:
    return HubListing("o/m", "c0", tuple(HubFile(path, 1000, None) for path in paths))


def checkpoint(**config: object) -> dict[str, bytes]:
    """The files of a checkpoint, whose weights are none."""
    return {
        "config.json": json.dumps({**CONFIG, **config}).encode(),
        "model.safetensors": b"w" * 2_000_000,
        "tokenizer.json": b"{}",
    }


def compressed(form: str, **weights: object) -> dict[str, object]:
    """The quantization_config of compressed-tensors."""
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


@pytest.fixture
def exporter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MakeExporter:
    """Replaces the Python that exports by a script for a shell, which gets the exporter's arguments as "$@"."""

    def replace(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\nshift 2\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setenv("HEADRACE_EXPORT_PYTHON", str(path))

    return replace


@pytest.mark.parametrize(
    ("paths", "wanted", "chosen"),
    [
        (["model.safetensors", "config.json", "README.md"], None, ["config.json", "model.safetensors"]),
        (["config.json", *PIECES, "consolidated.safetensors", "pytorch_model.bin"], "INT4", ["config.json", *PIECES]),
        (["config.json", "model.safetensors", "m-Q4_0.gguf"], "int8", ["config.json", "model.safetensors"]),
        (["config.json", "model.safetensors", "m-Q4_0.gguf"], None, ["m-Q4_0.gguf"]),
        (["config.json", "model.safetensors", "m-BF16.gguf"], "bf16", ["m-BF16.gguf"]),
    ],
)
def test_a_checkpoint_is_chosen_with_its_pieces(paths: list[str], wanted: str | None, chosen: list[str]) -> None:
    choice = choose_files(listing(*paths), wanted)
    assert [file.path for file in choice.files] == chosen
    assert choice.checkpoint == (".safetensors" in chosen[-1])
    forced = choose_files(listing(*paths), wanted, exports=True)
    assert forced.safetensors_bytes == 1000 * sum(path.startswith("model") for path in paths)


@pytest.mark.parametrize(
    ("paths", "sentence"),
    [
        (["config.json", "pytorch_model.bin"], "pickles of PyTorch, which may run code"),
        (["config.json", PIECES[0]], "in 2 pieces and lacks 1"),
        (["model.safetensors"], "lacks config.json"),
    ],
)
def test_what_is_no_checkpoint_is_refused(paths: list[str], sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        choose_files(listing(*paths))


def test_without_the_packages_nothing_is_downloaded_and_the_refusal_says_what_helps(hub: Hub) -> None:
    hub.add("o/m", checkpoint())
    refused = pull("o/m", "--weights", "int4")
    assert refused.exit_code == 2
    assert "pip install 'headrace[export]'" in refused.stderr
    assert f"packages that {sys.executable} does not have (torch" in refused.stderr
    assert hub.fetched("o/m") == ["config.json"]


@pytest.fixture
def same_modules() -> Iterator[None]:
    """What the exporter hides is found again after the test."""
    before = dict(sys.modules)
    yield
    sys.modules.clear()
    sys.modules.update(before)


@pytest.mark.usefixtures("same_modules")
def test_a_package_that_does_not_work_is_told_from_one_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As transformers does with a torchvision of another build: it says that a module of its own is missing."""
    monkeypatch.syspath_prepend(str(tmp_path))
    within = "try:\n    raise RuntimeError('operator nms does not exist')\nexcept RuntimeError as error:\n"
    (tmp_path / "unfit_package.py").write_text(f"{within}    raise ModuleNotFoundError('requirements?') from error\n")
    monkeypatch.setattr(exporter_file, "_PACKAGES", ("absent_package", "absent_package.part"))
    assert exporter_file.missing_packages() == ["absent_package", "absent_package"]
    monkeypatch.setattr(exporter_file, "_PACKAGES", ("absent_package", "unfit_package"))
    with pytest.raises(exporter_file.ExportError, match="cannot import unfit_package: operator nms does not exist"):
        exporter_file.missing_packages()


@pytest.mark.usefixtures("same_modules")
@pytest.mark.parametrize(
    ("text", "is_found"),
    [("", True), ("raise RuntimeError('operator nms does not exist')", False), ("import absent_package", False)],
)
def test_a_torchvision_that_does_not_work_is_not_found(
    text: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(exporter_file, "_PACKAGES", ())
    assert exporter_file.missing_packages() == []
    assert (importlib.util.find_spec("torchvision") is not None) is is_found


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "are quantised by bitsandbytes, and only weights of 16 or 32 bits, AWQ (gemm",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "are quantised by fp8 as e5m2, and only"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "are quantised by modelopt as NVFP4, and only"),
        ({"quant_method": "mxfp4"}, "are quantised by mxfp4, which is read of gpt_oss only"),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, type="float"),
            "are quantised by compressed-tensors as nvfp4-pack-quantized with",
        ),
        (
            compressed("pack-quantized", num_bits=3, type="int"),
            "are quantised by compressed-tensors as pack-quantized with 3 bits",
        ),
        (
            compressed("pack-quantized", num_bits=4, type="int", strategy="group", actorder="group"),
            "are quantised by compressed-tensors in the order of activations (actorder)",
        ),
        (
            {**compressed("pack-quantized", num_bits=4, type="int"), "transform_config": {"config_groups": {}}},
            "are rotated while the model runs",
        ),
        (
            {**compressed("pack-quantized", num_bits=4, type="int"), "sparsity_config": {"format": "sparse-bitmask"}},
            "are stored without their zeros",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "dense"},
            "are quantised by compressed-tensors without config_groups",
        ),
        ({"quant_method": "gptq", "bits": 3}, "are quantised by gptq with 3 bits, and only"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
            "are quantised by gptq in the order of activations",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"x": {"bits": 8}}},
            "are quantised by gptq with other bits in some layers",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV"}, "are packed by awq for GEMV"),
    ],
)
def test_unreadable_weights_are_refused_before_the_download(hub: Hub, options: dict[str, object], problem: str) -> None:
    hub.add("o/m", checkpoint(quantization_config=options))
    refused = pull("o/m")
    assert refused.exit_code == 2
    assert f"the weights of o/m {problem}" in refused.stderr
    assert hub.fetched("o/m") == ["config.json"]


def test_what_no_worker_serves_is_refused_before_the_download(hub: Hub) -> None:
    hub.add("o/m", checkpoint(model_type="mamba"))
    refused = pull("o/m")
    assert refused.exit_code == 2
    assert "o/m cannot be served: its architecture (mamba) has only recurrent layers" in refused.stderr
    assert hub.fetched("o/m") == ["config.json"]


def test_gemma_2_27b_is_refused_before_the_download_as_its_gguf_files_are(hub: Hub) -> None:
    hub.add("o/m", checkpoint(model_type="gemma2", num_hidden_layers=46, attn_logit_softcapping=50.0))
    refused = pull("o/m")
    assert refused.exit_code == 2
    assert f"o/m cannot be served: {WITHOUT_SCORE_CAP}" in refused.stderr
    assert hub.fetched("o/m") == ["config.json"]


@pytest.mark.parametrize("name", FAMILIES)
def test_exactly_the_families_that_workers_refuse_are_refused_before_the_download(name: str) -> None:
    family = FAMILIES[name]
    refused = why_unservable({"model_type": family.model_type, **family.whole_config})
    assert bool(refused) == bool(family.refused), refused


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["o/m", "--group-size", "64"], "--group-size is for --weights int4"),
        (["o/m", "--weights", "int8", "--ratio", "0.5"], "--ratio is for --weights int4"),
        (["o/m", "--awq"], "--awq is for --weights int4; add that"),
        (
            ["o/m", "--weights", "int4", "--scale-estimation"],
            "--scale-estimation needs texts; name a file with one in each",
        ),
        (
            ["o/m", "--weights", "int4", "--dataset", __file__],
            "--dataset is for --awq, --scale-estimation and a --ratio",
        ),
        (
            ["o/m", "--weights", "int4", "--awq", "--dataset", "wikitext2"],
            "--dataset wikitext2: there is no such file; name a file with a text in each line (data sets of a hub",
        ),
        (["o/m", "--weights", "int4", "--awq", "--dataset", "/dev/null"], "--dataset /dev/null: it has no text"),
        (["o/m:Q4_0", "--weights", "int4"], "--weights is for OWNER/NAME on a hub without another :QUANTISATION"),
        (["smollm2-135m", "--weights", "int4"], "--weights is for OWNER/NAME on a hub"),
    ],
)
def test_flags_that_contradict_each_other_are_refused(hub: Hub, arguments: list[str], sentence: str) -> None:
    refused = pull(*arguments)
    assert (refused.exit_code, sentence in refused.stderr) == (2, True), refused.stderr
    assert hub.seen == []


def test_an_export_is_followed_and_recorded(
    hub: Hub, exporter: MakeExporter, tmp_path: Path, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_INTERVAL_S", 0.05)
    made, heard = write_files(tmp_path / "made", model_files), tmp_path / "heard"

    def say(line: str) -> None:
        told.append(line)
        if "reading (" in line:
            heard.touch()

    told: list[str] = []
    monkeypatch.setattr(pull_module, "say", say)
    exporter(
        f'[ "$1" = check ] && exec grep -q llama "$2/config.json"\n'
        f'echo reading; until [ -e {heard} ]; do sleep 0.02; done; echo "compressing with $4"\n'
        f'cat "$2/model.safetensors" >/dev/null || exit 1; cp {made}/* "$3"; echo a table >&2'
    )
    hub.add("o/m", checkpoint())
    pulled = pull("o/m", "--weights", "int4", "--group-size", "64", "--ratio", "0.8")
    assert pulled.exit_code == 0, pulled.stderr
    assert told[0].startswith("o/m:int4: safetensors, to be exported with weights in int4, 2.0 MB to download")
    assert any(re.fullmatch(r"o/m:int4: reading \(\d+ s, \d\.\d GiB of memory\)", line) for line in told), told
    (line,) = [line for line in told if "compressing with " in line]
    options = json.loads(line.partition("compressing with ")[2])
    assert options.pop("memory_bytes") > 1 << 20
    assert options == {
        "mode": "int4_asym",
        "task": "text",
        "group_size": 64,
        "ratio": 0.8,
        "awq": False,
        "scale_estimation": False,
        "dataset": None,
        "vision_mode": "int8_asym",
        "vision": [],
    }
    assert exporter_file.Options(**options, memory_bytes=1).mode == "int4_asym"
    manifest = read_manifest(model_directory("o/m:int4"))
    assert manifest is not None
    wanted = {"weights": "int4", "group_size": "64", "ratio": "0.8", "reference": "o/m:int4"}
    assert wanted.items() <= manifest.source.items()
    assert {record.name for record in manifest.files} == set(model_files)


@pytest.mark.parametrize(
    "options",
    [
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        {"quant_method": "fbgemm_fp8"},
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        {"quant_method": "awq", "bits": 4, "version": "GEMM"},
        {"quant_method": "gptq", "bits": 8, "desc_act": True, "group_size": -1},
        compressed("pack-quantized", num_bits=4, type="int", strategy="group", actorder="static"),
        compressed("pack-quantized", num_bits=8, type="int"),
        compressed("int-quantized", num_bits=8, type="int"),
        compressed("float-quantized", num_bits=8, type="float"),
    ],
)
def test_what_is_read_is_not_refused(options: dict[str, object]) -> None:
    assert why_unreadable({**CONFIG, "quantization_config": options}) == ""
    if groups := options.get("config_groups"):
        assert isinstance(groups, dict)
        of_groups = {name: {**group, "format": options["format"]} for name, group in groups.items()}
        mixed = {**options, "format": "mixed-precision", "config_groups": of_groups}
        assert why_unreadable({**CONFIG, "quantization_config": mixed}) == ""
    assert why_unreadable({**CONFIG, "model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}) == ""


def test_integers_of_latent_attention_are_not_kept() -> None:
    config = {**CONFIG, "model_type": "deepseek_v2", "kv_lora_rank": 512}
    assert "by awq, and the integers of its latent" in why_unreadable(
        {**config, "quantization_config": {"quant_method": "awq", "bits": 4}}
    )
    assert not why_unreadable({**config, "quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}})


@pytest.mark.parametrize("flags", [["--awq"], ["--ratio", "0.9"]])
def test_methods_for_int4_with_a_data_set_are_passed_on_and_recorded(
    hub: Hub,
    exporter: MakeExporter,
    tmp_path: Path,
    model_files: dict[str, bytes],
    flags: list[str],
) -> None:
    made, texts = write_files(tmp_path / "made", model_files), tmp_path / "texts.txt"
    texts.write_text("one text\nanother\n")
    exporter(f'[ "$1" = check ] && exit 0\necho "$4" >{tmp_path}/options; cp {made}/* "$3"')
    hub.add("o/m", checkpoint())
    pulled = pull(
        "o/m", "--weights", "int4", "--group-size", "-1", *flags, "--scale-estimation", "--dataset", str(texts)
    )
    assert pulled.exit_code == 0, pulled.stderr
    by = "AWQ and scale estimation" if "--awq" in flags else "scale estimation"
    assert f"exported with weights in int4, with {by} by the texts in texts.txt" in pulled.stderr
    options = json.loads((tmp_path / "options").read_text())
    assert (options["awq"], options["scale_estimation"], options["group_size"]) == ("--awq" in flags, True, -1)
    assert options["dataset"] == str(texts)
    manifest = read_manifest(model_directory("o/m:int4"))
    assert manifest is not None
    assert manifest.source["dataset_sha256"] == sha256(texts.read_bytes()).hexdigest()
    assert manifest.source.get("awq", "") == ("yes" if "--awq" in flags else "")
    texts.write_text("a third\n")
    other = pull(
        "o/m", "--weights", "int4", "--group-size", "-1", *flags, "--scale-estimation", "--dataset", str(texts)
    )
    assert (other.exit_code, "choose another name with --name" in other.stderr) == (2, True)


def test_quantised_weights_are_not_improved(hub: Hub, tmp_path: Path) -> None:
    hub.add("o/m", checkpoint(quantization_config={"quant_method": "awq", "bits": 4}))
    refused = pull("o/m", "--weights", "int4", "--awq")
    assert refused.exit_code == 2
    assert "o/m:int4 are quantised already, and stay as they are; leave out --awq" in refused.stderr
    (tmp_path / "texts.txt").write_text("a text")
    hub.add("o/v", checkpoint(vision_config={}))
    refused = pull("o/v", "--weights", "int4", "--awq", "--dataset", str(tmp_path / "texts.txt"))
    assert (refused.exit_code, "is for models of text alone; leave out --dataset" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("script", "kind", "sentence"),
    [
        ("echo 'error: it is odd' >&2; exit 2", CommandError, "o/m cannot be exported: it is odd; take"),
        ("kill -9 $$", CommandFailed, "ended by signal 9; is there enough memory"),
        ("echo what >&2; exit 1", CommandFailed, "ended with status 1: what"),
    ],
)
def test_failures_of_the_exporter_are_sentences(
    exporter: MakeExporter, script: str, kind: type[CommandError], sentence: str
) -> None:
    exporter(script)
    with pytest.raises(CommandError, match=sentence) as raised:
        exporting.check_exportable("o/m", CONFIG)
    assert raised.type is kind


@pytest.mark.parametrize(
    ("model_type", "problem"),
    [
        ("fits", ""),
        ("sees", ""),
        (
            "newer",
            r"\(newer\) with transformers of at least 5.5.0, and this Python has 4.57.6; set HEADRACE_EXPORT_PYTHON",
        ),
        ("between", "of at least 5.2.0 and at most 5.2.99,"),
        ("older", "of at most 4.56.0,"),
        ("never", r"\(never\) with no version of transformers"),
        ("pictures", r"no text-generating models of its architecture \(pictures\)"),
        ("unknown", r"no text-generating models of its architecture \(unknown\)"),
    ],
)
def test_an_architecture_that_needs_another_transformers_is_refused(
    model_type: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {
        "newer": ("5.5.0", None),
        "between": ("5.2.0", "5.2.99"),
        "older": (None, "4.56.0"),
        "never": ("5.5", "5.0"),
        "fits": ("4.5", None),
    }

    def supported(model_type: str, _exporter: str, library_name: str) -> dict[str, object]:
        if model_type == "pictures":
            return {"image-to-text": partial(object)}
        if model_type == "sees":
            return {"image-text-to-text": partial(object)}
        least, most = limits[model_type]
        made = type("Config", (), {"MIN_TRANSFORMERS_VERSION": least, "MAX_TRANSFORMERS_VERSION": most})
        return {"text-generation-with-past": partial(made)}

    tasks = SimpleNamespace(TasksManager=SimpleNamespace(get_supported_tasks_for_model_type=supported))
    monkeypatch.setitem(sys.modules, "optimum.exporters.tasks", tasks)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.6"))  # type: ignore[arg-type]
    with pytest.raises(exporter_file.ExportError, match=problem) if problem else nullcontext():
        exporter_file.check_type(model_type)


@pytest.mark.parametrize("vision", [[], ["openvino_vision_embeddings_model.xml"]])
def test_of_a_multimodal_export_what_is_served_is_kept(tmp_path: Path, vision: list[str]) -> None:
    checkpoint, exported = tmp_path / "checkpoint", tmp_path / "exported"
    names = ("language_model", "text_embeddings_model", "tokenizer", "detokenizer", "vision_embeddings_model", "audio")
    for folder, files in (
        (checkpoint, ["config.json", "chat_template.json", "preprocessor_config.json"]),
        (exported, ["config.json", *(f"openvino_{name}.{suffix}" for name in names for suffix in ("xml", "bin"))]),
    ):
        folder.mkdir()
        for name in files:
            (folder / name).write_text(name)
    networks = exporter_file._keep_served(checkpoint, exported, "image-text-to-text", vision)
    of_text = ["openvino_language_model.xml", "openvino_text_embeddings_model.xml"]
    assert [path.name for path in networks] == of_text + vision
    kept = {path.name for path in exported.iterdir()}
    assert {"config.json", "chat_template.json", "preprocessor_config.json", "openvino_detokenizer.bin"} <= kept
    assert not [name for name in kept if "audio" in name]
    assert len([name for name in kept if "vision" in name]) == 2 * len(vision)
    with pytest.raises(exporter_file.ExportError, match="no language model of its own"):
        exporter_file._keep_served(checkpoint, checkpoint, "image-text-to-text", vision)
    with pytest.raises(exporter_file.ExportError, match="no openvino_merger.xml, which its images need"):
        exporter_file._keep_served(checkpoint, exported, "image-text-to-text", ["openvino_merger.xml"])


def test_sizes_follow_bits_and_groups() -> None:
    assert weights_named("int4").bytes_of(1280) == 640 + 25
    assert ExportedWeights("int4", 32, 0.5).bytes_of(1280) == 320 + 50 + 640
    assert weights_named(None).bytes_of(1000) == 1000
    assert weights_named("BF16").bytes_of(1000) == weights_named("fp16").bytes_of(1000) == 2000
    assert ExportedWeights("int4", -1).bytes_of(1280) == 640
    assert [bytes_per_weight({**CONFIG, "torch_dtype": kind}) for kind in ("float32", "float16")] == [4, 2]
    assert bytes_per_weight({"quantization_config": {"quant_method": "mxfp4"}}) < 1
    packed = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    assert sizes_of(ExportedWeights(), packed, 500) == ExportSizes(500, 0, 4000)
    packed = {"quantization_config": compressed("pack-quantized", num_bits=8, type="int")}
    assert sizes_of(ExportedWeights(), packed, 500) == ExportSizes(500, 0, 2000)
    for floats in ({"quant_method": "fp8"}, compressed("float-quantized", num_bits=8, type="float")):
        of_floats = {"quantization_config": floats}
        assert sizes_of(ExportedWeights(), of_floats, 500) == ExportSizes(500, 0, 2000)
        assert sizes_of(ExportedWeights("bf16"), of_floats, 500) == ExportSizes(1000, 0, 2000)
    experts = {"quantization_config": {"quant_method": "mxfp4"}}
    assert sizes_of(ExportedWeights(), experts, 5300).scratch_bytes == pytest.approx(60_000, rel=0.01)
    assert sizes_of(ExportedWeights("int4", 128), CONFIG, 2560) == ExportSizes(640 + 25, 0, 2560)


@pytest.mark.parametrize(
    ("vision", "millions"),
    [
        ({"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096, "hidden_act": "quick_gelu"}, 301),
        ({"hidden_size": 768, "num_hidden_layers": 12, "intermediate_size": 3072}, 84),
        ({"embed_dim": 1280, "hidden_size": 3584, "depth": 32, "mlp_ratio": 4}, 629),
        ({"hidden_size": 1280, "depth": 32, "intermediate_size": 3420, "hidden_act": "silu"}, 629),
    ],
    ids=["LLaVA 1.5", "SmolVLM 256M", "Qwen2-VL", "Qwen2.5-VL"],
)
def test_weights_for_images_are_counted_with_the_bits_that_they_get(vision: dict[str, object], millions: int) -> None:
    config = {**CONFIG, "vision_config": vision}
    num_vision, num_text = num_vision_weights(config), 1280 << 20
    assert num_vision // 1_000_000 == millions
    whole = 2 * (num_vision + num_text)
    assert sizes_of(ExportedWeights("bf16"), config, whole, with_images=True).vision_bytes == 2 * num_vision
    four_bits = sizes_of(ExportedWeights("int4"), config, whole, with_images=True)
    assert (four_bits.text_bytes, four_bits.vision_bytes) == (ExportedWeights("int4").bytes_of(num_text), num_vision)
    assert sizes_of(ExportedWeights("int8"), config, whole).text_bytes == num_text + num_vision
