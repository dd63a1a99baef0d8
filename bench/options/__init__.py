"""The flags of `headrace bench serve`, one subject a file: how they are called, and what they mean together.

`server` is whom to ask, `dataset` what, `load` when, `requests` how; `reporting` is what is told and kept, and `vllm`
the flags of `vllm bench serve` that are not here. `values` and `parsing` say how a flag is written.
"""
