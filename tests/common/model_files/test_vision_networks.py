"""Which networks a model's images need, and whether a directory has them."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.common.model_files.vision_networks import (
    MERGER_NETWORK,
    VISION_NETWORK,
    missing_vision_networks,
    vision_networks_in,
    vision_networks_of,
)

LANGUAGE = "openvino_language_model.xml"


def write(directory: Path, kind: object, *names: str) -> None:
    (directory / "config.json").write_text(json.dumps({"model_type": kind}))
    for name in names:
        (directory / name).touch()


def test_a_complete_directory_has_its_networks_in_the_order_of_their_use(tmp_path: Path) -> None:
    names = [name for network in (VISION_NETWORK, MERGER_NETWORK) for name in (network, network[:-4] + ".bin")]
    write(tmp_path, "qwen2_vl", LANGUAGE, *names)
    assert vision_networks_in(tmp_path) == (tmp_path / VISION_NETWORK, tmp_path / MERGER_NETWORK)
    for name in names:
        (tmp_path / name).unlink()
        assert vision_networks_in(tmp_path) == ()
        assert missing_vision_networks({"model_type": "qwen2_vl"}, {path.name for path in tmp_path.iterdir()}) == [name]
        (tmp_path / name).touch()


def test_models_of_text_and_unknown_types_have_none(tmp_path: Path) -> None:
    write(tmp_path, "llava", VISION_NETWORK, VISION_NETWORK[:-4] + ".bin")
    assert vision_networks_in(tmp_path) == (), "it has no language model of its own"
    for kind in ("llama", "phi3_v", ["llava"], None):
        write(tmp_path, kind, LANGUAGE)
        assert vision_networks_in(tmp_path) == ()
        assert vision_networks_of({"model_type": kind}) == ()
