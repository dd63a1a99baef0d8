"""The bytes of a model's tokens, for grammar masks. No other part of the worker handles text.

This imports OpenVINO's tokenizer extension, so import it late and in a thread.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openvino

from headrace.common.model_files import vocabulary
from headrace.worker.grammar.compiler import Vocabulary, VocabularyError

# Never freed, because nodes of the extension must not outlive their core.
_cores: list[Any] = []


def read_vocabulary(model_dir: Path) -> Vocabulary:
    """The vocabulary of the model in a directory. Raises `VocabularyError`."""
    if not _cores:
        _cores.append(openvino.Core())
    try:
        graph = _cores[0].read_model(model_dir / "openvino_detokenizer.xml")
        return Vocabulary(*vocabulary.read_vocabulary(_cores[0], graph))
    except vocabulary.DetokenizerError as error:
        raise VocabularyError(str(error)) from error
    except RuntimeError as error:
        raise VocabularyError(f"openvino_detokenizer.xml cannot be used: {error}") from error
