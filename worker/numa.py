"""Where the worker's threads run. Settled before OpenVINO is imported, for it maps its threads onto the affinity mask
that it finds when it is."""

from __future__ import annotations

import os

from headrace.worker.config import ConfigurationError


def usable_cpus() -> frozenset[int]:
    """CPUs of this process's affinity mask: what cpusets and taskset leave of the machine."""
    return frozenset(os.sched_getaffinity(0))


def pin(threads: int | None) -> int:
    """Narrow the affinity mask to `threads` of the usable CPUs, the first ones; give the number of threads to use.

    None takes all. ConfigurationError when more are asked for than there are: threads that share a core would only
    wait for each other.
    """
    cpus = sorted(usable_cpus())
    if threads is None:
        return len(cpus)
    if not 1 <= threads <= len(cpus):
        raise ConfigurationError(
            f"{threads} threads were asked for (--threads) but {len(cpus)} CPUs are usable here; "
            f"ask for 1 to {len(cpus)}"
        )
    os.sched_setaffinity(0, cpus[:threads])
    return threads
