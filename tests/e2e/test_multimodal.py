"""A multimodal model's text is served as that of another model: from a hub's name to an answer. Images are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import openvino as ov
import pytest

from headrace.worker.config import ConfigurationError
from headrace.worker.model.paging import read_paged
from tests.architectures.exports import PYTHON, written_checkpoints
from tests.e2e.serving import Serve, headrace
from tests.e2e.small_model import small_model
from tests.hub import Hub, running_hub
from tests.infra.divided_model import write_divided
from tests.patience import patience

pytestmark = pytest.mark.e2e
NAMES = ("owner/whole", "owner/divided")
VISION = tuple(f"openvino_vision_embeddings_{name}" for name in ("model", "merger_model", "pos_model"))
NEEDED = ("openvino_language_model", "openvino_text_embeddings_model", "openvino_tokenizer", "openvino_detokenizer")


@pytest.fixture
def divided(tmp_path: Path) -> Path:
    """The demo model as an export of a multimodal model."""
    write_divided(small_model(), tmp_path / "divided")
    return tmp_path / "divided"


@pytest.fixture
def hub(divided: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model, and with the same one divided, for a machine without any."""
    for name in ("cache", "run"):
        (tmp_path / name).mkdir()
    with running_hub() as hub:
        for name, directory in zip(NAMES, (small_model(), divided), strict=True):
            hub.add_directory(name, directory)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "huggingface"))
        monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
        monkeypatch.setenv("HEADRACE_SERVE_KV_CACHE_GB", "0.2")
        yield hub


def test_its_text_is_that_of_the_model_and_images_are_refused(hub: Hub, divided: Path) -> None:
    def asked(model: str, content: object) -> httpx.Response:
        messages = [{"role": "user", "content": content}]
        body = {"model": model, "messages": messages, "max_tokens": 12, "temperature": 0, "seed": 1}
        return httpx.post(f"{serve.base_url}/v1/chat/completions", json=body, timeout=patience(60))

    serve = Serve(*NAMES, "--port", "0")
    try:
        serve.until_ready()
        of_whole, of_parts = (asked(name, "the mill on the river").json()["choices"] for name in NAMES)
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        refused = asked(NAMES[1], [picture])
    finally:
        serve.end()
    assert of_parts == of_whole
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "messages[0].content[0]")
    fetched = [name for name in hub.fetched(NAMES[1]) if name.startswith("openvino_")]
    assert sorted(fetched) == sorted(f"{name}.{suffix}" for name in NEEDED for suffix in ("xml", "bin"))
    shown = json.loads(headrace("models", "show", NAMES[1], "--json").stdout)
    assert shown["weight_bytes"] == sum((divided / f"{name}.bin").stat().st_size for name in NEEDED[:2])
    assert (shown["architecture"], shown["problem"]) == ("divided", None)
    assert shown["kv_bytes_per_token"] > 0


@pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models")
@pytest.mark.skipif(os.environ.get("HEADRACE_ARCHITECTURES") != "1", reason="HEADRACE_ARCHITECTURES=1 exports one")
def test_a_checkpoint_is_exported_with_its_networks_for_images(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their weights have 8 bits."""
    hub.add_directory("owner/checkpoint", written_checkpoints(["qwen3_vl"])["qwen3_vl"])
    monkeypatch.setenv("HEADRACE_EXPORT_PYTHON", str(PYTHON))
    answered = headrace("run", "owner/checkpoint:int8", "w1", "w2", "--max-tokens", "6", timeout_s=240)
    assert answered.returncode == 0, answered.stderr
    assert answered.stdout.strip()
    directory = tmp_path / "cache" / "models" / "owner--checkpoint:int8"
    assert {path.stem for path in directory.glob("openvino_*")} == {*NEEDED, *VISION}
    assert (directory / "preprocessor_config.json").is_file()
    assert b'element_type="u8"' in (directory / f"{VISION[1]}.xml").read_bytes()
    shown = json.loads(headrace("models", "show", "owner/checkpoint:int8", "--json").stdout)
    assert (shown["modalities"], shown["source"]["images"]) == (["text", "image"], "served")
    assert shown["vision_weight_bytes"] == sum((directory / f"{name}.bin").stat().st_size for name in VISION)


def test_a_language_model_alone_is_refused(divided: Path) -> None:
    for suffix in ("xml", "bin"):
        (divided / f"openvino_language_model.{suffix}").rename(divided / f"openvino_model.{suffix}")
    with pytest.raises(ConfigurationError, match="takes embeddings instead of tokens, and the network that gives them"):
        read_paged(ov.Core(), divided)
