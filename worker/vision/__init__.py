"""Images become states: a process beside the engine that decodes and encodes them, and what is kept of its work."""
