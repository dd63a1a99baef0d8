"""Models of the last years that are often asked for: the families that show that they are served, and the types of
config.json that are refused before the download. Data only."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Recent:
    """A row of the table in docs/how-to/models.md. `families` are names in families.py; `refused` are model types.
    `note` is a limit or a cost."""

    models: str
    families: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    note: str = ""


RECENT = (
    Recent("Cohere Command R, R7B and A", ("cohere", "cohere2")),
    Recent(
        "DeepSeek V2, V3 and R1",
        ("deepseek_v2", "deepseek_v3"),
        note="the KV cache has one latent head per layer, not all heads",
    ),
    Recent("ERNIE 4.5", ("ernie4_5", "ernie4_5_moe")),
    Recent("Gemma 3n", ("gemma3n_text",), note="`gemma3n` for its text"),
    Recent("Gemma 4", ("gemma4", "gemma4-both-directions")),
    Recent("GLM 4.5 to 4.7", ("glm4_moe",)),
    Recent("gpt-oss", ("gpt_oss",)),
    Recent("Granite 4, dense and hybrid", ("granitemoehybrid-dense", "granitemoehybrid")),
    Recent("LFM2 with experts", ("lfm2_moe",)),
    Recent("Llama 4", ("llama4", "llama4_text"), note="contexts of up to one chunk of attention, 8,192 tokens"),
    Recent("MiniCPM 1 to 4", refused=("minicpm", "minicpm3")),
    Recent("Ministral 8B", ("mistral-sliding", "ministral")),
    Recent("Ministral 3", ("ministral3", "mistral3-ministral3")),
    Recent("Nemotron 4, Minitron", ("nemotron",)),
    Recent("Nemotron Nano 2 and 3", refused=("nemotron_h",)),
    Recent("OLMo 2 and 3", ("olmo2", "olmo3")),
    Recent("Qwen 3, Next and 3.5", ("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_text")),
    Recent("Seed-OSS", ("seed_oss",)),
)
