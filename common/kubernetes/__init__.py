"""Membership by the EndpointSlices of Kubernetes: which pods are behind a Service, and whether they take requests."""
