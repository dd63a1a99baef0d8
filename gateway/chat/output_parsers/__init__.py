"""Parses the output of models piece by piece: reasoning, text and tool calls (pure).

Each family of models has a module with one generator that mirrors the format. It takes text from a `Source`, passes its
results to an `Output`, and yields where it needs more text:

    pieces of text -> Source -> steps of the family -> Output -> deltas

The sum of the deltas does not depend on how the text was cut into pieces, because the steps see only characters.
"""
