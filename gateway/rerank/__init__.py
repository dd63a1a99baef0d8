"""Rerank and score: how well documents answer a query, in the forms of Cohere, Jina and vLLM."""
