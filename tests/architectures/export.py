"""Export small models with random weights, and what transformers computes of them: `export.py OUTDIR NAME...`.

Runs in an environment of its own (`make test-architectures`), with PyTorch and optimum-intel; nothing is downloaded.

OUTDIR/DIRECTORY/      the model as optimum-intel writes it, with a small tokenizer; see `directory_name`
OUTDIR/DIRECTORY/reference.npz
    tokens  i64 [LONG]                   a random text
    short   f32 [SHORT, vocabulary]      log-probabilities behind each of its first tokens, of a text of that length
    long    f32 [LONG, vocabulary]       the same, computed of the whole text
    start   i64                          where the prompt of SHORT tokens begins that `greedy` continues
    greedy  i64 [1 to GREEDY]            the most probable tokens behind that prompt, up to one that is unclear
    greedy_logprobs  f32 [the same]      their log-probabilities

OUTDIR/DIRECTORY/weights.npz    of a quantised checkpoint: what each of its quantised weights stands for, by its name

Vision-language models have more files: see `image_references.py`.

Compressed weights are decompressed for transformers, so both compute with the same numbers.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import nncf
import numpy as np
import openvino as ov
import torch
import transformers
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import export_from_model
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.architectures.families import FAMILIES, VOCABULARY, Family, directory_name
from tests.architectures.image_export import needs_cache, write_files, write_image_references
from tests.architectures.image_processing import PROCESSING
from tests.architectures.packed_checkpoints import FORMATS, write_packed

SHORT, LONG, GREEDY = 300, 2000, 12
# The first token of a continuation is clear if it leads by this log-probability. So many prompts are tried.
_CLEAR, _PROMPTS = 2e-3, 8
_NETWORK = "openvino_model.xml"
_EXPORTER = Path(__file__).parents[2] / "cli/export/exporter.py"
# Mark what nncf multiplies with scales: the names of weights are in front of it.
_DECOMPRESSED = "/fq_weights_"
_UNCOMPRESSED = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_WITHOUT_SDPA = {"gpt_oss", "gpt_neo", "gptj", "codegen", "bloom", "mpt", "mamba", "falcon_mamba"}


def model_of(family: Family) -> PreTrainedModel:
    """The model, with weights drawn so that layers, positions and tokens all show in its logits."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family.model_type, **family.arguments)
    kind = AutoModelForCausalLM if family.vision is None else AutoModelForImageTextToText
    model = kind.from_config(config, dtype=torch.float32, attn_implementation=_attention(family)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2:
                weights.add_(torch.randn(weights.shape, generator=generator) * 0.05)
            else:
                weights.copy_(torch.randn(weights.shape, generator=generator) * _deviation(name, weights.shape[-1]))
            weights.copy_(weights.to(_UNCOMPRESSED.get(family.weights, torch.float32)))
    return model


def _attention(family: Family) -> str:
    return "eager" if family.model_type in _WITHOUT_SDPA else "sdpa"


def _deviation(name: str, length: int) -> float:
    if "embed" in name or "wte" in name or "wpe" in name:
        return 0.3
    return 1.2 / math.sqrt(length)


def log_probabilities(model: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Log-probabilities after each token: f32 [tokens, vocabulary]."""
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens)[None], use_cache=needs_cache(model)).logits[0].double()
    return torch.log_softmax(logits, -1).float().numpy()


def greedy(model: PreTrainedModel, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The longest clear continuation of a few prompts, and its log-probabilities."""
    best: tuple[int, list[int], list[float]] = (0, [], [])
    for start in range(_PROMPTS):
        found = _continuation(model, tokens[start : start + SHORT])
        if len(found[0]) > len(best[1]):
            best = (start, *found)
        if len(best[1]) == GREEDY:
            break
    start, chosen, values = best
    return {
        "start": np.array(start),
        "greedy": np.array(chosen, np.int64),
        "greedy_logprobs": np.array(values, np.float32),
    }


def _continuation(model: PreTrainedModel, text: np.ndarray) -> tuple[list[int], list[float]]:
    """The most probable tokens, up to one that another comes near."""
    chosen: list[int] = []
    values: list[float] = []
    for _ in range(GREEDY):
        last = log_probabilities(model, text)[-1]
        second, best = np.argsort(last)[-2:]
        if last[best] - last[second] < _CLEAR:
            break
        chosen.append(int(best))
        values.append(float(last[best]))
        text = np.append(text, best)
    return chosen, values


def write_graph(model: PreTrainedModel, family: Family, directory: Path) -> None:
    """Export a model that has not computed anything yet, in the family's format. Rotary factors stay float32."""
    for weights in model.parameters():
        weights.data = weights.data.to(_UNCOMPRESSED.get(family.weights, torch.float32))
    is_16bit = model.dtype != torch.float32
    task = "text-generation-with-past" if family.vision is None else "image-text-to-text"
    export_from_model(model, output=directory, task=task, stateful=True, patch_16bit_model=is_16bit)
    if family.weights in _UNCOMPRESSED:
        return
    graph = ov.Core().read_model(directory / _NETWORK)
    groups = {"group_size": 32, "ratio": 1.0, "all_layers": True} if "int4" in family.weights else {}
    graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode[family.weights.upper()], **groups)
    ov.save_model(graph, directory / f"compressed_{_NETWORK}", compress_to_fp16=False)
    del graph
    for path in directory.glob("compressed_*"):
        path.replace(directory / path.name.removeprefix("compressed_"))


def export_packed(model: PreTrainedModel, family: Family, directory: Path) -> None:
    """Export a packed checkpoint as `headrace pull` does. The model gets its weights."""
    checkpoint = directory / "checkpoint"
    directory.mkdir()
    quantised = write_packed(model, family.weights, checkpoint)
    tokenizer().save_pretrained(checkpoint)
    options = json.dumps({"mode": "bf16", "memory_bytes": 1 << 40})
    subprocess.run([sys.executable, "-I", _EXPORTER, "export", checkpoint, directory, options], check=True)
    shutil.rmtree(checkpoint)
    np.savez(directory / "weights.npz", **{name: weights.numpy() for name, weights in quantised.items()})


def take_weights(model: PreTrainedModel, directory: Path) -> None:
    """Give the model the values that compressed weights have."""
    state, num_taken = model.state_dict(), 0
    for node in ov.Core().read_model(directory / _NETWORK).get_ordered_ops():
        name, is_decompressed, _rest = node.get_friendly_name().removeprefix("self.").partition(_DECOMPRESSED)
        if is_decompressed and node.get_type_name() == "Multiply":
            numbers, scales = (_numbers(value.get_node()) for value in node.input_values())
            state[name].copy_(torch.from_numpy(numbers * scales).reshape(state[name].shape))
            num_taken += 1
    assert num_taken > 2


def _numbers(node: ov.Node) -> np.ndarray:
    """What a graph of constants gives, computed in float32."""
    if node.get_type_name() == "Constant":
        return node.get_data(dtype=np.float32)
    numbers = [_numbers(value.get_node()) for value in node.input_values()]
    return numbers[0] - numbers[1] if node.get_type_name() == "Subtract" else numbers[0]


def tokenizer(
    more: Sequence[str] = (), names: Mapping[str, str] | None = None, merges: Sequence[tuple[str, str]] = ()
) -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: pieces of words, bytes for characters without a piece, and a piece in angle
    brackets. `more` special tokens follow its vocabulary, and `names` are attributes for some of them. `merges` make
    longer pieces."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "<code>"]
    pieces += [*(chr(code) for code in range(33, 127)), *(first + second for first, second in merges)]
    pieces += [f"w{index}" for index in range(VOCABULARY - len(pieces))]
    bpe = models.BPE(
        {piece: index for index, piece in enumerate(pieces)}, list(merges), byte_fallback=True, unk_token="<unk>"
    )
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([*special, *more])
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        extra_special_tokens=dict(names or {}),
    )


