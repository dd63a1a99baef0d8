"""Export small models of the architectures that `cli/export/further_types.py` adds to those of optimum-intel, as
`export.py` does the others."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from tests.architectures.export import main
from tests.architectures.families import FURTHER_TYPES

_FILE = Path(__file__).parents[2] / "cli/export/further_types.py"

if __name__ == "__main__":
    found = importlib.util.spec_from_file_location("further_types", _FILE)
    assert found is not None
    assert found.loader is not None
    further_types = importlib.util.module_from_spec(found)
    found.loader.exec_module(further_types)
    assert set(further_types.TYPES) == FURTHER_TYPES
    further_types.register()
    main()
