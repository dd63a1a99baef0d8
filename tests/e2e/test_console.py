"""The web console in a real browser, in front of a real system."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from headrace.common.stores.api_keys import ApiKey, new_id, new_secret, sha256_of, write_keys
from tests.browser import Browser, browser, chromium
from tests.e2e.console_page import DONE, ask, fresh_page, give_files
from tests.e2e.fleet import Process, free_port
from tests.e2e.serving import HTTP, Serve, serving, until
from tests.e2e.shapes import questions
from tests.patience import patience

pytestmark = pytest.mark.e2e

LONG = "Tell me a long story about a river."


@pytest.fixture(scope="module")
def served() -> Iterator[Serve]:
    """A worker with one thread. Skips before anything starts if there is no browser."""
    chromium()
    with serving("--workers", "1", "--threads", "1") as system:
        until(lambda: {row["state"] for row in system.status()} == {"ready"}, "all processes ready")
        yield system


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    """The browser of the module. Each test reloads the page in `page`."""
    with browser() as opened:
        yield opened


@pytest.fixture
def page(served: Serve, tab: Browser) -> Iterator[Browser]:
    """The page with nothing stored."""
    yield from fresh_page(served, tab)


def test_a_question_is_answered_as_a_stream_with_its_figures(page: Browser) -> None:
    page.run(
        """window.lengths = new Set();
        const watch = () => {
          const prose = document.querySelector('.answer > .prose');
          if (prose) window.lengths.add(prose.textContent.length);
        };
        new MutationObserver(watch).observe(document.getElementById('messages'), {subtree: true, childList: true});"""
    )
    ask(page, "What is the capital of France?")
    page.until(DONE)
    assert "Paris" in page.text(".answer > .prose")
    assert page.run("return window.lengths.size") > 3, "it came piece by piece"
    figures = page.text(".figures")
    for expected in ("to the first token", "tokens/s", "prompt tokens cached"):
        assert expected in figures
    assert page.run("return document.getElementById('send').getAttribute('aria-label')") == "Send"


def test_a_conversation_and_its_context_outlive_the_page(page: Browser, served: Serve) -> None:
    ask(page, "My name is Ada. What is the capital of France?")
    page.until(DONE)
    answer = page.text(".answer > .prose")
    page.open(served.base_url + "/")
    page.until("return document.querySelectorAll('.message').length === 2")
    assert page.text(".answer > .prose") == answer
    assert page.run("return document.getElementById('setting-max_tokens').value") == "40"
    ask(page, "And of Italy?")
    page.until("return document.querySelectorAll('.message').length === 4")
    page.until(DONE)
    cached = page.run(
        "return JSON.parse(localStorage['headrace.chats'])[0].messages[3].usage.prompt_tokens_details.cached_tokens"
    )
    assert cached > 30, "the turns before are in the prefix cache"


def test_conversations_of_another_tab_are_taken_over_and_not_lost(page: Browser) -> None:
    ask(page, "What is the capital of France?")
    page.until(DONE)
    page.run(
        """const chats = JSON.parse(localStorage['headrace.chats']);
        chats.push({id: 'other', messages: [{role: 'user', content: 'Asked elsewhere'}]});
        localStorage['headrace.chats'] = JSON.stringify(chats);
        dispatchEvent(new StorageEvent('storage', {key: 'headrace.chats'}));"""
    )
    assert "Asked elsewhere" in page.text("#chats")
    ask(page, "And of Italy?")
    page.until("return document.querySelectorAll('.message').length === 4")
    page.until(DONE)
    kept = page.run("return JSON.parse(localStorage['headrace.chats']).map((chat) => chat.messages.length)")
    assert kept == [4, 1]
    page.click("[aria-label='Delete “Asked elsewhere”']")
    assert page.run("return JSON.parse(localStorage['headrace.chats']).length") == 1


def test_a_setting_made_in_the_panel_holds_for_the_next_question(page: Browser) -> None:
    page.click("#settings-toggle")
    page.type("#setting-max_tokens", "3")
    page.type("#prompt", LONG, then="Enter")
    page.until(DONE)
    assert "3 tokens" in page.text(".figures").replace("\n", " ")
    assert "limit" in page.text(".ending")
    page.click("[aria-label='Continue this answer']")
    page.until("return JSON.parse(localStorage['headrace.chats'])[0].messages[1].content.length > 14")
    page.until(DONE)
    assert page.run("return document.querySelectorAll('.message').length") == 2


def test_an_answer_follows_the_json_schema_of_the_settings(page: Browser) -> None:
    page.click("#settings-toggle")
    page.type("#setting-schema", '{"type": "object"')
    assert "Not JSON" in page.text(".problem")
    page.type("#setting-schema", ', "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"],')
    page.type("#setting-schema", ' "additionalProperties": false}')
    assert page.text(".problem").strip() == ""
    ask(page, "Which is the capital of France?")
    page.until(DONE)
    content = page.run("return JSON.parse(JSON.parse(localStorage['headrace.chats'])[0].messages[1].content).city")
    assert content in ("Paris", "Rome")


def test_an_answer_can_be_stopped_and_asked_for_again(page: Browser, served: Serve) -> None:
    ask(page, LONG, max_tokens=2000)
    page.until("return (document.querySelector('.answer > .prose')?.textContent.length ?? 0) > 40")
    page.click("#send")
    page.until(DONE)
    assert "You stopped it." in page.text(".ending")
    until(lambda: served.metric("headrace_worker_requests_running") == 0, "the worker has stopped too")
    before = page.text(".answer > .prose")
    ask_less = (
        "const f = document.getElementById('setting-max_tokens'); f.value = 8; f.dispatchEvent(new Event('input'))"
    )
    page.run(ask_less)
    page.click("[aria-label='Answer again']")
    page.until("return document.querySelector('.answer > .prose').textContent !== arguments[0]", before)
    page.until(DONE)
    assert page.run("return document.querySelectorAll('.message').length") == 2
    assert "8 tokens" in page.text(".figures").replace("\n", " ")


def test_the_fleet_is_shown_and_follows_the_death_of_a_worker_under_an_answer(page: Browser, served: Serve) -> None:
    ask(page, LONG, max_tokens=160)
    page.until("return (document.querySelector('.answer > .prose')?.textContent.length ?? 0) > 20")
    page.click("#tab-fleet")
    page.until("return document.querySelector('.worker[data-state=ready]') !== null")
    shown = page.text(".fleet-page")
    for expected in (
        "Tokens per second",
        "Time to first token",
        "worker-0",
        "smollm2-135m",
        "KV blocks",
        "from others",
        "connected",
    ):
        assert expected in shown
    page.until("return document.querySelector('.worker-figures dd').textContent.startsWith('1 of')")
    os.kill(served.process_of("worker-0")["pid"], signal.SIGKILL)
    page.until("return document.querySelector('.worker[data-state=ready]') === null")
    page.until("return document.querySelector('#pulse .dot').dataset.state === 'unreachable'")
    assert "none of 1 workers is ready" in page.text("#pulse") or "no worker is ready" in page.text("#pulse")
    page.until("return document.querySelector('.worker[data-state=ready]') !== null", bound_s=60)
    assert "worker-0 is" in page.text(".events")
    page.click("#tab-chat")
    page.until(DONE, bound_s=60)
    assert page.text(".ending.error") == ""
    assert "160 tokens" in page.text(".figures").replace("\n", " ")


def test_an_answer_that_stalls_says_so_and_goes_on(page: Browser, served: Serve) -> None:
    ask(page, LONG, max_tokens=120)
    page.until("return (document.querySelector('.answer > .prose')?.textContent.length ?? 0) > 20")
    worker = served.process_of("worker-0")["pid"]
    os.kill(worker, signal.SIGSTOP)
    before = page.text(".answer > .prose")
    try:
        stalled = "return (document.querySelector('.stall:not([hidden])')?.textContent ?? '').includes('reconnecting')"
        page.until(stalled)
    finally:
        os.kill(worker, signal.SIGCONT)
    page.until(DONE, bound_s=60)
    assert page.run("return document.querySelector('.stall').hidden")
    assert page.text(".ending.error") == ""
    after = page.text(".answer > .prose")
    assert after.startswith(before[:20])
    assert len(after) > len(before)


def test_a_question_without_an_answer_is_not_sent_again_with_the_next(page: Browser) -> None:
    sent = page.run(
        """const { requestOf } = await import('/console/chat.js');
        const { NO_SETTINGS } = await import('/console/store.js');
        const answered = [{role: 'user', content: 'a'}, {role: 'assistant', content: 'b'}];
        const failed = [{role: 'user', content: 'c'}, {role: 'assistant', content: '', error: 'No room.'}];
        const broken = [{role: 'user', content: 'd'}, {role: 'assistant', content: 'e', error: 'It broke.'}];
        const messages = [...answered, ...failed, ...broken, {role: 'user', content: 'f'}];
        return requestOf(NO_SETTINGS, messages).messages.map(({role, content}) => `${role} ${content}`);"""
    )
    assert sent == ["user a", "assistant b", "user d", "assistant e", "user f"]


def test_a_refusal_is_one_sentence(page: Browser) -> None:
    told = page.run(
        """const { refusalText } = await import('/console/chat.js');
        return arguments[0].map(([message, retryAfterS]) => refusalText({message, retryAfterS}));""",
        [
            ["rate limit of 60 requests per minute reached; try again in 3 s", 3],
            ["The worker is full, please try again later.", 2],
            ["The gateway does not answer.", None],
        ],
    )
    assert told == [
        "Rate limit of 60 requests per minute reached; try again in 3 s.",
        "The worker is full; try again in 2 s.",
        "The gateway does not answer.",
    ]


def test_controls_start_at_the_models_own_defaults(page: Browser, served: Serve) -> None:
    [model] = httpx.get(f"{served.base_url}/console/fleet", timeout=patience(5)).json()["models"]
    for name, default in model["sampling"].items():
        page.until(
            "return document.querySelector(`output[for=setting-${arguments[0]}]`).value === arguments[1]",
            name,
            f"{default:.2f} (default)",
        )
        shown = page.run("return document.getElementById(`setting-${arguments[0]}`).value", name)
        assert float(shown) == pytest.approx(default, abs=0.026)


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(served: Serve, tab: Browser, tmp_path: Path) -> None:
    secret = new_secret()
    write_keys(tmp_path / "keys.json", [ApiKey(new_id(), sha256_of(secret), "console", "people", 0)])
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    flags = ("--port", str(port), "--router", served.process_of("router")["address"])
    gateway = Process("gateway", ("-m", "headrace.gateway", *flags, "--api-keys", str(tmp_path / "keys.json")))
    gateway.start()
    try:
        until(lambda: answers(url), "the gateway with keys listens")
        tab.look()
        tab.open(url + "/")
        tab.until("return !document.getElementById('key-form').hidden")
        assert tab.text("#model") == ""
        tab.type("#key", "wrong", then="Enter")
        tab.until("return document.getElementById('key-problem').textContent.includes('does not know this key')")
        tab.until("return document.getElementById('key').value === '' && !document.getElementById('key-form').hidden")
        tab.type("#key", secret, then="Enter")
        tab.until("return document.querySelectorAll('#model option').length === 1")
        ask(tab, "What is the capital of France?")
        tab.until(DONE)
        assert "Paris" in tab.text(".answer > .prose")
        tab.until("return document.querySelector('.pulse-text').textContent.includes('1 worker ready')")
        assert tab.run("return document.getElementById('key-form').hidden")
        assert tab.run("return JSON.stringify(localStorage)").find(secret) == -1
        assert not [line for line in tab.complaints() if "401" not in line]
        tab.requests()
    finally:
        gateway.end()


def answers(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


def test_what_a_model_writes_never_becomes_markup(page: Browser, served: Serve) -> None:
    made = page.run(
        """const { render } = await import('/console/markdown.js');
        const box = document.createElement('div');
        document.body.append(box);
        render(box, arguments[0]);
        return {
          tags: [...new Set([...box.querySelectorAll('*')].map((one) => one.tagName.toLowerCase()))],
          links: [...box.querySelectorAll('a')].map((one) => one.href),
          text: box.textContent,
        };""",
        "<img src=x onerror=alert(1)> <script>alert(2)</script>\n\n[a](javascript:alert(3)) "
        '[b](data:text/html,x) ![c](https://elsewhere.example/c.png) [d](https://d.example/ "t") <b>e</b>\n\n'
        "# **F**\n\n1. g\n   - h `<i>`\n\n| j | k |\n|---|--:|\n| l | m |\n\n> n\n\n```html\n<p>o</p>\n```",
    )
    assert not set(made["tags"]) & {"img", "script", "b", "i", "iframe", "form"}
    assert made["links"] == ["https://elsewhere.example/c.png", "https://d.example/"]
    assert set(made["tags"]) >= {"h3", "strong", "ol", "ul", "li", "table", "th", "td", "blockquote", "pre", "code"}
    for text in ("<script>alert(2)</script>", "javascript:alert(3)", "<p>o</p>", "<i>"):
        assert text in made["text"]


def test_an_image_for_a_model_of_texts_is_refused_in_a_sentence(page: Browser) -> None:
    assert page.run("return document.getElementById('attach').hidden")
    give_files(page, "paste", ("picture.png", "image/png", questions()[0].pictures[0]))
    page.until("return document.getElementById('attach-problem').textContent !== ''")
    assert page.text("#attach-problem") == "smollm2-135m reads text only."
    assert page.run("return document.querySelectorAll('.attached li').length") == 0
    give_files(page, "drop", ("picture.png", "image/png", questions()[0].pictures[0]))
    ask(page, "What is the capital of France?")
    page.until(DONE)
    assert page.text("#attach-problem") == ""
    assert "Paris" in page.text(".answer > .prose")


def test_marks_without_an_end_cost_little(page: Browser) -> None:
    milliseconds = page.run(
        """const { render } = await import('/console/markdown.js');
        const begun = performance.now();
        for (const mark of ['**a ', '`a ', '[a', '__a ', '> ', '- ', '| a ', '~~a ']) {
          render(document.createElement('div'), mark.repeat(5000));
        }
        return performance.now() - begun;"""
    )
    assert milliseconds < 10_000


def test_all_is_reached_from_the_keyboard_and_has_a_name(page: Browser) -> None:
    nameless = page.run(
        """const named = (one) => one.ariaLabel || one.textContent.trim() || one.labels?.length || one.title;
        return [...document.querySelectorAll('a, button, input, select, textarea')]
          .filter((one) => !named(one)).map((one) => one.outerHTML);"""
    )
    assert nameless == []
    press = "dispatchEvent(new KeyboardEvent('keydown', {...arguments[0], bubbles: true}))"
    page.run(f"document.body.{press}", {"altKey": True, "code": "Digit2"})
    page.until("return !document.getElementById('fleet').hidden && document.getElementById('chat').hidden")
    page.run(f"document.body.{press}", {"altKey": True, "code": "KeyN"})
    page.until("return document.activeElement.id === 'prompt'")
    page.run(f"document.body.{press}", {"altKey": True, "code": "KeyS"})
    assert page.run("return document.activeElement.id") == "setting-system"
    page.run(f"document.activeElement.{press}", {"key": "Escape"})
    assert page.run("return document.getElementById('settings').hidden")
    assert page.run("return document.activeElement.id") == "settings-toggle"


def test_it_fits_a_phone(page: Browser) -> None:
    page.look(width=360, height=700)
    for view in ("#chat", "#fleet"):
        page.run("location.hash = arguments[0]", view)
        page.until("return document.querySelector(`a[href='${location.hash}'][aria-current]`) !== null")
        assert page.run("return document.documentElement.scrollWidth") <= 360
    page.click("#menu")
    page.until("return getComputedStyle(document.getElementById('sidebar')).visibility === 'visible'")
    assert page.run("return document.getElementById('menu').getAttribute('aria-expanded')") == "true"
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))")
    page.until("return getComputedStyle(document.getElementById('sidebar')).visibility === 'hidden'")
