"""Gives a model's graph PagedAttention, or refuses the model with an explanation.

A token may see other tokens only in attention. A step has the tokens of many sequences in one row, so any other
operation over them would mix sequences. `settle_positions` looks for such operations.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import openvino as ov
from openvino._offline_transformations import paged_attention_transformation

from headrace.common.model_files.networks import networks_in
from headrace.common.model_files.vision_networks import vision_networks_in
from headrace.worker.config import ConfigurationError
from headrace.worker.model.batch import StateInputs
from headrace.worker.model.directory import chunk_of, context_of, has_windows, read_config, uses_alibi
from headrace.worker.model.eviction_tables import BLOCK_TABLES, SCORE_WINDOWS, TRANSFORMATION, merge_layers
from headrace.worker.model.positions import UnservableError, settle_positions, take_positions
from headrace.worker.model.state_tables import STATE_TABLES, give_own_sequences, set_table_types
from headrace.worker.model.window_tables import attentions, has_alibi, has_window
from headrace.worker.multimodal.image_graph import inputs_for_images
from headrace.worker.multimodal.image_inputs import NAMES as IMAGE_INPUTS
from headrace.worker.multimodal.image_inputs import ImageInputs
from headrace.worker.multimodal.joining import JoiningError, join, settle_types

# Inputs of the operators that replace recurrent layers, and the beginnings of the names of their tables of states.
STATE_INPUTS = tuple(f"la.{name}" for name in StateInputs._fields)
_OWN_INPUTS = ("key_cache.", "value_cache.", *STATE_TABLES, BLOCK_TABLES, SCORE_WINDOWS)
BLOCK_INDICES = "block_indices"
STEP_INPUTS = (
    "input_ids",
    "position_ids",
    "past_lens",
    "subsequence_begins",
    BLOCK_INDICES,
    "block_indices_begins",
    "max_context_len",
)
_FOREIGN_INPUTS = {
    "inputs_embeds": "it takes embeddings instead of tokens, and the network that gives them is not beside it",
    "encoder_hidden_states": "it is the decoder of an encoder-decoder model",
}
_SUPPORTED = "only decoder-only text models with attention can be served"
_REMEDY = "serve a model of another architecture, or export it again with the current optimum-intel"
_LOSES_ALIBI = (
    "its architecture ({}) uses ALiBi for positions, which OpenVINO loses when it pages its attention; "
    "answers would be wrong"
)
log = logging.getLogger(__name__)


class PagedModel(NamedTuple):
    """A graph with PagedAttention. `depends_on_context`: its answers depend on the longest context that is served.
    `images` is what it takes of images; None if it takes none."""

    graph: ov.Model
    depends_on_context: bool
    images: ImageInputs | None = None


def read_paged(
    core: ov.Core, model_dir: Path, max_context_tokens: int | None = None, *, evicts: bool = False
) -> PagedModel:
    """Read the model and give it PagedAttention, for contexts of up to `max_context_tokens`, or of the length in
    config.json. With `evicts`, its sequences may evict KV blocks (see `eviction_tables`). Compiles nothing. Raises
    ConfigurationError if the model cannot be served."""
    config = read_config(model_dir)
    model, *embeddings = [read_network(core, path) for path in networks_in(model_dir)]
    try:
        if embeddings:
            join(model, embeddings, has_images=bool(vision_networks_in(model_dir)))
        images = inputs_for_images(model, config)
        longest = max_context_tokens or context_of(config, model_dir)
        _make_paged(model, config, longest, evicts=evicts)
        depends_on_context = settle_positions(model, longest)
    except (UnservableError, JoiningError) as error:
        raise ConfigurationError(f"the model in {model_dir} cannot be served: {error}") from error
    return PagedModel(model, depends_on_context, images)


def reason_of(error: Exception) -> str:
    """The last line of an error of OpenVINO. The lines before it name places in OpenVINO's source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__


def read_network(core: ov.Core, path: Path) -> ov.Model:
    """Read a graph. ConfigurationError with a remedy if its files are damaged."""
    try:
        return core.read_model(path)
    except RuntimeError as error:
        raise ConfigurationError(
            f"{path} (or its .bin) is corrupt or incomplete: {reason_of(error)}; pull the model again"
        ) from error


def _make_paged(model: ov.Model, config: Mapping[str, Any], max_context_tokens: int, *, evicts: bool) -> None:
    kind, chunk = config.get("model_type", "unknown"), chunk_of(config)
    if 0 < chunk < max_context_tokens:
        raise UnservableError(
            f"layers of its architecture ({kind}) see chunks of {chunk} tokens, which OpenVINO cannot page; say "
            f"--max-context-tokens {chunk} or less"
        )
    if not model.get_variables():
        raise UnservableError(
            "it has no KV cache state, so it is not a stateful text-generation model; export it with optimum-intel "
            "(task text-generation-with-past), or pull a GGUF of it"
        )
    num_attentions = sum(node.get_type_name() == "ScaledDotProductAttention" for node in model.get_ops())
    if not num_attentions:
        raise UnservableError(f"its architecture ({kind}) has only recurrent layers, or unknown ones; {_SUPPORTED}")
    take_positions(model)
    try:
        paged_attention_transformation(model, **(TRANSFORMATION if evicts else {}))
    except RuntimeError as error:
        if uses_alibi(config):
            raise UnservableError(_LOSES_ALIBI.format(kind)) from error
        log.info("OpenVINO says: %s", reason_of(error))
        raise UnservableError(f"OpenVINO cannot page the attention of its architecture ({kind}); {_REMEDY}") from error
    if any(node.get_type_name() == "ReadValue" for node in model.get_ops()):
        raise UnservableError(
            f"layers of its architecture ({kind}) keep a recurrent state that OpenVINO cannot page; {_REMEDY}"
        )
    if evicts:
        merge_layers(model)
    settle_types(model)
    set_table_types(model)
    give_own_sequences(model)
    paged = attentions(model)
    unknown = [port.any_name for port in model.inputs if not _is_own(port)]
    if unknown:
        log.info("unknown inputs: %s", ", ".join(unknown))
        why = next((_FOREIGN_INPUTS[name] for name in unknown if name in _FOREIGN_INPUTS), "it takes more than tokens")
        raise UnservableError(f"{why}; {_SUPPORTED}")
    if not paged:
        raise UnservableError(f"no attention of its architecture ({kind}) was recognised; {_SUPPORTED}")
    if uses_alibi(config) and not all(map(has_alibi, paged)):
        raise UnservableError(_LOSES_ALIBI.format(kind))
    if not chunk and has_windows(config) and not any(map(has_window, paged)):
        raise UnservableError(
            f"layers of its architecture ({kind}) see a window of the context only, which OpenVINO loses when it pages "
            "their attention; answers would be wrong"
        )


def _is_own(port: ov.Output) -> bool:
    """Whether the runner sets this input. Some have names of the exported graph too."""
    names = port.get_names()
    return not names.isdisjoint((*STEP_INPUTS, *STATE_INPUTS, *IMAGE_INPUTS)) or any(
        name.startswith(_OWN_INPUTS) for name in names
    )
