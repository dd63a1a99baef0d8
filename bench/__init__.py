"""A benchmark client for any server with an OpenAI-compatible API: load, measures, checks of answers, reports."""
