"""What the exporter says of recent models before the download, in the Python that exports."""

from __future__ import annotations

import os

import pytest

from headrace.cli.export.run import check_exportable
from headrace.common.commands import CommandError
from tests.architectures.exports import PYTHON

_CODE = {"AutoConfig": "configuration_internlm2.InternLM2Config"}
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.environ.get("HEADRACE_ARCHITECTURES") != "1", reason="make test-architectures"),
]


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "internlm2", "auto_map": _CODE}, r"\(internlm2\) needs code from its repository"),
        ({"model_type": "longcat_flash"}, r"optimum-intel exports no text-generating models .*\(longcat_flash\)"),
        ({"model_type": "lfm2_moe"}, r"\(lfm2_moe\) with transformers of at least 5\.0 .*set HEADRACE_EXPORT_PYTHON"),
        (
            {"model_type": "mistral3", "text_config": {"model_type": "ministral3"}},
            r"\(ministral3\) with transformers of",
        ),
        ({"model_type": "gemma4_text"}, r"\(gemma4_text\) with no version of transformers"),
        ({"model_type": "gemma3n"}, r"\(gemma3n\) with transformers of at least 5\.0"),
        ({"model_type": "seed_oss"}, ""),
        ({"model_type": "deepseek_v3"}, ""),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_cannot_be_exported_is_said_before_the_download(
    config: dict[str, object], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_EXPORT_PYTHON", str(PYTHON))
    if not problem:
        check_exportable("o/m", config)
        return
    with pytest.raises(CommandError, match=problem):
        check_exportable("o/m", config)
