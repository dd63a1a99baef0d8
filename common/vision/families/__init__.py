"""One module a family of vision-language models: its layout of prompts and its pixels, as transformers computes
them."""
