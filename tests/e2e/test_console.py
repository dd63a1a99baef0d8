"""The web console in a real browser, in front of a real system."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.common.stores.api_keys import ApiKey, new_id, new_secret, sha256_of, write_keys
from tests.browser import Browser, browser, chromium
from tests.e2e.console_page import (
    DONE,
    RECORD,
    ask,
    fresh_page,
    give_files,
    is_ready,
    load_colours_and_formulas,
    violations,
)
from tests.e2e.fleet import Process
from tests.e2e.serving import HTTP, Serve, serving, until
from tests.e2e.shapes import questions
from tests.patience import patience
from tests.ports import free_port

pytestmark = pytest.mark.e2e

LONG = "Tell me a long story about a river."
REFUSED = "return document.querySelector('.answer:last-child:not(.busy) .ending.error:not([hidden])')?.textContent"


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
    # The text behind a resumption may be another one, which would end before the limit.
    ask(page, LONG, max_tokens=160, min_tokens=160)
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
        """const { requestOf } = await import('/console/talk.js');
        const { NO_SETTINGS } = await import('/console/store.js');
        const answered = [{role: 'user', content: 'a'}, {role: 'assistant', content: 'b'}];
        const failed = [{role: 'user', content: 'c'}, {role: 'assistant', content: '', error: 'No room.'}];
        const broken = [{role: 'user', content: 'd'}, {role: 'assistant', content: 'e', error: 'It broke.'}];
        const messages = [...answered, ...failed, ...broken, {role: 'user', content: 'f'}];
        return requestOf(NO_SETTINGS, messages).messages.map(({role, content}) => `${role} ${content}`);"""
    )
    assert sent == ["user a", "assistant b", "user d", "assistant e", "user f"]


def test_a_refusal_is_one_sentence_that_says_what_to_do(page: Browser) -> None:
    told = page.run(
        """const { refusalText } = await import('/console/talk.js');
        return arguments[0].map(([status, message, retryAfterS]) => refusalText({status, message, retryAfterS}));""",
        [
            [429, "rate limit of 60 requests per minute reached; try again in 3 s", 3],
            [429, "the quota of tokens is used up", 4000],
            [429, "too many requests", None],
            [503, "The worker is full, please try again later.", 2],
            [401, "The gateway does not know this key", None],
            [403, "this key may not use the model 'large'", None],
            [400, "temperature must be between 0 and 2", None],
            [0, "The gateway does not answer", None],
        ],
    )
    assert told == [
        "Rate limit of 60 requests per minute reached; try again in 3 s.",
        "The quota of tokens is used up; try again in 67 min.",
        "Too many requests; wait a little, then ask again.",
        "The worker is full; try again in 2 s.",
        "The gateway does not know this key; enter a valid key at the top, then ask again.",
        "This key may not use the model 'large'; choose another model, or ask for a key that may use it.",
        "Temperature must be between 0 and 2.",
        "The gateway does not answer; see whether the server runs and the network is there, then ask again.",
    ]


def test_all_sampling_fields_are_there_with_the_models_own_defaults(page: Browser, served: Serve) -> None:
    fields = httpx.get(f"{served.base_url}/console/fields", timeout=patience(5)).json()
    [model] = httpx.get(f"{served.base_url}/console/fleet", timeout=patience(5)).json()["models"]
    assert {"temperature", "top_p", "min_p", "dry_base", "stop", "max_tokens"} <= {field["name"] for field in fields}
    for name in (field["name"] for field in fields):
        assert page.run("return document.getElementById(`setting-${arguments[0]}-about`).textContent", name)
        if name in model["sampling"]:
            page.until(
                """const field = document.getElementById(`setting-${arguments[0]}`);
                const shown = Number(field.type === 'range' ? field.value : field.placeholder);
                return Math.abs(shown - arguments[1]) < 0.006;""",
                name,
                model["sampling"][name],
            )
    temperature = page.run("return document.querySelector('output[for=setting-temperature]').value")
    assert temperature == f"{model['sampling']['temperature']:.2f} (default)"


def test_only_fields_that_are_set_are_sent(page: Browser) -> None:
    page.run(RECORD)
    page.click("#settings-toggle")
    page.click(".more summary")
    page.type("#setting-top_k", "3")
    page.type("#setting-stop", "one\\ntwo\nthree")
    page.type("#setting-repetition_penalty", "-1")
    assert page.text("#setting-repetition_penalty-problem") == "Values: over 0, to 100."
    page.type("#setting-system", "You are terse.")
    ask(page, "What is the capital of France?")
    page.until(DONE)
    body = page.run("return window.sent[0]")
    assert body["messages"] == [
        {"role": "system", "content": "You are terse."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    del body["messages"]
    assert body == {
        "model": "smollm2-135m",
        "temperature": 0,
        "max_tokens": 40,
        "top_k": 3,
        "stop": ["one\ntwo", "three"],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def test_with_keys_the_page_asks_for_one_and_keeps_it_in_the_tab(served: Serve, tab: Browser, tmp_path: Path) -> None:
    secret = new_secret()
    write_keys(
        tmp_path / "keys.json", [ApiKey(new_id(), sha256_of(secret), "console", "people", 0, requests_per_minute=1)]
    )
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
        is_ready(tab)
        ask(tab, "What is the capital of France?")
        tab.until(DONE)
        assert "Paris" in tab.text(".answer > .prose")
        tab.until("return document.querySelector('.pulse-text').textContent.includes('1 worker ready')")
        assert tab.run("return document.getElementById('key-form').hidden")
        assert tab.run("return JSON.stringify(localStorage)").find(secret) == -1
        assert not [line for line in tab.complaints() if "401" not in line]
        ask(tab, "And of Italy?")
        tab.until(REFUSED)
        assert re.search(r"; try again in \d+ s\.$", tab.text(".answer:last-child .ending.error"))
        gateway.end()
        tab.click(".answer:last-child [aria-label='Answer again']")
        tab.until(f"return (() => {{ {REFUSED} }})()?.includes('does not answer')")
        assert tab.text(".answer:last-child .ending.error") == (
            "The gateway does not answer; see whether the server runs and the network is there, then ask again."
        )
        assert tab.text(".versions") == "", "an answer that never came is no version"
        tab.until("return document.querySelector('.pulse-text').textContent.includes('does not answer')")
        tab.complaints()
        tab.requests()
    finally:
        gateway.end()


def answers(url: str) -> bool:
    try:
        return HTTP.get(f"{url}/health/ready").status_code == 200
    except httpx.HTTPError:
        return False


def test_what_a_model_writes_never_becomes_markup(page: Browser) -> None:
    hostile = (
        "<img src=x onerror=alert(1)> <script>alert(2)</script>\n\n[a](javascript:alert(3)) "
        '[b](data:text/html,x) ![c](https://elsewhere.example/c.png) [d](https://d.example/ "t") <b>e</b>\n\n'
        '# **F**\n\n1. g\n   - h `<i>`\n\n> n\n\n```html\n<p onclick="alert(4)">o</p><script>x</script>\n```\n\n'
        "| j <img src=x onerror=alert(5)> | [k](javascript:alert(6)) |\n|---|--:|\n"
        "| <script>l</script> | $<b>m</b>$ |\n\n"
        "$\\href{javascript:alert(7)}{x}$ $\\text{<img src=x onerror=alert(8)>}$ $\\htmlStyle{color:red}{y}$ "
        "$\\includegraphics{https://elsewhere.example/i.png}$ $\\url{https://elsewhere.example}$\n\n"
        "$$\\htmlData{onclick=alert(9)}{z} \\fcolorbox{red}{blue}{w} </math><script>alert(10)</script>$$\n\n"
        "```js\nconst a = `</code><script>alert(11)</script>`; // <img src=x onerror=alert(12)>\n```\n"
    )
    load_colours_and_formulas(page)
    made = page.run(
        """const { render } = await import('/console/markdown.js');
        const box = document.createElement('div');
        document.body.append(box);
        render(box, arguments[0]);
        const all = [...box.querySelectorAll('*')];
        const found = {
          tags: [...new Set(all.map((one) => one.tagName.toLowerCase()))],
          attributes: [...new Set(all.flatMap((one) => one.getAttributeNames()))],
          links: [...box.querySelectorAll('a, [href]')].map((one) => one.href),
          classes: [...box.querySelectorAll('code span')].map((one) => one.className),
          text: box.textContent,
        };
        box.remove();
        return found;""",
        hostile,
    )
    tags = "p h2 strong ol ul li code blockquote figure figcaption pre table thead tbody tr th td div a span br"
    of_buttons = "button svg path"
    of_formulas = "math semantics annotation mrow mi mn mo ms mtext mspace mstyle mpadded merror"
    assert set(made["tags"]) <= set(f"{tags} {of_buttons} {of_formulas}".split())
    assert {"math", "mtext", "table", "th", "td", "blockquote", "pre", "code", "span"} <= set(made["tags"])
    assert not [name for name in made["attributes"] if name.startswith("on") or name in ("style", "src", "srcdoc")]
    assert made["links"] == ["https://elsewhere.example/c.png", "https://d.example/"]
    assert {"code-text", "code-comment", "code-key"} <= set(made["classes"])
    assert set(made["classes"]) <= {"code-comment", "code-text", "code-keyword", "code-key", "code-number"}
    for text in (
        "<script>alert(2)</script>",
        "javascript:alert(3)",
        "<i>",
        "<script>l</script>",
        "javascript:alert(6)",
    ):
        assert text in made["text"]


def test_formulas_are_set_as_mathml_and_money_is_none(page: Browser) -> None:
    def shown(text: str) -> dict[str, Any]:
        return dict(
            page.run(
                """const { render } = await import('/console/markdown.js');
                const box = document.createElement('div');
                render(box, arguments[0]);
                const text = (one) => one.querySelector('semantics > :first-child').textContent;
                const maths = [...box.querySelectorAll('math')];
                return {texts: maths.map(text), displays: maths.map((one) => one.getAttribute('display')),
                  tags: maths.flatMap((one) => [...one.querySelectorAll('*')]).map((one) => one.tagName),
                  wrong: [...box.querySelectorAll('.wrong')].map((one) => one.title), whole: box.textContent};""",
                text,
            )
        )

    load_colours_and_formulas(page)
    inline = shown(r"Here $\frac{a}{b}$, \(x^2\) and `$c$`; $5 and $10, US$3 or $4-$7.")
    assert (inline["texts"], inline["displays"]) == (["ab", "x2"], [None, None])
    assert {"mfrac", "msup"} <= set(inline["tags"])
    assert "$c$; $5 and $10, US$3 or $4-$7." in inline["whole"]
    block = shown("Then\n$$\n\\sqrt{2}\n$$\n\\[ \\mathbb{R} \\to \\mathcal{H} \\]\nend $$ x $$")
    assert (block["texts"], block["displays"]) == (["2", "ℝ→ℋ", "x"], ["block", "block", "block"])
    aligned = shown("$$\\begin{aligned} a &= b \\\\ c &= d \\end{aligned}$$")
    assert aligned["tags"].count("mtr") == 2
    assert shown(r"$\operatorname{rank} A \quad b$")["texts"] == ["rank\u2061Ab"]
    wrong = shown(r"$\frac{1}{$ and $\nothing$ and $$ not closed")
    assert wrong["texts"] == []
    assert "parse error" in wrong["wrong"][0]
    assert wrong["whole"] == r"$\frac{1}{$ and $\nothing$ and $$ not closed"


def test_code_is_coloured_and_stays_the_same_text(page: Browser) -> None:
    codes = {
        "python": 'def f(x):  # "no text"\n    return f"a#b{x}" + """c\nd""" if x > 1.5e3 else None',
        "js": "const a = `b ${c} // no comment`; /* d\n */ return 0xff;",
        "html": '<!-- a --><p class="b">c</p>',
        "sql": "SELECT 'it''s' FROM t -- c\n WHERE a = 1",
        "yaml": 'key: "value" # c\nother: true',
        "json": '{"a": [1, true, "b"]}',
        "bash": 'for i in 1 2; do echo "$#"; done # c',
        "diff": "@@ -1 +1 @@\n-a\n+b\n c",
        "css": ".a { color: #fff; }",
        "rust": "fn f<'a>(x: &'a str) -> u8 { 1u8 }",
        "unheard-of": "def f(): pass",
        "c++": '#include <a>\nint main() { return "unclosed',
    }
    found = page.run(
        """const { parts } = await import('/console/highlight.js');
        return Object.entries(arguments[0]).map(([language, code]) => [language, parts(code, language)]);""",
        codes,
    )
    kinds = {language: [part for part in parts if part[0]] for language, parts in found}
    assert {language: "".join(text for _, text in parts) for language, parts in found} == codes
    assert kinds["unheard-of"] == []
    assert kinds["python"] == [
        ["keyword", "def"],
        ["comment", '# "no text"'],
        ["keyword", "return"],
        ["text", 'f"a#b{x}"'],
        ["text", '"""c\nd"""'],
        ["keyword", "if"],
        ["number", "1.5e3"],
        ["keyword", "else"],
        ["keyword", "None"],
    ]
    assert kinds["js"][1:3] == [["text", "`b ${c} // no comment`"], ["comment", "/* d\n */"]]
    assert kinds["diff"] == [["comment", "@@ -1 +1 @@"], ["removed", "-a"], ["added", "+b"]]
    assert kinds["json"][0] == ["key", '"a"']
    assert kinds["rust"] == [["keyword", "fn"]]


def test_what_is_seldom_needed_is_loaded_when_it_is(page: Browser, served: Serve) -> None:
    page.requests()
    page.open(served.base_url + "/")
    is_ready(page)
    first = {url.rpartition("/")[2] for url in page.requests()}
    assert {"app.js", "chat.js"} <= first
    assert not first & {"fleet.js", "charts.js", "highlight.js", "math.js", "katex.min.js", "transfer.js"}
    page.run("const { render } = await import('/console/markdown.js'); render(document.createElement('div'), 'a $x$')")
    page.until("return globalThis.katex !== undefined")
    page.click("#tab-fleet")
    page.until("return document.querySelector('.chart') !== null")
    later = page.run("return performance.getEntriesByType('resource').map((one) => one.name.replace(/.*\\//, ''))")
    assert {"math.js", "katex.min.js", "fleet.js", "charts.js"} <= set(later)


def test_an_image_for_a_model_of_texts_is_refused_in_a_sentence(page: Browser) -> None:
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
        r"""const { render } = await import('/console/markdown.js');
        const { parts } = await import('/console/highlight.js');
        const begun = performance.now();
        const marks = ['**a ', '`a ', '[a', '__a ', '> ', '- ', '| a ', '~~a ', '$a ', '$$ a\n', '\\(a ', '\\[ a\n'];
        for (const mark of marks) render(document.createElement('div'), mark.repeat(5000));
        for (const mark of ['"a ', '/* ', '`', "'''", '<!-- ', 'a = ', '# ', '1.', '- ', 'a: ', '</']) {
          for (const language of ['python', 'js', 'html', 'yaml', 'css', 'sql']) parts(mark.repeat(5000), language);
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
    page.run(f"document.body.{press}", {"altKey": True, "code": "KeyK"})
    assert page.run("return document.activeElement.id") == "search"


def test_pages_pass_the_rules_of_accessibility(page: Browser) -> None:
    ask(page, "What is the capital of France?")
    page.until(DONE)
    load_colours_and_formulas(page)
    page.run(
        """const { render } = await import('/console/markdown.js');
        render(document.querySelector('.answer > .prose'), arguments[0]);""",
        "Text with [a link](https://example.com), `code` and $x^2$.\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        '# A title\n\n## And another\n\n```python\n# comment\ndef f(x): return "text" + str(12)\n```\n\n'
        "```diff\n-a\n+b\n```\n\n$$\\sum_i x_i$$",
    )
    for dark in (False, True):
        page.look(dark=dark)
        page.run("location.hash = '#chat'")
        page.until("return !document.getElementById('chat').hidden")
        assert violations(page) == []
        page.run("document.getElementById('settings-toggle').click(); document.querySelector('.more').open = true")
        assert violations(page) == []
        page.run("document.getElementById('settings-toggle').click(); location.hash = '#fleet'")
        page.until("return document.querySelector('.worker[data-state=ready]') !== null")
        assert violations(page) == []


def test_colours_can_be_chosen(page: Browser, served: Serve) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(ground)
    choose = "const s = document.getElementById('theme'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    page.run(choose, "dark")
    dark = page.run(ground)
    assert dark != light
    page.open(served.base_url + "/")
    assert page.run(ground) == dark
    page.look(dark=True)
    page.run(choose, "light")
    assert page.run(ground) == light
    page.run(choose, "")
    assert page.run(ground) == dark


def test_charts_have_axes_ranges_and_a_view_of_one_model(page: Browser) -> None:
    ask(page, "What is the capital of France?")
    page.until(DONE)
    page.click("#tab-fleet")
    highest = "return Number(document.querySelector('.chart .scale span')?.textContent) > 1"
    page.until(highest)
    assert page.run("return document.querySelector('.chart footer').lastChild.textContent") == "now"
    page.until("return document.querySelector('.models tbody tr') !== null")
    assert page.text(".models tbody th") == "smollm2-135m"
    assert page.text(".models tbody td").startswith("1 of 1")
    press = """const plot = document.querySelector('.plot');
    plot.dispatchEvent(new KeyboardEvent('keydown', {key: arguments[0], bubbles: true}));
    return [plot.getAttribute('aria-valuenow'), plot.getAttribute('aria-valuetext')];"""
    at, told = page.run(press, "Home")
    assert (at, told.endswith("ago")) == ("0", True)
    assert page.run(press, "ArrowRight")[0] == "1"
    page.run("document.querySelector('.plot').dispatchEvent(new Event('blur'))")
    choose = """const select = document.getElementById(arguments[0]);
    select.value = arguments[1];
    select.dispatchEvent(new Event('change'));"""
    page.run(choose, "range", "30")
    page.until(r"return /^\d\d:\d\d$/.test(document.querySelector('.chart footer span').textContent)")
    page.run(choose, "range", "2")
    page.run(choose, "of-model", "smollm2-135m")
    page.until(highest)
    hidden = page.run("return [...document.querySelectorAll('.chart')].map((one) => one.hidden)")
    assert hidden == [False, False, True, False], "requests are counted for all models together"
    assert page.run("return document.querySelector('.models button').getAttribute('aria-pressed')") == "true"
    page.click(".models button")
    assert page.run("return document.getElementById('of-model').value") == ""


def test_it_fits_a_phone(page: Browser) -> None:
    ask(page, "What is the capital of France?")
    page.until(DONE)
    page.look(width=320, height=700)
    for view in ("#chat", "#fleet"):
        page.run("location.hash = arguments[0]", view)
        page.until("return document.querySelector(`a[href='${location.hash}'][aria-current]`) !== null")
        page.until("return location.hash !== '#fleet' || document.querySelector('.worker') !== null")
        outside = (
            "return [...document.querySelectorAll('.bar *')].filter((one) => one.getBoundingClientRect().right > 320)"
        )
        assert page.run(f"{outside}.map((one) => one.outerHTML)") == []
        assert page.run("return document.documentElement.scrollWidth") <= 320
        views = ("scroll", "fleet")  # which scroll on their own
        assert [page.run("return document.getElementById(arguments[0]).scrollWidth", one) <= 320 for one in views] == [
            True
        ] * 2
    page.click("#menu")
    page.until("return getComputedStyle(document.getElementById('sidebar')).visibility === 'visible'")
    assert page.run("return document.getElementById('menu').getAttribute('aria-expanded')") == "true"
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))")
    page.until("return getComputedStyle(document.getElementById('sidebar')).visibility === 'hidden'")
