"""Images that callers give: read from their fields, fetched by policy, bounded by their headers, placed in a prompt.

Nothing is decoded here: a header tells the size of an image, and its size tells how many tokens it takes.
"""
