"""README's table of architectures is that of the families which are compared with transformers."""

from __future__ import annotations

from tests.architectures.table import BEGIN, README, table


def test_the_readme_has_the_table_of_the_families() -> None:
    text = README.read_text()
    assert text.count(BEGIN) == 1
    assert table() in text, "python -m tests.architectures.table writes it"
