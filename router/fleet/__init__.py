"""The workers that a router knows: their leases and registrations, connections, load and requests."""
