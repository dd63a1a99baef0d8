"""Models of text and images: their networks become one that takes tokens, so their text is served as that of others."""
