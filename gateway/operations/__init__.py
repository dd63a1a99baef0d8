"""Endpoints for operators and tools: health, metrics, the OpenAPI document."""
