"""The form that an answer must have: JSON schemas, regular expressions and grammars for the worker."""
