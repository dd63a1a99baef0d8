"""Configurations and graphs of OpenVINO Model Server (OVMS): reading them, and what their options mean here."""
