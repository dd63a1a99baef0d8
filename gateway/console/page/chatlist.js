// The list of conversations at the side: search, names, export and import.

import { h, icon, ICONS, say } from "./dom.js";
import { search, titleOf } from "./talk.js";

const $ = (id) => document.getElementById(id);

export class ChatList {
  /**
   * `open`, `remove`, `rename` and `add` act on conversations; `urlsOf` gives the URLs of all images of conversations.
   */
  constructor(acts) {
    this.acts = acts;
    this.list = $("chats");
    this.told = $("chats-told");
    this.chats = [];
    $("search").addEventListener("input", () => this.#draw(true));
    $("search").addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || !$("search").value) return;
      event.stopPropagation();
      this.#forgetSearch();
    });
    $("export").addEventListener("click", () => this.#export());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import($("import-file").files[0]));
  }

  /** Show these conversations. `shown` is the one that is open; `isBusy` tells which are being answered. */
  show(chats, shown, isBusy) {
    Object.assign(this, { chats, shown, isBusy });
    if (!this.list.querySelector("input")) this.#draw(false); // a name is being written
  }

  #forgetSearch() {
    $("search").value = "";
    this.#draw(true);
  }

  #draw(tells) {
    const text = $("search").value;
    const found = search(this.chats, text);
    this.list.replaceChildren(...found.map(([chat, snippet]) => this.#item(chat, snippet)));
    if (!tells) return;
    const count = found.length === 1 ? "1 conversation" : `${found.length} conversations`;
    say(this.told, text.trim() ? (found.length ? `${count} found.` : "No conversation has these words.") : "");
  }

  #item(chat, snippet) {
    const title = titleOf(chat);
    const isShown = chat === this.shown;
    const button = (label, path, act) => h("button", { type: "button", class: "quiet", "aria-label": `${label} “${title}”`, title: label, onclick: act }, icon(path));
    const link = h(
      "a",
      { href: "#chat", "aria-current": isShown ? "true" : null, onclick: () => this.acts.open(chat) },
      h("span", { class: "title" }, title),
      snippet && h("span", { class: "snippet" }, snippet),
    );
    const item = h(
      "li",
      { class: this.isBusy(chat) ? "busy" : null },
      link,
      button("Rename", ICONS.edit, () => this.#rename(chat, item)),
      button("Delete", ICONS.remove, () => this.acts.remove(chat)),
    );
    return item;
  }

  #rename(chat, item) {
    const title = titleOf(chat);
    const field = h("input", { type: "text", maxlength: "200", "aria-label": `New name of “${title}”`, value: chat.title || title });
    let isOver = false;
    const end = (keeps) => {
      if (isOver) return;
      isOver = true;
      field.remove();
      if (keeps) this.acts.rename(chat, field.value.trim());
      this.#draw(false);
      this.list.children[search(this.chats, $("search").value).findIndex(([one]) => one === chat)]?.querySelector("a").focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.isComposing) end(true);
      if (event.key !== "Escape") return;
      event.stopPropagation();
      end(false);
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.focus();
    field.select();
  }

  async #export() {
    const chats = this.chats.filter((chat) => chat.messages.length);
    if (!chats.length) return say(this.told, "There is no conversation to export.");
    const { exported } = await import("./transfer.js");
    const text = exported(chats, await this.acts.urlsOf(chats));
    const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
    const day = new Date().toISOString().slice(0, 10);
    h("a", { href: url, download: `headrace-chats-${day}.json` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
    say(this.told, `Exported ${chats.length === 1 ? "1 conversation" : `${chats.length} conversations`}.`);
  }

  async #import(file) {
    $("import-file").value = "";
    if (!file) return;
    try {
      const { imported } = await import("./transfer.js");
      const { chats, images } = imported(await file.text());
      const known = new Set(this.chats.map(({ id }) => id));
      const fresh = chats.filter(({ id }) => !known.has(id));
      await this.acts.add(fresh, images);
      const were = chats.length - fresh.length;
      say(this.told, `Imported ${fresh.length}${were ? `; ${were} ${were === 1 ? "was" : "were"} here already` : ""}.`);
    } catch (error) {
      say(this.told, error instanceof SyntaxError ? error.message : "This file cannot be read; export it again.");
    }
  }
}
