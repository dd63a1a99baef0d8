"""What the worker offers to others: its gRPC services, load reports, registration and metrics."""
