"""The baseline: a minimal Python loop around OpenVINO's paged kernels.

FIFO, greedy decoding and chunked prefill, without cache reuse, streaming, cancellation or communication. It shows the
cost of a batch of requests with nothing but the kernels, and shares no code with the worker.

    python -m benchmarks.engine.plain_loop MODEL_DIR [--requests 32] [--prompt 128] [--output 64] [--budget 256]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13
from openvino._offline_transformations import paged_attention_transformation

BLOCK = 32


class PlainLoop:
    """A compiled model with enough KV blocks for `max_tokens` tokens in all."""

    def __init__(self, model_dir: Path, max_tokens: int) -> None:
        core = ov.Core()
        model = core.read_model(model_dir / "openvino_model.xml")
        paged_attention_transformation(model)
        rows = opset13.parameter([-1], dtype=np.int64, name="rows")
        rows.output(0).get_tensor().set_names({"rows"})
        head = model.get_results()[0]
        while head.get_type_name() != "MatMul":
            head = head.input_value(0).get_node()
        picked = opset13.gather(head.input_value(0), rows, opset13.constant(np.int64(0)))
        head.input(0).replace_source_output(picked.output(0))
        model.add_parameters([rows])
        model.validate_nodes_and_infer_types()
        compiled = core.compile_model(
            model, "CPU", {"PERFORMANCE_HINT": "LATENCY", "NUM_STREAMS": "1", "KEY_CACHE_QUANT_MODE": "BY_TOKEN"}
        )
        self._infer = compiled.create_infer_request()
        self.vocab_size = int(compiled.outputs[0].partial_shape[2].get_length())
        self._num_blocks = max_tokens // BLOCK
        for port in compiled.inputs:
            name = port.any_name
            if "_cache." in name:
                shape = [self._num_blocks, *(int(str(dim)) for dim in list(port.partial_shape)[1:])]
                self._infer.set_tensor(name, ov.Tensor(port.element_type, ov.Shape(shape)))

    def run(self, prompts: list[list[int]], output: int, budget: int) -> list[list[int]]:
        """Continue every prompt by `output` tokens with at most `budget` tokens a step."""
        per_request = -(-(len(prompts[0]) + output) // BLOCK)
        tokens = [list(prompt) for prompt in prompts]
        tables = [list(range(i * per_request, (i + 1) * per_request)) for i in range(len(prompts))]
        computed = [0] * len(prompts)
        live = list(range(len(prompts)))
        while live:
            left, plan = budget, []
            for i in sorted(live, key=lambda i: len(tokens[i]) - computed[i] > 1):
                count = min(left, len(tokens[i]) - computed[i])
                if count:
                    plan.append((i, count))
                    left -= count
            best = self._step(tokens, tables, computed, plan)
            row = 0
            for i, count in plan:
                computed[i] += count
                if computed[i] == len(tokens[i]):
                    tokens[i].append(int(best[row]))
                    row += 1
            live = [i for i in live if len(tokens[i]) < len(prompts[i]) + output]
        return [tokens[i][len(prompts[i]) :] for i in range(len(prompts))]

    def _step(
        self, tokens: list[list[int]], tables: list[list[int]], computed: list[int], plan: list[tuple[int, int]]
    ) -> np.ndarray:
        ids: list[int] = []
        positions: list[int] = []
        begins, block_begins, blocks, rows = [0], [0], [], []
        for i, count in plan:
            ids += tokens[i][computed[i] : computed[i] + count]
            positions += range(computed[i], computed[i] + count)
            begins.append(len(ids))
            blocks += tables[i][: -(-(computed[i] + count) // BLOCK)]
            block_begins.append(len(blocks))
            if computed[i] + count == len(tokens[i]):
                rows.append(len(ids) - 1)
        past = [computed[i] for i, _ in plan]
        arrays = {
            "input_ids": np.array(ids, np.int64),
            "position_ids": np.array(positions, np.int64),
            "past_lens": np.array(past, np.int32),
            "subsequence_begins": np.array(begins, np.int32),
            "block_indices": np.array(blocks, np.int32),
            "block_indices_begins": np.array(block_begins, np.int32),
            "max_context_len": np.array(max(computed[i] + count for i, count in plan), np.int32),
            "rows": np.array(rows, np.int64),
        }
        for name, value in arrays.items():
            self._infer.set_tensor(name, ov.Tensor(value))
        self._infer.infer()
        logits: np.ndarray = self._infer.get_output_tensor(0).data
        return logits.reshape(-1, self.vocab_size).argmax(-1)


def main() -> None:
    """Print the output tokens per second of some runs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    loop = PlainLoop(args.model_dir, max_tokens=args.requests * (args.prompt + args.output + BLOCK))
    rng = np.random.default_rng(0)
    for run in range(args.runs + 1):
        prompts = rng.integers(100, loop.vocab_size, (args.requests, args.prompt)).tolist()
        start = time.perf_counter()
        loop.run(prompts, args.output, args.budget)
        rate = args.requests * args.output / (time.perf_counter() - start)
        print(f"{'warm-up' if run == 0 else f'run {run}'}: {rate:.0f} output tokens/s")


if __name__ == "__main__":
    main()
