"""KServe's protocol for inference, version 2, over HTTP and gRPC, as Triton's clients use it."""
