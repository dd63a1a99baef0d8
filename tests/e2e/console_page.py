"""The web console in a browser, for tests: a fresh page, questions, and files that are pasted or dropped."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from tests.browser import Browser
from tests.e2e.serving import Serve

DONE = "return document.querySelector('.answer:last-child:not(.busy) .figures div') !== null"
"""Whether the last answer is complete."""
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


def fresh_page(served: Serve, tab: Browser) -> Iterator[Browser]:
    """The page with nothing stored. At its end: no complaint on the console, no request to anybody else."""
    tab.look()
    tab.open(served.base_url + "/")
    tab.run(_FORGET)
    tab.complaints()
    tab.requests()
    tab.open(served.base_url + "/")
    tab.until("return document.querySelectorAll('#model option').length === 1")
    yield tab
    assert tab.complaints() == []
    elsewhere = {url for url in tab.requests() if not url.startswith(served.base_url + "/")}
    assert not elsewhere


def ask(page: Browser, text: str, *, max_tokens: int = 40) -> None:
    """Ask greedily, with a limited length."""
    page.run(
        """const all = {temperature: '0', max_tokens: String(arguments[0])};
        for (const [name, value] of Object.entries(all)) {
          const field = document.getElementById(`setting-${name}`);
          field.value = value;
          field.dispatchEvent(new Event('input'));
        }""",
        max_tokens,
    )
    page.type("#prompt", text, then="Enter")


def give_files(page: Browser, kind: str, *files: tuple[str, str, bytes]) -> bool:
    """Paste or drop (`kind`) files, each a name, a type and its content. Whether the page has taken the event."""
    given = [(name, media_type, base64.b64encode(data).decode()) for name, media_type, data in files]
    return bool(page.run(_GIVE, kind, given))
