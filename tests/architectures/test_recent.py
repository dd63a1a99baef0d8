"""What the exporter says of recent models before the download, in the Python that exports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.cli.export.run import check_exportable
from headrace.common.commands import CommandError
from tests.architectures.exports import PYTHON, ROOT, written_checkpoints
from tests.architectures.families import FAMILIES

EXPORTER = ROOT / "cli/export/exporter.py"
# Runs a file with other packages in front of those of its Python.
_RUN = (
    "import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.argv = sys.argv[2:]; "
    "runpy.run_path(sys.argv[0], run_name='__main__')"
)
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
        ({"model_type": "gemma3n"}, r"\(gemma3n_text\) with transformers of at least 5\.0"),
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


def test_the_text_of_gemma_3n_is_exported_from_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Its weights are those of the text alone, which transformers writes under the names that they have in multimodal
    checkpoints. Weights that it did not find would be random."""
    name = "gemma3n_text"
    alone = written_checkpoints([name])[name]
    assert b'"model.language_model.layers.0.' in (alone / "model.safetensors").read_bytes()[: 1 << 16]
    multimodal = tmp_path / "multimodal"
    shutil.copytree(alone, multimodal)
    config = json.loads((alone / "config.json").read_bytes())
    whole = {"model_type": "gemma3n", "text_config": config, "vision_config": {}, "audio_config": {}}
    (multimodal / "config.json").write_text(json.dumps(whole))
    written = []
    for checkpoint in (alone, multimodal):
        out = tmp_path / f"exported-{checkpoint.name}"
        options = json.dumps({"mode": "bf16", "memory_bytes": 1 << 40})
        version = FAMILIES[name].transformers
        command = [
            PYTHON,
            "-c",
            _RUN,
            ROOT / f".make/transformers-{version}",
            EXPORTER,
            "export",
            checkpoint,
            out,
            options,
        ]
        out.mkdir()
        subprocess.run(command, check=True, capture_output=True)
        written.append((out / "openvino_model.bin").read_bytes())
        assert json.loads((out / "config.json").read_bytes())["model_type"] == name
        assert (out / "openvino_detokenizer.xml").is_file()
    assert written[0] == written[1]
