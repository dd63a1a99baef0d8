"""A benchmark client for any server with an OpenAI-compatible API: load, measures, checks of answers, reports.

Begin with `serve`, the command; `options` has its flags. `benchmark` runs one load: `workload` and `datasets` say what
is asked, `load` when, and `sender`, `connection` and `stream` ask it over HTTP in the words of `apis`. What happened to
a request is its `record`. `measures`, `checks` and `results` make figures of records, and `telling` prints and saves
them.
"""
