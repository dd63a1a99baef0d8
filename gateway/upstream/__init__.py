"""What is behind the gateway: routers, and what workers hand out through them."""
