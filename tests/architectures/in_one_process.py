"""Runs several modules of this folder as commands in one process, whose imports take longer than most of what they
make: `in_one_process.py COMMANDS`, a list in JSON of lists: the name of a module, and its arguments.

Runs in the environment of `export.py`. Standard output gets a line for each command that is done.
"""

from __future__ import annotations

import json
import os
import runpy
import sys


def main() -> None:
    """Run the commands in their order. The first that fails ends the process."""
    done = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no such line
    for module, *arguments in json.loads(sys.argv[1]):
        sys.argv = [module, *arguments]
        runpy.run_module(f"tests.architectures.{module}", run_name="__main__")
        print(module, file=done, flush=True)


if __name__ == "__main__":
    main()
