"""Write the weights of small models whose GGUF files are tested, and what transformers computes of them.

    gguf_weights.py OUTDIR NAME...

Runs in the environment that exports models. OUTDIR/NAME/weights.npz has the weights in f32 under transformers' names,
OUTDIR/NAME/transformers.json the whole configuration, and OUTDIR/NAME/reference.npz what export.py describes.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np

from tests.architectures.export import LONG, SHORT, greedy, log_probabilities, model_of
from tests.architectures.families import VOCABULARY
from tests.architectures.gguf_families import GGUF_FAMILIES


def write(name: str, directory: Path) -> None:
    """Write the weights and the reference of one family."""
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model = model_of(GGUF_FAMILIES[name].family)
    (part / "transformers.json").write_text(model.config.to_json_string(use_diff=False))
    np.savez(part / "weights.npz", **{key: value.numpy() for key, value in model.state_dict().items()})
    tokens = np.random.default_rng(7).integers(4, VOCABULARY, LONG)
    short, long = (log_probabilities(model, tokens[:length]) for length in (SHORT, LONG))
    np.savez(part / "reference.npz", tokens=tokens, short=short, long=long, **greedy(model, tokens))
    part.rename(directory)


if __name__ == "__main__":
    for family in sys.argv[2:]:
        if not (Path(sys.argv[1]) / family).is_dir():
            write(family, Path(sys.argv[1]) / family)
