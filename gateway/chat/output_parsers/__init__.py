"""What models write, read piece by piece: reasoning, text and tool calls (pure).

Each family of models has a module with one generator that reads like the format it parses. It takes text from a
`Source`, gives what it found to an `Output`, and yields where it needs more text:

    pieces of text -> Source -> steps of the family -> Output -> deltas

What the deltas add up to does not depend on how the text was cut into pieces, for the steps see characters only.
"""
