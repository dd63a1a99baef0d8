"""The text edge: OpenAI calls over HTTP and Text over gRPC in, token-level Inference out."""

import sys

# Importing OpenVINO reports the import over the network, from a forked child. A server reports nothing to anyone, and
# must not fork beside gRPC's threads; without the module OpenVINO takes its own stub.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
