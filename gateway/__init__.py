"""The text edge: accepts requests with text over HTTP and gRPC, and sends requests with token ids to routers."""

import sys

# Importing OpenVINO forks a child that reports the import over the network. A server must not report, and must not
# fork beside gRPC's threads. Without the module, OpenVINO uses a stub of its own.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
