"""The precision in which OpenVINO computes on this CPU."""

from __future__ import annotations

import openvino as ov


def core_for(execution_mode: str) -> ov.Core:
    """An OpenVINO core that computes in this mode: "performance" or "accuracy"."""
    core = ov.Core()
    core.set_property("CPU", {"EXECUTION_MODE_HINT": execution_mode.upper()})
    return core


def computes_in_bfloat16(core: ov.Core) -> bool:
    """Whether this core computes in bfloat16, unless a graph asks for another precision. In accuracy mode it says
    "dynamic", which is the precision of the model: float32."""
    return bool(core.get_property("CPU", "INFERENCE_PRECISION_HINT") == ov.Type.bf16)


def mode_has_bfloat16(execution_mode: str) -> bool:
    """Whether OpenVINO computes in bfloat16 in this mode, unless a graph asks for another precision."""
    return computes_in_bfloat16(core_for(execution_mode))
