"""Models that clients of Ollama create from files which they upload, with the operator's leave."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.edge.failures import HttpError
from headrace.gateway.ollama import blobs as module
from headrace.gateway.ollama import endpoints
from headrace.gateway.ollama.blobs import Blobs
from headrace.protos.status import Reason, StatusError
from tests.gateway.model_host import FakeHost, serving_host

pytestmark = pytest.mark.asyncio(loop_scope="module")
GGUF = b"GGUF" + bytes(range(256)) * 20
MAX_GB = 1e-4  # 107,374 bytes


def digest_of(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class Taking:
    """A gateway that takes files, and its host."""

    def __init__(self, gateway: Any, host: FakeHost, folder: Path) -> None:
        self.gateway, self.host, self.folder = gateway, host, folder
        self.made: list[tuple[str, list[tuple[str, bytes]]]] = []
        """Each model that the host was asked for: its name, and the names and contents of the files there, the named
        one first."""
        host.add = self._add

    def _add(self, name: str, model: str) -> None:
        path = Path(model)
        files = [path, *sorted(other for other in path.parent.iterdir() if other != path)]
        self.made.append((name, [(file.name, file.read_bytes()) for file in files]))
        self.host.set(name, "LOADED")

    async def send(self, content: bytes, status: int = 201, digest: str | None = None, **options: Any) -> Any:
        response = await self.gateway.http.post(
            f"/api/blobs/{digest or digest_of(content)}", content=content, **options
        )
        assert response.status_code == status, response.text
        return response

    async def create(self, status: int = 200, **body: Any) -> Any:
        response = await self.gateway.http.post("/api/create", json={"stream": False, **body})
        assert response.status_code == status, response.text
        return response

    async def has(self, digest: str) -> int:
        status: int = (await self.gateway.http.head(f"/api/blobs/{digest}")).status_code
        return status


@pytest_asyncio.fixture(loop_scope="module")
async def taking(kit: Any, tiny_bundle: bytes, tmp_path: Path) -> AsyncIterator[Taking]:
    folder = tmp_path / "blobs"
    flags = {"ollama_manage": True, "ollama_blobs": folder, "ollama_blobs_gb": MAX_GB}
    router = kit.FakeRouter(tiny_bundle)
    async with (
        serving_host() as host,
        kit.serving_router(router),
        kit.serving_gateway(router.address, model_host=host.address, flags=flags) as gateway,
    ):
        yield Taking(gateway, host, folder)


async def test_a_model_is_made_of_a_file_which_is_then_removed(taking: Taking) -> None:
    digest = digest_of(GGUF)
    assert await taking.has(digest) == 404
    await taking.send(GGUF)
    assert await taking.has(digest) == 200
    response = await taking.create(model="its/own:v1", files={"model.gguf": digest}, stream=True)
    assert [json.loads(line)["status"] for line in response.text.splitlines()][-1] == "success"
    ((name, ((file, content),)),) = taking.made
    assert (name.rpartition("@")[0], content) == ("its/own:v1", GGUF)
    assert taking.host.aliases == [f"its/own:v1={name}"]
    assert file.startswith("its-own-v1-")
    assert taking.host.operators == [(name, str(taking.folder / "models" / file))]
    assert await taking.has(digest) == 404
    assert [path for path in taking.folder.rglob("*") if path.is_file()] == []


async def test_a_created_model_is_deleted_and_its_name_is_free_again(taking: Taking) -> None:
    async def delete(model: str, status: int = 200) -> Any:
        response = await taking.gateway.http.request("DELETE", "/api/delete", json={"model": model})
        assert response.status_code == status, response.text
        return response

    files = {"a.gguf": digest_of(GGUF)}
    for round_trip in (1, 2):
        await taking.send(GGUF)
        await taking.create(model="own:v1", files=files)
        assert "own:v1" in (await taking.gateway.http.get("/api/tags")).text
        await delete("own:v1:latest" if round_trip == 1 else "own:v1")
        assert [name.rpartition("@")[0] for name in taking.host.removed] == ["own:v1"] * round_trip
        assert "own:v1" not in (await taking.gateway.http.get("/api/tags")).text
    assert "there is no model 'own:v1'" in (await delete("own:v1", 404)).json()["error"]


async def test_a_created_model_stays_until_its_last_name_is_deleted(taking: Taking) -> None:
    await taking.send(GGUF)
    await taking.create(model="own", files={"a.gguf": digest_of(GGUF)})
    await taking.gateway.http.post("/api/copy", json={"source": "own", "destination": "copied"})
    for name, num_removed in (("own", 0), ("copied", 1)):
        assert (await taking.gateway.http.request("DELETE", "/api/delete", json={"model": name})).status_code == 200
        assert len(taking.host.removed) == num_removed
    assert taking.host.aliases == []


async def test_a_created_model_takes_the_place_of_an_earlier_one(taking: Taking) -> None:
    for content in (GGUF, GGUF + b"2"):
        await taking.send(content)
        await taking.create(model="own", files={"a.gguf": digest_of(content)})
    (old, _), (new, _) = taking.made
    assert (taking.host.removed, taking.host.aliases) == ([old], [f"own={new}"])
    # The same files again are the same model.
    await taking.send(GGUF + b"2")
    await taking.create(model="own:latest", files={"a.gguf": digest_of(GGUF + b"2")})
    assert len(taking.made) == 2
    assert [path for path in taking.folder.rglob("*") if path.is_file()] == []
    taking.host.set("of-operator", "LOADED")
    taking.host.alias("given", "of-operator")
    async with asyncio.timeout(20):
        while "given" not in (await taking.gateway.http.get("/api/tags")).text:
            await asyncio.sleep(0.01)
    refused = await taking.create(400, model="given", files={"a.gguf": digest_of(GGUF)})
    assert "'given' is the name of another model" in refused.json()["error"]


async def test_all_pieces_of_a_file_are_beside_each_other(taking: Taking) -> None:
    pieces = {f"big-0000{number}-of-00003.gguf": GGUF + bytes([number]) for number in (2, 1, 3)}
    for content in pieces.values():
        await taking.send(content)
    files = {name: digest_of(content) for name, content in pieces.items()}
    assert (await taking.create(name="big", files=files)).json() == {"status": "success"}
    ((_, found),) = taking.made
    assert [content[-1] for _, content in found] == [1, 2, 3]
    stems = {name.partition("-0000")[0] for name, _ in found}
    assert len(stems) == 1
    assert [name.partition("-0000")[2] for name, _ in found] == [f"{i}-of-00003.gguf" for i in (1, 2, 3)]


async def test_a_create_that_takes_long_says_that_it_goes_on(taking: Taking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "_SILENT_S", 0.01)
    asked: list[str] = []

    def begin(name: str, model: str) -> None:
        asked.append(name)
        taking.host.set(name, "LOADING")

    taking.host.add = begin
    await taking.send(GGUF)
    statuses = []
    body = {"model": "slow", "files": {"a.gguf": digest_of(GGUF)}}
    async with taking.gateway.http.stream("POST", "/api/create", json=body) as response:
        async for line in response.aiter_lines():
            statuses.append(json.loads(line).get("status"))
            if len(statuses) == 1:
                async with asyncio.timeout(20):
                    while not asked:
                        await asyncio.sleep(0.01)
            if len(statuses) == 1:
                taking.host.set(asked[0], "LOADED", is_created=True)
    assert statuses == ["converting and loading the model", "success"]


async def test_a_failure_is_an_error_in_the_callers_words_and_keeps_the_file(
    taking: Taking,
) -> None:
    def refuse(name: str, model: str) -> None:
        problem = f"model: {model} cannot be converted: its architecture is phi2"
        raise StatusError(Reason.INVALID_FIELD, problem, field="model")

    taking.host.add = refuse
    await taking.send(GGUF)
    files = {"a.gguf": digest_of(GGUF)}
    error = (await taking.create(400, model="x", files=files)).json()["error"]
    assert error.startswith("files: x-")
    assert error.endswith(".gguf cannot be converted: its architecture is phi2")
    assert str(taking.folder) not in error
    taking.host.add = lambda name, model: taking.host.set(name, "FAILED", problem="no memory")
    assert "no memory" in (await taking.create(503, model="y", files=files)).json()["error"]
    assert await taking.has(files["a.gguf"]) == 200
    assert list((taking.folder / "models").iterdir()) == []


async def test_files_that_no_model_can_be_made_of_are_refused_by_name(taking: Taking) -> None:
    await taking.send(GGUF)
    await taking.send(b"{}")
    good, other = digest_of(GGUF), digest_of(b"{}")
    for files, status, problem in (
        ({"a.gguf": digest_of(b"never sent")}, 404, "no blob was uploaded for 'a.gguf'"),
        ({"a.gguf": "sha256:x"}, 400, "must be sha256: and 64 hexadecimal digits"),
        ({"a.gguf": other}, 400, "'a.gguf' is no GGUF file"),
        ({"model.safetensors": good}, 400, "'model.safetensors' is not the name of a GGUF file"),
        ({"../a.gguf": good}, 400, "is not the name of a GGUF file"),
        ({"a.gguf": good, "mmproj.gguf": good}, 400, "must be one GGUF file, or all pieces of one"),
        ({"a-00001-of-00002.gguf": good}, 400, "must be one GGUF file, or all pieces of one"),
        ({"a-00001-of-00002.gguf": good, "a-00003-of-00002.gguf": good}, 400, "must be one GGUF file, or all pieces"),
    ):
        assert problem in (await taking.create(status, model="x", files=files)).json()["error"]
    taking.host.set("known", "LOADED")
    async with asyncio.timeout(20):
        while "known" not in (await taking.gateway.http.get("/api/tags")).text:
            await asyncio.sleep(0.01)
    for name, problem in (
        ("known:latest", "'known' is the name of another model"),
        ("a=b", "model must have 1 to 128"),
    ):
        assert problem in (await taking.create(400, model=name, files={"a.gguf": good})).json()["error"]
    assert taking.made == []


async def test_an_upload_is_checked_and_bounded(taking: Taking) -> None:
    wrong = await taking.send(GGUF, 400, digest_of(b"other"))
    assert f"the file has the digest {digest_of(GGUF)}" in wrong.json()["error"]
    for digest in ("sha256:abc", "md5:" + "0" * 64, "sha256:" + "A" * 64):
        await taking.send(b"x", 400, digest)
        assert await taking.has(digest) == 400
    large = bytes(110_000)
    assert "room for 107374 bytes" in (await taking.send(large, 413)).json()["error"]

    async def in_pieces() -> AsyncIterator[bytes]:
        for _ in range(11):
            yield bytes(10_000)

    unsized = await taking.gateway.http.post(f"/api/blobs/{digest_of(large)}", content=in_pieces())
    assert unsized.status_code == 413
    await taking.send(bytes(60_000))
    assert "room for 47374 bytes" in (await taking.send(bytes(60_001), 413)).json()["error"]
    assert [path.stat().st_size for path in taking.folder.iterdir()] == [60_000]


async def test_old_files_are_removed_and_late_pieces_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WRITE_BYTES", 1000)
    kept = Blobs(tmp_path, 1 << 20)

    async def pieces(content: bytes) -> AsyncIterator[bytes]:
        for first in range(0, len(content), 300):
            yield content[first : first + 300]

    await kept.take(digest_of(GGUF), pieces(GGUF))
    (path,) = tmp_path.iterdir()
    assert path.read_bytes() == GGUF
    os.utime(path, (1, 1))
    arriving, abandoned = tmp_path / ".1", tmp_path / ".2"
    arriving.touch()
    abandoned.touch()
    os.utime(abandoned, (time.time() - 3700,) * 2)
    await kept.take(digest_of(b"GGUF"), pieces(b"GGUF"))
    assert (kept.has(digest_of(GGUF)), kept.has(digest_of(b"GGUF"))) == (False, True)
    assert (arriving.exists(), abandoned.exists()) == (True, False)


async def test_uploads_of_several_gateways_count_together_while_they_arrive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_WRITE_BYTES", 1000)
    first, second = (Blobs(tmp_path, 10_000) for _ in range(2))
    has_arrived, may_end = asyncio.Event(), asyncio.Event()
    large = bytes(6000)

    async def slowly() -> AsyncIterator[bytes]:
        yield large[:5000]
        has_arrived.set()
        await may_end.wait()
        yield large[5000:]

    async def at_once(content: bytes) -> AsyncIterator[bytes]:
        yield content

    arriving = asyncio.create_task(first.take(digest_of(large), slowly()))
    await has_arrived.wait()
    assert second.num_free_bytes == 5000
    with pytest.raises(HttpError, match="room for 5000 bytes"):
        await second.take(digest_of(GGUF), at_once(GGUF + GGUF))
    await second.take(digest_of(GGUF[:4500]), at_once(GGUF[:4500]))
    may_end.set()
    with pytest.raises(HttpError, match="room for 500 bytes"):
        await arriving
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [4500]
    assert first.num_free_bytes == 5500


@pytest.mark.parametrize("flags", [{"ollama_manage": True}, {"ollama_blobs_gb": 1.0}])
async def test_without_the_operators_leave_nothing_is_taken(
    kit: Any, tiny_bundle: bytes, flags: dict[str, Any]
) -> None:
    router = kit.FakeRouter(tiny_bundle)
    status, remedy = (400, "--ollama-blobs") if "ollama_manage" in flags else (403, "--ollama-manage")
    async with (
        serving_host() as host,
        kit.serving_router(router),
        kit.serving_gateway(router.address, model_host=host.address, flags=flags) as gateway,
    ):
        for response in (
            await gateway.http.post(f"/api/blobs/{digest_of(GGUF)}", content=GGUF),
            await gateway.http.post("/api/create", json={"model": "x", "files": {"a.gguf": digest_of(GGUF)}}),
        ):
            assert response.status_code == status
            assert remedy in response.json()["error"]
            assert "headrace models load" in response.json()["error"]
