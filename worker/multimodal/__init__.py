"""Models of text and images: joins their networks into one that takes tokens, so that their text is served like that of
other models."""