def export(name: str, directory: Path) -> None:
    """Write one model and its reference."""
    family = FAMILIES[name]
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model = model_of(family)
    if family.weights in FORMATS:
        export_packed(model, family, part)
    else:
        write_graph(copy.deepcopy(model), family, part)
    if family.weights not in (*_UNCOMPRESSED, *FORMATS):
        take_weights(model, part)
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, LONG)
    reference = {
        "tokens": tokens,
        "short": log_probabilities(model, tokens[:SHORT]),
        **greedy(model, tokens),
        "long": log_probabilities(model, tokens),
    }
    processing = PROCESSING.get(name)
    made = tokenizer() if processing is None else tokenizer(processing.tokens, processing.extra_tokens)
    text_to_ids, ids_to_text = convert_tokenizer(made, with_detokenizer=True)
    ov.save_model(text_to_ids, part / "openvino_tokenizer.xml")
    ov.save_model(ids_to_text, part / "openvino_detokenizer.xml")
    np.savez(part / "reference.npz", **reference)
    if processing is not None:
        write_files(model, processing, made, part)
        write_image_references(model, processing, part)
    part.rename(directory)


def main() -> None:
    """Export the requested models that are missing. A failure of any family ends the run."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    root = Path(sys.argv[1])
    for name in sys.argv[2:]:
        if not (root / directory_name(name)).is_dir():
            export(name, root / directory_name(name))


if __name__ == "__main__":
    main()
