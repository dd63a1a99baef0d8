"""Runs a peer that makes embeddings, in a process of its own: `embedding_peers.py genai|sentence-transformers
MODEL_DIR`.

Each line of standard input is a list of lists of texts as JSON, one list for each call. 64 threads make the calls, like
callers that share one model. Each line of standard output has the seconds that they took and the first vector.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

CALLERS = 64
Embed = Callable[[Sequence[str]], Any]


def genai(model_dir: str) -> Embed:
    """OpenVINO GenAI's pipeline, with its defaults but for the mean pooling of the model. It has one inference request,
    so calls take turns."""
    import openvino_genai

    config = openvino_genai.TextEmbeddingPipeline.Config()
    config.pooling_type = openvino_genai.TextEmbeddingPipeline.PoolingType.MEAN
    config.normalize = True
    config.max_length = 256
    pipeline = openvino_genai.TextEmbeddingPipeline(model_dir, "CPU", config)
    turn = threading.Lock()

    def embed(texts: Sequence[str]) -> Any:
        with turn:
            return pipeline.embed_documents(list(texts))

    return embed


def sentence_transformers(model_dir: str) -> Embed:
    """With its defaults on a CPU: float32, batches of 32 texts sorted by length."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(model_dir, device="cpu")
    turn = threading.Lock()

    def embed(texts: Sequence[str]) -> Any:
        with turn:
            return model.encode(list(texts), show_progress_bar=False, normalize_embeddings=True)

    return embed


def main() -> None:
    """Serve until standard input ends."""
    embed = {"genai": genai, "sentence-transformers": sentence_transformers}[sys.argv[1]](sys.argv[2])
    with ThreadPoolExecutor(CALLERS) as callers:
        for line in sys.stdin:
            calls = json.loads(line)
            start = time.perf_counter()
            vectors = list(callers.map(embed, calls))
            took_s = time.perf_counter() - start
            print(json.dumps([took_s, [float(value) for value in vectors[0][0]]]), flush=True)


main()
