"""The console's files and figures over HTTP; tests/e2e/test_console.py opens it in a browser."""

from __future__ import annotations

import asyncio
import base64
import gzip
import hashlib
import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.console.endpoints import FILES, INSIDE, FleetView, host_of, sampling_value, worker_value
from headrace.gateway.telemetry.recent import RANGES
from headrace.protos.inference_pb2 import SamplingParams
from headrace.protos.router_pb2 import WORKER_STATE_READY, WORKER_STATE_SUSPECT, WorkerInfo
from headrace.protos.sampling_fields import NUMBERS
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ROLE_PREFILL, Counters, Load, ModelCard
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = sorted(path.name for path in FILES.iterdir())
PATHS = ["/" if name == "index.html" else f"/console/{name}" for name in NAMES if name not in INSIDE]
WORKER = WorkerInfo(
    worker_id="w0",
    address="10.0.0.7:50061",
    state=WORKER_STATE_READY,
    model="tiny",
    report_age_ms=12,
    load=Load(num_running=2, num_blocks=100, num_free_blocks=90, num_cached_blocks=30, numa_node=1),
)


class StandIn:
    """An upstream that lists workers when the test lets it."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.let_answer = asyncio.Event()
        self.error: StatusError | None = None

    async def list_workers(self) -> list[WorkerInfo]:
        self.num_asked += 1
        await self.let_answer.wait()
        if self.error is not None:
            raise self.error
        return [WORKER]


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def router_of(router: Any) -> Any:
    """The module's router, as it was before each test."""
    router.reset()
    return router


async def test_a_worker_has_its_role() -> None:
    assert worker_value(WORKER, "localhost")["role"] == "both"
    assert worker_value(WorkerInfo(role=ROLE_PREFILL), "localhost")["role"] == "prefill"


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
async def test_files_come_with_a_strict_policy_and_are_asked_for_again_only_by_their_tag(
    gateway: Any, path: str
) -> None:
    answer = await gateway.http.get(path)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for source in ("script-src", "style-src"):
        assert re.fullmatch(r"'self' 'sha256-[\w+/]{43}='" if path == "/" else "'self'", policy[source])
    assert "unsafe" not in answer.headers["content-security-policy"]
    again = await gateway.http.get(path, headers={"If-None-Match": answer.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = await gateway.http.get(path, headers={"If-None-Match": '"another"'})
    assert other.status_code == 200


async def test_what_a_browser_needs_to_paint_is_inside_of_the_page(gateway: Any) -> None:
    answer = await gateway.http.get("/")
    before_paint = answer.text.partition("<body>")[0]
    for name, tag in (("theme.js", "script"), ("style.css", "style")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", before_paint, re.DOTALL)
        assert content == (FILES / name).read_text()
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{tag}-src 'self' 'sha256-{digest}';" in answer.headers["content-security-policy"]
        assert (await gateway.http.get(f"/console/{name}")).status_code == 404
    assert not re.search(r'rel="stylesheet"|<script src=', before_paint), "it waits for no other file"


@pytest.mark.parametrize("path", PATHS)
async def test_compressed_and_plain_files_are_the_same_and_have_tags_of_their_own(gateway: Any, path: str) -> None:
    plain = await gateway.http.get(path, headers={"Accept-Encoding": "identity"})
    async with gateway.http.stream("GET", path, headers={"Accept-Encoding": "gzip"}) as answer:
        raw = b"".join([part async for part in answer.aiter_raw()])
    assert gzip.decompress(raw) == plain.content
    assert answer.headers["etag"] != plain.headers["etag"]
    assert answer.headers["vary"] == "accept-encoding"


def imports(script: str, *, dynamic: bool) -> set[str]:
    """The names of the files that a script imports: all, or those that it needs before it runs."""
    text = (FILES / script).read_text()
    found = set(re.findall(r"^(?:import|export)\b[^;()]*?\"\./([^\"]+)\"", text, re.MULTILINE))
    return found | set(re.findall(r"\bimport\(\"\./([^\"]+)\"\)", text)) if dynamic else found


def named_in_page() -> set[str]:
    return set(re.findall(r"(?:src|href)=\"console/([^\"]+)\"", (FILES / "index.html").read_text()))


def loaded_first() -> set[str]:
    """The files that are loaded before anything was asked for."""
    found: set[str] = set()
    to_read = {"index.html", *named_in_page()}
    while to_read:
        name = to_read.pop()
        found.add(name)
        to_read |= imports(name, dynamic=False) - found if name.endswith(".js") else set()
    return found


async def test_the_page_loads_less_than_45_kb_first_and_all_modules_side_by_side() -> None:
    first = loaded_first()
    assert sum(len(gzip.compress((FILES / name).read_bytes())) for name in first) < 45_000
    assert not first & {"katex.min.js", "math.js", "highlight.js", "fleet.js", "charts.js", "transfer.js"}
    assert first == named_in_page() | {"index.html"}, "a file that is not named in the page waits for another one"


async def test_the_page_takes_nothing_from_elsewhere_and_makes_no_markup() -> None:
    for name in NAMES:
        text = (FILES / name).read_text()
        addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"'`)]*", text))
        assert {one for one in addresses if not one.startswith("http://www.w3.org/")} == set(), name
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|setHTML", text
        ), name
    html = (FILES / "index.html").read_text()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son\w+=", html)


