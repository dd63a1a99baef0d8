"""The same figures as `vllm bench serve`: `python -m tests.bench.beside_vllm --vllm-python PYTHON`.

Both clients measure a scripted server in turn, at the same loads, so the server's times are known and the same for
both. PYTHON is of an environment with vLLM or vLLM for CPUs, whose client is all that is used. The two kinds of figures
that may differ are named in docs/decisions/benchmarks.md. On a busy machine the ratios of means and medians count; the
99th percentile is the machine's.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import click

from tests.bench.scripted_server import scripted_server

ROOT = Path(__file__).parents[2]
MOST_APART = 0.03
METRICS = ("ttft", "tpot", "itl", "e2el")
KEYS = (
    *(f"{kind}_{metric}_ms" for metric in METRICS for kind in ("mean", "median", "p99")),
    *("request_throughput", "output_throughput", "total_token_throughput"),
)
COUNTS = ("completed", "failed", "total_input_tokens", "total_output_tokens")
LOADS: Mapping[str, Sequence[str]] = {
    "14 requests/s of 64 tokens": ("--request-rate", "14", "--output-len", "64", "--model", "ttft=500,gap=20,joined=1"),
    "25 requests/s of 8 tokens": ("--request-rate", "25", "--output-len", "8", "--model", "ttft=500,gap=40,joined=1"),
    "chats, 10 requests/s of 32 tokens": (
        *("--request-rate", "10", "--output-len", "32", "--model", "ttft=500,gap=25,joined=1"),
        *("--max-concurrency", "64", "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
    ),
}
# Reads command lines as JSON and runs vLLM's client for each: importing vLLM takes longer than a run.
_THEIRS = """
import contextlib, json, sys
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
told = sys.stdout
print(json.dumps(sorted(parser._option_string_actions)), file=told, flush=True)
for line in sys.stdin:
    with contextlib.redirect_stdout(sys.stderr):
        main(parser.parse_args(json.loads(line)))
    print("done", file=told, flush=True)
"""


class NoVllmError(Exception):
    """There is no client of vLLM; the message says why."""


class Theirs:
    """vLLM's client in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], log: IO[str]) -> None:
        self._process = process
        self._log = log
        self.flags: list[str] = json.loads(self._line())

    def run(self, args: Sequence[str]) -> None:
        """Run `vllm bench serve` with these arguments. Raises RuntimeError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(args) + "\n")
        self._process.stdin.flush()
        if self._line() != "done":
            raise RuntimeError(f"vllm bench serve said something else than done; see {self._log.name}")

    def _line(self) -> str:
        assert self._process.stdout is not None
        while line := self._process.stdout.readline().strip():
            if line == "done" or line.startswith("["):
                return line
        self._log.seek(0)
        raise NoVllmError((self._log.read().strip() or "it ended at once").splitlines()[-1])


@contextmanager
def vllm_client(python: str) -> Iterator[Theirs]:
    """vLLM's client. Raises NoVllmError."""
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "PATH": "/usr/bin:/bin"}
    with tempfile.NamedTemporaryFile("w+", prefix="vllm-", suffix=".log") as log:
        argv = [python, "-c", _THEIRS]
        try:
            process = subprocess.Popen(
                argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, cwd="/"
            )
        except OSError as error:
            raise NoVllmError(str(error)) from None
        try:
            yield Theirs(process, log)  # type: ignore[arg-type]
        finally:
            process.kill()
            process.wait()


def tokenizer(directory: Path) -> Path:
    """A tokenizer for vLLM's client, which wants one: each word is a token. Both report the server's counts."""
    model = {"type": "WordLevel", "vocab": {"[UNK]": 0, "word": 1}, "unk_token": "[UNK]"}
    whole = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(whole))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(named))
    return directory


def prompts(path: Path, count: int) -> Path:
    """The same prompts for both clients."""
    path.write_text("".join(json.dumps({"prompt": "word " * (20 + i % 30)}) + "\n" for i in range(count)))
    return path


def shared_args(url: str, path: Path, count: int, more: Sequence[str]) -> list[str]:
    """What both clients are told."""
    return [
        *("--base-url", url, "--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", str(count)),
        *("--skip-chat-template", "--burstiness", "inf", "--percentile-metrics", ",".join(METRICS), "--disable-tqdm"),
        *("--save-result", "--save-detailed", *more),
    ]


def ours(args: Sequence[str], result: Path) -> dict[str, Any]:
    """Run our client; its result."""
    argv = [sys.executable, "-m", "headrace.bench", *args, "--result-filename", str(result)]
    subprocess.run(argv, check=True, cwd=ROOT, capture_output=True)
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def theirs(client: Theirs, args: Sequence[str], directory: Path, result: Path) -> dict[str, Any]:
    """Run vLLM's client; its result."""
    client.run([*args, "--tokenizer", str(directory), "--result-filename", str(result)])
    found: dict[str, Any] = json.loads(result.read_text())
    return found


def _compare(title: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> bool:
    """Print the medians of both and of their ratios; whether all means, medians and rates are near."""
    click.echo(f"{title}: medians of {len(pairs)} alternating pairs")
    click.echo(f"  {'':<24}{'headrace':>12}{'vllm':>12}{'ratio':>9}   (min to max)")
    all_near = True
    for key in KEYS:
        left, right = (statistics.median(pair[side][key] for pair in pairs) for side in (0, 1))
        ratios = [a[key] / b[key] for a, b in pairs]
        ratio = statistics.median(ratios)
        is_near = abs(ratio - 1) <= MOST_APART
        all_near &= is_near or key.startswith("p99")
        mark = "" if is_near else "  APART"
        click.echo(
            f"  {key:<24}{left:>12.2f}{right:>12.2f}{ratio:>9.4f}   ({min(ratios):.4f} to {max(ratios):.4f}){mark}"
        )
    for key in COUNTS:
        for a, b in pairs:
            if a[key] != b[key]:
                click.echo(f"  {key}: {a[key]} and {b[key]}: DIFFERENT")
                all_near = False
    return all_near


@click.command(context_settings={"show_default": True})
@click.option("--vllm-python", default=sys.executable, help="Python of an environment with vLLM.")
@click.option("--pairs", type=click.IntRange(1), default=5, help="Runs of each client at each load.")
@click.option("--seconds", type=click.IntRange(2), default=10, help="Time of arrivals in each run.")
def main(vllm_python: str, pairs: int, seconds: int) -> None:
    """Compare the figures of both clients. Exits with 1 if a mean, a median or a rate differs by more than 3 %."""
    all_near = True
    try:
        with tempfile.TemporaryDirectory() as kept, scripted_server() as url, vllm_client(vllm_python) as client:
            directory = tokenizer(Path(kept))
            for title, more in LOADS.items():
                count = seconds * int(more[1])
                args = shared_args(url, prompts(directory / "prompts.jsonl", count), count, more)
                found = []
                for _ in range(pairs):
                    left = ours(args, directory / "ours.json")
                    found.append((left, theirs(client, args, directory, directory / "theirs.json")))
                all_near &= _compare(title, found)
    except NoVllmError as error:
        click.echo(f"skipped: {vllm_python} has no client of vLLM ({error}); name one with --vllm-python")
        return
    sys.exit(0 if all_near else 1)


if __name__ == "__main__":
    main()
