"""Compares llama.cpp's log-probabilities of the small GGUF files with transformers'.

    python -m tests.architectures.llama_cpp LIBRARY [NAME ...]

LIBRARY is a shared library that has llama.cpp's functions, such as xllamacpp.abi3.so of the package xllamacpp. Together
with test_gguf.py, which compares ours with transformers', this shows that the files are those that llama.cpp reads, and
that converted models answer as it does. llama.cpp keeps keys and values in float16, so small differences remain. It has
no window for Phi-3.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.architectures.exports import weights_for_gguf
from tests.architectures.gguf_families import GGUF_FAMILIES
from tests.architectures.gguf_writer import write_gguf_of
from tests.llama_library import silent_llama

_TOKENS = 300
_CONTEXT = 512
_MUCH = 0.02


class LlamaCpp:
    """llama.cpp by its C interface."""

    def __init__(self, library: Path) -> None:
        llama = self._llama = silent_llama(ctypes.PyDLL(str(library)))
        llama.llama_backend_init()

    def log_probabilities(self, file: Path, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Log-probabilities after each token: [tokens, vocabulary]."""
        llama = self._llama
        model = llama.llama_model_load_from_file(str(file).encode(), llama.llama_model_default_params())
        assert model, f"llama.cpp cannot read {file}"
        parameters = llama.llama_context_default_params()
        parameters.n_ctx = parameters.n_batch = parameters.n_ubatch = _CONTEXT
        context = llama.llama_init_from_model(model, parameters)
        batch = llama.llama_batch_init(len(tokens), 0, 1)
        batch.n_tokens = len(tokens)
        for index, token in enumerate(tokens.tolist()):
            batch.token[index], batch.pos[index] = token, index
            batch.n_seq_id[index], batch.seq_id[index][0], batch.logits[index] = 1, 0, 1
        assert not llama.llama_decode(context, batch)
        size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
        rows = [
            np.ctypeslib.as_array(llama.llama_get_logits_ith(context, index), (size,)) for index in range(len(tokens))
        ]
        logits = np.stack(rows).astype(np.float64)
        llama.llama_free(context)
        llama.llama_model_free(model)
        logits -= logits.max(-1, keepdims=True)
        found: npt.NDArray[np.float64] = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return found


def main() -> None:
    """Print the largest and the mean difference for each model, the places of tokens behind which it is large, and
    where llama.cpp has another best token, by how much transformers prefers its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", type=Path)
    parser.add_argument("names", nargs="*", default=list(GGUF_FAMILIES))
    arguments = parser.parse_args()
    llama = LlamaCpp(arguments.library)
    root = weights_for_gguf(arguments.names)
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.names:
            config = json.loads((root / name / "transformers.json").read_text())
            with np.load(root / name / "weights.npz") as weights, np.load(root / name / "reference.npz") as reference:
                file = write_gguf_of(GGUF_FAMILIES[name], config, weights, Path(folder) / f"{name}.gguf")
                found = llama.log_probabilities(file, reference["tokens"][:_TOKENS])
                expected = reference["short"]
            difference = np.abs(found - expected)
            best = found.argmax(-1)
            behind = expected.max(-1) - np.take_along_axis(expected, best[:, None], -1)[:, 0]
            others = np.flatnonzero(best != expected.argmax(-1))
            most = difference.max(-1)
            print(
                f"{name}: {most.max():.4f} at most, {difference.mean():.5f} on average, over 0.02 behind "
                f"{np.flatnonzero(most > _MUCH).tolist()}, another best token behind {len(others)} of {len(best)}",
                *[f"behind {place} one that is {behind[place]:.4f} less probable in transformers" for place in others],
                sep=", ",
                flush=True,
            )


if __name__ == "__main__":
    main()