async def test_katex_is_what_its_makers_have_published() -> None:
    """With their licence in front, as `make katex` writes it."""
    content = (FILES / "katex.min.js").read_bytes()
    assert hashlib.sha256(content).hexdigest() == "9302832f3348273c185102970b0f98fb2a27c60aeae107cbcb5bf5712407d36b"
    assert b"The MIT License" in content[:100]


async def test_all_that_the_page_names_is_served_and_used(gateway: Any) -> None:
    scripts = [name for name in NAMES if name.endswith(".js") and name != "katex.min.js"]
    named = named_in_page().union(*(imports(script, dynamic=True) for script in scripts))
    assert named | {"index.html"} == set(NAMES)


async def test_a_wheel_takes_the_files_along() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["headrace.gateway.console"]
    for name in NAMES:
        assert any(fnmatch(f"page/{name}", pattern) for pattern in patterns), name


async def test_head_and_other_methods_are_answered_as_everywhere(gateway: Any) -> None:
    assert (await gateway.http.head("/")).status_code == 200
    assert (await gateway.http.post("/console/fleet")).status_code == 405


# --- figures ----------------------------------------------------------------------------------------------------------


async def test_the_fleet_is_told_with_hosts_nodes_states_and_counters(gateway: Any, router_of: Any) -> None:
    suspect = WorkerInfo(worker_id="w1", address="unix:/run/w1.sock", state=WORKER_STATE_SUSPECT, detail="silent")
    ready = WorkerInfo()
    ready.CopyFrom(WORKER)
    ready.load.counters.CopyFrom(Counters(tokens_generated=7))
    ready.load.transfer_bytes_per_s = 3e8
    shown = ready.load.stages.add(address="b:1", first_layer=2, num_layers=1, compute_seconds=3, wait_seconds=1)
    shown.ranks.add(cpus="0-3", step_seconds=2, wait_seconds=1)
    router_of.workers = [ready, suspect]
    async with asyncio.timeout(patience(10)):
        while len((body := (await gateway.http.get("/console/fleet")).json())["workers"]) != 2:
            await asyncio.sleep(0.05)
    assert body["problem"] == ""
    assert [one["connected"] for one in body["routers"]] == [True]
    first, second = body["workers"]
    assert (first["host"], first["numa_node"], first["state"]) == ("10.0.0.7", 1, "ready")
    assert first["load"]["counters"]["tokens_generated"] == 7
    assert first["load"]["transfer_bytes_per_s"] == 3e8
    stage = {"address": "b:1", "first_layer": 2, "num_layers": 1, "compute_seconds": 3.0, "wait_seconds": 1.0}
    rank = {"numa_node": None, "cpus": "0-3", "step_seconds": 2.0, "wait_seconds": 1.0}
    assert first["load"]["stages"] == [{**stage, "ranks": [rank]}]
    assert (second["host"], second["state"], second["detail"]) == (body["gateway"]["host"], "suspect", "silent")
    assert second["load"] is None
    assert second["numa_node"] is None
    (model,) = body["models"]
    assert (model["id"], model["sampling"]["temperature"], model["sampling"]["top_k"]) == ("tiny", 1.0, 0)
    assert (model["block_size"], model["max_context_tokens"]) == (1, 256)


