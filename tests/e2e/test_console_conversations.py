"""Conversations of the web console in a real browser: versions, two models, files, names, search, export and import."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser import Browser, browser, chromium
from tests.e2e.console_page import DONE, RECORD, ask, fresh_page, give_files, is_ready, violations
from tests.e2e.serving import MODEL, Serve, headrace, serving

pytestmark = pytest.mark.e2e
TWIN = "twin"
QUESTION = "What is the capital of France?"
KEPT = "return JSON.parse(localStorage['headrace.chats'] ?? '[]')"
LINES = "return [...document.querySelectorAll('.question .bubble')].map((one) => one.textContent)"
DRAWN = "data:image/png;base64," + (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def served() -> Iterator[Serve]:
    """A model with two names. Skips before anything starts if there is no browser."""
    chromium()
    with serving("--workers", "1", "--threads", "1") as system:
        named = headrace("models", "alias", TWIN, MODEL, "--port", str(system.port))
        assert named.returncode == 0, named.stderr
        yield system


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


@pytest.fixture
def page(served: Serve, tab: Browser) -> Iterator[Browser]:
    yield from fresh_page(served, tab, num_models=2)


def put(page: Browser, *chats: dict[str, Any]) -> None:
    """Have the page take over conversations, as from another tab."""
    page.run(
        """localStorage['headrace.chats'] = JSON.stringify(arguments[0]);
        dispatchEvent(new StorageEvent('storage', {key: 'headrace.chats'}));""",
        list(chats),
    )


def talk(name: str, *texts: str) -> dict[str, Any]:
    """A conversation: a question, its answer, and so on."""
    roles = ("user", "assistant")
    return {"id": name, "messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]}


def versions(page: Browser) -> list[str]:
    return page.text(".versions").split("\n") if page.text(".versions") else []


# --- versions ---------------------------------------------------------------------------------------------------------


def test_a_question_asked_in_another_way_becomes_another_version(page: Browser, served: Serve) -> None:
    page.run(RECORD)
    ask(page, "My name is Ada.", max_tokens=8)
    page.until(DONE)
    ask(page, QUESTION, max_tokens=8)
    page.until("return document.querySelectorAll('.message').length === 4")
    page.until(DONE)
    page.run("document.querySelectorAll(\"[aria-label='Edit and ask again']\")[1].click()")
    assert page.run("return document.getElementById('prompt').value") == QUESTION
    assert page.run("return document.querySelectorAll('.replaced').length") == 2
    page.run("document.body.dispatchEvent(new KeyboardEvent('keydown', {key: 'Escape', bubbles: true}))")
    assert page.run("return document.querySelectorAll('.replaced').length") == 0
    assert page.run("return document.getElementById('editing').hidden")
    page.run("document.querySelectorAll(\"[aria-label='Edit and ask again']\")[1].click()")
    page.run("document.getElementById('prompt').value = ''")
    page.type("#prompt", "What is the capital of Italy?", then="Enter")
    page.until("return document.querySelector('.versions')?.innerText.includes('2 / 2')")
    page.until(DONE)
    sent = page.run("return window.sent.map(({messages}) => messages.map(({content}) => content))")
    assert sent[2][0] == sent[1][0] == "My name is Ada."
    assert (sent[1][-1], sent[2][-1]) == (QUESTION, "What is the capital of Italy?")
    assert len(sent[2]) == len(sent[1]) == 3
    page.click("[aria-label='Version before']")
    assert page.run(LINES) == ["My name is Ada.", QUESTION]
    assert page.run("return document.activeElement.ariaLabel") == "Version after"
    page.open(served.base_url + "/")
    page.until("return document.querySelectorAll('.message').length === 4")
    assert page.run(LINES) == ["My name is Ada.", QUESTION]
    page.click("[aria-label='Version after']")
    assert page.run(LINES) == ["My name is Ada.", "What is the capital of Italy?"]


def test_an_answer_that_is_asked_for_again_stays_as_a_version(page: Browser) -> None:
    ask(page, QUESTION, max_tokens=12)
    page.until(DONE)
    first = page.text(".answer > .prose")
    for expected in ("2 / 2", "3 / 3"):
        page.click("[aria-label='Answer again']")
        page.until(
            "return document.querySelector('.answer:not(.busy) .versions')?.innerText.includes(arguments[0])", expected
        )
        page.until(DONE)
    page.click("[aria-label='Version before']")
    page.click("[aria-label='Version before']")
    assert "1 / 3" in page.text(".versions")
    assert page.text(".answer > .prose") == first
    [chat] = page.run(KEPT)
    assert [tail is None for tail in chat["messages"][1]["versions"]] == [True, False, False]


def test_versions_within_versions_are_all_reached(page: Browser) -> None:
    found = page.run(
        """const { branch, turnTo, versionOf, everyMessage } = await import('/console/talk.js');
        const user = (content) => ({role: 'user', content});
        const answer = (content) => ({role: 'assistant', content});
        const messages = [user('a'), answer('b'), user('c'), answer('d')];
        branch(messages, 3, [answer('d2')]);
        branch(messages, 0, [user('a2'), answer('b2')]);
        branch(messages, 1, [answer('b3')]);
        const seen = () => messages.map(({content}) => content).join(' ');
        const told = [seen()];
        turnTo(messages, 1, -1); told.push(seen());
        turnTo(messages, 1, -1); told.push(seen());
        turnTo(messages, 0, -1); told.push(seen());
        turnTo(messages, 3, -1); told.push(seen());
        turnTo(messages, 0, 1); told.push(seen());
        return [told, versionOf(messages[0]), everyMessage(messages).map(({content}) => content).sort().join(' ')];"""
    )
    assert found[0] == ["a2 b3", "a2 b2", "a2 b2", "a b c d2", "a b c d", "a2 b2"]
    assert found[1] == [2, 2]
    assert found[2] == "a a2 b b2 b3 c d d2"


# --- two models -------------------------------------------------------------------------------------------------------


def test_two_models_answer_side_by_side_and_each_knows_its_own_answers(page: Browser) -> None:
    page.run(RECORD)
    page.run(
        "const s = document.getElementById('beside'); s.value = arguments[0]; s.dispatchEvent(new Event('change'))",
        TWIN,
    )
    assert page.text("#comparing-with") == f"Each question also goes to {TWIN}."
    ask(page, QUESTION, max_tokens=20)
    page.until("return document.querySelectorAll('.answer:not(.busy) .column .figures li').length > 4")
    assert page.text(".column .of").split("\n") == [MODEL, f"{TWIN} ({MODEL})"]
    assert page.run("return [...document.querySelectorAll('.column > .prose')].every((one) => one.textContent)")
    left, right = (page.run("return document.querySelectorAll('.column')[arguments[0]].offsetLeft", i) for i in (0, 1))
    assert left < right
    page.run("const chats = JSON.parse(localStorage['headrace.chats']); window.first = chats[0].messages[1]")
    ask(page, "And of Italy?", max_tokens=20)
    page.until("return document.querySelectorAll('.answer').length === 2")
    page.until("return document.querySelectorAll('.answer:last-child:not(.busy) .column .figures li').length > 4")
    by_model = page.run("return window.sent.slice(2).map(({model, messages}) => [model, messages[1].content])")
    first = page.run("return [window.first.content, window.first.beside.content]")
    assert sorted(by_model) == sorted([[MODEL, first[0]], [TWIN, first[1]]])
    assert violations(page) == []
    page.look(width=320, height=700)
    assert page.run("return document.documentElement.scrollWidth") <= 320
    page.look()
    kept = page.run("return JSON.parse(localStorage['headrace.chats'])[0].messages[3].beside.content")
    page.run("document.querySelectorAll(\"[aria-label='Go on with this answer only']\")[3].click()")
    assert page.text(".answer:last-child > .prose").strip() == kept.strip()
    page.click("#stop-comparing")
    assert page.run("return document.getElementById('comparing').hidden")
    ask(page, "And of Spain?", max_tokens=8)
    page.until("return document.querySelectorAll('.answer').length === 3")
    page.until(DONE)
    assert page.run("return window.sent.length") == 5


def test_a_model_that_is_not_loaded_is_told_with_what_happens(page: Browser) -> None:
    told = page.run(
        """const { stateText } = await import('/console/models.js');
        return arguments[0].map((one) => stateText('large', one));""",
        [
            {"state": "loaded"},
            {"state": "unloaded"},
            {"state": "loading"},
            {"state": "failed", "problem": "no memory."},
            {"state": "gone"},
        ],
    )
    assert told == [
        "",
        "large is not loaded; the first question loads it.",
        "large is being loaded; a question waits for it.",
        "large could not be loaded: no memory; choose another model, or see the server’s log.",
        "large is not there any more; choose another model.",
    ]
    page.run(
        """const real = window.fetch;
        window.fetch = async (path, options) => {
          const response = await real(path, options);
          if (path !== 'v1/models') return response;
          const body = await response.json();
          body.data.find(({id}) => id === arguments[0]).state = 'unloaded';
          return new Response(JSON.stringify(body), {headers: response.headers});
        };
        const select = document.getElementById('model');
        select.value = arguments[0];
        select.dispatchEvent(new Event('change'));""".replace("arguments[0]", json.dumps(TWIN))
    )
    page.until("return document.querySelector('#model option:checked').textContent === 'twin (not loaded)'")
    assert page.text("#model-note") == "twin is not loaded; the first question loads it."


# --- files ------------------------------------------------------------------------------------------------------------


def test_text_files_go_with_the_question(page: Browser, served: Serve) -> None:
    page.run(RECORD)
    assert give_files(page, "drop", ("notes.md", "text/markdown", b"# Notes\n```\ncode\n```\n"), ("a.py", "", b"x = 1"))
    page.until("return document.querySelectorAll('.attached li').length === 2")
    assert page.text(".attached .chip") == "notes.md\n5 lines\na.py\n1 line"
    page.click("[aria-label='Remove a.py']")
    assert page.run("return document.activeElement.ariaLabel") == "Remove notes.md"
    ask(page, "What is in this file?", max_tokens=8)
    page.until(DONE)
    assert page.run("return window.sent[0].messages[0].content") == (
        "File notes.md:\n````\n# Notes\n```\ncode\n```\n````\n\nWhat is in this file?"
    )
    page.open(served.base_url + "/")
    page.until("return document.querySelector('.sent-files summary') !== null")
    page.click(".sent-files summary")
    assert page.text(".sent-files pre") == "# Notes\n```\ncode\n```\n"
    page.run("document.querySelector(\"[aria-label='Edit and ask again']\").click()")
    page.until("return document.querySelectorAll('.attached li').length === 1")
    page.click("[aria-label='Remove notes.md']")
    assert page.run("return document.activeElement.id") == "prompt"


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.bin", b"\x00\x01\xff", "“a.bin” is neither an image that this browser can read nor text in UTF-8."),
        ("b.bin", b"a\x00b", "“b.bin” is neither an image that this browser can read nor text; attach its text."),
        ("c.pdf", b"%PDF-1.7 a", "“c.pdf” is neither an image that this browser can read nor text; attach its text."),
        ("d.log", b"a" * 200_001, "“d.log” has more than 200,000 characters; attach the part that matters."),
    ],
)
def test_a_file_that_is_no_text_is_refused_in_a_sentence(
    page: Browser, name: str, content: bytes, problem: str
) -> None:
    give_files(page, "drop", (name, "", content))
    page.until("return document.getElementById('attach-problem').textContent !== ''")
    assert page.text("#attach-problem") == problem
    assert page.run("return document.querySelectorAll('.attached li').length") == 0


# --- the list ---------------------------------------------------------------------------------------------------------


def test_conversations_are_found_by_their_words_and_have_names(page: Browser, served: Serve) -> None:
    put(page, talk("a", "About mills", "A water mill grinds corn."), talk("b", "About rivers", "The Rhine is long."))
    titles = "return [...document.querySelectorAll('#chats .title')].map((one) => one.textContent)"
    assert page.run(titles) == ["About mills", "About rivers"]
    page.type("#search", "GRINDS water")
    assert page.run(titles) == ["About mills"]
    assert "grinds corn" in page.text("#chats .snippet")
    assert page.text("#chats-told") == "1 conversation found."
    page.type("#search", " Rhine")
    assert page.run(titles) == []
    assert page.text("#chats-told") == "No conversation has these words."
    page.type("#search", "", then="Escape")
    assert page.run(titles) == ["About mills", "About rivers"]
    page.run("document.querySelector(\"[aria-label='Rename “About rivers”']\").click()")
    assert page.run("return document.activeElement.ariaLabel") == "New name of “About rivers”"
    page.type("#chats input", "", then="Escape")
    assert page.run(titles) == ["About mills", "About rivers"]
    page.run("document.querySelector(\"[aria-label='Rename “About rivers”']\").click()")
    page.run("document.querySelector('#chats input').value = ''")
    page.type("#chats input", "Geography <b>", then="Enter")
    assert page.run(titles) == ["About mills", "Geography <b>"]
    page.open(served.base_url + "/")
    is_ready(page, 2)
    assert page.run(titles) == ["About mills", "Geography <b>"]
    page.type("#search", "geo")
    assert page.run(titles) == ["Geography <b>"]
    assert violations(page) == []


def test_conversations_move_to_another_browser(page: Browser, served: Serve, tmp_path: Path) -> None:
    chat = talk("a", "About mills", "A water mill grinds corn.", "More", "Wheels turn.")
    chat["title"] = "Mills"
    chat["messages"][0]["files"] = [{"name": "a.txt", "text": "x"}]
    chat["messages"][0]["images"] = [{"id": "i", "name": "i.png", "width": 1, "height": 1, "thumbnail": DRAWN}]
    chat["messages"][3]["versions"] = [[{"role": "assistant", "content": "Stones turn."}], None]
    chat["messages"][3]["beside"] = {"role": "assistant", "content": "Water runs.", "model": TWIN}
    put(page, chat)
    saved = page.run(
        """const { KeptImages } = await import('/console/images.js');
        await new KeptImages().addUrl('i', arguments[0]);
        HTMLAnchorElement.prototype.click = () => {};
        const saved = new Promise((resolve) => {
          URL.createObjectURL = (blob) => { resolve(blob.text()); return 'blob:none'; };
        });
        document.getElementById('export').click();
        return await saved;""",
        DRAWN,
    )
    page.until("return document.getElementById('chats-told').textContent === 'Exported 1 conversation.'")
    assert json.loads(saved)["images"] == {"i": DRAWN}
    path = tmp_path / "chats.json"
    path.write_text(saved)
    page.type("#import-file", str(path))
    page.until("return document.getElementById('chats-told').textContent === 'Imported 0; 1 was here already.'")
    page.click("[aria-label='Delete “Mills”']")
    page.until("return JSON.parse(localStorage['headrace.chats']).length === 0")
    page.type("#import-file", str(path))
    page.until("return document.getElementById('chats-told').textContent === 'Imported 1.'")
    assert page.run(KEPT) == [chat]
    page.click("#chats a")
    page.until("return document.querySelector('.sent-images img')?.naturalWidth === 1")
    assert page.text(".column > .prose").split("\n") == ["Wheels turn.", "Water runs."]
    url = page.run(
        """const { KeptImages } = await import('/console/images.js');
        return Object.fromEntries(await new KeptImages().urlsOf([{images: [{id: 'i'}]}]));"""
    )
    assert url == {"i": DRAWN}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("no json", "This is no file of conversations: it is not JSON."),
        ('{"chats": []}', "This is no file of conversations; take one that “Export” has made."),
        (
            '{"format": "headrace-chats", "version": 2, "chats": []}',
            "This file was made by a newer console; update this server first.",
        ),
        (
            '{"format": "headrace-chats", "version": 1, "chats": [{"id": "a", "messages": []}]}',
            "A conversation in this file is damaged: it has no id or no messages.",
        ),
        (
            '{"format": "headrace-chats", "version": 1, "chats": [{"id": "a", "messages": [{"role": "system"}]}]}',
            "A message in this file is damaged: it has no known role.",
        ),
    ],
)
def test_a_file_that_cannot_be_imported_is_told(page: Browser, tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "file.json"
    path.write_text(content)
    page.type("#import-file", str(path))
    page.until("return document.getElementById('chats-told').textContent === arguments[0]", problem)
    assert page.run(KEPT) == []


def test_an_imported_file_brings_nothing_but_conversations(page: Browser, tmp_path: Path) -> None:
    hostile = talk("a", "<img src=x onerror=alert(1)>", "<script>alert(2)</script>")
    hostile["extra"] = {"onclick": "alert(3)"}
    hostile["messages"][0]["images"] = [{"id": "i", "name": "n", "thumbnail": "https://elsewhere.example/i.png"}]
    hostile["messages"][1] |= {
        "usage": "alert(4)",
        "calls": [{"name": 7, "args": "x"}],
        "versions": "none",
        "__proto__": 1,
    }
    path = tmp_path / "file.json"
    images = {"i": "https://elsewhere.example/j.png", "j": "data:text/html;base64,eA==", "k": 'data:image/png;base64,"'}
    path.write_text(json.dumps({"format": "headrace-chats", "version": 1, "chats": [hostile], "images": images}))
    page.type("#import-file", str(path))
    page.until("return document.getElementById('chats-told').textContent === 'Imported 1.'")
    page.click("#chats a")
    page.until("return document.querySelectorAll('.message').length === 2")
    assert page.run("return document.querySelectorAll('#messages :is(img, script)').length") == 0
    [chat] = page.run(KEPT)
    assert chat.keys() == {"id", "messages"}
    assert chat["messages"][0] == {"content": "<img src=x onerror=alert(1)>", "role": "user"}
    assert chat["messages"][1] == {
        "content": "<script>alert(2)</script>",
        "role": "assistant",
        "calls": [{"id": "", "name": "", "args": "x"}],
    }


def test_all_fits_320_pixels(page: Browser) -> None:
    put(
        page,
        talk(
            "a",
            "A long name " * 20,
            "`" + "x" * 300 + "`\n\n|" + "cell|" * 30 + "\n|" + "---|" * 30 + "\n\n$$" + "x+" * 90 + "x$$",
        ),
    )
    page.look(width=320, height=640)
    page.click("#menu")
    page.until("return getComputedStyle(document.getElementById('sidebar')).visibility === 'visible'")
    assert page.run("return document.documentElement.scrollWidth") <= 320
    assert violations(page) == []
    page.run("document.querySelector('#chats a').click()")
    page.until("return document.querySelector('math') !== null")
    give_files(page, "drop", ("a-file-with-a-name-that-is-long.txt", "text/plain", b"x"))
    page.until("return document.querySelectorAll('.attached li').length === 1")
    assert page.run("return document.documentElement.scrollWidth") <= 320
    rows = "const range = new Range(); range.selectNodeContents(document.querySelector('.prose th'));"
    assert page.run(f"{rows} return range.getClientRects().length") == 1, "a table scrolls, and its words stay whole"
    page.click("#settings-toggle")
    page.run("document.querySelector('.more').open = true")
    assert page.run("return document.documentElement.scrollWidth") <= 320
    assert page.run("const one = document.getElementById('settings'); return one.scrollWidth <= one.clientWidth")
