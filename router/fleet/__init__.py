"""The workers that a router knows: leases and registrations, links, reported load, and the requests on each."""
