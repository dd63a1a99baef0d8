"""The model: its directory, its graph, and a step's computation in OpenVINO."""
