"""Membership by the EndpointSlices of Kubernetes: which pods belong to a Service, and whether they take requests."""

from pathlib import Path

CREDENTIALS = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds the credentials of its service account."""
