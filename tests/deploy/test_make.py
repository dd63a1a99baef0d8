"""The Makefile."""

from __future__ import annotations

import re
from pathlib import Path

MAKEFILE = (Path(__file__).parents[2] / "Makefile").read_text()


def test_every_target_that_is_told_has_one_rule() -> None:
    told = re.findall(r"^\t@echo 'make (\S+)", MAKEFILE, re.MULTILINE)
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    rules = re.findall(r"^([a-z0-9-]+):(?!=)", MAKEFILE, re.MULTILINE)
    assert {name for name in rules if rules.count(name) > 1} == set()
    assert set(told) | set(phony[1].split()) <= set(rules)