async def test_an_answer_is_seen_in_the_intervals(gateway: Any, router_of: Any) -> None:
    before = (await gateway.http.get("/console/fleet")).json()["recent"]
    router_of.num_cached = 1
    answer = await gateway.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi there"})
    usage = answer.json()["usage"]
    refused = await gateway.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi", "temperature": 9})
    assert refused.status_code == 400
    path = f"/console/fleet?since={before['next']}"
    async with asyncio.timeout(patience(10)):
        while not (recent := (await gateway.http.get(path)).json()["recent"])["intervals"]:
            await asyncio.sleep(0.05)
        while sum(one["refused"] for one in (await gateway.http.get(path)).json()["recent"]["intervals"]) < 1:
            await asyncio.sleep(0.05)
    recent = (await gateway.http.get(path)).json()["recent"]

    def total(field: str) -> int:
        return sum(one[field] for one in recent["intervals"])

    assert (total("tokens"), total("answered"), total("refused")) == (usage["completion_tokens"], 1, 1)
    assert (total("prompt_tokens"), total("cached_tokens")) == (usage["prompt_tokens"], 1)
    assert recent["ttft_ms"]["count"] >= 1
    assert 0 < recent["ttft_ms"]["p50"] <= recent["ttft_ms"]["p95"]
    later = (await gateway.http.get(f"/console/fleet?since={recent['next']}")).json()["recent"]
    assert not later["intervals"]


async def test_longer_intervals_and_those_of_one_model_are_told(gateway: Any, router_of: Any) -> None:
    async def told(**query: Any) -> dict[str, Any]:
        return dict((await gateway.http.get("/console/fleet", params=query)).json()["recent"])

    before = await told(interval_s=2)
    answer = await gateway.http.post("/v1/completions", json={"model": "tiny", "prompt": "hi there"})
    count = answer.json()["usage"]["completion_tokens"]
    async with asyncio.timeout(patience(10)):
        while not (await told(since=before["next"], model="tiny"))["intervals"]:
            await asyncio.sleep(0.05)
    own = await told(since=before["next"], model="tiny")
    assert sum(one["tokens"] for one in own["intervals"]) == count
    assert own["ttft_ms"]["count"] >= 1
    other = await told(since=before["next"], model="another")
    assert sum(one["tokens"] for one in other["intervals"]) == 0
    assert other["ttft_ms"] == {"p50": None, "p95": None, "count": 0}
    for length_s, count in RANGES.items():
        longer = await told(interval_s=length_s)
        assert (longer["interval_s"], longer["num_intervals"]) == (length_s, count)


@pytest.mark.parametrize("interval", ["x", "3", "-2", "2.0"])
async def test_a_length_of_intervals_that_is_not_kept_is_refused(gateway: Any, interval: str) -> None:
    answer = await gateway.http.get("/console/fleet", params={"interval_s": interval})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], error["message"]) == ("interval_s", "interval_s: one of 2, 30, 300 is expected")


async def test_the_sampling_fields_are_those_of_the_checks(gateway: Any) -> None:
    answer = await gateway.http.get("/console/fields")
    assert answer.headers["content-type"] == "application/json"
    fields = {field["name"]: field for field in answer.json()}
    assert NUMBERS.keys() <= fields.keys()
    for name, number in NUMBERS.items():
        field = fields[name]
        assert (field["least"], field["greatest"], field["meaning"]) == (number.least, number.greatest, number.meaning)
    assert (fields["top_k"]["kind"], fields["top_p"]["kind"], fields["stop"]["kind"]) == ("whole", "number", "texts")
    assert (fields["ignore_eos"]["kind"], fields["max_tokens"]["least"]) == ("switch", 1)
    for name, field in fields.items():
        value = {"texts": ["temperature"], "switch": True}.get(field["kind"], field.get("greatest"))
        if name not in ("max_tokens", "min_tokens"):
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 1, name: value}
            assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200, name


