"""Models by name, from a hub that answers as the real one does."""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import certifi
import huggingface_hub
import pytest
from click.testing import CliRunner, Result

from headrace.cli.hosting.finding import find_draft_model, find_model
from headrace.cli.main import cli
from headrace.cli.models import pull
from headrace.cli.models.catalogue import CATALOGUE
from headrace.cli.models.model_cache import model_directory, read_manifest
from headrace.cli.models.reference import HubReference, parse_reference
from headrace.cli.models.requirements import Requirements, check_disk, check_weights_fit
from headrace.cli.models.selection import HubFile, HubListing, choose_files
from headrace.cli.models.shape import ModelShape, shape_of
from headrace.cli.models.short_names import SHORT_NAMES
from headrace.common.commands import CommandError
from headrace.gateway.chat.output_parsers.families import TOOL_FORMATS
from tests.cli.conftest import write_files
from tests.http_server import http_server
from tests.hub import Hub
from tests.patience import patience

CONFIG = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, list(args))


@pytest.fixture
def converted(model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, bytes]]:
    """The GGUF files that the converter got, each with its pieces."""
    seen: list[dict[str, bytes]] = []

    def convert(_name: str, gguf: Path, directory: Path) -> None:
        assert gguf.name == min(path.name for path in gguf.parent.iterdir())
        seen.append({path.name: path.read_bytes() for path in gguf.parent.iterdir()})
        write_files(directory, model_files)

    monkeypatch.setattr(pull, "_convert", convert)
    return seen


@pytest.mark.parametrize(
    ("text", "reference", "name"),
    [
        ("o/m", HubReference("o/m"), "o/m"),
        ("o/m:Q4_K_M", HubReference("o/m", "Q4_K_M"), "o/m:Q4_K_M"),
        ("o/m@v1.0", HubReference("o/m", None, "v1.0"), "o/m@v1.0"),
        ("o/m:Q8_0@refs/pr/3", HubReference("o/m", "Q8_0", "refs/pr/3"), "o/m:Q8_0@refs-pr-3"),
    ],
)
def test_a_name_has_a_repository_a_quantisation_and_a_revision(text: str, reference: HubReference, name: str) -> None:
    found = parse_reference(text)
    assert found == reference
    assert (str(found), reference.name) == (text, name)


@pytest.mark.parametrize("text", ["m", "a/b/c", "./m", "o/m:", "o/m@", "../m", "/a/b", "o/m:Q4:Q8", "o/m@a@b"])
def test_paths_and_half_names_are_no_references(text: str) -> None:
    assert parse_reference(text) is None


def listing(*paths: str) -> HubListing:
    return HubListing("o/m", "c", tuple(HubFile(path, 1000 + len(path), None) for path in paths))


@pytest.mark.parametrize(
    ("paths", "wanted", "chosen"),
    [
        (["M-Q8_0.gguf", "M-Q4_K_M.gguf", "M-Q2_K.gguf"], None, ["M-Q4_K_M.gguf"]),
        (["m-q8_0.gguf", "m-q4_0.gguf"], None, ["m-q4_0.gguf"]),
        (["M-IQ2_XXS.gguf"], None, ["M-IQ2_XXS.gguf"]),
        (["m-q8_0.gguf", "m-q4_0.gguf"], "Q8_0", ["m-q8_0.gguf"]),
        (["M.BF16.gguf", "M.F16.gguf"], "f16", ["M.F16.gguf"]),
        (["M-UD-Q4_K_XL.gguf", "M-Q4_K_M.gguf"], "UD-Q4_K_XL", ["M-UD-Q4_K_XL.gguf"]),
        (["one.gguf", "two.gguf"], "TWO", ["two.gguf"]),
        (["only.gguf", "mmproj-only-f16.gguf", "imatrix.gguf"], None, ["only.gguf"]),
        (
            ["Q8_0/M-Q8_0-00002-of-00002.gguf", "Q8_0/M-Q8_0-00001-of-00002.gguf", "M-Q4_0.gguf"],
            "q8_0",
            ["Q8_0/M-Q8_0-00001-of-00002.gguf", "Q8_0/M-Q8_0-00002-of-00002.gguf"],
        ),
    ],
)
def test_a_gguf_repository_gives_the_quantisation_that_is_wanted(
    paths: list[str], wanted: str | None, chosen: list[str]
) -> None:
    assert [file.path for file in choose_files(listing(*paths), wanted).files] == chosen


