"""The worker: continuous batching over OpenVINO on the cores of one NUMA node."""

import os
import sys

# Importing OpenVINO reports the import over the network, from a forked child. A server reports nothing to anyone, and
# must not fork beside gRPC's threads; without the module OpenVINO takes its own stub.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]

# Importing numpy starts a thread for each core for matrix products that nobody here asks of it, before the worker can
# say where memory comes from.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
