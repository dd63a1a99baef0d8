"""Models: find, download, convert, and keep them."""
