"""What the KV cache keeps for layers of one kind. The coordinator composes the groups that a model has."""
