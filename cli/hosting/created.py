"""The files of models that clients create of GGUF files, in the cache.

Hosts that share a cache may create the same model. Each holds a shared lock while it has the model, so that only the
last one that removes it removes the files. The locks of a process end with it.
"""

from __future__ import annotations

import fcntl
import os
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
    def _path(self) -> Path:
        return locks_directory() / f"{self._name}.held"
