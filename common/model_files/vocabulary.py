"""The bytes of a model's tokens, from its detokenizer graph.

The graph runs once over all token ids. It is cut before the node that joins the tokens of a text:

    ids -> VocabDecoder [-> ByteFallback, ...] -> | -> FuzeRagged -> UTF8Validate -> StringTensorPack -> text
                                                 cut

This imports OpenVINO and its tokenizer extension, which takes a third of a second: import it late, in a thread.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import openvino
import openvino_tokenizers  # noqa: F401  # registers its operations with every openvino.Core made from now on

COMPILE_OPTIONS = {"INFERENCE_NUM_THREADS": 1, "NUM_STREAMS": 1}
_BYTE = re.compile(rb"<0x[0-9A-Fa-f]{2}>")


class DetokenizerError(ValueError):
    """The graph has no vocabulary to read. The message names the file."""


def read_vocabulary(core: Any, graph: Any) -> tuple[list[bytes], frozenset[int]]:
    """Bytes of each token by id, and the ids of special tokens. Changes the graph. Raises `DetokenizerError`.

    The core must outlive the graph, whose nodes belong to the tokenizer extension.
    """
    nodes = {node.get_type_name(): node for node in graph.get_ordered_ops()}
    if "VocabDecoder" not in nodes or "FuzeRagged" not in nodes or "CharsToBytes" in nodes:
        raise DetokenizerError(
            "openvino_detokenizer.xml does not decode through a vocabulary (VocabDecoder, FuzeRagged): "
            "convert the tokenizer again with a current openvino-tokenizers and without its SentencePiece backend"
        )
    decoder, fuse = nodes["VocabDecoder"], nodes["FuzeRagged"]
    special_ids = frozenset(int(i) for i in decoder.get_attributes().get("skip_tokens", ()))
    if decoder.get_input_size() > 4:  # the skipped ids are an input: read them, then skip none
        skipped = decoder.input(4)
        (ids,) = _run(core, [skipped.get_source_output()], [], [])
        special_ids = frozenset(map(int, ids.tolist()))
        skipped.replace_source_output(openvino.op.Constant(np.zeros((0,), np.int32)).output(0))
    token_bytes = _single_tokens(core, graph, decoder, fuse)
    if "ByteFallback" in nodes:
        # The node takes every piece of six characters in angle brackets for a byte, <code> as well as <0x0A>.
        fallback = nodes["ByteFallback"]
        for index in range(3):
            fallback.output(index).replace(fallback.input_value(index))
        pieces = _single_tokens(core, graph, decoder, fuse)
        both = zip(token_bytes, pieces, strict=True)
        token_bytes = [byte if _BYTE.fullmatch(piece) else piece for byte, piece in both]
    return token_bytes, special_ids


def _single_tokens(core: Any, graph: Any, decoder: Any, fuse: Any) -> list[bytes]:
    size = decoder.input(1).get_shape()[0]
    column = np.arange(size, dtype=graph.input(0).get_element_type().to_dtype())[:, None]
    begins, ends, chars = _run(core, _before(fuse), graph.get_parameters(), [column])
    raw = chars.tobytes()
    token_bytes = [raw[begin:end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    if len(token_bytes) != size:
        raise DetokenizerError(f"openvino_detokenizer.xml gives {len(token_bytes)} texts for {size} tokens")
    return token_bytes


def _before(fuse: Any) -> list[Any]:
    """The three outputs that hold the strings of single tokens, in front of the node `fuse`, which joins the tokens of
    a row: where each string begins, where it ends, and the characters of all.

    `fuse` has inputs for the begins and ends of rows and tokens only. The characters are an input of the node after it.
    """
    for target in fuse.output(0).get_target_inputs():
        if target.get_node().get_input_size() >= 3:
            chars = target.get_node().input(2).get_source_output()
            return [fuse.input(2).get_source_output(), fuse.input(3).get_source_output(), chars]
    raise DetokenizerError("openvino_detokenizer.xml does not end in a text")


def _run(core: Any, outputs: list[Any], parameters: list[Any], inputs: list[Any]) -> list[Any]:
    """Values of the outputs, computed by a separate model."""
    compiled = core.compile_model(openvino.Model(outputs, parameters, "part"), "CPU", COMPILE_OPTIONS)
    results = compiled(inputs)
    return [np.array(results[i]) for i in range(len(outputs))]
