"""How the processes of a run share out the test files."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

WITH_FLEETS = ("tests/e2e/", "tests/test_readme.py")
"""What the paths of the files begin with whose tests start fleets with the real model."""

# So many fleets run at a time.
_MOST_FLEETS = 2


class ByFleets(LoadScopeScheduling):
    """Runs each file in one process. As many processes as fleets may run at a time take the files whose tests start
    fleets, each its next one when it has run the last, and after them what the others have left of the other files."""

    def _split_scope(self, nodeid: str) -> str:
        return nodeid.partition("::")[0]

    def _assign_work_unit(self, node: WorkerController) -> None:
        file = self._next_file(node)
        if file is None:
            node.shutdown()
            return
        self.workqueue.move_to_end(file, last=False)
        super()._assign_work_unit(node)

    def _next_file(self, node: WorkerController) -> str | None:
        """The file that a process takes next, None if there is no more for it."""
        first = {file.startswith(WITH_FLEETS): file for file in reversed(self.workqueue)}
        may_start_fleets = self.nodes.index(node) < _MOST_FLEETS
        return (first.get(True) if may_start_fleets else None) or first.get(False)
