"""The web console in a browser, for tests: a fresh page, questions, and files that are pasted or dropped."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser import Browser
from tests.e2e.serving import Serve

AXE = Path(__file__).parents[2] / ".make/axe/axe.min.js"
DONE = "return document.querySelector('.answer:last-child:not(.busy) .figures li') !== null"
"""Whether the last answer is complete."""
RECORD = """window.sent = [];
const real = window.fetch;
window.fetch = (path, options) => {
  if (options?.body) window.sent.push(JSON.parse(options.body));
  return real(path, options);
};"""
"""Has the page keep the bodies that it sends in `window.sent`."""
_FORGET = """localStorage.clear();
sessionStorage.clear();
await new Promise((resolve) => {
  const opening = indexedDB.open('headrace', 1);
  opening.onupgradeneeded = () => opening.result.createObjectStore('images');
  opening.onsuccess = () => {
    const transaction = opening.result.transaction('images', 'readwrite');
    transaction.objectStore('images').clear();
    transaction.oncomplete = () => { opening.result.close(); resolve(); };
  };
});"""
_GIVE = """const [kind, given] = arguments;
const data = new DataTransfer();
for (const [name, type, text] of given) {
  data.items.add(new File([Uint8Array.from(atob(text), (one) => one.charCodeAt(0))], name, {type}));
}
const more = kind === 'paste' ? {clipboardData: data} : {dataTransfer: data};
const Kind = kind === 'paste' ? ClipboardEvent : DragEvent;
const event = new Kind(kind, {bubbles: true, cancelable: true, ...more});
document.getElementById('prompt').dispatchEvent(event);
return event.defaultPrevented;"""


def fresh_page(served: Serve, tab: Browser, num_models: int = 1) -> Iterator[Browser]:
    """The page with nothing stored. At its end: no complaint on the console, no request to anybody else."""
    tab.look()
    tab.open(served.base_url + "/")
    tab.run(_FORGET)
    tab.complaints()
    tab.requests()
    tab.open(served.base_url + "/")
    is_ready(tab, num_models)
    yield tab
    complaints = tab.complaints()
    assert not complaints, complaints
    elsewhere = {url for url in tab.requests() if not url.startswith(served.base_url + "/")}
    assert not elsewhere


def is_ready(page: Browser, num_models: int = 1) -> None:
    """Wait until the page knows the models and the sampling fields."""
    page.until(
        """return document.querySelectorAll('#model option').length === arguments[0]
          && document.getElementById('setting-max_tokens') !== null""",
        num_models,
    )


def load_colours_and_formulas(page: Browser) -> None:
    """Have the page load what colours code and sets formulas. Texts that are shown later have both at once."""
    page.run(
        """const { render } = await import('/console/markdown.js');
        window.first = document.createElement('div');
        render(window.first, arguments[0]);""",
        "$x$\n\n```js\nconst\n```",
    )
    page.until("return ['math', '.code-keyword'].every((one) => window.first.querySelector(one) !== null)")


def ask(page: Browser, text: str, *, max_tokens: int = 40, min_tokens: int | None = None) -> None:
    """Ask greedily, with a limited length, and a least one if given."""
    page.run(
        """const all = {temperature: '0', max_tokens: String(arguments[0]), min_tokens: String(arguments[1] ?? '')};
        for (const [name, value] of Object.entries(all)) {
          const field = document.getElementById(`setting-${name}`);
          field.value = value;
          field.dispatchEvent(new Event('input'));
        }""",
        max_tokens,
        min_tokens,
    )
    page.type("#prompt", text, then="Enter")


def violations(page: Browser) -> list[str]:
    """What the page does that axe-core's rules forbid: those of WCAG 2.2 A and AA, and its best practices. Colours that
    are changing are awaited."""
    if not AXE.is_file():
        pytest.skip("axe-core is not there; make .make/axe/.done fetches it")
    if not page.run("return Boolean(window.axe)"):
        page.run(AXE.read_text())
    return list(
        page.run(
            """const ends = ({effect}) => effect.getComputedTiming().endTime < Infinity;
            await Promise.allSettled(document.getAnimations().filter(ends).map(({finished}) => finished));
            const found = await axe.run(document, {resultTypes: ['violations']});
            return found.violations.flatMap(({id, nodes}) => nodes.map(
              (node) => `${id}: ${node.target.join(' ')}: ${node.failureSummary.replace(/\\s+/g, ' ')}`));"""
        )
    )


def give_files(page: Browser, kind: str, *files: tuple[str, str, bytes]) -> bool:
    """Paste or drop (`kind`) files, each a name, a type and its content. Whether the page has taken the event."""
    given = [(name, media_type, base64.b64encode(data).decode()) for name, media_type, data in files]
    return bool(page.run(_GIVE, kind, given))
