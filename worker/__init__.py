"""The worker: continuous batching over OpenVINO on the cores of one NUMA node."""

import os
import sys

# Importing OpenVINO reports the import over the network, from a forked child. A server must not report to anyone, and
# must not fork while gRPC has threads. Without this module OpenVINO uses its own stub.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

# Importing numpy would start a thread for each core, before the worker has set its memory policy. Nothing here uses
# numpy for matrix products.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
