"""The bytes of a model's tokens, for grammar masks: all that the worker ever knows of text.

The detokenizer graph of the model directory runs once, cut in front of the node that joins the tokens of a text, over
every id:

    ids -> VocabDecoder [-> ByteFallback, ...] -> | -> FuzeRagged -> ... -> text
                                                 cut

This imports OpenVINO's tokenizer extension: import it late, in a thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_tokenizers  # noqa: F401  # registers its operations with every openvino.Core made from now on

from headrace.worker.grammar.compiler import Vocabulary, VocabularyError

_COMPILE_OPTIONS = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
# Never freed: nodes of the extension must not outlive the core that made them.
_cores: list[Any] = []


def read_vocabulary(model_dir: Path) -> Vocabulary:
    """The vocabulary of the model in a directory. Raises `VocabularyError`."""
    if not _cores:
        _cores.append(openvino.Core())
    try:
        return _vocabulary_of(_cores[0].read_model(model_dir / "openvino_detokenizer.xml"))
    except RuntimeError as error:
        raise VocabularyError(f"openvino_detokenizer.xml cannot be used: {error}") from error


def _vocabulary_of(graph: Any) -> Vocabulary:
    nodes = {node.get_type_name(): node for node in graph.get_ordered_ops()}
    if "VocabDecoder" not in nodes or "FuzeRagged" not in nodes or "CharsToBytes" in nodes:
        raise VocabularyError("openvino_detokenizer.xml does not decode through a vocabulary")
    decoder, fuse = nodes["VocabDecoder"], nodes["FuzeRagged"]
    size = decoder.input(1).get_shape()[0]
    special_ids = frozenset(int(i) for i in decoder.get_attributes().get("skip_tokens", ()))
    if decoder.get_input_size() > 4:  # the skipped ids are an input: read them, then skip none
        skipped = decoder.input(4)
        (ids,) = _run([skipped.get_source_output()], [], [])
        special_ids = frozenset(map(int, ids.tolist()))
        skipped.replace_source_output(openvino.op.Constant(np.zeros((0,), np.int32)).output(0))
    column = np.arange(size, dtype=graph.input(0).get_element_type().to_dtype())[:, None]
    begins, ends, chars = _run(_before(fuse), graph.get_parameters(), [column])
    raw = chars.tobytes()
    token_bytes = [raw[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    if len(token_bytes) != size:
        raise VocabularyError(f"openvino_detokenizer.xml gives {len(token_bytes)} texts for {size} tokens")
    return Vocabulary(token_bytes, special_ids)


def _before(fuse: Any) -> list[Any]:
    """Begins, ends and characters of single tokens. The node that joins takes begins and ends; the characters go past
    it, to the node behind."""
    for target in fuse.output(0).get_target_inputs():
        if target.get_node().get_input_size() >= 3:
            chars = target.get_node().input(2).get_source_output()
            return [fuse.input(2).get_source_output(), fuse.input(3).get_source_output(), chars]
    raise VocabularyError("openvino_detokenizer.xml does not end in a text")


def _run(outputs: list[Any], parameters: list[Any], inputs: list[Any]) -> list[Any]:
    """Values of the outputs, by a model of their own."""
    compiled = _cores[0].compile_model(openvino.Model(outputs, parameters, "part"), "CPU", _COMPILE_OPTIONS)
    results = compiled(inputs)
    return [np.array(results[i]) for i in range(len(outputs))]
