"""Start a program that dies with its parent and runs on given CPUs.

Run as a file by a bare interpreter (`python -I -S launch.py PARENT_PID CPUS ARGV...`, about 10 ms) so that nothing runs
between fork and exec in the supervisor, where threads may hold locks. CPUS is a comma-separated list, or empty for the
CPUs of the parent. The program keeps the pid. If the parent is gone already, the exit status is 1.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def with_parent(argv: list[str], cpus: str = "") -> list[str]:
    """The command that starts `argv` so that it dies with this process. See above for `cpus`."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), cpus, *argv]


def main() -> None:
    """Arrange the death signal and the affinity mask, then become the program."""
    parent_pid, cpus, *argv = sys.argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    # The parent may have died before the signal was arranged.
    if os.getppid() != int(parent_pid):
        sys.exit(1)
    if cpus:
        os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(",")})
    os.execv(argv[0], argv)


if __name__ == "__main__":
    main()
