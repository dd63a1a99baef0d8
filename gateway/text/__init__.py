"""Models as text: tokenizers, chat templates and stop strings."""
