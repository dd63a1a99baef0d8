"""Architectures that workers cannot serve after an export. They are refused before the download.

The worker judges the exported graph by itself (`headrace.worker.model.paging`). This list has the refused model types
of config.json; tests/architectures compares it with the families that are exported there. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

_RECURRENT = "has only recurrent layers, which OpenVINO cannot page"
_ALIBI = "uses ALiBi for positions, which OpenVINO loses when it pages its attention"
_WINDOW = "has layers that see a window of the context only, which OpenVINO loses when it pages their attention"
_OVER_A_STEP = "computes positions over all tokens of a step, so one request would change the answers of others"
_REFUSED = {
    "falcon_mamba": _RECURRENT,
    "gpt_neo": _WINDOW,
    "llama4": _WINDOW,
    "llama4_text": _WINDOW,
    "mamba": _RECURRENT,
    "mpt": _ALIBI,
    "phimoe": _OVER_A_STEP,
    "zamba2": "has recurrent layers that OpenVINO cannot page",
}


def why_unservable(config: Mapping[str, object]) -> str:
    """Why a model with this config.json cannot be served, as the end of a sentence that begins with the model; empty if
    no reason is known."""
    kind = str(config.get("model_type"))
    reason = _REFUSED.get(kind, "")
    if kind == "falcon" and config.get("alibi"):
        reason = _ALIBI
    return f"cannot be served: its architecture ({kind}) {reason}" if reason else ""
