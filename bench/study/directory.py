"""The directory of a study: its settings, and one JSON file for each finished run, so that it can be continued."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.bench.study.recipes import Run

_SETTINGS = "study.json"


class DirectoryError(ValueError):
    """A directory that cannot be used for this study; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What all runs of a study have in common. `scale` is the name of one, `requests` of where they come from, and
    `machine` describes the host."""

    scale: str
    seed: int
    model: str
    requests: str
    machine: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A finished run: `result` as `headrace bench` saves it, and the measurements `server` and `machine`."""

    run: Run
    result: Mapping[str, Any]
    server: Mapping[str, Any]
    machine: Mapping[str, Any]

    def figure(self, name: str) -> float | None:
        """A figure of the result, or of the server; None if there is none."""
        value = self.result.get(name, self.server.get(name))
        return float(value) if isinstance(value, int | float) else None

    @property
    def is_wrong(self) -> bool:
        """Whether answers were wrong or requests failed."""
        return bool(self.result.get("failed")) or not self.result.get("headrace", {}).get("answers_are_right", True)


class StudyDirectory:
    """See the module."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.logs = path / "logs"
        self.peers = path / "peers"
        self._runs = path / "runs"

    def open(self, settings: Settings) -> None:
        """Begin a study with these settings, or continue one. Raises DirectoryError if those of the study there
        differ."""
        if self.has_study(settings):
            return
        try:
            self._runs.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DirectoryError(f"cannot write to {self.path}: {error.strerror}") from None
        _write(self.path / _SETTINGS, asdict(settings))

    def has_study(self, settings: Settings) -> bool:
        """Whether the directory has a study. Raises DirectoryError if it has other settings."""
        if not (self.path / _SETTINGS).exists():
            return False
        before = asdict(self.settings())
        for name, value in asdict(settings).items():
            if before[name] != value:
                raise DirectoryError(
                    f"{self.path} has a study with {name} {before[name]}, not {value}; continue it with its "
                    "settings, or name another directory with --directory"
                )
        return True

    def settings(self) -> Settings:
        """The settings of the study. Raises DirectoryError."""
        file = self.path / _SETTINGS
        if not file.exists():
            raise DirectoryError(f"{self.path} has no study; name the directory of one with --directory")
        try:
            return msgspec.convert(_read(file), Settings)
        except msgspec.ValidationError as error:
            raise DirectoryError(f"{file} is not of a study: {error}") from None

    def find(self, run: Run) -> Finished | None:
        """The run, if it has finished. Raises DirectoryError if the file is of another run."""
        file = self._file(run)
        if not file.exists():
            return None
        found = _finished(file)
        if found.run != run:
            raise DirectoryError(
                f"{file} is of another version of the recipes; delete it, or name another directory with --directory"
            )
        return found

    def add(self, finished: Finished) -> None:
        """Keep a finished run."""
        _write(self._file(finished.run), asdict(finished))

    def all(self) -> list[Finished]:
        """All finished runs. Raises DirectoryError."""
        return [_finished(file) for file in sorted(self._runs.glob("*.json"))]

    def _file(self, run: Run) -> Path:
        return self._runs / f"{run.key}.json"


def _finished(file: Path) -> Finished:
    saved = _read(file)
    try:
        return Finished(
            msgspec.convert(saved["run"], Run),
            saved["result"],
            saved["server"],
            saved["machine"],
        )
    except (KeyError, msgspec.ValidationError):
        raise DirectoryError(f"{file} is not a run of a study; delete it to run it again") from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except OSError as error:
        raise DirectoryError(f"cannot read {file}: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise DirectoryError(f"{file} is not valid JSON ({error}); delete it to run it again") from None


def _write(file: Path, content: Mapping[str, Any]) -> None:
    """The whole file or nothing."""
    new = file.with_suffix(".new")
    with new.open("wb") as opened:
        opened.write(msgspec.json.format(msgspec.json.encode(content), indent=1))
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)