async def test_defaults_of_sampling_are_the_makers_or_those_of_the_fields() -> None:
    card = ModelCard(default_sampling=SamplingParams(temperature=0.6, top_k=20, max_tokens=500))
    found = sampling_value(card)
    assert (found["temperature"], found["top_k"], found["max_tokens"]) == (0.6, 20, 500)
    assert (found["top_p"], found["min_p"], found["repetition_penalty"]) == (1.0, 0.0, 1.0)
    assert "seed" not in found
    assert "max_tokens" not in sampling_value(ModelCard())


@pytest.mark.parametrize("since", ["x", "-1", "1.5", "9" * 30])
async def test_a_since_that_is_no_number_is_refused(gateway: Any, since: str) -> None:
    answer = await gateway.http.get("/console/fleet", params={"since": since})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "since"


async def test_those_who_look_at_once_share_one_question() -> None:
    upstream, clock = StandIn(), Clock()
    view = FleetView(upstream, clock)  # type: ignore[arg-type]
    looking = [asyncio.create_task(view.refresh()) for _ in range(5)]
    await asyncio.sleep(0)
    looking[0].cancel()  # whoever goes away does not take the answer from the others
    upstream.let_answer.set()
    await asyncio.gather(*looking[1:])
    assert upstream.num_asked == 1
    assert list(view.workers) == [WORKER]
    await view.refresh()
    assert upstream.num_asked == 1
    clock.now_s += 1.0
    await view.refresh()
    assert upstream.num_asked == 2


async def test_a_router_that_cannot_be_asked_leaves_the_latest_list_and_the_reason() -> None:
    upstream, clock = StandIn(), Clock()
    upstream.let_answer.set()
    view = FleetView(upstream, clock)  # type: ignore[arg-type]
    await view.refresh()
    upstream.error = StatusError(Reason.WORKER_LOST, "no router")
    clock.now_s += 1.0
    await view.refresh()
    assert (list(view.workers), view.problem) == ([WORKER], "no router")
    upstream.error = None
    clock.now_s += 1.0
    await view.refresh()
    assert view.problem == ""


async def test_a_gateway_in_front_of_one_worker_has_a_console_without_a_fleet(kit: Any, tiny_bundle: bytes) -> None:
    async with (
        kit.serving_router(kit.FakeRouter(tiny_bundle, is_worker=True)) as (address, _),
        kit.serving_gateway(address) as running,
    ):
        body = (await running.http.get("/console/fleet")).json()
    assert (body["workers"], body["problem"]) == ([], "")


@pytest.mark.parametrize(
    ("address", "host"),
    [
        ("10.0.0.7:50061", "10.0.0.7"),
        ("dns:///node-3.example:50061", "node-3.example"),
        ("ipv4:10.0.0.7:50061", "10.0.0.7"),
        ("[fd00::7]:50061", "fd00::7"),
        ("node-3", "node-3"),
        ("127.0.0.1:50061", "here"),
        ("[::1]:50061", "here"),
        ("localhost:50061", "here"),
        ("unix:/run/headrace/worker-0.sock", "here"),
    ],
)
async def test_the_host_of_an_address_is_named_for_people(address: str, host: str) -> None:
    assert host_of(address, "here") == host


async def test_a_gateway_can_be_without_a_console(router: Any, kit: Any) -> None:
    async with kit.serving_gateway(router.address, flags={"console": False}) as gateway:
        for path in (*PATHS, "/console/fleet"):
            # Another protocol may take a POST to the root.
            assert (await gateway.http.get(path)).status_code in ((404, 405) if path == "/" else (404,))
        assert (await gateway.http.get("/health/ready")).status_code == 200
