"""Text processing for models: tokenizers, chat templates and stop strings."""
