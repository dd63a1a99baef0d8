"""From logits to tokens: penalties and other logits processors, draws, and log-probabilities."""
