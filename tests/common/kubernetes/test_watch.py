"""A Service followed through everything that happens to watches, against a scripted API server."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headrace.common.kubernetes.cluster import CallError, Cluster, ClusterError
from headrace.common.kubernetes.watch import Pace
from tests.api_server import ApiServer, Pod
from tests.certificates import make_certificates
from tests.common.kubernetes.following import Following
from tests.router.fake_worker import until

A, B, C = Pod("a", "10.0.0.1"), Pod("b", "10.0.0.2"), Pod("c", "10.0.0.3")
# Watches of an hour, so that nothing ends one but what the test is about.
LONG = Pace(watch_s=3600, first_pause_s=0.02, max_pause_s=0.1, steady_s=60)
ENDING = Pace(watch_s=1.0, late_s=3600, first_pause_s=0.02, max_pause_s=0.1, steady_s=0.5)
SHORT = Pace(watch_s=1.0, late_s=0.2, first_pause_s=0.02, max_pause_s=0.1, steady_s=0.5)


Follow = Callable[..., Awaitable[Following]]


@pytest.fixture
async def server() -> AsyncIterator[ApiServer]:
    made = await ApiServer().start()
    made.put("s", [A])
    yield made
    await made.stop()


@pytest.fixture
async def follow(server: ApiServer, tmp_path: Path) -> AsyncIterator[Follow]:
    made: list[Following] = []

    async def start(pace: Pace = LONG) -> Following:
        made.append(Following(server.url, tmp_path, pace))
        await made[-1].until_told(*(entry["targetRef"]["name"] for entry in server.slices["s"]["endpoints"]))
        await until(lambda: server.num_watching == 1)
        return made[-1]

    yield start
    for one in made:
        await one.close()


async def test_pods_are_told_as_they_come_change_and_go(server: ApiServer, follow: Follow) -> None:
    following = await follow()
    server.put("s", [A, B])
    await following.until_told("a", "b")
    server.put("t", [C])
    await following.until_told("a", "b", "c")
    server.put("other", [Pod("x", "10.0.0.9")], service="another")
    server.delete("s")
    await following.until_told("c")
    assert (len(server.lists), len(server.watches)) == (1, 1)
    assert following.ends == []


async def test_an_event_that_changes_no_pod_is_not_told(server: ApiServer, follow: Follow) -> None:
    following = await follow()
    server.put("s", [A])
    server.bookmark()
    server.put("s", [A, B])
    await following.until_told("a", "b")
    assert following.told == [{"a"}, {"a", "b"}]


async def test_a_long_list_comes_in_parts(server: ApiServer, follow: Follow) -> None:
    server.page = 2
    for number in range(5):
        server.put(f"t{number}", [Pod(f"p{number}", f"10.0.1.{number}")])
    server.slices["s"]["endpoints"] = []
    following = Following(server.url, Path("/nonexistent"), LONG)
    await following.until_told(*(f"p{number}" for number in range(5)))
    assert len(server.lists) == 3
    await following.close()


async def test_a_dropped_watch_goes_on_where_it_was_without_a_list(server: ApiServer, follow: Follow) -> None:
    following = await follow()
    for pods in ([A, B], [B], [B, C]):
        server.drop()
        server.put("s", pods)
        await following.until_told(*(pod.name for pod in pods))
        await until(lambda: server.num_watching == 1)
    assert len(server.lists) == 1
    assert set(following.ends) <= {"unreachable", "dropped"}


async def test_a_bookmark_spares_a_list_after_a_compaction(server: ApiServer, follow: Follow) -> None:
    following = await follow()
    for number in range(3):
        server.put("other", [Pod("x", f"10.0.0.{number}")], service="another")
    server.bookmark()
    following_version = str(server.revision)
    server.put("s", [A, B])
    await following.until_told("a", "b")
    server.compact()
    server.drop()
    await until(lambda: len(server.watches) == 2 and server.num_watching == 1)
    assert int(server.watches[1]["resourceVersion"]) >= int(following_version)
    assert len(server.lists) == 1


async def test_a_version_that_is_gone_is_listed_anew_and_what_left_meanwhile_is_gone(
    server: ApiServer, follow: Follow
) -> None:
    following = await follow()
    server.put("t", [B])
    await following.until_told("a", "b")
    await server.stop()
    server.delete("s")
    server.put("u", [C])
    server.compact()
    await server.start()
    await following.until_told("b", "c")
    assert "expired" in following.ends
    assert len(server.lists) == 2


async def test_a_refusal_of_an_old_version_by_status_is_the_same(server: ApiServer, follow: Follow) -> None:
    following = await follow()
    server.watch_status = 410
    server.drop()
    await until(lambda: len(server.lists) >= 3)
    server.watch_status = None
    server.put("s", [A, C])
    await following.until_told("a", "c")


async def test_while_the_api_server_is_away_the_pods_stay_and_it_is_found_again(
    server: ApiServer, follow: Follow, caplog: pytest.LogCaptureFixture
) -> None:
    following = await follow()
    await server.stop()
    await until(lambda: not following.watch.is_current)
    assert following.told == [{"a"}]
    assert "cannot watch the service worker.fleet:50061; its known pods stay" in caplog.text
    server.put("s", [B])
    await server.start()
    await following.until_told("b")
    await until(lambda: following.watch.is_current)
    assert sum("cannot watch" in record.message for record in caplog.records) == 1


async def test_a_frozen_watch_is_given_up(server: ApiServer, follow: Follow) -> None:
    """The connection stays open, and neither events nor the end at timeoutSeconds arrive."""
    following = await follow(SHORT)
    server.is_frozen = True
    server.put("s", [A, B])
    await until(lambda: "silent" in following.ends)
    assert following.told == [{"a"}]
    server.is_frozen = False
    await following.until_told("a", "b")


async def test_a_server_that_ignores_the_end_of_a_watch_is_no_harm(server: ApiServer, follow: Follow) -> None:
    following = await follow(SHORT)
    server.ends_watches = False
    await until(lambda: len(server.watches) >= 3)
    server.put("s", [A, B])
    await following.until_told("a", "b")
    assert len(server.lists) == 1


async def test_watches_that_end_as_asked_are_no_failures(server: ApiServer, follow: Follow) -> None:
    following = await follow(ENDING)
    await until(lambda: len(server.watches) >= 3)
    assert following.ends == []
    assert following.watch.is_current
    assert {watch["resourceVersion"] for watch in server.watches} == {str(server.revision)}
    assert len(server.lists) == 1


async def test_what_cannot_be_read_leads_to_a_list(server: ApiServer, follow: Follow) -> None:
    following = await follow()
    for garbage in (b"{]\n", b'{"type": "ADDED", "object": {"metadata": 3}}\n', b'{"type": "ERROR", "object": {}}\n'):
        num_lists = len(server.lists)
        server.garbage = garbage
        await until(lambda num_lists=num_lists: len(server.lists) > num_lists)  # type: ignore[misc]
    server.put("s", [B])
    await following.until_told("b")
    assert set(following.ends) == {"failed"}


async def test_a_server_that_wants_a_pause_gets_it(server: ApiServer, follow: Follow) -> None:
    following = await follow()
    server.status = (429, {"Retry-After": "1"})
    server.drop()
    await until(lambda: "refused" in following.ends)
    refused_s = asyncio.get_running_loop().time()
    server.status = None
    server.put("s", [B])
    await following.until_told("b")
    assert asyncio.get_running_loop().time() - refused_s >= 0.5


async def test_a_missing_right_is_told_with_the_remedy(
    server: ApiServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.status = (403, {})
    following = Following(server.url, tmp_path, LONG)
    await until(lambda: "give the pod's service account get, list and watch of endpointslices" in caplog.text)
    assert not following.watch.has_listed
    server.status = None
    await following.until_told("a")
    await following.close()


async def test_the_token_is_read_for_each_call_because_it_is_replaced(
    server: ApiServer, follow: Follow, tmp_path: Path
) -> None:
    server.token = "first"
    (tmp_path / "token").write_text("first\n")
    following = await follow()
    server.token = "second"
    (tmp_path / "token").write_text("second")
    server.drop()
    server.put("s", [B])
    await following.until_told("b")
    assert set(server.tokens) == {"first", "second"}
    assert "refused" not in following.ends


def _tls(directory: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return context


async def test_the_server_shows_a_certificate_of_the_authority_in_force(tmp_path: Path) -> None:
    own = make_certificates(tmp_path / "own", hosts=("127.0.0.1",))
    other = make_certificates(tmp_path / "other", hosts=("127.0.0.1",))
    credentials = tmp_path / "credentials"
    credentials.mkdir()
    (credentials / "ca.crt").write_bytes((other / "ca.pem").read_bytes())
    server = await ApiServer(tls=_tls(own)).start()
    server.put("s", [A])
    cluster = Cluster(server.url, credentials)
    path = "/apis/discovery.k8s.io/v1/namespaces/fleet/endpointslices"
    with pytest.raises(CallError, match="CERTIFICATE_VERIFY_FAILED"):
        await cluster.get(path, {"labelSelector": "kubernetes.io/service-name=worker"})
    (credentials / "ca.crt").write_bytes((own / "ca.pem").read_bytes())
    assert b'"a"' in await cluster.get(path, {"labelSelector": "kubernetes.io/service-name=worker"})
    await cluster.close()
    await server.stop()


def test_outside_of_a_cluster_the_api_server_must_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ClusterError, match="--kubernetes-api URL"):
        Cluster()
    with pytest.raises(ClusterError, match="write https://HOST:PORT"):
        Cluster("10.0.0.1:6443")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    assert Cluster().url == "https://[fd00::1]:443"
