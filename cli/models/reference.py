"""Names of models on a hub, OWNER/NAME[:QUANTISATION][@REVISION], and messages about invalid names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_REFERENCE = re.compile(rf"({_PART}/{_PART})(?::({_PART}))?(?:@({_PART}(?:/{_PART})*))?")


@dataclass(frozen=True, slots=True)
class HubReference:
    """A model on a hub. `quantisation` chooses one of several GGUF files; `revision` is a branch, tag or commit."""

    repository: str
    quantisation: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return self.repository + self._suffix(self.revision)

    @property
    def name(self) -> str:
        """The model's default name in the cache and in requests."""
        return self.repository + self._suffix(self.revision and self.revision.replace("/", "-"))

    def _suffix(self, revision: str | None) -> str:
        return (f":{self.quantisation}" if self.quantisation else "") + (f"@{revision}" if revision else "")


def parse_reference(model: str) -> HubReference | None:
    """Parse a reference to a model on a hub; None if the text has another form."""
    matched = _REFERENCE.fullmatch(model)
    return HubReference(*matched.groups()) if matched else None


def path_problem(model: str, path: Path) -> str:
    """Why the path of MODEL is not that of a model; empty if MODEL does not look like a path."""
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(4) == b"GGUF"
        return "it is a GGUF file whose name must end in .gguf" if is_gguf else "it is a file, but not a .gguf file"
    return "there is no such file or directory" if model.startswith(("/", "./", "../", "~")) else ""


def near_name(model: str, names: Iterable[str]) -> str:
    """A remedy for an unknown name: `did you mean NAME?`, or where to find more names."""
    # Ollama's names have a colon, such as qwen3:8b.
    near = difflib.get_close_matches(model.lower().replace(":", "-"), sorted(names), 1, 0.75)
    return f"did you mean {near[0]}?" if near else "headrace models catalogue lists more names"
