"""The tables of architectures are those of the families which are compared with transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.cli.export.run import why_unservable
from tests.architectures.families import FAMILIES
from tests.architectures.recent import RECENT, Recent
from tests.architectures.table import BEGIN, TABLES


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_documents_have_the_tables_of_the_families(path: Path) -> None:
    text = path.read_text()
    assert text.count(BEGIN) == 1
    assert TABLES[path] in text, "python -m tests.architectures.table writes it"


@pytest.mark.parametrize("row", RECENT, ids=lambda row: row.models)
def test_recent_models_are_compared_with_transformers_or_refused_before_the_download(row: Recent) -> None:
    assert bool(row.families) != bool(row.refused)
    for name in row.families:
        family = FAMILIES[name]
        assert not family.refused
        assert not why_unservable({"model_type": family.model_type, **family.whole_config})
    for kind in row.refused:
        assert why_unservable({"model_type": kind}).startswith(f"cannot be served: its architecture ({kind}) ")
