"""Turns text into token ids and token ids into bytes, with the OpenVINO graphs in a tokenizer bundle.

The tokenizer graph runs as it is. The detokenizer graph runs once, when it is loaded, and gives the bytes of each
token alone, which is all that an incremental detokenizer needs.

This is the only module of the gateway that imports OpenVINO, which takes a third of a second: import it late, in a
thread.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import re
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import openvino

from headrace.common.model_files.vocabulary import COMPILE_OPTIONS, DetokenizerError, read_vocabulary
from headrace.gateway.upstream.bundle import BundleError

_NO_LIMIT = 2**31 - 1
_GRAPHS = ("openvino_tokenizer", "openvino_detokenizer")
# Number of texts that the graph tokenizes together.
_AT_ONCE = 64
# Begins and ends of rows, begins and ends of pieces, their bytes, and whether a piece is an added token.
_NUM_SPLIT_OUTPUTS = 6
# What \s means in the graph: not the separators of files, groups, records and units, as in Python.
_WHITE_SPACE = r"[^\S\x1c-\x1f]"
_the_core: Any = None
# Held while an inference request is made: a process has died there, beside another thread's inference.
_making = threading.Lock()
_LOG = logging.getLogger(__name__)


class Tokenizer:
    """One model's tokenizer. `encode` may be called from several threads at once."""

    def __init__(
        self,
        encoder: _Encoder,
        plain_encoder: _Encoder,
        token_bytes: list[bytes],
        special_ids: frozenset[int],
        chat_template: str | None,
        special_tokens: dict[str, str],
        pieces: _PieceEncoder,
    ) -> None:
        self._encoder = encoder
        self._pieces = pieces
        self._plain_encoder = plain_encoder
        self.token_bytes = token_bytes
        """Bytes of each token, by id; not always whole UTF-8 sequences. Empty for encoders without a detokenizer."""
        self.special_ids = special_ids
        """Tokens that are not text. Clients get them only on request."""
        self.chat_template = chat_template
        """The chat template that is stored with the graph, if there is one."""
        self.special_tokens = special_tokens
        """Texts of those of `bos_token`, `eos_token` and `pad_token` that the graph names."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The token ids of a text. Special tokens written in it become their ids.

        `add_special_tokens` adds the tokens that the model expects around a text, such as beginning-of-sequence. The
        output of a chat template already has them.
        """
        return (self._encoder if add_special_tokens else self._plain_encoder).encode(text)

    def encode_many(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of texts, as `encode` gives them, for an eighth of its time."""
        encoder = self._encoder if add_special_tokens else self._plain_encoder
        found: list[list[int]] = []
        for start in range(0, len(texts), _AT_ONCE):
            found += encoder.encode_many(texts[start : start + _AT_ONCE])
        return found

    @property
    def added_tokens(self) -> re.Pattern[str] | None:
        """Finds the tokens that are recognised in a text before it is tokenized, the special ones among them; None if
        there are none. The group that matches is the token; white space around it that is stripped is no part of the
        group."""
        return self._pieces.pattern

    def encode_pieces(self, texts: Sequence[Sequence[tuple[str, bool]]]) -> list[list[int]]:
        """The token ids of texts in pieces, without special tokens around them. Each piece is a token that
        `added_tokens` finds (True), or a text in which nothing is recognised (False)."""
        found = self._pieces.encode(texts)
        if found is None:  # its graph is of another kind
            one = self._plain_encoder.encode
            return [[token_id for text, _ in pieces for token_id in one(text)] for pieces in texts]
        return found

    def control_texts(self, eos_token_ids: Iterable[int], special_tokens: Mapping[str, str]) -> dict[str, int]:
        """The ids of control tokens by their texts: special tokens and those that end an answer. The token for what is
        unknown is none of them: any text may contain it."""
        table = self.token_bytes
        ids = {token_id for token_id in (*self.special_ids, *eos_token_ids) if token_id < len(table)}
        unknown = set(self._plain_encoder.encode("\U0010fffd"))
        found = {}
        for token_id in sorted(ids - unknown, reverse=True):
            with contextlib.suppress(UnicodeDecodeError):
                text = table[token_id].decode()
                # Some detokenizers put a space in front of each word.
                is_alone = text != text.strip() and self._plain_encoder.encode(text.strip()) == [token_id]
                found[text.strip() if is_alone else text] = token_id
        found.pop(special_tokens.get("unk_token", ""), None)
        return {text: token_id for text, token_id in found.items() if text.strip()}

    @cached_property
    def special_around(self) -> tuple[list[int], list[int]]:
        """The special tokens before and after a text."""
        with_them, without = self._encoder.encode("a"), self._plain_encoder.encode("a")
        before = next((i for i in range(len(with_them)) if with_them[i : i + len(without)] == without), 0)
        return with_them[:before], with_them[before + len(without) :]

    def close(self) -> None:
        """Release the OpenVINO objects before the interpreter ends. No `encode` may follow or be running."""
        self._encoder.close()
        self._plain_encoder.close()
        self._pieces.close()
        gc.collect()


def load_tokenizer(files: Mapping[str, bytes]) -> Tokenizer:
    """The tokenizer in the files of a bundle. Raises `BundleError` if a file is missing or cannot be used."""
    # Only encoders come without a detokenizer.
    graphs = _GRAPHS if any(name.startswith(_GRAPHS[1]) for name in files) else _GRAPHS[:1]
    for name in (f"{graph}.{suffix}" for graph in graphs for suffix in ("xml", "bin")):
        if name not in files:
            raise BundleError(f"{name} is missing in the tokenizer bundle")
    try:
        encoder_graph, *decoders = (_core().read_model(files[f"{g}.xml"], files[f"{g}.bin"]) for g in graphs)
        token_bytes, special_ids = read_vocabulary(_core(), decoders[0]) if decoders else ([], frozenset())
        chat_template = _rt_text(encoder_graph, "chat_template")
        tokens = _special_tokens(encoder_graph, token_bytes)
        _lift_truncation(encoder_graph)
        encoder_graph = _taking_bytes(encoder_graph)
        encoder = plain = _Encoder(encoder_graph)
        if _drop_added_tokens(encoder_graph):
            plain = _Encoder(encoder_graph)
    except DetokenizerError as error:
        raise BundleError(str(error)) from error
    except RuntimeError as error:
        raise BundleError(f"the tokenizer's OpenVINO graphs cannot be used: {error}") from error
    pieces = _PieceEncoder(files["openvino_tokenizer.xml"], files["openvino_tokenizer.bin"])
    return Tokenizer(encoder, plain, token_bytes, special_ids, chat_template, tokens, pieces)


class _Requests:
    """A compiled graph and its idle inference requests, one for each thread that computes."""

    def __init__(self, graph: Any) -> None:
        self._compiled: Any = _core().compile_model(graph, "CPU", COMPILE_OPTIONS)
        self._idle: deque[Any] = deque()

    @contextlib.contextmanager
    def one(self) -> Iterator[Any]:
        """Context manager: a request that no other thread has."""
        try:
            request = self._idle.pop()
        except IndexError:
            with _making:
                request = self._compiled.create_infer_request()
        try:
            yield request
        finally:
            self._idle.append(request)

    def close(self) -> None:
        self._idle.clear()
        self._compiled = None


class _Encoder:
    """The graph of a tokenizer, compiled."""

    def __init__(self, graph: Any) -> None:
        self._requests = _Requests(graph)
        names = [output.get_names() for output in graph.outputs]
        self._ids = next((i for i, name in enumerate(names) if "input_ids" in name), 0)
        self._mask = next((i for i, name in enumerate(names) if "attention_mask" in name), None)

    def encode(self, text: str) -> list[int]:
        (token_ids,) = self._run([text])
        return token_ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        if self._mask is None:  # in this case padding cannot be distinguished from tokens
            return [self.encode(text) for text in texts]
        return self._run(texts)

    def _run(self, texts: Sequence[str]) -> list[list[int]]:
        raws = [text.encode() for text in texts]
        begins, ends = _spans([len(raw) for raw in raws])
        with self._requests.one() as request:
            request.infer([begins, ends, np.frombuffer(b"".join(raws), np.uint8)], share_inputs=True)
            rows = request.get_output_tensor(self._ids).data
            if self._mask is None:
                return [list(map(int, row.tolist())) for row in rows]
            mask = request.get_output_tensor(self._mask).data != 0
            return [list(map(int, row[kept].tolist())) for row, kept in zip(rows, mask, strict=True)]

    def close(self) -> None:
        self._requests.close()


class _PieceEncoder:
    """Tokenizes texts that are already split at added tokens. Its graph is the tokenizer's without the node that
    splits; it is compiled when it is first needed, because few texts need it."""

    def __init__(self, xml: bytes, weights: bytes) -> None:
        self._files = xml, weights
        self._lock = threading.Lock()
        self._requests: _Requests | None = None
        self._is_of_another_kind = False
        self._ids = 0
        self._mask: int | None = None

    @cached_property
    def pattern(self) -> re.Pattern[str] | None:
        """Finds added tokens, as the node that splits does."""
        split = _splitting(_core().read_model(*self._files))
        if split is None:
            return None
        raw = split.input_value(split.get_input_size() - 1).get_node().get_data().tobytes()
        try:
            return re.compile(raw.decode().replace(r"\s", _WHITE_SPACE))
        except (UnicodeDecodeError, re.error) as error:
            _LOG.warning("added tokens are not recognised beside texts that look like special ones: %s", error)
            return None

    def encode(self, texts: Sequence[Sequence[tuple[str, bool]]]) -> list[list[int]] | None:
        """Token ids of texts in pieces; None if the graph does not split texts."""
        with self._lock:
            if self._requests is None and not self._is_of_another_kind:
                self._compile()
            requests = self._requests
        if requests is None:
            return None
        at_once = 1 if self._mask is None else _AT_ONCE
        found: list[list[int]] = []
        with requests.one() as request:
            for start in range(0, len(texts), at_once):
                found += self._run(request, texts[start : start + at_once])
        return found

    def _run(self, request: Any, texts: Sequence[Sequence[tuple[str, bool]]]) -> list[list[int]]:
        rows = [[(text.encode(), is_added) for text, is_added in pieces if text] for pieces in texts]
        if not any(rows):
            return [[] for _ in rows]
        raws = [raw for row in rows for raw, _ in row]
        inputs = [*_spans([len(row) for row in rows]), *_spans([len(raw) for raw in raws])]
        chars = np.frombuffer(b"".join(raws), np.uint8)
        request.infer([*inputs, chars, np.array([is_added for row in rows for _, is_added in row], np.bool_)])
        ids = request.get_output_tensor(self._ids).data
        if self._mask is None:
            return [list(map(int, row.tolist())) for row in ids]
        mask = request.get_output_tensor(self._mask).data != 0
        return [list(map(int, row[kept].tolist())) for row, kept in zip(ids, mask, strict=True)]

    def _compile(self) -> None:
        graph = _core().read_model(*self._files)
        split = _splitting(graph)
        if split is None:
            self._is_of_another_kind = True
            return
        _lift_truncation(graph)
        _drop_added_tokens(graph)
        inputs = []
        for output in split.outputs():
            parameter = openvino.op.Parameter(output.get_element_type(), openvino.PartialShape([-1]))
            output.replace(parameter.output(0))
            inputs.append(parameter)
        graph = openvino.Model(graph.get_results(), graph.get_sinks(), inputs, "tokenizer_of_pieces")
        names = [output.get_names() for output in graph.outputs]
        self._ids = next((i for i, name in enumerate(names) if "input_ids" in name), 0)
        self._mask = next((i for i, name in enumerate(names) if "attention_mask" in name), None)
        self._requests = _Requests(graph)

    def close(self) -> None:
        if self._requests is not None:
            self._requests.close()
            self._requests = None


def _spans(sizes: Sequence[int]) -> tuple[Any, Any]:
    """Begins and ends of things with these sizes, one after the other."""
    ends = np.cumsum(sizes, dtype=np.int32)
    return np.concatenate([np.zeros(1, np.int32), ends[:-1]]), ends


def _splitting(graph: Any) -> Any:
    """The node that splits texts at added tokens; None if there is none."""
    nodes = [node for node in graph.get_ordered_ops() if node.get_type_name() == "SpecialTokensSplit"]
    return nodes[0] if len(nodes) == 1 and nodes[0].get_output_size() == _NUM_SPLIT_OUTPUTS else None


def _core() -> Any:
    """The process's only Core. It is never freed: nodes of the tokenizer extension must not outlive it."""
    global _the_core
    if _the_core is None:
        _the_core = openvino.Core()
    return _the_core


def _taking_bytes(graph: Any) -> Any:
    """The graph with begins, ends and bytes of its texts as inputs.

    Texts given as a string tensor would pass through numpy, which cuts off their trailing NUL characters.
    """
    unpack = next((n for n in graph.get_ordered_ops() if n.get_type_name() == "StringTensorUnpack"), None)
    if unpack is None or len(graph.inputs) != 1:
        raise BundleError("openvino_tokenizer.xml does not take one text")
    types = (openvino.Type.i32, openvino.Type.i32, openvino.Type.u8)
    inputs = [openvino.op.Parameter(kind, openvino.PartialShape([-1])) for kind in types]
    for position, parameter in enumerate(inputs):
        unpack.output(position).replace(parameter.output(0))
    return openvino.Model(graph.get_results(), graph.get_sinks(), inputs, "tokenizer")


def _drop_added_tokens(graph: Any) -> bool:
    """Make the graph add no special tokens around a text; True if it added any.

    CombineSegments joins runs of ids, each given as (begins, ends, ids). Runs with constant ids are special tokens;
    they become empty.
    """
    changed = False
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "CombineSegments":
            continue
        for first in range(0, node.get_input_size() - 1, 3):
            if node.input(first + 2).get_source_output().get_node().get_type_name() == "Constant":
                zero = openvino.op.Constant(np.zeros((), np.int32))
                node.input(first + 1).replace_source_output(zero.output(0))
                changed = True
    if changed:
        graph.validate_nodes_and_infer_types()
    return changed


def _lift_truncation(graph: Any) -> None:
    """Remove the length limit of a graph, which would silently cut long texts."""
    for node in graph.get_ordered_ops():
        if node.get_type_name() != "Minimum":
            continue
        for port in node.inputs():
            limit = port.get_source_output().get_node()
            if limit.get_type_name() == "Constant" and limit.get_element_type() == openvino.Type.i32:
                port.replace_source_output(openvino.op.Constant(np.array(_NO_LIMIT, np.int32)).output(0))


def _special_tokens(graph: Any, token_bytes: list[bytes]) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "pad_token"):
        value = _rt_text(graph, f"{name}_id")
        if value is not None and value.isdecimal() and int(value) < len(token_bytes):
            tokens[name] = token_bytes[int(value)].decode(errors="replace")
    return tokens


def _rt_text(graph: Any, key: str) -> str | None:
    return str(graph.get_rt_info(key).astype(str)) if graph.has_rt_info(key) else None
