"""From logits to tokens: penalties, grammars, distributions and draws."""
