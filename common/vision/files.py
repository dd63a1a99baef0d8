"""The files of a model that describe its images: config.json, preprocessor_config.json and processor_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from PIL import Image

from headrace.common.model_files.names import IMAGE_FILES, PREPROCESSOR, PROCESSOR
from headrace.common.vision.family import FamilyError

CONFIG = "config.json"
FILES = (CONFIG, *IMAGE_FILES)
"""Names of the files that describe images, all of them in the tokenizer bundle."""

_LONGEST_SIDE = 8192
_T = TypeVar("_T")


class Fields:
    """A JSON object that is read field by field, with errors that name the file and the field."""

    def __init__(self, source: str, content: Mapping[str, Any]) -> None:
        self._source = source
        self._content = content

    def __contains__(self, name: str) -> bool:
        return self._content.get(name) is not None

    def error(self, name: str, problem: str) -> FamilyError:
        """The error to raise for a field with a problem, which continues the sentence after the field's name."""
        return FamilyError(f"{self._source}: {name} {problem}")

    def part(self, name: str) -> Fields:
        """A nested object; empty if it is missing."""
        return Fields(f"{self._source}: {name}", self._typed(name, dict, "is no object") or {})

    def _typed(self, name: str, kind: type[_T], problem: str) -> _T | None:
        """The value of a field; None if it is missing or null. Raises `FamilyError` if it is of another type."""
        value = self._content.get(name)
        if value is not None and not isinstance(value, kind):
            raise self.error(name, problem)
        return value

    def size(self, name: str, default: Mapping[str, int], *, of_whole: Sequence[str]) -> Fields:
        """An object of sizes in pixels. In older files it is a whole number, which stands for these fields."""
        value = self._content.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            value = dict.fromkeys(of_whole, value)
        if value is not None and not isinstance(value, dict):
            raise self.error(name, "is no object")
        return Fields(f"{self._source}: {name}", default if value is None else value)

    def text(self, name: str, default: str) -> str:
        """A text. Raises `FamilyError` if the field is of another type."""
        found = self._typed(name, str, "is no text")
        return default if found is None else found

    def flag(self, name: str, default: bool) -> bool:
        """True or false. Raises `FamilyError` if the field is of another type."""
        found = self._typed(name, bool, "is neither true nor false")
        return default if found is None else found

    def whole(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number. Raises `FamilyError` if it is missing without a default, or less than `least`."""
        value = self._content.get(name, default)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 2**31:
            raise self.error(name, f"is {json.dumps(value)}, not a whole number of at least {least}")
        return value

    def side(self, name: str, default: int | None = None) -> int:
        """A side of an image in pixels. Raises `FamilyError` for longer sides than any model reads, because they take
        memory."""
        found = self.whole(name, default)
        if found > _LONGEST_SIDE:
            raise self.error(name, f"is {found}, more than {_LONGEST_SIDE}")
        return found

    def resample(self, default: Image.Resampling) -> Image.Resampling:
        """The filter with which images are scaled; stored as Pillow's number of it."""
        value = self._content.get("resample")
        try:
            return default if value is None else Image.Resampling(value)
        except ValueError:
            raise self.error("resample", f"is {json.dumps(value)}, which is no method of Pillow's") from None

    def number(self, name: str, default: float) -> float:
        """A number. Raises `FamilyError` if the field is of another type."""
        value = self._content.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.error(name, "is no number")
        return float(value)

    def numbers(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """One number for each of the three channels. Raises `FamilyError` unless the field is a number or three."""
        value = self._content.get(name)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = [value] * 3
        if not isinstance(value, list | tuple) or len(value) != 3 or not all(isinstance(v, int | float) for v in value):
            raise self.error(name, "is not three numbers")
        return tuple(map(float, value))

    def pairs(self, name: str, default: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
        """Pairs of positive whole numbers. Raises `FamilyError` if the field is no list of such pairs."""
        value = self._content.get(name)
        if value is None:
            return tuple(default)
        found = []
        for pair in value if isinstance(value, list) else [None]:
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(v, int) and v > 0 for v in pair):
                raise self.error(name, "is not a list of pairs of whole numbers")
            found.append((pair[0], pair[1]))
        return tuple(found)

    def demand(self, name: str, default: bool, wanted: bool) -> None:
        """Raise `FamilyError` unless a flag has the wanted value."""
        if self.flag(name, default) is not wanted:
            raise self.error(name, f"is {json.dumps(not wanted)}, which is not supported")


class ModelFiles:
    """The files of one model, parsed."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        self.config = Fields(CONFIG, _parsed(files, CONFIG))
        processor = _parsed(files, PROCESSOR)
        self.processor = Fields(PROCESSOR, processor)
        # transformers 5 writes the settings of the image processor into the processor's.
        nested = processor.get("image_processor")
        if PREPROCESSOR in files or not isinstance(nested, dict):
            self.preprocessor = Fields(PREPROCESSOR, _parsed(files, PREPROCESSOR))
        else:
            self.preprocessor = Fields(f"{PROCESSOR}: image_processor", nested)

    def image_token_id(self, default: int) -> int:
        """The id of the image token, which config.json stores under one of two names."""
        name = "image_token_id" if "image_token_id" in self.config else "image_token_index"
        return self.config.whole(name, default, least=0)


def _parsed(files: Mapping[str, bytes], name: str) -> dict[str, Any]:
    if name not in files:
        return {}
    try:
        content = json.loads(files[name])
    except (ValueError, RecursionError):
        raise FamilyError(f"{name} is no valid JSON") from None
    if not isinstance(content, dict):
        raise FamilyError(f"{name} is no JSON object")
    return content
