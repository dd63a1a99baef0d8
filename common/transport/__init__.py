"""gRPC between processes: channels, sessions over one stream, and heartbeats."""
