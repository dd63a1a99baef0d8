"""A headless Chromium, driven by its own driver over W3C WebDriver: JSON over HTTP, so no library is needed.

Both are Debian packages (chromium, chromium-driver). Names other than this machine's loopback do not resolve in it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import patience, until

BOUND_S = 30.0
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
_KEYS = {"Enter": "\ue007", "Escape": "\ue00c", "Tab": "\ue004"}
_ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def chromium() -> tuple[str, str]:
    """Paths of the browser and its driver; skips the test where they are not installed."""
    binary = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("Chromium and its driver are not installed, and make test could not fetch them")
    return binary, driver


class Browser:
    """A browser with one tab. Scripts are function bodies; their results are returned as JSON."""

    def __init__(self, driver: httpx.Client, session: str) -> None:
        self._driver = driver
        self._session = session

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """A command of the protocol. Raises `AssertionError` with the driver's message."""
        answer = self._driver.request(
            method, f"/session/{self._session}{path}", json={} if body is None and method == "POST" else body
        )
        value = answer.json()["value"]
        assert answer.status_code == 200, value
        return value

    def cdp(self, command: str, **params: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self.call("POST", "/goog/cdp/execute", {"cmd": command, "params": params})

    def open(self, url: str) -> None:
        """Load a page."""
        self.call("POST", "/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """The awaited result of the function."""
        return self.call("POST", "/execute/sync", {"script": script, "args": list(args)})

    def until(self, script: str, *args: Any, bound_s: float = BOUND_S) -> Any:
        """Wait until the function returns a true value, and return it."""
        found: list[Any] = []

        def is_there() -> bool:
            found[:] = [self.run(script, *args)]
            return bool(found[0])

        until(is_there, script, bound_s)
        return found[0]

    def text(self, css: str) -> str:
        """The visible text of all matching elements."""
        return str(
            self.run("return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText).join('\\n')", css)
        )

    def click(self, css: str) -> None:
        """Click an element as a user would. It must be clickable."""
        self.call("POST", f"/element/{self._element(css)}/click")

    def type(self, css: str, text: str, then: str = "") -> None:
        """Type into an element, and press a key then: Enter, Escape or Tab."""
        self.call("POST", f"/element/{self._element(css)}/value", {"text": text + _KEYS.get(then, "")})

    def _element(self, css: str) -> str:
        return str(self.call("POST", "/element", {"using": "css selector", "value": css})[_ELEMENT])

    def look(self, *, width: int = 1280, height: int = 800, dark: bool = False, scale: float = 1) -> None:
        """Show pages at this size, light or dark."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        """Write a screenshot of the page as PNG."""
        path.write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def complaints(self) -> list[str]:
        """Console messages since the last call: warnings and errors, including violations of policies."""
        entries = self.call("POST", "/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in ("WARNING", "SEVERE")]

    def requests(self) -> list[str]:
        """URLs requested over the network since the last call."""
        found = []
        for entry in self.call("POST", "/se/log", {"type": "performance"}):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return [url for url in found if not url.startswith(("data:", "blob:", "chrome"))]


@contextmanager
def browser() -> Iterator[Browser]:
    """A new browser with nothing stored, ended with the block."""
    binary, driver = chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, "HOME": folder, "XDG_CONFIG_HOME": folder, "XDG_CACHE_HOME": folder}
        process = subprocess.Popen(
            [driver, "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert process.stdout is not None
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{_port(process)}", timeout=patience(60), trust_env=False
            ) as client:
                session = _session(client, binary, folder)
                try:
                    yield Browser(client, session)
                finally:
                    with suppress(httpx.HTTPError):
                        client.delete(f"/session/{session}")
        finally:
            process.terminate()
            process.wait(patience(BOUND_S))
            process.stdout.close()


def _port(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"started successfully on port (\d+)", line):
            return int(found[1])
    raise AssertionError(f"the driver ended with status {process.wait()}")


def _session(client: httpx.Client, binary: str, folder: str) -> str:
    options = {"binary": binary, "args": [*_ARGUMENTS, f"--user-data-dir={folder}/profile"]}
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": options,
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        "timeouts": {"script": 30_000, "pageLoad": 30_000},
    }
    answer = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
    value = answer.json()["value"]
    assert answer.status_code == 200, value
    return str(value["sessionId"])
