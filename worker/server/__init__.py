"""The worker's interfaces: gRPC services, load reports, registration and metrics."""
