"""Names of models on a hub: OWNER/NAME[:QUANTISATION][@REVISION]."""

from __future__ import annotations

import re
from dataclasses import dataclass

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
