"""What clients create: the files of their models, in the cache, and a record of models and names, for the next start.

Hosts that share a cache may create the same model. Each holds a shared lock while it has the model, so that only the
last one that removes it removes the files. The locks of a process end with it.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path

from headrace.cli.fleet.run_state import running_serves
from headrace.cli.models.model_cache import locks_directory, model_directory, model_lock, remove_path


class CreatedFiles:
    """The directory of one created model."""

    def __init__(self, gguf: str) -> None:
        """`gguf` is the path of the file, whose name without its suffix is that of the model in the cache."""
        self._name = Path(gguf).stem
        self._lock: TextIOWrapper | None = None
        self._is_released = False

    def hold(self) -> None:
        """Keep others from removing the directory until it is released. Waits while one of them does."""
        while self._lock is None and not self._is_released:
            file = self._path.open("w")
            fcntl.flock(file, fcntl.LOCK_SH)
            if os.fstat(file.fileno()).st_nlink == 0:
                file.close()  # it was removed with the directory, so others do not see this lock
            else:
                self._lock = file
        if self._is_released:
            self.release()

    def release(self) -> None:
        """Let others remove the directory, from now on; another thread may be about to hold it."""
        self._is_released = True
        if self._lock is not None:
            self._lock.close()

    def remove(self) -> bool:
        """Remove the directory, unless another host holds it or serves it by its name in the cache. Returns whether it
        is removed. It may take long. Raises OSError."""
        self.release()
        with self._path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            if any(self._name in record.models for record in running_serves()):
                return False
            with model_lock(self._name, lambda: None):
                remove_path(model_directory(self._name))
            self._path.unlink(missing_ok=True)
        return True

    @property
    def name(self) -> str:
        """The name of the model in the cache."""
        return self._name

    @property
    def _path(self) -> Path:
        return locks_directory() / f"{self._name}.held"


@dataclass(frozen=True, slots=True)
class Created:
    """What clients have created on a host: models, each with its name in the cache, and aliases, each with its
    model."""

    models: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)


class CreatedRecord:
    """A file with what clients have created on a host, written at each change and read at its next start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = Created()

    def read(self) -> Created:
        """What was created when the file was last written; nothing if there is no such file. Raises OSError, and
        ValueError if the file is damaged."""
        try:
            found = json.loads(self._path.read_text())
        except FileNotFoundError:
            return Created()
        if not isinstance(found, dict):
            raise ValueError("it is no JSON object")
        return Created(_names(found.get("models")), _names(found.get("aliases")))

    def keep(self, created: Created) -> None:
        """Keep in the file what could not be restored, for a later start."""
        self._kept = created

    def write(self, created: Created) -> None:
        """Replace the content of the file. Raises OSError."""
        models = {**self._kept.models, **created.models}
        aliases = {**self._kept.aliases, **created.aliases}
        # A name that was given anew is no longer the old one, also when it is taken away.
        self._kept = Created(
            {name: cached for name, cached in self._kept.models.items() if name not in created.models},
            {name: model for name, model in self._kept.aliases.items() if name not in created.aliases},
        )
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        fresh = self._path.with_suffix(f".{os.getpid()}.tmp")
        fresh.write_text(json.dumps({"models": models, "aliases": aliases}, indent=2) + "\n")
        fresh.replace(self._path)


def _names(value: object) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(one, str) for one in value.values()):
        raise ValueError("it has no objects of names in `models` and `aliases`")
    return value
