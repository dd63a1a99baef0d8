"""Measures the engine's time outside the kernels as a share of the step, for greedy decoding and for all sampling
options.

    python -m benchmarks.engine.overhead MODEL_DIR [--batch 64] [--steps 60] [--text] [--model own|widened|random]...

It uses three models: the given one; the same with its last layer repeated to 152k tokens, so that the kernels also do
that work; and one with random weights and the shape of Qwen2.5-0.5B, the smallest common model with such a vocabulary.
Steps run as in the worker's thread. The time outside is all time of a step in which no kernel runs. There is no
comparison with another engine. Prompts are random tokens, which give flat distributions, or pieces of our documentation
(`--text`). Random weights always give flat distributions.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.row_sums import reducer_for
from headrace.worker.sampling.sampler import BatchSampler

MODELS = ("own", "widened", "random")
WIDE_VOCABULARY = 151_936
PROMPT = 128
KINDS: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "temperature, top_p": {"temperature": 0.8, "top_p": 0.95},
    "temperature, top_p, penalties, 5 logprobs": {
        "temperature": 0.8,
        "top_p": 0.95,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "num_logprobs": 5,
    },
}


def widened(model_dir: Path, out: Path) -> Path:
    """The model with its last layer repeated to WIDE_VOCABULARY rows; tokens beyond its own are read as those they
    repeat."""
    import openvino as ov
    from openvino import opset13

    model = ov.Core().read_model(model_dir / "openvino_model.xml")
    node = model.get_results()[0]
    while node.get_type_name() != "MatMul":
        node = node.input_value(0).get_node()
    weights = node.input_value(1)
    rows = int(weights.get_partial_shape()[0].get_length())
    whole, rest = divmod(WIDE_VOCABULARY, rows)
    begin, step, axis = (opset13.constant(np.array([value], np.int64)) for value in (0, 1, 0))
    part = opset13.slice(weights, begin, opset13.constant(np.array([rest], np.int64)), step, axis)
    node.input(1).replace_source_output(opset13.concat([weights] * whole + [part.output(0)], 0).output(0))
    token_ids = model.input("input_ids")
    readers = list(token_ids.get_target_inputs())
    own = opset13.floor_mod(token_ids, opset13.constant(np.int64(rows)))
    for reader in readers:
        reader.replace_source_output(own.output(0))
    model.validate_nodes_and_infer_types()
    ov.save_model(model, out / "openvino_model.xml")
    return out


def directory_of(model: str, model_dir: Path, folder: Path) -> Path:
    """The directory of one of the three models. Creates the model if necessary."""
    if model == "own":
        return model_dir
    if model == "widened":
        return widened(model_dir, folder)
    from benchmarks.random_model import write_random_model

    return write_random_model(folder)


def random_prompts(batch: int) -> list[list[int]]:
    """Random tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(100, 40_000, PROMPT).tolist() for _ in range(batch)]


def text_prompts(model_dir: Path, batch: int) -> list[list[int]]:
    """Pieces of the documentation."""
    import openvino as ov
    import openvino_tokenizers  # noqa: F401  it registers its operators

    documents = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    tokenizer = ov.Core().compile_model(model_dir / "openvino_tokenizer.xml", "CPU")
    token_ids = tokenizer(["\n".join(document.read_text() for document in documents)])["input_ids"][0]
    starts = np.linspace(0, len(token_ids) - PROMPT, batch).astype(int)
    return [token_ids[start : start + PROMPT].tolist() for start in starts]


def step(engine: Engine) -> None:
    """Run a step as the worker's thread does."""
    engine.advance(lambda _: None)


def measure(
    runner: OpenVINOModelRunner,
    num_blocks: int,
    prompts: Sequence[Sequence[int]],
    steps: int,
    sampling: dict[str, float],
) -> str:
    """Run decode steps at a full batch; the share outside the kernels."""
    sampler = BatchSampler(reducer_for(runner.vocab_size, len(usable_cpus())))
    engine = build_engine(runner, sampler, num_blocks, StepLimits(len(prompts), 1024, 1024, is_exact=False))
    for index, prompt in enumerate(prompts):
        params = SamplingParams(**{"max_tokens": 2 * steps, "seed": index, **sampling})  # type: ignore[arg-type]
        engine.scheduler.add(Request(str(index), prompt, params, 0, arrival_s=index))
    while any(request.num_uncomputed_tokens > 1 for request in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    gc.freeze()  # as the worker does
    shares, step_ms = [], []
    for _ in range(steps):
        infer_s, overhead_s = engine.stats.infer_s, engine.stats.overhead_s
        step(engine)
        infer_s, overhead_s = engine.stats.infer_s - infer_s, engine.stats.overhead_s - overhead_s
        shares.append(overhead_s / (infer_s + overhead_s))
        step_ms.append(1000 * (infer_s + overhead_s))
    low, middle, high = np.percentile(shares, [5, 50, 95])
    outside_ms = middle * float(np.median(step_ms))
    return (
        f"step {np.median(step_ms):.1f} ms, outside {outside_ms:.2f} ms = {middle:.1%} (p5 {low:.1%}, p95 {high:.1%})"
    )


def main() -> None:
    """Measure each kind of sampling with each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--model", choices=MODELS, action="append", help="only this one")
    parser.add_argument("--text", action="store_true", help="prompts of text")
    args = parser.parse_args()
    prompts = text_prompts(args.model_dir, args.batch) if args.text else random_prompts(args.batch)
    num_blocks = args.batch * (-(-(PROMPT + 2 * args.steps) // 32) + 1)
    for model in args.model or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            directory = directory_of(model, args.model_dir, Path(folder))
            runner = OpenVINOModelRunner(
                directory, threads=len(usable_cpus()), kv_precision="u8", execution_mode="performance"
            )
            runner.allocate(num_blocks)
            for name, sampling in KINDS.items():
                figures = measure(runner, num_blocks, prompts, args.steps, sampling)
                print(f"{model}, vocabulary {runner.vocab_size}, batch {args.batch}, {name}: {figures}", flush=True)


if __name__ == "__main__":
    main()