@pytest.mark.parametrize(
    ("paths", "wanted", "sentence"),
    [
        (["m-Q4_0.gguf"], "Q8_0", r"has no GGUF file Q8_0; there are Q4_0 \(0.0 GB\)"),
        (["a-Q4_0.gguf", "b-Q4_0.gguf"], "Q4_0", "several GGUF files Q4_0; name one of a-Q4_0, b-Q4_0"),
        (["m-Q8_0-00001-of-00003.gguf", "m-Q8_0-00003-of-00003.gguf"], None, "in 3 pieces and lacks number 2"),
        (["openvino_model.xml", "openvino_model.bin"], "Q4_0", "leave out :Q4_0"),
        (["M-IQ2_XXS.gguf", "M-Q2_K.gguf"], None, "say which, such as o/m:Q2_K"),
        (["README.md"], None, "neither openvino_model.xml"),
        (["mmproj-m-f16.gguf", "config.json"], None, "has only mmproj-m-f16.gguf, .* pull an OpenVINO version or the"),
    ],
)
def test_what_cannot_be_chosen_says_what_can(paths: list[str], wanted: str | None, sentence: str) -> None:
    with pytest.raises(CommandError, match=sentence):
        choose_files(listing(*paths), wanted)


def test_serve_fetches_a_name_that_is_missing_and_not_again(hub: Hub, model_files: dict[str, bytes]) -> None:
    hub.add("owner/model", {**model_files, "README.md": b"#"})
    assert find_model("owner/model") == (model_directory("owner/model"), "owner/model")
    assert sorted(hub.fetched("owner/model")) == sorted(model_files)
    num_seen = len(hub.seen)
    assert find_model("owner/model") == (model_directory("owner/model"), "owner/model")
    assert len(hub.seen) == num_seen


DIVIDED = {
    name.replace("openvino_model", network)
    for name in ("openvino_model.xml", "openvino_model.bin")
    for network in ("openvino_language_model", "openvino_text_embeddings_model")
}


