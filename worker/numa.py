"""Where the worker's threads run: on the CPUs of the affinity mask that it was started with, which OpenVINO reads when
it is imported and maps its threads onto."""

from __future__ import annotations

import os

from headrace.worker.config import ConfigurationError


def usable_cpus() -> frozenset[int]:
    """CPUs of this process's affinity mask: what cpusets and taskset leave of the machine."""
    return frozenset(os.sched_getaffinity(0))


def num_threads_for(asked: int | None) -> int:
    """Threads to compute with: as many as were asked for, or as there are usable CPUs. With fewer than CPUs, the rest
    is left to the worker's asyncio side.

    ConfigurationError when more are asked for than there are: threads that share a core would only wait for each other.
    """
    num_cpus = len(usable_cpus())
    if asked is None:
        return num_cpus
    if not 1 <= asked <= num_cpus:
        raise ConfigurationError(
            f"{asked} threads were asked for (--threads) but {num_cpus} CPUs are usable here; ask for 1 to {num_cpus}"
        )
    return asked
