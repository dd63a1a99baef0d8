"""The web console: a page with a chat and the fleet."""
