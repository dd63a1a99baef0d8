"""OpenAI's files and batches: many requests from a file, answered at the lowest priority, with the answers in another.

    upload -> file in the store -> batch: plan (lines checked, in order of their prefixes) -> parts of some lines each
    every gateway of the store: claim a part -> run its lines -> one object for each finished line -> one for the part
    all parts done -> one gateway writes the files of output and errors, and ends the batch

All state is in the store (`store`), a directory or a bucket, of which only two promises are needed: an object appears
whole, and of several who create one name a single one succeeds. docs/decisions/batches.md has the design.
"""
