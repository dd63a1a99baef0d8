"""Calibrations: what steps of a model cost on a kind of host, in a file that can be kept and shared.

`headrace bench calibrate` writes them and `headrace plan` reads them. Pure, except for reading and writing, and for
`this_host`.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.common.model_files.cache import cache_directory
from headrace.sim.step_cost import StepCostPair, shape_of

VERSION = 2
"""Raised when the meaning of a field changes, or when the costs in files of before are known to be wrong."""
_REMEDY = "make one with `headrace bench calibrate MODEL`"


class CalibrationError(Exception):
    """A file is not a usable calibration. The message says why, and what to do."""


class Host(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The host that was measured. Unknown numbers are 0."""

    cpu: str
    cores: int
    """Physical cores."""
    cpus: int
    """Logical ones."""
    nodes: int
    """NUMA nodes."""
    memory_bytes: int


def this_host(proc: Path = Path("/proc"), nodes: Path = Path("/sys/devices/system/node")) -> Host:
    """The host of this process, with the cores that it may use."""
    usable = os.sched_getaffinity(0)
    name = ""
    cores: set[tuple[str, str]] = set()
    fields: dict[str, str] = {}
    for line in [*(proc / "cpuinfo").read_text().splitlines(), ""]:
        if line.strip():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        elif fields:
            if int(fields.get("processor", "0")) in usable:
                name = name or fields.get("model name", "")
                cores.add((fields.get("physical id", "0"), fields.get("core id", fields.get("processor", "0"))))
            fields = {}
    return Host(
        cpu=name or platform.machine(),
        cores=len(cores),
        cpus=len(usable),
        nodes=max(1, sum(1 for _ in nodes.glob("node[0-9]*"))),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The model. `fingerprint` is that of its files, and `block_tokens` the tokens of a block of its KV cache. Of the
    bytes of a token, `window_token_bytes` are those of layers that keep only `window_tokens` tokens of a request (0:
    all layers keep all)."""

    name: str
    fingerprint: str
    max_context_tokens: int
    block_tokens: int
    kv_token_bytes: float
    kv_precision: str
    window_tokens: int = 0
    window_token_bytes: float = 0.0


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the host was serving: its workers, the threads of each (0: unknown), their limits, and `serve_flags`, the
    other flags of `headrace serve`."""

    workers: int
    threads: int
    kv_tokens: int
    """Tokens that the KV cache of each worker holds."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    least_decode: int
    """Fewest tokens of a decode step, padding included."""
    window_slots: int = 0
    """Blocks whose parts for layers with a window fit."""
    serve_flags: tuple[str, ...] = ()


class Front(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Gateway and router: seconds that a request takes to its worker and an answer back, and CPU seconds of both."""

    inward_s: float = 0.0
    outward_s: float = 0.0
    cpu_s_per_request: float = 0.0
    cpu_s_per_token: float = 0.0
    """Per token of an answer."""


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A calibration. `source` is "measured", or "learned" for the costs that the workers of a running fleet had
    learned, whose error is not known."""

    version: int
    headrace: str
    """The version of headrace that was measured."""
    made: str
    """When, in UTC: YYYY-MM-DDTHH:MM:SSZ."""
    source: str
    seconds: float
    """How long it took."""
    num_steps: int
    """Steps that the costs were fitted to."""
    host: Host
    model: Model
    layout: Layout
    steps: StepCostPair
    slowdown: float
    """Each other busy worker of the host makes a step longer by this share of its time."""
    front: Front
    peer_bytes_per_s: float = 0.0
    """The speed at which workers have fetched cached prefixes from each other; 0 if they have not."""

    @property
    def kv_bytes(self) -> float:
        """Bytes of the KV cache of each worker."""
        model, layout = self.model, self.layout
        whole = layout.kv_tokens * (model.kv_token_bytes - model.window_token_bytes)
        if not model.window_tokens:
            return layout.kv_tokens * model.kv_token_bytes
        return whole + layout.window_slots * model.block_tokens * model.window_token_bytes

    def decode_ms(self, batch: int) -> float:
        """Milliseconds that a token takes each of `batch` streams with 512 tokens before it."""
        shape = shape_of([(512, 1)] * batch, padding=max(0, self.layout.least_decode - batch))
        return self.steps.milliseconds(shape)

    @property
    def threads(self) -> int:
        """Threads of all workers of the host."""
        return self.layout.workers * self.layout.threads


def read(path: Path) -> Calibration:
    """Read a calibration. Raises CalibrationError."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise CalibrationError(f"{path} does not exist; {_REMEDY}") from None
    except OSError as error:
        raise CalibrationError(f"{path} cannot be read: {error.strerror or error}") from None
    return decoded(raw, str(path))


def decoded(raw: bytes, name: str) -> Calibration:
    """The calibration in `raw`, which messages call `name`. Raises CalibrationError."""
    try:
        head = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise CalibrationError(f"{name} is not JSON; {_REMEDY}") from None
    version = head.get("version") if isinstance(head, dict) else None
    if not isinstance(version, int) or not isinstance(head, dict) or "steps" not in head:
        raise CalibrationError(f"{name} is not a calibration; {_REMEDY}")
    if version != VERSION:
        whose = "a newer" if version > VERSION else "an older"
        raise CalibrationError(
            f"{name} has version {version}, of {whose} headrace, and this one reads version {VERSION}: measure again "
            "with `headrace bench calibrate MODEL`"
        )
    try:
        found = msgspec.convert(head, Calibration)
    except (msgspec.ValidationError, ValueError) as error:
        raise CalibrationError(f"{name} is not a valid calibration: {error}; calibrate again") from None
    for place, number in _numbers(head):
        if not math.isfinite(number) or number < 0:
            raise CalibrationError(f"{name} is not a valid calibration: {place} is {number}; calibrate again")
    layout, model = found.layout, found.model
    for place, least in (
        ("layout.workers", layout.workers),
        ("layout.kv_tokens", layout.kv_tokens),
        ("layout.max_num_seqs", layout.max_num_seqs),
        ("layout.max_num_batched_tokens", layout.max_num_batched_tokens),
        ("layout.max_num_mixed_tokens", layout.max_num_mixed_tokens),
        ("layout.least_decode", layout.least_decode),
        ("model.block_tokens", model.block_tokens),
    ):
        if least < 1:
            raise CalibrationError(f"{name} is not a valid calibration: {place} is {least}; calibrate again")
    return found


def encoded(calibration: Calibration) -> bytes:
    """The file's content."""
    return msgspec.json.format(msgspec.json.encode(calibration), indent=2) + b"\n"


def schema() -> bytes:
    """The JSON Schema of the file."""
    return msgspec.json.format(msgspec.json.encode(msgspec.json.schema(Calibration)), indent=2) + b"\n"


def usual_path(model: str) -> Path:
    """The default path of a model's calibration."""
    return cache_directory() / "calibrations" / f"{model.replace('/', '--')}.json"


def _numbers(value: Any, place: str = "") -> Iterator[tuple[str, float]]:
    """All numbers within a value, with their places."""
    if isinstance(value, bool) or value is None:
        return
    if isinstance(value, (int, float)):
        yield place, value
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from _numbers(inner, f"{place}.{name}" if place else str(name))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, inner in enumerate(value):
            yield from _numbers(inner, f"{place}[{number}]")


def described(calibration: Calibration) -> str:
    """A description of the calibration in a few lines."""
    host, model, layout, steps = calibration.host, calibration.model, calibration.layout, calibration.steps
    memory = f", {host.memory_bytes / (1 << 30):.0f} GiB" if host.memory_bytes else ""
    cores = f", {host.cores} cores on {host.nodes} node{'s' if host.nodes > 1 else ''}{memory}" if host.cores else ""
    threads = f" of {layout.threads} thread{'s' * (layout.threads > 1)}" if layout.threads else ""
    lines = [
        f"host      {host.cpu}{cores}",
        f"model     {model.name}, {model.kv_token_bytes:,.0f} bytes of KV cache a token ({model.kv_precision})",
        f"layout    {layout.workers} worker{'s' if layout.workers > 1 else ''}{threads}, "
        f"{layout.kv_tokens:,} tokens of KV cache each",
    ]
    lines += [
        f"{'decode' if batch == 1 else '':9} {calibration.decode_ms(batch):.1f} ms a token at batch {batch}"
        for batch in (1, 8, 32)
        if batch <= layout.max_num_seqs
    ]
    whole = shape_of([(0, 512)])
    lines.append(f"prompts   {512_000 / steps.milliseconds(whole):,.0f} tokens/s in a prompt of 512")
    if calibration.source == "measured":
        errors = (
            steps.decode.median_error,
            steps.decode.p90_error,
            steps.prompts.median_error,
            steps.prompts.p90_error,
        )
        lines.append(
            "error     decode {:.1%} median, {:.1%} p90; prompts {:.1%} median, {:.1%} p90".format(*errors)
            + f"; {calibration.num_steps:,} steps in {calibration.seconds:.0f} s"
        )
    else:
        lines.append(f"error     unknown: learned by the workers of a fleet, from {calibration.num_steps:,} steps")
    return "\n".join(lines)
