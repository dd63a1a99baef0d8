"""Reads the files of an encoder: its task, pooling, normalisation, longest text and special tokens.

modules.json                 the stages after the network: pooling, normalisation    (sentence-transformers)
1_Pooling/config.json        the mode of pooling                                     (sentence-transformers)
sentence_bert_config.json    max_seq_length                                          (if there)
config.json                  longest position, padding token, labels, activation of a score
tokenizer.json               special tokens around and between two texts             (rerankers)
reranker_prompt.json         tokens and texts around and between two texts           (language models that rank)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from headrace.common.model_files.task import MODULES, is_embedder_with_cache
from headrace.protos.inference_pb2 import TASK_RANK, Task
from headrace.worker.config import ConfigurationError
from headrace.worker.encoder.pooling import Activation, Pooling
from headrace.worker.model.directory import context_of, read_config

_MODES = {
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_lasttoken": Pooling.LAST,
    "cls": Pooling.CLS,
    "mean": Pooling.MEAN,
    "lasttoken": Pooling.LAST,
}
# Their position ids begin after the id of the padding token.
_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "mpnet"}


_PROMPT = "reranker_prompt.json"


class PairTokens(NamedTuple):
    """The tokens before, between and after the two texts of a pair, and the parts that are tokenized together with a
    text."""

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    query_before: str = ""
    query_after: str = ""
    document_before: str = ""


@dataclass(frozen=True, slots=True)
class EncoderFiles:
    """Settings of an encoder. Embeddings use `pooling` and `normalizes`. Scores use `activation` and `pair`, the tokens
    before, between and after two texts. A text has at most `max_tokens` tokens, special tokens included."""

    task: Task
    max_tokens: int
    pad_token_id: int
    pooling: Pooling = Pooling.MEAN
    normalizes: bool = False
    activation: Activation = Activation.IDENTITY
    pair: PairTokens = field(default_factory=PairTokens)


def read_encoder_files(
    model_dir: Path, task: Task, max_tokens: int | None, *, pooling: str | None = None, normalizes: bool | None = None
) -> EncoderFiles:
    """Read the files of a directory. `max_tokens` replaces the longest text that they state, up to the longest
    position; `pooling` and `normalizes` replace the stages in modules.json, which need not exist if both are given.
    Raises ConfigurationError that names the file that is missing or not supported, or the flag that does not apply."""
    config = read_config(model_dir)
    pad = config.get("pad_token_id")
    pad_token_id = pad if isinstance(pad, int) and pad >= 0 else 0
    positions = context_of(config, model_dir)
    if config.get("model_type") in _OFFSET_POSITIONS:
        positions -= pad_token_id + 1
    own = _json(model_dir / "sentence_bert_config.json", {}).get("max_seq_length")
    longest = min(own, positions) if isinstance(own, int) and own > 0 else positions
    if max_tokens is not None:
        if max_tokens > positions:
            raise ConfigurationError(
                f"--max-context-tokens {max_tokens} is more than the model's longest text, {positions} tokens"
            )
        longest = max_tokens
    if task == TASK_RANK:
        if pooling is not None or normalizes is not None:
            raise ConfigurationError("--pooling and --normalize are for embedding models, and this model ranks texts")
        pair = _prompt_tokens(model_dir) or pair_tokens(_json(model_dir / "tokenizer.json", {}), model_dir)
        return EncoderFiles(task, longest, pad_token_id, activation=_activation(config), pair=pair)
    if pooling is None or normalizes is None:
        own_pooling, own_normalizes = _stages(model_dir)
    else:
        own_pooling, own_normalizes = Pooling(pooling), normalizes
    return EncoderFiles(
        task,
        longest,
        pad_token_id,
        pooling=own_pooling if pooling is None else Pooling(pooling),
        normalizes=own_normalizes if normalizes is None else normalizes,
    )


def refuse_embedder_with_cache(model_dir: Path) -> None:
    """Raise ConfigurationError for a model that gives vectors and was exported as if it generated text."""
    if is_embedder_with_cache(model_dir):
        raise ConfigurationError(
            f"{model_dir} has an embedding model with a KV cache, so it would be served as one that generates text; "
            "export it again with optimum-cli export openvino --task feature-extraction, or remove "
            f"{MODULES} to serve it for text"
        )


def _stages(model_dir: Path) -> tuple[Pooling, bool]:
    """Read the pooling, and whether vectors are normalised, from modules.json."""
    modules = _json(model_dir / MODULES, None)
    if not isinstance(modules, list):
        raise ConfigurationError(
            f"{model_dir} does not say how a text's vectors become one: {MODULES} is missing; copy it and "
            "1_Pooling/config.json from the model's repository into the directory"
        )
    pooling, normalizes = None, False
    for module in modules:
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind == "Pooling":
            path = model_dir / str(module.get("path", "")) / "config.json"
            pooling = _pooling(_json(path, {}), path)
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            raise ConfigurationError(
                f"{model_dir / MODULES} has a stage {kind or 'without a type'}; only Transformer, Pooling and "
                "Normalize are supported"
            )
    if pooling is None:
        raise ConfigurationError(f"{model_dir / MODULES} has no stage Pooling, so it gives no vector for a whole text")
    return pooling, normalizes


def _pooling(config: Mapping[str, Any], path: Path) -> Pooling:
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ConfigurationError(
            f"{path} has the pooling {' and '.join(modes) or 'of no kind'}; one of cls, mean and last token is "
            "supported"
        )
    return _MODES[modes[0]]


def _activation(config: Mapping[str, Any]) -> Activation:
    """The activation of a cross-encoder of sentence-transformers: sigmoid, unless the files state that it has none."""
    own = config.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or config.get("sbert_ce_default_activation_function") or "Sigmoid"
    kind = str(named).rpartition(".")[2]
    if kind not in ("Sigmoid", "Identity"):
        raise ConfigurationError(f"config.json names the activation {named}; Sigmoid and Identity are supported")
    return Activation.SIGMOID if kind == "Sigmoid" else Activation.IDENTITY


def _prompt_tokens(model_dir: Path) -> PairTokens | None:
    """The prompt of a reranker that is a language model, as headrace's export writes it; None for others."""
    prompt = _json(model_dir / _PROMPT, None)
    if prompt is None:
        return None
    try:
        before, between, after = (tuple(map(int, prompt[name])) for name in ("prefix", "separator", "suffix"))
        texts = [str(prompt[name]) for name in ("query_before", "query_after", "document_before")]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{model_dir / _PROMPT} is damaged ({error}); pull the model again") from error
    return PairTokens(before, between, after, *texts)


