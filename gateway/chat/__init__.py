"""The middle that all protocols share: chats and completions, from a checked request to the pieces of its answers."""
