"""Write small models as hubs have them, with weights as safetensors: `checkpoints.py OUTDIR NAME...`.

Runs in the environment that exports models. OUTDIR/NAME/ has what transformers writes, in bfloat16; of a
vision-language model also the files of its processor.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import torch

from tests.architectures.export import model_of, tokenizer
from tests.architectures.families import FAMILIES, directory_name
from tests.architectures.image_export import write_files
from tests.architectures.image_processing import PROCESSING

_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def write(name: str, directory: Path) -> None:
    """Write the checkpoint of one family."""
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model, processing = model_of(FAMILIES[name]).to(torch.bfloat16), PROCESSING.get(name)
    model.save_pretrained(part)
    if processing is None:
        text_to_ids = tokenizer()
        text_to_ids.chat_template = _TEMPLATE
        text_to_ids.save_pretrained(part)
    else:
        write_files(model, processing, tokenizer(processing.tokens, processing.extra_tokens), part)
    part.rename(directory)


if __name__ == "__main__":
    for family in sys.argv[2:]:
        if not (Path(sys.argv[1]) / directory_name(family)).is_dir():
            write(family, Path(sys.argv[1]) / directory_name(family))
