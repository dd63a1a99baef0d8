"""The words that the benchmarks ask with. The tokenizers of `vision_model` have a token for each of them."""

WORDS = ("what", "is", "in", "this", "picture", "tell", "me", "more", "about", "its", "colours")
