"""Export small models with random weights, and what transformers computes of them: `export.py OUTDIR NAME...`.

Runs in an environment of its own (`make test-architectures`), with PyTorch and optimum-intel; nothing is downloaded.

OUTDIR/NAME/           the model as optimum-intel writes it, in float32, with a small tokenizer
OUTDIR/NAME/reference.npz
    tokens  i64 [LONG]                   a random text
    short   f32 [SHORT, vocabulary]      log-probabilities behind each of its first tokens, of a text of that length
    long    f32 [LONG, vocabulary]       the same, computed of the whole text
"""

from __future__ import annotations

import logging
import math
import shutil
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
import transformers
from openvino import save_model
from openvino_tokenizers import convert_tokenizer
from optimum.exporters.openvino import export_from_model
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tests.architectures.families import FAMILIES, VOCABULARY, Family

SHORT, LONG = 300, 2000
_WITHOUT_SDPA = {"gpt_oss", "gpt_neo", "gptj", "codegen", "bloom", "mpt", "mamba"}


def model_of(family: Family) -> PreTrainedModel:
    """The model, with weights drawn so that layers, positions and tokens all show in its logits."""
    config = AutoConfig.for_model(family.model_type, **family.whole_config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=_attention(family)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() < 2:
                weights.add_(torch.randn(weights.shape, generator=generator) * 0.05)
            else:
                weights.copy_(torch.randn(weights.shape, generator=generator) * _deviation(name, weights.shape[-1]))
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
        logits = model(torch.from_numpy(tokens)[None], use_cache=False).logits[0].double()
    return torch.log_softmax(logits, -1).float().numpy()


def tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer like Llama 2's: pieces of words, bytes for characters without a piece, and a piece in angle
    brackets."""
    special = ["<pad>", "<s>", "</s>", "<unk>"]
    pieces = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "<code>"]
    pieces += [chr(code) for code in range(33, 127)]
    pieces += [f"w{index}" for index in range(VOCABULARY - len(pieces))]
    bpe = models.BPE({piece: index for index, piece in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    made = Tokenizer(bpe)
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )


def export(name: str, directory: Path) -> None:
    """Write one model and its reference."""
    family = FAMILIES[name]
    model = model_of(family)
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, LONG)
    reference = {
        "tokens": tokens,
        "short": log_probabilities(model, tokens[:SHORT]),
        "long": log_probabilities(model, tokens),
    }
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    export_from_model(model, output=part, task="text-generation-with-past", stateful=True)
    text_to_ids, ids_to_text = convert_tokenizer(tokenizer(), with_detokenizer=True)
    save_model(text_to_ids, part / "openvino_tokenizer.xml")
    save_model(ids_to_text, part / "openvino_detokenizer.xml")
    np.savez(part / "reference.npz", **reference)
    part.rename(directory)


def main() -> None:
    """Export the requested models that are missing. A failure of any family ends the run."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    root = Path(sys.argv[1])
    for name in sys.argv[2:]:
        if not (root / name).is_dir():
            export(name, root / name)


if __name__ == "__main__":
    main()
