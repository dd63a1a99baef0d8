"""Rerankers that are causal language models, such as Qwen3-Reranker. The exporter loads this file; it imports nothing
of headrace.

The score of a query and a document is the logit of one token ("yes") after a prompt with both, minus that of another
("no"). Such a checkpoint is written as a classifier whose classes are these two tokens: its rows of weights are theirs
in the output layer. The graph then gets the difference. So it has no row for any other token, and gives no logits but
those of the last position.

The prompt is the template of the tokenizer, which gets messages of the roles `query` and `document` (as
sentence-transformers has it, with a stage LogitScore), or else that of Qwen3-Reranker. Its parts are in
`reranker_prompt.json`, which workers read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch  # type: ignore[import-not-found]
from openvino import opset13
from safetensors import safe_open  # type: ignore[import-not-found]
from safetensors.torch import save_file  # type: ignore[import-not-found]

PROMPT_FILE = "reranker_prompt.json"
_NETWORK = "openvino_model.xml"
_LOGIT_SCORE = "1_LogitScore/config.json"
_SETTINGS = "config_sentence_transformers.json"
_INDEX = "model.safetensors.index.json"
_HEADS = ("lm_head.weight", "model.embed_tokens.weight")
_SCORES = "score.weight"
_SCORES_FILE = "model-scores.safetensors"
_LOGITS = "logits"
# They stand for the two texts while a template is taken apart.
_QUERY, _DOCUMENT = "\ue000query\ue001", "\ue000document\ue001"
_QWEN3_RERANKER = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
    f"<Query>: {_QUERY}\n<Document>: {_DOCUMENT}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)


class RerankerError(Exception):
    """Why a causal language model cannot be exported as a reranker, as the end of a sentence about the checkpoint."""


class Reranker:
    """A checkpoint of a causal language model that scores. Raises RerankerError if its tokens are not known."""

    def __init__(self, directory: Path, tokenizer: Any) -> None:
        self._directory = directory
        self._tokenizer = tokenizer
        # The token whose logit is the score, and one whose logit is subtracted.
        self._tokens = _stated_tokens(directory) or _yes_and_no(tokenizer)

    def write_classifier(self, source: Path, target: Path) -> None:
        """Write a checkpoint of a classifier with the weights of the language model in `source`."""
        target.mkdir()
        places: dict[str, str] = {}
        for path in source.iterdir():
            if path.suffix == ".safetensors":
                # As one of several files, so that transformers reads the index.
                name = f"part-{path.name}"
                with safe_open(path, "pt") as opened:
                    places.update(dict.fromkeys(opened.keys(), name))
                (target / name).symlink_to(path.resolve())
            elif path.name not in ("config.json", _INDEX):
                (target / path.name).symlink_to(path.resolve())
        config = json.loads((source / "config.json").read_bytes())
        heads = _HEADS[1:] if config.get("tie_word_embeddings") and _HEADS[1] in places else _HEADS[:1]
        if heads[0] not in places:
            raise RerankerError(f"it lacks the tensor {heads[0]}")
        with safe_open(target / places[heads[0]], "pt") as opened:
            rows = torch.cat([opened.get_slice(heads[0])[token : token + 1] for token in self._tokens])
        save_file({_SCORES: rows.contiguous()}, target / _SCORES_FILE, metadata={"format": "pt"})
        places = {name: place for name, place in places.items() if name != _HEADS[0]} | {_SCORES: _SCORES_FILE}
        (target / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
        kinds = [str(name).replace("ForCausalLM", "ForSequenceClassification") for name in config["architectures"]]
        labels = [str(token) for token in self._tokens]
        config |= {"architectures": kinds, "id2label": {str(number): label for number, label in enumerate(labels)}}
        config |= {"label2id": {label: number for number, label in enumerate(labels)}}
        config["pad_token_id"] = self._padding(config)
        (target / "config.json").write_text(json.dumps(config))

    def _padding(self, config: Mapping[str, Any]) -> int:
        """A token that no text has: the classifier looks for the last token that is another one."""
        stated = (self._tokenizer.pad_token_id, config.get("pad_token_id"))
        found = next((token for token in stated if isinstance(token, int)), None)
        if found is None:
            raise RerankerError("neither its tokenizer nor its config.json names a token for padding")
        return found

    def complete(self, exported: Path) -> None:
        """Let an exported graph give one score, and write the parts of the prompt and what config.json says of it."""
        if len(self._tokens) > 1:
            _subtract_classes(exported / _NETWORK)
        has_template = (self._directory / _LOGIT_SCORE).is_file() and self._tokenizer.chat_template
        prompt = self._rendered() if has_template else _QWEN3_RERANKER
        (exported / PROMPT_FILE).write_text(json.dumps(prompt_parts(self._tokenizer, prompt)))
        config = json.loads((exported / "config.json").read_bytes())
        config |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
        settings = self._directory / _SETTINGS
        if settings.is_file() and (activation := json.loads(settings.read_bytes()).get("activation_fn")):
            config["sentence_transformers"] = {"activation_fn": activation}
        (exported / "config.json").write_text(json.dumps(config, indent=2))

    def _rendered(self) -> str:
        messages = [{"role": "query", "content": _QUERY}, {"role": "document", "content": _DOCUMENT}]
        rendered: str = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return rendered


def _stated_tokens(directory: Path) -> tuple[int, ...]:
    path = directory / _LOGIT_SCORE
    if not path.is_file():
        return ()
    stated = json.loads(path.read_bytes())
    found = (stated.get("true_token_id"), stated.get("false_token_id"))
    return tuple(token for token in found if isinstance(token, int))


def _yes_and_no(tokenizer: Any) -> tuple[int, ...]:
    found = tuple(tokenizer.convert_tokens_to_ids(word) for word in ("yes", "no"))
    if None in found or found[0] == found[1]:
        raise RerankerError('its tokenizer has no tokens "yes" and "no", with which such rerankers answer')
    return found


def _subtract_classes(path: Path) -> None:
    """Replace a graph with logits `[n, 2]` by one with their difference `[n, 1]`."""
    graph = ov.Core().read_model(path)
    logits = graph.output(_LOGITS).get_node().input_value(0)
    score = opset13.matmul(logits, opset13.constant(np.array([[1], [-1]], np.float32)), False, False)
    logits.set_names(set())
    score.output(0).set_names({_LOGITS})
    made = path.with_name(f"scores_{path.name}")
    ov.save_model(ov.Model([opset13.result(score)], graph.get_parameters()), made, compress_to_fp16=False)
    for suffix in (".xml", ".bin"):
        made.with_suffix(suffix).replace(path.with_suffix(suffix))


def prompt_parts(tokenizer: Any, prompt: str) -> dict[str, Any]:
    """The parts of a prompt with a placeholder for each text:

        prefix, query_before + QUERY + query_after, separator, document_before + DOCUMENT, suffix

    prefix, separator and suffix are tokens. What is beside a text is text up to the next special token, because tokens
    may reach across its border. Without a separator, all texts are one."""
    head, has_query, rest = prompt.partition(_QUERY)
    middle, has_document, tail = rest.partition(_DOCUMENT)
    if not has_query or not has_document or prompt.count(_QUERY) + prompt.count(_DOCUMENT) != 2:
        raise RerankerError("its template does not show one query and then one document")
    prefix, query_before = _last_special(tokenizer, head)
    separator, document_before = _last_special(tokenizer, middle)
    query_after = middle
    if separator:
        special = next(text for token, text in _tokens(tokenizer, middle) if token in tokenizer.added_tokens_decoder)
        query_after, _, rest = middle.partition(special)
        separator = [token for token, _ in _tokens(tokenizer, special + rest.removesuffix(document_before))]
    return {
        "prefix": prefix,
        "query_before": query_before,
        "query_after": query_after,
        "separator": separator,
        "document_before": document_before if separator else "",
        "suffix": [token for token, _ in _tokens(tokenizer, tail)],
    }


def _last_special(tokenizer: Any, text: str) -> tuple[list[int], str]:
    """The tokens up to the last special one, and the text after it."""
    tokens = _tokens(tokenizer, text)
    places = [number for number, (token, _) in enumerate(tokens) if token in tokenizer.added_tokens_decoder]
    if not places:
        return [], text
    last = tokens[places[-1]][1]
    return [token for token, _ in tokens[: places[-1] + 1]], text.rpartition(last)[2]


def _tokens(tokenizer: Any, text: str) -> list[tuple[int, str]]:
    """The tokens of a text, with special ones where it names them, and the part of the text of each."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    return [(token, text[start:end]) for token, (start, end) in pairs]
