"""What operators and tools ask: health, metrics, the OpenAPI document."""