VISION = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 28, "patch_size": 14}
PIXELS = json.dumps({"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}).encode()


def divided(model_files: dict[str, bytes], **config: object) -> dict[str, bytes]:
    """The files that the text of a multimodal model needs."""
    return {
        **{name: content for name, content in model_files.items() if "token" in name},
        **{name: f"{index:05}".encode() for index, name in enumerate(sorted(DIVIDED))},
        "config.json": json.dumps({"text_config": CONFIG, "vision_config": VISION, **config}).encode(),
    }


def test_a_multimodal_model_is_fetched_with_its_networks_for_images(
    hub: Hub, model_files: dict[str, bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    needed = {
        **divided(model_files, model_type="llava", image_token_index=9, image_seq_length=4),
        "preprocessor_config.json": PIXELS,
        "openvino_vision_embeddings_model.xml": b"<net/>",
        "openvino_vision_embeddings_model.bin": b"0" * 999,
    }
    hub.add("owner/sees", {**needed, "openvino_other_model.bin": b"0", "README.md": b"#"})
    directory, _ = find_model("owner/sees")
    assert "only its text" not in capsys.readouterr().err
    assert sorted(set(hub.fetched("owner/sees"))) == sorted(needed)
    assert {path.name for path in directory.iterdir()} == {*needed, "headrace.json"}
    row = json.loads(run("models", "show", "owner/sees", "--json").stdout)
    assert (row["weight_bytes"], row["vision_weight_bytes"], row["modalities"]) == (10, 999, ["text", "image"])
    assert row["memory_gib"]["8192"] > 1.5
    assert "takes         text + image" in run("models", "show", "owner/sees").stdout
    assert "  text + image  hub owner/sees" in run("models", "list").stdout


@pytest.mark.parametrize(
    ("config", "network", "problem"),
    [
        ({"model_type": "sees"}, True, "those of its architecture (sees) are not supported"),
        ({"model_type": "llava", "image_token_index": 9}, False, "it lacks openvino_vision_embeddings_model.xml"),
        ({"model_type": "llava", "vision_feature_select_strategy": "odd"}, True, "is odd, which is not supported"),
    ],
)
def test_of_a_multimodal_model_whose_images_cannot_be_served_what_its_text_needs_is_fetched(
    hub: Hub,
    model_files: dict[str, bytes],
    capsys: pytest.CaptureFixture[str],
    config: dict[str, object],
    network: bool,
    problem: str,
) -> None:
    needed = divided(model_files, **config)
    more = {"README.md": b"#", "openvino_vision_embeddings_model.bin": b"0" * 999}
    if network:
        more["openvino_vision_embeddings_model.xml"] = b"<net/>"
    hub.add("owner/sees", {**needed, **more})
    directory, _ = find_model("owner/sees")
    told = capsys.readouterr().err
    assert "owner/sees: only its text will be served. It also takes images, and " in told
    assert problem in told
    assert sorted(set(hub.fetched("owner/sees"))) == sorted(needed)
    row = json.loads(run("models", "show", "owner/sees", "--json").stdout)
    assert (row["weight_bytes"], row["modalities"], row["problem"]) == (10, ["text"], None)
    assert row["kv_bytes_per_token"] == 2 * 32 * 8 * (128 + 8)
    (directory / "openvino_text_embeddings_model.bin").unlink()
    assert "missing openvino_text_embeddings_model.bin" in run("models", "show", "owner/sees").stdout


def test_a_multimodal_model_without_embeddings_is_refused() -> None:
    paths = ["openvino_language_model.xml", "openvino_language_model.bin"]
    with pytest.raises(CommandError, match="has openvino_language_model.xml but lacks openvino_text_embeddings_model"):
        choose_files(listing(*paths))


EAGLE = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "num_attention_heads": 32}
MEDUSA = {"medusa_num_heads": 3, "medusa_num_layers": 1}
MTP = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
DFLASH = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 16}


@pytest.mark.parametrize(
    ("config", "weights", "kind"),
    [(EAGLE, "model.safetensors", "eagle3"), (MEDUSA, "medusa_lm_head.safetensors", "medusa")],
)
def test_heads_are_pulled_as_they_are_and_named_with_draft_model(
    hub: Hub, config: dict[str, object], weights: str, kind: str
) -> None:
    files = {"config.json": json.dumps(config).encode(), weights: b"w" * 1000}
    hub.add("o/heads", {**files, "README.md": b"-", weights.rpartition(".")[0] + ".bin": b"pickle"})
    directory = find_draft_model("o/heads")
    assert directory == model_directory("o/heads")
    assert {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "headrace.json"} == files
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.source["heads"] == kind
    seen = len(hub.seen)
    assert find_draft_model("o/heads", offline=True) == directory
    assert len(hub.seen) == seen
    shown = run("models", "show", "o/heads").output
    assert f"{kind}, for --draft-model" in shown
    assert "problem" not in shown
    with pytest.raises(CommandError, match=f"has {kind} heads and no model; serve the model that they were trained"):
        find_model("o/heads")
    (directory / weights).write_bytes(b"w")
    with pytest.raises(CommandError, match="has 1 bytes instead of 1000.*headrace pull --force o/heads repairs it"):
        find_draft_model("o/heads")


def test_of_a_checkpoint_only_the_files_of_its_layer_that_predicts_more_tokens_are_fetched(hub: Hub) -> None:
    places = {
        "model.layers.0.mlp.up_proj.weight": "model-00001-of-00002.safetensors",
        "model.mtp_layers.0.input_proj.weight": "model-00002-of-00002.safetensors",
        "lm_head.weight": "model-00002-of-00002.safetensors",
    }
    files = {
        "config.json": json.dumps(MTP).encode(),
        "model.safetensors.index.json": json.dumps({"weight_map": places}).encode(),
        **dict.fromkeys(set(places.values()), b"w" * 100),
    }
    hub.add("o/mimo", files)
    directory = find_draft_model("o/mimo")
    assert {path.name for path in directory.glob("*.safetensors")} == {"model-00002-of-00002.safetensors"}
    assert "mtp, for --draft-model" in run("models", "show", "o/mimo").output


@pytest.mark.parametrize(
    ("config", "pickle", "arguments", "sentence"),
    [
        (EAGLE, "pytorch_model.bin", (), "only pytorch_model.bin, which may run code and is not read; save them as"),
        (MEDUSA, "medusa_lm_head.pt", (), "only medusa_lm_head.pt, which may run code and is not read; save them as"),
        (EAGLE, "README.md", (), "the eagle3 heads in o/heads have no weights"),
        (EAGLE, "model.safetensors", ("--weights", "int8"), "has eagle3 heads, used as they are; leave out --weights"),
        (MTP, "README.md", (), "the mtp heads in o/heads have no weights"),
        (MTP, "model.safetensors", ("--weights", "int8"), "needs code from its repository.* leave out --weights for"),
        (DFLASH, "model.safetensors", (), "o/heads has a DFlash drafter, whose tokens .* use EAGLE-3 heads or a"),
    ],
)
def test_heads_that_cannot_be_used_are_refused_with_a_remedy(
    hub: Hub, config: dict[str, object], pickle: str, arguments: tuple[str, ...], sentence: str
) -> None:
    hub.add("o/heads", {"config.json": json.dumps(config).encode(), pickle: b"x"})
    refused = run("pull", "o/heads", *arguments)
    assert refused.exit_code != 0
    assert re.search(sentence, refused.output)
    assert not model_directory("o/heads").exists()


def test_heads_that_are_missing_are_not_fetched_offline(hub: Hub) -> None:
    with pytest.raises(CommandError, match="o/heads is not in the cache, and --offline"):
        find_draft_model("o/heads", offline=True)
    assert hub.seen == []


def test_a_revision_is_a_model_of_its_own(hub: Hub, model_files: dict[str, bytes]) -> None:
    hub.add("owner/model", model_files)
    hub.add("owner/model", {**model_files, "config.json": b"{}"}, revision="refs/pr/1")
    directory, name = find_model("owner/model@refs/pr/1")
    assert name == "owner/model@refs-pr-1"
    assert (directory / "config.json").exists()
    assert not (find_model("owner/model")[0] / "config.json").exists()
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.source["commit"] == hub.repositories["owner/model"].commit("refs/pr/1")
    refused = run("pull", "owner/model@v9")
    assert refused.exit_code == 2
    assert "owner/model has no revision v9" in refused.stderr


def test_the_quantisation_is_chosen_by_name_and_split_files_come_together(
    hub: Hub, converted: list[dict[str, bytes]], cache: Path
) -> None:
    pieces = {"big/m-Q8_0-00001-of-00002.gguf": b"one", "big/m-Q8_0-00002-of-00002.gguf": b"two"}
    hub.add("owner/model", {"m-Q4_0.gguf": b"four", **pieces})
    find_model("owner/model")
    find_model("owner/model:q8_0")
    assert converted == [
        {"m-Q4_0.gguf": b"four"},
        {"m-Q8_0-00001-of-00002.gguf": b"one", "m-Q8_0-00002-of-00002.gguf": b"two"},
    ]
    assert list((cache / "downloads").iterdir()) == []
    assert not (model_directory("owner/model:q8_0") / ".gguf").exists()


def test_a_gguf_with_networks_for_images_beside_it_says_what_to_pull_for_them(
    hub: Hub, converted: list[dict[str, bytes]], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("owner/model", {"m-Q4_0.gguf": b"four", "mmproj-m-f16.gguf": b"eyes"})
    find_model("owner/model")
    told = capsys.readouterr().err
    assert (
        "only its text will be served. It also takes images, and mmproj-m-f16.gguf is not read; for these, pull" in told
    )
    assert converted == [{"m-Q4_0.gguf": b"four"}]


def test_a_download_of_many_files_goes_on_where_it_was(
    hub: Hub, converted: list[dict[str, bytes]], hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"m-0000{number}-of-00003.gguf": bytes([number]) * 5000 for number in (1, 2, 3)}
    hub.add("owner/model", files)
    real = pull.download_files
    monkeypatch.setattr(pull, "download_files", lambda *args: real(*args[:2], args[2][:2]) and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        find_model("owner/model")
    monkeypatch.setattr(pull, "download_files", real)
    third = sha256(files["m-00003-of-00003.gguf"]).hexdigest()
    blobs = hub_cache / "models--owner--model" / "blobs"
    write_files(blobs, {f"{third}.incomplete": files["m-00003-of-00003.gguf"][:100]})
    num_seen = len(hub.seen)
    said = run("pull", "owner/model").stderr
    assert "(0.0 MB of it are here)" in said
    fetched = [path for path, _range in hub.seen[num_seen:] if path.startswith("/large/")]
    assert fetched == [f"/large/{third}"]
    assert (f"/large/{third}", "bytes=100-") in hub.seen
    assert converted == [files]


def test_two_pulls_of_a_repository_at_once_fetch_each_file_once(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/model", model_files)
    both = threading.Barrier(2)
    real = pull.download_files

    def download(*args: Any) -> dict[str, Path]:
        both.wait(patience(30))
        return real(*args)

    monkeypatch.setattr(pull, "download_files", download)
    second = threading.Thread(target=run, args=("pull", "owner/model", "--name", "second"))
    second.start()
    assert run("pull", "owner/model").exit_code == 0
    second.join(patience(30))
    for name in ("owner/model", "second"):
        assert (model_directory(name) / "openvino_tokenizer.bin").read_bytes() == model_files["openvino_tokenizer.bin"]
    fetched = [path for path, _range in hub.seen if path.startswith("/large/")]
    assert sorted(fetched) == sorted(set(fetched))


def fetch_as_others_do(hub: Hub, hub_cache: Path, repository: str, files: dict[str, bytes]) -> None:
    """Fetch files as another program does that uses the same cache."""
    for name in files:
        huggingface_hub.hf_hub_download(repository, name, endpoint=hub.url, cache_dir=hub_cache)


@pytest.mark.parametrize("offline", [True, False])
def test_a_model_in_the_hubs_cache_is_found_and_not_fetched_again(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path, offline: bool
) -> None:
    files = {**model_files, "openvino_model.bin": b"w" * (2 << 20)}
    hub.add("owner/model", {**files, "README.md": b"#"})
    fetch_as_others_do(hub, hub_cache, "owner/model", files)
    num_seen = len(hub.seen)
    directory, _name = find_model("owner/model", offline=offline)
    assert [path for path, _range in hub.seen[num_seen:] if "/resolve/" in path or "/large/" in path] == []
    assert len(hub.seen) == num_seen + (not offline)
    assert {path.name: path.read_bytes() for path in directory.iterdir() if path.name != "headrace.json"} == files
    # Weights take no disk twice; small files may be edited without harm to others.
    (snapshot,) = (hub_cache / "models--owner--model" / "snapshots").iterdir()
    assert (directory / "openvino_model.bin").samefile(snapshot / "openvino_model.bin")
    assert not (directory / "openvino_model.xml").samefile(snapshot / "openvino_model.xml")
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.source["commit"] == snapshot.name


def test_what_was_pulled_is_found_by_other_programs_without_a_network(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    hub.add("owner/model", model_files)
    find_model("owner/model")
    for name, content in model_files.items():
        found = huggingface_hub.hf_hub_download("owner/model", name, cache_dir=hub_cache, local_files_only=True)
        assert Path(found).read_bytes() == content


def test_a_part_of_a_model_in_the_hubs_cache_is_refused_offline_and_completed_online(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    hub.add("owner/model", model_files)
    fetch_as_others_do(hub, hub_cache, "owner/model", {"openvino_model.xml": b""})
    refused = run("pull", "owner/model", "--offline")
    assert refused.exit_code == 2
    assert re.search(
        "owner/model is not whole in the Hub's cache .*lacks openvino_model.bin.*--offline", refused.stderr
    )
    num_seen = len(hub.seen)
    assert run("pull", "owner/model").exit_code == 0
    assert not any("openvino_model.xml" in path for path, _range in hub.seen[num_seen:])


def test_a_hub_out_of_reach_leaves_the_models_of_its_cache(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/model", model_files)
    fetch_as_others_do(hub, hub_cache, "owner/model", model_files)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    pulled = run("pull", "owner/model")
    assert pulled.exit_code == 0, pulled.stderr
    commit = hub.repositories["owner/model"].commit("main")
    assert f"cannot be reached; the Hub's cache has its commit {commit[:12]}" in pulled.stderr


@pytest.mark.parametrize("name", ["openvino_model.bin", "openvino_model.xml"])
@pytest.mark.parametrize("damage", [lambda raw: raw[:-1] + b"#", lambda raw: raw[:-1]])
def test_a_damaged_file_in_the_hubs_cache_is_fetched_again(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    hub.add("owner/model", model_files)
    fetch_as_others_do(hub, hub_cache, "owner/model", model_files)
    (snapshot,) = (hub_cache / "models--owner--model" / "snapshots").iterdir()
    (snapshot / name).write_bytes(damage(model_files[name]))
    pulled = run("pull", "owner/model")
    assert pulled.exit_code == 0, pulled.stderr
    assert f"{name} in the Hub's cache {hub_cache} is damaged; fetching it again" in pulled.stderr
    assert (model_directory("owner/model") / name).read_bytes() == model_files[name]
    assert (snapshot / name).read_bytes() == model_files[name]


@pytest.mark.parametrize("name", ["openvino_model.bin", "openvino_model.xml"])
def test_a_file_with_a_wrong_checksum_leaves_nothing(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path, name: str
) -> None:
    hub.add("owner/model", model_files)
    hub.corrupted = {name}
    refused = run("pull", "owner/model")
    assert refused.exit_code == 1
    assert re.search(rf"/{name} is not the expected file .*; nothing was kept", refused.stderr)
    assert not model_directory("owner/model").exists()
    assert not any(path.name == name for path in hub_cache.rglob("*"))
    hub.corrupted = set()
    assert run("pull", "owner/model").exit_code == 0


def test_removing_a_model_leaves_its_downloads_to_other_programs_unless_told(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path
) -> None:
    other = {**model_files, "config.json": b"{}"}
    hub.add("owner/model", {**model_files, "openvino_model.bin": b"w" * 20_000_000})
    hub.add("owner/model", other, revision="v2")
    find_model("owner/model")
    find_model("owner/model@v2")
    commit = hub.repositories["owner/model"].commit("main")
    assert "0.02 GB in the Hub's cache" in run("models", "show", "owner/model").stdout
    removed = run("models", "rm", "owner/model")
    assert removed.stdout == "removed owner/model (0.02 GB)\n"
    kept = f"the files of owner/model at {commit[:12]} in the Hub's cache {hub_cache}"
    assert f"{kept} stay (0.02 GB), since other programs may use them; --downloads removes them too" in removed.stderr
    find_model("owner/model", offline=True)
    assert f"removed {kept} (0.02 GB)" in run("models", "rm", "owner/model", "--downloads").stdout
    snapshots = hub_cache / "models--owner--model" / "snapshots"
    assert [path.name for path in snapshots.iterdir()] == [hub.repositories["owner/model"].commit("v2")]
    for name, content in other.items():
        assert (next(snapshots.iterdir()) / name).read_bytes() == content


def test_a_token_of_hf_auth_login_is_used(
    hub: Hub, model_files: dict[str, bytes], hub_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("meta/llama", model_files, gated=True)
    hub.tokens = {"hf_member": {"meta/llama"}, "hf_stranger": set()}
    write_files(hub_cache.parent, {"token": b"hf_stranger\n"})
    assert "the account of hf auth login has no access to it" in run("pull", "meta/llama").stderr
    write_files(hub_cache.parent, {"token": b"hf_member\n"})
    assert run("pull", "meta/llama").exit_code == 0


def test_answers_that_may_pass_are_asked_for_again(hub: Hub, model_files: dict[str, bytes]) -> None:
    hub.add("owner/model", model_files)
    hub.failures = [503, 429, 502]
    assert run("pull", "owner/model").exit_code == 0
    hub.add("owner/other", model_files)
    hub.failures = [418]
    refused = run("pull", "owner/other")
    assert (refused.exit_code, "the server answered 418" in refused.stderr) == (1, True)


def test_the_hub_is_reached_through_the_proxy_of_the_environment(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/model", model_files)
    seen: list[str] = []

    def forward(handler: BaseHTTPRequestHandler) -> None:
        url = urlsplit(handler.path)
        seen.append(url.hostname or "")
        handler.path = url.path
        hub.answer(handler)

    monkeypatch.setenv("NO_PROXY", "localhost")
    monkeypatch.setenv("HF_ENDPOINT", "http://hub.invalid")
    with http_server(forward) as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        monkeypatch.setenv("http_proxy", proxy)
        pulled = run("pull", "owner/model")
    assert pulled.exit_code == 0, pulled.stderr
    assert set(seen) == {"hub.invalid"}


@pytest.mark.parametrize("variable", ["PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_the_certificates_of_the_environment_are_trusted(
    hub: Hub, model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    bundle = tmp_path / "ca.pem"
    for name in ("PIP_CERT", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        # Set first, so that what the command sets does not outlive the test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv(variable, str(bundle))
    refused = run("pull", "owner/model")
    assert (refused.exit_code, f"{variable} names {bundle}, which is no usable CA bundle" in refused.stderr) == (
        2,
        True,
    )
    shutil.copyfile(certifi.where(), bundle)
    hub.add("owner/model", model_files)
    assert run("pull", "owner/model").exit_code == 0
    assert (os.environ["REQUESTS_CA_BUNDLE"], os.environ["SSL_CERT_FILE"]) == (str(bundle), str(bundle))


def test_disks_of_both_caches_are_checked(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, shared = write_files(tmp_path / "own", {}), write_files(tmp_path / "shared", {})
    needed = Requirements(10 << 30, 4 << 30, 10 << 30, False)
    free = {own: 11 << 30, shared: 7 << 30}
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage(0, 0, free[folder]))
    check_disk("m", needed, own, own)  # links take nothing
    devices = {own: 1, shared: 2}
    stat = namedtuple("stat", "st_dev")
    monkeypatch.setattr(Path, "stat", lambda path, **_options: stat(devices[path]))
    check_disk("m", needed, shared, own)
    free[own] = 9 << 30
    with pytest.raises(CommandError, match=f"needs 10.80 GB of disk in {own}.*set HEADRACE_CACHE"):
        check_disk("m", needed, shared, own)
    free[shared] = 6 << 30
    with pytest.raises(CommandError, match=f"needs 6.51 GB of disk in {shared}.*set HF_HOME"):
        check_disk("m", needed, shared, own)


def test_a_hubs_cache_that_cannot_be_made_is_told(hub: Hub, model_files: dict[str, bytes], hub_cache: Path) -> None:
    hub.add("owner/model", model_files)
    hub_cache.parent.write_bytes(b"a file")
    refused = run("pull", "owner/model")
    assert (refused.exit_code, f"the Hub's cache {hub_cache} cannot be made" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("sha256", "{victim}"),
        ("sha256", "../../victim"),
        ("size", -1),
        ("size", 10**400),
        ("rfilename", "../openvino_model.gguf"),
        ("rfilename", "/openvino_model.gguf"),
    ],
)
def test_a_hub_that_lists_nonsense_is_refused(
    hub: Hub,
    model_files: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    field: str,
    value: str | int,
) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(model_files["openvino_model.bin"])
    value = value.format(victim=victim) if isinstance(value, str) else value

    def sibling(path: str, raw: bytes) -> dict[str, object]:
        lfs = {"sha256": sha256(raw).hexdigest(), field: value}
        return {"rfilename": path, "size": len(raw), "lfs": lfs, field: value}

    monkeypatch.setattr("tests.hub._sibling", sibling)
    hub.add("owner/model", model_files)
    refused = run("pull", "owner/model")
    assert (refused.exit_code, "did not answer with a list of files" in refused.stderr) == (1, True)
    assert victim.exists()


@pytest.mark.parametrize("endpoint", ["http://[::1", "http://h:port", "huggingface.co"])
def test_an_address_that_is_none_is_told(cache: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    refused = run("pull", "owner/model")
    assert (refused.exit_code, "set HF_ENDPOINT to one that can" in refused.stderr) == (1, True)


def test_a_connection_that_breaks_is_taken_up_again(hub: Hub, model_files: dict[str, bytes]) -> None:
    weights = b"weights" * 5000
    hub.add("owner/model", {**model_files, "openvino_model.bin": weights})
    hub.cut_after = [4, 1000, 6000]
    directory, _name = find_model("owner/model")
    assert (directory / "openvino_model.bin").read_bytes() == weights


def test_what_it_needs_is_said_before_the_first_byte_of_weights(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/model", {**model_files, "config.json": json.dumps(CONFIG).encode()})
    free = namedtuple("free", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: free(0, 0, 1000))
    refused = run("pull", "owner/model")
    assert refused.exit_code == 2
    assert "owner/model: OpenVINO, 0.0 MB to download" in refused.stderr
    assert "0.5 GiB of memory and 0.5 GiB for each context of 8192 tokens" in refused.stderr
    assert "owner/model needs 67.1 MB of disk" in refused.stderr
    assert hub.fetched("owner/model") == ["config.json"]


def test_weights_larger_than_memory_are_refused_before_they_are_fetched(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    hub.add("owner/model", model_files)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemAvailable:    600000 kB\n")
    monkeypatch.setattr(
        pull, "check_weights_fit", lambda name, size, workers: check_weights_fit(name, size, workers, tmp_path)
    )
    with pytest.raises(CommandError, match=r"owner/model needs 1.0 GiB of memory for 2 workers .* 0.6 GiB are avail"):
        find_model("owner/model", num_workers=2)
    assert hub.fetched("owner/model") == []
    assert run("pull", "owner/model").exit_code == 0


@pytest.mark.parametrize("settings", [["--offline"], []])
def test_offline_fetches_nothing_and_serves_what_is_there(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, settings: list[str]
) -> None:
    hub.add("owner/model", model_files)
    if not settings:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for command in ("pull", "serve", "run"):
        refused = run(command, "owner/model", *settings)
        assert refused.exit_code == 2
        assert "owner/model is not in the cache, and --offline (HF_HUB_OFFLINE)" in refused.stderr
    assert run("pull", "smollm2-135m", *settings).exit_code == 2
    assert hub.seen == []
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    find_model("owner/model")
    assert find_model("owner/model", offline=True)[1] == "owner/model"
    assert "already there" in run("pull", "owner/model", "--offline").stderr


def test_a_gated_model_says_what_to_accept_and_takes_the_token_of_who_may(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("meta/llama", model_files, gated=True)
    hub.tokens = {"hf_stranger": set(), "hf_member": {"meta/llama"}}
    refused = run("pull", "meta/llama")
    assert refused.exit_code == 2
    assert f"meta/llama is gated: accept its terms at {hub.url}/meta/llama, and set HF_TOKEN" in refused.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    assert "the account of HF_TOKEN has no access to it; ask for it at" in run("pull", "meta/llama").stderr
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    assert "does not accept the token in HF_TOKEN" in run("pull", "meta/llama").stderr
    monkeypatch.setenv("HF_TOKEN", "hf_member")
    assert run("pull", "meta/llama").exit_code == 0


def test_a_private_or_misspelt_model_tells_what_may_be_wrong(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/secret", model_files, private=True)
    hub.tokens = {"hf_other": set()}
    refused = run("pull", "owner/secret")
    assert "shows no model owner/secret (it answered 401); check the name, and set HF_TOKEN" in refused.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    assert "(it answered 404); check the name, and that the account" in run("pull", "owner/secret").stderr


def test_models_are_listed_shown_and_removed(hub: Hub, model_files: dict[str, bytes], model_folder: Path) -> None:
    assert run("models", "list").stderr.startswith("no models")
    hub.add("owner/model", {**model_files, "config.json": json.dumps({**CONFIG, "model_type": "llama"}).encode()})
    find_model("owner/model")
    run("pull", str(model_folder), "--name", "mine")
    lines = run("models", "list").stdout.splitlines()
    assert lines == [f"mine         0.00 GB  text  link {model_folder}", "owner/model  0.00 GB  text  hub owner/model"]
    shown = run("models", "show", "owner/model").stdout
    assert hub.repositories["owner/model"].commit("main") in shown
    assert "KV cache      69.6 KB per token (u8)" in shown
    row = json.loads(run("models", "show", "owner/model", "--json").stdout)
    assert row["memory_gib"] == {"8192": 1.03, "32768": 2.63}
    assert row["kv_bytes_per_token"] == 2 * 32 * 8 * (128 + 8)
    (model_directory("owner/model") / "openvino_model.bin").write_bytes(b"")
    assert "damaged" in run("models", "list").stdout
    assert run("models", "rm", "owner/model", "mine").stdout.splitlines() == [
        "removed owner/model (0.00 GB)",
        "removed mine (only the name)",
    ]
    assert (model_folder / "openvino_model.bin").exists()
    assert run("models", "list", "--json").stdout == "[]\n"
    missing = run("models", "rm", "owner/model")
    assert (missing.exit_code, "the cache has no model owner/model" in missing.stderr) == (2, True)


def test_prune_removes_what_no_model_needs(
    cache: Path, hub: Hub, model_files: dict[str, bytes], tmp_path: Path
) -> None:
    hub.add("owner/model", model_files)
    find_model("owner/model")
    gone = write_files(tmp_path / "gone", model_files)
    run("pull", str(gone), "--name", "gone")
    shutil.rmtree(gone)
    write_files(cache / "downloads", {"abc.part": b"x" * 1000})
    write_files(cache / "models" / ".m.abcd", {"half": b"made"})
    planned = run("models", "prune", "--dry-run").stdout
    assert planned.count("would remove") == 3
    assert (cache / "downloads" / "abc.part").exists()
    assert run("models", "prune").stdout == planned.replace("would remove", "removed").replace("to free", "freed")
    assert run("models", "prune").stdout == "0.00 GB freed\n"
    assert run("models", "list").stdout.split() == ["owner/model", "0.00", "GB", "text", "hub", "owner/model"]


def test_prune_waits_for_no_pull_that_runs(cache: Path) -> None:
    from headrace.cli.models.model_cache import pulling

    with pulling():
        refused = run("models", "prune")
    assert (refused.exit_code, "a pull is running" in refused.stderr) == (2, True)


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (CONFIG, ModelShape(32, 8, 128)),
        ({**CONFIG, "head_dim": 64, "max_position_embeddings": 4096}, ModelShape(32, 8, 64, 4096)),
        ({"text_config": CONFIG}, ModelShape(32, 8, 128)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "n_positions": 1024}, ModelShape(12, 12, 64, 1024)),
        ({"n_layer": 12, "n_head": 12, "n_embd": 768, "multi_query": True}, ModelShape(12, 1, 64)),
        ({**CONFIG, "kv_lora_rank": 512, "qk_rope_head_dim": 64}, ModelShape(32, 1, 544)),
        ({"model_type": "llama"}, None),
    ],
)
def test_the_shape_is_read_from_the_names_that_models_use(config: dict[str, object], shape: ModelShape | None) -> None:
    assert shape_of(config) == shape


def test_a_short_name_is_pulled_from_its_repository_under_that_name(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(SHORT_NAMES["qwen3-8b"], reference=HubReference("owner/model"))
    monkeypatch.setitem(SHORT_NAMES, "qwen3-8b", model)
    hub.add("owner/model", {**model_files, "config.json": json.dumps(CONFIG).encode()})
    assert find_model("qwen3-8b") == (model_directory("qwen3-8b"), "qwen3-8b")
    manifest = read_manifest(model_directory("qwen3-8b"))
    assert manifest is not None
    assert manifest.source["repository"] == "owner/model"
    num_seen = len(hub.seen)
    assert "already there" in run("pull", "qwen3-8b").stderr
    assert len(hub.seen) == num_seen


def test_the_catalogue_says_memory_and_what_was_checked() -> None:
    rows = {row["name"]: row for row in json.loads(run("models", "catalogue", "--json").stdout)}
    assert set(rows) == {*CATALOGUE, *SHORT_NAMES}
    large = rows["qwen3-8b"]
    # 36 layers of 8 heads with 128 numbers and 8 bytes beside them, keys and values.
    assert large["kv_bytes_per_token"] == 2 * 36 * 8 * 136
    assert large["memory_gib"]["32768"] - large["memory_gib"]["8192"] == pytest.approx(
        large["kv_bytes_per_token"] * (32768 - 8192) / 2**30, abs=0.01
    )
    assert rows["phi-4-mini"]["memory_gib"] == {}
    assert [name for name, row in rows.items() if row["checked"] == "run by tests"] == list(CATALOGUE)
    lines = run("models", "catalogue").stdout.splitlines()
    assert len(lines) == 1 + len(rows)
    assert "OpenVINO/Qwen3-8B-int4-ov" in next(line for line in lines if line.startswith("qwen3-8b "))


@pytest.mark.parametrize("name", SHORT_NAMES)
def test_short_names_are_names_and_their_formats_exist(name: str) -> None:
    model = SHORT_NAMES[name]
    assert parse_reference(name) is None
    assert parse_reference(str(model.reference)) == model.reference
    assert model.tools in {"", *TOOL_FORMATS}
