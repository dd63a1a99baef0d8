"""Writes a record of a supervisor's processes for other commands, at each change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from headrace.cli.fleet.run_state import ProcessRecord
from headrace.cli.serving.supervisor import SupervisedProcess


def records_of(processes: Sequence[SupervisedProcess]) -> tuple[ProcessRecord, ...]:
    """The processes as they are now."""
    return tuple(
        ProcessRecord(
            name=process.spec.name,
            role=process.spec.role,
            pid=process.pid,
            address=process.spec.address,
            state=process.state.value,
            restarts=process.num_restarts,
            started_s=process.started_s,
        )
        for process in processes
    )


class Recording:
    """Calls `write`, which writes a record. If that fails after it succeeded before, `tell` gets a line about it."""

    def __init__(self, write: Callable[[], None], tell: Callable[[str], None]) -> None:
        self._write, self._tell = write, tell
        self._is_recorded = True

    def update(self) -> None:
        """Write the record again."""
        try:
            self._write()
            self._is_recorded = True
        except OSError as error:  # a full disk, or a directory that was removed when its user logged out
            if self._is_recorded:
                lost = "headrace status and headrace drain may not find this server, or show old states"
                self._tell(f"its record cannot be written ({error}); {lost}")
            self._is_recorded = False
