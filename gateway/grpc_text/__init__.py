"""The Text service over gRPC."""
