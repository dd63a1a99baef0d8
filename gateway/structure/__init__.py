"""What form an answer must have: schemas, expressions and grammars, as the worker takes them."""
