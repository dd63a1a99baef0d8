"""Answers of OpenVINO GenAI with eviction, in a process of its own: `python -m tests.e2e.genai_answers`.

Reads {"model", "aggregation", "prompts", "max_tokens", "num_blocks", "budget", "rule": [start, recent, max]} as JSON
from standard input, where model is a directory, and writes the answers as lists of token ids to standard output.

GenAI shares OpenVINO's global state with the process that uses it. In a test process, which compiles hundreds of
models, its tokenizer failed once because an input had another type than in its file.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def answers_of_genai(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    aggregation: str,
    rule: tuple[int, int, int],
    *,
    max_tokens: int,
    num_blocks: int,
    budget: int,
) -> list[list[int]]:
    """The answers of OpenVINO GenAI to prompts of token ids. `rule` has the sizes of an EvictionRule: start, recent and
    the maximum, in tokens; `budget` is the most tokens of a step."""
    asked = {
        "model": str(directory),
        "aggregation": aggregation,
        "prompts": [list(prompt) for prompt in prompts],
        "max_tokens": max_tokens,
        "num_blocks": num_blocks,
        "budget": budget,
        "rule": rule,
    }
    command = [sys.executable, "-m", "tests.e2e.genai_answers"]
    done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    answers: list[list[int]] = json.loads(done.stdout)
    return answers


def _answers(asked: dict[str, Any]) -> list[list[int]]:
    import openvino as ov
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = asked["num_blocks"]
    scheduler.max_num_batched_tokens = asked["budget"]
    scheduler.enable_prefix_caching = False
    scheduler.use_cache_eviction = True
    aggregation = getattr(openvino_genai.AggregationMode, asked["aggregation"])
    scheduler.cache_eviction_config = openvino_genai.CacheEvictionConfig(*asked["rule"], aggregation)
    properties = {
        "EXECUTION_MODE_HINT": "ACCURACY",
        "INFERENCE_NUM_THREADS": 2,
        "KV_CACHE_PRECISION": ov.Type.f32,
    }
    pipeline = openvino_genai.ContinuousBatchingPipeline(asked["model"], scheduler, "CPU", properties)
    greedy = openvino_genai.GenerationConfig(max_new_tokens=asked["max_tokens"], ignore_eos=True, do_sample=False)
    answers = []
    for prompt in asked["prompts"]:
        (result,) = pipeline.generate([ov.Tensor(np.array([prompt], np.int64))], [greedy])
        answers.append([int(token) for token in result.m_generation_ids[0]])
    return answers


if __name__ == "__main__":
    json.dump(_answers(json.load(sys.stdin)), sys.stdout)