def pair_tokens(tokenizer: Mapping[str, Any], model_dir: Path) -> PairTokens:
    """The tokens that the tokenizer's post-processor puts around and between two texts. Raises ConfigurationError."""
    stack = [tokenizer.get("post_processor")]
    while stack:
        step = stack.pop()
        if not isinstance(step, dict):
            continue
        stack += reversed(step.get("processors", []))
        if step.get("type") in ("BertProcessing", "RobertaProcessing"):
            number = 2 if step["type"] == "RobertaProcessing" else 1
            end = int(step["sep"][1])
            return PairTokens((int(step["cls"][1]),), (end,) * number, (end,))
        if step.get("type") == "TemplateProcessing":
            return _pair_of(step["pair"], step["special_tokens"])
    raise ConfigurationError(
        f"{model_dir} does not say what stands between a query and a document: tokenizer.json is missing, or its "
        "post-processor is of no known kind; export the model again with its fast tokenizer"
    )


def _pair_of(pair: Sequence[Mapping[str, Any]], special_tokens: Mapping[str, Any]) -> PairTokens:
    parts: list[list[int]] = [[]]
    for part in pair:
        if "Sequence" in part:
            parts.append([])
        else:
            parts[-1] += special_tokens[part["SpecialToken"]["id"]]["ids"]
    before, between, after = (*parts, [], [])[:3]
    return PairTokens(tuple(before), tuple(between), tuple(after))


def _json(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        return json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON ({error}); pull the model again") from error
