"""Makes the tower of a model in a directory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.common.model_files.config import config_in
from headrace.common.model_files.vision_networks import vision_networks_in
from headrace.worker.multimodal.towers.attention import see_all, see_all_and_windows
from headrace.worker.multimodal.towers.gemma4 import Gemma4, look_up_places
from headrace.worker.multimodal.towers.llava_next import Packing
from headrace.worker.multimodal.towers.mistral3 import Mistral3
from headrace.worker.multimodal.towers.network import Network, Settings
from headrace.worker.multimodal.towers.qwen import Places, Qwen
from headrace.worker.multimodal.towers.tiled import PlacesInTile, Tiled
from headrace.worker.multimodal.towers.tower import Tower, TowerError

Config = Mapping[str, Any]


def tower_of(model_dir: Path, *, threads: int, execution_mode: str) -> Tower | None:
    """The compiled tower of the model in a directory, for `threads` threads, in `accuracy` or `performance` mode; None
    if it has no networks for images, or not all of them. Raises TowerError if they are not of a known form."""
    networks, config = vision_networks_in(model_dir), config_in(model_dir / "config.json")
    if not networks:
        return None
    return _TOWERS[config["model_type"]](networks, config, Settings(threads, execution_mode))


def _tiled(networks: Sequence[Path], config: Config, settings: Settings) -> Tower:
    return Tiled(Network(networks[0], settings))


def _llava_next(networks: Sequence[Path], config: Config, settings: Settings) -> Tower:
    return Tiled(Network(networks[0], settings), packed=Packing(config))


def _gemma4(networks: Sequence[Path], config: Config, settings: Settings) -> Tower:
    return Gemma4(Network(networks[0], settings, look_up_places))


def _idefics3(networks: Sequence[Path], config: Config, settings: Settings) -> Tower:
    return Tiled(Network(networks[0], settings), more=PlacesInTile(_number(_vision(config), "patch_size", 32)))


def _mistral3(networks: Sequence[Path], config: Config, settings: Settings) -> Tower:
    embeddings, projector = (Network(network, settings) for network in networks)
    patch = _number(_vision(config), "patch_size", 14)
    return Mistral3(embeddings, projector, patch, _number(config, "spatial_merge_size", 2))


def _qwen(networks: Sequence[Path], config: Config, settings: Settings) -> Tower:
    embeddings, merger, *more = networks
    vision = _vision(config)
    side = _number(vision, "spatial_merge_size", 2)
    has_windows = config["model_type"] == "qwen2_5_vl"
    changed = see_all_and_windows if has_windows else see_all
    in_windows = _number(vision, "window_size", 112) // _number(vision, "patch_size", 14) // side
    of_places = math.isqrt(_number(vision, "num_position_embeddings", 2304))
    return Qwen(
        Network(embeddings, settings),
        Network(merger, settings, changed),
        side=side,
        window=in_windows if has_windows else 0,
        places=Places(Network(more[0], settings), of_places) if more else None,
    )


def _vision(config: Config) -> Config:
    found = config.get("vision_config")
    return found if isinstance(found, dict) else {}


def _number(config: Config, name: str, usual: int) -> int:
    """A number in a configuration; `usual` is transformers' if it is not there."""
    value = config.get(name, usual)
    if not isinstance(value, int) or value < 1:
        raise TowerError(f"its config.json has a {name} that is no positive number; pull the model again")
    return value


_TOWERS: Mapping[str, Callable[[Sequence[Path], Config, Settings], Tower]] = {
    "llava": _tiled,
    "llava_next": _llava_next,
    "gemma3": _tiled,
    "gemma4": _gemma4,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "mistral3": _mistral3,
    "qwen2_vl": _qwen,
    "qwen2_5_vl": _qwen,
    "qwen3_vl": _qwen,
    "qwen3_5": _qwen,
    "qwen3_5_moe": _qwen,
}
