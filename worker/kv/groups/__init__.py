"""The groups of the KV cache: each keeps the content that layers of one kind need. The coordinator composes the groups
that a model has."""
