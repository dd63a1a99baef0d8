"""How processes speak gRPC to each other: channels, sessions over one stream, and signs of life."""
