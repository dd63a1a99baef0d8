"""Make the pictures of the console in docs/images, of a real system under a little load."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.browser import Browser, browser
from tests.e2e.console_page import is_ready
from tests.e2e.serving import MODEL, Serve, headrace, serving

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MAX_BYTES = 150_000
LOAD_S = 75
_SYSTEM = "You are a patient assistant for people who own a water mill. You answer in short, friendly sentences. " * 4
_TWIN = "smollm2-twin"
_TEXT = (
    "Write $n$ for the number of tokens and $d$ for the width of a head. Attention is\n\n"
    "$$\\operatorname{softmax}\\left(\\frac{QK^\\top}{\\sqrt{d}}\\right)V, "
    "\\qquad Q, K, V \\in \\mathbb{R}^{n \\times d}$$\n\n"
    "| Step | Shape | Operations |\n|---|:-:|--:|\n| $QK^\\top$ | $n \\times n$ | $2n^2d$ |\n"
    "| softmax | $n \\times n$ | $O(n^2)$ |\n| times $V$ | $n \\times d$ | $2n^2d$ |\n\n"
    "In Python:\n\n```python\ndef attention(q, k, v):\n    # Scores of all pairs, each row summing to 1.\n"
    "    scores = q @ k.T / math.sqrt(q.shape[-1])\n    return softmax(scores, axis=-1) @ v\n```\n"
)
_DONE = "return document.querySelector('.answer:last-child:not(.busy) .figures li') !== null"
_SET = """for (const [name, value] of Object.entries(arguments[0])) {
  const field = document.getElementById(`setting-${name}`);
  field.value = value;
  field.dispatchEvent(new Event('input'));
}"""


def main() -> None:
    """Write console-*.png."""
    IMAGES.mkdir(exist_ok=True)
    flags = ("--workers", "2", "--threads", "1", "--kv-cache-gb", "0.04")
    with serving(*flags) as system, browser() as page:
        assert headrace("models", "alias", _TWIN, MODEL, "--port", str(system.port)).returncode == 0
        chat(page, system)
        text(page, system)
        compare(page, system)
        with load(system, num_clients=5):
            fleet(page)
    for path in sorted(IMAGES.glob("console-*.png")):
        assert path.stat().st_size < MAX_BYTES, f"{path} has {path.stat().st_size} bytes"
        print(f"{path.relative_to(Path.cwd())}: {path.stat().st_size} bytes")


def chat(page: Browser, system: Serve) -> None:
    """Three conversations, the last one shown, in light colours."""
    page.look(width=1180, height=740)
    page.open(system.base_url + "/")
    is_ready(page, 2)
    for questions, max_tokens in (
        (["Write a short poem about rain."], 40),
        (["Explain how a water mill works."], 40),
        (["Write a short Python function that reverses a string.", "What is the capital of France?"], 52),
    ):
        page.run("document.getElementById('new-chat').click()")
        page.run(_SET, {"temperature": "0", "max_tokens": str(max_tokens)})
        for number, question in enumerate(questions, 1):
            page.type("#prompt", question, then="Enter")
            page.until("return document.querySelectorAll('.message').length === arguments[0]", 2 * number)
            page.until(_DONE)
    page.run("document.activeElement.blur()")
    time.sleep(0.5)
    page.screenshot(IMAGES / "console-chat.png")


def text(page: Browser, system: Serve) -> None:
    """An answer, written by us, with all that answers can have, in light colours."""
    question = {"role": "user", "content": "How does attention work?"}
    chats = [{"id": "text", "messages": [question, {"role": "assistant", "content": _TEXT}]}]
    page.run(
        """const others = JSON.parse(localStorage['headrace.chats']);
        localStorage['headrace.chats'] = JSON.stringify([...arguments[0], ...others]);""",
        chats,
    )
    page.open(system.base_url + "/")
    is_ready(page, 2)
    page.until(
        "return document.querySelectorAll('math').length > 8 && document.querySelector('.code-keyword') !== null"
    )
    page.run("document.activeElement.blur(); document.getElementById('scroll').scrollTop = 0")
    time.sleep(0.5)
    page.screenshot(IMAGES / "console-text.png")


def compare(page: Browser, system: Serve) -> None:
    """Two models that answer one question, in dark colours."""
    page.look(width=1180, height=740, dark=True)
    page.run("document.getElementById('new-chat').click()")
    page.run(
        "const s = document.getElementById('beside'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
        _TWIN,
    )
    page.run(_SET, {"temperature": "1", "max_tokens": "90"})
    page.type("#prompt", "Explain how a water mill works.", then="Enter")
    page.until("return document.querySelectorAll('.answer:not(.busy) .column .figures li').length > 4")
    page.run("document.activeElement.blur()")
    time.sleep(0.5)
    page.screenshot(IMAGES / "console-compare.png")
    page.click("#stop-comparing")


def fleet(page: Browser) -> None:
    """The fleet after a minute of load, in dark colours."""
    page.look(width=1180, height=740, dark=True)
    page.click("#tab-fleet")
    time.sleep(LOAD_S)
    page.screenshot(IMAGES / "console-fleet.png")


@contextmanager
def load(system: Serve, *, num_clients: int) -> Iterator[None]:
    """Clients that ask now and then; some with a wrong request, some that go away in the middle of the answer."""
    stop = threading.Event()

    def client(number: int) -> None:
        with httpx.Client(base_url=system.base_url, timeout=60) as http:
            for turn in itertools.count():
                user = {"role": "user", "content": f"Visitor {number} asks for story {turn}."}
                body = {
                    "messages": [{"role": "system", "content": _SYSTEM}, user],
                    "max_tokens": 30 + 17 * ((number + turn) % 5),
                    "model": MODEL,
                    "temperature": 7 if (number, turn % 6) == (1, 3) else 1,
                    "stream": True,
                }
                with suppress(httpx.HTTPError), http.stream("POST", "/v1/chat/completions", json=body) as answer:
                    for line_number, _ in enumerate(answer.iter_lines()):
                        if (number, turn % 4) == (2, 1) and line_number > 20:
                            break
                if stop.wait(0.3 + 0.7 * ((3 * number + turn) % 4)):
                    return

    threads = [threading.Thread(target=client, args=(number,)) for number in range(num_clients)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
