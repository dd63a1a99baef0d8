"""Models by the names that Ollama's clients use."""

from __future__ import annotations

from headrace.gateway.text.models import Model, Models
from headrace.protos.status import Reason, StatusError

_LATEST = ":latest"


async def find(models: Models, name: str | None, *, loads: bool = True) -> Model:
    """The model of this name, with or without `:latest`. Raises `StatusError`."""
    try:
        return await models.find(name or "", loads=loads)
    except StatusError as error:
        if error.reason is not Reason.MODEL_NOT_FOUND or not (name or "").endswith(_LATEST):
            raise
        return await models.find((name or "").removesuffix(_LATEST), loads=loads)
