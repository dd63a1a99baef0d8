"""Files of a model that both the gateway and the workers read."""
