"""Compares the two ways to make a model of a GGUF file: `python -m benchmarks.engine.gguf FILE.gguf [--rounds 7]`.

One graph is ours (cli/gguf), the other that of openvino-genai's converter (docs/decisions/models.md). Printed are the
precision in which each computes, the mean log-probability of a paragraph in both modes, and what steps cost: CPU
milliseconds of one thread, in turn in one process, which other work on the machine changes less than wall time.
`--precision f32` computes as CPUs without bfloat16 do. Of random weights (`python -m benchmarks.random_model
qwen2.5-7b DIRECTORY --layers 2 --kind Q4_K --keep-file`, then FILE is DIRECTORY/random.gguf) there are no
log-probabilities, because their tokenizer is none, and the model beside the file is that of openvino-genai.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import openvino as ov
import openvino_genai

from benchmarks.engine.step_cost import NUM_BLOCKS, requests_of
from headrace.cli.models import convert
from headrace.common.model_files.networks import TEXT_NETWORK
from headrace.worker.model import runner as model_runner
from headrace.worker.model.batch import Batch, build_batch

WAYS = ("ours", "genai")
CONTEXT = 160
STEPS = {
    **{f"decode {size}": ((CONTEXT, 1),) * size for size in (1, 8, 32)},
    **{f"prompt {tokens}": ((0, tokens),) for tokens in (64, 256)},
}
PARAGRAPH = (
    "The river rises in the mountains and flows through three countries before it reaches the sea. For centuries "
    "people have built mills and bridges along its banks, and the towns that grew around them still hold markets "
    "every week. In spring, when the snow melts, the water can rise by several metres within a few days, so the "
    "oldest houses stand on high ground. Today the river is mostly known for its fish, for the path that follows it, "
    "and for the wine that is made on the slopes above it. Visitors who come by train can rent bicycles at the station "
    "and ride downstream to the next town in about two hours."
)


def converted(gguf_path: Path, directory: Path) -> dict[str, Path]:
    """Both models, in directories of these names. A model that lies beside the file is taken as that of genai."""
    directories = {way: directory / way for way in WAYS}
    if (gguf_path.parent / TEXT_NETWORK).is_file():
        directories["genai"] = gguf_path.parent
    for way, path in directories.items():
        if (path / TEXT_NETWORK).is_file():
            continue
        path.mkdir()
        start_s = time.perf_counter()
        with patch.object(convert, "can_genai_read", lambda *_, way=way: way == "genai"):
            try:
                convert.convert(gguf_path, path)
            except convert.ConversionError:
                # Random models have no tokenizer.
                if not (path / TEXT_NETWORK).is_file():
                    raise
        print(f"{way}: converted in {time.perf_counter() - start_s:.1f} s", flush=True)
    return directories


def mean_log_probability(model_dir: Path, mode: str) -> float:
    """The mean log-probability of the paragraph's tokens, except the first."""
    tokens = openvino_genai.Tokenizer(model_dir).encode(PARAGRAPH).input_ids.data[0].astype(np.int64)
    core = ov.Core()
    core.set_property("CPU", {"EXECUTION_MODE_HINT": mode})
    compiled = core.compile_model(model_dir / "openvino_model.xml", "CPU")
    count = len(tokens)
    inputs = {
        "input_ids": tokens[None],
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    logits = compiled.create_infer_request().infer(inputs)["logits"][0].astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return float(logits[np.arange(count - 1), tokens[1:]].mean())


def runner_of(model_dir: Path, precision: str | None) -> tuple[model_runner.OpenVINOModelRunner, str]:
    """A worker's runner of one thread, and the precisions of its products: states x weights."""
    compiled: list[ov.CompiledModel] = []
    compile_model = model_runner._compile

    def keep(core: ov.Core, model: ov.Model, asked: model_runner._Asked, more: dict[str, object]) -> ov.CompiledModel:
        hint = {"INFERENCE_PRECISION_HINT": precision} if precision else {}
        compiled.append(compile_model(core, model, asked, {**more, **hint}))
        return compiled[-1]

    with patch.object(model_runner, "_compile", keep):
        runner = model_runner.OpenVINOModelRunner(model_dir, threads=1, kv_precision="u8", execution_mode="performance")
    runner.allocate(NUM_BLOCKS)
    nodes = compiled[0].get_runtime_model().get_ordered_ops()
    products = [node.rt_info for node in nodes if node.rt_info["layerType"].astype(str) == "FullyConnected"]
    kinds = {f"{info['outputPrecisions'].astype(str)} x {info['runtimePrecision'].astype(str)}" for info in products}
    return runner, f"{len(products)} products, {', '.join(sorted(kinds))}"


def cpu_ms(runner: model_runner.OpenVINOModelRunner, batch: Batch, repeats: int) -> float:
    """Mean CPU milliseconds of a step, without the first step."""
    for number in range(repeats + 1):
        if number == 1:
            start_s = time.process_time()
        runner.bind(batch, keeps_logits=False)
        runner.run()
    return 1000 * (time.process_time() - start_s) / repeats


def main() -> None:
    """Convert, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--precision", choices=("bf16", "f32"), help="by default that of this CPU")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        directories = converted(args.file, Path(folder))
        has_text = all((path / "openvino_tokenizer.xml").is_file() for path in directories.values())
        for way, path in directories.items() if has_text else ():
            found = [mean_log_probability(path, mode) for mode in ("PERFORMANCE", "ACCURACY")]
            print(f"{way}: mean log-probability {found[0]:.3f}, in accuracy mode {found[1]:.3f}", flush=True)
        runners = []
        for way, path in directories.items():
            runner, products = runner_of(path, args.precision)
            runners.append(runner)
            print(f"{way}: {products}", flush=True)
        rng = random.Random(1)
        for name, step in STEPS.items():
            batch = build_batch(requests_of(step, rng, runners[0].block_size), runners[0].block_size)
            repeats = 3 if name.startswith("decode") else 1
            times = np.array([[cpu_ms(runner, batch, repeats) for runner in runners] for _ in range(args.rounds)])
            low, median, high = np.percentile(times[:, 0] / times[:, 1], [25, 50, 75])
            one, other = np.median(times, axis=0)
            print(f"{name}: {one:.1f} and {other:.1f} ms, ratio {median:.3f} ({low:.3f} to {high:.3f})", flush=True)


if __name__ == "__main__":
    main()
