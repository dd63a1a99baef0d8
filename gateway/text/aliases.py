"""Other names of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class Aliases:
    """Maps names that callers use to names of models."""

    def __init__(self, models: Mapping[str, str] | None = None) -> None:
        """`models` maps each alias to a model."""
        self._models = dict(models or {})

    def model_of(self, name: str) -> str:
        """The model that a name stands for; the name itself if it is no alias."""
        return self._models.get(name, name)

    def items(self) -> Sequence[tuple[str, str]]:
        """All aliases, sorted, with their models."""
        return sorted(self._models.items())


def parse_aliases(texts: Sequence[str]) -> Aliases:
    """Aliases from texts of the form ALIAS=MODEL. Raises ValueError."""
    models: dict[str, str] = {}
    for text in texts:
        alias, _, model = text.partition("=")
        if not alias or not model:
            raise ValueError(f"{text!r} is not ALIAS=MODEL")
        if alias in models:
            raise ValueError(f"the alias {alias!r} is given twice")
        models[alias] = model
    for alias, model in models.items():
        if model in models:
            raise ValueError(f"{alias}={model} refers to an alias; name the model itself")
    return Aliases(models)
