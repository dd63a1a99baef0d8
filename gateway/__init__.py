"""The text edge: accepts requests with text over HTTP and gRPC, and sends requests with token ids to routers."""

import sys

# Importing OpenVINO forks a child that reports the import over the network. A server must not report to anyone, and
# must not fork while gRPC has threads. Without the module, OpenVINO uses its own stub.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
