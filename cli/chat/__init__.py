"""A conversation in the terminal, for `headrace chat` and `headrace run`."""
